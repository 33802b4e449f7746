"""The picture of `job=sizes`: the curve over K, and the traffic with the chosen sizes in it.

In: a `SizePlan`. Out: a PNG. Imports matplotlib when it draws, and leaves its global state alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pcgsvc.sizing.choice import Point, SizePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY = "#1f77b4", "#d95f02", "0.55"


def draw_sizes(plan: SizePlan, path: Path) -> None:
    """Write the picture; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    over_k, over_rows = figure.subplots(2, 1)
    _draw_curve(over_k, plan)
    _draw_traffic(over_rows, plan)
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
    times.set_ylabel("time of a call ÷ without padding (dotted)")
    axes.legend(loc="upper right", frameon=False)
    title = f"{Path(plan.traffic.source).name}: {plan.cost.words}"
    axes.set_title(title, fontsize=9, parse_math=False)  # a file's name may hold dollars


def _label(name: str, point: Point) -> str:
    return f"{name}: {point.count} sizes, {point.padding_share:.1%}"


def _draw_traffic(axes: Axes, plan: SizePlan) -> None:
    """Calls by row count, in at most 200 bins, with a line at each chosen size."""
    parts = {"other calls": plan.traffic.general, "uniform decode": plan.traffic.uniform}
    parts = {name: calls for name, calls in parts.items() if calls}
    largest = plan.traffic.distinct[-1]
    edges = np.linspace(0.5, largest + 0.5, min(largest, 200) + 1)
    axes.hist(
        [list(calls) for calls in parts.values()],
        bins=list(edges),
        weights=[list(calls.values()) for calls in parts.values()],
        stacked=True,
        label=list(parts),
        color=[_GREY, _BLUE][: len(parts)],
    )
    for at, size in enumerate(plan.chosen.sizes):
        label = None if at else "chosen sizes"
        axes.axvline(size, color=_ORANGE, linewidth=0.8, label=label)
    axes.set(xlabel="rows of a call", ylabel="calls", xlim=(0, largest * 1.02 + 1))
    axes.legend(loc="upper right", frameon=False)
