"""Graphs as rows: a canonical form that can be hashed, written to JSON, and turned into Python.

In: FX nodes. Out: rows of JSON types, and functions built from rows. Knows nothing of pieces,
compilers or devices. No pickle: a row names a callable that must be found under torch, operator or
math, and holds constants of a closed vocabulary.

A document is `{"inputs": [spec], "rows": [[op, target, args, kwargs]], "outputs": [index]}`; values
are numbered, inputs first, then one per row. Names of nodes appear nowhere, so two graphs that
differ in names alone are one document.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import keyword
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.errors import CompileError
from pcgsvc.trace.nodes import user_line

Row = list[Any]
Document = dict[str, Any]

_HOMES: dict[str, Any] = {"torch": torch, "operator": operator, "math": math, "builtins": builtins}
_BUILTINS = {"getattr", "len", "min", "max", "abs", "sum", "int", "float", "bool", "slice"}


_INSTEAD = {
    "torch._refs.tensor": "For torch.tensor(n) of a size n write torch.full((), n)",
    "torch._dynamo.utils.wrapped_": "For a function of numpy write torch's own",
}
"""What to write for callables that Dynamo puts into a graph in place of the user's, by prefix."""


# ---- callables -----------------------------------------------------------------------------------


def target_name(target: Any) -> str:
    """Return the dotted name of a callable; `find_target` gives the same object back.

    Raises:
        CompileError: the callable cannot be found again by a name under torch, operator or math.
    """
    if torch_private.is_torch_op(target):
        name = str(target)  # ns.op or ns.op.overload
        return f"torch.ops.{name}"
    guess = torch_private.qualified_name(target)
    for name in (guess, f"builtins.{guess}", guess.replace("_operator.", "operator.")):
        if _find(name) is target:
            return name
    short = getattr(target, "__name__", "")
    for home in ("torch", "torch._C._nn", "torch.nn.functional", "torch.Tensor", "operator"):
        if _find(f"{home}.{short}") is target:
            return f"{home}.{short}"
    instead = "Register"
    for start, words in _INSTEAD.items():
        if guess.startswith(start):
            instead = f"{words}; or register"
    raise CompileError(
        f"{guess}: called in the graph, but no public name under torch, operator or math leads "
        f"to it, so the piece cannot be written down. {instead} it with pcgsvc.splitting_op or "
        "torch.library."
    )


def find_target(name: str) -> Callable[..., Any]:
    """Return the callable that `target_name` named; CompileError if it is gone."""
    found: Any = _find(name)
    if not callable(found):
        raise CompileError(
            f"{name}: a stored piece calls it, but this process has no such callable; import the "
            "module that registers it first."
        )
    function: Callable[..., Any] = found
    return function


_FUNCTION_HOMES = {"torch", "torch.functional", "torch.nn.functional", "torch._jit_internal"}
_FUNCTION_HOMES |= {"torch.amp.autocast_mode", "torch._tensor", "torch._C", "torch._C._nn"}


def _may_be_called(function: Any) -> bool:
    """Whether a callable under torch computes: `torch.load`, `torch.hub.load` and such do not."""
    if torch_private.is_torch_op(function):
        return True
    home = getattr(function, "__module__", None)  # None: written in C
    return home is None or home.split("torch._C._")[0] in ("", *_FUNCTION_HOMES)


def _find(name: str) -> Any:
    home, _, rest = name.partition(".")
    found = _HOMES.get(home)
    if home == "builtins" and rest not in _BUILTINS:
        return None
    if any(part.startswith("__") for part in rest.split(".")) and not rest.startswith("ops."):
        return None
    for part in rest.split("."):
        found = getattr(found, part, None)
        # torch.os.system is a path of attributes as well: stay inside the home package.
        if isinstance(found, types.ModuleType) and not found.__name__.startswith(home):
            return None
    if rest.startswith("ops.") and not torch_private.is_torch_op(found):
        return None
    return found if home != "torch" or not callable(found) or _may_be_called(found) else None


# ---- constants -----------------------------------------------------------------------------------

_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def encode(value: Any, ref: Callable[[torch.fx.Node], int]) -> list[Any]:
    """Return a constant, a container or a node reference in JSON types, tagged by kind."""
    if isinstance(value, torch.fx.Node):
        return ["v", ref(value)]
    if value is None or value is ...:
        return ["none" if value is None else "ellipsis"]
    if type(value) in (bool, int, str):
        return [type(value).__name__, value]
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, _NAMED):
        return ["torch", str(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, (tuple, list)):  # torch.Size and immutable_list included
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [encode(v, ref) for v in value]]
    if isinstance(value, slice):
        return ["slice", [encode(v, ref) for v in (value.start, value.stop, value.step)]]
    if isinstance(value, Mapping):
        return ["dict", [[encode(k, ref), encode(v, ref)] for k, v in value.items()]]
    raise CompileError(
        f"{value!r} ({type(value).__name__}): a constant in the graph that has no written form. "
        "Pass tensors as inputs, or move the call into a splitting op."
    )


def source_of(item: Sequence[Any], name: Callable[[int], str]) -> str:
    """Return Python source of an encoded value."""
    kind, *rest = item
    if kind == "v":
        return name(rest[0])
    if kind == "dict":
        pairs = (f"{source_of(k, name)}: {source_of(v, name)}" for k, v in rest[0])
        return f"{{{', '.join(pairs)}}}"
    if kind in ("list", "tuple", "slice"):
        parts = ", ".join(source_of(v, name) for v in rest[0])
        if kind == "tuple":
            return f"({parts},)" if len(rest[0]) == 1 else f"({parts})"
        return f"[{parts}]" if kind == "list" else f"slice({parts})"
    value = decode(item, ())
    if isinstance(value, complex):
        real, imaginary = (source_of(["float", part], name) for part in rest)
        return f"complex({real}, {imaginary})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return "..." if value is ... else repr(value)


def decode(item: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return what `encode` was given, with node references looked up in `values`.

    Raises:
        Exception: of Python's kinds, if the item is malformed.
    """
    kind, *rest = item
    if kind == "v":
        return values[rest[0]]
    if kind in ("list", "tuple", "slice"):
        parts = [decode(v, values) for v in rest[0]]
        return slice(*parts) if kind == "slice" else tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        return {decode(k, values): decode(v, values) for k, v in rest[0]}
    if kind == "torch":
        named = getattr(torch, str(rest[0]).removeprefix("torch."))
        if not isinstance(named, _NAMED):
            raise TypeError(f"{rest[0]!r} is no constant of torch")
        return named
    if kind == "device":
        return torch.device(rest[0])
    if kind == "float":
        return float.fromhex(rest[0])
    if kind == "complex":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if kind in ("bool", "int", "str"):
        if type(rest[0]).__name__ != kind:
            raise TypeError(f"{rest[0]!r} is no {kind}")
        return rest[0]
    if kind not in ("none", "ellipsis"):
        raise ValueError(f"unknown constant kind {kind!r}")
    return None if kind == "none" else ...


def refs(item: Any) -> set[int]:
    """Return the value numbers that an encoded item refers to."""
    if isinstance(item, list) and item and item[0] == "v":
        return {item[1]}
    if isinstance(item, list):
        return set().union(*(refs(i) for i in item)) if item else set()
    return set()


# ---- documents -----------------------------------------------------------------------------------


def encode_row(node: torch.fx.Node, ref: Callable[[torch.fx.Node], int]) -> Row:
    """Return the row of one `call_function` or `call_method` node.

    Raises:
        CompileError: it has no written form; the message ends with the user's line.
    """
    if node.op not in ("call_function", "call_method"):
        raise CompileError(
            f"{node.op} {node.target}: a graph node of a kind that has no written form; move it "
            "into a splitting op."
        )
    try:
        target = target_name(node.target) if node.op == "call_function" else str(node.target)
        return [node.op, target, encode(list(node.args), ref), encode(dict(node.kwargs), ref)]
    except CompileError as error:
        raise CompileError(f"{error} It is called at {user_line(node)}.") from error


def digest(document: Any) -> str:
    """Return the sha256 of a JSON-able object in canonical form."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def python_of(document: Document, name: str) -> str:
    """Return the source of a function that computes a document; unused values are freed early."""
    num_inputs = len(document["inputs"])

    def var(index: int) -> str:
        return f"i{index}" if index < num_inputs else f"v{index}"

    last_use: dict[int, int] = {}
    for at, row in enumerate(document["rows"]):
        for used in refs(row[2]) | refs(row[3]):
            last_use[used] = at
    outputs = set(document["outputs"])
    lines = [f"def {name}({', '.join(var(i) for i in range(num_inputs))}):"]
    for at, (op, target, args, kwargs) in enumerate(document["rows"]):
        index = num_inputs + at
        words = [source_of(a, var) for a in args[1]]
        named = [f"{k[1]}={source_of(v, var)}" for k, v in kwargs[1]]
        if op == "call_method":
            call = f"{words[0]}.{target}({', '.join(words[1:] + named)})"
        else:
            call = f"{target}({', '.join(words + named)})"
        dead = [var(u) for u, use in sorted(last_use.items()) if use == at and u not in outputs]
        free = f"; {' = '.join(dead)} = None" if dead else ""
        lines.append(f"    {var(index)} = {call}{free}")
    result = ", ".join(var(i) for i in document["outputs"])
    lines.append(f"    return ({result}{',' if len(document['outputs']) == 1 else ''})")
    return "\n".join(lines) + "\n"


def check_document(document: Document) -> None:
    """Refuse a document that is malformed or holds anything but calls and constants we know.

    Its text becomes Python source, so that names in it must be names and nothing else.

    Raises:
        CompileError: naming the row.
    """
    known = len(document["inputs"])
    for op, target, args, kwargs in document["rows"]:
        if op == "call_function":
            find_target(str(target))
        elif op != "call_method" or not _is_method(str(target)):
            raise CompileError(f"stored piece: row {op!r} {target!r} is not of a known kind.")
        try:
            _check_row(args, kwargs, known)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CompileError(f"stored piece: row {target!r} is malformed: {error}.") from error
        known += 1
    if not all(type(i) is int and 0 <= i < known for i in document["outputs"]):
        raise CompileError(f"stored piece: outputs {document['outputs']} do not exist.")


def _check_row(args: Any, kwargs: Any, known: int) -> None:
    """Check the encoded arguments of one row; any of Python's exceptions: they are malformed."""
    for used in refs(args) | refs(kwargs):
        if type(used) is not int or not 0 <= used < known:
            raise ValueError(f"value {used!r} does not exist")
    given, named = decode(args, range(known)), decode(kwargs, range(known))
    if not (isinstance(given, list) and isinstance(named, dict) and all(map(_is_word, named))):
        raise ValueError("no list of arguments, or a name that is none")


def _is_word(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _is_method(name: str) -> bool:
    public = not name.startswith("_") or name in _OPERATORS
    return (public and _is_word(name) and hasattr(torch.Tensor, name)) or name == "__round__"


_OPERATORS = {n for n in vars(operator) if n.startswith("__") and n in vars(torch.Tensor.__base__)}


def function_of(document: Document, name: str) -> Callable[..., tuple[Any, ...]]:
    """Build the function of `python_of`. Every callable must be found by `find_target` first.

    Raises:
        CompileError: the document names a callable that does not exist here, or is malformed.
    """
    check_document(document)
    source = python_of(document, name)
    allowed = {k: getattr(builtins, k) for k in _BUILTINS}
    space: dict[str, Any] = {**_HOMES, "builtins": types.SimpleNamespace(**allowed)}
    # Some ops import a part of torch at their first call, with the builtins of the calling frame.
    space["__builtins__"] = {"__import__": _import_of_torch}
    space |= {"float": float, "complex": complex, "slice": slice}
    filename = f"<pcgsvc {digest(source)[:12]}>"
    exec(compile(source, filename, "exec"), space)
    function: Callable[..., tuple[Any, ...]] = space[name]
    return function


def _import_of_torch(name: str, *args: Any) -> Any:
    if name.partition(".")[0] != "torch":
        raise ImportError(f"a piece imports {name}, which is no part of torch")
    return __import__(name, *args)
