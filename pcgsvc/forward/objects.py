"""What a callable holds, however deep: the tensors, and the places in which they can be replaced.

In: a module, a function or an object. Out: places and tensors. Looks at attributes, containers,
closures, globals and defaults, and runs none of the caller's code. Knows nothing of runners.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_MAX_DEPTH = 50
_MAX_OBJECTS = 200_000
"""How many objects are looked into; what lies deeper or comes later is not found."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CODE = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)
_NOT_STATE = ("pcgsvc", "logging", "threading", "io", "_io", "inspect", "contextvars")
"""Packages whose objects hold none of a model's tensors, or change them by themselves."""
_LIBRARIES = (*_NOT_STATE, "torch", "builtins", "abc", "typing", "collections", "numpy")
"""Packages whose classes hold none."""
_SLOTS_OF_MODULES = ("_parameters", "_buffers", "_modules")


class Place(NamedTuple):
    """Where something lies: `get(key) is value` as long as nobody has replaced it."""

    get: Callable[[Any], Any] | None
    """None: it cannot be replaced there, as in a tuple."""
    key: Any
    value: Any
    name: str
    module: torch.nn.Module | None = None
    """The module of which it is a parameter, buffer, submodule or attribute."""
    is_told: bool = False
    """Whether torch calls its registration hooks when something is put there."""


def places_of(root: Any, wanted: Callable[[torch.Tensor], bool]) -> list[Place]:
    """Return every place on a way from `root` to a tensor that is wanted."""
    search = _Search(wanted)
    search.reaches(root, "", 0)
    return search.places


def tensors_held(root: Any) -> dict[str, torch.Tensor]:
    """Return all tensors that `root` holds, each once, by name."""
    found: dict[int, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}

    def add(tensor: torch.Tensor) -> bool:
        found.setdefault(id(tensor), tensor)
        return True

    for place in places_of(root, add):
        tensor = found.pop(id(place.value), None)
        if tensor is not None:
            name = place.name
            numbered = (f"{place.name} ({at})" for at in itertools.count(2))
            while name in names:
                name = next(numbered)
            names[name] = tensor
    return names


class _Search:
    """Goes through what an object holds, each thing once."""

    def __init__(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        self._wanted = wanted
        self._seen: dict[int, tuple[Any, bool]] = {}
        """Per identity: the object, which is kept so that the number stays its own, and whether a
        wanted tensor was found in it."""
        self.places: list[Place] = []

    def reaches(self, value: Any, name: str, depth: int) -> bool:
        """Whether a wanted tensor lies in `value`; notes the places on the way."""
        if isinstance(value, torch.Tensor):
            return self._wanted(value)
        if isinstance(value, (*_ATOMS, *_CODE)) or depth > _MAX_DEPTH:
            return False
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if len(self._seen) > _MAX_OBJECTS:
            return False
        self._seen[id(value)] = (value, False)
        found = False
        for place in self._inside(value, name):
            if self.reaches(place.value, place.name, depth + 1):
                self.places.append(place)
                found = True
        self._seen[id(value)] = (value, found)
        return found

    def _inside(self, value: Any, name: str) -> Iterator[Place]:
        """Yield what one object holds itself."""
        if isinstance(value, torch.nn.Module):
            yield from _of_module(value, name)
            yield from self._of_class(type(value), name)
        elif isinstance(value, dict):
            for key, item in list(dict.items(value)):
                yield Place(functools.partial(dict.get, value), key, item, f"{name}[{key!r}]")
        elif isinstance(value, (list, deque)):
            for at, item in enumerate(list(value)):
                yield Place(functools.partial(_item, value), at, item, f"{name}[{at}]")
        elif isinstance(value, (tuple, set, frozenset)):
            for at, item in enumerate(list(value)):
                yield Place(None, at, item, f"{name}[{at}]")
        elif isinstance(value, types.FunctionType):
            yield from _of_function(value)
        elif isinstance(value, types.MethodType):
            yield Place(None, None, value.__self__, name)
            yield Place(None, None, value.__func__, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                yield Place(None, None, part, name)
        if type(value).__module__.partition(".")[0] not in _NOT_STATE and not isinstance(
            value, (torch.nn.Module, types.FunctionType, types.MethodType)
        ):
            yield from _of_object(value, f"{name}." if name else "")
            yield from self._of_class(type(value), name)

    def _of_class(self, cls: type, name: str) -> Iterator[Place]:
        """Yield the attributes and methods of a class, once."""
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in _LIBRARIES or id(base) in self._seen:
                continue
            self._seen[id(base)] = (base, False)
            members = vars(base)
            for key, member in list(members.items()):
                if key.startswith("__") and not isinstance(member, types.FunctionType):
                    continue
                if isinstance(member, property):
                    member = member.fget
                if isinstance(member, (classmethod, staticmethod)):
                    member = member.__func__
                get = members.get if member is members.get(key) else None
                yield Place(get, key, member, f"{name}.{key}" if name else key)


def _of_module(module: torch.nn.Module, name: str) -> Iterator[Place]:
    inside = f"{name}." if name else ""
    for slot in _SLOTS_OF_MODULES:
        holder = vars(module).get(slot) or {}
        for key, item in list(holder.items()):
            yield Place(holder.get, key, item, inside + key, module, slot != "_buffers")
    attributes = vars(module)
    for key, item in list(attributes.items()):
        if key not in _SLOTS_OF_MODULES:
            yield Place(attributes.get, key, item, inside + key, module)


def _of_object(value: Any, inside: str) -> Iterator[Place]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for key, item in list(attributes.items()):
            yield Place(attributes.get, key, item, f"{inside}{key}")
    for cls in type(value).__mro__:
        for key, member in list(vars(cls).items()):
            if isinstance(member, types.MemberDescriptorType):
                get = functools.partial(_attribute, value)
                yield Place(get, key, get(key), f"{inside}{key}")


def _of_function(function: types.FunctionType) -> Iterator[Place]:
    """Yield closure cells, defaults, and the globals that are named; of those no functions."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        get = functools.partial(_content, cell)
        yield Place(get, name, get(name), name)
    for name in dict.fromkeys(_names(function.__code__)):
        value = function.__globals__.get(name)
        if not isinstance(value, types.FunctionType):
            yield Place(function.__globals__.get, name, value, name)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Place(None, name, value, name)
    given = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    for name, value in zip(names, given, strict=True):
        yield Place(None, name, value, name)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code looks up, in the functions inside it as well."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _item(values: Any, at: int) -> Any:
    return values[at] if at < len(values) else None


def _content(cell: types.CellType, name: str) -> Any:
    """Return what lies in a cell; None if nothing does."""
    del name
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name, None)


def tensors_of(module: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, tied ones under their first name only."""
    if not isinstance(module, torch.nn.Module):
        return {}
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    return named | dict(module.named_buffers())
