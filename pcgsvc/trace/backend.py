"""Dynamo's backend hook: the graph, its inputs and guards, without running anything.

In: what Dynamo hands to a backend. Out: a `DynamoCapture`, or a TraceError that calls what no
program can hold as users do, with its line and the ways out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.errors import TraceError
from pcgsvc.ops.breaks import WAYS_OUT, higher_order_refusal
from pcgsvc.trace.graph import Guard
from pcgsvc.trace.nodes import user_line

_MODULE = re.compile(r"L\['module'\](\._modules\['[^']*'\])*(\._buffers|\._parameters)?")
"""A module of the model; what is set on one is looked at afterwards, attribute by attribute."""
_INPUT_VIEW = re.compile(r"L\['tensors'\]\[(\d+)\]\.(T|mT|H|mH|real|imag)")


class DynamoCapture:
    """What Dynamo handed to its backend and its guard filter."""

    def __init__(self, examples: list[torch.Tensor]) -> None:
        self.examples = examples
        self.graph: torch.fx.GraphModule | None = None
        """None: Dynamo calls no backend for a forward without any op."""
        self.graph_inputs: list[Any] = []
        self.shape_env: Any = None
        self.guards: list[Guard] = []
        self.refusal: str | None = None
        """Why the hook ended the trace."""
        self.sentinels: list[torch.Tensor] = []
        """In place of the graph's results; Dynamo's bytecode puts them where those would go."""

    def guard_sink(self, entries: Sequence[Any]) -> None:
        """Keep Dynamo's guards; the last call has them all."""
        self.guards = [
            Guard(source=e.name, kind=e.guard_type, value=torch_private.guard_value(e))
            for e in entries
        ]

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Keep the graph, and hand back sentinels in place of results."""
        self.graph, self.graph_inputs = graph, list(inputs)
        self.shape_env = torch_private.tracing_shape_env()
        (outputs,) = graph.graph.output_node().args
        assert isinstance(outputs, (tuple, list))
        self.refusal = _refusal(outputs)
        if self.refusal is not None:  # raised here, before Dynamo's bytecode carries it out
            raise RuntimeError(self.refusal)
        made = [node.meta.get("example_value") for node in graph.graph.nodes]
        if any(torch_private.is_dtensor(v) or torch_private.is_mesh(v) for v in (*inputs, *made)):
            self.graph, self.graph_inputs = torch_private.lowered_dtensors(graph, inputs)
            own = self.graph.graph.find_nodes(op="get_attr")
            if own:
                users = ", ".join(sorted({str(u.target) for n in own for u in n.users}))
                self.refusal = (
                    f"an operation on DTensors makes a tensor of its own (for {users}), which no "
                    "piece can hold. Compute on .to_local() there, or in a splitting op."
                )
                raise RuntimeError(self.refusal)
        # Of one element: Dynamo's bytecode calls .item() on a result that stands for a float.
        sentinels = tuple(torch.zeros(()) for _ in outputs)
        self.sentinels = list(sentinels)
        return lambda *args: sentinels  # Dynamo keeps it: it must not hold `self`


def _refusal(outputs: Sequence[Any]) -> str | None:
    """Return which side effect of the forward cannot be carried out at each replay, or None."""
    for node in outputs:
        if isinstance(node, torch.fx.Node) and torch_private.is_dtensor(node.meta["example_value"]):
            return (
                f"the forward returns a DTensor, made at {user_line(node)}: return .to_local() or \
.full_tensor()."
            )
    outside = [s for s in torch_private.side_effects() if not _MODULE.fullmatch(s)]
    for view in filter(None, map(_INPUT_VIEW.fullmatch, outside)):
        # Dynamo leaves these to its bytecode (up to 2.13 `.T` too), as if they were changes.
        return view_refusal(view.group(2), int(view.group(1)) + 1)
    if not outside:
        return None
    if any(s.endswith("parametrize']._cache") for s in outside):
        return (
            "the forward uses torch.nn.utils.parametrize.cached(), which keeps values from call to "
            "call: a Python side effect, which would happen once, at tracing. Leave it out; a "
            "graph computes the parametrized tensors at each call."
        )
    lines = ", ".join(dict.fromkeys(user_line(n) for n in outputs))
    return (
        f"the forward changes {', '.join(outside)} (its results, and what it stores, are made at "
        f"{lines}): a Python side effect, which would happen once, at tracing, and never again. "
        "Return the value instead."
    )


def view_refusal(view: str, at: int) -> str:
    """Return why a forward may not return a view of an input."""
    return (
        f"the forward returns .{view} of input {at} as it is, a view of the caller's tensor; a "
        "runner copies inputs. Return a copy: .clone()."
    )


# ---- what no program can hold --------------------------------------------------------------------


_INSTEAD = {
    "torch.nn.attention.sdpa_kernel": "leave the choice of kernel to torch",
    "torch.func": "write the computation for the whole batch",
    "torch.inference_mode": "leave it out, since a runner computes no gradients",
    "torch.set_default_dtype": "name the dtype where tensors are made",
}
"""What does the same without a context manager or transform."""


def refuse_unsupported(graph: torch.fx.Graph) -> None:
    """Refuse what a piece cannot hold, or what would not reach splitting ops.

    That is higher-order operators and opaque functions; and context managers.

    Raises:
        TraceError: there is one in the graph.
    """
    nodes = list(graph.nodes)
    for node in nodes:  # first: some make their arguments under a transform
        _refuse_higher_order(node)
    for at, node in enumerate(nodes):
        name = torch_private.transform_name(node.target)
        if name is not None:
            lined = next((n for n in nodes[at:] if n.stack_trace), node)
            raise TraceError(
                f"{name} at {user_line(lined)}: it sets state of torch's for a stretch of Python; "
                "graphs, and the splitting ops between them, run without it. Ways out: "
                f"{_INSTEAD[name]}; or as follows. {WAYS_OUT}"
            )
    for node in graph.find_nodes(op="get_attr"):
        if not isinstance(node.meta.get("example_value"), torch.Tensor):
            raise TraceError(
                f"{user_line(next(iter(node.users), node))}: a function that Dynamo does not look "
                "into (torch._dynamo.nonstrict_trace), which no piece can hold. Register it with "
                "torch.library.custom_op or pcgsvc.splitting_op, or leave the mark out."
            )


def _refuse_higher_order(node: torch.fx.Node) -> None:
    """Refuse operators whose bodies are graphs of their own: a piece is one list of calls."""
    name = torch_private.higher_order_name(node.target)
    if name is not None:
        raise higher_order_refusal(name, user_line(node))
