"""What tracing read and took for constant: written down, and read again at a warm start.

In: Dynamo's guards. Out: `Read`s of JSON types, and the first of them that no longer holds. Knows
nothing of keys or stores.

Dynamo names every attribute, closure value and global that decided the graph, in Python notation
over `module` (the model), `constants` (frozen arguments) and `G` (globals). Tensors are not read
here: their names, shapes and ties are part of the program's key. Neither is anything of torch, the
standard library or this package: their versions are.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.traced import Guard

_NOT_READ = {
    "TENSOR_MATCH": "the tensor signature is in the key, ties included",
    "DUPLICATE_INPUT": "ties are in the tensor signature",
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
_OTHERS = ("torch", "numpy", "pcgsvc", *sys.stdlib_module_names)
_ROOTS = ("names", "tensors", "traced")
"""Locals of our own traced function."""


class NotCanonicalError(Exception):
    """A value that has no form which is the same in every process."""


@dataclass(frozen=True)
class Read:
    """One thing that was read."""

    source: str
    """Python notation over `module`, `constants` and `G`."""
    kind: str
    """Dynamo's guard type, which says what of the value counts."""
    form: Any
    """What counted, in JSON types."""


def reads_of(
    guards: Sequence[Guard], module: Any, constants: Mapping[str, Any]
) -> tuple[list[Read], list[str]]:
    """Write guards down.

    Returns:
        The reads, and what has no canonical form or cannot be found again: any of the latter makes
        the program uncacheable.
    """
    found: dict[tuple[str, str], Read] = {}
    problems: list[str] = []
    scope = _Scope(module, constants)
    for guard in guards:
        key = (guard.source, guard.kind)
        if key in found or guard.kind in _NOT_READ or not _is_users(guard.source):
            continue
        try:
            read = Read(guard.source, guard.kind, _form(guard.kind, guard.value))
            again = _form(guard.kind, scope.read(guard.source))
        except NotCanonicalError as error:
            problems.append(f"{guard.source}: {error}")
            continue
        if again != read.form:
            problems.append(f"{guard.source}: cannot be read again the same way")
            continue
        found[key] = read
    return list(found.values()), problems


def first_difference(
    reads: Sequence[Read], module: Any, constants: Mapping[str, Any]
) -> str | None:
    """Read everything again; return what differs first, with both values, or None."""
    scope = _Scope(module, constants)
    for read in reads:
        try:
            now = _form(read.kind, scope.read(read.source))
        except NotCanonicalError as error:
            return f"{read.source}: {error}"
        if now != read.form:
            return f"{read.source}: stored {_short(read.form)}, now {_short(now)}"
    return None


def files_of(guards: Sequence[Guard], module: Any) -> list[str]:
    """Return the source files of the module's classes and of functions that tracing went into."""
    files: set[str] = set()
    if isinstance(module, torch.nn.Module):
        for sub in module.modules():
            files |= {f for cls in type(sub).__mro__ if (f := _file(cls))}
    elif (file := _file(module)) is not None:
        files.add(file)
    for guard in guards:
        if isinstance(guard.value, types.FunctionType) and (file := _file(guard.value)):
            files.add(file)
    return sorted(files)


def _file(thing: Any) -> str | None:
    """Return the file that defines a class or function, unless its package's version covers it."""
    if (getattr(thing, "__module__", None) or "").split(".")[0] in (
        *sys.stdlib_module_names,
        "torch",
    ):
        return None
    try:
        return inspect.getsourcefile(inspect.unwrap(thing))
    except TypeError:
        return None


def _is_users(source: str) -> bool:
    root = source.removeprefix("G['").split("'")[0].split("[")[0].split(".")[0].split("(")[-1]
    if source.startswith("G['"):
        module = root.removeprefix("__import_").split("_dot_")[0]
        # What a user's module holds counts, its imports of others do not.
        return module not in _OTHERS and not root.startswith("__builtins")
    return bool(source) and root not in _ROOTS


# ---- reading -------------------------------------------------------------------------------------


class _Globals(dict[str, Any]):
    """Dynamo's `G`: the root function's globals and aliases of the modules that it went into."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__import_"):
            return importlib.import_module(name.removeprefix("__import_").replace("_dot_", "."))
        raise KeyError(name)


class _Scope:
    def __init__(self, module: Any, constants: Mapping[str, Any]) -> None:
        self._names: dict[str, Any] = {
            "module": module,
            "constants": dict(constants),
            "G": _Globals(),
            "__builtins__": {"type": type, "dict": dict, "list": list, "tuple": tuple, "len": len},
        }

    def read(self, source: str) -> Any:
        """Evaluate one source; it came from Dynamo, or from a stored program that is trusted."""
        try:
            return eval(source, self._names)
        except Exception as error:
            raise NotCanonicalError(f"cannot be read ({type(error).__name__}: {error})") from error


# ---- forms ---------------------------------------------------------------------------------------


def _form(kind: str, value: Any) -> Any:
    """Return what a guard of this kind compares, in JSON types."""
    if kind in ("TYPE_MATCH", "NN_MODULE"):
        return name_of(type(value))
    if kind in ("SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN", "EMPTY_NN_MODULE_HOOKS_DICT"):
        return [name_of(type(value)), len(value)]
    if kind in ("DICT_KEYS_MATCH", "DICT_CONTAINS", "DICT_NOT_CONTAINS", "DICT_VERSION"):
        return [canonical(k) for k in value]
    if kind in ("SET_CONTAINS", "SET_NOT_CONTAINS"):
        return canonical(value)
    if kind in ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"):
        return sorted(getattr(value, "__dict__", {}))
    if kind in ("ID_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "CLASS_MATCH"):
        return identity(value)
    return canonical(value)


def identity(value: Any) -> Any:
    """Return a form of an object that Dynamo compared by identity."""
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if torch_private.is_torch_op(value):
        return ["op", str(value)]
    if isinstance(value, types.FunctionType):
        return ["function", name_of(value), code_digest(value)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return ["named", name_of(value)]
    if isinstance(value, torch.nn.Module):
        return ["instance", name_of(type(value))]
    if type(value).__module__.split(".")[0] == "torch" and not isinstance(value, torch.Tensor):
        return ["torch", str(value)]
    return canonical(value)


def canonical(value: Any) -> Any:
    """Return a constant in JSON types, the same in every process.

    Raises:
        NotCanonicalError: it has no such form.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (float, complex)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, enum.Enum):
        return ["enum", name_of(type(value)), value.name]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return ["torch", str(value)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [canonical(v) for v in value]]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, sorted((canonical(v) for v in value), key=str)]
    if isinstance(value, Mapping):
        return ["dict", [[canonical(k), canonical(v)] for k, v in value.items()]]
    if isinstance(value, (slice, range)):
        parts = (value.start, value.stop, value.step)
        return [type(value).__name__, [canonical(v) for v in parts]]
    if isinstance(value, types.CodeType):
        return ["code", value.co_name, _code_digest(value)]
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)):
        return identity(value)
    raise NotCanonicalError(f"a {name_of(type(value))} has no form that can be written down")


def name_of(thing: Any) -> str:
    """Return the qualified name of a class or function."""
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"


def code_digest(function: Callable[..., Any]) -> str:
    """Return a digest of what a Python function does: its code, names and constants."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return name_of(function)
    return _code_digest(code)


def _code_digest(code: types.CodeType) -> str:
    text = "\n".join(_code_words(code))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _code_words(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_words(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _short(form: Any) -> str:
    text = str(form)
    return text if len(text) <= 80 else f"{text[:77]}…"
