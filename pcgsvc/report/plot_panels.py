"""The panels of the picture that compares jobs.

In: matplotlib's axes, and jobs with their colours. Out: what is drawn on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcgsvc.report.costs import Cost, Kind
from pcgsvc.report.rows import Row, Step

GREY = "#9a9a9a"
"""Of jobs that have no colour of their own."""

_GRAPHS, _MEMORY = "graphs.num_graphs", "memory_bytes"
_START, _MEAN = "seconds.total", "mean_us.decode"
_MIB = "MiB that the graphs hold"
_DASHES = ("-", (0, (4, 3)), (0, (1.5, 2.5)))
_WIDE = 8.0
"""Largest over smallest value from which on an axis is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class PlotJob:
    """One job that has something to show."""

    row: Row
    cost: Cost
    """Of a report with `graphs`."""
    figures: Mapping[str, Any]
    """By dotted names, see `figures.flat`."""
    colour: Any
    marker: str

    @property
    def style(self) -> dict[str, Any]:
        """How its marks look."""
        return {"color": self.colour, "marker": self.marker, "markersize": 7, "linestyle": "none"}

    def value(self, name: str) -> float:
        """Return a figure as it is drawn: bytes in MiB."""
        number = float(self.figures[name])
        return number / 2**20 if name.endswith("_bytes") else number


def list_of(names: Iterable[str]) -> str:
    """Return names as text, the middle of many left out."""
    words = list(names)
    return ", ".join(words if len(words) <= 6 else [*words[:5], f"… {words[-1]}"])


# ---- by tokens in the batch ----------------------------------------------------------------------


def draw_steps(axes: Any, kind: Kind, title: str, jobs: Sequence[PlotJob]) -> None:
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


def _spread(axes: Any, job: PlotJob, steps: Sequence[Step]) -> None:
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


def draw_padding(axes: Any, jobs: Sequence[PlotJob]) -> None:
    """Draw which share of a step is padding; jobs with the same sizes share a line."""
    axes.set(title="Padding by tokens in the batch", ylabel="padding, % of the rows computed")
    ladders: dict[tuple[int, ...], list[PlotJob]] = defaultdict(list)
    for job in jobs:
        ladder = job.cost.ladder  # where no entry takes any batch, those for uniform ones count
        sizes = tuple(s.size for s in ladder.steps("mixed") or ladder.steps("decode"))
        if sizes:
            ladders[sizes].append(job)
    # The shortest last and dashed, or a longer ladder with the same first rungs would hide it.
    for at, (sizes, members) in enumerate(sorted(ladders.items(), key=lambda i: -max(i[0]))):
        counts = range(1, max(sizes) + 1)
        shares = [100 * (1 - n / min(s for s in sizes if s >= n)) for n in counts]
        first = next((job for job in members if job.colour != GREY), members[0])
        dashes = _DASHES[at % len(_DASHES)]
        dots = "." if max(sizes) <= 64 else None
        names = list_of(job.row.name for job in members)
        label = f"job{'s' if len(members) > 1 else ''} {names}"
        style = {"color": first.colour, "linewidth": 1.6, "linestyle": dashes, "marker": dots}
        axes.plot(list(counts), shares, label=label, **style)
    _tokens(axes, jobs)
    axes.set_ylim(-2, max(axes.get_ylim()[1], 20) * 1.15)
    if not ladders:
        _nothing(axes, "nothing captured")
    elif len(ladders) <= 8:
        axes.legend(loc="upper left", frameon=False, ncol=2)


def _tokens(axes: Any, jobs: Sequence[PlotJob]) -> None:
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


def draw_memory(axes: Any, jobs: Sequence[PlotJob]) -> None:
    """Draw what the graphs hold."""
    axes.set(title="Memory by number of graphs", ylabel=_MIB)
    _scatter(axes, jobs, _GRAPHS, _MEMORY)
    _graphs(axes)


def draw_start(axes: Any, jobs: Sequence[PlotJob]) -> None:
    """Draw what a start takes, and the part of it that more graphs make longer."""
    axes.set(title="Start-up time by number of graphs", ylabel="seconds until the runner is ready")
    _scatter(axes, jobs, _GRAPHS, _START, hollow=_is_cold)
    for job in jobs:
        capture = sum(job.figures.get(f"seconds.{phase}", 0.0) for phase in ("warmup", "capture"))
        axes.plot(job.value(_GRAPHS), capture, marker="_", markersize=13, color=job.colour)
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


def _is_cold(job: PlotJob) -> bool:
    return bool(job.figures["compile.start"] == "cold")


# ---- against each other --------------------------------------------------------------------------


def draw_front(axes: Any, jobs: Sequence[PlotJob]) -> None:
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
    fronts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for job in known:
        if job.cost.front:
            fronts[job.cost.facts.subject].append((job.value(_MEMORY), job.value(_MEAN)))
    for points in fronts.values():
        stair = {"drawstyle": "steps-post", "linewidth": 1, "zorder": 1}
        axes.plot(*zip(*sorted(points), strict=True), ":", color="black", **stair)
    _scatter(axes, known, _MEMORY, _MEAN, hollow=lambda job: not job.cost.front)
    times = [job.value(_MEAN) for job in known]
    if max(times) > _WIDE * min(times):
        _values(axes, times)
    axes.plot([], [], "ko", label="on the front")
    if not all(job.cost.front for job in known):
        axes.plot([], [], "ko", markerfacecolor="white", label="another is no worse in both")
    axes.legend(loc="best", frameon=False)


# ---- shared --------------------------------------------------------------------------------------


def _scatter(
    axes: Any,
    jobs: Sequence[PlotJob],
    x: str,
    y: str,
    hollow: Callable[[PlotJob], bool] = lambda job: False,
) -> None:
    """Mark each job at two of its figures, with its number; jobs on one spot share the label."""
    spots: dict[tuple[float, float], list[PlotJob]] = defaultdict(list)
    for job in jobs:
        face = {"markerfacecolor": "white"} if hollow(job) else {}
        spot = job.value(x), job.value(y)
        axes.plot(*spot, **job.style | face)
        spots[spot].append(job)
    place = {"xytext": (7, 5), "textcoords": "offset points", "fontsize": 10}
    for spot, members in spots.items():
        names = list_of(job.row.name for job in members)
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
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=GREY)
