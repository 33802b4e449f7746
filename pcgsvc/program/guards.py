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
import functools
import hashlib
import importlib.machinery
import inspect
import itertools
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.trace.graph import Guard
from pcgsvc.trace.sources import is_versioned

_NOT_READ = {
    "TENSOR_MATCH": "the tensor signature is in the key, ties included",
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
"""Kind of a read of `os.environ` as a whole; not one of Dynamo's."""
_Environ = type(os.environ)
_ROOTS = ("names", "places", "tensors", "traced")
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
    pythons = tuple(guard.source for guard in guards if _is_namedtuple_scope(guard.value))
    for guard in [*guards, *_aliases(guards)]:
        key = (guard.source, guard.kind)
        reason = _of_this_process(guard)
        if reason is not None:
            problems.append(reason)
            continue
        if key in found or guard.kind in _NOT_READ or not _is_users(guard.source):
            continue
        if guard.source.startswith(pythons):
            continue
        if isinstance(guard.value, _Environ):
            # What was looked for and not there has no guard: no further variable may be set.
            guard = Guard(source=guard.source, kind=ENVIRONMENT, value=guard.value)
        try:
            read = Read(guard.source, guard.kind, scope.form(guard.kind, guard.value))
            again = scope.form(guard.kind, scope.read(guard.source))
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
            now = scope.form(read.kind, scope.read(read.source))
        except NotCanonicalError as error:
            return f"{read.source}: {error}"
        if read.kind == ENVIRONMENT:
            now, more = read.form, sorted(set(now) - set(read.form))
            if more:
                return f"{read.source}: {', '.join(more[:8])} are set now"
        if now != read.form:
            return f"{read.source}: stored {_short(read.form)}, now {_short(now)}"
    return None


def _of_this_process(guard: Guard) -> str | None:
    """Return why what was read cannot be compared in another process, or None."""
    if guard.value is hash:
        return "the forward calls hash(), which gives text another number in every process"
    if any(guard.value is function for function in _GETENV) and _is_users(guard.source):
        return (
            f"{guard.source} is called, and torch does not say which variable it read: use "
            "os.environ.get"
        )
    return None


_GETENV = (os.getenv, os.getenvb)


def _is_namedtuple_scope(value: Any) -> bool:
    """Whether a value is the globals of a named tuple's `__new__`: Python's own, without a name."""
    name = value.get("__name__") if type(value) is dict else None
    return isinstance(name, str) and name.startswith("namedtuple_") and "_tuple_new" in value


def _aliases(guards: Sequence[Guard]) -> Iterator[Guard]:
    """Yield which plain objects are one and which are two: code may ask by `is`.

    Where Dynamo guards on that at all, it names one side only.
    """
    places: dict[type, dict[str, Any]] = {}
    for guard in guards:
        cls = type(guard.value)
        plain = not isinstance(guard.value, (*_NO_ALIAS, torch.Tensor, torch.nn.Module))
        if guard.kind in ("TYPE_MATCH", "DUPLICATE_INPUT") and plain and _is_users(guard.source):
            places.setdefault(cls, {})[guard.source] = guard.value
    for found in places.values():
        for (one, a), (other, b) in itertools.combinations(sorted(found.items()), 2):
            yield Guard(source=f"{one} is {other}", kind="CONSTANT_MATCH", value=a is b)


_NO_ALIAS = (dict, list, set, tuple, type, types.FunctionType, types.ModuleType, enum.Enum)


def _is_users(source: str) -> bool:
    if ".environ" in source:  # os is Python's; what lies in it is the user's
        return True
    root = source.removeprefix("G['").split("'")[0].split("[")[0].split(".")[0].split("(")[-1]
    if torch_private.through_torch(source):
        return False
    if source.startswith("G['"):
        module = root.removeprefix("__import_").split("_dot_")[0]
        # What a user's module holds counts, its imports of others do not.
        return not (is_versioned(module) or module == "pcgsvc" or root.startswith("__builtins"))
    return bool(source) and root not in _ROOTS


def is_versioned_class(cls: type) -> bool:
    """Whether versions say all of a class: its bases are versioned, and no method was replaced."""
    return all(is_versioned(c.__module__) and not list(_replaced(c)) for c in cls.__mro__)


def _replaced(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield what a class of torch's or Python's runs when called, if somebody else put it there.

    Not other methods: libraries add some to `nn.Module` while they run (transformers does), which
    no forward of torch's calls.
    """
    for name in ("__call__", "forward"):
        for function in _functions_in(vars(cls).get(name)):
            # Not by `__module__`, which functools.wraps copies.
            home = getattr(function, "__globals__", {}).get("__name__")
            if home is not None and not is_versioned(home):
                yield name, function


# ---- source files --------------------------------------------------------------------------------


def files_of(guards: Sequence[Guard], module: Any) -> list[str]:
    """Return the source files of the classes and functions that tracing went into.

    By the name of the module that they hold, where there is one: a stored program shall not mind
    where a package lies, and shall notice when the name leads to another file. By path otherwise.
    """
    things: list[Any] = [module]
    if isinstance(module, torch.nn.Module):
        things = [type(sub) for sub in module.modules()]
    for guard in guards:
        value = guard.value
        if isinstance(value, (type, types.FunctionType, types.MethodType)):
            things.append(value)
        elif guard.kind in ("TYPE_MATCH", "ID_MATCH"):  # its methods, or its members
            things.append(type(value))
    found = {place for thing in things for part in _parts(thing) if (place := _place(part))}
    return sorted(found)


def path_of(place: str) -> str | None:
    """Return the path of a file that `files_of` named; None if there is no such file now."""
    if os.sep in place:
        return place
    known = sys.modules.get(place)
    if known is not None:
        return _source_path(getattr(known, "__file__", None))
    spec, folders = None, None
    for end in itertools.accumulate(place.split("."), "{}.{}".format):
        # One by one: importlib.util.find_spec would import the parent packages.
        spec = importlib.machinery.PathFinder.find_spec(end, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return None if spec is None else _source_path(spec.origin)


def sources_of(module: Any) -> dict[str, str]:
    """Return the files of `files_of` that are known without tracing: a name without folder, path.

    The name is the same in every process, wherever the package lies.
    """
    found = {}
    for place in files_of([], module):
        path = path_of(place)
        if path is not None:
            above = [] if os.sep in place else place.split(".")[:-1]
            if os.path.basename(path) == "__init__.py":
                above = place.split(".")
            found["/".join([*above, os.path.basename(path)])] = path
    return found


def _parts(thing: Any) -> Iterator[Any]:
    """Yield what a class or callable is made of: base classes, wrappers and the wrapped."""
    if isinstance(thing, type):
        for part in thing.__mro__:
            if is_versioned(part.__module__):
                yield from (function for _, function in _replaced(part))
            else:
                yield part
    elif isinstance(thing, types.MethodType):
        yield from _parts(thing.__func__)
        yield from _parts(type(thing.__self__))
    elif isinstance(thing, functools.partial):
        yield from _parts(thing.func)
    elif isinstance(thing, types.FunctionType):
        if not is_versioned(thing.__module__ or "?"):
            yield thing
        if hasattr(thing, "__wrapped__"):
            yield from _parts(thing.__wrapped__)
    elif not isinstance(thing, (types.BuiltinFunctionType, types.ModuleType)):
        yield from _parts(type(thing))


def _place(thing: Any) -> str | None:
    """Return the module's name, or the path, of the file that defines a class or function."""
    try:
        file = inspect.getsourcefile(thing)
    except (TypeError, OSError):  # built in, or typed in
        return None
    if file is None:
        return None
    name = getattr(thing, "__module__", None) or ""
    module = getattr(sys.modules.get(name), "__file__", None)
    return name if _source_path(module) == _source_path(file) else os.path.abspath(file)


def _source_path(file: str | None) -> str | None:
    return None if file is None else os.path.abspath(file)


# ---- reading -------------------------------------------------------------------------------------


class _Globals(dict[str, Any]):
    """Dynamo's `G`: the root function's globals and aliases of the modules that it went into."""

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
            "__builtins__": {"type": type, "dict": dict, "list": list, "tuple": tuple, "len": len},
        }

        self._classes: dict[type, list[Any]] = {}

    def read(self, source: str) -> Any:
        """Evaluate one source; it came from Dynamo, or from a stored program that is trusted."""
        try:
            return eval(source, self._names)
        except Exception as error:
            raise NotCanonicalError(f"cannot be read ({type(error).__name__}: {error})") from error

    def form(self, kind: str, value: Any) -> Any:
        """Return what a guard of this kind compares, in JSON types."""
        if kind in ("TYPE_MATCH", "NN_MODULE", "CLASS_MATCH"):
            cls = value if kind == "CLASS_MATCH" else type(value)
            if isinstance(cls, type):
                if cls not in self._classes:
                    self._classes[cls] = identity(cls)
                return self._classes[cls]
        try:
            return _form(kind, value)
        except RecursionError:
            raise NotCanonicalError("it holds itself") from None


# ---- forms ---------------------------------------------------------------------------------------


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


def identity(value: Any) -> Any:
    """Return a form of an object that Dynamo compared by identity."""
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if torch_private.is_torch_op(value):
        return ["op", str(value)]
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return ["function", name_of(value), code_digest(value)]
    if isinstance(value, enum.Enum):
        return canonical(value)
    if isinstance(value, type):
        digests = [] if is_versioned_class(value) else [class_digest(value)]
        return ["class", name_of(value), *digests]
    if callable(value) and hasattr(value, "__qualname__"):
        return ["named", name_of(value)]
    if isinstance(value, torch.nn.Module):
        return ["instance", name_of(type(value))]
    if type(value).__module__.split(".")[0] == "torch" and not isinstance(value, torch.Tensor):
        text = str(value)
        if " at 0x" in text:
            raise NotCanonicalError(f"a {name_of(type(value))} has no form that can be written")
        return ["torch", text]
    return canonical(value)


def canonical(value: Any) -> Any:
    """Return a constant in JSON types, the same in every process.

    Raises:
        NotCanonicalError: it has no such form.
    """
    if isinstance(value, enum.Enum):
        return ["enum", name_of(type(value)), value.name, _or_type(value.value)]
    if value is None or type(value) in (int, str):
        return value
    if isinstance(value, bool):  # 1 == True for Python's comparisons, but not for torch
        return ["bool", value]
    if isinstance(value, (float, complex)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, (int, str)):
        base = int if isinstance(value, int) else str
        return [name_of(type(value)), base(value)]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return ["torch", str(value)]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return [type(value).__name__, canonical(value.item())]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [canonical(v) for v in value]]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, sorted((canonical(v) for v in value), key=json.dumps)]
    if isinstance(value, Mapping):
        return ["dict", [[canonical(k), canonical(v)] for k, v in value.items()]]
    if isinstance(value, (slice, range)):
        parts = (value.start, value.stop, value.step)
        return [type(value).__name__, [canonical(v) for v in parts]]
    if isinstance(value, types.CodeType):
        return ["code", value.co_name, _digest(_code_words(value))]
    if isinstance(value, functools.partial):
        held = [canonical(value.args), canonical(value.keywords)]
        return ["partial", identity(value.func), *held]
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType, type, types.ModuleType)):
        return identity(value)
    if isinstance(value, types.FunctionType):
        return identity(value)
    raise NotCanonicalError(f"a {name_of(type(value))} has no form that can be written down")


def name_of(thing: Any) -> str:
    """Return the qualified name of a class or function; of another object, its class's."""
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)  # never a repr: it may hold an address
    return f"{getattr(thing, '__module__', '?')}.{thing.__qualname__}"


# ---- code ----------------------------------------------------------------------------------------


def code_digest(function: Any) -> str:
    """Return a digest of what a Python callable does: code, defaults, and what it wraps.

    Values in closures are left to Dynamo's guards; functions in them are followed.
    """
    return _digest(_words(function, set()))


def class_digest(cls: type) -> str:
    """Return a digest of a class: the code of its methods and the names of its attributes.

    Dynamo goes into methods without a guard on them. Base classes are part of it; of those of torch
    and of Python, only the methods that somebody has replaced.
    """
    return _digest(_class_words(cls, set()))


def hook_form(function: Any) -> list[Any]:
    """Return what a function does and the values in its closure, as far as they have a form."""
    cells = getattr(function, "__closure__", None) or ()
    return [name_of(function), code_digest(function), [_or_type(c.cell_contents) for c in cells]]


def _digest(words: Iterator[str]) -> str:
    text = "\n".join(words)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def _words(thing: Any, seen: set[int]) -> Iterator[str]:
    """Yield what decides a callable, each object once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    yield name_of(thing)
    if isinstance(thing, types.FunctionType):
        yield from _code_words(thing.__code__)
        yield json.dumps([_or_type(thing.__defaults__), _or_type(thing.__kwdefaults__)])
        yield from _closure_words(thing, seen)
    elif isinstance(thing, types.MethodType):
        yield from _words(thing.__func__, seen)
        yield from _words(type(thing.__self__), seen)
    elif isinstance(thing, functools.partial):
        yield from _words(thing.func, seen)
        yield json.dumps([_or_type(thing.args), _or_type(thing.keywords)])
    elif isinstance(thing, type):
        yield from _class_words(thing, seen)
    elif not isinstance(thing, types.BuiltinFunctionType):
        yield from _class_words(type(thing), seen)
    if hasattr(thing, "__wrapped__"):  # functools.lru_cache has no closure
        yield from _words(thing.__wrapped__, seen)


def _closure_words(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(held, (types.FunctionType, types.MethodType, functools.partial)):
            yield from _words(held, seen)


def _class_words(cls: type, seen: set[int]) -> Iterator[str]:
    for part in cls.__mro__:
        if is_versioned(part.__module__):
            for name, function in _replaced(part):
                yield f"{name_of(part)}.{name}"
                yield from _words(function, seen)
            continue
        yield name_of(part)
        for name, value in sorted(vars(part).items()):
            if name in _NO_CODE or (name.startswith("__") and not callable(value)):
                continue
            yield name
            for function in _functions_in(value):
                yield type(value).__name__
                yield from _words(function, seen)


_NO_CODE = ("__dict__", "__weakref__", "__doc__", "__annotate__", "__annotate_func__", "__class__")


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the functions behind a class attribute."""
    if isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if f is not None)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, (types.FunctionType, functools.partial)):
        yield value
    elif hasattr(value, "__wrapped__") and callable(value):
        yield value.__wrapped__


def _code_words(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_words(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _or_type(value: Any) -> Any:
    """Return a value's form, or its class's name where it has none."""
    try:
        return canonical(value)
    except (NotCanonicalError, RecursionError):
        return ["?", name_of(type(value))]


def _short(form: Any) -> str:
    text = str(form)
    return text if len(text) <= 80 else f"{text[:77]}…"
