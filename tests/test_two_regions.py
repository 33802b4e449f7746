"""The technique in its smallest form: region, boundary with host lengths, region."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pcgsvc
from pcgsvc.errors import BatchError
from pcgsvc.ops.context import use_context

CAPACITY, WIDTH = 8, 32
LENGTHS = [[3, 2], [4, 4], [1, 5]]
OVERRIDES = [
    "model=two_regions",
    "mode=piecewise",
    "compiler=eager",
    "capture.sizes=[8]",
    "cache.mode=off",
]


def reference(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Compute the step row by row, in float64, from its description."""
    h = torch.tanh(x.double() / 2)
    b = torch.zeros_like(h)
    starts = [0, *itertools.accumulate(lengths)]
    for start, length in zip(starts, lengths, strict=False):
        for row in range(start, start + length):
            past = h[start : row + 1]
            weights = torch.softmax(past @ h[row] / WIDTH**0.5, 0)
            b[row] = weights @ past
    return (b + torch.sigmoid(b)).float()


@pytest.fixture(scope="module")
def runner() -> Iterator[pcgsvc.Runner]:
    with pcgsvc.load_runner(OVERRIDES) as runner:
        yield runner


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_it_is_one_boundary_between_two_regions(runner: pcgsvc.Runner) -> None:
    partition = runner.report["partition"]
    assert [p["kind"] for p in partition["pieces"]] == ["region", "boundary", "region"]
    assert partition["splitting_ops"] == [{"name": "pcgsvc::two_regions_attend", "count": 1}]
    (entry,) = runner.table.entries.values()
    assert entry.is_region == (True, False, True)
    assert runner.memory.max_tokens == CAPACITY


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_each_replay_equals_plain_execution_on_the_true_rows(
    runner: pcgsvc.Runner, order: tuple[int, ...]
) -> None:
    runner.reset_stats()
    for at in order:
        lengths = LENGTHS[at]
        x = rows(sum(lengths), seed=at)
        batch = pcgsvc.Batch(query_lens=lengths)
        got = runner(x, batch=batch)
        with torch.no_grad(), use_context(runner.memory.unpadded_context(checked(batch, x))):
            plain = runner.model.module(x)
        assert torch.equal(got, plain)
        torch.testing.assert_close(got, reference(x, lengths))
    assert runner.stats()["hits"] == {"piecewise:8": 3}
    assert runner.stats()["fallbacks"] == []


def checked(batch: pcgsvc.Batch, x: torch.Tensor) -> Any:
    from pcgsvc.forward.batch import check_batch

    return check_batch(batch, len(x), None)


def test_lengths_are_not_frozen(runner: pcgsvc.Runner) -> None:
    x = rows(6, seed=0)
    one = runner(x, batch=pcgsvc.Batch(query_lens=[1, 5]))
    other = runner(x, batch=pcgsvc.Batch(query_lens=[5, 1]))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, reference(x, [1, 5]))


def test_the_bridge_is_written_in_place_and_its_padding_rows_are_zero(
    runner: pcgsvc.Runner,
) -> None:
    (entry,) = runner.table.entries.values()
    boundary = entry.steps[1]
    runner(rows(8, seed=1), batch=pcgsvc.Batch(query_lens=[4, 4]))
    address = entry.outputs[0].data_ptr()
    runner(rows(5, seed=2), batch=pcgsvc.Batch(query_lens=[3, 2]))
    assert entry.outputs[0].data_ptr() == address
    assert entry.steps[1] is boundary
    # y = b + sigmoid(b) is one half where b is zero.
    assert (entry.outputs[0][5:] == 0.5).all()
    assert (entry.outputs[0][:5] != 0.5).all()


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([], "empty list"),
        ([3, 0], "got 0 among"),
        ([0], "got 0 among"),
        ([4, -1], "got -1 among"),
        ([-5], "got -5 among"),
        ([5, 4], "9 rows in all"),
        ([2], "2 rows in all"),
        ([2.5, 2.5], "whole number"),
    ],
)
def test_lengths_that_cannot_be_are_refused_and_leave_the_buffers(
    runner: pcgsvc.Runner, lengths: list[Any], words: str
) -> None:
    runner(rows(8, seed=3), batch=pcgsvc.Batch(query_lens=[4, 4]))
    workspace = runner.memory
    (entry,) = runner.table.entries.values()
    held = [workspace.buffers["x"], workspace.step.query_start_loc, workspace.step.num_tokens]
    held += [workspace.step.kv_lens, *entry.outputs]
    before = [t.clone() for t in held]
    with pytest.raises(BatchError, match=words):
        runner(rows(5, seed=4), batch=pcgsvc.Batch(query_lens=lengths))
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_lengths_above_capacity_are_refused_when_nothing_else_may_serve_them() -> None:
    with pcgsvc.load_runner([*OVERRIDES, "on_uncovered=error"]) as runner:
        x = rows(8, seed=1)
        runner(x, batch=pcgsvc.Batch(query_lens=[4, 4]))
        before = runner.memory.buffers["x"].clone()
        with pytest.raises(pcgsvc.PcgError, match="9 rows"):
            runner(rows(9, seed=2), batch=pcgsvc.Batch(query_lens=[5, 4]))
        assert torch.equal(runner.memory.buffers["x"], before)


def test_lengths_above_capacity_run_uncaptured_otherwise(runner: pcgsvc.Runner) -> None:
    x = rows(9, seed=5)
    got = runner(x, batch=pcgsvc.Batch(query_lens=[5, 4]))
    torch.testing.assert_close(got, reference(x, [5, 4]))
