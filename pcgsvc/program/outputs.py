"""How a forward's result is put together from graph results.

In: results of a replay. Out: the result with the forward's own structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pcgsvc.forward.results import ResultTree
from pcgsvc.forward.specs import TensorSpec, cut_rows


@dataclass(kw_only=True)
class OutputPlan:
    """How a forward's result is put together from graph results."""

    leaves: list[tuple[str, int]]
    """Per tensor leaf: ("graph", result index) or ("input", input index)."""
    constants: dict[int, Any]
    """Leaves that are no tensors, by leaf index."""
    tree: ResultTree
    """How the leaves are nested."""
    specs: list[TensorSpec]
    """Per graph result."""

    @cached_property
    def is_one_tensor(self) -> bool:
        """Whether the forward returns the graph's first result, as it is."""
        return self.tree.is_leaf and self.leaves == [("graph", 0)]

    def cut(self, results: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Return the true rows of graph results, as views."""
        pairs = zip(results, self.specs, strict=True)
        return [cut_rows(result, spec.row_dims(), rows) for result, spec in pairs]

    def build(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """Return the forward's result with its own structure; inputs are in the forward's order."""
        if self.is_one_tensor:
            return results[0]
        tensors = iter(results[i] if k == "graph" else inputs[i] for k, i in self.leaves)
        count = len(self.leaves) + len(self.constants)
        leaves = [self.constants[i] if i in self.constants else next(tensors) for i in range(count)]
        return self.tree.build(leaves)
