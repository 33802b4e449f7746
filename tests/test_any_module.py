"""`build_runner` for any module: its arguments, its results, its rows, its state."""

from __future__ import annotations

import collections
import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from core_helpers import WIDTH, attended, build, make_config, rows
from model_helpers import make_context
from torch import nn
from warm_helpers import Sources

import pcgsvc
from pcgsvc.errors import (
    BatchError,
    ConfigError,
    PcgError,
    StaleAddressError,
    TraceError,
    VerifyError,
)
from pcgsvc.forward.results import flatten
from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.ops.context import use_context


def plain(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    count = next(len(a) for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor))
    with torch.no_grad(), use_context(make_context(None, [count])):
        return module(*args, **kwargs)


def same(got: Any, wanted: Any) -> bool:
    """Whether two results are of one nesting with equal leaves."""
    leaves, tree = flatten(got)
    others, other_tree = flatten(wanted)
    return tree == other_tree and all(
        torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )


# ---- arguments -----------------------------------------------------------------------------------


class Many(nn.Module):
    """Inputs with rows, without, optional, by keyword; constants of several kinds."""

    def forward(
        self,
        x: torch.Tensor,
        scale: float,
        shift: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        names: tuple[str, ...] = ("relu",),
        options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        y = attended(x * scale) + shift
        if mask is not None:
            y = y.masked_fill(mask[:, None], 0)
        if bias is not None:
            y = y + bias
        for name in names:
            y = getattr(torch, name)(y)
        return y * (options or {}).get("gain", 1.0)


EXAMPLES: dict[str, dict[str, Any]] = {
    "least": {"x": rows(3), "scale": 2.0, "shift": rows(3)},
    "optional": {
        "x": rows(3),
        "scale": 2.0,
        "shift": rows(3),
        "mask": torch.tensor([True, False, True]),
    },
    "keyword": {"x": rows(3), "scale": 2.0, "shift": rows(3), "bias": torch.ones(WIDTH)},
    "constants": {
        "x": rows(3),
        "scale": 0.5,
        "shift": rows(3),
        "names": ("tanh", "relu"),
        "options": {"gain": 3.0},
    },
}
DIMS = {"x": 0, "shift": 0, "mask": 0}


@pytest.mark.parametrize("case", EXAMPLES)
def test_arguments_of_every_kind(case: str) -> None:
    example, module = EXAMPLES[case], Many().eval()
    dims = {k: v for k, v in DIMS.items() if k in example}
    with build(module, example, dims, sizes=[2, 4]) as runner:
        for count in (1, 3, 4, 7):
            call = {
                k: rows(count, seed=count) if k in ("x", "shift") else v for k, v in example.items()
            }
            if "mask" in call:
                call["mask"] = torch.arange(count) % 2 == 0
            wanted = plain(module, **call)
            assert torch.equal(runner(**call), wanted)
            tensors = {k: v for k, v in call.items() if isinstance(v, torch.Tensor)}
            assert torch.equal(runner(**tensors), wanted)
            # As the forward is called, and as its inputs alone.
            first = [call["x"], call["scale"], call["shift"], call.get("mask")]
            rest = {k: v for k, v in call.items() if k in ("bias", "names", "options")}
            assert torch.equal(runner(*first, **rest), wanted)
            if list(tensors) == ["x", "shift", "bias"]:  # the module would take bias for mask
                with pytest.raises(BatchError, match="the forward has mask, which was None"):
                    runner(*tensors.values())
            else:
                assert torch.equal(runner(*tensors.values()), wanted)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another value": ({"scale": 4.0}, r"^scale: got 4\.0, but .* built with 2\.0"),
    "another type": ({"scale": 2}, r"^scale: got 2, but"),
    "a tensor for a value": ({"scale": torch.tensor(2.0)}, r"^scale: got a tensor of shape \[\]"),
    "a tensor for None": (
        {"mask": torch.ones(3).bool()},
        r"^mask: got a tensor of shape \[3\], but .* None",
    ),
    "another default": ({"names": ("tanh",)}, r"^names: got \('tanh',\), but"),
    "a list for a tuple": ({"names": ["relu"]}, r"^names: got \['relu'\], but"),
    "unknown": ({"sclae": 2.0}, r"^sclae: the forward has no such argument; .*'x', 'shift'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_was_fixed_is_compared_and_refused_by_name(case: str) -> None:
    more, words = REFUSED[case]
    with build(Many().eval(), EXAMPLES["least"], {"x": 0, "shift": 0}, sizes=[4]) as runner:
        call = {"x": rows(3), "shift": rows(3)}
        with pytest.raises(BatchError, match=words):
            runner(**call, **more)
        with pytest.raises(BatchError, match=r"\['shift'\] are missing"):
            runner(rows(3))
        with pytest.raises(BatchError, match="x: given by position and by name"):
            runner(rows(3), x=rows(3))
        with pytest.raises(BatchError, match="got 5 by position"):
            runner(rows(3), 2.0, rows(3), None, 1)
        assert runner(**call, names=("relu",), options=None, bias=None).shape == (3, WIDTH)


@dataclasses.dataclass
class Settings:
    scale: float
    inner: dict[str, list[float]]


class Scaled:
    scale = 2.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "list": lambda v: v.__setitem__(1, 3.0),
    "dict": lambda v: v.update(scale=3.0),
    "dataclass": lambda v: v.inner["a"].append(2.0),
    "namespace": lambda v: setattr(v, "scale", 3.0),
    "class": lambda v: setattr(type(v), "scale", 3.0),
    "set": lambda v: v.add(3.0),
    "deque": lambda v: v.append(3.0),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_constant_that_the_caller_changes_in_place_is_noticed(kind: str) -> None:
    values: dict[str, Any] = {
        "list": [2.0, 1.0],
        "dict": {"scale": 2.0},
        "dataclass": Settings(2.0, {"a": [1.0]}),
        "namespace": types.SimpleNamespace(scale=2.0),
        "class": Scaled(),
        "set": {1.0, 2.0},
        "deque": collections.deque([2.0, 1.0], maxlen=3),
    }
    value = values[kind]

    def forward(x: torch.Tensor, settings: Any) -> torch.Tensor:
        if isinstance(settings, (set, collections.deque)):
            return attended(x * len(settings))
        if isinstance(settings, list):
            return attended(x * settings[0])
        return attended(x * (settings["scale"] if isinstance(settings, dict) else settings.scale))

    with build(forward, {"x": rows(3), "settings": value}, sizes=[4]) as runner:
        wanted = rows(3) * 4
        assert torch.equal(runner(rows(3), value), wanted)
        CHANGES[kind](value)
        with pytest.raises(BatchError, match="settings: got"):
            runner(rows(3), value)
        assert torch.equal(runner(rows(3)), wanted)


NEW: dict[str, Callable[[float], Any]] = {
    "mapping proxy": lambda value: types.MappingProxyType({"scale": value}),
    "array": lambda value: np.full(int(value), 2.0),
}


@pytest.mark.parametrize("kind", NEW)
def test_a_constant_that_is_equal_and_new_is_taken_and_another_is_refused(kind: str) -> None:
    def forward(x: torch.Tensor, settings: Any) -> torch.Tensor:
        by = settings.shape[0] if isinstance(settings, np.ndarray) else settings["scale"]
        return attended(x * by)

    with build(forward, {"x": rows(3), "settings": NEW[kind](2.0)}, {"x": 0}, sizes=[4]) as runner:
        assert torch.equal(runner(rows(3), NEW[kind](2.0)), rows(3) * 4)
        with pytest.raises(BatchError, match="settings: got"):
            runner(rows(3), NEW[kind](3.0))


@pytest.mark.parametrize("way", ["closure", "attribute"])
def test_a_tensor_of_another_module_may_be_written_and_not_be_replaced(
    sources: Sources, way: str
) -> None:
    text = "import torch\nscale = torch.ones(4)\ndef scaled(x): return x * scale"
    other = sources.load("pcgtest_other", text)
    holder = types.SimpleNamespace(other=other)
    forwards = {
        "closure": lambda x: attended(other.scaled(x)),
        "attribute": lambda x: attended(holder.other.scaled(x)),
    }
    with build(forwards[way], sizes=[4]) as runner:
        other.scale.mul_(2)
        assert torch.equal(runner(rows(3)), rows(3) * 4)
        other.scale = torch.full((WIDTH,), 7.0)
        with pytest.raises(StaleAddressError, match=r"other\.scale: its memory was replaced"):
            runner(rows(3))


@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_a_returned_parameter_is_refused_by_its_name(mode: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return attended(x) * self.scale, self.scale

    with pytest.raises(TraceError, match=r"result leaf 1: .*own 'scale'.*\.clone\(\)"):
        build(Tied().eval(), mode=mode)


def test_a_fixed_nan_may_be_passed_again() -> None:
    example = {"x": rows(3), "fill": float("nan")}
    with build(
        lambda x, fill: attended(x.nan_to_num(fill)), example, {"x": 0}, sizes=[4]
    ) as runner:
        assert torch.equal(runner(rows(3), float("nan")), rows(3) * 2)
        with pytest.raises(BatchError, match=r"fill: got 0\.0"):
            runner(rows(3), 0.0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_fixed_zero_keeps_its_sign(sign: int) -> None:
    zero = math.copysign(0.0, sign)
    example = {"x": rows(3), "by": zero}
    with build(lambda x, by: torch.copysign(attended(x), by), example, {"x": 0}) as runner:
        assert torch.equal(runner(rows(3), zero), torch.copysign(rows(3) * 2, zero))
        with pytest.raises(BatchError, match=r"by: got -?0\.0, but"):
            runner(rows(3), -zero)


EXAMPLE_FAULTS: dict[str, tuple[Any, Any, str]] = {
    "sizes differ": (
        {"x": rows(3), "y": rows(5)},
        {"x": 0, "y": 0},
        r"dimension 0 of 'x' is 3, dimension 0 of 'y' is 5(.|\n)*[Ii]ndependent",
    ),
    "sizes differ within": (
        {"x": rows(3), "y": rows(3)},
        {"x": [0, 1], "y": 0},
        r"dimension 1 of 'x' is 4",
    ),
    "named dims": ({"x": rows(3), "y": rows(3)}, {"x": {0: "batch"}}, "independent ones are not"),
    "a word": ({"x": rows(3), "y": rows(3)}, {"x": "batch"}, "index of a dimension"),
    "twice": ({"x": rows(3), "y": rows(3)}, {"x": [0, -2]}, "stands twice"),
    "sparse": ({"x": rows(3).to_sparse(), "y": rows(3)}, {"x": 0}, "'x' is torch.sparse_coo"),
    "meta": ({"x": rows(3).to("meta"), "y": rows(3)}, {"y": 0}, "'x' is on the meta device"),
    "nested": ({"x": rows(3), "y": [rows(3)]}, {"x": 0}, "'y' holds tensors inside containers"),
    "empty": ({"x": rows(3), "y": torch.zeros(0, dtype=torch.long)}, {"x": 0, "y": 0}, "is 0"),
}


@pytest.mark.parametrize("case", EXAMPLE_FAULTS)
def test_examples_that_no_runner_could_serve_are_refused_by_name(case: str) -> None:
    example, dims, words = EXAMPLE_FAULTS[case]
    with pytest.raises(ConfigError, match=words):
        build(lambda x, y: attended(x + y), example, dims)


@pytest.mark.parametrize("value", [rows(3), 2])
def test_an_argument_named_like_the_runner_s_own_is_refused(value: Any) -> None:
    example = {"x": rows(3), "batch": value}
    with pytest.raises(ConfigError, match="'batch' is the runner's own argument"):
        build(lambda x, batch: attended(x * batch), example, {"x": 0})
    with build(lambda x, batch=None: attended(x), rows(3), {"x": 0}, sizes=[4]) as runner:
        assert torch.equal(runner(rows(3)), rows(3) * 2)


def test_a_submodule_in_training_mode_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Dropout(0.5))).eval()
    module[1].train()
    with pytest.raises(ConfigError, match=r"'1', '1\.0' in it are in training mode.*\.eval\(\)"):
        build(module, rows(3), {"input": 0})


class Subclass(torch.Tensor):
    pass


def test_tensor_subclasses_and_state_elsewhere_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'x' is a Subclass"):
        build(lambda x: x * 2, rows(3).as_subclass(Subclass))
    with pytest.raises(
        ConfigError, match=r"'weight' is on meta, the inputs are on cpu(.|\n)*\.to\("
    ):
        build(nn.Linear(WIDTH, WIDTH, device="meta").eval(), dims={"input": 0})
    with pytest.raises(ConfigError, match="'weight' has no shape yet"):
        build(nn.Sequential(nn.LazyLinear(3)).eval()[0], {"input": rows(3)}, {"input": 0})


def test_results_that_no_runner_returns_are_refused_by_their_kind() -> None:
    for dims in (None, {"x": 0}):
        with pytest.raises(TraceError, match=r"leaf 0: got a torch.sparse_coo tensor.*to_dense"):
            pcgsvc.build_runner(lambda x: x.to_sparse(), (rows(3),), dynamic_dims=dims)
    with pytest.raises(TraceError, match=r"leaf 1: got a Subclass, .*breakable"):
        build(lambda x: (x + 1, (x * 2).as_subclass(Subclass)), rows(3))


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_an_operator_with_bodies_is_refused_by_its_name(strategy: str) -> None:
    def forward(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(TraceError, match=r"torch\.cond at .*compute both branches"):
        pcgsvc.compile(
            forward, (rows(3),), mode="full", cache="off", partition={"strategy": strategy}
        )


def test_a_function_that_dynamo_does_not_look_into_is_refused_with_its_line() -> None:
    @torch._dynamo.nonstrict_trace
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(TraceError, match=r"test_any_module\.py:\d+ in "):
        build(lambda x: helper(x) + 1)


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_inference_mode_inside_of_a_forward_is_refused_by_its_name(strategy: str) -> None:
    def forward(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            return x * 2

    with pytest.raises(PcgError, match=r"(?s)torch\.inference_mode.*eave it out"):
        pcgsvc.compile(
            forward, (rows(3),), mode="full", cache="off", partition={"strategy": strategy}
        )


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_a_function_that_is_compiled_whole_is_so_after_the_build(strategy: str) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    settings: dict[str, Any] = {"mode": "full", "sizes": [2, 4], "cache": "off"}
    partition = {"strategy": strategy}
    with pcgsvc.compile(
        lambda x: helper(x * 2), (rows(3),), partition=partition, **settings
    ) as run:
        torch.testing.assert_close(run(rows(3)), (rows(3) * 2).sin() + 1)
    assert torch.equal(helper(rows(5)), rows(5).sin() + 1)  # not given up by torch


def test_made_inputs_are_used_and_compared_with_the_examples() -> None:
    def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return attended(x.index_select(0, index))

    def make(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made.append(count)
        return {"x": torch.rand(count, WIDTH, generator=generator), "index": torch.arange(count)}

    made: list[int] = []
    example = {"x": rows(3), "index": torch.arange(3)}
    config, dims = make_config(sizes=[2, 4]), {"x": 0, "index": 0}
    with pcgsvc.build_runner(
        pick, example, dynamic_dims=dims, config=config, make_inputs=make
    ) as runner:
        assert {2, 4} <= set(made)
        assert torch.equal(runner(rows(3), torch.arange(3)), rows(3) * 2)
    for wrong, words in (
        (lambda n: {"x": rows(n)}, "'index' is None"),
        (lambda n: {"x": rows(9), "index": torch.arange(n)}, r"'x' for \d rows is torch.float32"),
        (lambda n: [1], "a dict of tensors"),
    ):
        with pytest.raises(ConfigError, match=words):
            pcgsvc.build_runner(
                pick,
                example,
                dynamic_dims=dims,
                config=config,
                make_inputs=lambda count, generator, wrong=wrong: wrong(count),
            )


# ---- rows ----------------------------------------------------------------------------------------


def test_rows_in_several_dimensions_of_several_inputs() -> None:
    def forward(x: torch.Tensor, pairs: torch.Tensor, y: torch.Tensor) -> Any:
        h = attended(x + 1)
        return {"square": pairs * 2 + 1, "rows": h, "columns": y - 1}

    example = {"x": rows(3), "pairs": torch.ones(3, 2, 3), "y": torch.ones(2, 3)}
    dims = {"x": 0, "pairs": (0, 2), "y": 1}
    with build(forward, example, dims, sizes=[2, 4, 8]) as runner:
        for count in (1, 2, 3, 5, 8, 11):
            x, y = rows(count), rows(2, count)
            pairs = torch.randn(count, 2, count)
            assert same(runner(x, pairs, y), plain(forward, x, pairs, y))
        with pytest.raises(BatchError, match=r"pairs: got shape \(3, 2, 4\), \[rows, 2, rows\]"):
            runner(rows(3), torch.ones(3, 2, 4), torch.ones(2, 3))
        with pytest.raises(BatchError, match="y: got 4 rows, the inputs before it have 3"):
            runner(rows(3), torch.ones(3, 2, 3), torch.ones(2, 4))


def test_columns_of_padding_that_reach_true_rows_are_found_out() -> None:
    with pytest.raises(VerifyError, match="mixes rows"):
        build(lambda x, a: a @ x, {"x": rows(3), "a": torch.ones(3, 3)}, {"x": 0, "a": (0, 1)})


def test_a_square_input_is_right_where_padding_is_masked() -> None:
    def forward(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        true = pcgsvc.true_rows(x)
        return torch.where(true, a, 0) @ torch.where(true[:, None], x, 0)

    dims = {"x": 0, "a": (0, 1)}
    with build(forward, {"x": rows(3), "a": torch.ones(3, 3)}, dims, sizes=[4, 8]) as runner:
        for count in (2, 3, 7):
            x, a = rows(count), torch.randn(count, count)
            torch.testing.assert_close(runner(x, a), a @ x)


# ---- results -------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    rest: Any


@dataclasses.dataclass
class Plain:
    logits: torch.Tensor
    hidden: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    logits: torch.Tensor
    word: str = "w"
    flag: bool = True


MADE: list[int] = []


@dataclasses.dataclass
class Counted:
    logits: torch.Tensor
    total: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.logits.sum(-1)


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda y: {"b": y, "a": {"c": y.sum(-1)}},
    "ordered": lambda y: collections.OrderedDict(z=y, a=[y * 2]),
    "defaultdict": lambda y: collections.defaultdict(list, {"z": [y]}),
    "tuple": lambda y: (y, (y * 2, None), [y * 3, "word"]),
    "named tuple": lambda y: Pair(y, {"k": Pair(y * 2, True)}),
    "dataclass": lambda y: Plain(y, [Plain(y * 2), None]),
    "frozen dataclass": lambda y: (Frozen(y), Frozen(y * 2, "other", False)),
    "computed field": lambda y: Counted(y),
    "return type": lambda y: y.max(-1),
    "records in containers": lambda y: {"a": [Pair(y, Plain(y, Frozen(y * 2)))]},
    "one twice": lambda y: Plain(y, y),
    "nothing": lambda y: {},
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_nesting_of_results_comes_back_captured_or_not_cold_or_warm(
    name: str, tmp_path: Any
) -> None:
    make = RESULTS[name]

    def forward(x: torch.Tensor) -> Any:
        return make(attended(x))

    for mode in ("piecewise", "none"):
        with build(forward, mode=mode, sizes=[4]) as runner:
            for count in (3, 6):
                got = runner(rows(count))
                assert same(got, plain(forward, rows(count)))
                assert type(got) is type(make(rows(count)))


def hold_named_tuple(x: torch.Tensor) -> Any:
    return Pair(x * 2, Plain(x + 1, Frozen(x)))


def test_records_are_stored_by_name_and_found_again(tmp_path: Any) -> None:
    config = make_config(sizes=(1, 2))
    config.cache = pcgsvc.load_config(["cache.mode=readwrite", f"cache.dir={tmp_path}/cache"]).cache
    for wanted in ("cold", "warm"):
        with pcgsvc.build_runner(
            hold_named_tuple, rows(2), dynamic_dims={"x": 0}, config=config
        ) as runner:
            assert runner.report["compile"]["start"] == wanted, runner.report["cache"][
                "miss_reasons"
            ]
            assert same(runner(rows(2)), hold_named_tuple(rows(2)))


def test_a_stored_class_that_is_not_imported_or_has_other_fields_is_a_miss(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pcgsvc.errors import CompileError
    from pcgsvc.forward.results import from_text

    _, tree = flatten(Pair(rows(2), Plain(rows(2))))
    text = tree.to_text()
    assert text is not None
    assert from_text(text) == tree
    for before, after, words in (
        (__name__, "no_such_module_anywhere", "not imported"),
        ('"Pair"', '"Nowhere"', "not imported"),
        ('["first", "rest"]', '["first"]', "other fields"),
        ('"Pair"', '"Settings"', "other fields"),
        ('"records"', '"recrods"', "KeyError"),
    ):
        with pytest.raises(CompileError, match=words):
            from_text(text.replace(before, after))


# ---- state ---------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """State of several kinds: a counter, a running sum of true rows, a last value."""

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.masked = masked
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("history", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = attended(x) + 1
        seen = torch.where(pcgsvc.true_rows(y)[:, None], y, 0) if self.masked else y
        self.calls += 1
        self.history[0] = self.total
        self.total.add_(seen.sum(0))
        return y * 2


@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_state_is_right_after_padded_calls_and_untouched_by_building(mode: str) -> None:
    module, twin = Keeps().eval(), Keeps().eval()
    with build(module, mode=mode, sizes=[4, 8]) as runner:
        assert runner.model.mutated == ("calls", "history", "total")
        for name, buffer in module.named_buffers():
            assert not buffer.any(), name
        for count in (3, 1, 8, 5, 20):
            x = rows(count, seed=count)
            torch.testing.assert_close(runner(x), plain(twin, x))
            for (name, buffer), (_, wanted) in zip(
                module.named_buffers(), twin.named_buffers(), strict=True
            ):
                torch.testing.assert_close(buffer, wanted, msg=name)


def test_padding_rows_that_reach_state_are_found_out_though_the_results_are_right() -> None:
    module = Keeps(masked=False).eval()
    with pytest.raises(VerifyError, match=r"padding rows reach .*'total'(.|\n)*true_rows"):
        build(module, sizes=[4, 8])
    assert not module.total.any()


def test_state_that_is_masked_by_a_product_is_told_how_to_mask() -> None:
    class Product(Keeps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_((x * pcgsvc.true_rows(x)[:, None]).sum(0))
            return x + self.total

    with pytest.raises(VerifyError, match="not by a product: NaN times 0 is NaN") as caught:
        build(Product().eval(), sizes=[4])
    assert "true rows NaN or infinite" in str(caught.value)
    assert "1e+30" not in str(caught.value)


def test_true_rows_is_all_true_outside_a_runner_and_a_mask_inside_graphs() -> None:
    assert pcgsvc.true_rows(rows(3)).tolist() == [True] * 3

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + pcgsvc.true_rows(x)[:, None].sum()

    for mode in ("full", "none"):
        with build(forward, mode=mode, sizes=[4], self_check=False) as runner:
            assert torch.equal(runner(rows(3)), rows(3) + 3)
            assert torch.equal(runner(rows(9)), rows(9) + 9)


# ---- attention of one's own model ----------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(-1, 2, 4) for t in self.qkv(x).chunk(3, -1))
        out = torch.empty_like(q)
        torch.ops.pcgsvc.attention(q, k, v, out, 0)
        return x + out.flatten(1)


SPEC = AttentionSpec(
    num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, scale=0.5, max_position=32
)


def test_a_model_of_one_s_own_may_use_the_paged_attention() -> None:
    torch.manual_seed(0)
    module = Attends().eval()
    x = torch.randn(6, 8)
    results = []
    for name in ("paged", "varlen"):
        config = make_config("full_and_piecewise", [2, 4, 8])
        config.attention.name = name
        with pcgsvc.build_runner(
            module, x, dynamic_dims={"x": 0}, config=config, attention=SPEC
        ) as runner:
            results.append(runner(x, batch=pcgsvc.Batch(query_lens=[4, 2])))
            assert runner.report["kv_cache"]["max_model_len"] == 32
    torch.testing.assert_close(*results)
    with torch.no_grad():
        q, k, v = (t.view(6, 2, 4).transpose(0, 1) for t in module.qkv(x).chunk(3, -1))
        wanted = [
            torch.nn.functional.scaled_dot_product_attention(
                q[:, at], k[:, at], v[:, at], is_causal=True, scale=0.5
            )
            for at in (slice(0, 4), slice(4, 6))
        ]
        torch.testing.assert_close(results[0], x + torch.cat(wanted, 1).transpose(0, 1).flatten(1))


def test_attention_without_its_spec_says_how_to_give_one() -> None:
    with pytest.raises(pcgsvc.PcgError, match="attention="):
        pcgsvc.build_runner(
            Attends().eval(), torch.randn(3, 8), dynamic_dims={"x": 0}, config=make_config()
        )
