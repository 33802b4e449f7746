"""The picture of a plan: the pieces in order, folded, and what each kind of them is.

In: a report with its `plan`. Out: SVG text, which needs no other file.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from pcgsvc.report import words

COLOURS = ("#4c78a8", "#72a36b", "#b279a2", "#d0a43c", "#5fb3b3", "#9d755d", "#8a8fbf", "#c47f91")
"""Of the kinds of region, in order; a ninth kind has the first one's colour again."""
BOUNDARY = "#e4572e"
_PER_ROW = 8
"""Boxes beside each other."""
_LEFT, _TOP, _STEP, _ROW, _LINE = 22, 104, 100, 112, 14
"""Pixels: the margin, above the first box, from box to box, from row to row, and of a text line."""

# Text stays text: small, searchable, and drawn with the reader's fonts.
_PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 828 {{ height }}" width="828"
 height="{{ height }}" font-family="DejaVu Sans, Verdana, sans-serif" fill="#222222">
<title>pcgsvc plan</title>
<marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6">
<path d="M0 0L6 3L0 6" fill="#777777"/></marker>
<rect width="828" height="{{ height }}" fill="white"/>
<text x="22" y="22" font-size="14" font-weight="bold">{{ title }}</text>
{% for line in about %}
<text x="22" y="{{ 42 + 16 * loop.index0 }}" font-size="9" fill="#777777">{{ line }}</text>
{% endfor %}
{% for box in boxes %}
{% set region = box.kind == "region" %}
<rect x="{{ box.x }}" y="{{ box.y }}" width="81" height="58" rx="{{ 6 if region else 0 }}"
 fill="{{ box.colour if region else 'white' }}" stroke="{{ box.colour }}" stroke-width="1.5"/>
<g font-size="7.5" text-anchor="middle" fill="{{ 'white' if region else box.colour }}">
<text x="{{ box.x + 40 }}" y="{{ box.y + 16 }}" font-size="9">{{ box.kind }}</text>
{% for line in box.lines if line %}
<text x="{{ box.x + 40 }}" y="{{ box.y + 31 + 15 * loop.index0 }}">{{ line }}</text>
{% endfor %}</g>
{% if not loop.last %}
<path d="M{{ box.x + 81 }} {{ box.y + 29 }}h18" stroke="#777777" marker-end="url(#head)"/>
{% endif %}
{% endfor %}
{% for frame in frames %}
<rect x="{{ frame.x - 7 }}" y="{{ frame.y - 7 }}" width="{{ frame.width + 14 }}" height="72"
 fill="none" stroke="#222222" stroke-dasharray="4 3"/>
<text x="{{ frame.x + frame.width / 2 }}" y="{{ frame.y - 12 }}" font-size="10" font-weight="bold"
 text-anchor="middle">{{ frame.label }}</text>
{% endfor %}
{% for line in legend %}
{% if line.colour %}
<rect x="22" y="{{ line.y - 8 }}" width="14" height="10" stroke="{{ line.colour }}"
 fill="{{ line.colour if line.region else 'white' }}"/>
{% endif %}
<text x="45" y="{{ line.y }}" font-size="8" fill="{{ line.ink }}">{{ line.text }}</text>
{% endfor %}
</svg>
"""


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


def rendered(template: str, **values: Any) -> str:
    """Return the text of a template of markup; the values in it are escaped."""
    return Environment(autoescape=True, trim_blocks=True).from_string(template).render(values)


def plan_svg(report: dict[str, Any]) -> str:
    """Draw a plan."""
    plan, config, mode = report["plan"], report["config"], report["mode"]
    asked = "" if mode["requested"] == mode["resolved"] else f" (asked for: {mode['requested']})"
    boxes, frames = _chain(plan)
    below = boxes[-1]["y"] + _ROW - 36 if boxes else _TOP
    legend = _legend(plan["kinds"], below + 22)
    return rendered(
        _PICTURE,
        height=below + len(legend) * _LINE + 26,
        title=f"{words.model(config['model'])}: {words.split(report['partition'])}",
        about=[
            f"{report['device']}, {config['dtype']}, mode {mode['resolved']}{asked}",
            f"graphs: {_cut(words.graphs(plan['graphs']), 130)}",
        ],
        boxes=boxes,
        frames=frames,
        legend=legend,
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


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


def _chain(plan: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the boxes row by row, and the frames around what repeats."""
    boxes, kinds = cells(plan), plan["kinds"]
    places, drawn, frames = _places(boxes), [], []
    begun, whole = _LEFT, True
    for at, (cell, (row, column)) in enumerate(zip(boxes, places, strict=True)):
        x, y, kind = _LEFT + column * _STEP, _TOP + row * _ROW, kinds[cell.kind]
        names = [name.rpartition("::")[2] or name for name in words.content(kind)[:2]]
        lines = [*(_cut(name, 17) for name in names), (kind["hash"] or "")[:8]]
        look = {"kind": kind["kind"], "colour": colour_of(kinds, cell.kind), "lines": lines}
        drawn.append({"x": x, "y": y, **look})
        if cell.first or column == 0:
            begun, whole = x, cell.first
        if cell.repeat > 1 and (cell.last or places[at + 1][0] != row):
            label = f"{cell.repeat} times" if whole else f"{cell.repeat} times, continued"
            frames.append({"x": begun, "y": y, "width": x + 81 - begun, "label": label})
    return drawn, frames


def _legend(kinds: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
    """Return lines of text: the ops of each kind of piece, then why it is split there."""
    lines: list[dict[str, Any]] = []
    for at, kind in enumerate(kinds):
        region, colour = kind["kind"] == "region", colour_of(kinds, at)
        why = kind["reason"] if region else f"cut at {kind['reason']}"
        for text, ink in ((words.ops(kind), "#222222"), (why, "#777777")):
            for line in textwrap.wrap(text, 130):
                y = top + _LINE * len(lines)
                lines.append({"text": line, "y": y, "ink": ink, "colour": colour, "region": region})
                colour = ""  # beside the first line of a kind
    return lines
