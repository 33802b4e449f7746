"""What is known of each job of a comparison: the figures by name, and how people see them.

In: a job and its cost. Out: its figures as JSON types, under the names that `sweep.json` and
`sweep.csv` give them, and the list of columns that show some of them in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pcgsvc.cache.reports import flatten
from pcgsvc.report.costs import KINDS, Job
from pcgsvc.report.rows import Facts, Step

TIMES = ("step_us", "host_us", "plain_us", "speedup")
"""The figures of a captured entry, after its mode and size."""
RECORDED = "recorded graphs are the CPU's stand-in and say nothing of CUDA graphs' speed"


# ---- figures -------------------------------------------------------------------------------------


def figures_of(job: Job) -> dict[str, Any]:
    """Return everything that is known of a job; without a report, that is its row alone."""
    row, cost = job
    figures: dict[str, Any] = {
        "job": row.name,
        "differs": dict(row.differs),
        "status": row.status,
        "reason": row.reason,
        "overrides": list(row.overrides),
        "report": row.place,
        "output": row.output,
        "wall_s": row.wall_s,
        "peak_host_bytes": row.peak_host_bytes,
    }
    if cost is None:
        return figures
    return {
        **figures,
        **_reported(cost.facts),
        "mean_us": dict(cost.mean_us),
        "padding_share": dict(cost.padding),
        "served_share": dict(cost.served),
        "counted_up_to": cost.limit,
        "memory_bytes": cost.facts.memory_bytes,
        "pareto": cost.front,
    }


def _reported(facts: Facts) -> dict[str, Any]:
    """Return what the job's report says."""
    report = facts.report
    partition, compiled, dispatch = report["partition"], report["compile"], report.get("dispatch")
    figures: dict[str, Any] = {
        "pcgsvc": report["pcgsvc"],
        "torch": report["torch"],
        "device": report["device"],
        "mode": {k: report["mode"][k] for k in ("requested", "resolved", "decode", "mixed")},
        "partition": {
            key: partition[key]
            for key in ("strategy", "num_regions", "num_boundaries", "num_unique_pieces")
        },
        "compile": {k: v for k, v in compiled.items() if k != "seconds"},
        "seconds": dict(compiled["seconds"]),
    }
    if facts.graphs is not None:
        figures["graphs"] = dict(facts.graphs)
    if facts.verified is not None:
        errors = [row.get("max_rel_err", 0.0) for row in report["verify"]]
        figures["verify"] = {
            "num_ok": facts.verified[0],
            "num_entries": facts.verified[1],
            "max_rel_err": max(errors, default=0.0),
        }
    if isinstance(dispatch, Mapping) and "padding_share" in dispatch:
        figures["dispatch"] = {"padding_share": dispatch["padding_share"]}  # of the calls it served
    figures["steps"] = [
        {"mode": step.mode, "size": step.size, **_times(step)} for step in facts.steps
    ]
    return figures


def _times(step: Step) -> dict[str, float | None]:
    return {name: getattr(step, name) for name in TIMES}


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures under dotted names, without settings and without single entries."""
    return flatten({k: v for k, v in figures.items() if k not in ("differs", "steps")})


# ---- columns -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    header: str
    """With the unit."""
    figures: tuple[str, ...]
    """What it shows, by their names in `shown_figures`."""
    text: Callable[..., str]
    """Makes text of the figures' values; None stands for one that the job does not have."""
    weight: int
    """In a narrow terminal, columns of the least weight go first."""
    legend: str = ""
    """Explains it; `{limit}` and `{at}` stand for the largest batch counted and the size timed."""

    def cell(self, figures: Mapping[str, Any]) -> str:
        """Return the text for one job."""
        return self.text(*(figures.get(name) for name in self.figures))


def shown_figures(job: Job, size: int | None) -> dict[str, Any]:
    """Return a job's figures for `Column.cell`: `flat` ones, and the times of an entry per kind.

    Args:
        job: with a report or without.
        size: of the entries in rows; None: the job's largest.
    """
    figures = flat(figures_of(job))
    if job.cost is not None:
        for kind in KINDS:
            steps = job.cost.ladder.steps(kind)
            found = [step for step in steps if step.size == size] if size else steps[-1:]
            for step in found:
                figures |= {f"{name}.{kind}": time for name, time in _times(step).items()}
    return figures


def _as(template: str) -> Callable[..., str]:
    """Return a text of values that is empty where one is missing."""
    return lambda *values: "" if None in values else template.format(*values)


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:.1f}"


def _percent(*shares: float | None) -> str:
    """Return a share of decode batches and of all others, or one figure if they are equal."""
    words = ["-" if share is None else f"{100 * share:.0f}" for share in shares]
    return "/".join(dict.fromkeys(words))


def _us(time: float | None) -> str:
    return "" if time is None else f"{time:.0f}" if time >= 100 else f"{time:.1f}"


MODE = Column("mode", ("mode.resolved",), _as("{}"), 4)
"""Shown where a mode is not the one asked for: else it is among the differences, or one for all."""
COLUMNS = (
    Column("reg/bound", ("partition.num_regions", "partition.num_boundaries"), _as("{}/{}"), 2),
    Column("kernels", ("compile.num_kernels",), _as("{}"), 1),
    Column("graphs", ("graphs.num_graphs",), _as("{}"), 8),
    Column("MiB", ("memory_bytes",), _mib, 9, "MiB: what the graphs hold"),
    Column(
        "start s",
        ("seconds.total", "compile.start"),
        _as("{:.2f} {}"),
        7,
        "start: until the runner is ready",
    ),
    Column("served %", ("served_share.decode", "served_share.mixed"), _percent, 5),
    Column(
        "pad %",
        ("padding_share.decode", "padding_share.mixed"),
        _percent,
        5,
        "served: by a graph, pad: rows of padding, batches of 1 to {limit} tokens counting equally",
    ),
)
TIMED = (
    Column(
        "decode µs",
        ("step_us.decode",),
        _us,
        10,
        "µs: per step at {at}; decode: uniform batches; host: until it is enqueued; x plain: times "
        "faster than the module",
    ),
    Column("mixed µs", ("step_us.mixed",), _us, 6),
    Column("host µs", ("host_us.decode",), _us, 3),
    Column("x plain", ("speedup.decode",), _as("{:.2f}"), 7),
)
"""Shown where any job was timed."""
