"""The dynamic programme: against every choice there is, on many small cases; and its speed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcgsvc.sizing.optimum import Kind, best_sizes


def cost_of(kinds: Sequence[Kind], chosen: Sequence[int]) -> float:
    """Return the cost by definition: each call runs at the smallest chosen candidate above it."""
    return sum(
        float(kind.calls[i] * kind.cost[min(c for c in chosen if c >= i)])
        for kind in kinds
        for i in range(len(kind.calls))
    )


def brute_force(kinds: Sequence[Kind], count: int) -> float:
    last = len(kinds[0].calls) - 1
    others = itertools.combinations(range(last), count - 1)
    return min(cost_of(kinds, (*chosen, last)) for chosen in others)


def random_kinds(rng: np.random.Generator, most: int) -> list[Kind]:
    """Return one to three kinds of whole numbers, so that sums are exact; some costs are flat."""
    count = int(rng.integers(1, most + 1))
    return [
        Kind(
            calls=rng.integers(0, 7, count).astype(float),
            cost=np.cumsum(rng.integers(0, 5, count)).astype(float),
        )
        for _ in range(rng.integers(1, 4))
    ]


@pytest.mark.parametrize("seed", range(200))
def test_every_number_of_sizes_costs_what_the_best_of_all_choices_costs(seed: int) -> None:
    kinds = random_kinds(np.random.default_rng(seed), 9)
    count = len(kinds[0].calls)
    found = best_sizes(kinds, 20)
    assert len(found) == count  # more sizes than candidates are no use
    for k, optimum in enumerate(found, 1):
        assert len(optimum.chosen) == k
        assert optimum.chosen == sorted(set(optimum.chosen))
        assert optimum.chosen[-1] == count - 1
        assert optimum.cost == cost_of(kinds, optimum.chosen) == brute_force(kinds, k)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=60),
    st.integers(1, 12),
)
def test_the_least_cost_is_convex_in_the_number_of_sizes(
    candidates: list[tuple[int, int]], most: int
) -> None:
    calls = np.array([c for c, _ in candidates], dtype=float)
    cost = np.cumsum([s for _, s in candidates]).astype(float)
    costs = [o.cost for o in best_sizes([Kind(calls=calls, cost=cost)], most)]
    saved = -np.diff(costs)
    assert np.all(saved >= 0)
    assert np.all(np.diff(saved) <= 0)


def test_a_cost_that_falls_is_refused_since_the_proof_needs_it_not_to() -> None:
    with pytest.raises(AssertionError, match="a cost falls"):
        best_sizes([Kind(calls=np.ones(2), cost=np.array([2.0, 1.0]))], 1)


@pytest.mark.slow
def test_ten_thousand_candidates_and_64_sizes_take_seconds_at_most() -> None:
    """The promise is 2 s (`scripts/bench sizes`); this machine may be busy, an O(n²) one is not."""
    count = 10_000
    rng = np.random.default_rng(0)
    kinds = [
        Kind(calls=rng.integers(1, 1000, count).astype(float), cost=slope * np.arange(1.0, 10_001))
        for slope in (1.0, 2.0)
    ]
    started = time.process_time()
    found = best_sizes(kinds, 64)
    assert time.process_time() - started < 10
    assert len(found) == 64
    assert found[-1].cost < found[0].cost
