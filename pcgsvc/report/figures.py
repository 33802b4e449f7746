"""What is known of each job of a comparison: every figure by name, and which of them people see.

In: a job. Out: its figures as JSON types, under the names that they have in `sweep.json` and
`sweep.csv`, and the columns that show some of them in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from pcgsvc.program.keys import flatten
from pcgsvc.report.columns import Column, Figures, mib, written
from pcgsvc.report.costs import KINDS, Job
from pcgsvc.report.rows import Facts, Step

TIMES = ("step_us", "step_low_us", "step_high_us", "host_us", "plain_us", "speedup")
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
        "host": row.host,
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
    report, dispatch = facts.report, facts.report.get("dispatch")
    figures: dict[str, Any] = {name: report[name] for name in ("pcgsvc", "torch", "device")}
    figures |= {group: {k: report[group][k] for k in names} for group, names in _PARTS.items()}
    figures["compile"] = {k: v for k, v in report["compile"].items() if k != "seconds"}
    figures["seconds"] = dict(report["compile"]["seconds"])
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
    figures["steps"] = [{"mode": s.mode, "size": s.size, **_times(s)} for s in facts.steps]
    return figures


_PARTS = {
    "mode": ("requested", "resolved", "decode", "mixed"),
    "partition": ("strategy", "num_regions", "num_boundaries", "num_unique_pieces"),
}
"""What is taken of these parts of a report."""


def _times(step: Step) -> dict[str, float | None]:
    return {name: getattr(step, name) for name in TIMES}


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures under dotted names, without the job's name, settings and entries."""
    return flatten({k: v for k, v in figures.items() if k not in ("job", "differs", "steps")})


def shown_figures(job: Job, size: int | None) -> dict[str, Any]:
    """Return a job's figures for the table: `flat` ones, and the times of an entry per kind.

    Args:
        job: one without a report has none.
        size: of the entries in rows; None: the job's largest.
    """
    if job.cost is None:
        return {}
    figures = flat(figures_of(job))
    for kind in KINDS:
        steps = job.cost.ladder.steps(kind)
        for step in [step for step in steps if step.size == size] if size else steps[-1:]:
            figures |= {f"{name}.{kind}": time for name, time in _times(step).items()}
    figures["timed"] = any(step.step_us is not None for step in job.cost.facts.steps)
    # Recorded graphs have no host time.
    figures["on_device"] = figures["timed"] and not job.cost.facts.recorded
    return figures


# ---- columns -------------------------------------------------------------------------------------


def _percent(*shares: float | None) -> str:
    """Return a share of decode batches and of all others, or one figure if they are equal."""
    words = ["-" if share is None else f"{100 * share:.0f}" for share in shares]
    return "/".join(dict.fromkeys(words))


def _us(time: float | None) -> str:
    return "" if time is None else f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def _unasked(row: Figures) -> bool:
    """Whether the mode is not as asked; else it is among the differences, or one for all."""
    return bool(row["mode.resolved"] != row["mode.requested"])


_START = "start: until the runner is ready"
_SERVED = (
    "served: by a graph, pad: rows of padding, batches of 1 to {limit} tokens counting equally"
)
_PER_STEP = "µs: per step at {at}; decode: uniform batches; x plain: times faster than the module"
_SPLIT_FIGURES = ("partition.num_regions", "partition.num_boundaries")
COLUMNS = (
    Column("mode", ("mode.resolved",), str, 4, when=_unasked),
    Column("split", _SPLIT_FIGURES, written("{}/{}"), 2, "split: regions/boundaries"),
    Column("kernels", ("compile.num_kernels",), written("{}"), 1),
    Column("graphs", ("graphs.num_graphs",), written("{}"), 8),
    Column("MiB", ("memory_bytes",), mib, 9, "MiB: what the graphs hold"),
    Column("start s", ("seconds.total", "compile.start"), written("{:.2f} {}"), 7, _START),
    Column("served %", ("served_share.decode", "served_share.mixed"), _percent, 5),
    Column("pad %", ("padding_share.decode", "padding_share.mixed"), _percent, 5, _SERVED),
    Column("decode µs", ("step_us.decode",), _us, 10, _PER_STEP, itemgetter("timed")),
    Column("mixed µs", ("step_us.mixed",), _us, 6, when=itemgetter("timed")),
    Column(
        "host µs",
        ("host_us.decode",),
        _us,
        3,
        "host: until it is enqueued",
        itemgetter("on_device"),
    ),
    Column("x plain", ("speedup.decode",), written("{:.2f}"), 7, when=itemgetter("timed")),
)
"""The columns between the job and its result; in legends `{limit}` stands for the largest batch
that was counted, and `{at}` for the size that was timed."""
