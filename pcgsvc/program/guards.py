"""Dynamo guards that must still hold on a warm start.

In: the guards of a trace. Out: `StoredGuard`s of JSON types, and the first that no longer holds.
Knows nothing of keys or stores.

Dynamo guards every attribute, closure value and global that decided the graph, in Python notation
over `module` (the model), `constants` (constant arguments) and `G` (globals). Not stored are guards
on tensors, whose names, shapes and ties are part of the program's key, and on anything of torch,
the standard library or this package, whose versions are.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.forward.objects import is_versioned
from pcgsvc.ops.collectives import rank_and_world
from pcgsvc.program.forms import (
    NotCanonicalError,
    canonical,
    group_form,
    identity,
    name_of,
    reads_ranks,
)
from pcgsvc.trace.graph import Guard

_NOT_STORED = {
    "TENSOR_MATCH": "the module's tensors are in the key, ties included; others: `_is_foreign`",
    "DUPLICATE_INPUT": "ties of tensors and modules are in the key; objects: `_aliases`",
    "NO_TENSOR_ALIASING": "inputs are the runner's own buffers",
    "STORAGE_OVERLAPPING": "inputs are the runner's own buffers",
    "SHAPE_ENV": "replaced by the size predicate",
    "WEAKREF_ALIVE": "nothing is held weakly",
    "GRAD_MODE": "a runner fixes the grad mode",
    "AUTOGRAD_SAVED_TENSORS_HOOKS": "a runner fixes the grad mode",
    "GLOBAL_STATE": "numerics flags are in the key",
    "DETERMINISTIC_ALGORITHMS": "numerics flags are in the key",
    "TORCH_FUNCTION_STATE": "a runner fixes it",
    "DEFAULT_DEVICE": "numerics flags are in the key",
}
ENVIRONMENT = "ENVIRONMENT"
"""Kind of the guard on `os.environ` as a whole; not one of Dynamo's."""
_Environ = type(os.environ)
_RANK = "rank_and_world"
"""A name of our own in guards: which of how many processes this one is, or None."""
_FIRST = "___first_places"
"""A name of our own in guards: `_first_places`."""
_ROOTS = ("names", "places", "tensors", "traced")
"""Locals of our own traced function."""


@dataclasses.dataclass(frozen=True)
class StoredGuard:
    """One guard as it is stored."""

    source: str
    """Python notation over `module`, `constants` and `G`."""
    kind: str
    """Dynamo's guard type, which says what of the value is compared."""
    form: Any
    """What is compared, in JSON types."""


def stored_guards(
    guards: Sequence[Guard], module: Any, constants: Mapping[str, Any]
) -> tuple[list[StoredGuard], list[str]]:
    """Return the guards to store, and the reasons why others cannot be.

    Any of the latter (a value without a canonical form, or one that cannot be found again) makes
    the program uncacheable.
    """
    found: dict[tuple[str, str], StoredGuard] = {}
    problems: list[str] = []
    scope = _Scope(module, constants)
    pythons = tuple(guard.source for guard in guards if _is_namedtuple_scope(guard.value))
    # Its form says all of a group, and the names in it are this process's own.
    groups = tuple(f"{guard.source}." for guard in guards if group_form(guard.value) is not None)
    named = [
        (guard.source, torch_private.setting_source(guard.source, guard.value)) for guard in guards
    ]
    settings = {entry: setting for entry, setting in named if setting is not None}
    for guard in [*guards, *_aliases(guards, scope), *_place(guards, scope)]:
        key = (guard.source, guard.kind)
        reason = _of_this_process(guard)
        if reason is not None:
            problems.append(reason)
            continue
        if key in found or not _is_users(guard.source):
            continue
        if guard.kind in _NOT_STORED and not _is_foreign(guard, scope):
            continue
        if guard.source.startswith(pythons + groups):
            continue
        if isinstance(guard.value, _Environ):
            # What was looked for and not there has no guard: no further variable may be set.
            guard = Guard(source=guard.source, kind=ENVIRONMENT, value=guard.value)
        try:
            if guard.kind == "HASATTR" and guard.value is None:
                guard = _has(guard.source, scope)
            stored = StoredGuard(guard.source, guard.kind, scope.form(guard.kind, guard.value))
            again = scope.form(guard.kind, scope.read(guard.source))
            if again != stored.form:
                raise NotCanonicalError("gives another value when evaluated again")
            for entry, setting in settings.items():
                if entry in guard.source:
                    form = scope.form("CONSTANT_MATCH", scope.read(setting))
                    stored = StoredGuard(setting, "CONSTANT_MATCH", form)
        except NotCanonicalError as error:
            problems.append(f"{guard.source}: {error}")
            continue
        found[stored.source, stored.kind] = stored
    return list(found.values()), problems


def first_broken(
    guards: Sequence[StoredGuard], module: Any, constants: Mapping[str, Any]
) -> str | None:
    """Evaluate stored guards; return the first that does not hold, with both values, or None."""
    scope = _Scope(module, constants)
    for guard in guards:
        try:
            now = scope.form(guard.kind, scope.read(guard.source))
        except NotCanonicalError as error:
            return f"{guard.source}: {error}"
        if guard.kind == ENVIRONMENT:
            now, more = guard.form, sorted(set(now) - set(guard.form))
            if more:
                return f"{guard.source}: {', '.join(more[:8])} are set now"
        if now != guard.form:
            return f"{guard.source}: stored {_short(guard.form)}, now {_short(now)}"
    return None


def _is_foreign(guard: Guard, scope: _Scope) -> bool:
    """Whether a guard is on a tensor that the key does not have, or has under another name."""
    if guard.kind not in ("TENSOR_MATCH", "DUPLICATE_INPUT"):
        return False
    if not isinstance(guard.value, torch.Tensor) or not _is_users(guard.source):
        return False
    is_own = guard.source.startswith("module") and _REGISTERED.search(guard.source) is not None
    return not (is_own and id(guard.value) in scope.registered)


_REGISTERED = re.compile(r"\._(parameters|buffers)\['[^']*'\]$")


def _place(guards: Sequence[Guard], scope: _Scope) -> Iterator[Guard]:
    """Yield a guard on rank and world size, if the forward may have read them: no other is made."""
    if any(reads_ranks(guard.value) for guard in guards):
        yield Guard(source=_RANK, kind="CONSTANT_MATCH", value=scope.read(_RANK))


def _of_this_process(guard: Guard) -> str | None:
    """Return why a guard cannot be evaluated in another process, or None."""
    if guard.value is hash:
        return "the forward calls hash(), which gives text another number in every process"
    if any(guard.value is function for function in _GETENV) and _is_users(guard.source):
        return (
            f"{guard.source} is called, and torch does not say which variable it read: use "
            "os.environ.get"
        )
    return None


_GETENV = (os.getenv, os.getenvb)


def _has(source: str, scope: _Scope) -> Guard:
    """Return a guard on whether an attribute is there; torch 2.11 names the attribute."""
    owner, _, name = source.rpartition(".")
    text = f"hasattr({owner}, {name!r})"
    return Guard(source=text, kind="CONSTANT_MATCH", value=scope.read(text))


def _is_namedtuple_scope(value: Any) -> bool:
    """Whether a value is the globals of a named tuple's `__new__`: Python's own, without a name."""
    name = value.get("__name__") if type(value) is dict else None
    return isinstance(name, str) and name.startswith("namedtuple_") and "_tuple_new" in value


def _aliases(guards: Sequence[Guard], scope: _Scope) -> Iterator[Guard]:
    """Yield guards on which objects, or tensors, are one and which are two: code may ask by `is`.

    Where Dynamo guards on that at all, it names one side only.
    """
    places: dict[type, dict[str, Any]] = {}
    for guard in guards:
        cls = type(guard.value)
        plain = not isinstance(guard.value, (*_NO_ALIAS, torch.Tensor, torch.nn.Module))
        is_object = guard.kind in ("TYPE_MATCH", "DUPLICATE_INPUT") and plain
        if is_object and _is_users(guard.source):
            places.setdefault(cls, {})[guard.source] = guard.value
    for found in places.values():
        for (one, a), (other, b) in itertools.combinations(sorted(found.items()), 2):
            yield Guard(source=f"{one} is {other}", kind="CONSTANT_MATCH", value=a is b)
    tensors = {g.source: g.value for g in guards if _is_foreign(g, scope)}
    if len(tensors) > 1:  # of all at once: there may be hundreds, such as the parts of a KV cache
        source, value = f"{_FIRST}(({', '.join(tensors)}))", _first_places([*tensors.values()])
        yield Guard(source=source, kind="CONSTANT_MATCH", value=value)


def _first_places(values: Sequence[Any]) -> list[int]:
    """Return for each value the place where the very object is met first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(value), at) for at, value in enumerate(values)]


_NO_ALIAS = (dict, list, set, tuple, type, types.FunctionType, types.ModuleType, enum.Enum)


def _is_users(source: str) -> bool:
    if ".environ" in source:  # os is Python's; its variables are the user's
        return True
    root = source.removeprefix("G['").split("'")[0].split("[")[0].split(".")[0].split("(")[-1]
    if torch_private.through_torch(source):
        return False
    if source.startswith("G['"):
        module = root.removeprefix("__import_").split("_dot_")[0]
        # What a user's module holds counts, its imports of others do not.
        return not (is_versioned(module) or module == "pcgsvc" or root.startswith("__builtins"))
    return bool(source) and root not in _ROOTS


# ---- evaluation ----------------------------------------------------------------------------------


class _Globals(dict[str, Any]):
    """Dynamo's `G`: the root function's globals and aliases of the modules that it entered."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__import_"):
            module = name.removeprefix("__import_").replace("_dot_", ".")
            if module in sys.modules:  # never imported here: the name may come from a stored file
                return sys.modules[module]
            raise KeyError(f"module {module} is not imported")
        raise KeyError(name)


class _Scope:
    def __init__(self, module: Any, constants: Mapping[str, Any]) -> None:
        self._names: dict[str, Any] = {
            "module": module,
            "constants": dict(constants),
            "G": _Globals(),
            _RANK: rank_and_world(),
            _FIRST: _first_places,
            "___dataclass_fields": dataclasses.fields,  # Dynamo's word for it
            "__builtins__": {
                t.__name__: t for t in (object, type, dict, list, tuple, len, hasattr)
            },
        }

        self._classes: dict[type, list[Any]] = {}
        self.registered: dict[int, str] = {}
        """Names of the module's parameters and buffers by identity."""
        if isinstance(module, torch.nn.Module):
            named = itertools.chain(module.named_parameters(), module.named_buffers())
            self.registered = {id(tensor): name for name, tensor in named}

    def read(self, source: str) -> Any:
        """Evaluate one source; it came from Dynamo, or from a stored program that is trusted."""
        try:
            return eval(source, self._names)
        except Exception as error:
            raise NotCanonicalError(f"cannot be read ({type(error).__name__}: {error})") from error

    def form(self, kind: str, value: Any) -> Any:
        """Return what a guard of this kind compares, in JSON types."""
        if isinstance(value, torch.Tensor) and kind in ("TENSOR_MATCH", "DUPLICATE_INPUT"):
            return [*_tensor_form(value), self.registered.get(id(value))]
        if kind in ("TYPE_MATCH", "NN_MODULE", "CLASS_MATCH"):
            cls = value if kind == "CLASS_MATCH" else type(value)
            if isinstance(cls, type):
                if cls not in self._classes:
                    self._classes[cls] = identity(cls)
                if kind == "TYPE_MATCH" and (names := _attribute_names(value)):
                    return [self._classes[cls], names]
                return self._classes[cls]
        try:
            return _form(kind, value)
        except RecursionError:
            raise NotCanonicalError("it holds itself") from None


def _tensor_form(tensor: torch.Tensor) -> list[Any]:
    """Return what a forward may read of a tensor besides its values."""
    form: list[Any] = [
        name_of(type(tensor)),
        str(tensor.dtype),
        list(tensor.shape),
        tensor.device.type,
    ]
    form += [str(tensor.layout), tensor.requires_grad]
    if tensor.layout is torch.strided:
        form += [list(tensor.stride()), tensor.storage_offset()]
    return form


def _attribute_names(value: Any) -> list[str]:
    """Return what `vars` lists of a plain object; Dynamo guards what is read of it, not the rest.

    Without what comes and goes by itself.
    """
    if isinstance(value, (torch.nn.Module, torch.Tensor, type, types.FunctionType)):
        return []
    names = list(getattr(value, "__dict__", {}))
    cls = type(value)
    return [n for n in names if not isinstance(vars(cls).get(n), functools.cached_property)]


def _form(kind: str, value: Any) -> Any:
    if kind == ENVIRONMENT:
        return sorted(value)
    if kind in ("SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN", "EMPTY_NN_MODULE_HOOKS_DICT"):
        return [name_of(type(value)), len(value)]
    if kind in ("DICT_KEYS_MATCH", "DICT_CONTAINS", "DICT_NOT_CONTAINS"):
        return [canonical(k) for k in value]
    if kind in ("SET_CONTAINS", "SET_NOT_CONTAINS"):
        return canonical(value)
    if kind in ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"):
        return sorted(getattr(value, "__dict__", {}))
    if kind in ("ID_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "CLASS_MATCH"):
        return identity(value)
    return canonical(value)


def _short(form: Any) -> str:
    text = str(form)
    return text if len(text) <= 80 else f"{text[:77]}…"
