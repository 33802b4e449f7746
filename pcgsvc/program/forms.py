"""Forms of Python values and digests of code that are the same in every process.

In: constants, functions, classes. Out: JSON types, to be stored and compared at a warm start.
Knows nothing of guards, keys or stores.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from pcgsvc import torch_private
from pcgsvc.forward.objects import (
    CODE,
    Place,
    attributes_of,
    cells_of,
    is_not_users,
    is_versioned,
    own_bases,
    reads_of,
)
from pcgsvc.ops.collectives import group_word


class NotCanonicalError(Exception):
    """A value has no form that is the same in every process."""


def identity(value: Any) -> Any:
    """Return the form of an object that Dynamo compares by identity."""
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if torch_private.is_torch_op(value):
        return ["op", str(value)]
    if isinstance(value, (types.FunctionType, types.MethodType)):
        digest = reach_digest if torch_private.is_constant_function(value) else code_digest
        return ["function", name_of(value), digest(value)]
    if isinstance(value, (enum.Enum, contextvars.ContextVar)):
        return canonical(value)
    if (group := group_form(value)) is not None:
        return group
    if isinstance(value, type):
        digests = [] if is_versioned_class(value) else [code_digest(value)]
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


def group_form(value: Any) -> list[Any] | None:
    """Return the form of a process group, a device mesh or how a DTensor lies on one; else None.

    It is the same on all of its ranks.
    """
    if not distributed.is_available():
        return None
    if isinstance(value, distributed.ProcessGroup):
        return ["group", group_word(value), distributed.get_backend(value)]
    if isinstance(value, DeviceMesh):
        groups = [group_form(group) for group in value.get_all_groups()]
        return ["mesh", value.device_type, value.mesh_dim_names, list(value.shape), groups]
    if torch_private.is_dtensor_spec(value):
        placements = [str(placement) for placement in value.placements]
        return ["dtensor", group_form(value.mesh), placements, list(value.shape)]
    return None


def reads_ranks(value: Any) -> bool:
    """Whether a value that tracing read may tell which of several processes this one is."""
    name = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
    return str(name).startswith("torch.distributed")


def canonical(value: Any) -> Any:
    """Return a constant in JSON types, the same in every process.

    Raises:
        NotCanonicalError: it has no such form.
    """
    if isinstance(value, enum.Enum):
        return ["enum", name_of(type(value)), value.name, or_type(value.value)]
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
        return [type(value).__name__, [canonical(v) for v in (value.start, value.stop, value.step)]]
    if isinstance(value, MEMBERS):
        return ["member", name_of(value.__objclass__), value.__name__]
    if isinstance(value, types.CodeType):
        return ["code", value.co_name, _digest(_code_words(value))]
    if isinstance(value, functools.partial):
        held = [canonical(value.args), canonical(value.keywords)]
        return ["partial", identity(value.func), *held]
    if isinstance(value, (types.FunctionType, types.MethodType, *CODE)):
        return identity(value)
    if (origin := typing.get_origin(value)) is not None:  # an annotation, such as Tensor | None
        return ["annotation", identity(origin), canonical(typing.get_args(value))]
    if value is ...:
        return ["ellipsis"]
    if isinstance(value, contextvars.ContextVar):  # Dynamo guards what is in it by itself
        return ["contextvar", value.name, or_type(value.get(None))]
    if (group := group_form(value)) is not None:
        return group
    if type(value).__module__ == "torch.distributed.tensor.placement_types":
        return ["torch", repr(value)]
    raise NotCanonicalError(f"a {name_of(type(value))} has no form that can be written down")


MEMBERS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)
"""What `torch.Tensor.sin` is: Dynamo guards none of it, wherever a forward finds it."""


def name_of(thing: Any) -> str:
    """Return the qualified name of a class or function; of another object, its class's."""
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)  # never a repr: it may hold an address
    return f"{getattr(thing, '__module__', '?')}.{thing.__qualname__}"


def or_type(value: Any) -> Any:
    """Return a value's form, or its class's name where it has none."""
    try:
        return canonical(value)
    except (NotCanonicalError, RecursionError):
        return ["?", name_of(type(value))]


# ---- code ----------------------------------------------------------------------------------------


def code_digest(thing: Any) -> str:
    """Return a digest of what a Python callable or class does.

    Of functions: code, defaults, what they wrap, and the functions in their closures; other values
    in closures are left to Dynamo's guards. Of classes: the code of their methods and the names of
    their attributes (Dynamo enters methods without a guard on them), bases included; of torch's
    and Python's own, only methods that have been replaced.
    """
    return _digest(_words(thing, set()))


def reach_digest(function: Any) -> str:
    """Return a digest of what a Python function does and of all that it reads.

    More than `code_digest`: also the globals that it names, members of modules among them, and the
    functions there, and theirs; and the values in closures and defaults. For functions that run
    while a program is made and that no guard of Dynamo's watches.

    Raises:
        NotCanonicalError: it reads a value that has no form, such as a tensor.
    """
    return _digest(_reach_words(function, name_of(function), set()))


def _reach_words(value: Any, place: str, seen: set[int]) -> Iterator[str]:
    """Yield what decides a value that a function reads at `place`, each object once."""
    if id(value) in seen or is_not_users(value):
        return
    if isinstance(value, (types.MethodType, functools.partial, types.FunctionType, type)):
        seen.add(id(value))
        yield f"{place}: {code_digest(value)}"
        functions = _functions_of_class(value) if isinstance(value, type) else made_of(value)
        held = [Place(None, None, part, place) for part in functions]
        if isinstance(value, types.FunctionType):
            held += [*reads_of(value, name_of(value))]
        elif isinstance(value, functools.partial):
            held += [Place(None, None, v, place) for v in (*value.args, *value.keywords.values())]
        elif isinstance(value, types.MethodType):
            held += [Place(None, None, value.__self__, place)]
        for part in held:
            yield from _reach_words(part.value, part.name, seen)
        return
    try:
        yield f"{place}: {json.dumps(canonical(value))}"
    except (NotCanonicalError, RecursionError) as error:
        raise NotCanonicalError(f"it reads {place}, and {error}") from None


def _functions_of_class(cls: type) -> Iterator[Any]:
    for base in own_bases(cls):
        for member in list(vars(base).values()):
            yield from _functions_in(member)


def replaced_functions() -> dict[str, str]:
    """Return digests of what others have put in the place of torch's functions, by name.

    Raises:
        NotCanonicalError: one reads a value that has no form.
    """
    found = {}
    for home in _TORCH_HOMES:
        for key, value in list(vars(home).items()):
            if isinstance(value, types.FunctionType) and not is_not_users(value):
                name = f"{home.__name__}.{key}"
                try:
                    found[name] = reach_digest(value)
                except NotCanonicalError as error:
                    raise NotCanonicalError(f"{name} is replaced by another: {error}") from None
    return found


_TORCH_HOMES = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft)


def is_versioned_class(cls: type) -> bool:
    """Whether versions say all of a class: its bases are versioned, and no method was replaced."""
    return all(is_versioned(base.__module__) and not replaced(base) for base in cls.__mro__)


def replaced(cls: type) -> dict[str, Any]:
    """Return what a class of torch's or Python's runs when called, if others have replaced it.

    Not other methods: libraries add some to `nn.Module` while they run (transformers does), which
    no forward of torch's calls.
    """
    found = {}
    for name in ("__call__", "forward"):
        for function in _functions_in(vars(cls).get(name)):
            # Not by `__module__`, which functools.wraps copies.
            home = getattr(function, "__globals__", {}).get("__name__")
            if home is not None and not is_versioned(home):
                found[name] = function
    return found


def made_of(thing: Any) -> Iterator[Any]:
    """Yield what a callable runs besides its own code: what it binds, its class, what it wraps."""
    if isinstance(thing, types.MethodType):
        yield from (thing.__func__, type(thing.__self__))
    elif isinstance(thing, functools.partial):
        yield thing.func
    elif not isinstance(thing, (types.FunctionType, *CODE)):
        yield type(thing)
    if hasattr(thing, "__wrapped__"):  # functools.lru_cache has no closure
        yield thing.__wrapped__


def hook_form(function: Any) -> list[Any]:
    """Return what a function does and the values in its closure, as far as they have a form."""
    cells = [or_type(place.value) for place in cells_of(function)]
    return [name_of(function), code_digest(function), cells]


def _digest(words: Iterator[str]) -> str:
    text = "\n".join(words)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _words(thing: Any, seen: set[int]) -> Iterator[str]:
    """Yield what decides a callable or class, each object once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    yield name_of(thing)
    inner = list(made_of(thing))
    if isinstance(thing, types.FunctionType):
        yield from _code_words(thing.__code__)
        yield json.dumps([or_type(thing.__defaults__), or_type(thing.__kwdefaults__)])
        inner += [place.value for place in cells_of(thing) if isinstance(place.value, _CALLABLES)]
        read = [p for p in reads_of(thing, name_of(thing)) if isinstance(p.value, MEMBERS)]
        yield json.dumps([[place.name, canonical(place.value)] for place in read])
    elif isinstance(thing, functools.partial):
        yield json.dumps([or_type(thing.args), or_type(thing.keywords)])
    elif isinstance(thing, type):
        yield from _class_words(thing, seen)
    for part in inner:
        yield from _words(part, seen)


def _class_words(cls: type, seen: set[int]) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield json.dumps([[name, or_type(m.value)] for name, m in cls.__members__.items()])
    for base in cls.__mro__:
        yield name_of(base)
        members = replaced(base) if is_versioned(base.__module__) else dict(vars(base))
        for name, member in sorted(members.items()):
            if name in _NO_CODE or (name.startswith("__") and not callable(member)):
                continue
            yield name
            for function in _functions_in(member):
                yield type(member).__name__
                yield from _words(function, seen)


_NO_CODE = ("__dict__", "__weakref__", "__doc__", "__annotate__", "__annotate_func__", "__class__")
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)


def _functions_in(member: Any) -> Iterator[Any]:
    """Yield the functions behind a class attribute."""
    if isinstance(member, (types.FunctionType, functools.partial)):
        yield member
    elif isinstance(member, _DESCRIPTORS) or (
        callable(member) and hasattr(member, "__wrapped__") and not isinstance(member, type)
    ):
        yield from (place.value for place in attributes_of(member) if callable(place.value))


def _code_words(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_words(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)
