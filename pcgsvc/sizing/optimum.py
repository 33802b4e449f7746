"""The best K sizes for every K at once: an exact dynamic programme.

In: candidate sizes with the calls and the cost of each. Out: for K = 1, 2, …, the sizes of least
expected cost. Knows nothing of where calls and costs come from.

A call runs at the smallest chosen size that holds it. So, with prefix sums P of the calls and c the
cost of a size, the stretch (i, j] costs w(i, j) = c_j (P_j - P_i), and K sizes cost the shortest
path of K edges from 0 to n. Calls of several kinds, each with a cost of its own, add up.

For i <= i' <= j <= j': w(i,j') + w(i',j) - w(i,j) - w(i',j') = (c_j' - c_j)(P_i' - P_i), which is
at least 0 when the cost does not fall. That is Monge's condition: the best predecessor of j does
not fall with j, so a row of the programme is found by divide and conquer in O(n log n) instead of
O(n²), and the least cost is convex in K: each further size saves no more than the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Calls of one kind, by candidate size."""

    calls: Floats
    """[n] calls that this candidate is the smallest to hold."""
    cost: Floats
    """[n] of one call that runs at this candidate; does not fall."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best choice of one number of sizes."""

    chosen: list[int]
    """Indices of candidates, ascending; the last one is always among them."""
    cost: float
    """Expected cost times calls."""


def best_sizes(kinds: Sequence[Kind], max_count: int) -> list[Optimum]:
    """Return the best choice of 1, 2, … sizes, up to `max_count` or the number of candidates.

    Args:
        kinds: of equal length n, at least 1.
        max_count: largest number of sizes, at least 1.
    """
    count = len(kinds[0].calls)
    assert all(bool(np.all(np.diff(kind.cost) >= 0)) for kind in kinds), "a cost falls"
    sums = [np.concatenate(([0.0], np.cumsum(kind.calls))) for kind in kinds]
    costs = [np.concatenate(([0.0], kind.cost)) for kind in kinds]
    levels = _levels(count)
    through = sum(c * p for c, p in zip(costs, sums, strict=True))  # w(0, j)
    best = np.asarray(through, dtype=np.float64)
    before = [np.zeros(count + 1, dtype=np.int64)]
    found = [Optimum(chosen=[count - 1], cost=float(best[count]))]
    for used in range(1, min(max_count, count)):
        head, before_row = _next_row(best, costs, sums, levels, used)
        best = head + through
        before.append(before_row)
        found.append(Optimum(chosen=_trace(before, count), cost=float(best[count])))
    return found


def _trace(before: list[Ints], count: int) -> list[int]:
    """Follow the predecessors from the last candidate to the first stretch."""
    at, chosen = count, []
    for row in reversed(before):
        chosen.append(at - 1)
        at = int(row[at])
    return chosen[::-1]


_Level = tuple[Ints, Ints, Ints]
"""Rows that are solved together; of the levels before, the solved row before each (or 0), and after
it (or n + 1)."""


def _levels(count: int) -> list[_Level]:
    """Return rows 1 … n in the order of a breadth-first bisection."""
    levels, spans = [], [(0, count + 1)]
    while spans:
        rows = [(low + high) // 2 for low, high in spans]
        lows, highs = zip(*spans, strict=True)
        levels.append((np.array(rows), np.array(lows), np.array(highs)))
        halves = [
            half
            for (low, high), row in zip(spans, rows, strict=True)
            for half in ((low, row), (row, high))
        ]
        spans = [(low, high) for low, high in halves if high - low > 1]
    return levels


def _next_row(
    best: Floats, costs: Sequence[Floats], sums: Sequence[Floats], levels: list[_Level], used: int
) -> tuple[Floats, Ints]:
    """Return for each j the least of best_i + w(i, j) - w(0, j) over i < j, and its first i.

    Predecessors are at least `used`, the candidates that the path so far has needed. Rows j <= used
    have none: their value is infinite.
    """
    count = len(best) - 1
    value = np.full(count + 1, np.inf)
    first = np.full(count + 2, used, dtype=np.int64)
    first[count + 1] = count
    for level in levels:
        rows, left, right = (array[level[0] > used] for array in level)
        if not len(rows):
            continue
        low = first[left]  # of a row without a solution: `used`
        high = np.minimum(first[right], rows - 1)
        lengths = high - low + 1
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        owner = np.repeat(np.arange(len(rows)), lengths)
        index = np.arange(len(owner)) - starts[owner] + low[owner]
        totals = best[index]
        for cost, calls in zip(costs, sums, strict=True):
            totals -= cost[rows][owner] * calls[index]
        value[rows] = np.minimum.reduceat(totals, starts)
        hits = np.flatnonzero(totals == value[rows][owner])
        leftmost = hits[np.concatenate(([True], np.diff(owner[hits]) > 0))]
        first[rows] = index[leftmost]
    return value, first[: count + 1]
