"""The table that compares jobs: one row per job.

In: jobs. Out: a table on a console.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pcgsvc.report.columns import Column, Figures, shown
from pcgsvc.report.costs import KINDS, Job
from pcgsvc.report.figures import COLUMNS, RECORDED, shown_figures
from pcgsvc.report.rows import Row

_GAP = 2
"""Characters between two columns, as rich sets them."""
_FOLDED = 32
"""Characters of a setting that stay on one line in a narrow terminal."""


def show_jobs(out: Console, title: str, jobs: Sequence[Job]) -> None:
    """Print one row per job, then what went wrong in those that failed."""
    size = _common_size(jobs)
    figures = [shown_figures(job, size) for job in jobs]
    columns = shown(COLUMNS, [row for row in figures if row])
    table = _table(jobs, columns, figures)
    while columns and _least_width(table) > out.width:
        columns.remove(min(columns, key=lambda column: column.weight))
        table = _table(jobs, columns, figures)
    out.print()
    out.print(title, style="bold")
    out.print(table)
    out.print(_legend(jobs, columns, size), style="dim")
    for row, _ in jobs:
        if row.reason:
            where = f" [{row.output}]" if row.output else ""
            out.print(
                f"job {row.name} {row.status}: {_first_line(row.reason)}{where}", markup=False
            )


def _common_size(jobs: Sequence[Job]) -> int | None:
    """Return the largest size that every job with any entry has captured."""
    ladders = [cost.ladder for _, cost in jobs if cost is not None]
    found = [{step.size for kind in KINDS for step in ladder.steps(kind)} for ladder in ladders]
    sizes = [one for one in found if one]
    return max(set.intersection(*sizes), default=None) if sizes else None


def _table(jobs: Sequence[Job], columns: Sequence[Column], figures: Sequence[Figures]) -> Table:
    lines = [_line(job, columns, row) for job, row in zip(jobs, figures, strict=True)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, header in enumerate(("job", "differs in", *(c.header for c in columns), "result")):
        cells = [line[at] for line in lines]
        folds = header == "differs in"
        width = max(len(cell) for cell in (header, *cells))
        word = max(len(word) for cell in cells for word in cell.split(" "))
        table.add_column(
            header,
            justify="left" if folds or header == "result" else "right",
            overflow="fold",
            no_wrap=not folds,
            min_width=min(word, _FOLDED) if folds else width,
        )
    for (row, _), line in zip(jobs, lines, strict=True):
        style = "" if row.ok else "red" if row.status == "failed" else "yellow"
        table.add_row(*(escape(cell) for cell in line), style=style)
    return table


def _line(job: Job, columns: Sequence[Column], figures: Figures) -> list[str]:
    row = job.row
    differs = " ".join(f"{key}={value}" for key, value in row.differs.items()) or "-"
    cells = [column.cell(figures) if figures else "" for column in columns]
    return [f"{row.name}*" if job.front else row.name, differs, *cells, _result(row)]


def _least_width(table: Table) -> int:
    """Return how many characters it needs; rich's own measure ends at the console's width."""
    gaps = _GAP * (len(table.columns) - 1)
    return sum(column.min_width or 0 for column in table.columns) + gaps


def _result(row: Row) -> str:
    if not row.ok:
        return row.status
    verified = row.facts.verified if row.facts is not None else None
    return "done" if not verified or not verified[1] else f"verified {verified[0]}/{verified[1]}"


def _first_line(text: str) -> str:
    """Return the first line; the files have the others."""
    first, more, _ = text.strip().partition("\n")
    return f"{first} …" if more else first


def _legend(jobs: Sequence[Job], columns: Sequence[Column], size: int | None) -> str:
    """Explain the columns that are there."""
    costs = [cost for _, cost in jobs if cost is not None]
    limit = max((cost.limit for cost in costs), default=0)
    at = f"{size} tokens" if size else "each job's largest size"
    words = [
        column.legend.format(limit=limit, at=at)
        for column in columns
        if column.legend and (limit or "{limit}" not in column.legend)
    ]
    if any(job.front for job in jobs):
        over = f" of batches of 1 to {limit} tokens" if limit else ""
        words.insert(0, f"*: on the Pareto front of memory and mean decode step{over}")
    if any(cost.facts.recorded for cost in costs):
        words.append(RECORDED)
    return "\n".join(words)
