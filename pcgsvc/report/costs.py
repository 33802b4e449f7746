"""What a batch of n tokens costs under each of several jobs: time, padding and memory.

In: the rows of a comparison. Out: each row with its `Cost`, and which jobs are on the Pareto front.

Token counts from 1 to the largest size that any of the jobs captured count equally. A batch that
none of a job's graphs hold is run as the plain module; its time is read off a line through the
sizes at which the jobs timed that.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from pcgsvc.report.rows import Facts, Row, Step

Kind = Literal["decode", "mixed"]
"""Batches in which every request has `capture.uniform_query_len` new tokens, and all others."""
KINDS: tuple[Kind, ...] = ("decode", "mixed")


class Ladder:
    """The captured entries of one job, as its dispatcher climbs them."""

    def __init__(self, facts: Facts) -> None:
        mode = facts.report["mode"]
        own = mode["decode"] != mode["mixed"]  # else the general entries serve both
        self._general = [s for s in facts.steps if s.mode == mode["mixed"]]
        self._uniform = [s for s in facts.steps if own and s.mode == mode["decode"]]
        self._query_len = facts.query_len

    def steps(self, kind: Kind) -> list[Step]:
        """Return the entries that are meant for such batches, by size."""
        return (self._uniform if kind == "decode" else []) or self._general

    def find(self, kind: Kind, num_tokens: int) -> Step | None:
        """Return the entry that serves a batch; None: it is run plain."""
        found = _smallest(self._uniform, num_tokens) if kind == "decode" else None
        return found or _smallest(self._general, num_tokens)

    def counts(self, kind: Kind, limit: int) -> range:
        """Return the token counts that such batches can have."""
        least = self._query_len if kind == "decode" else 1
        return range(least, limit + 1, least)


def _smallest(steps: Sequence[Step], num_tokens: int) -> Step | None:
    """Return the smallest of ascending entries that hold a batch."""
    at = bisect.bisect_left(steps, num_tokens, key=lambda step: step.size)
    return steps[at] if at < len(steps) else None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a job costs; None: its report does not have the times for it."""

    facts: Facts
    ladder: Ladder
    limit: int
    """The largest token count that was looked at."""
    mean_us: Mapping[Kind, float | None]
    """Microseconds per step, token counts up to `limit` counting equally."""
    padding: Mapping[Kind, float | None]
    """Share of padding among all rows that are computed, counting likewise."""
    served: Mapping[Kind, float | None]
    """Share of those token counts that a graph serves."""
    front: bool = False
    """No other job has a shorter decode step without more memory, nor less memory without a longer
    step."""

    @property
    def objectives(self) -> tuple[float, float] | None:
        """Memory and mean decode step: what the Pareto front weighs; None: one is not known."""
        time, memory = self.mean_us["decode"], self.facts.memory_bytes
        return None if time is None or memory is None else (memory, time)


class Job(NamedTuple):
    """One job of a comparison."""

    row: Row
    cost: Cost | None
    """None: it has no report."""

    @property
    def front(self) -> bool:
        """Whether it is on the Pareto front."""
        return self.cost is not None and self.cost.front


def weigh(rows: Sequence[Row]) -> list[Job]:
    """Return the jobs with their costs, in the order of `rows`.

    Jobs that ran another model, or on another device, are weighed among themselves only; a job
    that failed is on no front.
    """
    groups: dict[str, list[tuple[int, Facts]]] = defaultdict(list)
    for at, row in enumerate(rows):
        if row.facts is not None:
            groups[row.facts.subject].append((at, row.facts))
    costs: dict[int, Cost] = {}
    for members in groups.values():
        group = [facts for _, facts in members]
        limit = max((s.size for facts in group for s in facts.steps), default=0)
        plain = {kind: _PlainTimes(kind, group) for kind in KINDS}
        found = {at: _cost(facts, limit, plain) for at, facts in members}
        known = {at: c.objectives for at, c in found.items() if rows[at].ok and c.objectives}
        for at, cost in found.items():
            costs[at] = replace(cost, front=at in known and is_best(known[at], known.values()))
    return [Job(row, costs.get(at)) for at, row in enumerate(rows)]


class _PlainTimes:
    """The plain module's time by token count."""

    def __init__(self, kind: Kind, group: Sequence[Facts]) -> None:
        times: dict[int, list[float]] = defaultdict(list)
        for facts in group:
            for step in Ladder(facts).steps(kind):
                if step.plain_us is not None:
                    times[step.size].append(step.plain_us)
        self._sizes = sorted(times)
        self._times = [float(np.mean(times[size])) for size in self._sizes]

    def at(self, num_tokens: int) -> float | None:
        """Return microseconds; None: no job timed it."""
        return float(np.interp(num_tokens, self._sizes, self._times)) if self._sizes else None


def _cost(facts: Facts, limit: int, plain: Mapping[Kind, _PlainTimes]) -> Cost:
    ladder = Ladder(facts)
    found = {kind: _shares(ladder, kind, limit, plain[kind]) for kind in KINDS}
    mean_us, padding, served = ({kind: found[kind][at] for kind in KINDS} for at in range(3))
    return Cost(
        facts=facts, ladder=ladder, limit=limit, mean_us=mean_us, padding=padding, served=served
    )


def _shares(
    ladder: Ladder, kind: Kind, limit: int, plain: _PlainTimes
) -> tuple[float | None, float | None, float | None]:
    """Return mean time, padding and what graphs serve of batches of a kind; see `Cost`."""
    counts = ladder.counts(kind, limit)
    if not counts:
        return None, None, None
    batches = [(count, ladder.find(kind, count)) for count in counts]
    times = [plain.at(count) if step is None else step.step_us for count, step in batches]
    known = [time for time in times if time is not None]
    computed = sum(count if step is None else step.size for count, step in batches)
    return (
        float(np.mean(known)) if len(known) == len(times) else None,
        1 - sum(counts) / computed,
        sum(step is not None for _, step in batches) / len(batches),
    )


def is_best(point: Sequence[float], points: Iterable[Sequence[float]]) -> bool:
    """Whether no other point is as good in all costs and better in one."""
    return not any(
        other != point and all(a <= b for a, b in zip(other, point, strict=True))
        for other in points
    )
