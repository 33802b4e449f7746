"""A comparison of jobs, for people and programs: a table, `sweep.csv`, `sweep.json`, `sweep.png`.

In: rows. Out: the table on a console and the files in a folder, each whole or as it was.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from pcgsvc.report.comparison_table import show_jobs
from pcgsvc.report.costs import Job, weigh
from pcgsvc.report.figures import TIMES, figures_of, flat
from pcgsvc.report.files import write_json, write_whole
from pcgsvc.report.plots import has_matplotlib, not_drawn, png_of
from pcgsvc.report.rows import Row
from pcgsvc.version import __version__

logger = logging.getLogger(__name__)
SCHEMA = 1
"""Of `sweep.json`."""


def show_and_write(out: Console, title: str, rows: Sequence[Row], folder: Path) -> None:
    """Print the table of one job or more, and write the files into a folder, made if need be."""
    jobs = weigh(rows)
    tree = tree_of(jobs)
    table, figures, picture = (folder / f"sweep.{kind}" for kind in ("csv", "json", "png"))
    written = [table, figures]
    write_whole(table, csv_of(tree).encode())
    write_json(figures, tree)
    show_jobs(out, title, jobs)
    if not any(row.facts is not None and row.facts.graphs is not None for row in rows):
        picture.unlink(missing_ok=True)  # of an earlier one
        logger.info("sweep.png: no job captured graphs, so there is nothing to draw")
    elif has_matplotlib():
        written.append(picture)
        write_whole(picture, png_of(title, jobs))
    else:
        logger.warning("%s", not_drawn(picture.name))
    places = ", ".join(path.name for path in written)
    out.print(f"[bold]written[/]   {escape(places)} in {escape(str(folder))}", soft_wrap=True)


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
    jobs = tree["jobs"]
    entries = sorted({(s["mode"], s["size"]) for job in jobs for s in job.get("steps", [])})
    times = [_time(name, *entry) for name in TIMES for entry in entries]
    lines = [_line(job) for job in jobs]
    names = dict.fromkeys(name for line in lines for name in line if name not in times)
    out = io.StringIO()
    writer = csv.DictWriter(out, [*names, *times], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _line(figures: Mapping[str, Any]) -> dict[str, Any]:
    line = {"job": figures["job"], **figures["differs"]}
    line |= {name: _cell(value) for name, value in flat(figures).items()}
    for step in figures.get("steps", []):
        line |= {_time(name, step["mode"], step["size"]): _cell(step[name]) for name in TIMES}
    return line


def _time(name: str, mode: str, size: int) -> str:
    return f"{name}.{mode}.{size}"


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(
            f"{v['size']}:{v['reason']}" if isinstance(v, Mapping) else str(v) for v in value
        )
    if isinstance(value, Mapping):  # an empty one
        return ""
    return "" if value is None else value
