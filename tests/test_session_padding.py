"""Padding rows: what a boundary leaves in them is zero, and they never reach state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import build, rows
from torch import nn

import pcgsvc


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
