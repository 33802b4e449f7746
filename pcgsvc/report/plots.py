"""The comparison of jobs as one picture.

In: jobs. Out: a PNG as bytes. Imports matplotlib when asked for a picture, draws with its Agg
renderer, and leaves its global state (backend, pyplot, style) alone.
"""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from pcgsvc.report.costs import Job
from pcgsvc.report.figures import RECORDED, figures_of, flat
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


def not_drawn(name: str) -> str:
    """Return the warning that stands in for a picture where `has_matplotlib` is false."""
    return f"{name} is not drawn: matplotlib is not installed (pip install matplotlib)"


def png_of(title: str, jobs: Sequence[Job]) -> bytes:
    """Return the picture as a PNG; see `figure_of`."""
    out = io.BytesIO()
    figure_of(title, jobs).savefig(out, format="png", metadata={"Software": "pcgsvc"})
    return out.getvalue()


def figure_of(title: str, jobs: Sequence[Job]) -> Any:
    """Draw the comparison.

    Six panels: step time of uniform and of all other batches, and padding, by tokens in the batch;
    memory and start-up time by number of graphs; mean decode step against memory, with the front.
    Jobs that failed or have no graphs are named below and not drawn.

    Returns:
        matplotlib's Figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = _plot_jobs(jobs)
    lines = -(-len(_coloured(shown)) // 2)
    figure: Any = Figure(figsize=(15, 8.6 + 0.26 * lines), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower, legend = figure.subfigures(3, 1, height_ratios=[4, 4, 0.3 + 0.26 * lines])
    by_tokens, by_graphs = upper.subplots(1, 3), lower.subplots(1, 3)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    draw_steps(by_tokens[0], "decode", "Step time of uniform decode batches", shown)
    draw_steps(by_tokens[1], "mixed", "Step time of all other batches", shown)
    draw_padding(by_tokens[2], shown)
    draw_memory(by_graphs[0], shown)
    draw_start(by_graphs[1], shown)
    draw_front(by_graphs[2], shown)
    _legend(legend, shown, jobs)
    return figure


def _plot_jobs(jobs: Sequence[Job]) -> list[PlotJob]:
    """Give each job that can be drawn a colour: the front first, then the others in their order."""
    from matplotlib import colormaps

    palette = colormaps["tab10"]
    shown = [
        (row, cost)
        for row, cost in jobs
        if row.ok and cost is not None and cost.facts.graphs is not None
    ]
    ranked = sorted(range(len(shown)), key=lambda at: (not shown[at][1].front, at))
    looks = {
        at: (palette(_COLOURS[number]), _MARKERS[number])
        for number, at in enumerate(sorted(ranked[: len(_COLOURS)]))
    }
    found = []
    for at, (row, cost) in enumerate(shown):
        figures = flat(figures_of(Job(row, cost)))
        colour, marker = looks.get(at, (GREY, "."))
        found.append(PlotJob(row=row, cost=cost, figures=figures, colour=colour, marker=marker))
    return found


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


def _legend(figure: Any, shown: Sequence[PlotJob], jobs: Sequence[Job]) -> None:
    """Name the jobs, and say what is not drawn and what the figures are not."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **job.style, label=_label(job.row)) for job in _coloured(shown)]
    notes = []
    if len(handles) < len(shown):
        notes.append(f"grey: {len(shown) - len(handles)} more jobs")
    missing = [row.name for row, _ in jobs if row.name not in {job.row.name for job in shown}]
    if missing:
        notes.append(f"not drawn, failed or without graphs: {list_of(missing)}")
    if any(s.step_low_us is not None for job in shown for s in job.cost.facts.steps):
        notes.append("bars: from the fastest to the slowest run")
    if any(job.cost.facts.recorded for job in shown):
        notes.append(RECORDED)
    if len({job.cost.facts.subject for job in shown}) > 1:
        notes.append("models or devices differ: compare times within one of them only")
    if handles:
        figure.legend(handles=handles, loc="upper center", ncol=2, frameon=False, fontsize=11)
    figure.text(0.5, 0.0, "; ".join(notes), ha="center", va="bottom", fontsize=10, color="#444444")
