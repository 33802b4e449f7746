"""What an FX node of a Dynamo graph is: its op's names, what it writes to, whose line it is.

In: FX nodes. Out: facts about them.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils import _pytree as pytree

from pcgsvc import torch_private


def op_names(node: torch.fx.Node) -> list[str]:
    """Return the names by which a node's op may be asked for: `ns::op` first, then Python names."""
    if node.op == "call_method":
        return [f"aten::{node.target}", f"Tensor.{node.target}"]
    if node.op != "call_function":
        return []
    name = torch_private.op_name(node.target)
    if name is not None:
        return [name]
    short = getattr(node.target, "__name__", str(node.target))
    qualified = torch_private.qualified_name(node.target)  # type: ignore[arg-type]
    return [f"aten::{short}", qualified, qualified.replace("torch._C._nn", "torch.nn.functional")]


_NAMES = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul setitem"
_INPLACE_OPERATORS = {getattr(operator, name) for name in _NAMES.split()}


def mutated_args(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the tensor arguments that a node writes to, by schema or by torch's naming rule."""
    if node.op not in ("call_function", "call_method"):
        return []
    found: list[Any] = []
    schema = torch_private.op_schema(node.target) if node.op == "call_function" else None
    if schema is not None:
        for at, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                by_name = node.kwargs.get(argument.name)
                found.append(node.args[at] if at < len(node.args) else by_name)
    else:
        given = _named_args(node)
        if _is_in_place(node) or given.get("inplace") is True:
            found.append(node.args[0] if node.args else node.kwargs.get("input"))
        asked, names = _WRITES_IF.get(node.target, ("", ()))
        if given.get(asked) not in (None, False):
            found += [given.get(name) for name in names]
        found.append(node.kwargs.get("out"))
    return [
        n
        for n in pytree.tree_leaves(found)
        if isinstance(n, torch.fx.Node) and isinstance(n.meta.get("example_value"), torch.Tensor)
    ]


def _is_in_place(node: torch.fx.Node) -> bool:
    """Whether a call without a schema writes to its first argument by its name."""
    target = node.target
    if getattr(target, "__module__", None) == operator.add.__module__:
        return target in _INPLACE_OPERATORS  # `and_` and `or_` are named so as not to be keywords
    name = str(target if node.op == "call_method" else getattr(target, "__name__", ""))
    return name.endswith("_") and not name.endswith("__")


def _named_args(node: torch.fx.Node) -> Mapping[str, Any]:
    """Return what a function is given, by name; of builtins only where it is asked for."""
    if node.op == "call_function" and node.target in _BUILTINS:
        return {**dict(zip(_BUILTINS[node.target], node.args, strict=False)), **node.kwargs}
    if not isinstance(node.target, FunctionType):
        return node.kwargs
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError:
        return node.kwargs
    bound.apply_defaults()
    return bound.arguments


_WRITES_IF: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.embedding: ("max_norm", ("weight",)),
    F.embedding_bag: ("max_norm", ("weight",)),
    F.batch_norm: ("training", ("running_mean", "running_var")),
    F.instance_norm: ("use_input_stats", ("running_mean", "running_var")),
    torch.batch_norm: ("training", ("running_mean", "running_var")),
    torch.instance_norm: ("use_input_stats", ("running_mean", "running_var")),
}
"""Functions that write to some of their arguments if another one asks for it."""
_STATISTICS = ("input", "weight", "bias", "running_mean", "running_var")
_BUILTINS: dict[Any, tuple[str, ...]] = {
    torch.batch_norm: (*_STATISTICS, "training"),
    torch.instance_norm: (*_STATISTICS, "use_input_stats"),
}
"""Those of them that have no signature, with the names of their first arguments."""


def name_once(output: torch.fx.Node) -> None:
    """Read what an operator in place has written by the tensor that it wrote to, as Python does.

    As another value it would be a result of the region that writes it, and a compiler may give it
    memory of its own: what a splitting op then writes to the one would be missing in the other.
    State stays what the forward returns of it.
    """
    for node in output.graph.nodes:
        written = mutated_args(node)
        if len(written) == 1 and _returns_it(node, written[0]):
            (tensor,) = written
            is_kept = tensor.op == "placeholder" or tensor in output.all_input_nodes
            node.replace_all_uses_with(tensor, lambda user, k=is_kept: not (k and user is output))


def _returns_it(node: torch.fx.Node, written: torch.fx.Node) -> bool:
    """Whether an operator of torch's own returns the very tensor that it writes to."""
    made, tensor = node.meta.get("example_value"), written.meta["example_value"]
    if not isinstance(made, torch.Tensor) or made.layout is not torch.strided:
        return False
    name = torch_private.op_name(node.target) if node.op == "call_function" else None
    plain = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    packet = getattr(torch.ops.aten, str(plain), None)
    tags = torch_private.op_tags(node.target) | torch_private.op_tags(packet)
    return (
        (name is None or name.startswith("aten::"))
        and torch.Tag.inplace_view not in tags  # `x.t_()`: later code reads another shape
        and torch_private.storage_id(made) == torch_private.storage_id(tensor)
        and (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        and made.storage_offset() == tensor.storage_offset()
    )


_TRACER = str(Path(__file__).with_name("dynamo.py"))
"""Its frames stand between Dynamo and the model, and say nothing to a user."""


def frames_of(text: str) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of each frame in a traceback, but for the tracer's own."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    return [frame for frame in frames if frame[0] != _TRACER]


def user_line(node: torch.fx.Node) -> str:
    """Return `file:line in function` of the user's code behind a node."""
    frames = frames_of(node.stack_trace or "")
    own = [f for f in frames if not torch_private.is_torch_file(f[0])] or frames
    return "{}:{} in {}".format(*own[-1]) if own else f"graph node {node.name}"


def iter_calls(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """Yield the nodes that compute something."""
    return (n for n in graph.nodes if n.op in ("call_function", "call_method", "call_module"))
