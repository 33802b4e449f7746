"""A comparison of jobs, for people and programs: a table, `sweep.csv`, `sweep.json`, `sweep.png`.

In: rows. Out: the table on a console and the files in a folder, each whole or as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pcgsvc.report.costs import weigh
from pcgsvc.report.files import write_json, write_whole
from pcgsvc.report.plots import has_matplotlib, not_drawn, png_of
from pcgsvc.report.rows import Row
from pcgsvc.report.sweep import show_jobs
from pcgsvc.report.sweep_files import csv_of, tree_of

logger = logging.getLogger(__name__)


def show_and_write(out: Console, title: str, rows: Sequence[Row], folder: Path) -> None:
    """Print the table and write the files.

    Args:
        out: where the table goes.
        title: above table and plots.
        rows: at least one.
        folder: made if there is none.
    """
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
