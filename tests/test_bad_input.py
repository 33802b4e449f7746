"""Every public function and argument, given something of another kind: a PcgError that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core_helpers import rows
from torch import nn

import pcgsvc
from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.ops.registry import register_splitting_op


class Opaque:
    """An object of no kind that anything takes."""

    def __repr__(self) -> str:
        return "<opaque>"


META = torch.zeros(3, 4, device="meta")
BAD: dict[str, Any] = {
    "a number": 3,
    "a fraction": 2.5,
    "true": True,
    "None": None,
    "no text": "",
    "text": "abc",
    "bytes": b"a",
    "an empty list": [],
    "an empty tuple": (),
    "an empty dict": {},
    "a list of None": [None],
    "a dict by number": {3: 4},
    "a dict": {"a": 1},
    "an object": Opaque(),
    "a class": nn.Linear,
    "a function": lambda: 1,
    "a tensor": rows(3),
    "an empty tensor": torch.zeros(0),
    "a tensor without values": META,
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def scale(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def compiled(**changed: Any) -> Any:
    call = {"model": net(), "example_inputs": (rows(3),), "cache": "off", "sizes": [1], **changed}
    return pcgsvc.compile(call.pop("model"), call.pop("example_inputs"), **call)


def built(**changed: Any) -> Any:
    call: dict[str, Any] = {
        "module": net(),
        "example_inputs": (rows(3),),
        "dynamic_dims": {"input": 0},
        "config": {"cache": {"mode": "off"}, "capture": {"sizes": [1]}},
        **changed,
    }
    return pcgsvc.build_runner(call.pop("module"), call.pop("example_inputs"), **call)


def registered(**changed: Any) -> Any:
    call = {"name": "toy::badly", "kernel": scale, "mutates_args": ("out",), **changed}
    return register_splitting_op(call.pop("name"), call.pop("kernel"), **call)


def declared(**changed: Any) -> Any:
    call = {"name": "toy::badly", "mutates_args": ("out",), **changed}
    function = call.pop("function", scale)
    return pcgsvc.splitting_op(call.pop("name"), **call)(function)


def spec(**changed: Any) -> AttentionSpec:
    counts = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    return AttentionSpec(**{**counts, "max_position": 8, "scale": 1.0, **changed})


NOTHING = ("None", "an empty dict")
"""What stands for "not given" where that is possible."""
CALLS: dict[str, tuple[Callable[..., Any], dict[str, tuple[str, ...]]]] = {
    # what is called, and per argument the names of the values that are good ones there
    "compile": (
        compiled,
        {
            "model": (),
            "example_inputs": ("a tensor",),
            "dynamic_dims": ("None",),
            "mode": (),
            "compiler": NOTHING,
            "sizes": ("None",),
            "cache": ("an empty dict",),
            "make_inputs": ("None",),
            "capture": ("an empty dict",),
            "strict": ("true",),
            "seed": ("a number",),
            "outputs": (),
            "nothing": (),
        },
    ),
    "build_runner": (
        built,
        {
            "module": (),
            "example_inputs": ("a tensor",),
            "dynamic_dims": ("None",),
            "config": NOTHING,
            "make_inputs": ("None",),
            "attention": ("None",),
            "progress": ("None",),
        },
    ),
    "load_config": (
        pcgsvc.load_config,
        {
            "overrides": ("an empty list", "an empty tuple"),
            "config_dir": ("None",),
            "config": NOTHING,
        },
    ),
    "splitting_op": (
        declared,
        {
            "name": (),
            "function": ("a function",),
            "mutates_args": (),
            "support": (),
            "fake": ("None", "a class", "a function"),
            "tags": ("an empty list", "an empty tuple", "an empty dict"),
        },
    ),
    "register_splitting_op": (
        registered,
        {
            "name": (),
            "kernel": ("a function",),
            "mutates_args": (),
            "support": ("None",),
            "fake": ("None", "a class", "a function"),
            "tags": ("an empty list", "an empty tuple", "an empty dict"),
            "bind": ("None", "a class", "a function"),
        },
    ),
    "eager_break": (pcgsvc.eager_break, {"function": ("a function",)}),
    "true_rows": (
        pcgsvc.true_rows,
        {"x": ("a tensor", "an empty tensor", "a tensor without values")},
    ),
    "register_attention_backend": (
        lambda name="mine", backend=None: pcgsvc.register_attention_backend(name, backend),
        {"name": (), "backend": ()},
    ),
    "AttentionSpec": (
        spec,
        {
            "num_layers": ("a number",),
            "num_heads": ("a number",),
            "num_kv_heads": (),
            "head_dim": ("a number",),
            "max_position": ("a number",),
            "scale": ("a number", "a fraction", "true"),
            "sliding_windows": ("None", "a list of None"),
            "softcap": ("a number", "a fraction", "true", "None"),
        },
    ),
}
CASES = [
    pytest.param(call, name, bad, id=f"{door}-{name}-{bad}")
    for door, (call, arguments) in CALLS.items()
    for name, good in arguments.items()
    for bad in BAD
    if bad not in good
]


@pytest.mark.parametrize(("call", "name", "bad"), CASES)
def test_an_argument_of_another_kind_is_a_pcg_error(
    call: Callable[..., Any], name: str, bad: str
) -> None:
    with pytest.raises(pcgsvc.PcgError) as caught:
        call(**{name: BAD[bad]})
    if call in (compiled, built) and not (name == "make_inputs" and callable(BAD[bad])):
        assert "pcgsvc." in str(caught.value).split("\n")[-1]  # the right call


@pytest.mark.parametrize(
    "bad", sorted(set(BAD) - {"an empty list", "an empty tuple", "an empty dict"})
)
def test_load_of_another_kind_is_a_pcg_error(bad: str) -> None:
    with pytest.raises(pcgsvc.PcgError, match=r"The form of a call: pcgsvc\.load\("):
        pcgsvc.load(BAD[bad])


@pytest.fixture(scope="module")
def runner() -> Iterator[pcgsvc.Runner]:
    with compiled(sizes=[4]) as built:
        yield built


METHODS: dict[str, tuple[Callable[[pcgsvc.Runner, Any], Any], tuple[str, ...]]] = {
    "call": (lambda r, bad: r(bad), ("a tensor",)),
    "call by name": (lambda r, bad: r(input=bad), ("a tensor",)),
    "batch": (lambda r, bad: r(rows(3), batch=bad), ("None",)),
    "query_lens": (
        lambda r, bad: r(rows(3), batch=pcgsvc.Batch(query_lens=bad)),
        ("a dict by number",),
    ),
    "plan": (lambda r, bad: r.plan(bad), ("a number",)),
    "plan query_lens": (lambda r, bad: r.plan(3, bad), ("None", "a dict by number")),
    "generate": (lambda r, bad: r.generate(bad), ()),
    "embed": (lambda r, bad: r.embed(bad), ()),
    "load_state_dict": (lambda r, bad: r.load_state_dict(bad), ()),
    "strict": (lambda r, bad: r.load_state_dict({}, strict=bad), ()),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_runner_refuses_arguments_of_another_kind(runner: pcgsvc.Runner, method: str) -> None:
    call, good = METHODS[method]
    for bad in BAD.keys() - set(good):
        with pytest.raises(pcgsvc.PcgError):
            call(runner, BAD[bad])
    x = rows(3)
    torch.testing.assert_close(runner(x), net_of(runner)(x))


def net_of(runner: pcgsvc.Runner) -> Callable[..., Any]:
    return runner.model.module


def test_there_is_no_context_outside_a_step() -> None:
    with pytest.raises(pcgsvc.PcgError, match="no forward context"):
        pcgsvc.current_context()


def test_a_make_inputs_that_fails_is_told_with_its_line() -> None:
    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        raise KeyError("mine")

    with pytest.raises(pcgsvc.ConfigError, match=r"make_inputs: .*_input.py:\d+ in make: Key"):
        compiled(make_inputs=make)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (net().to("meta"), r"module\.to\('cpu'\)"),
        (net().train(), r"call module\.eval\(\)"),
        (torch.relu, r"no signature found .* lambda x: function\(x\)"),
    ],
    ids=["another device", "in training", "a builtin"],
)
def test_a_model_that_no_graph_could_run_is_refused_with_what_to_do(model: Any, words: str) -> None:
    with pytest.raises(pcgsvc.ConfigError, match=words):
        compiled(model=model)
