"""Dispatch: which entry serves which batch, and what becomes of a requested mode."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection

import pytest
import torch
from core_helpers import build, rows, toy

from pcgsvc.capture.plan import (
    far_sizes,
    general_descriptor,
    uniform_descriptor,
    wanted_entries,
)
from pcgsvc.config import Mode, schedule
from pcgsvc.errors import ConfigError
from pcgsvc.ops.modes import Resolution, fewest_rows, resolve_mode
from pcgsvc.ops.support import Support
from pcgsvc.serve.dispatch import DispatchTable

N, P, F = Mode.NONE, Mode.PIECEWISE, Mode.FULL
DECODE, BOTH = Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE
NEVER, SINGLE = Support.NEVER, Support.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = Support.UNIFORM_BATCH, Support.ALWAYS

# The table of the contract: rows are what was requested, columns what the boundaries support.
TABLE = {
    F: {ALWAYS: F, UNIFORM: BOTH, SINGLE: BOTH, NEVER: P},
    BOTH: {ALWAYS: BOTH, UNIFORM: BOTH, SINGLE: BOTH, NEVER: P},
    DECODE: {ALWAYS: DECODE, UNIFORM: DECODE, SINGLE: DECODE, NEVER: P},
    P: {ALWAYS: P, UNIFORM: P, SINGLE: P, NEVER: P},
    N: {ALWAYS: N, UNIFORM: N, SINGLE: N, NEVER: N},
}
HALVES = {N: (N, N), P: (P, P), F: (F, F), DECODE: (F, N), BOTH: (F, P)}


def resolve(mode: Mode, support: Support, query_len: int = 1, boundaries: int = 4) -> Resolution:
    return resolve_mode(
        mode, support, num_boundaries=boundaries, uniform_query_len=query_len, why="attention=x"
    )


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize(("mode", "support"), list(itertools.product(Mode, Support)))
def test_the_whole_table(mode: Mode, support: Support, query_len: int) -> None:
    single_is_never = support is SINGLE and query_len > 1
    wanted = TABLE[mode][NEVER if single_is_never else support]
    got = resolve(mode, support, query_len)
    assert got.resolved is wanted
    assert (got.decode, got.mixed) == HALVES[wanted]
    assert got.requested is mode
    assert bool(got.reasons) == (wanted is not mode)
    if got.reasons:
        assert "attention=x" in got.reasons[0]
        assert support.name in got.reasons[0]
    if single_is_never and got.reasons:
        assert "uniform_query_len" in got.reasons[0]


@pytest.mark.parametrize("mode", [P, BOTH])
def test_piecewise_without_a_boundary_is_not_piecewise_and_says_so(mode: Mode) -> None:
    got = resolve(mode, ALWAYS, boundaries=0)
    assert got.resolved is F
    assert got.reasons


@pytest.mark.parametrize("mode", [N, F, DECODE])
def test_a_mode_without_piecewise_needs_no_boundary(mode: Mode) -> None:
    got = resolve(mode, ALWAYS, boundaries=0)
    assert got.resolved is mode
    assert not got.reasons


def test_support_is_parsed_from_its_word_and_lists_the_choices() -> None:
    assert Support.parse("uniform_batch") is UNIFORM
    with pytest.raises(ConfigError, match="uniform_single_token_decode"):
        Support.parse("sometimes")


# ---- entries -------------------------------------------------------------------------------------


def entries(
    mode: Mode,
    support: Support,
    sizes: list[int],
    query_len: int = 1,
    max_reqs: int | None = None,
) -> list[str]:
    found = wanted_entries(resolve(mode, support, query_len), sizes, query_len, max_reqs)
    return [f"{m.value[0]}{d.num_tokens}{'u' if d.uniform else ''}" for m, d in found]


def test_entries_come_largest_first_and_uniform_ones_only_where_they_divide() -> None:
    assert entries(BOTH, ALWAYS, [1, 2, 3]) == ["p3", "f3u", "p2", "f2u", "p1", "f1u"]
    assert entries(BOTH, UNIFORM, [1, 2, 3, 4], 2) == ["p4", "f4u", "p3", "p2", "f2u", "p1"]
    assert entries(DECODE, ALWAYS, [1, 4]) == ["f4u", "f1u"]
    assert entries(F, ALWAYS, [1, 4]) == ["f4", "f1"]
    assert entries(F, UNIFORM, [2]) == ["p2", "f2u"]
    assert entries(P, NEVER, [1, 4]) == ["p4", "p1"]
    assert entries(N, ALWAYS, [1, 4]) == []


def test_no_uniform_entry_is_larger_than_the_first_that_holds_all_requests() -> None:
    assert entries(BOTH, ALWAYS, [1, 3, 16], 1, 3) == ["p16", "p3", "f3u", "p1", "f1u"]
    assert entries(DECODE, ALWAYS, [2, 4, 8], 1, 3) == ["f4u", "f2u"]  # three requests run in 4
    assert entries(DECODE, ALWAYS, [2, 3, 4, 8], 2, 1) == ["f2u"]
    assert entries(F, ALWAYS, [4, 16], 1, 3) == ["f16", "f4"]  # these serve mixed batches too


def table(
    mode: Mode,
    sizes: list[int],
    query_len: int = 1,
    *,
    drop: Collection[int] = (),
    max_reqs: int = 99,
    max_padding: int = 4,
) -> DispatchTable:
    resolution = resolve(mode, ALWAYS, query_len)
    wanted = wanted_entries(resolution, sizes, query_len)
    return DispatchTable(
        resolution,
        [k for k in wanted if k[1].num_tokens not in drop],
        uniform_query_len=query_len,
        max_padding=max_padding,
        max_reqs=max_reqs,
        skipped={s: "it failed" for s in drop},
    )


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("mode", [P, F, DECODE, BOTH])
def test_what_is_captured_under_a_key_is_found_under_it(mode: Mode, query_len: int) -> None:
    """D7."""
    sizes = [2, 4, 6]
    made = table(mode, sizes, query_len)
    for mode_, key in wanted_entries(resolve(mode, ALWAYS, query_len), sizes, query_len):
        reqs = key.num_reqs or 1
        uniform = made.is_uniform([query_len] * reqs) and key.uniform
        plan = made.plan(key.num_tokens, reqs, uniform)
        assert (plan.mode, plan.descriptor) == (mode_, key)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_count_finds_the_next_size_or_says_why_not(mode: Mode) -> None:
    made = table(mode, [1, 4, 8])
    for count in range(1, 12):
        for uniform in (False, True):
            plan = made.plan(count, count if uniform else 1, uniform)
            half = HALVES[mode][0 if uniform else 1]
            if half is N and not (uniform and HALVES[mode][1] is not N):
                assert plan.mode is N
                assert "captures nothing" in plan.reason
            elif count > 8:
                assert plan.mode is N
                assert "above the largest" in plan.reason
            else:
                assert plan.mode is half
                assert plan.descriptor.num_tokens == next(s for s in (1, 4, 8) if s >= count)
            if plan.mode is N:
                assert plan.descriptor.num_tokens == count


def test_composite_modes_give_uniform_batches_full_graphs_and_others_piecewise() -> None:
    made = table(BOTH, [2, 4], 2)
    assert made.find(4, 2, True) == (F, uniform_descriptor(4, 2))
    assert made.find(3, 2, False) == (P, general_descriptor(4))
    assert made.is_uniform([2, 2])
    assert not made.is_uniform([2, 1])
    assert not made.is_uniform([4])


def test_a_uniform_batch_that_no_uniform_entry_serves_falls_to_the_general_ones() -> None:
    made = table(BOTH, [2, 4])
    partial = DispatchTable(
        resolve(BOTH, ALWAYS),
        [(P, general_descriptor(4)), (F, uniform_descriptor(2, 1))],
        uniform_query_len=1,
        max_padding=4,
        max_reqs=9,
        skipped={4: "full: too big"},
    )
    assert made.find(3, 3, True) == (F, uniform_descriptor(4, 1))
    assert partial.find(3, 3, True) == (P, general_descriptor(4))


def test_a_size_that_was_not_captured_pads_to_the_next_one_that_was() -> None:
    """D3."""
    made = table(P, [2, 4, 8], drop={4})
    assert made.find(3, 1, False) == (P, general_descriptor(8))
    assert table(P, [2, 4, 8], drop={4, 8}).find(3, 1, False) is None
    plan = table(P, [2, 4, 8], drop={4, 8}).plan(3, 1, False)
    assert "size 4 was skipped: it failed" in plan.reason


def test_a_table_of_nothing_serves_nothing() -> None:
    assert table(F, [2, 4], drop={2, 4}).find(1, 1, True) is None
    assert table(N, [2, 4]).find(1, 1, True) is None


def test_more_requests_than_there_are_buffers_for_are_not_served() -> None:
    made = table(BOTH, [4], max_reqs=2)
    assert made.find(3, 3, True) is None
    assert "max_num_reqs=2" in made.plan(3, 3, True).reason


# ---- sizes that are too far ----------------------------------------------------------------------


def too_far(count: int, size: int, max_padding: int) -> bool:
    """The rule as the setting states it."""
    return size > max_padding * count and size - count > 256


@pytest.mark.parametrize("max_padding", [1, 3, 4, 1000])
@pytest.mark.parametrize("mode", [P, F, DECODE, BOTH])
def test_no_call_is_padded_further_than_the_setting_allows(mode: Mode, max_padding: int) -> None:
    sizes = [2, 4, 100, 900, 5000]
    made = table(mode, sizes, max_reqs=9999, max_padding=max_padding)
    for count in range(1, 5001):
        size = next(s for s in sizes if s >= count)
        for uniform in (False, True):
            found = made.find(count, count if uniform else 1, uniform)
            if HALVES[mode][not uniform] is not N:
                assert (found is None) == too_far(count, size, max_padding)
            assert found is None or found[1].num_tokens == size


def test_the_fewest_rows_of_a_size_are_the_first_that_are_not_too_far() -> None:
    for size in range(1, 1500):
        for max_padding in (1, 2, 4, 7):
            allowed = (n for n in range(1, size + 1) if not too_far(n, size, max_padding))
            assert fewest_rows(size, max_padding) == next(allowed)


def test_a_lone_far_size_does_not_swallow_the_calls_below_it_and_the_reason_is_given() -> None:
    made = table(P, [1, 2, 4, 8, 8192])
    plan = made.plan(9, 1, False)
    assert plan.mode is N
    assert "the next size, 8192, is more than capture.max_padding=4 times the rows" in plan.reason
    assert made.plan(2048, 1, False).descriptor == general_descriptor(8192)
    assert made.plan(3, 1, False).descriptor == general_descriptor(4)
    skipped = table(P, [8, 64, 8192], drop={64}).plan(9, 1, False)
    assert "size 64 was skipped" in skipped.reason


def test_a_uniform_batch_too_far_from_its_size_runs_in_the_nearer_one_of_the_other_mode() -> None:
    made = table(BOTH, [3, 50, 3000], 3)
    assert made.find(9, 3, True) == (P, general_descriptor(50))
    plan = made.plan(9, 3, True)
    assert plan.mode is P
    assert "for uniform batches the next size, 3000, is more than" in plan.reason
    assert made.plan(60, 20, True).mode is N


def test_the_build_warns_of_gaps_between_sizes_and_of_no_others() -> None:
    def warned(mode: Mode, sizes: list[int], query_len: int = 1) -> list[str]:
        return far_sizes(wanted_entries(resolve(mode, ALWAYS, query_len), sizes, query_len, 60), 4)

    (words,) = warned(BOTH, [1, 8, 8192])
    assert "calls of 9 to 2047 rows get no graph: the next size, 8192" in words
    general, uniform = warned(BOTH, [3, 50, 3000], 3)
    assert "calls of 51 to 749 rows get no graph" in general
    assert "uniform batches of 4 to 749 rows get no full graph" in uniform
    assert not warned(BOTH, schedule(8192))
    assert not warned(P, [256])
    assert not warned(N, [1, 8192])
    assert not warned(DECODE, [1, 60, 8192])  # of more than 60 requests there are no batches


# ---- with a runner -------------------------------------------------------------------------------


def test_sizes_above_the_limit_are_dropped_with_one_warning_and_buffers_are_of_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D1."""
    with build(toy(1), sizes=[4, 8, 64], max_size=50, mode="piecewise") as runner:
        assert [m for m in caplog.messages if "[64]" in m and "max_size=50" in m]
        assert runner.report["graphs"]["sizes"] == [4, 8]
        assert runner.memory.max_tokens == 8
        assert runner(rows(50)).shape[0] == 50


def test_a_schedule_always_contains_the_largest_size() -> None:
    for largest in (1, 3, 50, 64, 500):
        assert schedule(largest)[-1] == largest


def test_two_hundred_random_sizes_capture_nothing_new() -> None:
    """D8."""
    pick = random.Random(0)
    with build(toy(1), sizes=[4, 8]) as runner:
        before = dict(runner.table.entries)
        for _ in range(200):
            runner(torch.zeros(pick.randint(1, 12), 4))
        assert runner.table.entries == before
        stats = runner.stats()
        assert set(stats["hits"]) == {"piecewise:4", "piecewise:8"}
        assert sum(stats["hits"].values()) + sum(f["count"] for f in stats["fallbacks"]) == 200


def test_a_call_too_far_from_its_size_runs_without_a_graph_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with build(toy(1), sizes=[4, 600]) as runner:
        assert [m for m in caplog.messages if "calls of 5 to 149 rows get no graph" in m]
        for count in (3, 5, 149, 150):
            assert runner(rows(count)).shape[0] == count
        stats = runner.stats()
        assert stats["hits"] == {"piecewise:4": 1, "piecewise:600": 1}
        assert [(f["num_tokens"], f["count"]) for f in stats["fallbacks"]] == [(5, 1), (149, 1)]
        assert all("capture.max_padding=4" in f["reason"] for f in stats["fallbacks"])
        assert runner.report["warnings"]
