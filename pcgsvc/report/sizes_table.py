"""What a person reads of `job=sizes`, and of a replayed traffic.

In: a `SizePlan`, or the report's `traffic`. Out: text on a console.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pcgsvc.config import Arrivals
from pcgsvc.report import words
from pcgsvc.report.columns import Column, mib, table_of, written
from pcgsvc.report.tables import show_fact, show_place
from pcgsvc.sizing.choice import Point, SizePlan
from pcgsvc.sizing.traffic import Simulation

_ALL_UP_TO = 8
"""K up to which every row of the curve is printed; beyond, multiples of it."""


def show_sizes(out: Console, plan: SizePlan) -> None:
    """Print the curve, what it is compared with, and the recommendation."""
    traffic, service = plan.traffic, plan.service
    calls = f"{traffic.num_calls} calls ({sum(traffic.uniform.values())} uniform)"
    extent = f"{traffic.num_rows} rows, {plan.num_distinct} sizes to choose from"
    show_fact(out, "traffic", f"{escape(traffic.source)}: {calls}, {extent}")
    if traffic.simulation is not None:
        _show_simulation(out, traffic.simulation)
    show_fact(out, "mode", f"uniform decode {service.decode.value}, all else {service.mixed.value}")
    show_fact(out, "cost", escape(plan.cost.words))
    out.print()
    out.print(_curve(plan))
    out.print()
    if plan.points[0].memory_bytes is None:
        show_fact(out, "note", "graphs and MiB need sizing.cost=report.json, the report of a run")
    if any(point.uncovered for point in plan.points):
        unpadded = "no graph: calls that run without one, unpadded; the choice takes them as padded"
        show_fact(out, "note", unpadded)
    for note in plan.notes:
        show_fact(out, "note", escape(note))
    best = words.count(plan.chosen.count, "size")
    show_fact(out, "best", f"[bold]{best}[/] ({plan.why}): {_sizes(plan, plan.chosen)}")
    for name, point in plan.others.items():
        show_fact(out, "", f"{escape(name)}: {_against(plan, point)}")
    show_place(out, plan.override.replace("=", "='", 1) + "'", "override")
    if plan.max_requests is not None:
        further = f"mode={plan.mode.value} attention.max_num_reqs={plan.max_requests}"
        if service.query_len > 1:
            further += f" capture.uniform_query_len={service.query_len}"
        show_fact(out, "", further)


def _show_simulation(out: Console, simulation: Simulation) -> None:
    """Print what the requests were, who scheduled them, and the steps of each kind."""
    tokens = f"{simulation.prompt_tokens} prompt and {simulation.output_tokens} output tokens"
    requests = words.count(simulation.num_requests, "request")
    show_fact(out, "trace", f"{simulation.form}: {requests}, {tokens}")
    scheduler = simulation.scheduler
    arrivals = "arrivals as in the file" if scheduler.arrivals is Arrivals.KEPT else "closed loop"
    chunk = "" if scheduler.chunk is None else f", {scheduler.chunk} of a prompt"
    drafts = f", {scheduler.speculative_len} drafts" if scheduler.speculative_len else ""
    limits = f"{scheduler.max_num_seqs} requests, {scheduler.max_num_batched_tokens} tokens"
    show_fact(out, "scheduler", f"{arrivals}; a step has at most {limits}{chunk}{drafts}")
    shown = [
        f"{sum(calls.values())} {kind} of {_extent(calls)} rows"
        for kind, calls in simulation.kinds.items()
        if calls
    ]
    show_fact(out, "steps", ", ".join(shown))


def _extent(numbers: Collection[int]) -> str:
    """Return the least and the largest number, or the only one."""
    ends = sorted({min(numbers), max(numbers)})
    return " to ".join(map(str, ends))


def _sizes(plan: SizePlan, point: Point) -> str:
    cost = f"{point.step_us:.1f} {plan.cost.unit} a call"
    return f"padding {point.padding_share:.1%}, {cost}"


def _against(plan: SizePlan, point: Point) -> str:
    """Return how other sizes compare with the best ones of equal number."""
    equal = plan.points[min(point.count, len(plan.points)) - 1]
    number = words.count(point.count, "size")
    return f"{number}, {_sizes(plan, point)}; the best {equal.count}: {_sizes(plan, equal)}"


def _or_dash(text: Callable[..., str]) -> Callable[..., str]:
    return lambda value: text(value) or "-"


def _columns(unit: str) -> tuple[Column, ...]:
    return (
        Column("K", ("count",), str),
        Column("padding", ("padding_share",), "{:.1%}".format),
        Column(f"{unit} a call", ("step_us",), "{:.1f}".format),
        Column("to no padding", ("ratio",), "{:.3f}".format),
        Column("no graph", ("uncovered",), str),
        Column("graphs", ("num_graphs",), _or_dash(written("{}"))),
        Column("MiB", ("memory_bytes",), _or_dash(mib)),
        Column("", ("best",), str, left=True),
    )


def _curve(plan: SizePlan) -> Table:
    columns = _columns(plan.cost.unit)
    table = table_of(columns, padding=(0, 2, 0, 0))
    for point in plan.points:
        count, best = point.count, point == plan.chosen
        if best or count <= _ALL_UP_TO or count % _ALL_UP_TO == 0 or point == plan.points[-1]:
            ratio = point.step_us / plan.no_padding_us
            row = {**vars(point), "count": count, "ratio": ratio, "best": "best" if best else ""}
            table.add_row(*(column.cell(row) for column in columns), style="bold" if best else None)
    return table


def show_traffic(out: Console, traffic: dict[str, Any]) -> None:
    """Print what a replayed traffic used."""
    calls, total = traffic["num_calls"], traffic["calls_in_file"]
    sampled = f" of {total}, taken evenly" if calls < total else ""
    found, expected = traffic["padding_share"], traffic["expected_padding_share"]
    padding = f"padding {found:.1%} (expected {expected:.1%})"
    show_fact(out, "traffic", f"{escape(traffic['file'])}: {calls} calls{sampled}; {padding}")
    hits = traffic["hits"]
    for mode, sizes in _by_mode(hits).items():
        counts = ", ".join(f"{hits[f'{mode}:{size}']} at {size}" for size in sizes)
        show_fact(out, "hits", f"{mode}: {counts}")
    fallbacks: Counter[str] = Counter()
    for row in traffic["fallbacks"]:
        fallbacks[row["reason"]] += row["count"]
    for reason, count in fallbacks.items():
        show_fact(out, "[yellow]no graph[/]", f"{count} calls: {escape(reason)}")
    for row in traffic["refused"]:
        refused = f"{row['count']} calls of {row['num_tokens']} rows"
        show_fact(out, "[red]refused[/]", f"{refused}: {escape(row['reason'])}")
    for mode, sizes in _by_mode(traffic["never_used"]).items():
        show_fact(out, "[yellow]unused[/]", f"{mode}: {' '.join(map(str, sizes))}")


def _by_mode(entries: Iterable[str]) -> dict[str, list[int]]:
    """Group `mode:size`; both ascend."""
    found: dict[str, list[int]] = {}
    for mode, _, size in sorted(name.partition(":") for name in entries):
        found.setdefault(mode, []).append(int(size))
    return {mode: sorted(sizes) for mode, sizes in found.items()}
