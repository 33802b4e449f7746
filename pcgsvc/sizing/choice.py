"""The choice of capture sizes for a traffic: the best sizes of every number, and how many to take.

In: traffic, modes, cost, limits. Out: a `SizePlan`: a curve over K with a recommendation. Knows
nothing of files, models or graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pcgsvc.config import Mode, SizingConfig, schedule
from pcgsvc.errors import ConfigError
from pcgsvc.sizing.cost import StepCost
from pcgsvc.sizing.expect import Forecast, Service, arrays
from pcgsvc.sizing.optimum import Floats, Ints, Kind, best_sizes
from pcgsvc.sizing.traffic import Traffic

_NOISE = 0.05
"""Share by which measured times may be moved without a note."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One choice of sizes and what it is expected to do."""

    sizes: list[int]
    padding_share: float
    """Padding rows by all rows that run."""
    step_us: float
    """Mean time of a call."""
    uncovered: int
    """Calls that no graph serves."""
    num_graphs: int | None
    """None: no report says how many a size makes."""
    memory_bytes: int | None
    """Of captured graphs; None: no report to scale from."""

    @property
    def count(self) -> int:
        """How many sizes."""
        return len(self.sizes)


@dataclass(kw_only=True)
class SizePlan:
    """What was found out about sizes for one traffic."""

    traffic: Traffic
    cost: StepCost
    service: Service
    points: list[Point]
    """The best sizes for K = 1, 2, …"""
    chosen: Point
    """The recommended one of `points`."""
    why: str
    """Why this many."""
    no_padding_us: float
    """Mean time of a call if every row count had its own size."""
    num_distinct: int
    """Row counts that graphs may serve."""
    uncovered: int
    """Calls that no graph serves, whatever the sizes."""
    others: dict[str, Point] = field(default_factory=dict)
    """Sizes to compare with, by what they are."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: limits that were met, figures beyond what was measured."""

    def as_json(self) -> dict[str, Any]:
        """Return JSON types."""
        simulation = self.traffic.simulation
        recommended = {**_point(self.chosen), "why": self.why, "override": self.override}
        if simulation is not None:
            recommended |= {"mode": self.mode.value, "max_requests": self.max_requests}
        return {
            "traffic": {
                "file": self.traffic.source,
                "calls": self.traffic.num_calls,
                "uniform_calls": sum(self.traffic.uniform.values()),
                "rows": self.traffic.num_rows,
                "distinct": self.num_distinct,
                "uncovered_calls": self.uncovered,
                "simulation": None if simulation is None else simulation.as_json(),
            },
            "cost": self.cost.words,
            "cost_unit": self.cost.unit,
            "mode": {"decode": self.service.decode.value, "mixed": self.service.mixed.value},
            "no_padding_us": self.no_padding_us,
            "curve": [_point(p) for p in self.points],
            "others": {name: _point(p) for name, p in self.others.items()},
            "recommended": recommended,
            "notes": list(self.notes),
        }

    @property
    def override(self) -> str:
        """What to put on the command line; quote it for the shell."""
        return f"capture.sizes=[{','.join(map(str, self.chosen.sizes))}]"

    @property
    def mode(self) -> Mode:
        """The mode that captures what the traffic uses, and no more."""
        decode, mixed = self.service.decode, self.service.mixed
        if decode is mixed or not self.traffic.uniform:
            return mixed
        if mixed is Mode.NONE or not self.traffic.general:
            return Mode.FULL_DECODE_ONLY
        return Mode.FULL_AND_PIECEWISE

    @property
    def max_requests(self) -> int | None:
        """Most requests of a step and of the entry that serves the largest uniform one.

        None: the file holds calls, whose requests are not known.
        """
        if self.traffic.simulation is None:
            return None
        query_len = self.service.query_len
        largest = max(self.traffic.uniform, default=0)
        padded = [s for s in self.chosen.sizes if s >= largest and s % query_len == 0]
        own = min(padded, default=0) // query_len if largest else 0
        return max(self.traffic.simulation.max_requests, own)


def _point(point: Point) -> dict[str, Any]:
    return {"count": point.count, **asdict(point)}


def plan_sizes(
    traffic: Traffic,
    service: Service,
    cost: StepCost,
    sizing: SizingConfig,
    *,
    max_size: int | None,
    compare: dict[str, list[int]] | None = None,
) -> SizePlan:
    """Find the sizes of least expected time, for every K up to `sizing.max_count`.

    The largest size is always the largest row count within `max_size` that graphs may serve: what
    can be covered is covered.

    Args:
        traffic: as recorded.
        service: which modes serve it.
        cost: of a step.
        sizing: largest K, and K of the recommendation or `min_gain` of the knee, see `_knee`.
        max_size: calls of more rows stay without a graph; None: no limit.
        compare: sizes to judge as well, by what they are.

    Raises:
        ConfigError: graphs can serve no call of the traffic.
    """
    traffic = traffic.as_dispatched(service.query_len)
    candidates, kinds, uncovered = _candidates(traffic, service, cost, max_size)
    forecast = Forecast(traffic, service, cost)

    def point(sizes: Sequence[int]) -> Point:
        expected, memory = forecast.of(sizes), cost.memory
        return Point(
            sizes=sorted(sizes),
            padding_share=expected.padding_share,
            step_us=expected.step_us,
            uncovered=round(expected.uncovered),
            num_graphs=None if memory is None else memory.graphs(sizes),
            memory_bytes=None if memory is None else memory.at(sizes),
        )

    wanted = max(sizing.max_count, sizing.count or 0)
    points = [
        point([int(candidates[i]) for i in optimum.chosen]) for optimum in best_sizes(kinds, wanted)
    ]
    least = forecast.of([int(c) for c in candidates]).step_us
    # What a call too far from its size costs without a graph is not known: it counts as padded.
    padded = Forecast(traffic, replace(service, max_padding=None), cost)
    times = [padded.of(p.sizes).step_us for p in points]
    at, why = _knee(times, least, sizing.min_gain)
    notes = [] if traffic.simulation is None else list(traffic.simulation.notes)
    if sizing.count is not None:
        at, why = min(sizing.count, len(points)) - 1, f"sizing.count={sizing.count}"
    if len(points) < wanted:
        notes.append(
            f"{len(candidates)} distinct sizes leave no padding, so the curve ends there, not at "
            f"{wanted}"
        )
    notes += _notes(candidates, cost, uncovered, traffic.num_calls, max_size)
    if (far := points[at].uncovered - uncovered) > 0:
        notes.append(
            f"{far} of {traffic.num_calls} calls run without a graph, since their next size is "
            f"farther than capture.max_padding={service.max_padding} lets them be padded"
        )
    largest, query_len = int(candidates[-1]), service.query_len
    named = {"powers of two": _powers(largest), "default schedule": schedule(largest, query_len)}
    return SizePlan(
        traffic=traffic,
        cost=cost,
        service=service,
        points=points,
        chosen=points[at],
        why=why,
        no_padding_us=least,
        num_distinct=len(candidates),
        uncovered=uncovered,
        others={name: point(sizes) for name, sizes in {**named, **(compare or {})}.items()},
        notes=notes,
    )


def _powers(largest: int) -> list[int]:
    """Return the powers of two below the largest size, and it."""
    return sorted({largest, *(2**e for e in range(largest.bit_length()) if 2**e < largest)})


def _knee(times: Sequence[float], least: float, min_gain: float) -> tuple[int, str]:
    """Return the index of the recommended number of sizes, and why.

    The rule: a further size is taken while it saves at least `min_gain` of the step time without
    padding. The least cost is convex in K (see `optimum`), so all sizes after the first one that
    saves less save less, too.
    """
    for at, (time, after) in enumerate(itertools.pairwise(times)):
        if time - after < min_gain * least:
            return at, f"one more would save less than {100 * min_gain:g} % of a step"
    return len(times) - 1, "the curve ends there"


def _candidates(
    traffic: Traffic, service: Service, cost: StepCost, max_size: int | None
) -> tuple[Ints, list[Kind], int]:
    """Return the sizes worth taking, the calls of each kind by them, and the calls left out.

    A size between two row counts serves what the lower one does and costs no less. Where uniform
    batches have entries of their own and several rows per request, sizes are multiples of that, so
    that each serves both kinds.
    """
    served: dict[bool, tuple[Ints, Floats]] = {}
    uncovered = 0
    for uniform, part in ((False, traffic.general), (True, traffic.uniform)):
        rows, calls = arrays(part)
        keep = service.serves(uniform, rows)
        if max_size is not None:
            keep &= rows <= max_size
        served[uniform] = rows[keep], calls[keep]
        uncovered += round(float(calls[~keep].sum()))
    general, uniform_rows = served[False][0], served[True][0]
    step = service.query_len if service.own_uniform and len(uniform_rows) else 1
    rounded = -(-general // step) * step
    if max_size is not None:
        rounded = np.where(rounded > max_size, general.max(initial=0), rounded)
    candidates = np.unique(np.concatenate((rounded, uniform_rows)))
    if not len(candidates):
        raise ConfigError(_nothing_served(traffic, service, max_size))
    kinds = []
    for uniform, at in ((False, rounded), (True, uniform_rows)):
        if len(at):
            where = np.searchsorted(candidates, at)
            weights = served[uniform][1]
            by_size: Floats = np.zeros(len(candidates))
            np.add.at(by_size, where, weights)
            mode = service.decode if uniform else service.mixed
            times = cost.graphs[mode].at(candidates)
            if uniform and step > 1 and service.mixed is not Mode.NONE:
                # The largest size may be no multiple; dispatch falls back to its other entry.
                other = cost.graphs[service.mixed].at(candidates)
                times = np.maximum.accumulate(np.where(candidates % step, other, times))
            kinds.append(Kind(calls=by_size, cost=_rows_decide_ties(times, candidates)))
    return candidates, kinds, uncovered


def _nothing_served(traffic: Traffic, service: Service, max_size: int | None) -> str:
    smallest, largest = traffic.distinct[0], traffic.distinct[-1]
    words = (
        f"traffic: '{traffic.source}' has calls of {smallest} to {largest} rows, "
        f"{sum(traffic.uniform.values())} of {traffic.num_calls} uniform, and graphs would serve "
        f"none of them with decode {service.decode.value}, all else {service.mixed.value}"
    )
    if max_size is not None and max_size < smallest:
        return f"{words}: capture.max_size={max_size} is below them all. Raise it."
    if service.mixed is Mode.NONE and not traffic.uniform:
        return (
            f"{words}. Mark uniform decode batches in the column uniform, or choose another mode."
        )
    return f"{words}. Raise attention.max_num_reqs={service.max_reqs}."


def _rows_decide_ties(times: Floats, candidates: Ints) -> Floats:
    """Return times in which the last size costs a millionth more, and the others their share of it.

    Where a measured cost is flat, many choices take equal time; the one with the least padding is
    then found.
    """
    tied: Floats = times + 1e-6 * times[-1] * candidates / candidates[-1]
    return tied


def _notes(
    candidates: Ints, cost: StepCost, uncovered: int, calls: int, max_size: int | None
) -> list[str]:
    notes = []
    if uncovered:
        limit = "" if max_size is None else f" (capture.max_size={max_size})"
        notes.append(
            f"{uncovered} of {calls} calls ({uncovered / calls:.2%}) run without a graph, whatever "
            f"the sizes{limit}"
        )
    if cost.measured is not None:
        low, high = cost.measured
        if cost.noise > _NOISE:
            notes.append(
                "the measured times fall with the size here and there, though more rows are never "
                f"less work, and were moved by up to {cost.noise:.0%}: measure again, on a machine "
                "that does nothing else and with larger bench.repeats"
            )
        if candidates[-1] > high:
            notes.append(f"times above {high} rows are extrapolated; nothing larger was measured")
        if candidates[0] < low:
            notes.append(f"times below {low} rows are taken as that of {low}")
    return notes
