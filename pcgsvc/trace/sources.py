"""What sets an attribute in a forward: a line of a user's class, or a hook of torch's.

In: a module and a dotted attribute name. Out: `file:line in function`, read from the source text;
or the call that ends it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pcgsvc.forward.objects import own_bases


def line_that_sets(module: Callable[..., Any], name: str) -> str | None:
    """Return where a method of the module sets attribute `name` (`sub.calls`), or None.

    `__init__` does not count; of several lines the first is meant.
    """
    owner: Any = module
    path, _, attribute = name.rpartition(".")
    if not isinstance(owner, torch.nn.Module):
        return None
    for part in path.split(".") if path else ():
        inner = getattr(owner, part, None)
        if not isinstance(inner, torch.nn.Module):  # a list or dict that the module holds
            attribute = part
            break
        owner = inner
    lines = (line for cls in own_bases(type(owner)) for line in _lines(cls, attribute))
    return next(lines, None)


_MADE_PERMANENT = {
    "torch.nn.utils.prune": "torch.nn.utils.prune.remove",
    "torch.nn.utils.spectral_norm": "torch.nn.utils.remove_spectral_norm",
    "torch.nn.utils.weight_norm": "torch.nn.utils.remove_weight_norm",
}
"""Modules of torch's whose hooks set an attribute before each forward, and what ends that."""


def made_permanent(module: Callable[..., Any], names: Iterable[str]) -> str:
    """Say how attributes that hooks of torch's set anew at each call are fixed at their values.

    Empty if none of `names` (dotted) is such an attribute.
    """
    calls = [call for name in names if (call := _permanent(module, name)) is not None]
    if not calls:
        return ""
    more = f" (and so for {len(calls) - 1} more)" if len(calls) > 1 else ""
    return f"a hook of torch's sets it anew; fix its value before the build: {calls[0]}{more}"


def _permanent(module: Callable[..., Any], name: str) -> str | None:
    path, _, attribute = name.rpartition(".")
    owners = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {}
    hooks = owners[path]._forward_pre_hooks.values() if path in owners else ()
    made_in = [cls.__module__ for hook in hooks for cls in type(hook).__mro__]
    function = next((_MADE_PERMANENT[m] for m in made_in if m in _MADE_PERMANENT), None)
    owner = f"model.get_submodule({path!r})" if path else "model"
    return None if function is None else f"{function}({owner}, {attribute!r})"


def _lines(cls: type, attribute: str) -> Iterator[str]:
    try:
        lines, first = inspect.getsourcelines(cls)
        file = inspect.getsourcefile(cls)
    except (OSError, TypeError):  # no source: typed in, or compiled
        return
    (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    for method in getattr(tree, "body", ()):
        if isinstance(method, ast.FunctionDef) and method.name != "__init__":
            for node in ast.walk(method):
                if _touches(node, attribute):
                    yield f"{file}:{first + node.lineno - 1} in {method.name}"  # type: ignore[attr-defined]


def _touches(node: ast.AST, attribute: str) -> bool:
    """Whether a node sets `….attribute`, or an item of it, or calls a method of it that may."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
        return any(_names(target, attribute) for target in targets)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Attribute) and _names(
            node.value.func.value, attribute
        )
    return False


def _names(node: ast.expr, attribute: str) -> bool:
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(_names(item, attribute) for item in node.elts)
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _names(node.value, attribute)
    return isinstance(node, ast.Attribute) and node.attr == attribute
