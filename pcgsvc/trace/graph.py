"""What tracing gives: the canonical graph, its bindings, and what it assumes.

In: nothing. Out: the types that the later stages read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pcgsvc.forward.results import ResultTree
from pcgsvc.forward.specs import Binding, SizePredicate, TensorSpec


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
