"""What a person reads of `job=sizes`, and of a replayed traffic.

In: a `SizePlan`, or the report's `traffic`. Out: text on a console. Knows nothing of how they came
about.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pcgsvc.report.tables import show_fact
from pcgsvc.sizing.choice import Point, SizePlan

_ALL_UP_TO = 8
"""K up to which every row of the curve is printed; beyond, multiples of it."""


def show_sizes(out: Console, plan: SizePlan) -> None:
    """Print the curve, what it is compared with, and the recommendation."""
    traffic, service = plan.traffic, plan.service
    uniform = sum(traffic.uniform.values())
    show_fact(
        out,
        "traffic",
        f"{escape(traffic.source)}: {traffic.num_calls} calls ({uniform} uniform), "
        f"{traffic.num_rows} rows, {plan.num_distinct} sizes to choose from",
    )
    show_fact(out, "mode", f"uniform decode {service.decode.value}, all else {service.mixed.value}")
    show_fact(out, "cost", escape(plan.cost.words))
    out.print()
    out.print(_curve(plan))
    out.print()
    if plan.points[0].memory_bytes is None:
        show_fact(out, "note", "graphs and MiB: sizing.cost=report.json, of a run, tells them")
    for note in plan.notes:
        show_fact(out, "note", escape(note))
    best = plan.chosen
    show_fact(out, "best", f"[bold]{_named(best)}[/] ({plan.why}): {_sizes(best)}")
    for name, point in plan.others.items():
        show_fact(out, "", f"{escape(name)}: {_against(plan, point)}")
    override = plan.override.replace("=", "='", 1) + "'"
    out.print(f"[bold]{'override':<9}[/] {escape(override)}", soft_wrap=True)


def _sizes(point: Point) -> str:
    return f"padding {point.padding_share:.1%}, {point.step_us:.1f} us a call"


def _named(point: Point) -> str:
    return f"{point.count} size{'s' * (point.count > 1)}"


def _against(plan: SizePlan, point: Point) -> str:
    """Say how other sizes compare with the best ones of equal number."""
    equal = plan.points[min(point.count, len(plan.points)) - 1]
    return f"{_named(point)}, {_sizes(point)}; the best {equal.count}: {_sizes(equal)}"


def _curve(plan: SizePlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("K", "padding", "us a call", "to no padding", "graphs", "MiB", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    last = len(plan.points)
    for point in plan.points:
        count = point.count
        if count > _ALL_UP_TO and count % _ALL_UP_TO and count != last and point != plan.chosen:
            continue
        memory = point.memory_bytes
        table.add_row(
            str(count),
            f"{point.padding_share:.1%}",
            f"{point.step_us:.1f}",
            f"{point.step_us / plan.no_padding_us:.3f}",
            "-" if point.num_graphs is None else str(point.num_graphs),
            "-" if memory is None else f"{memory / 2**20:.1f}",
            "best" if point == plan.chosen else "",
            style="bold" if point == plan.chosen else None,
        )
    return table


def show_traffic(out: Console, traffic: dict[str, Any]) -> None:
    """Print what a replayed traffic used."""
    calls, of = traffic["num_calls"], traffic["calls_in_file"]
    sampled = f" of {of}, taken evenly" if calls < of else ""
    show_fact(
        out,
        "traffic",
        f"{escape(traffic['file'])}: {calls} calls{sampled}; padding {traffic['padding_share']:.1%}"
        f" (expected {traffic['expected_padding_share']:.1%})",
    )
    hits = traffic["hits"]
    for mode, sizes in _by_mode(hits).items():
        words = ", ".join(f"{hits[f'{mode}:{size}']} at {size}" for size in sizes)
        show_fact(out, "hits", f"{mode}: {words}")
    for reason, count in _by_reason(traffic["fallbacks"]).items():
        show_fact(out, "[yellow]no graph[/]", f"{count} calls: {escape(reason)}")
    for row in traffic["refused"]:
        words = f"{row['count']} calls of {row['num_tokens']} rows: {row['reason']}"
        show_fact(out, "[red]refused[/]", escape(words))
    for mode, sizes in _by_mode(traffic["never_used"]).items():
        show_fact(out, "[yellow]unused[/]", f"{mode}: {' '.join(map(str, sizes))}")


def _by_mode(entries: Iterable[str]) -> dict[str, list[int]]:
    """Group `mode:size`; both ascend."""
    found: dict[str, list[int]] = {}
    for mode, _, size in sorted(name.partition(":") for name in entries):
        found.setdefault(mode, []).append(int(size))
    return {mode: sorted(sizes) for mode, sizes in found.items()}


def _by_reason(fallbacks: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in fallbacks:
        found[row["reason"]] = found.get(row["reason"], 0) + row["count"]
    return found
