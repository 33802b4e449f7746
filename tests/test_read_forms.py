"""How a value that tracing read is written down, and what happens to one that cannot be."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from core_helpers import WIDTH, attended, rows
from read_models import Flexible, Kind, Settings, closure, defaulted
from torch import nn
from warm_helpers import Starter

from pcgsvc.forward import objects
from pcgsvc.program import guards
from pcgsvc.program.forms import NotCanonicalError, canonical, code_digest
from pcgsvc.program.guards import StoredGuard

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
    torch.Tensor | None, int | None, int | str, str | int, list[int], list[str], dict[str, int],
    ..., tuple[int, ...], Callable[[int], str], Callable[..., str], Literal["a"], Literal["b"],
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


def test_a_context_variable_is_written_down_with_what_is_in_it() -> None:
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark")
    empty = json.dumps(canonical(mark))
    token = mark.set(1)
    full = json.dumps(canonical(mark))
    mark.reset(token)
    other: contextvars.ContextVar[int] = contextvars.ContextVar("other")
    assert len({empty, full, json.dumps(canonical(other))}) == 3
    assert json.dumps(canonical(mark)) == empty


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


def test_a_digest_of_an_enum_that_is_made_by_a_call_covers_its_values() -> None:
    made = [enum.Enum("E", {"A": one, "B": other}) for one, other in ((1, 2), (2, 1), (1, 2))]
    first, swapped, again = map(code_digest, made)
    assert first == again != swapped


def test_a_name_that_is_gone_is_a_difference_not_an_error() -> None:
    guard = StoredGuard("module.gone", "CONSTANT_MATCH", 1)
    assert "module.gone" in str(guards.first_broken([guard], Flexible(), {}))


def test_reads_that_go_round_a_class_as_dynamo_of_torch_2_11_writes_them_are_evaluated() -> None:
    source = "object.__getattribute__(module, '__class__').__name__ == 'Flexible'"
    guard = StoredGuard(source, "CONSTANT_MATCH", ["bool", True])
    assert guards.first_broken([guard], Flexible(), {}) is None


def test_an_attribute_that_is_missed_as_torch_2_11_names_it_is_stored() -> None:
    missed = guards.Guard(source="module.gone", kind="HASATTR", value=None)
    (stored,), problems = guards.stored_guards([missed], Flexible(), {})
    assert not problems
    assert guards.first_broken([stored], Flexible(), {}) is None
    model = Flexible()
    model.gone = 1
    assert "hasattr(module, 'gone')" in str(guards.first_broken([stored], model, {}))


def test_the_defaults_of_a_dataclass_as_dynamo_of_torch_2_11_reads_them_are_evaluated() -> None:
    model = Flexible()
    model.one, model.two = (dataclasses.make_dataclass("R", [("n", int, n)]) for n in (1, 2))
    for name, broken in (("one", False), ("two", True)):
        source = f"___dataclass_fields(module.{name})[0].default"
        guard = StoredGuard(source, "CONSTANT_MATCH", 1)
        assert (guards.first_broken([guard], model, {}) is not None) == broken


def test_how_a_setting_comes_to_its_value_as_dynamo_of_torch_2_15_writes_it_is_its_value() -> None:
    model, settings = Flexible(), torch._dynamo.config
    model.settings = settings
    entry = "module.settings._config['verbose']"
    read = {entry: settings._config["verbose"], f"{entry}.default": False}
    parts = [guards.Guard(source=s, kind="TYPE_MATCH", value=v) for s, v in read.items()]
    (stored,), problems = guards.stored_guards(parts, model, {})
    assert not problems
    assert stored == StoredGuard("module.settings.verbose", "CONSTANT_MATCH", ["bool", False])
    with settings.patch(verbose=True):
        assert "verbose: stored" in str(guards.first_broken([stored], model, {}))
        changed, problems = guards.stored_guards(parts, model, {})
        assert [guard.form for guard in changed] == [["bool", True]]
    assert guards.first_broken([stored], model, {}) is None


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
