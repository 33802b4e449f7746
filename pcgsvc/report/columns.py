"""Columns of the tables that people read.

In: rows of figures by name. Out: text per row and column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: which figures of a row it shows, and how."""

    header: str
    """With the unit."""
    figures: tuple[str, ...]
    text: Callable[..., str]
    """Makes text of the figures' values; None stands for one that a row does not have."""
    weight: int = 0
    """In a narrow terminal, columns of the least weight go first."""
    legend: str = ""
    """Explains it below the table."""
    when: Callable[[Figures], bool] = lambda row: True
    """It is shown where this holds for any row."""
    left: bool = False

    def cell(self, row: Figures) -> str:
        """Return the text for one row."""
        return self.text(*(row.get(name) for name in self.figures))


def shown(columns: Sequence[Column], rows: Sequence[Figures]) -> list[Column]:
    """Return the columns that tell something of these rows."""
    return [column for column in columns if any(map(column.when, rows))]


def table_of(columns: Sequence[Column], **style: Any) -> Table:
    """Return a table without rows, whose cells are never wrapped; `style` is rich's."""
    table = Table(box=None, header_style="bold", **style)
    for column in columns:
        table.add_column(column.header, justify="left" if column.left else "right", no_wrap=True)
    return table


def written(template: str) -> Callable[..., str]:
    """Return a text of values that is empty where one is missing."""
    return lambda *values: "" if None in values else template.format(*values)


def mib(num_bytes: int | None) -> str:
    """Return bytes in MiB, without the unit."""
    return "" if num_bytes is None else f"{num_bytes / 2**20:.1f}"
