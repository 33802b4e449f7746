"""Capture: a replay is exactly the module, and bound operators are called as they were bound.

Padding: test_session_padding.py; what a segment must not hold: test_session_refusals.py; failures:
test_session_failures.py; Inductor's pieces: test_session_inductor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from core_helpers import KEEP, WIDTH, attended, build, make_config, plain, rows, toy
from torch import nn

import pcgsvc
from pcgsvc.config import Strategy
from pcgsvc.ops.registry import register_splitting_op
from pcgsvc.ops.support import Support


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    yield
    KEEP.clear()


# ---- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_a_replay_is_exactly_the_module(mode: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.device_only(x.sin(), out)
        a, b = out.chunk(2, -1)
        y = torch.cat([b, a], -1)
        y[:, 0] = 3
        y += x.cumsum(-1)
        return torch.where(y > 0, y, x.new_full((), -1.0)).contiguous()

    with build(forward, mode=mode) as runner:
        for at, size in enumerate((5, 8, 1, 4, 5)):
            x = rows(size, seed=at)
            assert torch.equal(runner(x), plain(forward, x))
        assert set(runner.stats()["hits"]) == {f"{mode}:4", f"{mode}:8"}


def test_every_size_is_warmed_up_before_it_is_captured() -> None:
    """On the same path, so that lazy set-up and caches come before the recording."""
    calls: list[tuple[int, bool]] = []

    @pcgsvc.splitting_op("toy::noting", mutates_args=("out",), support="always")
    def noting(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append((len(x), pcgsvc.current_context().in_segment))
        out.copy_(x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.noting(x * 2, out)
        return out

    build(forward, mode="full", sizes=[4, 8], warmup_calls=3, self_check=False).close()
    assert [call for call in calls if call[0] == 8] == [(8, False)] * 3 + [(8, True)]
    assert [call for call in calls if call[0] == 4] == [(4, False)] * 3 + [(4, True)]


def test_n_boundaries_give_n_and_one_segments_and_full_gives_one() -> None:
    with build(toy(3), sizes=[4]) as runner:
        (entry,) = runner.table.entries.values()
        assert entry.is_region == (True, False) * 3 + (True,)
        assert entry.num_graphs == 4
        assert entry.boundaries == ("toy::attend",) * 3

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            out = torch.empty_like(x)
            torch.ops.toy.device_only(x * 2, out)
            x = out
        return x

    with build(forward, mode="full", sizes=[4]) as runner:
        (entry,) = runner.table.entries.values()
        assert entry.is_region == (True,)


def test_boundaries_that_follow_one_another_are_one_step() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x), torch.empty_like(x)
        torch.ops.toy.attend(x * 3, y)
        torch.ops.toy.attend(y, z)
        torch.ops.toy.attend(z, y)
        return y + z

    with build(forward, sizes=[4]) as runner:
        (entry,) = runner.table.entries.values()
        assert entry.is_region == (True, False, True)
        assert entry.names[1].count("+") == 2
        assert entry.num_graphs == 2
        assert entry.boundaries == ("toy::attend",) * 3
        for seed in range(2):
            torch.testing.assert_close(
                runner(rows(3, seed=seed)), plain(forward, rows(3, seed=seed))
            )


def test_a_boundary_never_sees_memory_that_nothing_computed() -> None:
    # toy::attend asserts on its inputs; NaN lies in all memory that is handed out uninitialised.
    torch.use_deterministic_algorithms(True)
    try:
        with build(toy(3)) as runner:
            assert torch.isfinite(runner(rows(5))).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_functional_splitting_op_is_bridged_to_a_fixed_address() -> None:
    """A1: the next segment must not read the memory of the capture run."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.toy.fresh(x.sin())
        a, b = torch.ops.toy.two(y * 2)
        return a * b + y

    with build(forward) as runner:
        for at, size in enumerate((5, 8, 3)):
            junk = [torch.full((size, WIDTH), float("nan")) for _ in range(8)]
            x = rows(size, seed=at)
            assert torch.equal(runner(x), plain(forward, x))
            del junk


def test_a_native_functional_op_can_be_a_boundary() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(-1) + torch.softmax(x, -1)

    with build(forward, splitting_ops=["aten::softmax"]) as runner:
        (x, y) = (rows(5, seed=1), rows(7, seed=2))
        assert torch.equal(runner(x), forward(x))
        assert torch.equal(runner(y), forward(y))


class Counter(nn.Module):
    n: torch.Tensor
    rows_seen: torch.Tensor

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.split = split
        self.register_buffer("n", torch.zeros(1))
        self.register_buffer("rows_seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        y = x * self.n
        if self.split:
            torch.ops.toy.bump(self.rows_seen, torch.ones_like(x[:, :1]))
            y = attended(y)
        self.n.mul_(1)
        return y


@pytest.mark.parametrize("split", [False, True])
def test_state_reads_one_after_a_build_and_one_call(split: bool) -> None:
    module = Counter(split).eval()
    with build(module, mode="piecewise" if split else "full") as runner:
        assert module.n.item() == 0
        runner(rows(5))
        assert module.n.item() == 1
        assert module.rows_seen.item() == (5 if split else 0)
        runner(rows(50))  # uncaptured
        assert module.n.item() == 2
        assert module.rows_seen.item() == (55 if split else 0)


def test_poison_of_other_entries_changes_no_result() -> None:
    with build(toy(2), poison=True, sizes=[2, 4, 8]) as runner:
        for at, size in enumerate((8, 1, 4, 2, 7, 3, 8)):
            x = rows(size, seed=at)
            torch.testing.assert_close(runner(x), plain(toy(2), x))
        owned = [entry.owned for entry in runner.table.entries.values()]
        assert all(owned)
        assert any(t.isnan().any() for ts in owned for t in ts if t.is_floating_point())


def test_poison_shows_a_read_of_another_entry_s_memory() -> None:
    leak: list[torch.Tensor] = []

    @pcgsvc.splitting_op("toy::leaky", mutates_args=("out",), support="never")
    def leaky(x: torch.Tensor, out: torch.Tensor) -> None:
        leak.append(x)
        out.copy_(x + leak[0].view(-1)[0])  # memory of the entry that was captured first

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.leaky(x * 1, out)
        return out + 0

    with build(forward, poison=True, sizes=[4, 8], self_check=False) as runner:
        captured = {id(t): t for entry in runner.table.entries.values() for t in entry.owned}
        leak[:] = [t for t in captured.values() if t.shape[0] == 8][:1]
        assert torch.isnan(runner(rows(4))).all()


# ---- bound ops ----------------------------------------------------------------------------------

CALLS: list[str] = []


def _plus_one(x: torch.Tensor, out: torch.Tensor) -> None:
    CALLS.append("kernel")
    torch.add(x, 1, out=out)


def _bind_plus_one(x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    CALLS.append("bind")

    def again() -> None:
        CALLS.append("bound")
        torch.add(x, 1, out=out)

    return again


register_splitting_op(
    "toy::bound",
    _plus_one,
    mutates_args=("out",),
    support=Support.ALWAYS,
    bind=_bind_plus_one,
)


@pytest.mark.parametrize("strategy", [Strategy.FX, Strategy.BREAKABLE])
def test_a_replay_calls_what_an_op_was_bound_to(strategy: Strategy) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        out = torch.empty_like(x)
        torch.ops.toy.bound(x, out)
        return out * 2

    CALLS.clear()
    config = make_config("piecewise", (4,))
    config.partition.strategy = strategy
    with pcgsvc.build_runner(forward, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        assert CALLS.count("bind") == 1
        assert CALLS[CALLS.index("bind") - 1] == "kernel"
        for seed in (1, 2):
            CALLS.clear()
            x = rows(3, seed=seed)
            assert torch.equal(runner(x), (x.sin() + 1) * 2)
            assert CALLS == ["bound"]


def test_a_full_graph_holds_the_op_and_binds_nothing() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        out = torch.empty_like(x)
        torch.ops.toy.bound(x, out)
        return out * 2

    CALLS.clear()
    with build(forward, sizes=(4,), mode="full") as runner:
        assert set(CALLS) == {"kernel"}
        CALLS.clear()
        x = rows(3)
        assert torch.equal(runner(x), (x.sin() + 1) * 2)
        assert CALLS == []
