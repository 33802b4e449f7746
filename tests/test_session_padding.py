"""Padding rows: what a boundary leaves in them is zero, and they never reach state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, build, make_config, rows
from torch import nn

import pcgsvc
from pcgsvc.errors import ForwardError, VerifyError


@pcgsvc.splitting_op("toy::junk_writer", mutates_args=("out",), support="always")
def junk_writer(x: torch.Tensor, out: torch.Tensor) -> None:
    """Leave junk in the padding rows, as an attention kernel may."""
    out.fill_(1e9)
    out[: len(x)].copy_(torch.where(torch.isfinite(x), x, 1e9))


@pcgsvc.splitting_op(
    "toy::both",
    mutates_args=("out",),
    fake=lambda x, out: torch.empty_like(x),
    support="never",
)
def both(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write one tensor and return another, both with junk in the padding rows."""
    out.copy_(x + 100)
    return x + 200


@pcgsvc.splitting_op("toy::outs", mutates_args=("outs",), support="never")
def outs(x: torch.Tensor, outs: list[torch.Tensor]) -> None:
    """Write to every tensor of a list."""
    for out in outs:
        out.copy_(x + 100)


def write_one(x: torch.Tensor) -> list[torch.Tensor]:
    out = torch.empty_like(x)
    torch.ops.toy.junk_writer(x * 2, out)
    return [out]


def write_keyword(x: torch.Tensor) -> list[torch.Tensor]:
    out = torch.empty_like(x)
    torch.ops.toy.junk_writer(x * 2, out=out)
    return [out]


def return_one(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ops.toy.fresh(x * 2)]


def return_two(x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.ops.toy.two(x * 2))


def write_and_return(x: torch.Tensor) -> list[torch.Tensor]:
    out = torch.empty_like(x)
    return [torch.ops.toy.both(x * 2, out), out]


def write_list(x: torch.Tensor) -> list[torch.Tensor]:
    buffers = [torch.empty_like(x), torch.empty_like(x)]
    torch.ops.toy.outs(x * 2, buffers)
    return buffers


@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize(
    "op",
    [write_one, write_keyword, return_one, return_two, write_and_return, write_list],
)
def test_a_boundary_leaves_padding_rows_zero(op: Callable[..., Any], mode: str) -> None:
    """D5: row-mixing ops behind it would spread stale rows."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(op(x)).sum(-1)  # [results, rows]

    if op not in (write_one, write_keyword):
        mode = "piecewise"  # their support is never
    with build(forward, mode=mode, sizes=[8], self_check=False) as runner:
        runner(rows(8))
        runner(rows(5))
        (entry,) = runner.table.entries.values()
        assert entry.outputs[0].shape[1] == 8
        assert (entry.outputs[0][:, :5] != 0).all()
        assert (entry.outputs[0][:, 5:] == 0).all()


def test_padding_rows_never_reach_state() -> None:
    class Keeps(nn.Module):
        state: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.ops.toy.bump(self.state, torch.exp(x))  # exp(0) = 1 in the padding rows
            return x + self.state

    module = Keeps().eval()
    with build(module, sizes=[8]) as runner:
        x = rows(5)
        runner(x)
        assert torch.allclose(module.state, x.exp().sum())


# ---- rows that an input names by their numbers ---------------------------------------------------


def picked(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (x * 2)[k]


def picked_among_true_rows(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (x * 2)[k % pcgsvc.true_rows(x).sum()]


def by_number(forward: Callable[..., Any], example: list[int], **settings: Any) -> pcgsvc.Runner:
    return pcgsvc.build_runner(
        forward,
        {"x": rows(len(example)), "k": torch.tensor(example)},
        dynamic_dims={"x": 0, "k": 0},
        config=make_config("full", [1, 2, 4, 8]),
        **settings,
    )


def drawn(lowest: int) -> Callable[[int, torch.Generator], dict[str, torch.Tensor]]:
    def make_inputs(num: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        low = max(-num, lowest)
        return {
            "x": torch.randn(num, WIDTH, generator=generator),
            "k": torch.randint(low, num, (num,), generator=generator),
        }

    return make_inputs


@pytest.mark.parametrize("example", [[0, 1, 2, 3], [0, 0, 0, 0], [3, 1]])
def test_the_check_draws_row_numbers_that_its_true_rows_have(example: list[int]) -> None:
    with by_number(picked, example, make_inputs=drawn(0) if example == [3, 1] else None) as runner:
        assert runner.report["graphs"]["skipped"] == []
        for k in ([2, 1, 0], [0, 2, 2], [4, 3, 2, 1, 0]):
            x = rows(len(k))
            assert torch.equal(runner(x, torch.tensor(k)), picked(x, torch.tensor(k)))


NEGATIVE: list[tuple[list[int], dict[str, Any], str]] = [
    ([0, -1, 2, 1], {}, r"['k'].*k % pcgsvc.true_rows(x).sum()"),
    ([0, 1, 2, 3], {"make_inputs": drawn(-8)}, "padding rows, filled with"),
]


@pytest.mark.parametrize(("example", "settings", "words"), NEGATIVE)
def test_negative_row_numbers_that_the_check_sees_are_refused_and_the_way_out_works(
    example: list[int], settings: Any, words: str
) -> None:
    with pytest.raises(VerifyError) as caught:
        by_number(picked, example, **settings)
    assert all(part in str(caught.value) for part in words.split(".*"))
    with by_number(picked_among_true_rows, example, **settings) as runner:
        for numbers in ([-1, 0, -3], [2, -2, 1]):
            k = torch.tensor(numbers)
            assert torch.equal(runner(rows(3), k), picked(rows(3), k))


def test_a_negative_row_number_that_the_check_never_saw_counts_from_the_padding() -> None:
    """A limit: the check draws no integers outside the examples' range, which may be invalid."""
    with by_number(picked, [0, 1, 2, 3]) as runner:
        k = torch.tensor([-1, 0, 1])
        assert torch.equal(runner(rows(3), k)[1:], picked(rows(3), k)[1:])
        assert not runner(rows(3), k)[0].any()  # the fourth row of the buffer
        k = torch.tensor([-1, 0, 1, 2])
        assert torch.equal(runner(rows(4), k), picked(rows(4), k))  # without padding


def test_a_table_takes_negative_and_refuses_far_numbers_as_the_model_does() -> None:
    table = torch.nn.Parameter(torch.randn(5, WIDTH))

    def looked_up(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return x + table[k]

    with by_number(looked_up, [0, 1, 2, 3]) as runner:
        k = torch.tensor([-1, 4, -5])
        assert torch.equal(runner(rows(3), k), looked_up(rows(3), k))
        with pytest.raises(IndexError, match="index 5 is out of bounds"):
            runner(rows(3), torch.tensor([0, 5, 1]))


def test_a_draw_that_the_forward_refuses_in_the_check_is_named_with_the_way_out() -> None:
    def third(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return x + (x * 2)[k].sum(0)

    x, k = rows(4), torch.tensor([3])
    with pytest.raises(ForwardError, match=r"self-check: IndexError: .*in third.*make_inputs=f"):
        build(third, {"x": x, "k": k}, {"x": 0}, sizes=[1, 2, 4])
