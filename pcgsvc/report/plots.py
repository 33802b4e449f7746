"""The comparison of jobs as one picture.

In: jobs. Out: a PNG as bytes. Imports matplotlib when asked for a picture, draws with its Agg
renderer, and leaves its global state (backend, pyplot, style) alone.
"""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcgsvc.report.costs import Cost, Job, Kind
from pcgsvc.report.figures import RECORDED
from pcgsvc.report.rows import Row, Step

_COLOURS = (0, 1, 2, 3, 4, 5, 6, 8, 9)
"""Of matplotlib's `tab10`, without its grey, which all further jobs get."""
_MARKERS = "osD^vPX<>"
_GREY = "#9a9a9a"
"""Of jobs that have no colour of their own."""
_LABEL_WIDTH = 76
"""Characters of a job's line in the legend."""
_MIB = "MiB that the graphs hold"
_DASHES = ("-", (0, (4, 3)), (0, (1.5, 2.5)))
_WIDE = 8.0
"""Largest over smallest value from which on an axis is logarithmic."""


@dataclass(frozen=True)
class _PlotJob:
    """One job that has something to show."""

    row: Row
    cost: Cost
    """Of a report with `graphs`."""
    colour: Any
    marker: str

    @property
    def style(self) -> dict[str, Any]:
        """How its marks look."""
        return {"color": self.colour, "marker": self.marker, "markersize": 7, "linestyle": "none"}

    @property
    def graphs(self) -> tuple[int, float]:
        """How many it captured, and the MiB that they hold."""
        num_bytes = self.cost.facts.memory_bytes or 0
        return (self.cost.facts.graphs or {})["num_graphs"], num_bytes / 2**20

    @property
    def start(self) -> Mapping[str, Any]:
        """The report's `compile`: cold or warm, and the seconds of each phase."""
        found: Mapping[str, Any] = self.cost.facts.report["compile"]
        return found


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
    _draw_steps(by_tokens[0], "decode", "Step time of uniform decode batches", shown)
    _draw_steps(by_tokens[1], "mixed", "Step time of all other batches", shown)
    _draw_padding(by_tokens[2], shown)
    _draw_memory(by_graphs[0], shown)
    _draw_start(by_graphs[1], shown)
    _draw_front(by_graphs[2], shown)
    _legend(legend, shown, jobs)
    return figure


def _plot_jobs(jobs: Sequence[Job]) -> list[_PlotJob]:
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
        colour, marker = looks.get(at, (_GREY, "."))
        found.append(_PlotJob(row, cost, colour, marker))
    return found


def _coloured(jobs: Sequence[_PlotJob]) -> list[_PlotJob]:
    return [job for job in jobs if job.colour != _GREY]


def _label(row: Row) -> str:
    words = " ".join(f"{key}={_short(value)}" for key, value in row.differs.items()) or "-"
    return textwrap.shorten(f"{row.name}: {words}", _LABEL_WIDTH, placeholder=" …")


def _short(value: str) -> str:
    """Return a value with the middle of a long list left out and its length behind it."""
    items = value[1:-1].split(",") if re.fullmatch(r"\[.*\]", value) else []
    if len(items) <= 8:
        return value
    return f"[{','.join(items[:4])},…,{items[-1]}]x{len(items)}"


def _legend(figure: Any, shown: Sequence[_PlotJob], jobs: Sequence[Job]) -> None:
    """Name the jobs, and say what is not drawn and what the figures are not."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **job.style, label=_label(job.row)) for job in _coloured(shown)]
    notes = []
    if len(handles) < len(shown):
        notes.append(f"grey: {len(shown) - len(handles)} more jobs")
    missing = [row.name for row, _ in jobs if row.name not in {job.row.name for job in shown}]
    if missing:
        notes.append(f"not drawn, failed or without graphs: {_names(missing)}")
    if any(s.step_low_us is not None for job in shown for s in job.cost.facts.steps):
        notes.append("bars: from the fastest to the slowest run")
    if any(job.cost.facts.recorded for job in shown):
        notes.append(RECORDED)
    if len({job.cost.facts.subject for job in shown}) > 1:
        notes.append("models or devices differ: compare times within one of them only")
    if handles:
        figure.legend(handles=handles, loc="upper center", ncol=2, frameon=False, fontsize=11)
    figure.text(0.5, 0.0, "; ".join(notes), ha="center", va="bottom", fontsize=10, color="#444444")


def _names(names: Iterable[str]) -> str:
    """Return names as text, the middle of many left out."""
    words = list(names)
    return ", ".join(words if len(words) <= 6 else [*words[:5], f"… {words[-1]}"])


# ---- by tokens in the batch ----------------------------------------------------------------------


def _draw_steps(axes: Any, kind: Kind, title: str, jobs: Sequence[_PlotJob]) -> None:
    """Draw what a batch of so many tokens takes: a stair per job, a mark at each captured size.

    Bars at the marks reach from the fastest to the slowest run.
    """
    axes.set(title=title, ylabel="µs per step")
    plain: dict[int, list[float]] = defaultdict(list)
    times: list[float] = []
    for job in jobs:
        steps = [s for s in job.cost.ladder.steps(kind) if s.step_us is not None]
        if not steps:
            continue
        sizes, values = [s.size for s in steps], [s.step_us or 0.0 for s in steps]
        times += values
        # A batch is padded up to the next size, so a stair's value holds to the left of its mark.
        stair = {"color": job.colour, "linewidth": 1.4, "drawstyle": "steps-pre"}
        axes.plot([1, *sizes], [values[0], *values], **stair)
        axes.plot(sizes, values, **job.style)
        _spread(axes, job, steps)
        for step in steps:
            if step.plain_us is not None:
                plain[step.size].append(step.plain_us)
    means = {size: sum(values) / len(values) for size, values in sorted(plain.items())}
    if means:
        axes.plot(list(means), list(means.values()), "--", color="black", label="plain module")
        times += means.values()
    _tokens(axes, jobs)
    _values(axes, times)
    if not times:
        _nothing(axes, "not timed")
        return
    axes.set_ylim(top=max(times) * (1.6 if axes.get_yscale() == "log" else 1.2))
    axes.legend(loc="upper left", frameon=False)


def _spread(axes: Any, job: _PlotJob, steps: Sequence[Step]) -> None:
    """Draw the fastest and the slowest run of each size, where the report has them."""
    bars = [
        (step.size, step.step_us, step.step_us - step.step_low_us, step.step_high_us - step.step_us)
        for step in steps
        if step.step_us is not None
        and step.step_low_us is not None
        and step.step_high_us is not None
    ]
    if bars:
        sizes, values, below, above = zip(*bars, strict=True)
        style = {"fmt": "none", "ecolor": job.colour, "elinewidth": 1.2, "capsize": 4}
        axes.errorbar(sizes, values, yerr=[below, above], **style)


def _draw_padding(axes: Any, jobs: Sequence[_PlotJob]) -> None:
    """Draw which share of a step is padding; jobs with the same sizes share a line."""
    axes.set(title="Padding by tokens in the batch", ylabel="padding, % of the rows computed")
    ladders: dict[tuple[int, ...], list[_PlotJob]] = defaultdict(list)
    for job in jobs:
        ladder = job.cost.ladder  # where no entry takes any batch, those for uniform ones count
        sizes = tuple(s.size for s in ladder.steps("mixed") or ladder.steps("decode"))
        if sizes:
            ladders[sizes].append(job)
    # The shortest last and dashed, or a longer ladder with the same first rungs would hide it.
    for at, (sizes, members) in enumerate(sorted(ladders.items(), key=lambda i: -max(i[0]))):
        counts = range(1, max(sizes) + 1)
        shares = [100 * (1 - n / min(s for s in sizes if s >= n)) for n in counts]
        first = next((job for job in members if job.colour != _GREY), members[0])
        dashes = _DASHES[at % len(_DASHES)]
        dots = "." if max(sizes) <= 64 else None
        names = _names(job.row.name for job in members)
        label = f"job{'s' if len(members) > 1 else ''} {names}"
        style = {"color": first.colour, "linewidth": 1.6, "linestyle": dashes, "marker": dots}
        axes.plot(list(counts), shares, label=label, **style)
    _tokens(axes, jobs)
    axes.set_ylim(-2, max(axes.get_ylim()[1], 20) * 1.15)
    if not ladders:
        _nothing(axes, "nothing captured")
    elif len(ladders) <= 8:
        axes.legend(loc="upper left", frameon=False, ncol=2)


def _tokens(axes: Any, jobs: Sequence[_PlotJob]) -> None:
    axes.set_xlabel("tokens in the batch")
    largest = max((s.size for job in jobs for s in job.cost.facts.steps), default=1)
    if largest > 8:
        axes.set_xscale("log", base=2)
    powers = [2**k for k in range(largest.bit_length())]
    shown = powers[:: -(-len(powers) // 12)]
    axes.set_xticks(shown, [str(p) for p in shown])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


# ---- by number of graphs -------------------------------------------------------------------------


def _draw_memory(axes: Any, jobs: Sequence[_PlotJob]) -> None:
    """Draw what the graphs hold."""
    axes.set(title="Memory by number of graphs", ylabel=_MIB)
    _scatter(axes, jobs, [job.graphs for job in jobs])
    _graphs(axes)


def _draw_start(axes: Any, jobs: Sequence[_PlotJob]) -> None:
    """Draw what a start takes, and the part of it that more graphs make longer."""
    axes.set(title="Start-up time by number of graphs", ylabel="seconds until the runner is ready")
    seconds = [job.start["seconds"] for job in jobs]
    totals = [(job.graphs[0], each["total"]) for job, each in zip(jobs, seconds, strict=True)]
    _scatter(axes, jobs, totals, hollow=_is_cold)
    for job, each in zip(jobs, seconds, strict=True):
        capture = each.get("warmup", 0.0) + each.get("capture", 0.0)
        axes.plot(job.graphs[0], capture, marker="_", markersize=13, color=job.colour)
    _graphs(axes)
    shapes = [("warm start", "o", "black"), ("of it, warm-up and capture", "_", "black")]
    if any(map(_is_cold, jobs)):
        shapes.insert(0, ("cold start", "o", "white"))
    for label, marker, face in shapes:
        axes.plot([], [], marker, color="black", markerfacecolor=face, label=label)
    axes.legend(loc="best", frameon=False)


def _graphs(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("captured graphs")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1 or 1)


def _is_cold(job: _PlotJob) -> bool:
    return bool(job.start["start"] == "cold")


# ---- against each other --------------------------------------------------------------------------


def _draw_front(axes: Any, jobs: Sequence[_PlotJob]) -> None:
    """Draw the two costs against each other; down and to the left is better."""
    limit = max((job.cost.limit for job in jobs), default=0)
    axes.set(
        title="Pareto front: decode step against memory",
        xlabel=_MIB,
        ylabel=f"mean µs per decode step, 1 to {limit} tokens",
    )
    known = [job for job in jobs if job.cost.objectives is not None]
    if not known:
        _nothing(axes, "not timed")
        return
    spots = [(job.graphs[1], job.cost.mean_us["decode"] or 0.0) for job in known]
    fronts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for job, spot in zip(known, spots, strict=True):
        if job.cost.front:
            fronts[job.cost.facts.subject].append(spot)
    for points in fronts.values():
        stair = {"drawstyle": "steps-post", "linewidth": 1, "zorder": 1}
        axes.plot(*zip(*sorted(points), strict=True), ":", color="black", **stair)
    _scatter(axes, known, spots, hollow=lambda job: not job.cost.front)
    times = [time for _, time in spots]
    if max(times) > _WIDE * min(times):
        _values(axes, times)
    axes.plot([], [], "ko", label="on the front")
    if not all(job.cost.front for job in known):
        axes.plot([], [], "ko", markerfacecolor="white", label="another is no worse in both")
    axes.legend(loc="best", frameon=False)


# ---- shared --------------------------------------------------------------------------------------


def _scatter(
    axes: Any,
    jobs: Sequence[_PlotJob],
    spots: Sequence[tuple[float, float]],
    hollow: Callable[[_PlotJob], bool] = lambda job: False,
) -> None:
    """Mark each job at its spot, with its number; jobs on one spot share the label."""
    there: dict[tuple[float, float], list[_PlotJob]] = defaultdict(list)
    for job, spot in zip(jobs, spots, strict=True):
        face = {"markerfacecolor": "white"} if hollow(job) else {}
        axes.plot(*spot, **job.style | face)
        there[spot].append(job)
    place = {"xytext": (7, 5), "textcoords": "offset points", "fontsize": 10}
    for spot, members in there.items():
        names = _names(job.row.name for job in members)
        axes.annotate(names, spot, color=members[0].colour, **place)
    axes.margins(0.2)
    axes.grid(alpha=0.25)
    if not jobs:
        _nothing(axes, "no job has graphs")


def _values(axes: Any, values: Sequence[float]) -> None:
    """Scale an axis of times: from 0, or logarithmic where they are far apart."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if not values or max(values) <= _WIDE * min(values):
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _nothing(axes: Any, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=_GREY)
