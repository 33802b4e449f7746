"""A capture that fails stays small: other sizes remain, nothing of the failed one does."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, build, plain, rows, toy
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pcgsvc
from pcgsvc.capture.cuda import CudaEngine
from pcgsvc.errors import CaptureError, VerifyError

ATTEMPTS: list[int] = []
BROKEN: list[Callable[[], Any]] = []
"""What `toy::breaks` does at size 8, if anything."""


@pcgsvc.splitting_op("toy::breaks", mutates_args=("out",), support="never")
def breaks(x: torch.Tensor, out: torch.Tensor) -> None:
    """Do what BROKEN says when 8 rows come, else double."""
    ATTEMPTS.append(len(x))
    if len(x) == 8 and BROKEN:
        BROKEN[0]()
    out.copy_(x * 2)


@pytest.fixture(autouse=True)
def nothing_is_broken() -> Iterator[None]:
    yield
    BROKEN.clear()
    ATTEMPTS.clear()


class FakeGraph:
    """Counts as torch's allocator does: a pool that no graph uses any more takes no other."""

    users = 0
    met = False

    def __init__(self) -> None:
        self.is_used = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        if type(self).met and not type(self).users:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        self.is_used = type(self).met = True
        type(self).users += 1

    def capture_end(self) -> None:
        warnings.warn("The CUDA Graph is empty.", stacklevel=1)

    def __del__(self) -> None:
        type(self).users -= self.is_used


def test_segments_that_only_allocate_keep_their_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    engine = CudaEngine(None, "global")  # type: ignore[arg-type]
    for _ in range(3):
        engine.begin()
        assert engine.end() is None
        gc.collect()
        assert FakeGraph.users == 1
    del engine
    gc.collect()
    assert FakeGraph.users == 0


def failing(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.toy.breaks(x * 2, out)
    return out + 1


def at_the_capture_run(error: BaseException) -> Callable[[], None]:
    """Raise after the warm-up runs, so that only capture fails."""

    def go() -> None:
        if ATTEMPTS.count(8) > 2:
            raise error

    return go


@pytest.mark.parametrize("collector", [True, False])
def test_a_capture_that_fails_at_one_size_leaves_the_others(collector: bool) -> None:
    """C1, C9."""
    BROKEN.append(at_the_capture_run(RuntimeError("no room")))
    if not collector:
        gc.disable()
    try:
        with build(failing, sizes=[2, 4, 8]) as runner:
            assert gc.isenabled() is collector
            assert "no room" in runner.table.skipped[8]
            BROKEN.clear()
            for size in (1, 4, 3, 8):
                assert torch.equal(runner(rows(size)), rows(size) * 4 + 1)
            assert set(runner.stats()["hits"]) == {"piecewise:2", "piecewise:4"}
            (fallback,) = runner.stats()["fallbacks"]
            assert "size 8 was skipped" in fallback["reason"]
    finally:
        gc.enable()


def test_a_failed_size_leaves_nothing_of_itself_behind() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        out = torch.empty_like(y)
        torch.ops.toy.breaks(y, out)
        return out + 1

    BROKEN.append(at_the_capture_run(RuntimeError("no room")))
    with build(forward, sizes=[4, 8]) as runner:
        (entry,) = runner.table.entries.values()
        assert {t.shape[0] for t in entry.owned} == {4}


def test_a_size_that_fails_in_its_warm_up_is_skipped_too() -> None:
    """D4: a position table shorter than the bucket is no reason to die."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[torch.arange(x.shape[0])]

    with build(Positions().eval(), mode="full", sizes=[4, 8]) as runner:
        assert list(runner.table.skipped) == [8]
        assert runner(rows(3)).shape == (3, WIDTH)


def test_when_every_size_fails_the_build_fails_and_the_collector_is_as_before() -> None:
    BROKEN.append(at_the_capture_run(RuntimeError("no room")))
    with pytest.raises(CaptureError, match="no room"):
        build(failing, sizes=[8])
    assert gc.isenabled()
    BROKEN.clear()
    with build(failing, sizes=[8]) as runner:
        assert torch.equal(runner(rows(8)), rows(8) * 4 + 1)


def test_an_interrupt_inside_a_segment_leaves_no_mode_behind() -> None:
    @pcgsvc.splitting_op("toy::interrupted", mutates_args=("out",), support="always")
    def interrupted(x: torch.Tensor, out: torch.Tensor) -> None:
        if pcgsvc.current_context().in_segment:
            raise KeyboardInterrupt
        out.copy_(x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.interrupted(x * 2, out)
        return out

    with pytest.raises(KeyboardInterrupt):
        build(forward, mode="full", sizes=[4])
    modes = [m for m in _get_current_dispatch_mode_stack()]
    for mode in modes:
        mode.__exit__(None, None, None)
    if left := torch.overrides._get_current_function_mode():
        left.__exit__(None, None, None)
    assert modes == []


def test_a_memory_budget_keeps_what_fits_and_says_what_did_not() -> None:
    with build(toy(2), sizes=[4, 8, 64]) as runner:
        used = {k[1].num_tokens: e.owned_bytes for k, e in runner.table.entries.items()}
    budget = used[8] + used[4]
    with build(toy(2), sizes=[4, 8, 64], memory_budget=budget) as runner:
        assert runner.report["graphs"]["sizes"] == [4, 8]
        (skipped,) = runner.report["graphs"]["skipped"]
        assert skipped["size"] == 64
        assert f"memory_budget={budget}" in skipped["reason"]
        torch.testing.assert_close(runner(rows(20)), plain(toy(2), rows(20)))
    with build(toy(2), sizes=[4, 8], memory_budget=1) as runner:
        assert runner.report["graphs"]["num_graphs"] == 0
        torch.testing.assert_close(runner(rows(5)), plain(toy(2), rows(5)))


def test_sizes_beyond_the_predicate_are_skipped_and_run_by_the_module() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x + 100

    with build(forward, mode="full", sizes=[2, 4, 8]) as runner:
        assert runner.report["graphs"]["sizes"] == [8]
        assert all("s" in r for r in runner.table.skipped.values())
        for size in (5, 8, 50):
            assert torch.equal(runner(rows(size)), rows(size) * 2)


def test_a_padded_call_is_right_though_its_own_row_count_breaks_the_predicate() -> None:
    # 3 rows padded to 8 would run the branch for 8; the module takes the other one.
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x + 100

    with build(forward, mode="full", sizes=[8]) as runner:
        assert torch.equal(runner(rows(3)), rows(3) + 100)


def test_a_branch_on_one_row_is_right_whether_or_not_it_is_captured() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x + 100

    for sizes in ([1, 4], [4]):
        with build(forward, mode="full", sizes=sizes) as runner:
            for size in (1, 2, 4):
                assert torch.equal(runner(rows(size)), forward(rows(size)))


def test_a_model_that_mixes_rows_outside_its_boundaries_is_found_out() -> None:
    # With padding rows the mean is another one; only a comparison on the true rows shows it.
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    with pytest.raises(VerifyError, match="padding"):
        build(forward, mode="full").close()
