"""Numbers that the forward's own source has -> tensors that live as long as the program.

In: a graph with `torch.tensor([1, 2])`, `x[:, [0, 2]]` or `state[0] = 2`. Out: the same graph with
an input for each list of numbers. Such numbers lie on the host, and are copied to the device at
each call: a graph cannot hold that copy, nor need it, since they never change.
"""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pcgsvc.errors import CompileError

LITERAL = "literal"
"""Of a binding; its name says the numbers and their dtype."""
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
Place = Callable[[str, torch.Tensor], torch.fx.Node]
"""Returns the graph input for a name and its tensor."""
_KINDS = (bool, int, float)
_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def literal(name: str, device: torch.device) -> torch.Tensor:
    """Return the tensor that a binding's name describes; the caller owns it.

    Raises:
        CompileError: it is no such name.
    """
    try:
        numbers, dtype = json.loads(name)
        return torch.tensor(numbers, dtype=getattr(torch, dtype), device=device)
    except (ValueError, TypeError, AttributeError, RuntimeError):
        raise CompileError(f"program: {name!r} says no numbers and dtype.") from None


def lift_literals(graph: torch.fx.Graph, device: torch.device, place: Place) -> None:
    """Replace numbers of the source that are copied to a device by inputs of the graph.

    Numbers for other devices stay: on the host, a number is an argument of a kernel.

    Args:
        graph: changed in place.
        device: where the module computes.
        place: returns the graph input for a name and its tensor, the same for the same name.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _MAKERS:
            _lift_made(graph, node, device, place)
        elif node.target in (operator.getitem, operator.setitem):
            _lift_index(node, device, place)


def _lift_made(
    graph: torch.fx.Graph, node: torch.fx.Node, device: torch.device, place: Place
) -> None:
    """Replace a tensor made of numbers by a copy of the input: each call makes a new one."""
    value = node.meta["example_value"]
    numbers = node.args[0] if len(node.args) == 1 else None
    same = value.device == device and not value.requires_grad and not node.all_input_nodes
    if not same or not all(type(n) in _KINDS for n in _leaves(numbers)):
        return
    lifted = place(*_literal(numbers, value.dtype, device))
    with graph.inserting_before(node):
        copied = graph.call_method("clone", (lifted,))
    copied.meta = dict(node.meta)
    node.replace_all_uses_with(copied)
    graph.erase_node(node)


def _lift_index(node: torch.fx.Node, device: torch.device, place: Place) -> None:
    """Replace the lists of an index, and a number that is assigned to what they pick.

    To a single element as well; what slices pick is filled without a copy, and so is what truth
    values do.
    """
    indexed = node.args[0].meta.get("example_value")  # type: ignore[union-attr]
    if not isinstance(indexed, torch.Tensor) or indexed.device != device:
        return
    index: Any = node.args[1]
    if isinstance(index, list) and not all(type(i) is int for i in index):
        return  # torch takes a list of lists for a tuple of them
    items = index if isinstance(index, tuple) else (index,)
    lifted = [place(*_literal(i, torch.int64, device)) if _is_list(i) else i for i in items]
    if lifted != list(items):
        node.update_arg(1, tuple(lifted))
    number: Any = node.args[2] if node.target is operator.setitem else None
    if type(number) in _KINDS and _copies_number(lifted, indexed.dim()):
        with contextlib.suppress(CompileError):  # the assignment raises what is wrong
            node.update_arg(2, place(*_literal(number, indexed.dtype, device)))


def _copies_number(index: list[Any], dims: int) -> bool:
    """Whether torch copies a number that is assigned to this index, rather than fills with it."""
    values = [i.meta.get("example_value") if isinstance(i, torch.fx.Node) else i for i in index]
    if len(values) == dims and all(isinstance(v, (int, torch.SymInt)) for v in values):
        return not any(isinstance(v, bool) for v in values)
    picked = [v.dtype for v in values if isinstance(v, torch.Tensor)]
    return bool(picked) and all(dtype in _NUMBERS for dtype in picked)


def _literal(numbers: Any, dtype: torch.dtype, device: torch.device) -> tuple[str, torch.Tensor]:
    name = json.dumps([numbers, str(dtype).removeprefix("torch.")])
    return name, literal(name, device)


def _is_list(index: Any) -> bool:
    """Whether an index is a list of whole numbers; one of truth values picks by its True."""
    leaves = list(_leaves(index)) if isinstance(index, (list, tuple)) else []
    return bool(leaves) and all(type(leaf) is int for leaf in leaves)


def _leaves(numbers: Any) -> Iterator[Any]:
    if not isinstance(numbers, (list, tuple)):
        yield numbers
        return
    for each in numbers:
        yield from _leaves(each)
