"""The picture of a plan: the pieces in order, folded, and what each kind of them is.

In: a report with its `plan`. Out: SVG text, which needs no other file.
"""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pcgsvc.report import words

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
_LEFT, _BOX, _GAP, _ROW, _LINE = 0.3, 1.12, 0.26, 1.55, 0.19
"""Inches: the margin, a box's width, what is between boxes, a row's and a text line's height."""


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
    return [
        Cell(kind, stretch["repeat"], at == 0, at == len(stretch["kinds"]) - 1)
        for stretch in plan["sequence"]
        for at, kind in enumerate(stretch["kinds"])
    ]


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
    legend = [_legend(kind) for kind in plan["kinds"]]
    heights = (0.95, rows * _ROW + 0.1, sum(map(len, legend)) * _LINE + 0.35)
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
            axis.set(xlim=(0, _WIDTH), ylim=(0, height))
            axis.set_axis_off()
            axes.append(axis)
        _title(axes[0], report)
        _chain(axes[1], plan["kinds"], list(zip(boxes, places, strict=True)), heights[1])
        _kinds(axes[2], plan["kinds"], legend, heights[2])
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Title": "pcgsvc plan"})
    return out.getvalue()


def _title(axis: Axes, report: dict[str, Any]) -> None:
    config, mode, split = report["config"], report["mode"], words.split(report["partition"])
    title = f"{words.model(config['model'])}: {split}"
    axis.text(_LEFT, 0.65, title, fontsize=14, weight="bold", color=_INK)
    text = f"{report['device']}, {config['dtype']}, mode {mode['resolved']}"
    if mode["requested"] != mode["resolved"]:
        text += f" (asked for: {mode['requested']})"
    axis.text(_LEFT, 0.38, text, fontsize=9, color=_FAINT)
    graphs = _cut(words.graphs(report["plan"]["graphs"]), 130)
    axis.text(_LEFT, 0.16, f"graphs: {graphs}", fontsize=9, color=_FAINT)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# ---- the chain -----------------------------------------------------------------------------------


def _places(boxes: list[Cell]) -> list[tuple[int, int]]:
    """Return row and column of every box; what repeats begins a row if it would not fit in one."""
    places: list[tuple[int, int]] = []
    row = column = 0
    for at, cell in enumerate(boxes):
        length = 1
        if cell.first and cell.repeat > 1:
            length += next(n for n, c in enumerate(boxes[at:]) if c.last)
        if column == _PER_ROW or (column and column + length > _PER_ROW):
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
    arrow = {"arrowstyle": "-|>", "color": _FAINT, "lw": 1}
    for at, (cell, (row, column)) in enumerate(boxes):
        x, y = _LEFT + column * step, height - (row + 1) * _ROW + 0.25
        _box(axis, kinds[cell.kind], colour_of(kinds, cell.kind), x, y)
        if at + 1 < len(boxes):
            axis.annotate("", (x + step, y + 0.4), (x + _BOX, y + 0.4), arrowprops=arrow)
        if cell.first or column == 0:
            begun, whole = column, cell.first
        if cell.repeat > 1 and (cell.last or boxes[at + 1][1][0] != row):
            left = _LEFT + begun * step
            label = f"{cell.repeat} times" if whole else f"{cell.repeat} times, continued"
            _frame(axis, left, y, x + _BOX - left, label)


def _box(axis: Axes, kind: dict[str, Any], colour: str, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    region = kind["kind"] == "region"
    style = "round,pad=0,rounding_size=0.08" if region else "square,pad=0"
    face, ink = (colour, "white") if region else ("white", colour)
    axis.add_patch(
        FancyBboxPatch((x, y), _BOX, 0.8, boxstyle=style, facecolor=face, edgecolor=colour, lw=1.5)
    )
    names = [name.rpartition("::")[2] or name for name in words.content(kind)[:2]]
    lines = [kind["kind"], *(_cut(name, 17) for name in names), (kind["hash"] or "")[:8]]
    text: Any = {"color": ink, "ha": "center", "va": "center"}
    for at, line in enumerate(line for line in lines if line):
        size = 9 if at == 0 else 7.5
        axis.text(x + _BOX / 2, y + 0.62 - at * 0.22, line, fontsize=size, **text)


def _frame(axis: Axes, x: float, y: float, width: float, label: str) -> None:
    from matplotlib.patches import Rectangle

    pad = 0.09
    around = ((x - pad, y - pad), width + 2 * pad, 0.8 + 2 * pad)
    axis.add_patch(Rectangle(*around, fill=False, edgecolor=_INK, lw=1, linestyle=(0, (4, 3))))
    bold: Any = {"fontsize": 10, "weight": "bold", "ha": "center", "color": _INK}
    axis.text(x + width / 2, y + 0.95, label, **bold)


# ---- what they are -------------------------------------------------------------------------------


def _legend(kind: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines and their colours: the ops of a kind of piece, then why it is split there."""
    why = kind["reason"] if kind["kind"] == "region" else f"cut at {kind['reason']}"
    return [
        (line, colour)
        for text, colour in ((words.ops(kind), _INK), (why, _FAINT))
        for line in textwrap.wrap(text, 130, subsequent_indent="    ")
    ]


def _kinds(
    axis: Axes, kinds: list[dict[str, Any]], legend: list[list[tuple[str, str]]], height: float
) -> None:
    from matplotlib.patches import Rectangle

    y = height - 0.2
    for at, lines in enumerate(legend):
        colour = colour_of(kinds, at)
        face = colour if kinds[at]["kind"] == "region" else "white"
        axis.add_patch(Rectangle((_LEFT, y - 0.07), 0.2, 0.14, facecolor=face, edgecolor=colour))
        for line, ink in lines:
            axis.text(_LEFT + 0.32, y, line, fontsize=8, va="center", color=ink)
            y -= _LINE
