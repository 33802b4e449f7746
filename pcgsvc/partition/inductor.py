"""`partition.strategy=inductor`: one artifact of the whole graph, broken where it calls its ops.

In: a traced graph and where the `fx` strategy would cut it. Out: a partition of one piece that
knows its boundaries. Fusion sees across them; the capture session ends a segment when the artifact
calls one. Knows nothing of how the artifact is compiled or captured.
"""

from __future__ import annotations

from typing import Any

import torch

from pcgsvc.errors import ConfigError
from pcgsvc.partition.fx import document_of
from pcgsvc.program.pieces import Kind, Partition, Piece
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import iter_calls, mutated_args
from pcgsvc.trace.rows import digest


def partition_inductor(traced: TracedGraph, plan: Partition) -> Partition:
    """Return the whole graph as one piece.

    Args:
        traced: the canonical graph.
        plan: the same graph cut by the `fx` strategy: its splitting ops are the boundaries.

    Raises:
        ConfigError: a splitting op is one of torch's own, which Inductor would lower to kernels.
    """
    lowered = [name for name in plan.matched if name.startswith(("aten::", "prims::"))]
    if lowered:
        raise ConfigError(
            f"partition.splitting_ops: {lowered} are torch's own operators, which Inductor lowers "
            "and fuses, so nothing calls them any more. Under partition.strategy=inductor only "
            "custom operators can be boundaries; use partition.strategy=fx."
        )
    inputs = [n for n in traced.graph.find_nodes(op="placeholder") if n.users]
    results: Any = traced.graph.output_node().args[0]
    piece = Piece(
        index=0,
        kind=Kind.REGION,
        reason="the whole graph, partitioned after fusion",
        nodes=list(iter_calls(traced.graph)),
        inputs=inputs,
        outputs=list(dict.fromkeys(r for r in results if r.op != "placeholder")),
    )
    piece.document = document_of(traced, piece)
    piece.document["boundaries"] = _boundaries(traced, plan)
    piece.hash = digest(piece.document)
    return Partition(pieces=[piece], matched=plan.matched, reasons=plan.reasons)


def _boundaries(traced: TracedGraph, plan: Partition) -> list[list[Any]]:
    """Return name and row-wise arguments of every splitting op, in order."""
    found = []
    for piece in plan.pieces:
        for node, name in piece.splitting.items():
            written = mutated_args(node)
            rows = [
                at
                for at, arg in enumerate(node.args)
                if arg in written and 0 in traced.spec_of(arg).row_dims()  # type: ignore[arg-type]
            ]
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and 0 in traced.spec_of(node).row_dims():
                rows = rows or [-1]
            found.append([name, rows])
    return found
