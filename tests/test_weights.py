"""New weights in a running model, and weights that are no longer where the graphs read them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended, build, make_config, rows, toy
from model_helpers import make_context
from torch import nn

import pcgsvc
from pcgsvc.config import Strategy
from pcgsvc.errors import ConfigError, PcgError, StaleAddressError, StateError
from pcgsvc.ops.context import use_context
from pcgsvc.serve.weights import _TURN, Weights


def plain(module: Any, x: torch.Tensor) -> Any:
    with torch.no_grad(), use_context(make_context(None, [len(x)])):
        return module(x)


class Tied(nn.Module):
    """An embedding whose weight is the head's as well, a buffer, and a plain tensor attribute."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = attended(self.mid(self.embed(x)) + self.shift + self.hidden)
        return self.head(y)


def tied(seed: int = 0) -> Tied:
    return Tied(seed).eval().requires_grad_(False)


# ---- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "piecewise", "breakable"])
def test_a_new_state_is_used_from_the_next_call_on_without_recapture(mode: str) -> None:
    module, other = toy(2), toy(2, seed=9)
    config = make_config("piecewise" if mode == "breakable" else mode, [4])
    if mode == "breakable":
        config.partition.strategy = Strategy.BREAKABLE
    with pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        entries = dict(runner.table.entries)
        kept = [p.data_ptr() for p in module.parameters()]
        before = runner(rows(3))
        assert runner.load_state_dict(other.state_dict()) == ([], [])
        got = runner(rows(3))
        assert not torch.equal(got, before)
        torch.testing.assert_close(got, plain(other, rows(3)))
        torch.testing.assert_close(runner(rows(9)), plain(other, rows(9)))
        assert runner.table.entries == entries
        assert [p.data_ptr() for p in module.parameters()] == kept


def test_a_full_graph_reads_new_weights() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with build(module, {"input": rows(3)}, {"input": 0}, mode="full", sizes=[4]) as runner:
        assert runner.plan(3).mode.value == "full"
        runner.load_state_dict({k: v * 2 + 1 for k, v in module.state_dict().items()})
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_inductor_folds_no_weight_into_its_code(asked: bool) -> None:
    import torch._inductor.config

    module, other = toy(1), toy(1, seed=9)
    config = make_config(sizes=[4], compiler="inductor")
    with (
        torch._inductor.config.patch(freezing=asked),  # as its environment variable does
        pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config) as runner,
    ):
        runner.load_state_dict(other.state_dict())
        torch.testing.assert_close(runner(rows(3)), plain(other, rows(3)))


def test_folding_weights_into_code_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"compiler\.options\.freezing"):
        pcgsvc.load_runner(["compiler=inductor", "compiler.options={freezing: true}"])


def test_tied_weights_need_one_value() -> None:
    module, other = tied(), tied(seed=1)
    with build(module, sizes=[4]) as runner:
        state = other.state_dict()
        assert {"embed.weight", "head.weight"} <= set(state)
        assert "hidden" not in state
        one = {k: v for k, v in state.items() if k != "embed.weight"}
        assert runner.load_state_dict(one) == ([], [])
        assert torch.equal(module.embed.weight, other.head.weight)
        assert module.head.weight is module.embed.weight
        assert runner.load_state_dict({k: v.clone() for k, v in state.items()}) == ([], [])
        two = dict(state, **{"head.weight": state["head.weight"] + 1})
        with pytest.raises(StateError, match=r"embed\.weight and head\.weight are one tensor"):
            runner.load_state_dict(two)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"mid.bias": torch.ones(5)}, r"mid\.bias: got shape \[5\], \[4\] is needed"),
    "scalar": ({"mid.bias": torch.ones(())}, r"mid\.bias: got shape \[\], \[4\]"),
    "dtype": ({"shift": torch.ones(4).double()}, r"shift: got torch.float64, torch.float32"),
    "no tensor": ({"shift": [1.0] * 4}, "shift: got a list, a tensor is needed"),
    "meta": ({"shift": torch.ones(4, device="meta")}, "shift: got a tensor without dense memory"),
    "sparse": ({"shift": torch.ones(4).to_sparse()}, "shift: got a tensor without dense memory"),
    "unexpected": ({"mid.wieght": torch.ones(4, 4)}, r"the module has no mid\.wieght"),
    "missing": ({"mid.weight": None}, r"the state lacks mid\.weight"),
    "missing ties": (
        {"embed.weight": None, "head.weight": None},
        r"the state lacks embed\.weight, head\.weight",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_state_that_does_not_fit_is_refused_with_nothing_written(case: str) -> None:
    changes, words = FAULTS[case]
    module = tied()
    with build(module, sizes=[4]) as runner:
        kept = {k: v.clone() for k, v in module.state_dict().items()}
        before = runner(rows(3))
        state = {**{k: v + 1 for k, v in kept.items()}, **changes}
        if case.startswith("missing"):
            state = {k: v for k, v in state.items() if v is not None}
        with pytest.raises(StateError, match=f"nothing was written(.|\\n)*{words}"):
            runner.load_state_dict(state)
        assert all(torch.equal(v, kept[k]) for k, v in module.state_dict().items())
        assert torch.equal(runner(rows(3)), before)


def test_not_strict_writes_what_there_is_and_says_what_is_not() -> None:
    module = tied()
    with build(module, sizes=[4]) as runner:
        kept = module.mid.weight.clone()
        left = runner.load_state_dict({"shift": torch.ones(WIDTH), "more": rows(1)}, strict=False)
        assert left.unexpected_keys == ["more"]
        assert left.missing_keys == ["embed.weight", "head.weight", "mid.weight", "mid.bias"]
        assert torch.equal(module.shift, torch.ones(WIDTH))
        assert torch.equal(module.mid.weight, kept)
        with pytest.raises(StateError, match="shift: got shape"):
            runner.load_state_dict({"shift": torch.ones(1)}, strict=False)
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))


def test_a_state_made_of_the_module_s_own_tensors_is_read_before_it_is_written() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    with build(module, {"input": rows(3)}, {"input": 0}, sizes=[4]) as runner:
        old = {k: v.clone() for k, v in module.state_dict().items()}
        own = module.state_dict()
        swapped = {k: own[("1" if k[0] == "0" else "0") + k[1:]] for k in own}
        runner.load_state_dict(swapped)
        for name, value in module.state_dict().items():
            assert torch.equal(value, old[("1" if name[0] == "0" else "0") + name[1:]])
        runner.load_state_dict(module.state_dict())
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))


class Extra(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if how == "hook":
            self.register_state_dict_post_hook(self._double)

    @staticmethod
    def _double(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["linear.weight"] = state["linear.weight"] * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class WithExtraState(Extra):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("module", "name"),
    [(Extra("hook"), "linear.weight"), (WithExtraState(""), "_extra_state")],
)
def test_a_state_that_is_not_the_tensors_themselves_is_refused(module: Any, name: str) -> None:
    with (
        build(module.eval(), sizes=[4]) as runner,
        pytest.raises(StateError, match=f"'{name}' of .* is none of its parameters"),
    ):
        runner.load_state_dict(module.state_dict())


def test_a_runner_of_a_function_and_other_arguments_are_refused() -> None:
    with build(lambda x: x * 2, sizes=[4]) as runner, pytest.raises(StateError, match="function"):
        runner.load_state_dict({})
    with build(toy(1), sizes=[4]) as runner:
        with pytest.raises(StateError, match="got a list"):
            runner.load_state_dict([("a", 1)])  # type: ignore[arg-type]
        runner.close()
        with pytest.raises(PcgError, match="closed"):
            runner.load_state_dict({})


def test_weights_made_under_inference_mode_are_written_too() -> None:
    with torch.inference_mode():
        module = tied()
    with build(module, sizes=[4]) as runner:
        state = {k: v.clone() + 1 for k, v in module.state_dict().items()}
        runner.load_state_dict(state)
        assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


def test_calls_of_other_threads_see_one_state_or_the_other() -> None:
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]).eval()
    states = [{k: torch.eye(WIDTH) * scale for k in module.state_dict()} for scale in (1.0, 2.0)]
    with build(module, {"input": rows(3)}, {"input": 0}, sizes=[4]) as runner:
        runner.load_state_dict(states[0])
        x, wrong, stop = rows(3), [], threading.Event()

        def call() -> None:
            while not stop.is_set():
                got = runner(x)
                if not any(torch.equal(got, x * scale**6) for scale in (1.0, 2.0)):
                    wrong.append(got)

        thread = threading.Thread(target=call)
        thread.start()
        for at in range(60):
            runner.load_state_dict(states[at % 2])
        stop.set()
        thread.join()
        assert not wrong


# ---- replaced memory -----------------------------------------------------------------------------


class Attribute(nn.Module):
    """Tensors that are no parameters or buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((WIDTH,), 2.0)
        self.table = {"a": torch.ones(WIDTH)}
        self.parts = [torch.ones(WIDTH), torch.ones(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * self.scale + self.table["a"] + self.parts[1])


NEW = torch.zeros(WIDTH)
ATTRIBUTES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda m: setattr(m, "scale", NEW), "^scale: its memory"),
    "in a dict": (lambda m: m.table.update(a=NEW), r"^table\['a'\]: its memory"),
    "in a list": (lambda m: m.parts.__setitem__(1, NEW), r"^parts\[1\]: its memory"),
    "shorter list": (lambda m: m.parts.pop(), r"^parts\[1\]: its memory"),
    "gone": (lambda m: delattr(m, "scale"), "^scale: its memory"),
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_tensors_held_in_other_ways_are_compared_too(case: str) -> None:
    change, words = ATTRIBUTES[case]
    module = Attribute().eval()
    with build(module, sizes=[4]) as runner:
        module.scale.mul_(2)  # in place is seen
        assert torch.equal(runner(rows(3)), plain(module, rows(3)))
        change(module)
        with pytest.raises(StaleAddressError, match=words):
            runner(rows(3))


class Thing:
    """Holds a module and a tensor, and is called or has a method called."""

    def __init__(self) -> None:
        self.net = nn.Linear(WIDTH, WIDTH).eval()
        self.scale = torch.ones(WIDTH)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return attended(self.net(x) * self.scale)


class Deep(nn.Module):
    """Weights in plain containers and objects; one holder refers back to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.nested = [{"a": (torch.ones(WIDTH),)}]
        self.both = (torch.ones(WIDTH), torch.ones(WIDTH))
        self.thing = Thing()
        self.thing.owner = [self]  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.thing(x + self.nested[0]["a"][0] + self.both[1])


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(WIDTH, WIDTH))


DEEP: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight in a list": (
        lambda m: setattr(m.layers[1], "weight", weight()),
        r"layers\[1\]\.weight",
    ),
    "module in a list": (
        lambda m: m.layers.__setitem__(0, nn.Linear(WIDTH, WIDTH)),
        r"layers\[0\]",
    ),
    "the list": (lambda m: setattr(m, "layers", list(m.layers)), "layers"),
    "a nested tuple": (lambda m: m.nested[0].update(a=(NEW,)), r"nested\[0\]\['a'\]"),
    "a tuple": (lambda m: setattr(m, "both", (NEW, NEW)), "both"),
    "in an object": (lambda m: setattr(m.thing, "scale", NEW), r"thing\.scale"),
    "weight in an object": (
        lambda m: setattr(m.thing.net, "weight", weight()),
        r"thing\.net\.weight",
    ),
}


@pytest.mark.parametrize("case", DEEP)
def test_what_lies_deeper_is_compared_too(case: str) -> None:
    change, words = DEEP[case]
    module = Deep().eval()
    with build(module, sizes=[4]) as runner:
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))
        change(module)
        with pytest.raises(StaleAddressError, match=f"^{words}: its memory"):
            runner(rows(3))


def test_what_callables_hold_is_compared() -> None:
    held: dict[str, Any] = {"net": nn.Linear(WIDTH, WIDTH).eval(), "shift": [NEW.clone()]}

    scales = [torch.ones(WIDTH)]

    def function(x: torch.Tensor, scale: Any = scales) -> torch.Tensor:
        return attended((held["net"](x) + held["shift"][0]) * scale[0])

    thing, method = Thing(), Thing().__call__
    changes: list[tuple[Any, Callable[[], Any], str]] = [
        (function, lambda: held["shift"].__setitem__(0, NEW), r"held\['shift'\]\[0\]"),
        (function, lambda: held.update(net=Thing().net), r"held\['net'\]"),
        (function, lambda: scales.__setitem__(0, NEW), r"scale\[0\]"),
        (thing, lambda: setattr(thing, "scale", NEW), "scale"),
        (method, lambda: setattr(method.__self__.net, "weight", weight()), r"net\.weight"),
    ]
    for forward, change, words in changes:
        with build(forward, sizes=[4]) as runner:
            torch.testing.assert_close(runner(rows(3)), plain(forward, rows(3)))
            change()
            with pytest.raises(StaleAddressError, match=f"^{words}: its memory"):
                runner(rows(3))


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:2]])
def test_a_tensor_that_lies_otherwise_at_the_same_address_is_noticed(view: Any) -> None:
    module = toy(1)
    with build(module, sizes=[4], check_addresses=True) as runner:
        runner(rows(3))
        weight = module.blocks[0].up.weight
        weight.data = view(weight.data)
        with pytest.raises(StaleAddressError, match=r"blocks\.0\.up\.weight"):
            runner(rows(3))


def test_modules_behind_a_function_are_compared() -> None:
    inner = toy(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    for change in (
        lambda: setattr(inner.blocks[0].up, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
        lambda: setattr(inner.blocks[0].up.bias, "data", torch.ones(WIDTH)),
    ):
        with build(forward, sizes=[4]) as runner:
            runner(rows(3))
            change()
            with pytest.raises(StaleAddressError, match=r"inner\.blocks\.0\.up|bias"):
                runner(rows(3))
    with build(forward, sizes=[4]) as runner:
        inner = toy(1, seed=3)
        with pytest.raises(StaleAddressError, match=r"^inner: its memory"):
            runner(rows(3))


def test_the_last_of_many_weights_is_compared_when_registered_and_when_loading() -> None:
    module = toy(6)
    with build(module, sizes=[4]) as runner:
        runner(rows(3))
        state = module.state_dict()
        module.blocks[5].down.bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        for _ in range(2):
            with pytest.raises(StaleAddressError, match=r"blocks\.5\.down\.bias"):
                runner(rows(3))
        with pytest.raises(StaleAddressError, match=r"blocks\.5\.down\.bias"):
            runner.load_state_dict(state)


def test_memory_swapped_behind_torch_s_back_is_kept_and_noticed_in_turn() -> None:
    module = toy(6)
    with build(module, sizes=[4]) as runner:
        runner(rows(3))
        bias = module.blocks[5].down.bias
        before = bias.data_ptr()
        bias.data = torch.full((WIDTH,), 7.0)
        gc.collect()
        assert before not in {torch.empty(WIDTH).data_ptr() for _ in range(100)}

        def calls() -> None:
            for _ in range(1 + 2 * len(list(module.parameters())) // _TURN):
                runner(rows(3))

        with pytest.raises(StaleAddressError, match=r"blocks\.5\.down\.bias"):
            calls()


def test_memory_swapped_behind_torch_s_back_is_noticed_at_once_on_request() -> None:
    module = toy(6)
    with build(module, sizes=[4], check_addresses=True) as runner:
        runner(rows(3))
        module.blocks[5].down.bias.data = torch.zeros(WIDTH)
        with pytest.raises(StaleAddressError, match=r"blocks\.5\.down\.bias"):
            runner(rows(3))


def test_static_memory_is_compared_on_request() -> None:
    for check in (False, True):
        with pcgsvc.load_runner(
            [
                "model.num_layers=1",
                "compiler=eager",
                "capture.sizes=[4]",
                "cache.mode=off",
                f"debug.check_addresses={check}",
            ]
        ) as runner:
            ids = torch.arange(3)
            runner(ids, ids)
            cache = runner.memory.attention.kv_cache  # type: ignore[union-attr]
            cache[0] = torch.zeros_like(cache[0])
            if not check:
                runner(ids, ids)
                continue
            with pytest.raises(StaleAddressError, match="KV cache of layer 0"):
                runner(ids, ids)


# ---- what else graphs took from the module -------------------------------------------------------


def _double(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


SWITCHES: dict[str, tuple[Callable[[Tied], Any], str]] = {
    "train": (lambda m: m.train(), "training mode of the module itself, training mode of embed"),
    "hook": (lambda m: m.mid.register_forward_hook(_double), "forward hooks of mid"),
    "pre-hook": (
        lambda m: m.register_forward_pre_hook(lambda m, args: None),
        "forward pre-hooks of the module itself",
    ),
    "global hook": (
        lambda m: nn.modules.module.register_module_forward_hook(_double),
        "forward hooks of all modules",
    ),
}


@pytest.mark.parametrize("case", SWITCHES)
def test_training_mode_and_hooks_that_are_not_those_of_the_build_are_refused(case: str) -> None:
    module, (switch, words) = tied(), SWITCHES[case]
    with build(module, sizes=[4]) as runner:
        wanted = plain(module, rows(3))
        torch.testing.assert_close(runner(rows(3)), wanted)
        handle = switch(module)
        try:
            for count in (3, 9):  # a graph, and none
                with pytest.raises(ConfigError, match=f"^module: {words}.*module.eval"):
                    runner(rows(count))
        finally:
            module.eval() if case == "train" else handle.remove()
        torch.testing.assert_close(runner(rows(3)), wanted)


def test_hooks_that_come_and_go_elsewhere_have_no_weights_compared() -> None:
    """As a profiler or a training loop beside the runner registers them at each of its steps."""
    module, other = tied(), nn.Linear(2, 2)
    handle = module.embed.register_forward_hook(lambda *args: None)
    weights = Weights(module, dict(module.named_parameters()))
    weights.check()
    weights._whole = None  # type: ignore[assignment] - all that could be compared
    for _ in range(40):
        other.register_forward_hook(_double).remove()
        weights.check()
    for change in (
        lambda: module.mid.register_forward_hook(_double),
        lambda: module.embed.register_forward_hook(_double),
        lambda: nn.modules.module.register_module_forward_pre_hook(lambda *args: None),
    ):
        added = change()
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"^module: forward "):
                weights.check()
        added.remove()
        weights.check()
    handle.remove()
    other.register_forward_hook(_double)
    with pytest.raises(ConfigError, match=r"^module: forward hooks of embed"):
        weights.check()


def test_a_submodule_s_training_mode_is_noticed_within_some_calls() -> None:
    module = tied()
    with build(module, sizes=[4]) as runner:
        runner(rows(3))
        module.mid.train()

        def call_often() -> None:
            for _ in range(40):
                runner(rows(3))

        with pytest.raises(ConfigError, match=r"^module: training mode of mid"):
            call_often()
