"""What a person reads of a plan on a terminal.

In: the report's `plan`. Out: text on a console. Knows nothing of how the figures came about.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_LABEL = 9
"""Columns of the label before each fact, as in `tables`."""
_MOST_OPS = 8
"""Ops that are named of a piece; the rest are counted."""


def show_plan(out: Console, plan: dict[str, Any]) -> None:
    """Print what `job=plan` found beyond the split."""
    _rows(out, "ops", [escape(ops_words(kind)) for kind in plan["kinds"]])
    _rows(out, "why", [escape(plan["mode"])])
    _rows(out, "support", [escape(support_words(row)) for row in plan["support"]])
    others = [
        f"{asked} -> {got['resolved']}"
        for asked, got in plan["modes"].items()
        if got["resolved"] != asked
    ]
    _rows(out, "", [f"other modes: {', '.join(others)}"] if others else [])
    _rows(out, "graphs", [graphs_words(plan["graphs"])])
    skipped = plan["graphs"]["skipped"]
    _rows(out, "skipped", [escape(f"size {s['size']}: {s['reason']}") for s in skipped])
    modules = module_words(plan["compile_modules"])
    _rows(out, "compiled", [escape(modules)] if modules else [])
    _memory(out, plan["memory"])
    _rows(out, "note", [escape(n) for n in [*plan["notes"], *plan["memory"]["notes"]]])
    for kind, place in plan.get("files", {}).items():
        out.print(f"[bold]{kind:<{_LABEL}}[/] {escape(place)}", soft_wrap=True)


def _rows(out: Console, label: str, lines: list[str]) -> None:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True, style="bold")
    grid.add_column()
    for at, line in enumerate(lines):
        grid.add_row("" if at else label, line)
    if lines:
        out.print(grid)


def _memory(out: Console, memory: dict[str, Any]) -> None:
    _rows(out, "memory", [f"[bold]{bytes_words(memory['total_bytes'])}[/], estimated"])
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", width=_LABEL + 9)
    table.add_column()
    table.add_column()
    for item in memory["items"]:
        table.add_row(bytes_words(item["bytes"]), item["name"], escape(item["method"]))
    out.print(table, style="dim")


# ---- words that the pictures use as well ---------------------------------------------------------


def bytes_words(number: int) -> str:
    """Return bytes in the unit that people read."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def graphs_words(graphs: dict[str, Any]) -> str:
    """Return how many graphs there would be and how they come about."""
    if not graphs["num_graphs"]:
        return "none would be captured"
    parts = [
        f"{g['graphs']} {mode} ({g['per_entry']} x {g['entries']} sizes)"
        for mode, g in graphs["by_mode"].items()
    ]
    sizes = " ".join(map(str, graphs["sizes"]))
    return f"{graphs['num_graphs']}: {' + '.join(parts)}; sizes {sizes}"


def support_words(row: dict[str, str]) -> str:
    """Return how far a splitting op may go into a graph."""
    return f"{row['op']}: {row['support']}, {row['meaning']} (by {row['said_by']})"


def module_words(names: list[str]) -> str:
    """Return names of submodules, those of a list's items folded into one."""
    folded: dict[str, int] = {}
    for name in names:
        key = ".".join("*" if part.isdigit() else part for part in name.split("."))
        folded[key] = folded.get(key, 0) + 1
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in folded.items())


def ops_words(kind: dict[str, Any]) -> str:
    """Return the ops of one kind of piece, the most frequent ones first."""
    named = [f"{o['op'].removeprefix('aten::')} {o['count']}" for o in kind["ops"][:_MOST_OPS]]
    rest = kind["num_ops"] - sum(o["count"] for o in kind["ops"][:_MOST_OPS])
    more = f", {rest} more" if rest else ""
    label = f"{kind['count']}x {kind['kind']} {(kind['hash'] or '')[:8]}".rstrip()
    return f"{label}: {', '.join(named)}{more}"
