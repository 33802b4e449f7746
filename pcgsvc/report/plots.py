"""The comparison of jobs as one picture.

In: rows and their costs. Out: a PNG as bytes. Imports matplotlib when asked for a picture, draws
with its Agg renderer, and leaves its global state (backend, pyplot, style) alone.
"""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pcgsvc.report.costs import KINDS, Cost, Kind
from pcgsvc.report.rows import Facts, Row, Step

_COLOURED = 10
"""Jobs with a colour of their own; the others are grey, so that the eye can follow a line."""
_GREY = "#9a9a9a"
_MARKERS = "osD^vPX<>*"
_DASHES = ("-", (0, (4, 3)), (0, (1.5, 2.5)))
_LABEL_WIDTH = 76
"""Characters of a job's line in the legend."""


def has_matplotlib() -> bool:
    """Whether a picture can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One job that has something to show."""

    name: str
    label: str
    facts: Facts
    cost: Cost
    colour: Any
    marker: str
    front: bool

    @property
    def style(self) -> dict[str, Any]:
        """How its marks look; a job off the Pareto front is paler."""
        return {"color": self.colour, "marker": self.marker, "markersize": 7, "linestyle": "none"}


def png_of(title: str, rows: Sequence[Row], costs: Sequence[Cost | None]) -> bytes:
    """Draw the comparison.

    Six panels: step time of uniform and of all other batches, and padding, by tokens in the batch;
    memory and start-up time by number of graphs; mean decode step against memory, with the front.
    Jobs without graphs are named below and not drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    jobs = _jobs(rows, costs)
    lines = -(-len(_named(jobs)) // 2)
    figure: Any = Figure(figsize=(15, 8.6 + 0.26 * lines), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower, legend = figure.subfigures(3, 1, height_ratios=[4, 4, 0.3 + 0.26 * lines])
    axes = [*upper.subplots(1, 3), *lower.subplots(1, 3)]
    figure.suptitle(title, fontsize=14, fontweight="bold")
    _steps(axes[0], "decode", "Step time of uniform decode batches", jobs)
    _steps(axes[1], "mixed", "Step time of all other batches", jobs)
    _padding(axes[2], jobs)
    _memory(axes[3], jobs)
    _start(axes[4], jobs)
    _front(axes[5], jobs)
    _legend(legend, jobs, rows)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "pcgsvc"})
    return out.getvalue()


def _jobs(rows: Sequence[Row], costs: Sequence[Cost | None]) -> list[_Job]:
    from matplotlib import colormaps

    palette = colormaps["tab10"]
    pairs = [(r, c) for r, c in zip(rows, costs, strict=True) if r.ok and c is not None]
    shown = [(r, c) for r, c in pairs if r.facts is not None and r.facts.graphs is not None]
    # Who gets a colour: the front first, then the others in their order.
    ranked = sorted(range(len(shown)), key=lambda at: (not shown[at][1].front, at))
    coloured = set(ranked[:_COLOURED])
    jobs: list[_Job] = []
    for at, (row, cost) in enumerate(shown):
        assert row.facts is not None
        mine = at in coloured
        number = sum(job.colour != _GREY for job in jobs)
        words = " ".join(f"{key}={value}" for key, value in row.differs.items()) or "-"
        jobs.append(
            _Job(
                name=row.name,
                label=textwrap.shorten(f"{row.name}: {words}", _LABEL_WIDTH, placeholder=" …"),
                facts=row.facts,
                cost=cost,
                colour=palette(number) if mine else _GREY,
                marker=_MARKERS[number % len(_MARKERS)] if mine else ".",
                front=cost.front,
            )
        )
    return jobs


def _named(jobs: Sequence[_Job]) -> list[_Job]:
    return [job for job in jobs if job.colour != _GREY]


# ---- by tokens in the batch ----------------------------------------------------------------------


def _steps(axes: Any, kind: Kind, title: str, jobs: Sequence[_Job]) -> None:
    """Draw what a batch of so many tokens takes: a stair per job, a mark at each captured size."""
    axes.set_title(title)
    axes.set_ylabel("µs per step")
    plain: dict[int, list[float]] = defaultdict(list)
    times: list[float] = []
    for job in jobs:
        steps = [s for s in job.cost.ladder.steps(kind) if s.step_us is not None]
        if not steps:
            continue
        # A batch is padded up to the next size, so a stair's value holds to the left of its mark.
        sizes = [s.size for s in steps]
        values = [float(s.step_us or 0) for s in steps]
        times += values
        axes.plot(
            [1, *sizes],
            [values[0], *values],
            color=job.colour,
            linewidth=1.4,
            drawstyle="steps-pre",
        )
        axes.plot(sizes, values, **job.style)
        for step in steps:
            if step.plain_us is not None:
                plain[step.size].append(step.plain_us)
    means = {size: sum(values) / len(values) for size, values in sorted(plain.items())}
    if means:
        axes.plot(list(means), list(means.values()), "--", color="black", label="plain module")
        axes.legend(loc="upper left", frameon=False)
        times += means.values()
    _tokens(axes, jobs)
    if not times:
        _nothing(axes, "not timed")
    elif max(times) > 8 * min(times):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _padding(axes: Any, jobs: Sequence[_Job]) -> None:
    """Draw which share of a step is padding; jobs with the same sizes share a line."""
    axes.set_title("Padding by tokens in the batch")
    axes.set_ylabel("padding, % of the rows computed")
    ladders: dict[tuple[int, ...], list[_Job]] = defaultdict(list)
    for job in jobs:
        sizes = tuple(s.size for s in _general_steps(job))
        if sizes:
            ladders[sizes].append(job)
    # The shortest last and dashed, or a longer ladder with the same first rungs would hide it.
    for at, (sizes, members) in enumerate(sorted(ladders.items(), key=lambda i: -max(i[0]))):
        counts = range(1, max(sizes) + 1)
        shares = [100 * (1 - n / min(s for s in sizes if s >= n)) for n in counts]
        first = next((job for job in members if job.colour != _GREY), members[0])
        names = _list_of(job.name for job in members)
        axes.plot(
            list(counts),
            shares,
            color=first.colour,
            linewidth=1.6,
            linestyle=_DASHES[at % len(_DASHES)],
            marker="." if max(sizes) <= 64 else None,
            label=f"job{'s' if len(members) > 1 else ''} {names}",
        )
    _tokens(axes, jobs)
    axes.set_ylim(-2, max(axes.get_ylim()[1], 20) * 1.15)
    if not ladders:
        _nothing(axes, "nothing captured")
    elif len(ladders) <= _COLOURED:
        axes.legend(loc="upper left", frameon=False, ncol=2)


def _general_steps(job: _Job) -> list[Step]:
    """Return the entries for any batch, or those for uniform ones where there are no others."""
    found = [job.cost.ladder.steps(kind) for kind in reversed(KINDS)]
    return next((steps for steps in found if steps), [])


def _tokens(axes: Any, jobs: Sequence[_Job]) -> None:
    axes.set_xlabel("tokens in the batch")
    sizes = sorted({s.size for job in jobs for s in job.facts.steps})
    if sizes and max(sizes) > 8:
        axes.set_xscale("log", base=2)
    powers = [2**k for k in range(31) if sizes and 2**k <= max(sizes)]
    axes.set_xticks(powers or [1], [str(p) for p in powers or [1]])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


# ---- by number of graphs -------------------------------------------------------------------------


def _memory(axes: Any, jobs: Sequence[_Job]) -> None:
    axes.set_title("Memory by number of graphs")
    axes.set_ylabel("MiB that the graphs hold")
    _scatter(axes, jobs, _num_graphs, lambda job: (job.cost.memory_bytes or 0) / 2**20)
    _graphs(axes)


def _start(axes: Any, jobs: Sequence[_Job]) -> None:
    """Draw what a start takes, and the part of it that more graphs make longer."""
    axes.set_title("Start-up time by number of graphs")
    axes.set_ylabel("seconds until the runner is ready")
    _scatter(axes, jobs, _num_graphs, lambda job: job.facts.start_s, hollow=_is_cold)
    for job in jobs:
        seconds = job.facts.report["compile"]["seconds"]
        capture = seconds.get("warmup", 0.0) + seconds.get("capture", 0.0)
        axes.plot(_num_graphs(job), capture, marker="_", markersize=13, color=job.colour)
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


def _front(axes: Any, jobs: Sequence[_Job]) -> None:
    """Draw the two costs against each other; down and to the left is better."""
    axes.set_title("Pareto front: decode step against memory")
    axes.set_xlabel("MiB that the graphs hold")
    limit = max((job.cost.limit for job in jobs), default=0)
    axes.set_ylabel(f"mean µs per decode step, 1 to {limit} tokens")
    known = [job for job in jobs if job.cost.objectives is not None]
    if not known:
        _nothing(axes, "not timed")
        return
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for job in known:
        if job.front:
            groups[job.facts.subject].append(_point(job))
    for points in groups.values():
        points.sort()
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color="black",
            linewidth=1,
            linestyle=":",
            drawstyle="steps-post",
            zorder=1,
        )
    _scatter(axes, known, lambda j: _point(j)[0], lambda j: _point(j)[1], hollow=_is_off_front)
    axes.plot([], [], "ko", label="on the front")
    if not all(job.front for job in known):
        axes.plot([], [], "ko", markerfacecolor="white", label="another is no worse in both")
    axes.legend(loc="best", frameon=False)


def _scatter(
    axes: Any,
    jobs: Sequence[_Job],
    x: Callable[[_Job], float],
    y: Callable[[_Job], float],
    hollow: Callable[[_Job], bool] = lambda job: False,
) -> None:
    """Mark each job, with its number beside it; jobs on one spot share the label."""
    spots: dict[tuple[float, float], list[_Job]] = defaultdict(list)
    for job in jobs:
        axes.plot(
            x(job), y(job), **job.style | ({"markerfacecolor": "white"} if hollow(job) else {})
        )
        spots[x(job), y(job)].append(job)
    for spot, members in spots.items():
        axes.annotate(
            _list_of(job.name for job in members),
            spot,
            xytext=(7, 5),
            textcoords="offset points",
            color=members[0].colour,
            fontsize=10,
        )
    axes.margins(0.2)
    axes.grid(alpha=0.25)
    if not jobs:
        _nothing(axes, "no job has graphs")


def _point(job: _Job) -> tuple[float, float]:
    assert job.cost.objectives is not None
    memory, time = job.cost.objectives
    return memory / 2**20, time


def _num_graphs(job: _Job) -> int:
    assert job.facts.graphs is not None
    return int(job.facts.graphs["num_graphs"])


def _is_cold(job: _Job) -> bool:
    return bool(job.facts.report["compile"]["start"] == "cold")


def _is_off_front(job: _Job) -> bool:
    return not job.front


# ---- words ---------------------------------------------------------------------------------------


def _legend(figure: Any, jobs: Sequence[_Job], rows: Sequence[Row]) -> None:
    """Name the jobs, and say what is not drawn and what the figures are not."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **job.style, label=job.label) for job in _named(jobs)]
    notes = []
    if len(handles) < len(jobs):
        notes.append(f"grey: {len(jobs) - len(handles)} more jobs")
    missing = [row.name for row in rows if row.name not in {job.name for job in jobs}]
    if missing:
        notes.append(f"not drawn, failed or without graphs: {_list_of(missing)}")
    if any(job.facts.graphs and job.facts.graphs["backend"] == "recorded" for job in jobs):
        notes.append("recorded graphs are the CPU's stand-in and say nothing of CUDA graphs' speed")
    if len({job.facts.subject for job in jobs}) > 1:
        notes.append("models or devices differ: compare times within one of them only")
    if handles:
        figure.legend(handles=handles, loc="upper center", ncol=2, frameon=False, fontsize=11)
    figure.text(0.5, 0.0, "; ".join(notes), ha="center", va="bottom", fontsize=10, color="#444444")


def _list_of(names: Iterable[str]) -> str:
    """Return names as text, runs of many cut."""
    words = list(names)
    return ", ".join(words if len(words) <= 6 else [*words[:5], f"… {words[-1]}"])


def _nothing(axes: Any, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=_GREY)
