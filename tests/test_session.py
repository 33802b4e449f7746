"""Capture: replays equal plain runs, nothing is frozen or seen too early, failures stay small."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import KEEP, WIDTH, attended, build, make_config, rows, toy
from model_helpers import make_context
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pcgsvc
from pcgsvc.capture.capture import _way_out
from pcgsvc.capture.recorded import RecordedEngine
from pcgsvc.capture.session import Session
from pcgsvc.config import CacheConfig, Strategy
from pcgsvc.errors import CaptureError, HostReadError, PcgError, VerifyError
from pcgsvc.ops.context import use_context
from pcgsvc.ops.registry import register_splitting_op
from pcgsvc.ops.support import Support

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


def plain(module: Callable[..., Any], x: torch.Tensor) -> Any:
    with torch.no_grad(), use_context(make_context(None, [len(x)])):
        return module(x)


@pytest.fixture(autouse=True)
def nothing_is_broken() -> Iterator[None]:
    yield
    BROKEN.clear()
    ATTEMPTS.clear()
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


def test_n_boundaries_give_n_and_one_segments_and_full_gives_one() -> None:
    with build(toy(3), sizes=[4]) as runner:
        (entry,) = runner.parts.table.entries.values()
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
        (entry,) = runner.parts.table.entries.values()
        assert entry.is_region == (True,)


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


# ---- padding -------------------------------------------------------------------------------------


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
        (entry,) = runner.parts.table.entries.values()
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


# ---- what a segment must not hold ----------------------------------------------------------------

FORBIDDEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask index": lambda x: x[x > 0],
    "mask write": lambda x: x.clone().__setitem__(x > 0, torch.ones(int(WIDTH))[0]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: __import__("numpy").asarray(x),
    "torch.tensor": lambda x: torch.tensor([1.0, 2.0]),
    "as_tensor": lambda x: torch.as_tensor([1.0]),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "asarray": lambda x: torch.asarray([1.0]),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "bincount": lambda x: (x > 0).long().view(-1).bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), 0),
    "resize": lambda x: x.clone().resize_(1),
}


class _Call:
    """Stands for a compiled piece."""

    opaque = False
    boundaries = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return (self._function(*args),)


UNSEEN = ["array", "new_tensor", "asarray", "equal", "allclose", "bincount"]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cuda_would_refuse_in_a_segment_is_refused(name: str) -> None:
    engine = RecordedEngine()
    session = Session(engine, make_context(None, [3]), breaks=True)
    try:
        with (
            engine.session(),
            pytest.raises(CaptureError, match="while a segment is captured"),
        ):
            session.region("piece_00", _Call(FORBIDDEN[name]), [rows(3)])
    finally:
        session.abort()
    assert rows(3).sum().item() == rows(3).sum().item()  # the modes are gone


ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "shapes": lambda x: x.view(-1)[: x.shape[0]],
    "where": lambda x: torch.where(x > 0, x, 0),
    "index": lambda x: x[torch.arange(2)],
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(
        torch.ones(3, dtype=torch.long), 0, output_size=3
    ),
    "full": lambda x: torch.full((2,), 3.0),
    "topk": lambda x: x.topk(2)[0],
}


@pytest.mark.parametrize(
    "name",
    ALLOWED,
)
def test_what_cuda_allows_in_a_segment_is_recorded(name: str) -> None:
    engine = RecordedEngine()
    session = Session(engine, make_context(None, [3]), breaks=True)
    x = rows(3)
    try:
        with engine.session():
            (out,) = session.region("piece_00", _Call(ALLOWED[name]), [x])
            entry = session.finish([out])
    finally:
        session.abort()
    x.copy_(rows(3, seed=5))
    for step in entry.steps:
        step()
    assert torch.equal(out, ALLOWED[name](x))


def test_a_host_read_in_a_full_graph_raises_and_is_not_frozen() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.host_reader(x, out)
        return out

    with pytest.raises(CaptureError, match="num_tokens was read"):
        build(forward, mode="full")
    with build(forward, mode="piecewise") as runner:
        assert torch.equal(runner(rows(5)), rows(5) * 5)


def test_varlen_forced_into_full_raises_host_read_error() -> None:
    from pcgsvc.ops.support import Support
    from pcgsvc.ops.varlen import VarlenAttention

    class Liar(VarlenAttention):
        cudagraph_support = Support.ALWAYS

    from pcgsvc.ops import backends

    before = dict(backends.BACKENDS)
    backends.BACKENDS["varlen"] = Liar
    try:
        with pytest.raises(CaptureError) as caught:
            pcgsvc.load_runner(
                [
                    "model=llama",
                    "model.num_layers=1",
                    "attention=varlen",
                    "mode=full",
                    "compiler=eager",
                    "capture.sizes=[4]",
                    "cache.mode=off",
                ]
            )
    finally:
        backends.BACKENDS.clear()
        backends.BACKENDS.update(before)
    assert isinstance(caught.value.__cause__, HostReadError)


def test_an_uncut_splitting_op_that_must_stay_outside_is_not_captured() -> None:
    """S8: `splitting_ops=[]` leaves a support=never op in the graph, host values and all."""
    scale = [1.0]

    @pcgsvc.splitting_op("toy::hidden", mutates_args=("out",), support="never")
    def hidden(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * scale[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.hidden(x, out)
        return out

    with build(forward, splitting_ops=[]) as runner:
        assert runner.report["mode"]["resolved"] == "none"
        assert "toy::hidden" in runner.report["mode"]["reasons"][0]


def test_poison_of_other_entries_changes_no_result() -> None:
    with build(toy(2), poison=True, sizes=[2, 4, 8]) as runner:
        for at, size in enumerate((8, 1, 4, 2, 7, 3, 8)):
            x = rows(size, seed=at)
            torch.testing.assert_close(runner(x), plain(toy(2), x))
        owned = runner.parts.table.owned
        assert all(owned.values())
        assert any(t.isnan().any() for ts in owned.values() for t in ts if t.is_floating_point())


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
        captured = {id(t): t for ts in runner.parts.table.owned.values() for t in ts}
        leak[:] = [t for t in captured.values() if t.shape[0] == 8][:1]
        assert torch.isnan(runner(rows(4))).all()


# ---- failures ------------------------------------------------------------------------------------


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
            assert "no room" in runner.parts.table.skipped[8]
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
        (owned,) = runner.parts.table.owned.values()
        assert {t.shape[0] for t in owned} == {4}


def test_a_size_that_fails_in_its_warm_up_is_skipped_too() -> None:
    """D4: a position table shorter than the bucket is no reason to die."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[torch.arange(x.shape[0])]

    with build(Positions().eval(), mode="full", sizes=[4, 8]) as runner:
        assert list(runner.parts.table.skipped) == [8]
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
        used = {
            k[1].num_tokens: sum(t.nbytes for t in v) for k, v in runner.parts.table.owned.items()
        }
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
        assert all("s" in r for r in runner.parts.table.skipped.values())
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


# ---- inductor ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inductor() -> Iterator[tuple[Any, pcgsvc.Runner]]:
    module = toy(3)
    with build(module, compiler="inductor", sizes=[4, 8], poison=True) as runner:
        yield module, runner


@pytest.mark.slow
def test_inductor_pieces_replay_what_the_module_gives(inductor: tuple[Any, Any]) -> None:
    module, runner = inductor
    for at, size in enumerate((5, 8, 1, 4, 5, 20)):
        x = rows(size, seed=at)
        torch.testing.assert_close(runner(x), plain(module, x), rtol=1e-4, atol=1e-5)
    assert runner.report["compile"]["num_compiled"] == 3
    assert set(runner.stats()["hits"]) == {"piecewise:4", "piecewise:8"}


@pytest.mark.slow
def test_an_inductor_piece_that_only_writes_is_replayed() -> None:
    class Writes(nn.Module):
        state: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(1, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = attended(x)
            y.mul_(3)  # the region's only result is the memory that it was given
            z = attended(y)
            self.state += 1  # a region without any result
            return attended(z)

    module = Writes().eval()
    with build(module, compiler="inductor", sizes=[8]) as runner:
        for at in range(3):
            x = rows(5, seed=at)
            torch.testing.assert_close(runner(x), x * 24)
        assert module.state[0, 0].item() == 3


@pytest.mark.slow
def test_inductor_refuses_to_part_two_views_that_are_written_behind_a_split() -> None:
    from pcgsvc.errors import SplitError

    def forward(x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        a, b = base.view(-1), base.view(2, -1)
        y = attended(x)
        a.mul_(2)
        return b.sum() + y + a.view(-1, WIDTH)

    with pytest.raises(SplitError, match="share memory"):
        build(forward, compiler="inductor", sizes=[8])


@pytest.mark.slow
def test_an_inductor_option_that_does_not_exist_names_the_piece() -> None:
    from core_helpers import make_config

    config = make_config(compiler="inductor", sizes=[4])
    config.compiler.options = {"no_such_option": 1}
    with pytest.raises(PcgError, match="piece_00"):
        pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config)


@pytest.mark.slow
def test_dump_dir_holds_the_sources_of_the_pieces_at_a_cold_and_a_warm_start(
    tmp_path: Path,
) -> None:
    from core_helpers import make_config

    config = make_config(compiler="inductor", sizes=[4])
    config.compiler.specialize_sizes = [4]
    config.cache = CacheConfig(dir=str(tmp_path / "cache"))
    dumps = []
    for start in ("cold", "warm"):
        config.debug.dump_dir = str(tmp_path / start)
        with pcgsvc.build_runner(sines, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
            assert runner.report["compile"]["start"] == start
        dumps.append({p.name: p.read_text() for p in (tmp_path / start).iterdir()})
    assert sorted(dumps[0]) == [
        "piece_00.fx.py",
        "piece_00.inductor.py",
        "piece_00.size_4.inductor.py",
    ]
    assert dumps[0] == dumps[1]


@pytest.mark.slow
def test_what_cannot_be_dumped_at_a_warm_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pcgsvc.compilers.inductor import InductorPiece

    config = make_config(compiler="inductor", sizes=[4])
    config.cache = CacheConfig(dir=str(tmp_path / "cache"))
    pcgsvc.build_runner(sines, rows(3), dynamic_dims={"x": 0}, config=config).close()
    config.debug.dump_dir = str(tmp_path / "dump")

    def none(piece: InductorPiece) -> str:
        raise AttributeError("source_code")

    monkeypatch.setattr(InductorPiece, "generated", none)
    monkeypatch.setattr(InductorPiece, "num_kernels", lambda piece: 1)
    pcgsvc.build_runner(sines, rows(3), dynamic_dims={"x": 0}, config=config).close()
    assert [p.name for p in (tmp_path / "dump").iterdir()] == ["piece_00.fx.py"]
    assert "debug.dump_dir: piece_00.inductor.py cannot be written" in caplog.text


def sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


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


def test_an_unjoined_side_stream_is_told_with_its_way_out() -> None:
    # CUDA's own words; on the CPU there are no streams.
    text = "CUDA error: capturing stream has unjoined work"
    assert "current_stream().wait_stream(side)" in _way_out(text)
    assert _way_out("CUDA error: out of memory") == ""
