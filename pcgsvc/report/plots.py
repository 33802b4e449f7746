"""The comparison of jobs as one picture.

In: rows and their costs. Out: a PNG as bytes. Imports matplotlib when asked for a picture, draws
with its Agg renderer, and leaves its global state (backend, pyplot, style) alone.
"""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from pcgsvc.report.costs import Cost
from pcgsvc.report.plot_panels import (
    GREY,
    PlotJob,
    draw_front,
    draw_memory,
    draw_padding,
    draw_start,
    draw_steps,
    list_of,
)
from pcgsvc.report.rows import Row

_COLOURS = (0, 1, 2, 3, 4, 5, 6, 8, 9)
"""Of matplotlib's `tab10`, without its grey, which all further jobs get."""
_MARKERS = "osD^vPX<>"
_LABEL_WIDTH = 76
"""Characters of a job's line in the legend."""


def has_matplotlib() -> bool:
    """Whether a picture can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def png_of(title: str, rows: Sequence[Row], costs: Sequence[Cost | None]) -> bytes:
    """Return the picture as a PNG; see `figure_of`."""
    out = io.BytesIO()
    figure_of(title, rows, costs).savefig(out, format="png", metadata={"Software": "pcgsvc"})
    return out.getvalue()


def figure_of(title: str, rows: Sequence[Row], costs: Sequence[Cost | None]) -> Any:
    """Draw the comparison.

    Six panels: step time of uniform and of all other batches, and padding, by tokens in the batch;
    memory and start-up time by number of graphs; mean decode step against memory, with the front.
    Jobs that failed or have no graphs are named below and not drawn.

    Returns:
        matplotlib's Figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    jobs = _jobs(rows, costs)
    lines = -(-len(_coloured(jobs)) // 2)
    figure: Any = Figure(figsize=(15, 8.6 + 0.26 * lines), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower, legend = figure.subfigures(3, 1, height_ratios=[4, 4, 0.3 + 0.26 * lines])
    by_tokens, by_graphs = upper.subplots(1, 3), lower.subplots(1, 3)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    draw_steps(by_tokens[0], "decode", "Step time of uniform decode batches", jobs)
    draw_steps(by_tokens[1], "mixed", "Step time of all other batches", jobs)
    draw_padding(by_tokens[2], jobs)
    draw_memory(by_graphs[0], jobs)
    draw_start(by_graphs[1], jobs)
    draw_front(by_graphs[2], jobs)
    _legend(legend, jobs, rows)
    return figure


def _jobs(rows: Sequence[Row], costs: Sequence[Cost | None]) -> list[PlotJob]:
    """Give each job that can be drawn a colour: the front first, then the others in their order."""
    from matplotlib import colormaps

    palette = colormaps["tab10"]
    shown = [
        (row, row.facts, cost)
        for row, cost in zip(rows, costs, strict=True)
        if row.ok and cost is not None and row.facts is not None and row.facts.graphs is not None
    ]
    ranked = sorted(range(len(shown)), key=lambda at: (not shown[at][2].front, at))
    coloured = sorted(ranked[: len(_COLOURS)])
    jobs = []
    for at, (row, facts, cost) in enumerate(shown):
        number = coloured.index(at) if at in coloured else None
        jobs.append(
            PlotJob(
                name=row.name,
                label=_label(row),
                facts=facts,
                cost=cost,
                colour=GREY if number is None else palette(_COLOURS[number]),
                marker="." if number is None else _MARKERS[number],
            )
        )
    return jobs


def _coloured(jobs: Sequence[PlotJob]) -> list[PlotJob]:
    return [job for job in jobs if job.colour != GREY]


def _label(row: Row) -> str:
    words = " ".join(f"{key}={_short(value)}" for key, value in row.differs.items()) or "-"
    return textwrap.shorten(f"{row.name}: {words}", _LABEL_WIDTH, placeholder=" …")


def _short(value: str) -> str:
    """Return a value with the middle of a long list left out and its length behind it."""
    items = value[1:-1].split(",") if re.fullmatch(r"\[.*\]", value) else []
    if len(items) <= 8:
        return value
    return f"[{','.join(items[:4])},…,{items[-1]}]x{len(items)}"


def _legend(figure: Any, jobs: Sequence[PlotJob], rows: Sequence[Row]) -> None:
    """Name the jobs, and say what is not drawn and what the figures are not."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **job.style, label=job.label) for job in _coloured(jobs)]
    notes = []
    if len(handles) < len(jobs):
        notes.append(f"grey: {len(jobs) - len(handles)} more jobs")
    missing = [row.name for row in rows if row.name not in {job.name for job in jobs}]
    if missing:
        notes.append(f"not drawn, failed or without graphs: {list_of(missing)}")
    if any(job.facts.graphs and job.facts.graphs["backend"] == "recorded" for job in jobs):
        notes.append("recorded graphs are the CPU's stand-in and say nothing of CUDA graphs' speed")
    if len({job.facts.subject for job in jobs}) > 1:
        notes.append("models or devices differ: compare times within one of them only")
    if handles:
        figure.legend(handles=handles, loc="upper center", ncol=2, frameon=False, fontsize=11)
    figure.text(0.5, 0.0, "; ".join(notes), ha="center", va="bottom", fontsize=10, color="#444444")
