"""Results of splitting ops: new memory, arguments, views of them, and what changes at a later step.

Each call is right, or refused with the op's name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from core_helpers import WIDTH, attended, build, plain, rows
from torch import nn

import pcgsvc
from pcgsvc.errors import CaptureError


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _is_large(x: torch.Tensor) -> bool:
    """Whether a value of the true rows is large."""
    return bool((x[: pcgsvc.current_context().num_tokens] > 50).any())


@pcgsvc.splitting_op("res::clip", fake=_like)
def clip(x: torch.Tensor) -> torch.Tensor:
    """Return x itself unless a value of it is large."""
    return x.clamp(-50, 50) if _is_large(x) else x


@pcgsvc.splitting_op("res::clip_large", fake=_like)
def clip_large(x: torch.Tensor) -> torch.Tensor:
    """Return new memory unless a value of x is large."""
    return x if _is_large(x) else x.clamp(-50, 50)


@pcgsvc.splitting_op("res::mixed", fake=lambda x: (_like(x), _like(x), x.new_empty(x.shape[0], 2)))
def mixed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, new memory, and a view of x; the other way round if a value is large."""
    if _is_large(x):
        return x + 1, x, (x * 1)[:, 1:3]
    return x, x * 3, x[:, :2]


@pcgsvc.splitting_op("res::first_rows", fake=lambda x, table: torch.empty_like(x))
def first_rows(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return a view of a table with as many rows as x."""
    return table[: x.shape[0]]


@pcgsvc.splitting_op("res::whole_table", fake=lambda x, table: torch.empty_like(table))
def whole_table(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the table, or a part of a new one if a value of x is large."""
    return torch.zeros(2 * len(table), WIDTH)[::2] if _is_large(x) else table


@pcgsvc.splitting_op("res::odd", fake=_like)
def odd(x: torch.Tensor) -> torch.Tensor:
    """Give another dtype, shape or kind of result, as the first value says."""
    what = {60: x.double(), 70: x[:, :1], 80: None, 90: (x, x), 100: x.to("meta")}
    what[110] = x.to_sparse()
    return what.get(int(x[0, 0]), x + 1)  # type: ignore[return-value]


@pcgsvc.splitting_op("res::nothing", mutates_args=("out",))
def nothing(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write, and return a tensor in spite of the schema if a value is large."""
    out.copy_(x)
    return x if _is_large(x) else None  # type: ignore[return-value]


def large(count: int) -> torch.Tensor:
    """Return rows of which one value is above 50."""
    x = rows(count, seed=3)
    x[0, 1] = 90.0
    return x


def _clipped(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.res.clip(x * 1.0) + 1


def _clipped_large(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    return torch.ops.res.clip_large(y) + y


def _chained(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.res.clip_large(torch.ops.res.clip(x * 2.0)) * 2


def _mixed(x: torch.Tensor) -> torch.Tensor:
    a, b, c = torch.ops.res.mixed(x * 1.0)
    return torch.cat([a, b, c], -1)


@pytest.mark.parametrize("forward", [_clipped, _clipped_large, _chained, _mixed])
def test_a_result_may_be_an_argument_at_one_step_and_new_memory_at_another(
    forward: Callable[..., torch.Tensor],
) -> None:
    with build(forward) as runner:
        for x in (rows(5, seed=1), large(3), rows(3, seed=2), large(8), large(4)):
            assert torch.equal(runner(x), plain(forward, x))
        assert sum(runner.stats()["hits"].values()) == 5


def test_the_padding_of_a_view_of_an_argument_is_not_zeroed_in_the_argument() -> None:
    class Positions(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(8.0 * WIDTH).view(8, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ops.res.first_rows(x * 1.0, self.table)

    module = Positions().eval()
    table = module.table.clone()
    for mode in ("piecewise", "none"):
        with build(module, mode=mode) as runner:
            for count in (5, 3, 8):
                x = rows(count, seed=count)
                assert torch.equal(runner(x), plain(module, x))
            assert torch.equal(module.table, table)


def _written_through(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    z = torch.ops.res.clip(y)
    z.add_(1)
    return y + z


def _written_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    z = torch.ops.res.clip_large(y)
    y.add_(1)
    return y + z


def _written_behind_two(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    z = torch.ops.res.clip(torch.ops.res.clip(y))
    z.add_(1)
    return y + z


def _table_of(table: torch.Tensor) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.res.whole_table(x * 1.0, table).sum() + x

    return forward


@pytest.mark.parametrize(
    ("forward", "op"),
    [
        (_written_through, "res::clip"),
        (_written_after, "res::clip_large"),
        (_written_behind_two, "res::clip"),
        (_table_of(torch.ones(3, WIDTH)), "res::whole_table"),
    ],
)
def test_where_memory_is_written_later_the_step_that_differs_is_refused(
    forward: Callable[..., torch.Tensor], op: str
) -> None:
    with build(forward) as runner:
        for x in (rows(5, seed=1), rows(8, seed=2)):
            assert torch.equal(runner(x), plain(forward, x))
        with pytest.raises(pcgsvc.PcgError, match=f"{op}: returned .*at capture it gave"):
            runner(large(4))
        x = rows(3, seed=4)
        assert torch.equal(runner(x), plain(forward, x))


@pytest.mark.parametrize("first", [60, 70, 80, 90, 100, 110])
def test_another_kind_of_result_at_a_later_step_is_refused_by_name(first: int) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.res.odd(x * 1.0) * 2

    x = rows(3)
    x[0, 0] = first
    with build(forward) as runner, pytest.raises(CaptureError, match="res::odd: "):
        runner(x)


def test_a_result_that_an_op_does_not_declare_is_not_dropped() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.res.nothing(x * 1.0, out)
        return out + 1

    with build(forward) as runner:
        assert torch.equal(runner(rows(3)), rows(3) + 1)
        with pytest.raises(CaptureError, match=r"res::nothing: returned shape"):
            runner(large(3))


def _before_it_is_read(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    h.unsqueeze_(0)
    first = torch.eye(WIDTH)[0] @ x.t()  # torch squeezes in place within
    return attended(h[0]) + (x - first[:, None])


def _behind_a_boundary(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    y = attended(h)
    h.unsqueeze_(0)
    return y + h[0]


def _a_result(x: torch.Tensor) -> torch.Tensor:
    h = torch.ops.toy.fresh(x * 2)
    y = attended(h)
    h.t_()
    return y + h.t()


def _a_bridge(x: torch.Tensor) -> torch.Tensor:
    h = torch.ops.toy.fresh(x * 2)
    h.unsqueeze_(0)
    return attended(h[0]) + h[0]


@pytest.mark.parametrize("forward", [_before_it_is_read, _behind_a_boundary, _a_result, _a_bridge])
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_a_tensor_that_is_turned_round_in_place_keeps_its_layout_for_earlier_steps(
    forward: Callable[[torch.Tensor], torch.Tensor], mode: str
) -> None:
    """`h.t_()` writes no memory: a replay neither does it again nor sees it too early."""
    with build(forward, mode=mode, sizes=[2, 4, 8]) as runner:
        for count in (3, 8, 1, 4, 7):
            x = rows(count, seed=count)
            assert torch.equal(runner(x), plain(forward, x))
