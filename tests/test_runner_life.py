"""A runner from its build to its end, and what a call of it means."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core_helpers import build, device_forward, make_config, plain, rows, toy

import pcgsvc
from pcgsvc.errors import (
    BatchError,
    PcgError,
    VerifyError,
)
from pcgsvc.forward.process import collector_eased

# ---- life ----------------------------------------------------------------------------------------


def test_a_closed_runner_says_so_and_closing_twice_is_fine() -> None:
    runner = build(toy(1), sizes=[4])
    with runner as same:
        assert same is runner
    runner.close()
    runner.close()
    uses: list[Callable[[], Any]] = [
        lambda: runner(rows(3)),
        lambda: runner.plan(3),
        lambda: runner.generate(["text"]),
        lambda: runner.stream("text"),
        lambda: runner.embed(["text"]),
        lambda: runner.load_state_dict({}),
        runner.ensure_open,
    ]
    for use in uses:
        with pytest.raises(PcgError, match="closed"):
            use()
    assert runner.stats()["hits"] == {}
    assert runner.report["graphs"]["num_graphs"] == 2


def test_closing_frees_buffers_and_program_though_the_runner_is_kept() -> None:
    """M4."""
    runner = build(toy(1), sizes=[4])
    runner(rows(3))
    entry = next(iter(runner.table.entries.values()))
    dead = [
        weakref.ref(o)
        for o in (
            runner.request,
            runner.model,
            runner.memory.buffers["x"],
            runner.memory,
            runner.model.program,
            entry,
            entry.outputs[0],
        )
    ]
    del entry
    runner.close()
    gc.collect()
    assert [r() for r in dead] == [None] * len(dead)


def test_nothing_keeps_the_model_alive() -> None:
    module = toy(1)
    runner = build(module, sizes=[4])
    runner(rows(3))
    dead = [weakref.ref(module), weakref.ref(module.blocks[0].up.weight), weakref.ref(runner)]
    runner.close()
    del module, runner
    gc.collect()
    assert [r() for r in dead] == [None] * len(dead)


def test_two_runners_side_by_side_closed_in_either_order() -> None:
    """W4."""
    for first_to_go in (0, 1):
        runners = [build(toy(1, 1), sizes=[4]), build(device_forward, sizes=[2, 4], mode="full")]
        modules = [toy(1, 1), device_forward]
        for at in range(6):
            x = rows(1 + at % 4, seed=at)
            torch.testing.assert_close(runners[at % 2](x), plain(modules[at % 2], x))
        runners[first_to_go].close()
        other = 1 - first_to_go
        torch.testing.assert_close(runners[other](rows(3)), plain(modules[other], rows(3)))
        runners[other].close()


def test_twelve_runners_of_one_class_in_one_process() -> None:
    """T5."""
    for seed in range(12):
        with build(toy(1, seed), sizes=[4]) as runner:
            torch.testing.assert_close(runner(rows(3)), plain(toy(1, seed), rows(3)))


def test_building_does_not_touch_the_caller_s_config() -> None:
    config = make_config()
    before = dataclasses.asdict(config)
    pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config).close()
    assert dataclasses.asdict(config) == before


def test_building_leaves_torch_s_global_state_alone() -> None:
    def state() -> Any:
        return (
            torch.random.get_rng_state().tolist(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            gc.isenabled(),
            gc.get_threshold(),
            torch.get_default_dtype(),
        )

    module = toy(1)  # torch's own initialisation draws random numbers
    before = state()
    build(module, sizes=[4]).close()
    assert state() == before


class Cycle:
    """What only the collector frees."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Let nothing be frozen, then and afterwards: a build counts what is, object by object."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_a_build_eases_the_collector_and_puts_it_back_after_an_error() -> None:
    def fail() -> None:
        with collector_eased():
            assert gc.get_threshold()[0] > threshold[0]
            assert gc.get_freeze_count() > 10_000
            with collector_eased():
                new = weakref.ref(Cycle())
                gc.collect()
                assert new() is None
            assert gc.get_freeze_count() > 10_000
            raise ValueError("no")

    threshold, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(ValueError, match="no"):
        fail()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (threshold, frozen)


@pytest.mark.usefixtures("unfrozen")
def test_builds_of_two_threads_leave_the_collector_as_it_was_whichever_ends_first() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    one, other = collector_eased(), collector_eased()
    for block in (one, other):
        block.__enter__()
    for block in (one, other):
        block.__exit__(None, None, None)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


@pytest.mark.usefixtures("unfrozen")
def test_what_the_process_has_frozen_stays_frozen_and_no_collector_is_switched_on() -> None:
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(0)
    try:
        frozen = gc.get_freeze_count()
        with collector_eased():
            assert gc.get_threshold()[0] == 0
        assert gc.get_freeze_count() == frozen
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("given_out", [0, 512])
def test_garbage_that_may_hold_device_memory_is_collected_before_a_build(
    monkeypatch: pytest.MonkeyPatch, given_out: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: device * given_out)
    gc.disable()
    try:
        dead = weakref.ref(Cycle())
        with collector_eased([torch.ones(3)]):
            assert (dead() is None) is bool(given_out)
    finally:
        gc.enable()


def test_the_report_of_a_library_build_fits_the_schema(validate_report: Any) -> None:
    with build(toy(1), sizes=[4]) as runner:
        report = dict(runner.report)
        validate_report(report)
        assert report["partition"]["num_boundaries"] == 1
        assert report["graphs"]["backend"] == "recorded"


def test_the_memory_of_one_capture_is_not_lost_when_a_size_is_never_called() -> None:
    with build(toy(1), sizes=[2, 4, 8]) as runner:
        addresses = {
            key[1].num_tokens: entry.outputs[0].data_ptr()
            for key, entry in runner.table.entries.items()
        }
        assert len(set(addresses.values())) == 3
        runner(rows(8))
        assert {
            key[1].num_tokens: entry.outputs[0].data_ptr()
            for key, entry in runner.table.entries.items()
        } == addresses


def test_rows_may_lie_in_another_dimension_than_the_first() -> None:
    config = make_config("full", [2, 8])
    example = {"x": torch.randn(3, 5)}
    with pcgsvc.build_runner(
        lambda x: x * 2 + 1, example, dynamic_dims={"x": 1}, config=config
    ) as runner:
        assert runner.report["graphs"]["sizes"] == [2, 8]
        for count in (1, 2, 5, 8):
            x = torch.randn(3, count)
            assert torch.equal(runner(x), x * 2 + 1)
            assert all(view.is_contiguous() for view in runner.memory.views(2).values())


def test_profiler_ranges_carry_the_pieces_names() -> None:
    config = make_config(sizes=[4])
    config.debug.profile_ranges = True
    with pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        with torch.profiler.profile(acc_events=True) as profile:
            runner(rows(4))
        names = {event.key for event in profile.key_averages()}
    assert {"piece_00", "piece_02", "toy::attend"} <= names


def test_a_call_without_a_batch_means_the_same_after_other_batches() -> None:
    overrides = ["model=llama", "capture.sizes=[4,8]", "cache.mode=off", "bench.enabled=false"]
    with pcgsvc.load_runner(overrides) as runner:
        ids, positions = torch.arange(5), torch.arange(5)
        first = runner(ids, positions)
        pair = pcgsvc.Batch(query_lens=[2, 3])
        runner(ids + 7, torch.tensor([0, 1, 0, 1, 2]), batch=pair)
        runner(ids[:3], positions[:3])
        assert torch.equal(runner(ids, positions), first)


# ---- what a call means ---------------------------------------------------------------------------


def test_positional_arguments_are_the_forward_s_own() -> None:
    def forward(x: Any, mask: Any = None, y: Any = None) -> Any:
        x = x * 2 if mask is None else x * mask
        return x if y is None else x + y

    config = make_config(sizes=(4,))
    example = {"x": rows(3), "y": rows(3)}
    dims = {"x": 0, "y": 0}
    with pcgsvc.build_runner(forward, example, dynamic_dims=dims, config=config) as runner:
        a, b = rows(3, seed=1), rows(3, seed=2)
        assert torch.equal(runner(a, None, b), forward(a, None, b))
        assert torch.equal(runner(a, y=b), forward(a, y=b))
        with pytest.raises(BatchError, match=r"the forward has mask, which was None when built"):
            runner(a, b)


def by_size(x: torch.Tensor) -> Any:
    if x.shape[0] > 4:
        return {"big": x * 2}
    return (x, x + 1, None)


def test_a_row_count_that_the_trace_is_not_valid_for_gives_the_module_s_own_result() -> None:
    config = make_config(sizes=(8,))
    with pcgsvc.build_runner(by_size, rows(6), dynamic_dims={"x": 0}, config=config) as runner:
        x = rows(7)
        assert torch.equal(runner(x)["big"], x * 2)
        x = rows(3)
        same, more, nothing = runner(x)
        assert torch.equal(same, x)
        assert torch.equal(more, x + 1)
        assert nothing is None


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, ids: x * ids.min(),  # padding is zero, the examples are not
        lambda x, ids: x * (ids > 0).all(),
        lambda x, ids: x * (1 + x.shape[0] // 6),
    ],
    ids=["least", "all", "count"],
)
def test_the_self_check_pads_as_a_call_does(forward: Any) -> None:
    config = make_config(sizes=(1, 4, 8))
    example = {"x": rows(6), "ids": torch.full((6,), 3)}
    with pytest.raises(VerifyError, match="mixes rows or computes with their number"):
        pcgsvc.build_runner(forward, example, dynamic_dims={"x": 0, "ids": 0}, config=config)
