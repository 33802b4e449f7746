"""The runner: what callers may do to it, and what it promises them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended, build, make_config, rows, toy
from model_helpers import make_context
from torch import nn
from torch.utils import _pytree as pytree

import pcgsvc
from pcgsvc.config import Strategy
from pcgsvc.errors import (
    BatchError,
    ConfigError,
    PcgError,
    StaleAddressError,
    UncoveredError,
    VerifyError,
)
from pcgsvc.ops.context import use_context


def plain(module: Any, *args: Any) -> Any:
    with torch.no_grad(), use_context(make_context(None, [len(args[0])])):
        return module(*args)


def device_forward(x: torch.Tensor) -> torch.Tensor:
    """Hold a boundary that any graph may hold."""
    out = torch.empty_like(x)
    torch.ops.toy.device_only(x * 2, out)
    return out + x


@pytest.fixture(scope="module")
def shared() -> Iterator[pcgsvc.Runner]:
    """A runner that tests only call."""
    with build(toy(2), sizes=[4, 8]) as runner:
        yield runner


MODES = ["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]


# ---- modes and sizes -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODES)
def any_mode(request: pytest.FixtureRequest) -> Iterator[tuple[str, pcgsvc.Runner]]:
    with build(device_forward, mode=request.param, sizes=[1, 4, 8]) as runner:
        yield request.param, runner


@pytest.mark.parametrize("size", [1, 3, 4, 8, 9])
def test_every_mode_and_size_gives_what_the_model_gives(
    any_mode: tuple[str, pcgsvc.Runner], size: int
) -> None:
    mode, runner = any_mode
    x = rows(size, seed=size)
    lens = [[size], [1] * size, [1, size - 1] if size > 1 else [1]]
    for query_lens in lens:
        batch = pcgsvc.Batch(query_lens=query_lens)
        plan = runner.plan(size, query_lens)
        before = dict(runner.stats()["hits"])
        assert torch.equal(runner(x, batch=batch), plain(device_forward, x))
        hits = runner.stats()["hits"]
        (new,) = [k for k in hits if hits[k] != before.get(k, 0)] or ["none"]
        assert new.split(":")[0] == plan.mode.value
        uniform = set(query_lens) == {1}
        decode, mixed = {
            "none": ("none", "none"),
            "piecewise": ("piecewise", "piecewise"),
            "full": ("full", "full"),
            "full_decode_only": ("full", "none"),
            "full_and_piecewise": ("full", "piecewise"),
        }[mode]
        wanted = decode if uniform else mixed
        assert plan.mode.value == (wanted if size <= 8 else "none")


def test_stats_count_hits_fallbacks_and_padding_and_can_be_reset() -> None:
    with build(toy(1), sizes=[4, 8]) as runner:
        names = ["piecewise:8", "piecewise:4"]
        unused = {"hits": {}, "fallbacks": [], "padding_share": 0.0, "calls": []}
        assert runner.stats() == {**unused, "never_used": names}
        for size in (4, 3, 8, 20, 20):
            runner(rows(size))
        stats = runner.stats()
        assert stats["hits"] == {"piecewise:4": 2, "piecewise:8": 1}
        assert stats["fallbacks"] == [
            {"num_tokens": 20, "reason": "above the largest capture size", "count": 2}
        ]
        assert stats["padding_share"] == pytest.approx(1 / (4 + 4 + 8 + 40))
        assert stats["never_used"] == []
        runner.reset_stats()
        assert runner.stats() == {**unused, "never_used": names}


def test_stats_count_calls_by_true_rows_and_kind_also_after_close() -> None:
    with build(toy(1), sizes=[4]) as runner:
        for query_lens in ([3], [1, 1, 1], [2, 1], [1], [7]):
            x = rows(sum(query_lens))
            runner(x, batch=pcgsvc.Batch(query_lens=query_lens))
        with pytest.raises(BatchError):
            runner(rows(3), batch=pcgsvc.Batch(query_lens=[2]))
    assert runner.stats()["calls"] == [
        {"num_tokens": 1, "uniform": True, "count": 1},
        {"num_tokens": 3, "uniform": False, "count": 2},
        {"num_tokens": 3, "uniform": True, "count": 1},
        {"num_tokens": 7, "uniform": False, "count": 1},
    ]
    assert json.loads(json.dumps(runner.stats())) == runner.stats()


def test_a_plan_runs_nothing_and_says_why(shared: pcgsvc.Runner) -> None:
    before = shared.stats()
    assert shared.plan(5).descriptor.num_tokens == 8
    assert "3 padding rows" in shared.plan(5).reason
    assert shared.plan(9).mode.value == "none"
    assert shared.plan(9).descriptor.num_tokens == 9
    with pytest.raises(BatchError):
        shared.plan(5, [2, 2])
    with pytest.raises(BatchError):
        shared.plan(0)
    with pytest.raises(BatchError):
        shared.plan(3, [])
    assert shared.stats() == before


@pytest.mark.parametrize("how", ["on_uncovered", "strict"])
def test_an_uncovered_call_is_an_error_when_that_was_asked_for(how: str) -> None:
    setting: dict[str, Any] = {"strict": True} if how == "strict" else {"on_uncovered": "error"}
    with build(toy(1), sizes=[4], **setting) as runner:
        with pytest.raises(UncoveredError, match=r"Captured sizes: \[4\]"):
            runner(rows(5))
        assert runner.stats()["fallbacks"] == []
        assert runner(rows(4)).shape == (4, WIDTH)
    # What the mode does not mean to serve is not uncovered.
    with build(toy(1), sizes=[4], mode="none", **setting) as runner:
        assert runner(rows(5)).shape == (5, WIDTH)


def test_strict_refuses_a_mode_that_is_not_what_was_asked_for() -> None:
    with pytest.raises(ConfigError, match="strict=true"):
        build(toy(1), mode="full", strict=True)


# ---- arguments -----------------------------------------------------------------------------------


def test_a_fixed_input_may_come_before_the_one_with_rows() -> None:
    def forward(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return attended(x * scale)

    with build(forward, (torch.ones(WIDTH), rows(3))) as runner:
        scale = rows(1)[0]
        assert torch.equal(runner(scale, rows(5)), rows(5) * scale * 2)


class Options(nn.Module):
    def forward(
        self, x: torch.Tensor, scale: float = 2.0, *, flip: bool = False, extra: Any = None
    ) -> Any:
        y = attended(x * scale)
        return -y if flip else y


def test_arguments_may_be_named_and_constants_are_fixed() -> None:
    module = Options().eval()
    with build(module, {"x": rows(3), "scale": 3.0, "flip": True}) as runner:
        wanted = -rows(5) * 3.0 * 2
        for call in (
            {"x": rows(5)},
            {"x": rows(5), "scale": 3.0},
            {"x": rows(5), "flip": True, "scale": 3.0},
        ):
            assert torch.equal(runner(**call), wanted)
        assert torch.equal(runner(rows(5), flip=True), wanted)
        for bad in (
            {"x": rows(5), "scale": 4.0},
            {"x": rows(5), "flip": False},
            {"x": rows(5), "nonsense": 1},
            {"scale": 3.0},
            {},
        ):
            with pytest.raises(BatchError, match="scale"):
                runner(**bad)
        with pytest.raises(BatchError):
            runner(rows(5), x=rows(5))
        with pytest.raises(BatchError):
            runner(rows(5), rows(5))


def test_a_tensor_where_a_constant_was_fixed_is_refused() -> None:
    with build(Options().eval(), {"x": rows(3), "scale": 3.0}) as runner, pytest.raises(BatchError):
        runner(x=rows(5), scale=torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize(
    ("example", "dims", "words"),
    [
        ((rows(3), 2.0, 3.0), {"x": 0}, "do not fit the forward"),
        ({"nope": rows(3)}, {"nope": 0}, "do not fit the forward"),
        (rows(3), {"y": 0}, "dynamic_dims"),
        (rows(3), {"x": 2}, "2 dimensions"),
        ({"x": rows(3), "extra": [rows(3)]}, {"x": 0}, "inside containers"),
        ({"x": 3}, {"x": 0}, "dynamic_dims"),
    ],
)
def test_examples_that_do_not_fit_are_refused(example: Any, dims: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(Options().eval(), example, dims)


def test_a_training_module_and_star_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\(\)"):
        build(Options())
    with pytest.raises(ConfigError, match="by position or by star"):
        build(lambda *x: x[0])


@pytest.mark.parametrize(
    "x",
    [rows(3).double(), rows(3, 5), rows(3)[0], rows(3)[None], rows(0), None, [1.0], "x"],
    ids=str,
)
def test_an_input_that_does_not_fit_names_itself(shared: pcgsvc.Runner, x: Any) -> None:
    with pytest.raises(BatchError, match="x: got"):
        shared(x)


def test_inputs_of_other_row_counts_are_refused() -> None:
    with (
        build(lambda x, y: attended(x + y), (rows(3), rows(3)), {"x": 0, "y": 0}) as runner,
        pytest.raises(BatchError, match="y: got 4 rows, the inputs before it have 5"),
    ):
        runner(rows(5), rows(4))


def test_a_call_leaves_its_inputs_as_they_were_and_takes_any_layout(shared: pcgsvc.Runner) -> None:
    wide = torch.randn(WIDTH, 5)
    x, kept = wide.t(), wide.clone()
    torch.testing.assert_close(shared(x), plain(toy(2), x))
    assert torch.equal(wide, kept)


# ---- outputs -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    rest: Any


pytree.register_dataclass(Output)


def nested(x: torch.Tensor) -> Any:
    y = attended(x)
    return Output(y, {"twice": [y * 2, None], "same": y, "given": x, "word": "w", "sum": y.sum(-1)})


def test_outputs_keep_their_structure_captured_or_not() -> None:
    with build(nested) as runner:
        for size in (5, 20):
            x = rows(size)
            got, wanted = runner(x), plain(nested, x)
            leaves, tree = pytree.tree_flatten(got)
            want, want_tree = pytree.tree_flatten(wanted)
            assert tree == want_tree
            for a, b in zip(leaves, want, strict=True):
                assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize("forward", [lambda x: x, lambda x: None, lambda x: (x, x.view(-1, 2, 2))])
def test_a_model_without_a_kernel_works(forward: Any) -> None:
    with build(forward) as runner:
        got, wanted = pytree.tree_leaves(runner(rows(5))), pytree.tree_leaves(forward(rows(5)))
        assert all(a is b or torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("size", [4, 3, 20])
def test_a_cloned_result_is_the_caller_s_own(shared: pcgsvc.Runner, size: int) -> None:
    """A9."""
    first = shared(rows(size, seed=1))
    kept = first.clone()
    shared(rows(size, seed=2))
    assert torch.equal(first, kept)
    first.fill_(7)
    torch.testing.assert_close(shared(rows(size, seed=1)), kept)


def test_a_viewed_result_is_overwritten_by_the_next_call_and_not_before() -> None:
    with build(toy(1), sizes=[4], outputs="view") as runner:
        first = runner(rows(3, seed=1))
        kept = first.clone()
        torch.testing.assert_close(first, plain(toy(1), rows(3, seed=1)))
        second = runner(rows(3, seed=2))
        assert first.data_ptr() == second.data_ptr()
        assert not torch.equal(first, kept)


@pytest.mark.parametrize("size", [4, 3, 20])
@pytest.mark.parametrize("strategy", [Strategy.FX, Strategy.BREAKABLE])
def test_a_view_of_an_input_is_no_memory_of_the_runner(strategy: Strategy, size: int) -> None:
    def forward(x: torch.Tensor) -> Any:
        return x.transpose(0, 1), x[:, 1:], x.detach(), x + 1

    config = make_config(sizes=[4], outputs="view")
    config.partition.strategy = strategy
    with pcgsvc.build_runner(forward, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        buffer = runner.parts.workspace.buffers["x"].untyped_storage().data_ptr()
        *views, _ = results = runner(rows(size, seed=1))
        wanted = forward(rows(size, seed=1))
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
        assert buffer not in [v.untyped_storage().data_ptr() for v in views]
        again = runner(views[2])[0]  # as input of the next call
        runner(rows(size, seed=2))
        assert all(torch.equal(a, b) for a, b in zip(views, wanted[:-1], strict=True))
        assert torch.equal(again, wanted[0])


def test_a_result_of_other_than_one_row_per_row_is_refused() -> None:
    with pytest.raises(PcgError, match="padding rows cannot be cut off"):
        build(lambda x: x.view(-1, 2))


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


@pytest.mark.parametrize(
    "around",
    ["autocast", "inference"],
)
def test_a_runner_built_under_a_mode_is_as_any_other(around: str) -> None:
    manager: Any = torch.inference_mode() if around == "inference" else torch.autocast("cpu")
    module = toy(1)
    with manager:
        runner = build(module)
    with runner:
        for size in (5, 20):
            got = runner(rows(size))
            assert got.dtype is torch.float32
            torch.testing.assert_close(got, plain(module, rows(size)))


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


# ---- life ----------------------------------------------------------------------------------------


def test_a_closed_runner_says_so_and_closing_twice_is_fine() -> None:
    runner = build(toy(1), sizes=[4])
    with runner as same:
        assert same is runner
    runner.close()
    runner.close()
    for use in (lambda: runner(rows(3)), lambda: runner.plan(3), lambda: runner.parts):
        with pytest.raises(PcgError, match="closed"):
            use()
    assert runner.stats()["hits"] == {}
    assert runner.report["graphs"]["num_graphs"] == 2


def test_closing_frees_buffers_and_program_though_the_runner_is_kept() -> None:
    """M4."""
    runner = build(toy(1), sizes=[4])
    runner(rows(3))
    parts = runner.parts
    entry = next(iter(parts.table.entries.values()))
    dead = [
        weakref.ref(o)
        for o in (
            parts,
            parts.workspace.buffers["x"],
            parts.workspace,
            parts.program,
            entry,
            entry.outputs[0],
        )
    ]
    del parts, entry
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
            torch.get_default_dtype(),
        )

    module = toy(1)  # torch's own initialisation draws random numbers
    before = state()
    build(module, sizes=[4]).close()
    assert state() == before


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
            for key, entry in runner.parts.table.entries.items()
        }
        assert len(set(addresses.values())) == 3
        runner(rows(8))
        assert {
            key[1].num_tokens: entry.outputs[0].data_ptr()
            for key, entry in runner.parts.table.entries.items()
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
            assert all(view.is_contiguous() for view in runner.parts.workspace.views(2).values())


def test_profiler_ranges_carry_the_pieces_names() -> None:
    config = make_config(sizes=[4])
    config.debug.profile_ranges = True
    with pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        with torch.profiler.profile() as profile:
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
