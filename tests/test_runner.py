"""The runner: every mode and size gives the model's results, whatever arguments and outputs are.

What surrounds a call: test_runner_surroundings.py; building, closing, reports: test_runner_life.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from core_helpers import WIDTH, attended, build, device_forward, make_config, plain, rows, toy
from torch import nn
from torch.utils import _pytree as pytree

import pcgsvc
from pcgsvc.config import Strategy
from pcgsvc.errors import (
    BatchError,
    ConfigError,
    PcgError,
    TraceError,
    UncoveredError,
)


class Named(NamedTuple):
    """A result with names."""

    y: torch.Tensor
    n: Any


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
        unused = {"hits": {}, "fallbacks": [], "padding_share": 0.0, "calls": [], "in_pieces": []}
        unused |= {"rows": 0, "padding_rows": 0}
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
    assert shared.plan(np.int64(5)) == shared.plan(5)
    assert shared.plan(9).mode.value == "none"
    assert shared.plan(9).descriptor.num_tokens == 9
    with pytest.raises(BatchError):
        shared.plan(5, [2, 2])
    with pytest.raises(BatchError, match=r"^num_tokens: got 0; at least 1 row"):
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
    [
        *(rows(3).double(), rows(3).to_sparse(), rows(3, 5), rows(3)[0], rows(3)[None], rows(0)),
        *(None, [1.0], "x"),
    ],
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


@pytest.mark.parametrize("strategy", [Strategy.FX, Strategy.BREAKABLE])
def test_a_result_that_is_returned_again_by_the_next_call_is_not_what_that_call_computes(
    strategy: Strategy,
) -> None:
    def forward(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a + b, a

    for outputs in ("view", "clone"):
        config = make_config("full", [2, 4], outputs=outputs)
        config.partition.strategy = strategy
        dims = {"a": 0, "b": 0}
        with pcgsvc.build_runner(forward, (rows(3),) * 2, dynamic_dims=dims, config=config) as fib:
            for count in (4, 3, 1):
                got = wanted = rows(count, seed=1), rows(count, seed=2)
                for _ in range(4):
                    got, wanted = fib(*got), forward(*wanted)
                    torch.testing.assert_close(got, wanted)
            prepared = fib.prepare(4)
            for name, seed in (("a", 1), ("b", 2)):
                prepared.inputs[name].copy_(rows(4, seed=seed))
            lent = prepared.step()[0]  # the graph's memory, whatever `outputs` says
            wanted = forward(lent.clone(), rows(4))
            torch.testing.assert_close(fib(lent, rows(4)), wanted)


@pytest.mark.parametrize("size", [4, 3, 20])
@pytest.mark.parametrize("strategy", [Strategy.FX, Strategy.BREAKABLE])
def test_a_view_of_an_input_is_no_memory_of_the_runner(strategy: Strategy, size: int) -> None:
    def forward(x: torch.Tensor) -> Any:
        return x.transpose(0, 1), x[:, 1:], x.detach(), x + 1

    config = make_config(sizes=[4], outputs="view")
    config.partition.strategy = strategy
    with pcgsvc.build_runner(forward, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        buffer = runner.memory.buffers["x"].untyped_storage().data_ptr()
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


NUMBERS = {
    "float": (lambda x: x.shape[0] * 0.5, "float"),
    "quotient": (lambda x: x.shape[0] / 3, "float"),
    "int": (lambda x: -x.shape[0], "int"),
    "shape": (lambda x: x.shape[0], "int"),
    "bool": (lambda x: bool(x.shape[0] % 4 == 3), "bool"),
    "item": (lambda x: x.sum().item(), "float"),
}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_the_forward_computes_is_refused_by_its_place(name: str, split: bool) -> None:
    number, kind = NUMBERS[name]
    nestings = (tuple, lambda pair: {"y": pair[0], "n": pair[1]}, lambda pair: Named(*pair))

    def forward(x: torch.Tensor, nesting: int = 0) -> Any:
        return nestings[nesting]((attended(x) if split else x * 2, number(x)))

    for nesting in range(3):
        example = {"x": rows(3), "nesting": nesting}
        with pytest.raises(TraceError, match=rf"result leaf 1: got {kind}.*pcgsvc\.true_rows"):
            build(forward, example, {"x": 0}, mode="piecewise")


@pytest.mark.parametrize("strategy", [Strategy.FX, Strategy.BREAKABLE])
def test_the_row_count_as_a_tensor_is_that_of_the_call(strategy: Strategy) -> None:
    """What the refusal of a number asks for."""
    config = make_config(sizes=[4])
    config.partition.strategy = strategy
    with pcgsvc.build_runner(
        lambda x: (x + 1, pcgsvc.true_rows(x).sum() * 0.5),
        rows(3),
        dynamic_dims={"x": 0},
        config=config,
    ) as runner:
        for count in (1, 3, 4):
            assert runner(rows(count))[1] == count * 0.5
