"""A call's copies inside an entry's graphs: what calls give then is what they give without."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pcgsvc
from pcgsvc.capture import copy_kernel
from pcgsvc.capture.call_copies import with_copies
from pcgsvc.capture.recorded import RecordedComposer, RecordedNode
from pcgsvc.cuda_driver import DriverError, Launch


@pcgsvc.splitting_op("callcopies::cut", mutates_args=("out",), support="always")
def cut(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 2, out=out)


class Model(nn.Module):
    """Two inputs of two dtypes, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.lin(x) + ids[:, None]
        out = torch.empty_like(h)
        torch.ops.callcopies.cut(h, out)
        return out.relu(), ids * 3


Moves = list[tuple[int, ...]]
"""(target, source, bytes) of each piece of memory that graphs copied, by launches that did."""


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """Have recorded graphs make the calls' copies; return what they copied."""
    made: Moves = []

    def move(grid: tuple[int, int, int], *words: int) -> None:
        made.extend([words] if any(words) else [])
        for at in range(0, len(words), 3):
            ctypes.memmove(*words[at : at + 3])

    launch = Launch(move, (1, 1, 1), (1, 1, 1), 0, (0,) * 3 * copy_kernel.MOST)
    monkeypatch.setattr(RecordedComposer, "copy_launch", lambda self, size: launch)
    return made


def build(*words: str) -> pcgsvc.Runner:
    torch.manual_seed(0)
    module = Model().eval().requires_grad_(False)
    config = pcgsvc.load_config(["cache.mode=off", "capture.sizes=[2,8]", "device=cpu", *words])
    example = {"x": torch.randn(3, 4), "ids": torch.arange(3)}
    return pcgsvc.build_runner(module, example, dynamic_dims={"x": 0, "ids": 0}, config=config)


@pytest.fixture(params=["full", "pieces", "stitched"])
def runner(request: Any, moves: Moves) -> Iterator[pcgsvc.Runner]:
    words = ["mode=piecewise", f"capture.replay={request.param}"]
    with build(*(["mode=full"] if request.param == "full" else words)) as built:
        moves.clear()
        assert all(entry.copies is not None for entry in built.table.entries.values())
        yield built


def given(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4), torch.randint(0, 9, (rows,))


def addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def held(runner: pcgsvc.Runner) -> set[int]:
    return addresses(t for entry in runner.table.entries.values() for t in entry.outputs)


def check(runner: pcgsvc.Runner, x: torch.Tensor, ids: torch.Tensor) -> Any:
    results = runner(x, ids)
    for got, wanted in zip(results, runner.model.module(x, ids), strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.shape == wanted.shape
        assert got.is_contiguous()
    return results


def test_calls_of_all_row_counts_in_turn_are_right_and_own_their_results(
    runner: pcgsvc.Runner, moves: Moves
) -> None:
    kept = []
    for rows in (8, 5, 1, 2, 7, 8, 1, 3, 8):
        x, ids = given(rows)
        kept.append((x, ids, check(runner, x, ids)))
    assert len(moves) == 2 * len(kept)
    for x, ids, results in kept:
        for got, wanted in zip(results, runner.model.module(x, ids), strict=True):
            torch.testing.assert_close(got, wanted)
    buffers = {b.untyped_storage().data_ptr() for b in runner.memory.buffers.values()}
    held = {
        t.untyped_storage().data_ptr() for e in runner.table.entries.values() for t in e.outputs
    }
    for _, _, results in kept:
        assert not {t.untyped_storage().data_ptr() for t in results} & (buffers | held)


def test_the_same_inputs_again_are_not_set_again(
    runner: pcgsvc.Runner, moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids = given(8)
    check(runner, x, ids)
    pack, packed = RecordedNode.pack_words, list[int]()
    monkeypatch.setattr(
        RecordedNode, "pack_words", lambda self, words: packed.append(id(self)) or pack(self, words)
    )
    x.add_(1)  # the memory is the same, its content is not
    first = check(runner, x, ids)
    second = check(runner, x, ids)
    assert not addresses(first) & addresses(second)
    assert len(set(packed)) == 1  # of the results alone
    assert moves[-4] == moves[-2]


def test_a_stitched_step_that_grows_or_runs_as_its_pieces_makes_the_copies_too(
    moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build("mode=piecewise", "capture.replay=stitched") as runner:
        check(runner, *given(8))
        largest = max(runner.table.entries, key=lambda key: key[1].num_tokens)
        joined = runner.table.entries[largest].joined
        assert joined is not None
        (stitched,) = joined.stitched
        stitched._compose()
        check(runner, *given(8))
        check(runner, *given(5))
        prepared = runner.prepare(8)
        before = len(moves)
        prepared.update()
        prepared.step()
        assert len(moves) == before
        check(runner, *given(7))
        monkeypatch.setattr(stitched, "_broken", True)
        check(runner, *given(8))
        check(runner, *given(6))


def test_a_call_that_is_interrupted_leaves_no_copies_to_a_prepared_one(
    moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable = RecordedNode.enable

    def interrupted(self: RecordedNode, enabled: bool) -> None:
        enable(self, enabled)
        raise KeyboardInterrupt

    others = given(8)
    with build("mode=piecewise", "capture.replay=stitched") as runner:
        prepared = runner.prepare(8)
        for _ in range(2):
            x, ids = given(8)
            prepared.update()
            prepared.inputs["x"].copy_(x)
            prepared.inputs["ids"].copy_(ids)
            before = len(moves)
            for got, wanted in zip(prepared.step(), runner.model.module(x, ids), strict=True):
                torch.testing.assert_close(got, wanted)
            assert len(moves) == before
            with monkeypatch.context() as patched:
                patched.setattr(RecordedNode, "enable", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    runner(*others)
        check(runner, *given(8))


@pytest.mark.parametrize(
    ("place", "error"), [("behind", DriverError), ("boundaries", KeyboardInterrupt)]
)
def test_a_stitched_step_that_fails_to_grow_has_the_next_ones_right(
    place: str, error: type[BaseException], moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_alive: list[Any] = []  # what a stale node would copy, or write to

    def call(rows: int) -> None:
        inputs = given(rows)
        kept_alive.append(inputs)
        results = runner(*inputs)
        kept_alive.append(results)
        for got, wanted in zip(results, runner.model.module(*inputs), strict=True):
            torch.testing.assert_close(got, wanted)

    with build("mode=piecewise", "capture.replay=stitched") as runner:
        call(8)
        largest = max(runner.table.entries, key=lambda key: key[1].num_tokens)
        joined = runner.table.entries[largest].joined
        assert joined is not None
        (stitched,) = joined.stitched
        (source,) = stitched.sources
        owner, name = (RecordedNode, "enable") if place == "behind" else (type(source), "composed")
        kept, calls = getattr(owner, name), list[Any]()

        def fail(*args: Any) -> None:
            kept(*args)
            calls.append(args)
            if len(calls) == (2 if place == "behind" else 1):
                raise error("refused")

        launches = source.slots
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            with pytest.raises(error):
                stitched._grow([[*launches, launches[0]]])
        assert calls
        assert source.slots is launches
        for rows in (8, 5, 8):
            call(rows)


@pytest.mark.parametrize("kind", ["turned", "every other row", "negated", "an own subclass"])
def test_inputs_that_are_no_plain_memory_are_copied_around_the_graphs(
    runner: pcgsvc.Runner, moves: Moves, kind: str
) -> None:
    x, ids = given(4)
    if kind == "turned":
        x = x.t()
    elif kind == "every other row":
        x = torch.randn(8, 4)[::2]
    elif kind == "negated":
        x = torch.randn(4, 4, dtype=torch.complex64).conj().imag
        x = torch.as_strided(x, (4, 1), (2, 1)).expand(4, 4)
        assert x.is_neg()
    else:
        x = nn.Parameter(x, requires_grad=False)
    check(runner, x, ids)
    assert moves == []
    check(runner, *given(4))
    assert len(moves) == 2


def test_a_prepared_call_in_between_has_its_own_inputs(runner: pcgsvc.Runner) -> None:
    prepared = runner.prepare(5)
    for _ in range(3):
        check(runner, *given(8))
        x, ids = given(5)
        prepared.update()
        prepared.inputs["x"].copy_(x)
        prepared.inputs["ids"].copy_(ids)
        for got, wanted in zip(prepared.step(), runner.model.module(x, ids), strict=True):
            torch.testing.assert_close(got, wanted)
        check(runner, prepared.inputs["x"], prepared.inputs["ids"])


def test_memory_that_the_driver_refuses_is_copied_around_the_graphs_from_then_on(
    moves: Moves, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, words: Any) -> Any:
        raise DriverError("cuGraphExecKernelNodeSetParams: no such memory")

    with build("mode=piecewise") as runner:
        moves.clear()
        check(runner, *given(5))
        monkeypatch.setattr(RecordedNode, "pack_words", refuse)
        with caplog.at_level("INFO"):
            for _ in range(2):
                check(runner, *given(5))
        said = [r.message for r in caplog.records if "copies are made outside" in r.message]
        assert len(said) == 1
        assert runner.stats()["hits"] == {"piecewise:8": 3}
        assert len(moves) == 2


def test_memory_that_the_driver_refuses_in_the_self_check_is_copied_around_the_graphs(
    moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, words: Any) -> Any:
        raise DriverError("cuGraphExecKernelNodeSetParams: no such memory")

    monkeypatch.setattr(RecordedNode, "pack_words", refuse)
    with build("mode=piecewise", "capture.replay=stitched") as runner:
        assert all(row["ok"] for row in runner.report["verify"])
        check(runner, *given(5))
    assert moves == []


def test_poisoned_steps_and_views_of_results_are_right(moves: Moves) -> None:
    with build("mode=full", "debug.poison=true") as runner:
        moves.clear()
        for rows in (8, 2, 5):
            check(runner, *given(rows))
        assert moves == []
    with build("mode=full", "outputs=view") as runner:
        moves.clear()
        for rows in (8, 2, 5):
            results = check(runner, *given(rows))
            assert addresses(results) <= held(runner)
        assert len(moves) == 3  # inputs alone


def test_the_self_check_makes_the_copies_that_calls_make(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(grid: tuple[int, int, int], *words: int) -> None:
        for at in range(0, len(words), 3):
            target, source, size = words[at : at + 3]
            ctypes.memmove(target + 4, source + 4, max(0, size - 4))  # but for the first element

    launch = Launch(move, (1, 1, 1), (1, 1, 1), 0, (0,) * 3 * copy_kernel.MOST)
    monkeypatch.setattr(RecordedComposer, "copy_launch", lambda self, size: launch)
    with pytest.raises(pcgsvc.PcgError, match="replay differs from plain execution"):
        build("mode=full")


def test_a_boundary_at_either_end_leaves_its_copies_a_step_of_their_own() -> None:
    ran: list[str] = []
    steps = [(partial(ran.append, name), name == "segment") for name in ("op", "segment", "op")]
    launch = Launch(lambda grid: ran.append("copy"), (1, 1, 1), (1, 1, 1), 0, ())

    class Composer(RecordedComposer):
        def copy_launch(self, size: int) -> Launch:
            return launch

    found = with_copies(steps, Composer(), [torch.ones(2)], [], [torch.ones(2)])
    assert found is not None
    assert found.behind is not None
    for copying in (found.before, found.behind):
        copying.set(())
    for step in found.steps:
        step()
    assert ran == ["copy", "op", "segment", "op", "copy"]
    assert len(found.steps) == 5


@pytest.mark.parametrize("odd", ["empty", "turned", "complex", "negated", "many", "none"])
def test_what_no_copy_node_can_do_stays_outside(odd: str, moves: Moves) -> None:
    tensors = {
        "empty": [torch.ones(0, 2)],
        "turned": [torch.ones(3, 2).t()],
        "complex": [torch.ones(2, dtype=torch.complex64)],
        "negated": [torch.ones(1, dtype=torch.complex64).conj().imag],
        "many": [torch.ones(2)] * 6,
        "none": [],
    }[odd]
    step: Any = (lambda: None, True)
    assert with_copies([step], RecordedComposer(), tensors, [], []) is None
    found = with_copies([step], RecordedComposer(), [torch.ones(2)], [], tensors)
    assert found is None or odd == "none"


def test_results_that_are_to_be_negated_on_reading_are(moves: Moves) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(2 * x).conj().imag  # of one row: one piece of memory

    config = pcgsvc.load_config(["cache.mode=off", "capture.sizes=[1,2]", "device=cpu"])
    example = {"x": torch.randn(2, 2)}
    with pcgsvc.build_runner(forward, example, dynamic_dims={"x": 0}, config=config) as runner:
        for rows in (1, 2):
            x = torch.randn(rows, 2)
            assert torch.equal(runner(x), forward(x))
