"""Functional collectives and their waits -> one op each.

In: a graph with Dynamo's `_c10d_functional` ops. Out: the same graph with `pcgsvc::all_reduce` and
its like, which wait; in place where nothing reads the operand afterwards, without a copy. Dynamo
makes functional ones of in-place collectives too, and of those of DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import TraceError
from pcgsvc.ops.collectives import FOREIGN, check_backend, group_word
from pcgsvc.trace.nodes import mutated_args, op_names, user_line

_WAIT = "_c10d_functional::wait_tensor"
_OPS = {
    "_c10d_functional::all_reduce": torch.ops.pcgsvc.all_reduce,
    "_c10d_functional::broadcast": torch.ops.pcgsvc.broadcast,
    "_c10d_functional::all_gather_into_tensor": torch.ops.pcgsvc.all_gather,
    "_c10d_functional::reduce_scatter_tensor": torch.ops.pcgsvc.reduce_scatter,
}
_IN_PLACE = (torch.ops.pcgsvc.all_reduce, torch.ops.pcgsvc.broadcast)


def unite_collectives(graph: torch.fx.Graph) -> None:
    """Put one op in the place of each collective and its waits.

    Raises:
        TraceError: a collective that there is no op for, or whose result is read unwaited.
    """
    for node in [n for n in graph.nodes if _name(n) == _WAIT]:
        if _name(node.args[0]) not in _OPS:  # once more, or of what was no collective
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in [n for n in graph.nodes if _name(n) != _WAIT]:
        name = _name(node)
        if name in _OPS:
            _unite(graph, node, _OPS[name])
        elif name.startswith(FOREIGN):
            raise TraceError(
                f"{name} at {user_line(node)}: a collective that no graph can hold. Those that can "
                f"be: {sorted(n.partition('::')[2] for n in _OPS)}. Call it in a splitting op."
            )


def _name(node: torch.fx.Node) -> str:
    return (op_names(node) or [""])[0]


def _unite(graph: torch.fx.Graph, node: torch.fx.Node, op: Any) -> None:
    waits = [user for user in node.users if _name(user) == _WAIT]
    if len(waits) < len(node.users) or not waits:
        raise TraceError(
            f"{_name(node)} at {user_line(node)}: its result is read before it is waited for. Wait "
            "for it (torch.distributed._functional_collectives.wait_tensor) first."
        )
    operand, *words, group = node.args
    assert isinstance(operand, torch.fx.Node), "Dynamo passes the arguments of collectives by place"
    group = torch_private.group_named(group) if isinstance(group, str) else group
    check_backend(group, operand.meta["example_value"].device)
    word = group_word(group)
    if op not in _IN_PLACE:
        with graph.inserting_before(node):
            made = graph.call_function(op, (operand, *words, word))
        made.meta = dict(node.meta)
        result = made
    else:
        _refuse_gaps(node, operand, waits)
        result = _target(graph, node, operand, waits)
        with graph.inserting_before(node):
            made = graph.call_function(op, (result, *words, word))
        made.meta = {**node.meta, "example_value": None}
    for wait in waits:
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
    graph.erase_node(node)


def _target(
    graph: torch.fx.Graph, node: torch.fx.Node, operand: torch.fx.Node, waits: list[torch.fx.Node]
) -> torch.fx.Node:
    """Return what a collective may write to: its operand, or a copy."""
    example = operand.meta["example_value"]
    if example.is_contiguous():
        back = [_is_copy_back(user, operand, wait) for wait in waits for user in wait.users]
        if len(waits) == 1 and back == [True]:  # `dist.all_reduce(x)` itself
            (copy,) = waits[0].users
            # What stands between reads the operand as it was.
            if waits[0] is node.next and copy is waits[0].next:
                copy.replace_all_uses_with(operand)
                graph.erase_node(copy)
                return operand
        if _is_over(graph, node, operand):
            operand.meta = {**operand.meta, "example_value": waits[0].meta["example_value"]}
            return operand
    with graph.inserting_before(node):
        copy = graph.call_function(
            torch.clone, (operand,), {"memory_format": torch.contiguous_format}
        )
    copy.meta = dict(waits[0].meta)
    return copy


def _refuse_gaps(node: torch.fx.Node, operand: torch.fx.Node, waits: list[torch.fx.Node]) -> None:
    """Refuse a collective in place on a view with gaps: torch's own takes what lies between."""
    example = operand.meta["example_value"]
    outer_first = sorted(range(example.dim()), key=lambda dim: -example.stride(dim))
    in_place = any(_is_copy_back(user, operand, wait) for wait in waits for user in wait.users)
    if in_place and not example.permute(outer_first).is_contiguous():
        raise TraceError(
            f"{_name(node)} at {user_line(node)}: in place on a view with gaps, where torch takes "
            "the memory between for its own and gives wrong sums. Make it contiguous first, and "
            "copy the result back: y = h[:, 4:].contiguous(); all_reduce(y); h[:, 4:] = y."
        )


def _is_copy_back(user: torch.fx.Node, operand: torch.fx.Node, wait: torch.fx.Node) -> bool:
    return _name(user) == "aten::copy_" and user.args == (operand, wait)


def _is_over(graph: torch.fx.Graph, node: torch.fx.Node, operand: torch.fx.Node) -> bool:
    """Whether nothing but a collective reads its operand's memory from then on.

    Nor may it be written to between operand and collective: the operand is said to have the
    result's storage, by which later stages tell who writes to whose memory.
    """
    storage = torch_private.storage_id(operand.meta["example_value"])
    nodes = list(graph.nodes)
    at, made = nodes.index(node), nodes.index(operand)

    def is_same(other: torch.fx.Node) -> bool:
        leaves = pytree.tree_leaves(other.meta.get("example_value"))
        return any(
            isinstance(t, torch.Tensor) and torch_private.storage_id(t) == storage for t in leaves
        )

    if any(map(is_same, graph.find_nodes(op="placeholder"))):
        return False
    written = (a for n in nodes[made + 1 : at] for a in mutated_args(n))
    read = (a for n in nodes[at + 1 :] for a in n.all_input_nodes)
    return not any(map(is_same, written)) and not any(map(is_same, read))
