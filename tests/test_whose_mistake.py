"""Whose mistake it is: a model that fails, a sample that it refuses, what no graph can hold."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, rows
from torch import nn
from torch.nn.utils import parametrizations, prune

import pcgsvc
from pcgsvc.forward.arguments import input_specs, resampler
from pcgsvc.models.described import read_inputs
from pcgsvc.ops.attention import AttentionSpec

QUICK: dict[str, Any] = {"cache": "off", "sizes": [1, 4]}


def compiled(model: Callable[..., Any], example: Any, **settings: Any) -> pcgsvc.Runner:
    return pcgsvc.compile(model, example, **{**QUICK, **settings})


# ---- what no graph can hold ----------------------------------------------------------------------


def item(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * x.sum().item())


def branch(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x if x.sum() > 0 else -x)


def item_branch(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x if x.sum().item() > 0 else -x)


def prints(x: torch.Tensor, out: torch.Tensor) -> None:
    print("stepped", x.shape[1])  # noqa: T201 - the claim
    out.copy_(x)


def sizes(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * x[x[:, 0] > 0].sum())


@pcgsvc.splitting_op("whose_mistake::whole", mutates_args=("out",))
def whole(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * x.sum().item())


@pcgsvc.splitting_op("whose_mistake::doubled", mutates_args=("out",))
def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


STEPS: dict[str, tuple[Callable[..., None], str]] = {
    "item": (item, "the forward waits for a device value at"),
    "branch": (branch, "cannot be traced whole, because of"),
    "item_branch": (item_branch, "it branches on a value of the device"),
    "print": (prints, "it prints. Remove the print"),
    "size": (sizes, "a size depends on data"),
}


def line_in(step: Callable[..., Any]) -> str:
    return f"test_whose_mistake.py:{step.__code__.co_firstlineno + 1} in {step.__name__}"


def without_padding(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that leaves padding rows out, as the message asks."""

    def body(x: torch.Tensor, out: torch.Tensor) -> None:
        true = pcgsvc.true_rows(x)
        result = torch.empty_like(x[true])
        step(x[true], result)
        out.zero_()[true] = result

    return body


class Stepping(nn.Module):
    """linear - step - linear."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        out = torch.empty_like(y)
        self.step(y, out)
        return self.two(out)


def refusal(step: Callable[..., Any], **settings: Any) -> str:
    with pytest.raises((pcgsvc.TraceError, pcgsvc.CaptureError)) as caught:
        compiled(Stepping(step).eval(), (rows(3),), **settings)
    return str(caught.value)


def follows(message: str, line: str, step: Callable[..., Any]) -> Any:
    """Return what the advice of a message defines, with the step as its body."""
    (code,) = re.findall(rf"    (@pcgsvc\.{line}.*)\n    (def step.*)", message)
    space: dict[str, Any] = {"pcgsvc": pcgsvc, "torch": torch, "body": step, "__name__": "advice"}
    exec("\n".join(code).replace("...", "body(x, out)"), space)
    return space["step"]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("way", ["splitting_op", "eager_break"])
def test_each_way_out_that_is_printed_works(name: str, way: str) -> None:
    step, words = STEPS[name]
    message = refusal(step)
    assert words in message
    assert line_in(step) in message.split("Ways out")[0]
    assert "TORCHDYNAMO" not in message  # torch's advice for its own symbols
    advised = follows(message, way, without_padding(step))
    called, settings = advised, {"partition": {"strategy": "breakable"}}
    if way == "splitting_op":
        assert "torch.ops.mine.step(x, out)" in message
        called, settings = torch.ops.mine.step, {}
    model = Stepping(called).eval()
    plain = Stepping(step).eval()
    plain.load_state_dict(model.state_dict())
    with compiled(model, (rows(3),), **settings) as runner:
        for count in (1, 2, 4):
            x = rows(count, seed=count) - 1
            torch.testing.assert_close(runner(x), plain(x).detach())
        assert runner.stats()["fallbacks"] == []


def test_a_function_marked_for_another_strategy_is_told_which() -> None:
    message = refusal(pcgsvc.eager_break(branch))
    assert "eager_break, which is for partition.strategy=breakable" in message
    assert "ContextVar" not in message


def test_a_splitting_op_that_is_called_by_its_function_is_cut_at_as_well() -> None:
    with compiled(Stepping(doubled).eval(), (rows(3),)) as runner:
        assert [o["name"] for o in runner.report["partition"]["splitting_ops"]] == [
            "whose_mistake::doubled"
        ]
    x, out = rows(3), torch.empty(3, WIDTH)
    doubled(x, out)
    torch.testing.assert_close(out, x * 2)


def test_an_op_that_reads_padding_rows_is_told_to_leave_them_out() -> None:
    with pytest.raises(pcgsvc.VerifyError, match=r"reads padding rows as well.*true_rows"):
        compiled(Stepping(whole).eval(), (rows(3),))


def test_the_host_s_wait_is_told_once_with_its_line_before_anything_is_captured(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any) -> Any:
        raise AssertionError("something was compiled")

    monkeypatch.setattr("pcgsvc.build.make.compile_pieces", none)
    for strategy in ("fx", "breakable"):
        with caplog.at_level(logging.WARNING):
            message = refusal(item, partition={"strategy": strategy})
        assert message.count(line_in(item)) == 1
        assert "per size" not in caplog.text
        assert "skipped" not in caplog.text


def test_a_forward_that_waits_runs_where_nothing_is_captured() -> None:
    model = Stepping(item).eval()
    with compiled(model, (rows(3),), mode="none", sizes=None) as runner:
        torch.testing.assert_close(runner(rows(2)), model(rows(2)).detach())


def test_the_advice_of_torch_compile_is_left_out() -> None:
    assert "Hint" not in refusal(branch)
    assert "torch._dynamo" not in refusal(prints)


REPARAMETRIZED: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "weight_norm": lambda layer: torch.nn.utils.weight_norm(layer),
    "spectral_norm": lambda layer: torch.nn.utils.spectral_norm(layer),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("strategy", ["fx", "breakable"])
@pytest.mark.parametrize("name", REPARAMETRIZED)
def test_a_weight_that_a_hook_of_torch_s_sets_is_fixed_as_the_refusal_says(
    name: str, strategy: str
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).eval()
    settings = {"mode": "full", "partition": {"strategy": strategy}}
    for layer in (model[0], model[2]):
        REPARAMETRIZED[name](layer)
    wanted = model(rows(3)).detach()
    for left in (" (and so for 1 more)", ""):
        with pytest.raises((pcgsvc.TraceError, pcgsvc.CaptureError)) as caught:
            compiled(model, (rows(3),), **settings)
        (call,) = re.findall(
            rf"before the build: (torch\.\S+ '\w+'\)){re.escape(left)}\.", str(caught.value)
        )
        eval(call, {"torch": torch, "model": model})
    with compiled(model, (rows(3),), **settings) as runner:
        torch.testing.assert_close(runner(rows(3)), wanted)


def test_parametrizations_are_computed_at_each_call_and_their_cache_is_refused() -> None:
    layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)).eval().requires_grad_(False)

    def cached(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.utils.parametrize.cached():
            return layer(x)

    with pytest.raises(pcgsvc.TraceError, match=r"parametrize\.cached\(\).* Leave it out"):
        compiled(cached, (rows(3),))
    with compiled(layer, (rows(3),)) as runner:
        layer.parametrizations.weight.original0.mul_(3)
        torch.testing.assert_close(runner(rows(3)), layer(rows(3)))


# ---- a model that fails by itself ----------------------------------------------------------------


class Faulty(nn.Module):
    """A linear layer of another width than its input, or an attribute that is not there."""

    def __init__(self, width: int = 3, kind: str = "width") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(width, 2), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.kind == "width" else self.missing(x)


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
@pytest.mark.parametrize("dims", [None, {"x": 0}])
@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("width", RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
        ("attribute", AttributeError, "has no attribute 'missing'"),
    ],
)
def test_a_model_that_fails_is_told_as_its_own_exception(
    strategy: str, dims: Any, kind: str, cause: type[Exception], words: str
) -> None:
    settings: Any = {"dynamic_dims": dims, "partition": {"strategy": strategy}}
    with pytest.raises(pcgsvc.ForwardError, match=words) as caught:
        compiled(Faulty(kind=kind).eval(), (rows(3),), **settings)
    assert type(caught.value.__cause__) is cause
    line = Faulty.forward.__code__.co_firstlineno + 1
    assert f"test_whose_mistake.py:{line} in forward" in str(caught.value)
    assert "make_inputs" not in str(caught.value)  # the examples are the caller's
    with compiled(Faulty(width=WIDTH).eval(), (rows(3),), **settings) as runner:
        assert runner(rows(2)).shape == (2, 2)


def test_a_model_with_a_kv_cache_is_run_on_shapes() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    spec = AttentionSpec(
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, scale=1.0, max_position=8
    )
    with pytest.raises(pcgsvc.ForwardError, match=r"RuntimeError: .*_mistake.py:\d+ in forward"):
        pcgsvc.build_runner(Attending().eval(), (rows(3),), dynamic_dims={"x": 0}, attention=spec)


def test_a_forward_that_refuses_a_row_count_is_told_where_nothing_is_traced() -> None:
    def even(x: torch.Tensor) -> torch.Tensor:
        if len(x) % 2:
            raise ValueError("odd rows")
        return x * 2

    settings: Any = {"dynamic_dims": {"x": 0}, "partition": {"strategy": "breakable"}}
    with pytest.raises(pcgsvc.ForwardError, match=r"ValueError: odd rows at .* any number of rows"):
        compiled(even, (rows(4),), **settings)


# ---- a sample that the model refuses -------------------------------------------------------------


def of_probabilities(p: torch.Tensor) -> torch.Tensor:
    assert bool((p >= 0).all()), "not a probability"
    return p.sqrt()


def test_a_drawn_sample_that_is_refused_is_told_with_make_inputs_which_works() -> None:
    example = (torch.rand(3, 2),)
    with pytest.raises(pcgsvc.ForwardError, match="AssertionError: not a probability") as caught:
        compiled(of_probabilities, example, mode="none")
    assert "drawn like the examples, with which it works" in str(caught.value)
    assert "make_inputs=f), where f(rows, generator)" in str(caught.value)

    def make_inputs(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"p": torch.rand(rows, 2, generator=generator)}

    def traceable(p: torch.Tensor) -> torch.Tensor:
        return p.sqrt()

    with compiled(traceable, example, make_inputs=make_inputs) as runner:
        assert torch.equal(runner(*example), example[0].sqrt())


TARGET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
    def forward(self, x):
        return self.linear(x)
"""


def test_a_described_sample_of_a_wrong_width_is_told_with_model_inputs_which_works(
    tmp_path: Path,
) -> None:
    (tmp_path / "wide_net.py").write_text(TARGET)
    target = ["model=module", f"model.target={tmp_path}/wide_net.py:Net", "capture.sizes=[1,2]"]
    words = r"mat2 shapes .*wide_net.py:10 in forward\. .*as model\.inputs describes"
    with pytest.raises(pcgsvc.ForwardError, match=words):
        pcgsvc.load([*target, "model.inputs={x: [tokens, 3]}"], device="cpu", cache="off")
    right = [*target, "model.inputs={x: [tokens, 4]}"]
    with pcgsvc.load(right, device="cpu", cache="off") as runner:
        assert runner(rows(2)).shape == (2, 2)


# ---- offsets, masks and sorted indices -----------------------------------------------------------


def test_described_inputs_may_be_offsets_sorted_indices_and_masks() -> None:
    tensors, _ = read_inputs(
        {
            "offsets": {"shape": ["tokens"], "kind": "offsets", "high": 5},
            "owners": {
                "shape": ["tokens"],
                "kind": "sorted",
                "low": 1,
                "high": 3,
                "dtype": "int32",
            },
            "mask": {"shape": ["tokens", 6], "kind": "mask"},
        }
    )
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for count in (1, 7, 7, 7):
        made = {n: t.make(count, torch.float32, generator) for n, t in tensors.items()}
        assert made["offsets"][0] == 0
        for name, least, most in (("offsets", 0, 5), ("owners", 1, 2)):
            values = made[name]
            assert (values.diff() >= 0).all()
            assert least <= values.min()
            assert values.max() <= most
        assert made["owners"].dtype is torch.int32
        assert made["mask"].dtype is torch.bool
        assert made["mask"].any(dim=1).all()
        seen.add(str(made))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"kind": "ofsets", "high": 3}, "did you mean 'offsets'"),
        ({"kind": "sorted"}, "needs how far the numbers go"),
        ({"kind": "sorted", "high": 3, "dtype": "float32"}, "whole numbers are needed"),
        ({"kind": "mask", "fill": "ones"}, "pass one"),
    ],
)
def test_a_kind_that_cannot_be_drawn_is_refused(tensor: dict[str, Any], words: str) -> None:
    with pytest.raises(pcgsvc.ConfigError, match=words):
        read_inputs({"x": {"shape": ["tokens"], **tensor}})


def test_examples_that_ascend_and_masks_keep_their_form_when_they_are_drawn() -> None:
    examples = {
        "offsets": torch.tensor([0, 2, 2, 7]),
        "causal": torch.ones(4, 4).tril().bool(),
        "ids": torch.tensor([5, 1, 3, 2], dtype=torch.uint8),
    }
    make = resampler(input_specs(examples, {"offsets": 0, "causal": (0, 1), "ids": 0}))
    generator, seen = torch.Generator().manual_seed(0), set()
    for count in (1, 9, 9):
        made = make(count, generator)
        assert made["offsets"][0] == 0
        assert (made["offsets"].diff() >= 0).all()
        assert made["causal"].diagonal().all()
        seen |= set(made["ids"].tolist())
    assert seen == {5, 1, 3, 2}


def test_a_bag_of_embeddings_is_compiled_from_its_example_alone() -> None:
    bag = nn.EmbeddingBag(10, 3).eval()

    def bags(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return bag(ids, offsets)

    example = {"ids": torch.arange(6), "offsets": torch.tensor([0, 2, 2, 5])}
    with compiled(bags, example, dynamic_dims={"offsets": 0}, mode="none") as runner:
        torch.testing.assert_close(runner(**example), bags(**example).detach())


# ---- names of arguments --------------------------------------------------------------------------


def test_arguments_named_self_and_keyword_only_ones_work() -> None:
    def forward(self: torch.Tensor, *, gain: torch.Tensor) -> torch.Tensor:
        return self * gain

    example = {"self": rows(3), "gain": rows(3, seed=1)}
    with compiled(forward, example) as runner:
        call = {"self": rows(2), "gain": rows(2, seed=2)}
        assert torch.equal(runner(**call), forward(**call))


class NamesSelf(nn.Module):
    """Another argument than the module is called self."""

    def forward(this, self: torch.Tensor) -> torch.Tensor:  # noqa: N805 - the claim
        return self


def stars(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0]


def by_star(**tensors: torch.Tensor) -> torch.Tensor:
    return tensors["x"]


def by_place(x: torch.Tensor, /) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("model", "example", "name"),
    [
        (NamesSelf().eval(), {"self": rows(3)}, "self"),
        (stars, (rows(3),), "tensors"),
        (by_star, {"x": rows(3)}, "tensors"),
        (by_place, (rows(3),), "x"),
    ],
)
def test_arguments_that_no_call_could_name_are_refused_by_name(
    model: Callable[..., Any], example: Any, name: str
) -> None:
    with pytest.raises(pcgsvc.ConfigError, match=f"example_inputs: '{name}' .*Wrap the model"):
        compiled(model, example)
