"""The comparison of jobs as files: `sweep.json` and `sweep.csv`.

In: rows and their costs. Out: plain trees of JSON types, and text. Knows nothing of Hydra or plots.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from pcgsvc.cache.reports import flatten
from pcgsvc.report.costs import Cost
from pcgsvc.report.rows import Facts, Row, Step
from pcgsvc.version import __version__

SCHEMA = 1


def tree_of(rows: Sequence[Row], costs: Sequence[Cost | None]) -> dict[str, Any]:
    """Return everything of the comparison as JSON types."""
    return {
        "schema": SCHEMA,
        "kind": "comparison",
        "pcgsvc": __version__,
        "num_jobs": len(rows),
        "num_done": sum(row.ok for row in rows),
        "pareto": {
            "minimised": ["memory_bytes", "mean_us.decode"],
            "jobs": [r.name for r, c in zip(rows, costs, strict=True) if c is not None and c.front],
        },
        "jobs": [_job(row, cost) for row, cost in zip(rows, costs, strict=True)],
    }


def _job(row: Row, cost: Cost | None) -> dict[str, Any]:
    tree: dict[str, Any] = {
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
    if row.facts is not None:
        tree |= _facts(row.facts)
    if cost is not None:
        tree |= {
            "mean_us": dict(cost.mean_us),
            "padding_share": dict(cost.padding),
            "served_share": dict(cost.served),
            "counted_up_to": cost.limit,
            "memory_bytes": cost.memory_bytes,
            "pareto": cost.front,
        }
    return tree


def _facts(facts: Facts) -> dict[str, Any]:
    report = facts.report
    partition, compiled, dispatch = report["partition"], report["compile"], report.get("dispatch")
    tree: dict[str, Any] = {
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
        tree["graphs"] = dict(facts.graphs)
    if facts.verified is not None:
        errors = [row.get("max_rel_err", 0.0) for row in report["verify"]]
        tree["verify"] = {
            "num_ok": facts.verified[0],
            "num_entries": facts.verified[1],
            "max_rel_err": max(errors, default=0.0),
        }
    if isinstance(dispatch, Mapping) and "padding_share" in dispatch:
        tree["dispatch"] = {"padding_share": dispatch["padding_share"]}  # of the calls it served
    tree["steps"] = [_step(step) for step in facts.steps]
    return tree


def _step(step: Step) -> dict[str, Any]:
    return {
        "mode": step.mode,
        "size": step.size,
        "step_us": step.step_us,
        "host_us": step.host_us,
        "plain_us": step.plain_us,
        "speedup": step.speedup,
    }


# ---- csv -----------------------------------------------------------------------------------------


def csv_of(tree: Mapping[str, Any]) -> str:
    """Return the comparison as CSV: one line per job, nested names dotted, lists by spaces.

    Times stand in columns such as `step_us.piecewise.8`. What a job does not have is empty.
    """
    lines = [_flat(job) for job in tree["jobs"]]
    names = list(dict.fromkeys(name for line in lines for name in line))
    steps = [name for name in names if name.startswith(_TIMES)]
    out = io.StringIO()
    writer = csv.DictWriter(
        out,
        [n for n in names if n not in steps] + sorted(steps, key=_by_size),
        lineterminator="\n",
    )
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


_TIMES = ("step_us.", "host_us.", "plain_us.", "speedup.")


def _flat(job: Mapping[str, Any]) -> dict[str, Any]:
    settings = job["differs"]
    rest = {k: v for k, v in job.items() if k not in ("job", "differs", "steps")}
    line = {"job": job["job"], **settings, **{k: _cell(v) for k, v in flatten(rest).items()}}
    for step in job.get("steps", []):
        for name in _TIMES:
            line[f"{name}{step['mode']}.{step['size']}"] = _cell(step[name[:-1]])
    return line


def _by_size(name: str) -> tuple[int, str, int]:
    time, mode, size = name.split(".")
    return _TIMES.index(f"{time}."), mode, int(size)


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(
            f"{v['size']}:{v['reason']}" if isinstance(v, Mapping) else str(v) for v in value
        )
    if isinstance(value, Mapping):  # an empty one
        return ""
    return "" if value is None else value
