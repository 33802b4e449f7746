"""What Dynamo puts into a graph and no program can hold.

In: Dynamo's graph. Out: a TraceError that calls it as users do, with its line and the ways out.
"""

from __future__ import annotations

import torch

from pcgsvc import torch_private
from pcgsvc.errors import TraceError
from pcgsvc.ops.breaks import WAYS_OUT
from pcgsvc.trace.nodes import user_line

_HIGHER_ORDER = {
    "cond": ("torch.cond", "compute both branches, and choose with torch.where"),
    "tag_activation_checkpoint": (
        "torch.utils.checkpoint",
        "call the function itself, since there are no gradients to save memory for",
    ),
}
"""What users call a higher-order operator, and what does the same without it."""

_INSTEAD = {
    "torch.nn.attention.sdpa_kernel": "leave the choice of kernel to torch",
    "torch.func": "write the computation for the whole batch",
    "torch.inference_mode": "leave it out, since a runner computes no gradients",
    "torch.set_default_dtype": "name the dtype where tensors are made",
}
"""What does the same without a context manager or transform."""


def refuse_unsupported(graph: torch.fx.Graph) -> None:
    """Refuse higher-order operators, and context managers that would not reach splitting ops.

    Raises:
        TraceError: there is one in the graph.
    """
    nodes = list(graph.nodes)
    for at, node in enumerate(nodes):
        _refuse_higher_order(node)
        name = torch_private.transform_name(node.target)
        if name is not None:
            lined = next((n for n in nodes[at:] if n.stack_trace), node)
            raise TraceError(
                f"{name} at {user_line(lined)}: it sets state of torch's for a stretch of Python; "
                "graphs, and the splitting ops between them, run without it. Ways out: "
                f"{_INSTEAD[name]}; or as follows. {WAYS_OUT}"
            )


def _refuse_higher_order(node: torch.fx.Node) -> None:
    """Refuse operators whose bodies are graphs of their own: a piece is one list of calls."""
    name = torch_private.higher_order_name(node.target)
    if name is not None:
        called, instead = _HIGHER_ORDER.get(name, (name, "call its body itself"))
        raise TraceError(
            f"{called} at {user_line(node)}: a higher-order operator, which runs graphs of its "
            f"own; a piece has none. Ways out: {instead}; or as follows. {WAYS_OUT}"
        )
