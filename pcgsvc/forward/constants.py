"""Arguments that are no tensors: fixed when a runner is built, compared when a call names them.

In: values. Out: copies that the caller cannot change, and whether a later value still is the same.
Knows nothing of modules or tracing.
"""

from __future__ import annotations

import array
import enum
import sys
import types
from collections import deque
from typing import Any

import torch

_OPAQUE = (
    torch.nn.Module,
    torch.Tensor,
    enum.Enum,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
)
"""Compared by identity: code, or values that nobody compares at each call."""
_MAX_DEPTH = 20
"""How deep objects are looked into; what lies deeper is compared by identity."""


def frozen(value: Any) -> Any:
    """Return containers rebuilt, so that the caller's later changes do not reach us."""
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(frozen(v) for v in value)
    if type(value) is deque:
        return deque((frozen(v) for v in value), value.maxlen)
    return {k: frozen(v) for k, v in value.items()} if type(value) is dict else value


def state_of(value: Any) -> Any:
    """Return what `is_same` compares: the value, and of an object the attributes it has now."""
    return _state(value, ())


def _state(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, _OPAQUE) or id(value) in above or len(above) == _MAX_DEPTH:
        return _Same(value)
    inside = (*above, id(value))
    if isinstance(value, dict):
        pairs = [(k, _state(v, inside)) for k, v in value.items()]
        return (type(value), pairs, _attributes(value, inside))
    if isinstance(value, (list, tuple)):
        items = [_state(v, inside) for v in value]
        return (type(value), items, _attributes(value, inside))
    if isinstance(value, deque):
        return (type(value), value.maxlen, [_state(v, inside) for v in value])
    attributes = _attributes(value, inside)
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset((type(v), v) for v in value), attributes)
    if isinstance(value, (bytearray, array.array)):
        return (type(value), value[:], attributes)
    return (type(value), attributes) if attributes else (type(value), _Value(value))


def _attributes(value: Any, inside: tuple[int, ...]) -> list[tuple[str, Any]]:
    """Return an object's attributes with their states, those that its classes give it included."""
    found: dict[str, Any] = {}
    for cls in reversed(type(value).__mro__):
        library = cls.__module__.partition(".")[0] in sys.stdlib_module_names
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                if hasattr(value, name):
                    found[name] = getattr(value, name)
            elif not library and not name.startswith("__") and not hasattr(member, "__get__"):
                found[name] = member
    found |= getattr(value, "__dict__", {})
    return [(name, _state(v, inside)) for name, v in sorted(found.items())]


class _Same:
    """Equal to the very same object only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class _Value:
    """Equal to what its value says is equal; arrays and the like never are."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        if self.value is other.value:
            return True
        one, two = self.value, other.value
        if isinstance(one, (float, complex)) and one != one and two != two:
            return True  # NaN is what it was
        equal = one == two
        return equal if isinstance(equal, bool) else False

    __hash__ = None  # type: ignore[assignment]


class Constants(dict[str, Any]):
    """Fixed arguments by name, with what they were when the runner was built."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({name: frozen(value) for name, value in values.items()})
        self._states = {name: state_of(value) for name, value in values.items()}

    def is_same(self, name: str, value: Any) -> bool:
        """Whether a value is what the argument was when the runner was built."""
        return bool(self._states[name] == state_of(value))
