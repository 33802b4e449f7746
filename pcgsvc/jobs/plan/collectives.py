"""What the ranks of a plan send to each other in a step.

In: a traced graph. Out: plain dicts of JSON types. Knows nothing of groups or of time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from pcgsvc.forward.specs import value_at
from pcgsvc.jobs.plan.lifetimes import num_bytes
from pcgsvc.ops.collectives import COLLECTIVES
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import op_names


def collectives_of(traced: TracedGraph, sizes: list[int]) -> list[dict[str, Any]]:
    """Return the collectives of one step, equal ones together, with their bytes at each size.

    The bytes of one are those of the tensor that all ranks have afterwards, or of the larger one
    that they had before.
    """
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for node in traced.graph.nodes:
        for name in set(op_names(node)) & COLLECTIVES:
            given = [a for a in node.args if isinstance(a, torch.fx.Node)]
            values = [n.meta.get("example_value") for n in (node, *given)]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            at = [max(value_at(num_bytes(traced, t), rows) for t in tensors) for rows in sizes]
            found[name, tuple(at)] += 1
    return [
        {"op": name, "count": count, "bytes": dict(zip(map(str, sizes), at, strict=True))}
        for (name, at), count in found.items()
    ]
