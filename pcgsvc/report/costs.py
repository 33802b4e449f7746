"""What a batch of n tokens costs under each of several jobs: time, padding and memory.

In: the rows of a comparison. Out: a `Cost` per row, and which rows are on the Pareto front. Knows
nothing of tables, files or plots.

Token counts from 1 to the largest size that any of the jobs captured count equally. A batch that
none of a job's graphs hold is run as the plain module; its time is read off a line through the
sizes at which the jobs timed that.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pcgsvc.report.rows import Facts, Row, Step

Kind = Literal["decode", "mixed"]
"""Batches in which every request has `capture.uniform_query_len` new tokens, and all others."""
KINDS: tuple[Kind, ...] = ("decode", "mixed")


class _Rungs:
    """Entries of one mode, by size."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = sorted(steps, key=lambda step: step.size)
        self._sizes = [step.size for step in self.steps]

    def find(self, num_tokens: int) -> Step | None:
        at = bisect.bisect_left(self._sizes, num_tokens)
        return self.steps[at] if at < len(self.steps) else None


class Ladder:
    """The captured entries of one job, as its dispatcher climbs them."""

    def __init__(self, facts: Facts) -> None:
        mode = facts.report["mode"]
        own = mode["decode"] != mode["mixed"]  # else the general entries serve both
        self._general = _Rungs(s for s in facts.steps if s.mode == mode["mixed"])
        self._uniform = _Rungs(s for s in facts.steps if own and s.mode == mode["decode"])
        self._query_len = facts.query_len

    def steps(self, kind: Kind) -> list[Step]:
        """Return the entries that are meant for such batches, by size."""
        return (self._uniform.steps if kind == "decode" else []) or self._general.steps

    def find(self, kind: Kind, num_tokens: int) -> Step | None:
        """Return the entry that serves a batch; None: it is run plain."""
        found = self._uniform.find(num_tokens) if kind == "decode" else None
        return found or self._general.find(num_tokens)

    def counts(self, kind: Kind, limit: int) -> range:
        """Return the token counts that such batches can have."""
        least = self._query_len if kind == "decode" else 1
        return range(least, limit + 1, least)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a job costs; None: its reports do not tell."""

    limit: int
    """The largest token count that was looked at."""
    ladder: Ladder
    mean_us: Mapping[Kind, float | None]
    """Microseconds per step, token counts up to `limit` counting equally."""
    padding: Mapping[Kind, float | None]
    """Share of padding among all rows that are computed, counting likewise."""
    served: Mapping[Kind, float | None]
    """Share of those token counts that a graph serves."""
    memory_bytes: int | None
    front: bool
    """No other job has a shorter decode step without more memory, nor less memory without a longer
    step."""

    @property
    def objectives(self) -> tuple[float, float] | None:
        """Memory and mean decode step: what the Pareto front weighs; None: one is not told."""
        time = self.mean_us["decode"]
        return None if time is None or self.memory_bytes is None else (self.memory_bytes, time)


def costs_of(rows: Sequence[Row]) -> list[Cost | None]:
    """Return the cost of each job that has a report.

    Jobs that ran another model, or on another device, are weighed among themselves only; a job
    that failed is on no front.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        if row.facts is not None:
            groups[row.facts.subject].append(at)
    costs: list[Cost | None] = [None] * len(rows)
    for members in groups.values():
        found = {at: facts for at in members if (facts := rows[at].facts) is not None}
        limit = max((s.size for facts in found.values() for s in facts.steps), default=0)
        plain = {kind: _Plain(kind, list(found.values())) for kind in KINDS}
        made = {at: _cost(facts, limit, plain) for at, facts in found.items()}
        points = {at: c.objectives for at, c in made.items() if rows[at].ok}
        known = {at: point for at, point in points.items() if point is not None}
        for at, cost in made.items():
            best = at in known and _is_best(known[at], list(known.values()))
            costs[at] = replace(cost, front=best)
    return costs


class _Plain:
    """The plain module's time by token count."""

    def __init__(self, kind: Kind, group: Sequence[Facts]) -> None:
        times: dict[int, list[float]] = defaultdict(list)
        for facts in group:
            for step in Ladder(facts).steps(kind):
                if step.plain_us is not None:
                    times[step.size].append(step.plain_us)
        self._sizes = sorted(times)
        self._times = [float(np.mean(times[size])) for size in self._sizes]

    def __call__(self, num_tokens: int) -> float | None:
        """Return microseconds; None: nobody timed it."""
        return float(np.interp(num_tokens, self._sizes, self._times)) if self._sizes else None


def _cost(facts: Facts, limit: int, plain: Mapping[Kind, _Plain]) -> Cost:
    ladder = Ladder(facts)
    return Cost(
        limit=limit,
        ladder=ladder,
        mean_us={kind: _mean_us(ladder, kind, limit, plain[kind]) for kind in KINDS},
        padding={kind: _padding(ladder, kind, limit) for kind in KINDS},
        served={kind: _served(ladder, kind, limit) for kind in KINDS},
        memory_bytes=facts.memory_bytes,
        front=False,
    )


def _mean_us(ladder: Ladder, kind: Kind, limit: int, plain: _Plain) -> float | None:
    times = []
    for count in ladder.counts(kind, limit):
        step = ladder.find(kind, count)
        time = plain(count) if step is None else step.step_us
        if time is None:
            return None
        times.append(time)
    return float(np.mean(times)) if times else None


def _padding(ladder: Ladder, kind: Kind, limit: int) -> float | None:
    counts = ladder.counts(kind, limit)
    if not counts:
        return None
    found = [ladder.find(kind, count) for count in counts]
    computed = sum(
        count if step is None else step.size for count, step in zip(counts, found, strict=True)
    )
    return 1 - sum(counts) / computed


def _served(ladder: Ladder, kind: Kind, limit: int) -> float | None:
    counts = ladder.counts(kind, limit)
    found = [ladder.find(kind, count) is not None for count in counts]
    return sum(found) / len(found) if found else None


def _is_best(point: tuple[float, float], points: Sequence[tuple[float, float]]) -> bool:
    return not any(
        other != point and all(a <= b for a, b in zip(other, point, strict=True))
        for other in points
    )
