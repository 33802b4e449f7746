"""What a sweep makes least: the figures of a job, and the best jobs' settings.

In: reports. Out: numbers for a sweeper, and YAML files that `--config-dir` takes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pcgsvc.config import Config, Job, Objective
from pcgsvc.errors import ConfigError
from pcgsvc.report.costs import Kind, Ladder, is_best
from pcgsvc.report.files import write_whole
from pcgsvc.report.rows import Facts, Row, facts_of

logger = logging.getLogger(__name__)

_KINDS: dict[Objective, Kind] = {Objective.DECODE_US: "decode", Objective.MIXED_US: "mixed"}
_HEAD = """\
# @package _global_
# The settings of job {name}; use them with --config-dir={folder} preset={stem}
"""


def check_objective(configs: Sequence[Config], sweeper: dict[str, Any]) -> None:
    """Refuse an objective that no job could have, and Optuna without one.

    Args:
        configs: every job, or the one that stands for what is the same in all.
        sweeper: `hydra.sweeper`.

    Raises:
        ConfigError: naming the setting.
    """
    config = configs[0]
    wanted = config.sweep.objective or []
    if any(other.sweep.objective != config.sweep.objective for other in configs):
        raise ConfigError(
            "sweep.objective: the jobs of a sweep have one in common; write several as "
            "sweep.objective='[memory,start_s]'."
        )
    timed = [objective.value for objective in wanted if objective in _KINDS]
    limits = {other.capture.max_size for other in configs}
    if timed and (None in limits or len(limits) > 1):
        raise ConfigError(
            f"capture.max_size: sweep.objective={timed[0]} is the mean over batches of 1 to that "
            "many tokens; set it, to the same in all jobs."
        )
    for other in configs:
        if timed and other.bench.enabled is False:
            raise ConfigError(
                f"bench.enabled: got false with sweep.objective={timed[0]}; leave it on."
            )
        if wanted and other.job is not Job.RUN:
            raise ConfigError(
                f"sweep.objective: job={other.job.value} has no such figures; use job=run."
            )
    if not str(sweeper.get("_target_")).endswith(".OptunaSweeper"):
        return
    if not wanted:
        raise ConfigError(
            "sweep.objective: hydra/sweeper=optuna needs one of "
            f"{', '.join(o.value for o in Objective)}, or a list."
        )
    direction = sweeper.get("direction")
    given = direction if isinstance(direction, list) else [direction]
    words = [str(getattr(each, "name", each)) for each in given]
    if words != ["minimize"] * len(wanted):
        needed = ",".join(["minimize"] * len(wanted))
        raise ConfigError(
            f"hydra.sweeper.direction: got {words} with {len(wanted)} in sweep.objective; set "
            f"hydra.sweeper.direction='[{needed}]'."
        )


def result_of(code: int, report: str | None, objective: Any) -> int | float | list[float]:
    """Return what a sweeper gets of a job: its objectives, else its exit code.

    A job that failed, or that has no figure for an objective, counts as infinite.

    Args:
        code: the job's exit code.
        report: path of its report; None: it wrote none.
        objective: `sweep.objective` as composed.
    """
    if not objective:
        return code
    wanted = [
        Objective(word) for word in ([objective] if isinstance(objective, str) else objective)
    ]
    values = [math.inf] * len(wanted)
    if code == 0 and report is not None:
        facts = facts_of(json.loads(Path(report).read_text()))
        values = [value_of(facts, objective) for objective in wanted]
        for objective, value in zip(wanted, values, strict=True):
            if value == math.inf:
                logger.warning(
                    "sweep.objective=%s: counts as infinite, since %s",
                    objective.value,
                    "no graphs were captured"
                    if objective is Objective.MEMORY
                    else "not every batch of 1 to capture.max_size tokens has a timed graph",
                )
    return values if len(values) > 1 else values[0]


def value_of(facts: Facts, objective: Objective) -> float:
    """Return the figure of a report; infinite where it has none."""
    if objective is Objective.START_S:
        return float(facts.report["compile"]["seconds"]["total"])
    if objective is Objective.MEMORY:
        return math.inf if facts.memory_bytes is None else float(facts.memory_bytes)
    ladder, kind = Ladder(facts), _KINDS[objective]
    limit = facts.report["config"]["capture"]["max_size"]
    found = [ladder.find(kind, tokens) for tokens in ladder.counts(kind, limit)]
    times = [math.inf if s is None or s.step_us is None else s.step_us for s in found]
    return sum(times) / len(times) if times else math.inf


def write_best(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the settings of the best job, or of each on the front of several objectives.

    Args:
        rows: jobs of one sweep, whose reports say the objective.
        folder: of the sweep; the files are `best/preset/best.yaml`, or `best_JOB.yaml`.
    """
    found: list[tuple[Row, dict[str, Any], list[float]]] = []
    for row in rows:
        tree = row.facts.report["config"] if row.ok and row.facts is not None else {}
        words = tree.get("sweep", {}).get("objective")
        if row.facts is not None and words:
            values = [value_of(row.facts, Objective(word)) for word in words]
            if math.inf not in values:
                found.append((row, tree, values))
    points = [values for _, _, values in found]
    best = [each for each in found if is_best(each[2], points)]
    if points and len(points[0]) == 1:
        best = best[:1]
    written = []
    for row, tree, values in best:
        stem = "best" if len(values) == 1 else f"best_{row.name}"
        path = folder / "best" / "preset" / f"{stem}.yaml"
        kept = {name: value for name, value in tree.items() if name not in ("sweep", "report")}
        head = _HEAD.format(name=row.name, folder=path.parents[1], stem=stem)
        write_whole(path, (head + OmegaConf.to_yaml(OmegaConf.create(kept))).encode())
        written.append(path)
    return written
