"""The table that compares jobs: one row per job.

In: rows and their costs. Out: a table on a console. Knows nothing of Hydra or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pcgsvc.report.costs import KINDS, Cost, Kind
from pcgsvc.report.rows import Facts, Row, Step

_GAP = 2
"""Characters between two columns, as rich sets them."""
_FOLDED = 32
"""Characters of a setting that stay on one line in a narrow terminal."""

Cell = Callable[[Facts, Cost], str]


@dataclass(frozen=True)
class _Column:
    name: str
    cell: Cell
    weight: int
    """In a narrow terminal columns of the least weight go first."""


def show_jobs(out: Console, title: str, rows: Sequence[Row], costs: Sequence[Cost | None]) -> None:
    """Print one row per job, then what went wrong in those that failed."""
    size = _common_size(costs)
    columns = _columns(rows, size)
    table = _table(rows, costs, columns)
    while columns and _least_width(table) > out.width:
        columns.remove(min(columns, key=lambda c: c.weight))
        table = _table(rows, costs, columns)
    out.print()
    out.print(title, style="bold")
    out.print(table)
    out.print(_legend(rows, costs, columns, size), style="dim")
    for row in rows:
        if row.reason:
            where = f" [{row.output}]" if row.output else ""
            out.print(
                f"job {row.name} {row.status}: {_first_line(row.reason)}{where}", markup=False
            )


def _table(rows: Sequence[Row], costs: Sequence[Cost | None], columns: Sequence[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    lines = []
    for row, cost in zip(rows, costs, strict=True):
        name = f"{row.name}*" if cost is not None and cost.front else row.name
        words = " ".join(f"{key}={value}" for key, value in row.differs.items()) or "-"
        cells = [
            "" if row.facts is None or cost is None else column.cell(row.facts, cost)
            for column in columns
        ]
        lines.append([name, words, *cells, _result(row)])
    for at, header in enumerate(("job", "differs in", *(c.name for c in columns), "result")):
        widest = max(len(header), *(len(line[at]) for line in lines))
        folds = header == "differs in"
        word = max(len(word) for line in lines for word in line[at].split(" "))
        table.add_column(
            header,
            justify="left" if folds or header == "result" else "right",
            overflow="fold",
            no_wrap=not folds,
            min_width=min(word, _FOLDED) if folds else widest,
        )
    for row, line in zip(rows, lines, strict=True):
        style = "" if row.ok else "red" if row.status == "failed" else "yellow"
        table.add_row(*(escape(cell) for cell in line), style=style)
    return table


def _least_width(table: Table) -> int:
    """Return how many characters it needs; rich's own measure ends at the console's width."""
    gaps = _GAP * (len(table.columns) - 1)
    return sum(column.min_width or 0 for column in table.columns) + gaps


def _columns(rows: Sequence[Row], size: int | None) -> list[_Column]:
    """Return the columns that tell something of these jobs."""
    facts = [row.facts for row in rows if row.facts is not None]
    columns = [
        _Column("mode", lambda f, c: str(f.report["mode"]["resolved"]), 4),
        _Column("reg/bound", _split, 2),
        _Column("kernels", lambda f, c: str(f.report["compile"].get("num_kernels", "")), 1),
        _Column("graphs", lambda f, c: str((f.graphs or {}).get("num_graphs", "")), 8),
        _Column("MiB", lambda f, c: _mib(c.memory_bytes), 9),
        _Column("start s", lambda f, c: f"{f.start_s:.2f} {f.report['compile']['start']}", 7),
        _Column("served %", lambda f, c: _percent(c.served), 5),
        _Column("pad %", lambda f, c: _percent(c.padding), 5),
    ]
    if all(f.report["mode"]["resolved"] == f.report["mode"]["requested"] for f in facts):
        columns.pop(0)  # the mode was asked for: it stands among the differences, or is one for all
    if any(step.step_us is not None for f in facts for step in f.steps):
        columns += [
            _Column("decode µs", lambda f, c: _time(c, "decode", size, "step_us"), 10),
            _Column("mixed µs", lambda f, c: _time(c, "mixed", size, "step_us"), 6),
            _Column("host µs", lambda f, c: _time(c, "decode", size, "host_us"), 3),
            _Column("x plain", lambda f, c: _speedup(c, size), 7),
        ]
    return columns if facts else []


def _common_size(costs: Sequence[Cost | None]) -> int | None:
    """Return the largest size that every job with any entry has captured."""
    found = [
        {step.size for kind in KINDS for step in cost.ladder.steps(kind)} for cost in costs if cost
    ]
    sizes = [one for one in found if one]
    return max(set.intersection(*sizes), default=None) if sizes else None


def _entry(cost: Cost, kind: Kind, size: int | None) -> Step | None:
    steps = cost.ladder.steps(kind)
    return next((s for s in steps if s.size == size), None if size or not steps else steps[-1])


def _split(facts: Facts, cost: Cost) -> str:
    partition = facts.report["partition"]
    return f"{partition['num_regions']}/{partition['num_boundaries']}"


def _mib(number: int | None) -> str:
    return "" if number is None else f"{number / 2**20:.1f}"


def _percent(shares: Mapping[Kind, float | None]) -> str:
    """Return a share of decode batches and of all others, or one figure if they are equal."""
    words = ["-" if (share := shares[kind]) is None else f"{100 * share:.0f}" for kind in KINDS]
    return words[0] if words[0] == words[1] else "/".join(words)


def _time(cost: Cost, kind: Kind, size: int | None, which: str) -> str:
    step = _entry(cost, kind, size)
    time = None if step is None else getattr(step, which)
    return "" if time is None else f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def _speedup(cost: Cost, size: int | None) -> str:
    step = _entry(cost, "decode", size)
    return f"{step.speedup:.2f}" if step is not None and step.speedup else ""


def _result(row: Row) -> str:
    if not row.ok:
        return row.status
    verified = row.facts.verified if row.facts is not None else None
    return "done" if not verified or not verified[1] else f"verified {verified[0]}/{verified[1]}"


def _first_line(text: str) -> str:
    """Return the first line; the files have the others."""
    first, more, _ = text.strip().partition("\n")
    return f"{first} …" if more else first


def _legend(
    rows: Sequence[Row],
    costs: Sequence[Cost | None],
    columns: Sequence[_Column],
    size: int | None,
) -> str:
    """Explain the columns that are there."""
    names, words = {column.name for column in columns}, []
    limit = max((cost.limit for cost in costs if cost), default=0)
    if any(cost is not None and cost.front for cost in costs):
        words.append("*: on the Pareto front of memory and mean decode step")
    if "MiB" in names:
        words.append("MiB: what the graphs hold")
    if "start s" in names:
        words.append("start: until the runner is ready")
    if "pad %" in names and limit:
        words.append(
            f"served: by a graph, pad: rows of padding, batches of 1 to {limit} tokens counting "
            "equally"
        )
    if "decode µs" in names:
        at = f"at {size} tokens" if size else "at each job's largest size"
        words.append(
            f"µs: per step {at}; decode: uniform batches; host: until it is enqueued; x plain: "
            "times faster than the module"
        )
    graphs = [row.facts.graphs for row in rows if row.facts is not None]
    if any(g is not None and g["backend"] == "recorded" for g in graphs):
        words.append("recorded graphs are the CPU's stand-in and say nothing of CUDA graphs' speed")
    return "\n".join(words)
