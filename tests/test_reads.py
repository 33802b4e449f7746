"""What tracing read decides which stored program fits: nothing else, and nothing less.

Two starts in one process stand for two processes; what only a process can show is in
test_warm_start.py.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import WIDTH, attended, rows
from torch import nn
from torch.nn import functional
from warm_helpers import Sources, Start, Starter, source_folder

import pcgsvc
from pcgsvc.cache import programs as artifacts
from pcgsvc.forward import objects
from pcgsvc.ops import registry
from pcgsvc.ops.support import Support
from pcgsvc.program import guards, image
from pcgsvc.program.forms import NotCanonicalError, canonical, code_digest
from pcgsvc.program.guards import StoredGuard
from pcgsvc.program.image import op_identity
from pcgsvc.trace import dynamo as trace


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    """A cache directory that starts empty."""
    return Starter(tmp_path / "cache")


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    """A folder for model files on the import path."""
    with source_folder(tmp_path / "sources") as made:
        yield made


class Kind(enum.Enum):
    PLUS = 1
    MINUS = 2


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Settings:
    """A plain object, as configurations are."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def doubled(self) -> float:
        return self.scale * 2


class Base(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        for number, parameter in enumerate(self.parameters()):
            values = torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
            parameter.data.copy_(values * (number + 1))


class Flexible(Base):
    """Reads all kinds of things."""

    def __init__(
        self,
        *,
        eps: float = 1e-5,
        heads: int = 2,
        act: Any = torch.relu,
        nest: Any = None,
        kind: Kind = Kind.PLUS,
        settings: Settings | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.heads, self.act, self.kind = eps, heads, act, kind
        self.nest = nest or {"a": [1, (2, 3.0)]}
        self.settings = settings or Settings(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.up(x) * self.factor + self.eps)
        x = x.view(-1, self.heads, WIDTH // self.heads).softmax(-1).flatten(1)
        x = attended(x) * self.nest["a"][1][1]
        x = x * self.settings.doubled()
        return x + 1 if self.kind is Kind.PLUS else x - 1


def closure(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * value


def defaulted(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


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


@pytest.mark.parametrize("what", PAIRS)
def test_what_differs_in_one_read_value_shares_no_program_and_both_stay_stored(
    start: Starter, what: str
) -> None:
    one, other = PAIRS[what]
    assert not start(one()).warm
    second = start(other())
    assert second.right
    assert not second.warm, f"{what}: ran another instance's program"
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


# ---- globals, class attributes, the environment --------------------------------------------------

SCALE: Any = 2.0
ACT: Callable[[torch.Tensor], torch.Tensor] = torch.relu
TABLE = {"a": [1.0, 2.0]}


class ReadsGlobals(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(ACT(x) * SCALE) + TABLE["a"][1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("SCALE", 3.0), ("ACT", torch.tanh), ("TABLE", {"a": [1.0, 3.0]}), ("SCALE", True)],
    ids=["constant", "function", "element", "bool for a number"],
)
def test_a_changed_global_is_a_miss_that_names_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    if value is True:
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 1)
    assert not start(ReadsGlobals()).warm
    assert start(ReadsGlobals()).warm
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], name, value)
        changed = start(ReadsGlobals())
        assert not changed.warm
        assert changed.right
        assert f"{__name__}'].{name}" in changed.reasons
    assert start(ReadsGlobals()).warm


def test_a_changed_class_attribute_is_a_miss(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start(Flexible()).warm
    monkeypatch.setattr(Base, "factor", 3.0)
    changed = start(Flexible())
    assert not changed.warm
    assert changed.right
    assert "factor" in changed.reasons


def test_a_changed_method_is_a_miss_though_no_guard_is_on_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start(Flexible()).warm
    monkeypatch.setattr(Settings, "doubled", lambda self: self.scale * 3)
    changed = start(Flexible())
    assert changed.right
    assert not changed.warm
    assert "settings" in changed.reasons


class ReadsEnvironment(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * float(os.environ.get("PCGSVC_TEST_SCALE", "2")))


@pytest.mark.parametrize("first", ["3", None])
def test_an_environment_variable_that_the_forward_reads_counts(
    start: Starter, monkeypatch: pytest.MonkeyPatch, first: str | None
) -> None:
    if first is not None:
        monkeypatch.setenv("PCGSVC_TEST_SCALE", first)
    assert not start(ReadsEnvironment()).warm
    assert start(ReadsEnvironment()).warm
    monkeypatch.setenv("PCGSVC_TEST_SCALE", "5")
    changed = start(ReadsEnvironment())
    assert changed.right
    assert not changed.warm
    assert start(ReadsEnvironment()).warm


def test_a_forward_that_reads_the_environment_minds_a_new_variable_but_not_a_missing_one(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dynamo does not say which variables it looked for and did not find.
    monkeypatch.setenv("PCGSVC_TEST_OTHER", "5")
    assert not start(ReadsEnvironment()).warm
    monkeypatch.delenv("PCGSVC_TEST_OTHER")
    assert start(ReadsEnvironment()).warm
    monkeypatch.setenv("PCGSVC_TEST_NEW", "5")
    changed = start(ReadsEnvironment())
    assert not changed.warm
    assert "PCGSVC_TEST_NEW are set now" in changed.reasons


def test_the_environment_does_not_count_for_a_forward_that_reads_none_of_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start(Flexible()).warm
    monkeypatch.setenv("PCGSVC_TEST_SCALE", "5")
    assert start(Flexible()).warm


class CallsGetenv(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * float(os.getenv("PCGSVC_TEST_SCALE", "2")))


class Hashes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * (hash("abc") % 10))


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (CallsGetenv, r"os.getenv is called, .* use os.environ.get"),
        (Hashes, r"the forward calls hash\(\)"),
    ],
)
def test_what_only_this_process_can_tell_is_not_stored_and_the_reason_is_reported(
    start: Starter, cls: type[nn.Module], reason: str
) -> None:
    for _ in range(2):
        made = start(cls())
        assert made.right
        assert not made.warm
        assert re.search(rf"cannot be stored: .*{reason}", made.reasons)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_replaced_method_of_a_class_of_torchs_is_a_miss(
    start: Starter, monkeypatch: pytest.MonkeyPatch, wraps: bool
) -> None:
    assert not start(Flexible(act=nn.Hardtanh())).warm
    assert start(Flexible(act=nn.Hardtanh())).warm
    for by in (2.0, 3.0):

        def forward(self: nn.Module, x: torch.Tensor, by: float = by) -> torch.Tensor:
            return x * by

        with monkeypatch.context() as patch:
            put = functools.wraps(nn.Hardtanh.forward)(forward) if wraps else forward
            patch.setattr(nn.Hardtanh, "forward", put)
            changed = start(Flexible(act=nn.Hardtanh()))
            assert changed.right
            assert not changed.warm
            assert start(Flexible(act=nn.Hardtanh())).warm
    assert start(Flexible(act=nn.Hardtanh())).warm


def test_a_forward_that_computes_nothing_starts_warm(start: Starter) -> None:
    made = [start(nn.Identity(), example={"input": rows(2)}, dims={"input": 0}) for _ in range(2)]
    assert [each.right for each in made] == [True, True]
    assert [each.report["compile"]["start"] for each in made] == ["cold", "warm"]


# ---- arguments -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def forward(
        self, x: torch.Tensor, by: Any = 1.0, y: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x * (by if isinstance(by, float) else by(2.0))
        return attended(x if y is None else x + y)


def double(value: float) -> float:
    return value * 2


def triple(value: float) -> float:
    return value * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"by": 2.0}, {"by": 3.0}),
        ({"by": double}, {"by": triple}),
        ({"by": functools.partial(pow, 2)}, {"by": functools.partial(pow, 3)}),
        ({"by": 2.0}, {"by": 2.0, "y": torch.ones(2, WIDTH)}),
        ({"y": torch.ones(WIDTH)}, {"y": torch.ones(WIDTH, dtype=torch.float64)}),
        ({"y": torch.ones(WIDTH)}, {"y": torch.ones(1, WIDTH)}),
    ],
    ids=["constant", "function", "partial", "optional tensor", "dtype", "rank"],
)
def test_other_arguments_share_no_program(
    start: Starter, one: dict[str, Any], other: dict[str, Any]
) -> None:
    def begin(extra: dict[str, Any]) -> Start:
        moving = {"x": 0} | ({"y": 0} if "y" in extra and len(extra["y"]) == 2 else {})
        return start(Scaled(), example={"x": rows(2), **extra}, dims=moving)

    assert not begin(one).warm
    second = begin(other)
    assert not second.warm
    assert second.right
    assert begin(one).warm
    assert begin(other).warm


# ---- callables in place of modules ---------------------------------------------------------------


def free(x: torch.Tensor) -> torch.Tensor:
    return attended(x) * 2


def bound_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def inner(x: torch.Tensor) -> torch.Tensor:
        def innermost(y: torch.Tensor) -> torch.Tensor:
            return y * value

        return attended(innermost(x))

    return inner


def two_arguments(x: torch.Tensor, by: float) -> torch.Tensor:
    return attended(x) * by


class Callable1:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x) * self.by

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x) + self.by


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: free, lambda: bound_value(2.0)),
        (lambda: bound_value(2.0), lambda: bound_value(3.0)),
        (
            lambda: functools.partial(two_arguments, by=2.0),
            lambda: functools.partial(two_arguments, by=3.0),
        ),
        (lambda: Callable1(2.0), lambda: Callable1(3.0)),
        (lambda: Callable1(2.0).method, lambda: Callable1(3.0).method),
    ],
    ids=["function", "nested closure", "partial", "object", "method"],
)
def test_a_callable_starts_warm_and_another_one_does_not_run_its_program(
    start: Starter, one: Callable[[], Any], other: Callable[[], Any]
) -> None:
    assert not start(one()).warm
    second = start(other())
    assert second.right
    assert not second.warm
    for factory in (one, other):
        again = start(factory())
        assert again.right
        assert again.warm, again.reasons


# ---- sources -------------------------------------------------------------------------------------

NET = """
import torch
from torch import nn
import helper_of_net
from core_helpers import attended

class Part:
    scale = 2.0
    def apply(self, x):
        return x * self.scale

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
    def forward(self, x):
        x = self.part.apply(self.first(x))
        return attended(helper_of_net.second(x))
    def first(self, x):
        return x + 1
"""
HELPER = """
def second(x):
    return inner(x) * 2
def inner(x):
    return x - 3
"""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("net", "x + 1", "x + 2"),
        ("net", "x * self.scale", "x / self.scale"),
        ("net", "scale = 2.0", "scale = 4.0"),
        ("net", "self.part.apply(self.first(x))", "self.first(self.part.apply(x))"),
        ("net", "    def first", "    # a comment\n    def first"),
        ("helper_of_net", "* 2", "* 4"),
        ("helper_of_net", "x - 3", "x - 4"),
    ],
)
def test_a_changed_source_line_is_a_miss_that_names_the_file(
    start: Starter, sources: Sources, file: str, old: str, new: str
) -> None:
    texts = {"net": NET, "helper_of_net": HELPER}
    assert not start(sources.load("net", NET, helper_of_net=HELPER).Net()).warm
    assert start(sources.again("net").Net()).warm
    assert old in texts[file]
    texts[file] = texts[file].replace(old, new)
    changed = start(sources.load("net", texts["net"], helper_of_net=texts["helper_of_net"]).Net())
    assert changed.right
    assert not changed.warm
    assert f"{file}.py" in changed.reasons
    assert start(sources.again("net").Net()).warm


def test_the_same_sources_in_another_folder_are_the_same_program(
    start: Starter, sources: Sources, tmp_path: Path
) -> None:
    assert not start(sources.load("net", NET, helper_of_net=HELPER).Net()).warm
    with source_folder(tmp_path / "elsewhere") as elsewhere:
        moved = start(elsewhere.load("net", NET, helper_of_net=HELPER).Net())
        assert moved.warm, moved.reasons


def test_other_sources_under_the_same_names_in_another_folder_are_a_miss(
    start: Starter, sources: Sources, tmp_path: Path
) -> None:
    # The first folder is still there, unchanged: its files must not be what is compared.
    assert not start(sources.load("net", NET, helper_of_net=HELPER).Net()).warm
    helper = HELPER.replace("x - 3", "x - 5")
    with source_folder(tmp_path / "elsewhere") as elsewhere:
        other = start(elsewhere.load("net", NET, helper_of_net=helper).Net())
        assert other.right
        assert not other.warm


def test_classes_without_a_file_are_told_apart_by_their_code(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed_in(line: str) -> nn.Module:
        module = types.ModuleType("pcgtest_typed_in")  # as a notebook's __main__
        vars(trace).pop(f"__import_{module.__name__}", None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        text = NET.replace("import helper_of_net", "").replace("helper_of_net.second(x)", line)
        exec(text, vars(module))
        return module.Net()  # type: ignore[no-any-return]

    assert start(typed_in("x * 2")).right
    other = start(typed_in("x * 5"))
    assert other.right
    assert not other.warm
    assert start(typed_in("x * 2")).warm


def test_a_members_value_of_an_enum_counts(start: Starter, sources: Sources) -> None:
    text = """
import enum
from torch import nn
from core_helpers import attended
class Size(enum.Enum):
    SMALL = 2.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = Size.SMALL
    def forward(self, x):
        return attended(x * self.size.value)
"""
    assert not start(sources.load("sized", text).Net()).warm
    changed = start(sources.load("sized", text.replace("2.0", "4.0")).Net())
    assert changed.right
    assert not changed.warm


# ---- custom ops ----------------------------------------------------------------------------------

OWN_OP = """
import torch
from torch import nn
from core_helpers import attended

{lib} = torch.library.Library("{ns}", "FRAGMENT")
{lib}.define("z({schema}) -> Tensor")
{lib}.impl("z", lambda x: {kernel}, "CompositeExplicitAutograd")
torch.library.register_fake("{ns}::z", lambda x: torch.empty_like(x), lib={lib})

class Net(nn.Module):
    def forward(self, x):
        y = torch.ops.{ns}.z(x + 1)
        return attended(y + 1) - 3
"""


def test_an_op_that_is_declared_otherwise_shares_neither_program_nor_piece(
    start: Starter, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = OWN_OP.format(lib="LIB", ns="pcgtest_own", schema="Tensor x", kernel="x * 2")
    module = sources.load("own_op", text)
    first = start(module.Net())
    assert first.right
    assert first.report["compile"]["num_compiled"] == 2
    assert start(module.Net()).warm

    def declared_otherwise(name: str) -> str:
        return op_identity(name) + (" and more" if name == "pcgtest_own::z" else "")

    monkeypatch.setattr(image, "op_identity", declared_otherwise)
    monkeypatch.setattr(artifacts, "op_identity", declared_otherwise)
    second = start(module.Net())
    assert not second.warm
    assert "operator pcgtest_own::z is declared differently" in second.reasons
    # The region that calls the op is compiled anew, the other one is shared.
    assert second.report["compile"]["num_compiled"] == 1
    assert second.report["compile"]["num_loaded"] == 1
    module.LIB._destroy()


def test_the_identity_of_an_op_holds_schema_tags_kernel_and_fake() -> None:
    identities = set()
    for number, (schema, tags, fake) in enumerate(
        [
            ("Tensor x", (), lambda x: torch.empty_like(x)),
            ("Tensor(a!) x", (), lambda x: torch.empty_like(x)),
            ("Tensor x", (torch.Tag.needs_fixed_stride_order,), lambda x: torch.empty_like(x)),
            ("Tensor x", (), lambda x: x.new_empty(x.shape)),
        ]
    ):
        library = torch.library.Library(f"pcgtest_{number}", "DEF")
        library.define(f"z({schema}) -> Tensor", tags=tags)
        torch.library.register_fake(f"pcgtest_{number}::z", fake, lib=library)
        identity = op_identity(f"pcgtest_{number}::z")
        identities.add(identity.replace(f"pcgtest_{number}", ""))
        library._destroy()
    assert len(identities) == 4
    assert op_identity("pcgtest_none::z") == "absent"
    for number, by in enumerate((2, 3)):
        kernel = torch.library.custom_op(f"pcgtest_made_{number}::z", mutates_args=())(doubler(by))
        identities.add(op_identity(f"pcgtest_made_{number}::z").replace(f"_{number}", ""))
        assert kernel is not None
    assert len(identities) == 6


def doubler(by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def two(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def three(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    return two if by == 2 else three


def test_a_changed_kernel_of_a_splitting_op_is_a_miss_that_names_the_op(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shift(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 1)

    pcgsvc.splitting_op("pcgtest::shift", mutates_args=("out",))(shift)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.pcgtest.shift(x * 2, out)
        return out + 1

    assert not start(forward).warm
    assert start(forward).warm

    def other(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 7)

    other.__qualname__ = shift.__qualname__
    pcgsvc.splitting_op("pcgtest::shift", mutates_args=("out",))(other)
    changed = start(forward)
    assert changed.right
    assert not changed.warm
    assert "operator pcgtest::shift is declared differently" in changed.reasons


def test_an_op_that_has_become_a_splitting_op_is_a_miss_that_names_it(start: Starter) -> None:
    library = torch.library.Library("pcgtest", "FRAGMENT")
    library.define("late(Tensor x, Tensor(a!) out) -> ()")
    library.impl("late", late_kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("pcgtest::late", lambda x, out: None, lib=library)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.pcgtest.late(x * 2, out)
        return out + 1

    unsplit = start(forward)
    assert unsplit.report["partition"]["num_boundaries"] == 0
    assert start(forward).warm
    spec = registry.OpSpec(
        "pcgtest::late", late_kernel, None, "", ("out",), Support.NEVER, zeroes_padding=False
    )
    registry._SPECS["pcgtest::late"] = spec
    try:
        split = start(forward)
        assert split.report["partition"]["num_boundaries"] == 1
        assert split.right
        assert not split.warm
        assert "pcgtest::late" in split.reasons
        assert start(forward).warm
    finally:
        del registry._SPECS["pcgtest::late"]
        library._destroy()


def late_kernel(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + 1)


# ---- what has no form ----------------------------------------------------------------------------

MARK = object()


class ComparesObjects(nn.Module):
    def __init__(self, mark: object) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * 2 if self.mark is MARK else x)


@pytest.mark.parametrize(("one", "other"), [(MARK, object()), (object(), MARK)])
def test_objects_that_are_compared_by_identity_share_no_program(
    start: Starter, one: object, other: object
) -> None:
    for mark in (one, other, one):
        assert start(ComparesObjects(mark)).right
    assert start(ComparesObjects(one)).warm


class Named:
    """A key of a dict that has no form."""


class ReadsAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = {Named(): 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * len(self.table))


class HoldsATensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((WIDTH,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * self.scale)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (ReadsAnObject, "Named has no form"),
        (HoldsATensor, "no parameter or buffer"),
    ],
)
def test_a_program_that_read_what_cannot_be_written_down_is_not_stored_and_the_report_says_so(
    start: Starter, factory: Callable[[], nn.Module], words: str
) -> None:
    for _ in range(2):
        done = start(factory())
        assert done.right
        assert not done.warm
        assert "cannot be stored" in done.reasons
        assert words in done.reasons


def test_a_constant_argument_without_a_form_makes_the_program_uncacheable(start: Starter) -> None:
    def forward(x: torch.Tensor, mark: Any) -> torch.Tensor:
        return attended(x * 2 if mark is not None else x)

    done = start(forward, example={"x": rows(2), "mark": Settings(1.0)})
    assert done.right
    assert "cannot be stored: constant arguments" in done.reasons


# ---- forms ---------------------------------------------------------------------------------------


class Text(str):
    __slots__ = ()


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):  # noqa: UP042 - the older spelling is what people have
    A = "a"


FORMS: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, float("inf"), float("nan"), 1j, "", "1", "a",
    b"a", b"", (), [], {}, set(), frozenset(), (1,), [1], {1}, frozenset({1}), {"a": 1},
    {"a": 1, "b": 2}, {"b": 2, "a": 1}, [[1]], [(1,)], (1, 2), (2, 1), range(1), slice(1),
    slice(None, 1, 1), Kind.PLUS, Kind.MINUS, Number.ONE, Word.A, Text("a"), torch.float32,
    torch.float16, torch.device("cpu"), torch.contiguous_format, torch.Size([1]), np.float64(1.0),
    np.int64(1), np.bool_(True), torch.relu, torch.tanh, nn.Linear, closure, defaulted, Kind, int,
    functools.partial(defaulted, by=1.0), functools.partial(defaulted, by=2.0), len, torch, os,
]  # fmt: skip


def test_different_constants_have_different_forms() -> None:
    forms = [json.dumps(canonical(value)) for value in FORMS]
    for at, form in enumerate(forms):
        twins = [FORMS[n] for n, other in enumerate(forms) if other == form and n != at]
        assert not twins, f"{FORMS[at]!r} and {twins} look the same"


def test_a_form_survives_json_and_has_no_address() -> None:
    for value in FORMS:
        form = canonical(value)
        assert json.loads(json.dumps(form)) == form
        assert "0x" not in str(form)


def test_what_has_no_form_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), Settings(1.0), torch.ones(1), np.ones(2), iter([]), torch.Generator()):
        with pytest.raises(NotCanonicalError):
            canonical(value)
    scope = guards._Scope(None, {})
    with pytest.raises(NotCanonicalError, match="holds itself"):
        scope.form("CONSTANT_MATCH", loop)


def test_a_digest_of_code_follows_wrappers_defaults_and_closures_but_not_names_of_files() -> None:
    texts = {
        "plain": "def f(x, k=1):\n    return x + k",
        "constant": "def f(x, k=1):\n    return x + k + 1",
        "default": "def f(x, k=2):\n    return x + k",
        "keyword": "def f(x, *, k=1):\n    return x + k",
        "nested": "def f(x, k=1):\n    return (lambda: x + k)()",
        "nested constant": "def f(x, k=1):\n    return (lambda: x + k + 2)()",
        "wrapper": "import functools\ndef g(x): return x\n"
        "@functools.wraps(g)\ndef f(x): return g(x) * 2",
        "other wrapper": "import functools\ndef g(x): return x\n"
        "@functools.wraps(g)\ndef f(x): return g(x) * 3",
        "cached": "import functools\n@functools.lru_cache\ndef f(x): return x * 3",
        "cached otherwise": "import functools\n@functools.lru_cache\ndef f(x): return x * 4",
    }

    def of(text: str, file: str) -> str:
        space: dict[str, Any] = {"__name__": "m"}
        exec(compile(text, file, "exec"), space)
        return code_digest(space["f"])

    digests = {name: of(text, "/a.py") for name, text in texts.items()}
    assert len(set(digests.values())) == len(texts)
    assert digests == {name: of(text, "/b/c.py") for name, text in texts.items()}


def test_a_digest_of_a_class_covers_methods_properties_and_bases() -> None:
    text = """
import functools
class B:
    def inherited(self): return 1
class C(B):
    K = 1
    def method(self, x=1): return x
    @property
    def prop(self): return 2
    @staticmethod
    def static(): return 3
    @classmethod
    def klass(cls): return 4
    @functools.cached_property
    def cached(self): return 5
    def __call__(self): return 6
"""

    def of(text: str) -> str:
        space: dict[str, Any] = {"__name__": "m"}
        exec(text, space)
        return code_digest(space["C"])

    changes = [f"return {n}" for n in range(1, 7)] + ["x=1", "K = 1", "    @property\n"]
    new = [c.replace("return ", "return 1") for c in changes[:6]] + ["x=2", "L = 1", ""]
    digests = {of(text.replace(a, b, 1)) for a, b in zip(changes, new, strict=True)}
    assert len(digests | {of(text)}) == len(changes) + 1
    assert of(text) == of(text)


def test_a_name_that_is_gone_is_a_difference_not_an_error() -> None:
    guard = StoredGuard("module.gone", "CONSTANT_MATCH", 1)
    assert "module.gone" in str(guards.first_broken([guard], Flexible(), {}))


def test_a_user_module_that_is_called_like_one_of_pythons_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects.is_versioned.cache_clear()
    fake = types.ModuleType("sched")
    fake.__file__ = "/home/me/sched.py"
    monkeypatch.setitem(sys.modules, "sched", fake)
    assert not objects.is_versioned("sched")
    assert objects.is_versioned("os.path")
    objects.is_versioned.cache_clear()
