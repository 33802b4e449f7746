"""Non-tensor arguments: constants of a runner, compared when a call names them.

In: values. Out: copies that the caller cannot change, and whether a later value still is the same.
"""

from __future__ import annotations

import array
import enum
import types
from collections import deque
from typing import Any

import torch

from pcgsvc.forward.objects import ATOMS, CODE, attributes_of, items_of, own_bases

_BY_IDENTITY = (
    *CODE,
    torch.nn.Module,
    torch.Tensor,
    enum.Enum,
    types.FunctionType,
    types.MethodType,
)
"""Code, which has no state to compare, and values too large to be compared at each call."""
_MAX_DEPTH = 20
"""How deep objects are compared; deeper ones by identity."""
_MAX_ARRAY_BYTES = 2**20
"""Up to which an array is compared by its content at each call; larger ones by identity."""


def frozen(value: Any) -> Any:
    """Return containers rebuilt, so that the caller's later changes do not reach us."""
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(frozen(v) for v in value)
    if type(value) is deque:
        return deque((frozen(v) for v in value), value.maxlen)
    if type(value) is types.MappingProxyType:
        return types.MappingProxyType({k: frozen(v) for k, v in value.items()})
    return {k: frozen(v) for k, v in value.items()} if type(value) is dict else value


def state_of(value: Any) -> Any:
    """Return what `is_same` compares: the value, and of an object the attributes it has now."""
    return _state(value, ())


def _state(value: Any, above: tuple[int, ...]) -> Any:
    if type(value) in ATOMS:
        return (type(value), _Value(value))
    if isinstance(value, _BY_IDENTITY) or id(value) in above or len(above) == _MAX_DEPTH:
        return _Same(value)
    inside = (*above, id(value))
    content: Any = None
    attributes = [(k, _state(v, inside)) for k, v in sorted(_attributes(value).items())]
    if isinstance(value, (dict, types.MappingProxyType, list, tuple, deque)):
        content = [(place.key, _state(place.value, inside)) for place in items_of(value)]
    elif isinstance(value, (set, frozenset)):
        content = frozenset((type(v), v) for v in value)
    elif isinstance(value, (bytearray, array.array)):
        content = value[:]
    elif (array_content := _of_array(value)) is not None:
        content = array_content
    elif not attributes or isinstance(value, ATOMS):
        content = _Value(value)
    maxlen = value.maxlen if isinstance(value, deque) else None
    return (type(value), content, maxlen, attributes)


def _of_array(value: Any) -> Any:
    """Return dtype, shape and bytes of a small numpy array of plain values; else None."""
    if type(value).__module__ != "numpy" or not hasattr(value, "__array_interface__"):
        return None
    plain = value.dtype.kind in "biufcSU" and value.nbytes <= _MAX_ARRAY_BYTES
    return (value.dtype.str, value.shape, value.tobytes()) if plain else None


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those that its classes give it included."""
    found: dict[str, Any] = {}
    for cls in reversed(own_bases(type(value))):
        members = vars(cls).items()
        found |= {k: v for k, v in members if not (k.startswith("__") or hasattr(v, "__get__"))}
    return found | {place.key: place.value for place in attributes_of(value)}


class _Same:
    """Equal to the very same object only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class _Value:
    """Equal to what its value says is equal; what gives no plain answer never is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        if self.value is other.value:
            return True
        one, two = self.value, other.value
        if type(one) in (float, complex) and type(one) is type(two):
            return repr(one) == repr(two)  # NaN is what it was, and 0.0 is not -0.0
        equal = one == two
        return equal if isinstance(equal, bool) else False


class Constants(dict[str, Any]):
    """Constant arguments by name, with their states when the runner was built."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({name: frozen(value) for name, value in values.items()})
        self._states = {name: state_of(value) for name, value in values.items()}

    def is_same(self, name: str, value: Any) -> bool:
        """Whether a value is what the argument was when the runner was built."""
        return bool(self._states[name] == state_of(value))
