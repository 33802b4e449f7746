"""What tracing read of a module decides which stored program fits: nothing else, nothing less.

Two starts in one process stand for two processes; what only a process can show is in
test_warm_processes.py. Globals, arguments and the environment: test_read_surroundings.py;
callables, sources and operators: test_read_sources.py; stored forms of values: test_read_forms.py.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended
from read_models import Base, Flexible, Kind, Settings, closure, defaulted
from torch import nn
from torch.nn import functional
from warm_helpers import Starter

from pcgsvc.cache import programs as artifacts


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def defaulted_otherwise(by: float) -> Any:
    made = types.FunctionType(defaulted.__code__, defaulted.__globals__, "defaulted", (by,))
    made.__module__, made.__qualname__ = defaulted.__module__, defaulted.__qualname__
    return made


def wrapped(by: float) -> Any:
    @functools.wraps(defaulted)
    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return defaulted(x) * by

    return wrapper


class Scaler:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def calls(member: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: member(x)


def sums_attributes(**attributes: float) -> Callable[[torch.Tensor], torch.Tensor]:
    settings = types.SimpleNamespace(**attributes)
    return lambda x: x * sum(vars(settings).values())


def looks_at(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * (len(tensor) + 10 * tensor.stride(0) + tensor.element_size())


def compares(two: tuple[torch.Tensor, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * (2 if two[0] is two[1] else 3)


# Pairs of factories: equal in themselves, different from each other.
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "eps": (lambda: Flexible(eps=1e-5), lambda: Flexible(eps=1e-3)),
    "head count": (lambda: Flexible(heads=2), lambda: Flexible(heads=4)),
    "function": (lambda: Flexible(act=torch.relu), lambda: Flexible(act=torch.tanh)),
    "lambda": (
        lambda: Flexible(act=lambda x: x * 2),
        lambda: Flexible(act=lambda x: x * 3),
    ),
    "closure value": (lambda: Flexible(act=closure(2.0)), lambda: Flexible(act=closure(3.0))),
    "default argument": (
        lambda: Flexible(act=defaulted_otherwise(2.0)),
        lambda: Flexible(act=defaulted_otherwise(3.0)),
    ),
    "wrapper": (lambda: Flexible(act=wrapped(2.0)), lambda: Flexible(act=wrapped(3.0))),
    "member of a class": (
        lambda: Flexible(act=torch.Tensor.sin),
        lambda: Flexible(act=torch.Tensor.cos),
    ),
    "member of a class in a closure": (
        lambda: Flexible(act=calls(torch.Tensor.sin)),
        lambda: Flexible(act=calls(torch.Tensor.cos)),
    ),
    "what vars() lists": (
        lambda: Flexible(act=sums_attributes(a=2.0)),
        lambda: Flexible(act=sums_attributes(a=2.0, b=3.0)),
    ),
    "dtype of a tensor that is no buffer": (
        lambda: Flexible(act=looks_at(torch.ones(3))),
        lambda: Flexible(act=looks_at(torch.ones(3, dtype=torch.float64))),
    ),
    "shape of a tensor that is no buffer": (
        lambda: Flexible(act=looks_at(torch.ones(3))),
        lambda: Flexible(act=looks_at(torch.ones(2))),
    ),
    "stride of a tensor that is no buffer": (
        lambda: Flexible(act=looks_at(torch.ones(2))),
        lambda: Flexible(act=looks_at(torch.ones(4)[::2])),
    ),
    "shape of another module's weight": (
        lambda: Flexible(act=looks_at(nn.Linear(2, 3).weight)),
        lambda: Flexible(act=looks_at(nn.Linear(3, 2).weight)),
    ),
    "one tensor or two": (
        lambda: Flexible(act=compares((torch.ones(3),) * 2)),
        lambda: Flexible(act=compares((torch.ones(3), torch.ones(3)))),
    ),
    "partial keyword": (
        lambda: Flexible(act=functools.partial(defaulted, by=2.0)),
        lambda: Flexible(act=functools.partial(defaulted, by=3.0)),
    ),
    "partial function": (
        lambda: Flexible(act=functools.partial(torch.mul, other=2.0)),
        lambda: Flexible(act=functools.partial(torch.add, other=2.0)),
    ),
    "callable object": (lambda: Flexible(act=Scaler(2.0)), lambda: Flexible(act=Scaler(3.0))),
    "bound method": (
        lambda: Flexible(act=Scaler(2.0).method),
        lambda: Flexible(act=Scaler(3.0).method),
    ),
    "module class": (lambda: Flexible(act=Gelu()), lambda: Flexible(act=Twice())),
    "torch module": (lambda: Flexible(act=nn.ReLU()), lambda: Flexible(act=nn.SiLU())),
    "torch module's setting": (
        lambda: Flexible(act=nn.LeakyReLU(0.1)),
        lambda: Flexible(act=nn.LeakyReLU(0.3)),
    ),
    "nested value": (
        lambda: Flexible(nest={"a": [1, (2, 3.0)]}),
        lambda: Flexible(nest={"a": [1, (2, 4.0)]}),
    ),
    "enum": (lambda: Flexible(kind=Kind.PLUS), lambda: Flexible(kind=Kind.MINUS)),
    "attribute of an object": (
        lambda: Flexible(settings=Settings(1.0)),
        lambda: Flexible(settings=Settings(2.0)),
    ),
}


if torch.__version__.startswith("2.11."):  # whose Dynamo refuses to trace these
    del PAIRS["member of a class"], PAIRS["what vars() lists"]


@pytest.mark.parametrize("what", PAIRS)
def test_what_differs_in_one_read_value_shares_no_program_and_both_stay_stored(
    start: Starter, what: str
) -> None:
    one, other = PAIRS[what]
    assert not start(one()).warm
    second = start(other())
    assert second.right
    assert not second.warm, f"{what}: ran another instance's program"
    assert second.report["cache"]["healed"] == 0, "found by the self-check, not by what was read"
    for factory in (one, other):
        again = start(factory())
        assert again.warm, again.reasons
        assert again.right


def attribute_pairs() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]]:
    """Modules that differ in what the tensors or the module tree are."""

    class Tied(nn.Module):
        def __init__(self, tie: str) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH, bias=False)
            self.b = nn.Linear(WIDTH, WIDTH, bias=False)
            for layer in (self.a, self.b):
                layer.weight.data.copy_(torch.eye(WIDTH) * 0.5)
            if tie == "parameter":
                self.b.weight = self.a.weight
            elif tie == "storage":
                self.b.weight = nn.Parameter(self.a.weight.data)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(self.b(self.a(x)))

    class Table(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            layers = {"p": nn.ReLU(), "q": nn.Tanh(), "r": nn.Hardtanh(-0.1, 0.2)}
            self.layers = nn.ModuleDict({name: layers[name] for name in order})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return attended(x)

    class Counting(nn.Module):
        def __init__(self, dtype: torch.dtype = torch.float32, flip: bool = False) -> None:
            super().__init__()
            table = torch.arange(WIDTH * WIDTH, dtype=dtype).view(WIDTH, WIDTH)
            self.register_buffer("table", table.t() if flip else table)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = self.table
            assert isinstance(table, torch.Tensor)
            scale = 2.0 if table.is_contiguous() else 3.0
            return attended(x @ table.to(x.dtype) * scale + (1 if table.dtype.itemsize > 4 else 0))

    class Frozen(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(self.up(x) * (2 if self.up.weight.requires_grad else 3))

    class Twin(nn.Module):
        table: torch.Tensor

        def __init__(self, is_one: bool) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3))
            self.same = self.table if is_one else torch.ones(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x * (2 if self.same is self.table else 3))

    def hooked(by: float | None) -> nn.Module:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            return out * by

        module = Flexible()
        if by is not None:
            module.up.register_forward_hook(hook)
        return module

    def pre_hooked(by: float | None) -> nn.Module:
        def hook(module: nn.Module, args: Any) -> Any:
            return tuple(a * by for a in args)

        module = Flexible()
        if by is not None:
            module.register_forward_pre_hook(hook)
        return module

    def overridden(by: float | None) -> nn.Module:
        module = Flexible()
        if by is not None:
            module.up.forward = lambda x: x * by  # type: ignore[method-assign]
        return module

    def frozen(on: bool) -> nn.Module:
        module = Frozen()
        module.requires_grad_(on)
        return module

    def swapped(cls: type[nn.Linear]) -> nn.Module:
        module = Flexible()
        module.up.__class__ = cls
        return module

    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    return {
        "tied parameters": (lambda: Tied("none"), lambda: Tied("parameter")),
        "tied storage": (lambda: Tied("none"), lambda: Tied("storage")),
        "order of a ModuleDict": (lambda: Table("pqr"), lambda: Table("rpq")),
        "length of a ModuleDict": (lambda: Table("pq"), lambda: Table("pqr")),
        "dtype": (lambda: Counting(), lambda: Counting(torch.float64)),
        "a buffer's other name": (lambda: Twin(True), lambda: Twin(False)),
        "stride": (lambda: Counting(), lambda: Counting(flip=True)),
        "requires_grad": (lambda: frozen(True), lambda: frozen(False)),
        "forward hook": (lambda: hooked(None), lambda: hooked(2.0)),
        "value in a forward hook": (lambda: hooked(3.0), lambda: hooked(2.0)),
        "forward pre-hook": (lambda: pre_hooked(None), lambda: pre_hooked(2.0)),
        "forward of an instance": (lambda: overridden(None), lambda: overridden(2.0)),
        "class of a submodule": (lambda: swapped(nn.Linear), lambda: swapped(Doubling)),
    }


ATTRIBUTE_PAIRS = attribute_pairs()


@pytest.mark.parametrize("what", ATTRIBUTE_PAIRS)
def test_what_differs_in_tensors_hooks_or_modules_shares_no_program(
    start: Starter, what: str
) -> None:
    one, other = ATTRIBUTE_PAIRS[what]
    first, second = start(one().eval()), start(other().eval())
    assert (first.right, second.right) == (True, True)
    assert not second.warm, f"{what}: ran another instance's program"
    assert second.report["cache"]["healed"] == 0, "found by the self-check, not by what was read"
    third = start(other().eval())
    assert third.right
    assert third.warm, third.reasons


def test_hooks_of_all_modules_count(start: Starter) -> None:
    assert not start(Flexible()).warm
    starts = []
    for by in (2.0, 3.0):

        def hook(module: nn.Module, args: Any, out: Any, by: float = by) -> Any:
            return out * by

        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            starts.append(start(Flexible()))
        finally:
            handle.remove()
    assert [each.right for each in starts] == [True, True]
    assert not any(each.warm for each in starts)
    assert start(Flexible()).warm


def test_more_instances_than_an_entry_holds_are_right_and_the_last_ones_stay(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MAX_VARIANTS", 3)
    for number in range(5):
        assert start(Flexible(eps=float(number))).right
    warm = [start(Flexible(eps=float(number)), cache="read").warm for number in range(5)]
    assert warm == [False, False, True, True, True]


def test_whether_a_buffer_is_saved_does_not_matter(start: Starter) -> None:
    class Buffered(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=persistent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x * self.scale)

    assert not start(Buffered(True)).warm
    assert start(Buffered(False)).warm


def test_values_of_weights_do_not_matter_and_the_new_ones_are_used(start: Starter) -> None:
    assert not start(Flexible()).warm
    module = Flexible()
    module.up.weight.data.mul_(-2)
    again = start(module)
    assert again.warm
    assert again.right
