"""What tracing gives: the canonical graph, its bindings, and what it assumes.

In: nothing. Out: the types that the later stages read. Knows nothing of Dynamo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pcgsvc.results import ResultTree


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """How one tensor input of the forward looks."""

    name: str
    """Argument name."""
    example: torch.Tensor
    """Any valid value; only dtype, device and the shape outside `dims` count."""
    dims: tuple[int, ...]
    """Dimensions that carry the rows, ascending; empty for an input of fixed shape."""

    def shape(self, rows: int) -> list[int]:
        """Return the input's shape for a row count."""
        return [rows if d in self.dims else n for d, n in enumerate(self.example.shape)]

    def cut(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the first rows of an input, as a view."""
        for dim in self.dims:
            tensor = tensor.narrow(dim, 0, rows)
        return tensor


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and kind of a tensor; symbolic sizes are Python source in the row count `s`."""

    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    offset: int | str
    device: str
    layout: str = "torch.strided"

    def row_dims(self) -> tuple[int, ...]:
        """Return the dimensions whose size is exactly the row count."""
        return tuple(d for d, size in enumerate(self.shape) if size == "s")

    def as_json(self) -> list[Any]:
        """Return JSON types, for documents and hashes."""
        shape, stride = list(self.shape), list(self.stride)
        return ["tensor", self.dtype, shape, stride, self.offset, self.device, self.layout]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What a graph input is bound to at run time."""

    kind: str
    """`size` (the row count), `input` (an argument), `param` (parameter or buffer), `constant`."""
    name: str
    """Argument name, fully qualified tensor name, or Dynamo's source of a captured tensor."""
    spec: TensorSpec | None
    """None for the size."""


@dataclass(frozen=True)
class SizePredicate:
    """What the graph assumes of the row count `s`; replaces Dynamo's shape guards."""

    conditions: tuple[str, ...]
    """Python source over `s`; the graph is right for sizes that satisfy all."""
    origins: tuple[str, ...] = ()
    """The user's line behind each condition, or an empty string."""

    def and_also(self, condition: str, origin: str) -> SizePredicate:
        """Return a predicate with one more condition."""
        return SizePredicate((*self.conditions, condition), (*self.origins, origin))

    def broken_by(self, size: int) -> str | None:
        """Return the first condition that `size` does not satisfy, with its origin, or None."""
        space = {"s": size, "max": max, "min": min, "abs": abs, "__builtins__": {}}
        for at, condition in enumerate(self.conditions):
            if not eval(condition, space):
                origin = self.origins[at] if at < len(self.origins) else ""
                return f"{condition}{f' (from {origin})' if origin else ''}"
        return None


@dataclass(frozen=True, kw_only=True)
class Guard:
    """One thing besides shapes that tracing read and took for constant."""

    source: str
    """Where it was read, in Dynamo's notation, e.g. `module.scale`."""
    kind: str
    """Dynamo's guard type."""
    value: Any
    """What was read (not kept beyond the trace unless it is a constant)."""


@dataclass(kw_only=True)
class TracedGraph:
    """The canonical graph and all that is needed to run it without Dynamo."""

    graph: torch.fx.Graph
    """Placeholders, `call_function` and `call_method` nodes, one output of a flat tuple."""
    bindings: list[Binding]
    """One per placeholder, in order; at most one of kind `size`, and it comes first."""
    tensors: dict[str, torch.Tensor]
    """The bound parameters, buffers and captured constants by binding name."""
    outputs: list[tuple[str, int]]
    """Flat results in tree order: ("graph", output index) or ("input", placeholder index)."""
    output_specs: list[TensorSpec]
    """Per graph output."""
    out_tree: ResultTree
    """Nesting of the forward's result; leaves that are no tensors are `constants`."""
    constants: dict[int, Any]
    """Leaves of the result that are constants (None, bool, str), by leaf index."""
    predicate: SizePredicate
    guards: list[Guard]
    mutated: list[str]
    """Names of parameters and buffers that the graph writes to."""
    size: int
    """Row count that was traced with."""
    spec_of: Callable[[torch.fx.Node], TensorSpec]
    """Shape and kind of a tensor-valued node."""
    size_of: Callable[[Any], int | str]
    """A symbolic int as Python source over `s`."""
    ops: Counter[str] = field(default_factory=Counter)
    """How often each op occurs, by `ns::op`."""
