"""What a forward returned, taken apart and put together again.

In: any nesting of tuples, lists, dicts, named tuples, dataclasses, and classes that torch's pytree
knows. Out: leaves, and a `ResultTree` that nests other leaves in the same way, now or in another
process.

A dataclass or named tuple is rebuilt field by field: its own code ran when the forward was traced,
and what it computed is in the fields. A stored tree names such a class, and the name is looked up
among the modules that this process has imported: reading a tree imports nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import CompileError, TraceError


@dataclass(frozen=True)
class Record:
    """A class with named fields: dataclass, named tuple, or one of torch's return types."""

    cls: type
    fields: tuple[str, ...]

    def take(self, value: Any) -> list[Any]:
        """Return the fields of an instance."""
        if isinstance(value, tuple):
            return list(value)
        return [getattr(value, name) for name in self.fields]

    def make(self, values: Sequence[Any]) -> Any:
        """Return an instance with these fields, without running its own code."""
        if _is_structseq(self.cls):
            return self.cls(values)
        if issubclass(self.cls, tuple):
            return tuple.__new__(self.cls, values)
        made = object.__new__(self.cls)
        for name, value in zip(self.fields, values, strict=True):
            object.__setattr__(made, name, value)  # frozen ones as well
        return made


@dataclass(frozen=True)
class ResultTree:
    """The nesting of a result."""

    spec: Any
    """pytree spec of all that pytree knows; a record is a leaf of it."""
    records: tuple[tuple[int, Record, ResultTree], ...] = ()
    """The records among its leaves: place, class, and the nesting of the list of its fields."""

    @property
    def is_leaf(self) -> bool:
        """Whether the result is one leaf by itself."""
        return bool(self.spec.is_leaf()) and not self.records

    def build(self, leaves: Iterable[Any]) -> Any:
        """Return the result with other leaves."""
        return self._build(iter(leaves))

    def _build(self, leaves: Any) -> Any:
        inner = {at: (record, tree) for at, record, tree in self.records}
        values = []
        for at in range(self.spec.num_leaves):
            record, tree = inner.get(at, (None, self))
            values.append(next(leaves) if record is None else record.make(tree._build(leaves)))
        return pytree.tree_unflatten(values, self.spec)

    def to_text(self) -> str | None:
        """Return the tree as JSON; None where a class in it could not be found by its name."""
        try:
            text = json.dumps(self._to_json())
            return text if from_text(text) == self else None
        except (NotImplementedError, ValueError, TypeError, CompileError):
            return None

    def __str__(self) -> str:
        text = " ".join(str(self.spec).split())
        return text if len(text) <= 200 else f"{text[:197]}..."

    def _to_json(self) -> dict[str, Any]:
        return {
            "spec": pytree.treespec_dumps(self.spec),
            "records": [
                [at, r.cls.__module__, r.cls.__qualname__, list(r.fields), tree._to_json()]
                for at, r, tree in self.records
            ],
        }


def flatten(result: Any) -> tuple[list[Any], ResultTree]:
    """Take a result apart."""
    values, spec = pytree.tree_flatten(result, is_leaf=lambda v: _fields_of(v) is not None)
    leaves: list[Any] = []
    records: list[tuple[int, Record, ResultTree]] = []
    for at, value in enumerate(values):
        fields = _fields_of(value)
        if fields is None:
            leaves.append(value)
            continue
        record = Record(type(value), fields)
        inner, tree = flatten(record.take(value))
        leaves += inner
        records.append((at, record, tree))
    return leaves, ResultTree(spec, tuple(records))


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, in the order of its leaves."""
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]


def refuse_subclasses(result: Any) -> None:
    """Raise TraceError if a result holds a tensor of a user's class, which no graph makes."""
    for at, leaf in enumerate(flatten(result)[0]):
        top = type(leaf).__module__.partition(".")[0]
        if isinstance(leaf, torch.Tensor) and top != "torch":  # torch's own are told apart later
            raise TraceError(
                f"result leaf {at}: got a {type(leaf).__name__}, a class made of torch.Tensor; a "
                "traced forward returns plain ones. Keep what the module holds as t.as_subclass("
                "torch.Tensor) and wrap results outside of it, or use partition.strategy=breakable."
            )


def kind_of(leaf: Any, tensor: str) -> str:
    """Say what a leaf is: `tensor` where it is one, else its value, or its class."""
    if isinstance(leaf, torch.Tensor):
        return tensor
    plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str))
    return repr(leaf) if plain else f"a {type(leaf).__name__}"


def refused_leaf(at: int, leaf: Any) -> str:
    """Return why a leaf that is neither a tensor nor None, a bool or a string is no result."""
    kind = type(leaf).__name__
    kind = {"SymInt": "int", "SymBool": "bool"}.get(kind, kind)  # of the row count, in a trace
    text = (
        f"result leaf {at}: got {kind}{' that depends on the row count' * (kind == 'bool')}; a "
        "forward may return tensors, None, bools and strings. A number would be frozen at the "
        "value of one row count. Compute it outside, or return a tensor: "
        "pcgsvc.true_rows(x).sum() is the row count of the call, torch.full((), 2.0) a constant."
    )
    if dataclasses.is_dataclass(leaf):
        text += (
            " A dataclass may hold its fields and nothing else; or register it with "
            "torch.export.register_dataclass."
        )
    return text


def _fields_of(value: Any) -> tuple[str, ...] | None:
    """Return the field names of a record that pytree does not take apart, else None."""
    names = _field_names(type(value))
    if names is None or isinstance(value, tuple):
        return names
    if torch_private.is_pytree_class(type(value)):
        return None
    # What it holds besides its fields, or has not set, could not be put together again.
    whole = set(getattr(value, "__dict__", {})) <= set(names)
    return names if whole and all(hasattr(value, name) for name in names) else None


def _field_names(cls: Any) -> tuple[str, ...] | None:
    """Return the field names of a dataclass, named tuple or torch return type, else None."""
    if _is_structseq(cls):
        return tuple(cls.__match_args__)
    if issubclass(cls, tuple):
        names = getattr(cls, "_fields", None)
        return tuple(names) if isinstance(names, tuple) else None
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None


def _is_structseq(cls: type) -> bool:
    """Whether a class is of the kind of `torch.return_types.max`."""
    return issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields")


# ---- stored trees --------------------------------------------------------------------------------


def from_text(text: str) -> ResultTree:
    """Read a tree that `to_text` wrote; imports nothing.

    Raises:
        CompileError: it is malformed, or a class in it is not what it was, or not imported here.
    """
    try:
        return _from_json(json.loads(text))
    except CompileError:
        raise
    except Exception as error:  # pytree raises whatever a class's own reader does
        raise CompileError(f"stored result: {type(error).__name__}: {error}") from error


def _from_json(tree: dict[str, Any]) -> ResultTree:
    records = tuple(
        (int(at), _record(str(module), str(name), tuple(fields)), _from_json(inner))
        for at, module, name, fields, inner in tree["records"]
    )
    return ResultTree(pytree.treespec_loads(tree["spec"]), records)


def _record(module: str, name: str, fields: tuple[str, ...]) -> Record:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise CompileError(f"stored result: class {module}.{name} is not imported in this process")
    if _field_names(found) != fields:
        raise CompileError(f"stored result: class {module}.{name} has other fields now")
    return Record(found, fields)
