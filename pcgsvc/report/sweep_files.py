"""The comparison of jobs as files: `sweep.json` and `sweep.csv`.

In: jobs. Out: a tree of JSON types, and text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from pcgsvc.report.columns import TIMES, figures_of, flat
from pcgsvc.report.costs import Job
from pcgsvc.version import __version__

SCHEMA = 1


def tree_of(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return everything of the comparison as JSON types."""
    return {
        "schema": SCHEMA,
        "kind": "comparison",
        "pcgsvc": __version__,
        "num_jobs": len(jobs),
        "num_done": sum(job.row.ok for job in jobs),
        "pareto": {
            "minimised": ["memory_bytes", "mean_us.decode"],
            "jobs": [job.row.name for job in jobs if job.front],
        },
        "jobs": [figures_of(job) for job in jobs],
    }


def csv_of(tree: Mapping[str, Any]) -> str:
    """Return the comparison as CSV: one line per job, nested names dotted, lists by spaces.

    Times stand in columns such as `step_us.piecewise.8`. What a job does not have is empty.
    """
    lines = [_line(figures) for figures in tree["jobs"]]
    times = {
        f"{name}.{step['mode']}.{step['size']}": (TIMES.index(name), step["mode"], step["size"])
        for figures in tree["jobs"]
        for step in figures.get("steps", [])
        for name in TIMES
    }
    names = list(dict.fromkeys(name for line in lines for name in line if name not in times))
    out = io.StringIO()
    writer = csv.DictWriter(
        out, [*names, *sorted(times, key=times.__getitem__)], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _line(figures: Mapping[str, Any]) -> dict[str, Any]:
    line = {"job": figures["job"], **figures["differs"]}
    line |= {name: _cell(value) for name, value in flat(figures).items()}
    for step in figures.get("steps", []):
        line |= {f"{name}.{step['mode']}.{step['size']}": _cell(step[name]) for name in TIMES}
    return line


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(
            f"{v['size']}:{v['reason']}" if isinstance(v, Mapping) else str(v) for v in value
        )
    if isinstance(value, Mapping):  # an empty one
        return ""
    return "" if value is None else value
