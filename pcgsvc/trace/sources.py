"""Which line of a user's class sets an attribute; for messages where a trace does not know.

In: a module and a dotted attribute name. Out: `file:line in function`, read from the source text.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
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
