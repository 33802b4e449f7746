"""Find the tensors reachable from a callable, and the places where they can be replaced.

In: any object. Out: what it holds, one `Place` each; tensors by name. Looks at attributes, slots,
containers, closures, globals, defaults and class members, and runs none of the caller's code.

All who look into the caller's objects use this one walker: `places_of` (tensors), `containers_in`
(attributes to put back after tracing), `forward.constants` (states to compare) and `program.forms`
(code to digest).
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pcgsvc import torch_private
from pcgsvc.ops.registry import find_spec

# ---- what is not entered -------------------------------------------------------------------------

ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Hold nothing."""
CODE = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)
"""Decided by source files and versions. A class is entered through its instances only."""
_NO_TENSORS = ("pcgsvc", "logging", "threading", "io", "_io", "inspect", "contextvars")
"""Packages whose objects hold no tensor of a model: only the search for tensors skips them, since
a runner is reachable from its own forward, and a logger from every other."""
_NOT_USERS = ("pcgsvc", "typing_extensions", "_pytest")
"""Packages whose code decides nothing of what a forward computes. Every `assert` of a test module
reads a global of pytest's, from which all tests are reachable."""
_MAX_DEPTH = 50
_MAX_OBJECTS = 200_000
"""How many objects the search for tensors enters; deeper or later ones are not found."""


@functools.cache
def is_versioned(module: str) -> bool:
    """Whether a module is torch's, numpy's or Python's own, so that a version says all of it."""
    top = module.split(".")[0]
    if top not in sys.stdlib_module_names:
        return top in ("torch", "numpy")
    # A user's script folder comes first on the path: their `types.py` is no part of Python.
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or os.path.realpath(file).startswith(_STDLIB)


_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


def own_bases(cls: type) -> list[type]:
    """Return a class and its bases, nearest first, without those that a version says all of."""
    return [base for base in cls.__mro__ if not is_versioned(base.__module__)]


# ---- what one object holds -----------------------------------------------------------------------


class Place(NamedTuple):
    """Where an object is held: `get(key) is value` until it is replaced there."""

    get: Callable[[Any], Any] | None
    """None: it cannot be replaced there, as in a tuple."""
    key: Any
    value: Any
    name: str
    module: torch.nn.Module | None = None
    """The module of which it is a parameter, buffer, submodule or attribute."""
    has_hook: bool = False
    """Whether torch calls its registration hooks when something is put there."""


def parts_of(value: Any, name: str = "") -> Iterator[Place]:
    """Yield what one object holds by itself: not what its class does."""
    if isinstance(value, types.FunctionType):
        yield from reads_of(value, name)
    elif isinstance(value, types.MethodType):
        yield Place(None, None, value.__self__, name)
        yield Place(None, None, value.__func__, name)
    else:
        yield from items_of(value, name)
        yield from attributes_of(value, f"{name}." if name else "")


def items_of(value: Any, name: str = "") -> Iterator[Place]:
    """Yield the items of a container; of anything else nothing."""
    if isinstance(value, types.MappingProxyType):
        yield from (Place(value.get, k, v, f"{name}[{k!r}]") for k, v in list(value.items()))
    elif isinstance(value, dict):
        for key, item in list(dict.items(value)):
            yield Place(functools.partial(dict.get, value), key, item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        get = functools.partial(_item, value) if isinstance(value, (list, deque)) else None
        for at, item in enumerate(list(value)):
            yield Place(get, at, item, f"{name}[{at}]")


def attributes_of(value: Any, inside: str = "") -> Iterator[Place]:
    """Yield an object's attributes and slots; of a module, what it registers goes by its name."""
    module = value if isinstance(value, torch.nn.Module) else None
    for slot, holder in _holders(value):
        for key, item in list(holder.items()):
            if slot or module is None or key not in _REGISTERS:
                has_hook = _REGISTERS.get(slot, False)
                yield Place(holder.get, key, item, f"{inside}{key}", module, has_hook)
    for cls in type(value).__mro__:
        for key, member in list(vars(cls).items()) if cls not in _NO_SLOTS else ():
            if isinstance(member, types.MemberDescriptorType):
                get = functools.partial(_slot, value, member)
                if get(key) is not member:
                    yield Place(get, key, get(key), f"{inside}{key}")


_NO_SLOTS = (object, torch.nn.Module)
"""Classes of many members, none of them a slot."""


def cells_of(function: Callable[..., Any]) -> Iterator[Place]:
    """Yield the variables in a function's closure that are assigned."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    for name, cell in zip(code.co_freevars, closure, strict=True) if code and closure else ():
        get = functools.partial(_content, cell)
        if get(name) is not cell:
            yield Place(get, name, get(name), name)


def containers_in(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield what holds the Python state of a module tree, with the name that its entries begin by.

    That is each module's attributes, registered tensors and submodules, and the dicts, lists and
    sets among the attributes. A list's or set's name is whole.
    """
    for path, sub in module.named_modules() if isinstance(module, torch.nn.Module) else ():
        inside = f"{path}." if path else ""
        yield from ((inside, holder) for _, holder in _holders(sub))
        for key, value in list(vars(sub).items()):
            if key not in _REGISTERS and isinstance(value, (dict, list, set)):
                yield f"{inside}{key}{'.' if isinstance(value, dict) else ''}", value


_REGISTERS = {"_parameters": True, "_buffers": False, "_modules": True}
"""Where a module registers things, and whether torch's registration hooks tell of them. There are
hooks for buffers too, but a forward may assign those, and Dynamo would trace the hook."""


def _holders(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dicts that hold an object's attributes, a module's registers by their names."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return
    if isinstance(value, torch.nn.Module):
        yield from ((slot, attributes.get(slot) or {}) for slot in _REGISTERS)
    yield "", attributes


def reads_of(function: types.FunctionType, path: str) -> Iterator[Place]:
    """Yield closure, defaults, and what its names lead to: globals, and members of modules."""
    yield from cells_of(function)
    home = function.__globals__.get("__name__")
    inside = f"{home}." if path.startswith(f"{home}.") else ""  # found in another module
    names = list(dict.fromkeys(_names(function.__code__)))
    for name in names:
        if name in function.__globals__:
            yield from _named(function.__globals__, name, f"{inside}{name}", names, set())
        else:  # it may be imported inside the function
            yield from _named(sys.modules, name, name, names, set())
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    given = {**(function.__kwdefaults__ or {}), **dict(zip(arguments, defaults, strict=True))}
    yield from (Place(None, name, value, name) for name, value in given.items())


def _named(
    holder: Mapping[str, Any], key: str, name: str, names: Sequence[str], seen: set[int]
) -> Iterator[Place]:
    """Yield what `holder` has under `key`; of a module or class, its members called `names`."""
    value = holder.get(key)
    if isinstance(value, (types.FunctionType, *CODE)):
        if id(value) in seen or is_not_users(value):
            return
        seen.add(id(value))
    if isinstance(value, (type, types.ModuleType)):
        name = value.__name__ if isinstance(value, types.ModuleType) else name
        members = vars(value)
        for member in names:
            if member in members:
                yield from _named(members, member, f"{name}.{member}", names, seen)
    else:
        yield Place(holder.get, key, value, name)


def is_not_users(code: Any) -> bool:
    """Whether a function, class or module is torch's, Python's or ours: a version says all of it.

    Of a function, where its globals are counts: functools.wraps copies `__module__`.
    """
    if isinstance(code, types.FunctionType):
        home = code.__globals__.get("__name__")
    elif isinstance(code, (type, types.ModuleType)):
        home = code.__name__ if isinstance(code, types.ModuleType) else code.__module__
    else:
        return isinstance(code, types.BuiltinFunctionType)
    return is_versioned(home or "?") or (home or "").partition(".")[0] in _NOT_USERS


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code looks up, as text too (`getattr`), in functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _item(values: Any, at: int) -> Any:
    return values[at] if at < len(values) else None


def _content(cell: types.CellType, name: str) -> Any:
    """Return what a cell holds; itself if it is not assigned."""
    del name
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _slot(value: Any, member: types.MemberDescriptorType, name: str) -> Any:
    """Return what a slot holds; the slot itself if it is not assigned."""
    del name
    try:
        return member.__get__(value)
    except AttributeError:
        return member


# ---- tensors -------------------------------------------------------------------------------------


def tensors_of(module: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, tied ones under their first name only.

    Of a DTensor it is this process's part.
    """
    if not isinstance(module, torch.nn.Module):
        return {}
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: torch_private.local_tensor(tensor) for name, tensor in named}


def tensors_held(root: Any) -> dict[str, torch.Tensor]:
    """Return all tensors reachable from `root`, each once, by name."""
    found: dict[int, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}

    def add(tensor: torch.Tensor) -> bool:
        found.setdefault(id(tensor), tensor)
        return True

    for place in places_of(root, add):
        tensor = found.pop(id(place.value), None)
        if tensor is not None:
            numbered = (f"{place.name} ({at})" for at in itertools.count(2))
            name = next(n for n in itertools.chain([place.name], numbered) if n not in names)
            names[name] = tensor
    return names


def places_of(root: Any, wanted: Callable[[torch.Tensor], bool]) -> list[Place]:
    """Return every place on a way from `root` to a tensor that is wanted."""
    search = _Search(wanted)
    search.reaches(root, "", 0)
    return search.places


def global_places(wanted: set[int]) -> list[Place]:
    """Return the globals of imported modules, and items of such, that have one of these identities.

    No way of the caller's leads to them: an attribute or a closure may hold a Python module, whose
    members are not looked through.
    """
    found: list[Place] = []
    for name, module in list(sys.modules.items()) if wanted else ():
        if isinstance(module, types.ModuleType) and not is_not_users(module):
            for key, value in list(vars(module).items()):
                items = list(value.values()) if type(value) is dict else value
                inside = map(id, items) if type(items) in (list, tuple) else ()
                if wanted.isdisjoint([id(value), *inside]):
                    continue
                own = Place(vars(module).get, key, value, f"{name}.{key}")
                found += [own, *(p for p in items_of(value, own.name) if id(p.value) in wanted)]
    return found


class _Search:
    """Enters each object once."""

    def __init__(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        self._wanted = wanted
        self._seen: dict[int, tuple[Any, bool]] = {}
        """Per identity: the object, which is kept so that the number stays its own, and whether a
        wanted tensor was found in it."""
        self.places: list[Place] = []

    def reaches(self, value: Any, name: str, depth: int) -> bool:
        """Whether a wanted tensor is reachable from `value`; notes the places on the way."""
        if isinstance(value, torch.Tensor):
            part = torch_private.local_tensor(value)
            if part is not value and self._wanted(part):
                get = functools.partial(getattr, value)
                self.places.append(Place(get, "_local_tensor", part, name))
                return True
            return self._wanted(value)
        if isinstance(value, (*ATOMS, *CODE)) or depth > _MAX_DEPTH:
            return False
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        own = isinstance(value, torch.nn.Module) or not _has_no_tensors(type(value))
        if len(self._seen) > _MAX_OBJECTS or not own:
            return False
        self._seen[id(value)] = (value, False)
        found = False
        for place in itertools.chain(parts_of(value, name), self._of_class(type(value), name)):
            if self.reaches(place.value, place.name, depth + 1):
                self.places.append(place)
                found = True
        self._seen[id(value)] = (value, found)
        return found

    def _of_class(self, cls: type, name: str) -> Iterator[Place]:
        """Yield the attributes and methods of a class, once."""
        for base in own_bases(cls):
            if id(base) in self._seen or _has_no_tensors(base):
                continue
            self._seen[id(base)] = (base, False)
            members = vars(base)
            for key, member in list(members.items()):
                if isinstance(member, types.FunctionType) or not key.startswith("__"):
                    yield Place(members.get, key, member, f"{name}.{key}" if name else key)


def _has_no_tensors(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _NO_TENSORS


def tensors_of_op(op: str) -> dict[str, torch.Tensor]:
    """Return the tensors that the Python functions behind an operator reach, by path."""
    spec = find_spec(op)
    if spec is None and "::" not in op:  # a Python function at which `breakable` breaks
        return {}
    functions = torch_private.op_functions(op) if spec is None else [spec.kernel]
    return {n: t for f in functions if f is not None for n, t in tensors_held(f).items()}
