"""Callables, source files and operators decide which stored program fits."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import attended
from torch import nn
from warm_helpers import Sources, Starter, source_folder

import pcgsvc
from pcgsvc.cache import pieces
from pcgsvc.cache import programs as artifacts
from pcgsvc.ops import registry
from pcgsvc.ops.support import Support
from pcgsvc.program import image
from pcgsvc.program.image import op_identity
from pcgsvc.trace import dynamo as trace

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
    monkeypatch.setattr(pieces, "op_identity", declared_otherwise)
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
