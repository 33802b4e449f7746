"""The picture of a plan: the pieces in order, folded, and what they would hold in memory.

In: a report with its `plan`. Out: SVG text, which needs no other file. Knows nothing of planning.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pcgsvc.report.plan_text import bytes_words, graphs_words, ops_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4c78a8", "#72a36b", "#b279a2", "#d0a43c", "#5fb3b3", "#9d755d", "#8a8fbf", "#c47f91")
"""Of the kinds of region, in order; a ninth kind has the first one's colour again."""
BOUNDARY = "#e4572e"
_INK, _FAINT = "#222222", "#777777"
_WIDTH = 11.5
"""Inches."""
_PER_ROW = 8
"""Boxes beside each other."""
_BOX, _GAP, _ROW = 1.12, 0.26, 1.55
"""Inches: a box's width, what is between boxes, and the height of a row."""


@dataclass(frozen=True)
class Cell:
    """One box: a kind of piece, in a stretch that repeats."""

    kind: int
    repeat: int
    first: bool
    """Whether the stretch begins here."""
    last: bool


def cells(plan: dict[str, Any]) -> list[Cell]:
    """Return the boxes in order."""
    found = []
    for stretch in plan["sequence"]:
        ends = len(stretch["kinds"]) - 1
        for at, kind in enumerate(stretch["kinds"]):
            found.append(Cell(kind, stretch["repeat"], at == 0, at == ends))
    return found


def colour_of(kinds: list[dict[str, Any]], at: int) -> str:
    """Return the colour of a kind of piece."""
    if kinds[at]["kind"] != "region":
        return BOUNDARY
    number = sum(k["kind"] == "region" for k in kinds[:at])
    return COLOURS[number % len(COLOURS)]


def plan_svg(report: dict[str, Any]) -> str:
    """Draw a plan; needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    plan = report["plan"]
    boxes = cells(plan)
    places = _places(boxes)
    rows = 1 + max((row for row, _ in places), default=0)
    legend = _legend(plan["kinds"])
    heights = (
        0.95,
        rows * _ROW + 0.1,
        sum(len(lines) for _, _, lines in legend) * 0.19 + 0.35,
        1.3,
    )
    # Text stays text: small, searchable, and drawn with the reader's fonts.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "pcgsvc", "text.parse_math": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(_WIDTH, sum(heights)), facecolor="white")
        FigureCanvasSVG(figure)
        top = sum(heights)
        axes = []
        for height in heights:
            top -= height
            axis = figure.add_axes((0.0, top / sum(heights), 1.0, height / sum(heights)))
            axis.set_xlim(0, _WIDTH)
            axis.set_ylim(0, height)
            axis.set_axis_off()
            axes.append(axis)
        _title(axes[0], report)
        _chain(axes[1], plan["kinds"], list(zip(boxes, places, strict=True)), heights[1])
        _kinds(axes[2], plan["kinds"], legend, heights[2])
        _memory(axes[3], plan["memory"])
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Title": "pcgsvc plan"})
    return out.getvalue()


def title_words(report: dict[str, Any]) -> str:
    """Return which model this is a plan of."""
    model = report["config"]["model"]
    which = model["preset"] if model["name"] == "llama" and model["weights"] is None else ""
    return f"{model['name']} {which}".strip()


def split_words(partition: dict[str, Any]) -> str:
    """Return how often it is cut."""
    regions, boundaries = partition["num_regions"], partition["num_boundaries"]
    return (
        f"{regions} region{'s' if regions != 1 else ''} ({partition['num_unique_pieces']} unique), "
        f"{boundaries} boundar{'ies' if boundaries != 1 else 'y'}, by {partition['strategy']}"
    )


def _title(axis: Axes, report: dict[str, Any]) -> None:
    words = f"{title_words(report)}: {split_words(report['partition'])}"
    axis.text(0.3, 0.65, words, fontsize=14, weight="bold", color=_INK)
    mode = report["mode"]
    text = f"{report['device']}, {report['config']['dtype']}, mode {mode['resolved']}"
    if mode["requested"] != mode["resolved"]:
        text += f" (asked for: {mode['requested']})"
    graphs = graphs_words(report["plan"]["graphs"])
    axis.text(0.3, 0.38, text, fontsize=9, color=_FAINT)
    axis.text(0.3, 0.16, f"graphs: {_cut(graphs, 130)}", fontsize=9, color=_FAINT)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# ---- the chain -----------------------------------------------------------------------------------


def _places(boxes: list[Cell]) -> list[tuple[int, int]]:
    """Return row and column of every box; what repeats begins a row if it would not fit in one."""
    places: list[tuple[int, int]] = []
    row = column = 0
    for at, cell in enumerate(boxes):
        if cell.first and cell.repeat > 1:
            length = 1 + next(n for n, c in enumerate(boxes[at:]) if c.last)
            if column and column + length > _PER_ROW:
                row, column = row + 1, 0
        if column == _PER_ROW:
            row, column = row + 1, 0
        places.append((row, column))
        column += 1
    return places


def _chain(
    axis: Axes,
    kinds: list[dict[str, Any]],
    boxes: list[tuple[Cell, tuple[int, int]]],
    height: float,
) -> None:
    """Draw the boxes row by row, arrows between them, and a frame around what repeats."""
    step, begun, whole = _BOX + _GAP, 0, True
    for at, (cell, (row, column)) in enumerate(boxes):
        x, y = 0.3 + column * step, height - (row + 1) * _ROW + 0.25
        _box(axis, kinds[cell.kind], colour_of(kinds, cell.kind), x, y)
        if at + 1 < len(boxes):
            axis.annotate(
                "",
                (x + step, y + 0.4),
                (x + _BOX, y + 0.4),
                arrowprops={"arrowstyle": "-|>", "color": _FAINT, "lw": 1},
            )
        if cell.first or column == 0:
            begun, whole = column, cell.first
        if cell.repeat > 1 and (cell.last or boxes[at + 1][1][0] != row):
            left = 0.3 + begun * step
            label = f"{cell.repeat} times" if whole else f"{cell.repeat} times, continued"
            _frame(axis, left, y, x + _BOX - left, label)


def _box(axis: Axes, kind: dict[str, Any], colour: str, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    region = kind["kind"] == "region"
    style = "round,pad=0,rounding_size=0.08" if region else "square,pad=0"
    face = colour if region else "white"
    axis.add_patch(
        FancyBboxPatch((x, y), _BOX, 0.8, boxstyle=style, facecolor=face, edgecolor=colour, lw=1.5)
    )
    ink = "white" if region else colour
    if region:
        lines = ["region", f"{kind['num_ops']} ops", (kind["hash"] or "")[:8]]
    else:
        names = [s["op"].rpartition("::")[2] or s["op"] for s in kind["splitting"]]
        lines = [kind["kind"], *(_cut(name, 17) for name in names[:2])]
    for at, line in enumerate(line for line in lines if line):
        size = 9 if at == 0 else 7.5
        axis.text(
            x + _BOX / 2,
            y + 0.62 - at * 0.22,
            line,
            fontsize=size,
            color=ink,
            ha="center",
            va="center",
        )


def _frame(axis: Axes, x: float, y: float, width: float, label: str) -> None:
    from matplotlib.patches import Rectangle

    pad = 0.09
    axis.add_patch(
        Rectangle(
            (x - pad, y - pad),
            width + 2 * pad,
            0.8 + 2 * pad,
            fill=False,
            edgecolor=_INK,
            lw=1,
            linestyle=(0, (4, 3)),
        )
    )
    axis.text(
        x + width / 2,
        y + 0.95,
        label,
        fontsize=10,
        weight="bold",
        ha="center",
        color=_INK,
    )


# ---- what they are -------------------------------------------------------------------------------


def _legend(kinds: list[dict[str, Any]]) -> list[tuple[int, int, list[str]]]:
    """Return the lines of every kind, how many of which are on its ops, the rest why it is cut."""
    rows = []
    for at, kind in enumerate(kinds):
        lines = textwrap.wrap(ops_words(kind), 130, subsequent_indent="    ")
        ops = len(lines)
        why = kind["reason"] if kind["kind"] == "region" else f"cut at {kind['reason']}"
        lines += textwrap.wrap(why, 130, subsequent_indent="    ")
        rows.append((at, ops, lines))
    return rows


def _kinds(
    axis: Axes, kinds: list[dict[str, Any]], legend: list[tuple[int, int, list[str]]], height: float
) -> None:
    from matplotlib.patches import Rectangle

    y = height - 0.2
    for at, ops, lines in legend:
        region = kinds[at]["kind"] == "region"
        colour = colour_of(kinds, at)
        face = colour if region else "white"
        axis.add_patch(Rectangle((0.3, y - 0.07), 0.2, 0.14, facecolor=face, edgecolor=colour))
        for number, line in enumerate(lines):
            ink = _INK if number < ops else _FAINT
            axis.text(0.62, y - number * 0.19, line, fontsize=8, va="center", color=ink)
        y -= len(lines) * 0.19


def _memory(axis: Axes, memory: dict[str, Any]) -> None:
    """Draw one bar of all memory; parts too thin to see are named all the same."""
    from matplotlib.patches import Rectangle

    total = max(memory["total_bytes"], 1)
    axis.text(
        0.3, 1.25, f"memory, estimated: {bytes_words(memory['total_bytes'])}", fontsize=10,
        weight="bold", color=_INK, va="center",
    )  # fmt: skip
    x, room = 0.3, _WIDTH - 0.6
    for at, (item, shade) in enumerate(zip(memory["items"], _shades(), strict=False)):
        width = room * item["bytes"] / total
        axis.add_patch(Rectangle((x, 0.65), width, 0.28, facecolor=shade, edgecolor="white"))
        x += width
        column, row = at % 4, at // 4
        left, y = 0.3 + column * 2.65, 0.42 - row * 0.24
        axis.add_patch(Rectangle((left, y - 0.06), 0.14, 0.12, facecolor=shade))
        label = f"{item['name']} {bytes_words(item['bytes'])}"
        axis.text(left + 0.22, y, label, fontsize=8.5, va="center", color=_INK)


def _shades() -> Iterator[str]:
    while True:
        yield from ("#355c7d", "#99b898", "#6c8ead", "#c06c84", "#e8a87c", "#85756e", "#b8b08d")
