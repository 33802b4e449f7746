"""The walker of object graphs: what it finds, what it does not enter, and its users' views."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH
from torch import nn

from pcgsvc.forward import objects
from pcgsvc.forward.constants import Constants
from pcgsvc.forward.objects import Place, containers_in, places_of, tensors_held
from pcgsvc.forward.process import BUILD_LOCK

WANTED = torch.ones(WIDTH)


class Slotted:
    __slots__ = ("empty", "tensor")

    def __init__(self) -> None:
        self.tensor = WANTED


class SlottedModule(nn.Module):
    __slots__ = ("tensor",)

    def __init__(self) -> None:
        super().__init__()
        self.tensor = WANTED


class InClass:
    table = {"a": WANTED}  # noqa: RUF012 - what the test is about


class InProperty:
    @property
    def tensor(self) -> torch.Tensor:
        return HOLDER[0]


HOLDER = [WANTED]


def closed_over() -> Callable[[], Any]:
    tensor = WANTED
    if False:
        unassigned = 1
    return lambda: (tensor, unassigned)


def by_global() -> Any:
    return [HOLDER for _ in range(1)]


def by_default(a: int, tensor: Any = WANTED, *, b: int = 2) -> Any:
    return a, tensor, b


def by_keyword(*, tensor: Any = WANTED) -> Any:
    return tensor


class Method:
    def __init__(self) -> None:
        self.tensor = WANTED

    def call(self) -> Any:
        return self.tensor


class Cyclic:
    def __init__(self) -> None:
        self.itself = [self]
        self.inner = {"x": (deque([WANTED]),)}


HOLDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "slot": (Slotted, "tensor"),
    "slot of a module": (SlottedModule, "tensor"),
    "class": (InClass, "table['a']"),
    "property": (InProperty, "HOLDER[0]"),
    "closure": (closed_over, "tensor"),
    "global": (lambda: by_global, "HOLDER[0]"),
    "default": (lambda: by_default, "tensor"),
    "keyword default": (lambda: by_keyword, "tensor"),
    "bound method": (lambda: Method().call, "tensor"),
    "partial": (lambda: functools.partial(max, tensor=WANTED), "keywords['tensor']"),
    "deep and cyclic": (Cyclic, "inner['x'][0][0]"),
    "lru_cache": (lambda: functools.lru_cache(by_global), "HOLDER[0]"),
}


@pytest.mark.parametrize("case", HOLDERS)
def test_a_tensor_is_found_by_name_in_whatever_holds_it(case: str) -> None:
    make, name = HOLDERS[case]
    root = make()
    assert [key for key, tensor in tensors_held(root).items() if tensor is WANTED] == [name]


@pytest.mark.parametrize("case", HOLDERS)
def test_a_place_gives_its_value_until_something_else_is_put_there(case: str) -> None:
    places = places_of(HOLDERS[case][0](), lambda tensor: tensor is WANTED)
    assert places
    for place in places:
        assert place.get is None or place.get(place.key) is place.value


def test_a_replaced_value_shows_at_its_place() -> None:
    holder: dict[str, Any] = {"list": [WANTED], "slot": Slotted()}
    places = places_of(holder, lambda tensor: tensor is WANTED)
    holder["list"].clear()
    del holder["slot"].tensor

    def is_gone(place: Place) -> bool:
        return place.get is not None and place.get(place.key) is not place.value

    assert sorted(p.name for p in places if is_gone(p)) == ["['list'][0]", "['slot'].tensor"]


def test_what_holds_no_tensors_of_a_model_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    parts_of = objects.parts_of

    def spy(value: Any, name: str = "") -> Any:
        entered.append(value)
        return parts_of(value, name)

    monkeypatch.setattr(objects, "parts_of", spy)
    skipped = [logging.getLogger(), threading.Event(), BUILD_LOCK, torch, Slotted, "text", 1]
    assert tensors_held({"skipped": skipped}) == {}
    assert [type(value) for value in entered] == [dict, list]


def test_a_module_s_state_is_its_registers_attributes_and_their_containers() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module.table, module.names = {"a": 1}, ["x"]  # type: ignore[assignment]
    names = [name for name, held in containers_in(module) if held is not None]
    assert {"", "0.", "table.", "names"} <= set(names)
    held = [held for _, held in containers_in(module)]
    assert all(any(h is wanted for h in held) for wanted in (vars(module), module.table))


class Count(int):
    unit = "rows"


class Word(str):
    __slots__ = ()
    language = "en"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Count(1), Count(2)),
        (Word("a"), Word("b")),
        (deque([1], 2), deque([1], 3)),
        ({"a": [1]}, {"a": [True]}),
        (functools.partial(max, 1), functools.partial(max, 2)),
    ],
    ids=repr,
)
def test_a_constant_is_its_value_its_kind_and_its_attributes(one: Any, other: Any) -> None:
    constants = Constants({"x": one})
    assert constants.is_same("x", one)
    assert not constants.is_same("x", other)
