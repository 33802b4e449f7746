"""Modes, threads, processes, nested calls and replaced weights around a call of a runner."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, build, plain, rows, toy
from torch import nn

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.errors import PcgError, StaleAddressError
from pcgsvc.ops.context import find_context

# ---- surroundings --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 3, 20])
@pytest.mark.parametrize("around", ["grad", "inference", "autocast", "no_grad", "float64 default"])
def test_the_caller_s_modes_do_not_matter_and_are_left_alone(
    shared: pcgsvc.Runner, around: str, size: int
) -> None:
    x = rows(size)
    wanted = shared(x)
    manager: Any = {
        "grad": torch.enable_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "no_grad": torch.no_grad(),
        "float64 default": torch.no_grad(),
    }[around]
    if around == "float64 default":
        torch.set_default_dtype(torch.float64)
    try:
        with manager:
            modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
            got = shared(x.requires_grad_(around == "grad"))
            assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == modes
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype is torch.float32
    assert not got.requires_grad
    assert torch.equal(got, wanted)
    assert torch.equal(shared(x.detach()), wanted)  # and the next call is none the worse


def test_a_runner_built_under_inference_mode_is_as_any_other() -> None:
    """A build under autocast is refused: test_check_program.py."""
    module = toy(1)
    with torch.inference_mode():
        runner = build(module)
    with runner:
        for size in (5, 20):
            got = runner(rows(size))
            assert got.dtype is torch.float32
            torch.testing.assert_close(got, plain(module, rows(size)))


@pytest.mark.parametrize("batch", [False, True])
def test_a_function_that_torch_compiles_may_call_a_runner(batch: bool) -> None:
    @torch.compile(backend="eager")
    def twice(x: torch.Tensor) -> Any:
        given = pcgsvc.Batch(query_lens=[x.shape[0]]) if batch else None
        return runner(x * 2, batch=given) * 2

    module = toy(1)
    with build(module) as runner:
        for size in (3, 4, 7, 20, 3):
            x = rows(size)
            torch.testing.assert_close(twice(x), plain(module, x * 2) * 2)
        assert runner.stats()["hits"] == {"piecewise:4": 3, "piecewise:8": 1}


def test_calls_from_eight_threads_are_each_right(shared: pcgsvc.Runner) -> None:
    """A10."""
    inputs = [rows(1 + at % 12, seed=at) for at in range(64)]
    wanted = [plain(toy(2), x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for got, want in zip(pool.map(shared, inputs), wanted, strict=True):
            torch.testing.assert_close(got, want)


def test_two_threads_may_build_at_once() -> None:
    made: list[Any] = []

    def go(seed: int) -> None:
        made.append((seed, build(toy(1, seed), sizes=[4])))

    threads = [threading.Thread(target=go, args=(s,)) for s in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    for seed, runner in made:
        torch.testing.assert_close(runner(rows(3)), plain(toy(1, seed), rows(3)))
        runner.close()


def test_a_boundary_that_raises_leaves_the_runner_usable() -> None:
    with build(toy(1), sizes=[4]) as runner:
        with pytest.raises(AssertionError):
            runner(torch.full((3, WIDTH), float("nan")))
        torch.testing.assert_close(runner(rows(3)), plain(toy(1), rows(3)))
        with pytest.raises(PcgError, match="no forward context"):
            pcgsvc.current_context()


# ---- weights -------------------------------------------------------------------------------------


def test_an_update_in_place_just_works() -> None:
    """A4."""
    module = toy(1)
    with build(module, sizes=[4]) as runner:
        before = runner(rows(3))
        module.load_state_dict(toy(1, seed=9).state_dict())
        with torch.no_grad():
            module.blocks[0].up.weight.mul_(2)
        assert not torch.equal(runner(rows(3)), before)
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))


def replace_data(module: Any) -> None:
    module.blocks[0].up.weight.data = torch.randn(WIDTH, WIDTH)


def replace_parameter(module: Any) -> None:
    module.blocks[0].up.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def replace_submodule(module: Any) -> None:
    module.blocks[0].up = nn.Linear(WIDTH, WIDTH)


def assign_state(module: Any) -> None:
    module.load_state_dict(toy(1, seed=3).state_dict(), assign=True)


@pytest.mark.parametrize(
    "change",
    [replace_data, replace_parameter, replace_submodule, assign_state],
)
def test_replaced_weights_are_refused_at_the_next_call(change: Any) -> None:
    module = toy(1)
    with build(module, sizes=[4]) as runner:
        runner(rows(3))
        change(module)
        with pytest.raises(StaleAddressError, match=r"blocks\.0(.|\n)*load_state_dict"):
            runner(rows(3))


# ---- processes and nested calls ------------------------------------------------------------------


@pcgsvc.splitting_op("toy::calls_runner", mutates_args=("out",))
def calls_runner(x: torch.Tensor, out: torch.Tensor) -> None:
    runner = CALLED.get("runner")
    out.copy_(x if runner is None else runner(x * 2))


CALLED: dict[str, pcgsvc.Runner] = {}


def test_a_runner_is_not_called_by_an_op_of_its_own_call() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.calls_runner(x + 1, out)
        return out * 3

    with build(forward, sizes=[4]) as runner:
        CALLED["runner"] = runner
        try:
            with pytest.raises(PcgError, match="called by a splitting op"):
                runner(rows(3))
        finally:
            del CALLED["runner"]
        x = rows(3)
        assert torch.equal(runner(x), (x + 1) * 3)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("done", ["closed", "given weights"])
def test_a_runner_is_neither_closed_nor_loaded_by_an_op_of_its_own_call(
    done: str, prepared: bool
) -> None:
    module = toy(1)
    state = {name: value * 2 for name, value in module.state_dict().items()}
    runner = build(module, sizes=[4])
    uses: list[Any] = [runner.close if done == "closed" else lambda: runner.load_state_dict(state)]
    entry = next(iter(runner.table.entries.values()))
    steps, entry.steps = entry.steps, (lambda: [use() for use in uses], *entry.steps)
    call: Any = runner.prepare(3).step if prepared else lambda: runner(rows(3))
    with runner:
        wanted = plain(module, rows(3))
        with pytest.raises(PcgError, match=f"the runner was {done} by a splitting op of a call"):
            call()
        entry.steps = steps
        uses.clear()
        assert torch.allclose(runner(rows(3)), wanted)


def test_an_interrupt_at_the_start_of_a_call_does_not_leave_it_running(
    shared: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(enabled: bool) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    wanted = shared(rows(3))
    monkeypatch.setattr(torch_private, "set_grad", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared(rows(3))
    assert torch.equal(shared(rows(3)), wanted)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("size", [3, 20])
def test_an_interrupt_anywhere_in_a_call_leaves_the_next_one_and_its_surroundings_right(
    shared: pcgsvc.Runner, size: int
) -> None:
    """Signals are handled where a Python function begins, and after a call of a C function."""
    x, at = rows(size), 0
    wanted, hooks = shared(x), sys.getprofile()
    while True:
        at += 1
        left = itertools.count(-at, 1)

        def interrupt(frame: Any, event: str, arg: Any, left: Iterator[int] = left) -> None:
            if event in ("call", "c_return") and next(left) == -1:
                raise KeyboardInterrupt

        try:
            sys.setprofile(interrupt)
            shared(x)
            if next(left) < 0:
                break  # all places are done
        except KeyboardInterrupt:
            sys.setprofile(hooks)
            assert find_context() is None
            assert torch.is_grad_enabled()
            assert torch.equal(shared(x), wanted)
        finally:
            sys.setprofile(hooks)
    assert at > 30


def test_a_call_whose_copy_fails_leaves_no_rows_behind() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    given = {"x": rows(3), "y": rows(3).double()}  # two dtypes: one is copied after the other
    with build(forward, given, {"x": 0, "y": 0}, sizes=[4]) as runner:
        runner(**given)
        with pytest.raises(RuntimeError, match="it is gone"):
            runner(rows(4), rows(4).double().as_subclass(Gone))
        runner(**given)
        assert not runner.memory.buffers["x"][3:].any()


class Gone(torch.Tensor):
    """Memory that cannot be copied from."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in func.__name__:
            raise RuntimeError("it is gone")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not_got(shared: pcgsvc.Runner) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with shared.lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if shared.lock.acquire(timeout=20) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_a_runner_is_neither_copied_nor_pickled(shared: pcgsvc.Runner, how: Any) -> None:
    with pytest.raises(TypeError, match="a Runner cannot be copied or pickled"):
        how(shared)


def test_a_closed_runner_is_not_entered_again() -> None:
    runner = build(toy(1), sizes=[4])
    runner.close()
    with pytest.raises(PcgError, match="is closed"), runner:
        pass
