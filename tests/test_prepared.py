"""Prepared calls: right, or refused by name, whatever happens between two steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, build, plain, rows, toy
from generate_helpers import load

import pcgsvc
from pcgsvc import Batch
from pcgsvc.errors import BatchError, PcgError, StaleAddressError, UncoveredError

LENS = [5, 9, 3]


@pytest.fixture(scope="module")
def llama() -> Iterator[pcgsvc.Runner]:
    with load(**{"capture.sizes": "[1,2,4,8]", "model.num_layers": 1}) as runner:
        yield runner


@pytest.fixture(scope="module")
def toys() -> Iterator[tuple[pcgsvc.Runner, torch.nn.Module]]:
    module = toy(2)
    with build(module, sizes=[4, 8]) as runner:
        yield runner, module


def tables(runner: pcgsvc.Runner, count: int) -> list[list[int]]:
    """Return six blocks, of four tokens each, for each of some requests."""
    first = runner.memory.geometry.first_free_block  # type: ignore[union-attr]
    return [[first + 6 * at + block for block in range(6)] for at in range(count)]


def decode(runner: pcgsvc.Runner, lens: list[int]) -> Batch:
    return Batch(query_lens=[1] * len(lens), seq_lens=lens, block_tables=tables(runner, len(lens)))


def test_a_decode_loop_gives_what_calls_give(llama: pcgsvc.Runner) -> None:
    draw = random.Random(0)
    call = llama.prepare(3, decode(llama, LENS))
    for step in range(12):
        lens = [n + step for n in LENS]
        ids = torch.tensor([draw.randrange(512) for _ in lens])
        positions = torch.tensor(lens) - 1
        call.update(decode(llama, lens))
        call.inputs["input_ids"].copy_(ids)
        call.inputs["positions"].copy_(positions)
        got = call.step().clone()
        torch.testing.assert_close(got, llama(ids, positions, batch=decode(llama, lens)))


def test_each_step_of_a_model_with_attention_needs_an_update(llama: pcgsvc.Runner) -> None:
    call = llama.prepare(3, decode(llama, LENS))
    call.step()
    with pytest.raises(PcgError, match=r"step: call update\(batch\) first.*moved the rows on"):
        call.step()
    call.update(decode(llama, [n + 1 for n in LENS]))
    call.step()


def test_without_attention_a_step_may_be_run_again(
    toys: tuple[pcgsvc.Runner, torch.nn.Module],
) -> None:
    runner, module = toys
    call = runner.prepare(3)
    for seed in range(3):
        call.inputs["x"].copy_(rows(3, seed=seed))
        torch.testing.assert_close(call.step(), plain(module, rows(3, seed=seed)))
        assert call.step() is call.results
    for seed in range(2):  # of another size, whose padding rows this one's were
        runner(rows(8))
        call.update()
        call.inputs["x"].copy_(rows(3, seed=seed))
        torch.testing.assert_close(call.step(), plain(module, rows(3, seed=seed)))
        assert not runner.memory.buffers["x"][3:4].any()


@pytest.mark.parametrize("count", [3, 4])
def test_what_lies_in_the_buffers_may_be_passed_to_a_call(
    toys: tuple[pcgsvc.Runner, torch.nn.Module], count: int
) -> None:
    runner, module = toys
    call = runner.prepare(4)
    call.inputs["x"].copy_(rows(4))
    given = call.inputs["x"][4 - count :]  # moved by a row, or as it is
    torch.testing.assert_close(runner(given), plain(module, rows(4)[4 - count :]))


def test_after_another_call_the_buffers_are_to_be_taken_back(
    toys: tuple[pcgsvc.Runner, torch.nn.Module],
) -> None:
    runner, module = toys
    one, two = runner.prepare(3), runner.prepare(8)
    between: list[Any] = [lambda: runner(rows(2)), lambda: runner(rows(20)), two.update]
    for other in between:
        one.update()
        one.inputs["x"].copy_(rows(3))
        torch.testing.assert_close(one.step(), plain(module, rows(3)))
        other()
        with pytest.raises(PcgError, match="the runner was called since"):
            one.step()


def test_what_does_not_fit_is_refused_and_the_step_stays_as_it_was(llama: pcgsvc.Runner) -> None:
    batch = decode(llama, LENS)
    call = llama.prepare(3, batch)
    ids = torch.tensor([1, 2, 3])
    call.inputs["input_ids"].copy_(ids)
    call.inputs["positions"].copy_(torch.tensor(LENS) - 1)
    refused: list[tuple[Batch | None, str]] = [
        (decode(llama, [5, 9]), "2 rows in all, but the inputs have 3"),
        (decode(llama, [5, 9, 1000]), "max_model_len"),
        (Batch(query_lens=[1] * 3, seq_lens=LENS), "no block_tables"),
        (Batch(query_lens=[2, 1], block_tables=tables(llama, 2)), "served by piecewise:4"),
        (None, "served by piecewise:4; this call was prepared for full:4"),
    ]
    for other, words in refused:
        with pytest.raises(BatchError, match=words):
            call.update(other)
    got = call.step().clone()
    torch.testing.assert_close(got, llama(ids, torch.tensor(LENS) - 1, batch=batch))


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "3", None])
def test_a_row_count_is_a_whole_number(
    toys: tuple[pcgsvc.Runner, torch.nn.Module], count: Any
) -> None:
    with pytest.raises(BatchError, match="num_tokens: got"):
        toys[0].prepare(count)


def test_what_no_graph_serves_cannot_be_prepared(
    toys: tuple[pcgsvc.Runner, torch.nn.Module],
) -> None:
    with pytest.raises(UncoveredError, match="no graph serves 9 rows in 1 requests: above"):
        toys[0].prepare(9)


def test_new_weights_are_used_and_replaced_ones_refused() -> None:
    module = toy(1)
    with build(module, sizes=[4]) as runner:
        call = runner.prepare(3)
        call.inputs["x"].copy_(rows(3))
        state = {name: value * 2 for name, value in module.state_dict().items()}
        runner.load_state_dict(state)
        torch.testing.assert_close(call.step(), plain(module, rows(3)))
        module.blocks[0].up.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
        with pytest.raises(StaleAddressError, match=r"blocks\.0\.up\.weight"):
            call.step()


def test_a_closed_runner_refuses_its_prepared_calls() -> None:
    runner = build(toy(1), sizes=[4])
    call = runner.prepare(3)
    runner.close()
    for refused in (call.step, call.update, lambda: runner.prepare(3)):
        with pytest.raises(PcgError, match="the runner is closed"):
            refused()


def test_steps_are_counted_and_timed_as_calls_are(
    toys: tuple[pcgsvc.Runner, torch.nn.Module],
) -> None:
    runner, _ = toys
    stats = []
    for is_prepared in (False, True):
        runner.reset_stats()
        if is_prepared:
            call = runner.prepare(3)
            for _ in range(4):
                call.step()
        else:
            for _ in range(4):
                runner(rows(3))
        stats.append(copy.deepcopy(runner.stats()))
    assert stats[0] == stats[1]
    assert stats[0]["hits"] == {"piecewise:4": 4}
    assert stats[0]["calls"] == [{"num_tokens": 3, "uniform": False, "count": 4}]
    assert (stats[0]["rows"], stats[0]["padding_rows"]) == (12, 4)


def test_a_splitting_op_cannot_step_its_own_runner() -> None:
    calls: list[Any] = []

    @pcgsvc.splitting_op("prepared::nested", mutates_args=("x",))
    def nested(x: torch.Tensor) -> None:
        for call in calls:
            call()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.ops.prepared.nested(y)
        return y * 2

    with build(forward, sizes=[4]) as runner:
        call = runner.prepare(3)
        for inner in (call.step, call.update, lambda: runner.prepare(3)):
            calls[:] = [inner]
            with pytest.raises(PcgError, match="called by a splitting op of a call"):
                call.step()
        calls.clear()
        call.inputs["x"].copy_(torch.ones_like(call.inputs["x"]))
        assert (call.step() == 4).all()
