"""The picture of `job=sizes`: the curve over K, and calls of each kind with the chosen sizes.

In: a `SizePlan`. Out: a PNG. Imports matplotlib when it draws, and leaves its global state alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pcgsvc.sizing.choice import Point, SizePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY = "#1f77b4", "#d95f02", "0.55"
_MOST_BARS = 200


def draw_sizes(plan: SizePlan, path: Path) -> None:
    """Write the picture; needs matplotlib."""
    from matplotlib.figure import Figure

    parts = {"uniform decode": plan.traffic.uniform, "other calls": plan.traffic.general}
    parts = {name: calls for name, calls in parts.items() if calls}
    figure = Figure(figsize=(9, 4 + 2.4 * len(parts)), layout="constrained")
    over_k, *over_rows = figure.subplots(
        1 + len(parts), 1, height_ratios=[3.5, *[2.4 for _ in parts]]
    )
    _draw_curve(over_k, plan)
    for axes, (name, calls) in zip(over_rows, parts.items(), strict=True):
        draw_calls(axes, name, calls, plan.chosen.sizes)
    figure.savefig(path, dpi=120)


def _draw_curve(axes: Axes, plan: SizePlan) -> None:
    """Padding on the left scale, time on the right one."""
    counts, best = [p.count for p in plan.points], plan.chosen
    axes.plot(counts, [100 * p.padding_share for p in plan.points], color=_BLUE, marker=".")
    axes.set(xlabel="number of capture sizes K", xlim=(0, max(counts) + 1), ylim=(0, None))
    axes.set_ylabel("padding rows, % of all", color=_BLUE)
    axes.grid(alpha=0.3)
    for at, (name, point) in enumerate(plan.others.items()):
        if point.count <= max(counts):
            style: Any = {"linestyle": "none", "marker": "sD^v"[at % 4], "color": _GREY}
            label = _label(name, point)
            axes.plot(point.count, 100 * point.padding_share, label=label, **style)
    axes.axvline(best.count, color=_ORANGE, linestyle="--", label=_label("best", best))
    times = axes.twinx()
    ratio = [p.step_us / plan.no_padding_us for p in plan.points]
    times.plot(counts, ratio, color=_BLUE, alpha=0.45, linestyle=":")
    times.set_ylabel("cost of a call ÷ without padding (dotted)")
    axes.legend(loc="upper right", frameon=False)
    title = f"{Path(plan.traffic.source).name}: {plan.cost.words}"
    axes.set_title(title, fontsize=9, parse_math=False)  # a file's name may hold dollars


def _label(name: str, point: Point) -> str:
    return f"{name}: {point.count} sizes, {point.padding_share:.1%}"


def draw_calls(axes: Axes, name: str, calls: Mapping[int, int], sizes: Sequence[int]) -> None:
    """Draw calls of one kind by row count, with a line at each chosen size up to the next above.

    Each bar covers the same whole number of row counts, so that none is higher for covering more.
    """
    largest = max(calls)
    width = -(-largest // _MOST_BARS)
    edges = np.arange(0.5, largest + width, width)
    axes.hist(list(calls), bins=list(edges), weights=list(calls.values()), color=_BLUE)
    shown = [size for size in sizes if size < largest]
    shown += sizes[len(shown) : len(shown) + 1]
    for at, size in enumerate(shown):
        label = None if at else "chosen sizes"
        axes.axvline(size, color=_ORANGE, linewidth=0.9, linestyle="--", label=label)
    axes.set(xlabel="rows of a call", xlim=(0, max(edges[-1], shown[-1]) * 1.02))
    axes.set_ylabel("calls" if width == 1 else f"calls per {width} row counts")
    axes.set_title(f"{name}: {sum(calls.values())} calls", fontsize=9)
    axes.legend(loc="upper right", frameon=False)
