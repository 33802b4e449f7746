"""`partition.strategy=fx`: cut the traced graph at splitting ops, before any compiler sees it.

In: `TracedGraph` and the names of the splitting ops. Out: `Partition`. Knows nothing of compilers
or replay.

    before   norm - linear - [attend] - linear - add - norm - linear - [attend] - linear - add
    after    region 0        bound. 1   region 2                       bound. 3   region 4

Original order is kept: reordering around an in-place write changes results. A `getitem` stays with
its producer, so that no tuple crosses a border.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import ConfigError, SplitError, near
from pcgsvc.ops.registry import default_boundaries, registered_names, why_boundary
from pcgsvc.program.pieces import Kind, Partition, Piece
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import iter_calls, mutated_args, op_names, user_line
from pcgsvc.trace.rows import Document, digest, encode_row

_REGISTERED = "registered splitting op"
"""Why an op is cut at that nobody has said more of."""
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_VIEWS = {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "t"),
    *("permute", "narrow", "select", "expand", "expand_as", "view_as", "detach", "chunk", "split"),
    *("unbind", "movedim", "size", "stride", "getitem"),
}


def partition_fx(
    traced: TracedGraph,
    splitting_ops: Sequence[str] | None,
    extra: Sequence[str] = (),
    registered: frozenset[str] | None = None,
) -> Partition:
    """Cut a traced graph at its splitting ops.

    Args:
        traced: the canonical graph; left as it is.
        splitting_ops: names (`ns::op`, `ns.op`, with or without overload); None: every registered
            splitting op that occurs, and ops tagged `cudagraph_unsafe`.
        extra: names that are cut at as well.
        registered: splitting ops that are cut at without being named; None: as `splitting_ops`
            says.

    Raises:
        ConfigError: a name was asked for that nothing in the graph matches.
        SplitError: the cut would change results.
    """
    matches, counts = _match(traced, splitting_ops, extra, registered)
    pieces = _assign(traced, matches)
    _refuse_open_autocast(pieces)
    _connect(traced, pieces)
    for piece in pieces:
        if piece.kind is Kind.REGION:
            piece.document = document_of(traced, piece)
            piece.hash = digest(piece.document)
    _prove_order(pieces)
    _reasons(pieces, matches)
    return Partition(
        pieces=pieces,
        matched=counts,
        reasons={m.name: m.reason for m in matches.values() if m.reason != _REGISTERED},
        warnings=_almost_alike(pieces),
    )


def _almost_alike(pieces: list[Piece]) -> list[str]:
    """Say when regions differ in nothing but constants, each of which is compiled by itself."""
    shapes: dict[str, set[str]] = {}
    for piece in pieces:
        if piece.document is not None and piece.hash is not None:
            shape = digest({**piece.document, "rows": _without_constants(piece.document["rows"])})
            shapes.setdefault(shape, set()).add(piece.hash)
    return [
        f"split: {len(hashes)} unique regions differ only in numbers or strings in their code, "
        "such as a layer's index or name; passed to the splitting op alone, they would be one"
        for hashes in shapes.values()
        if len(hashes) > 2
    ]


def _without_constants(item: Any) -> Any:
    """Return encoded rows with the values of numbers and strings left out."""
    if isinstance(item, list) and item and item[0] in ("int", "float", "str", "bool"):
        return item[0]
    return [_without_constants(i) for i in item] if isinstance(item, list) else item


# ---- which nodes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Match:
    name: str
    reason: str


def canonical_op_name(name: str) -> str:
    """Return `ns::op` for `ns::op`, `ns.op` and both with an overload; other names as they are."""
    text = name.removeprefix("torch.ops.")
    if "::" in text:
        namespace, _, rest = text.partition("::")
        return f"{namespace}::{rest.split('.')[0]}"
    parts = text.split(".")
    if len(parts) in (2, 3) and parts[0] not in ("torch", "Tensor", "operator"):
        return f"{parts[0]}::{parts[1]}"
    return name


def _aten_name(name: str) -> str:
    """Return the op of a function as users call it: `F.relu`, `relu`, `nn.functional.relu`."""
    home, _, short = name.rpartition(".")
    is_function = home in ("", "F", "functional", "nn.functional", "torch.nn.functional")
    return f"aten::{short}" if is_function else name


def _of_module(traced: TracedGraph, name: str) -> str:
    """Say which ops stand for a module of torch's that was named as a splitting op."""
    short = re.split(r"::|\.", name)[-1]
    cls = getattr(torch.nn, short, None)
    if not isinstance(cls, type):
        return ""
    inside = {
        op_names(node)[0]
        for node in iter_calls(traced.graph)
        for _, kind in (node.meta.get("nn_module_stack") or {}).values()
        if short in (getattr(kind, "__name__", ""), str(kind).rpartition(".")[2])
    }
    stands = f", which in this graph is {sorted(inside)}" if inside else ""
    return f" {short} is a module{stands}; a graph has operators only."


def _match(
    traced: TracedGraph,
    splitting_ops: Sequence[str] | None,
    extra: Sequence[str],
    registered: frozenset[str] | None,
) -> tuple[dict[torch.fx.Node, _Match], dict[str, int]]:
    calls = {name for node in iter_calls(traced.graph) for name in op_names(node)}

    def resolved(name: str) -> str:
        function = _aten_name(name)
        return function if name not in calls and function in calls else canonical_op_name(name)

    named = {resolved(n): "named in partition.extra_splitting_ops" for n in extra}
    named |= {resolved(n): "named in partition.splitting_ops" for n in splitting_ops or []}
    asked = list(named)
    if registered is None:
        registered = default_boundaries(splitting_ops)
    matches: dict[torch.fx.Node, _Match] = {}
    counts = dict.fromkeys(asked, 0)
    for node in iter_calls(traced.graph):
        names = op_names(node)
        hit = next((a for a in asked if a in names), None)
        unsafe = torch.Tag.cudagraph_unsafe in torch_private.op_tags(node.target)
        if hit is not None:
            matches[node] = _Match(hit, named[hit])
        elif names and names[0] in registered:
            matches[node] = _Match(names[0], why_boundary(names[0], _REGISTERED))
        elif unsafe and splitting_ops is None:
            matches[node] = _Match(names[0], "tag cudagraph_unsafe")
        else:
            continue
        counts[matches[node].name] = counts.get(matches[node].name, 0) + 1
    missing = [name for name in asked if not counts[name]]
    if missing:
        there = sorted(traced.ops)
        raise ConfigError(
            f"partition.splitting_ops: not in the traced graph: {missing}{near(missing[0], there)} "
            f"Operators it does have: {there}. Registered splitting ops: {registered_names()}. "
            "Correct the name, or register the operator with pcgsvc.splitting_op."
            f"{_of_module(traced, missing[0])}"
        )
    return matches, counts


# ---- which piece ---------------------------------------------------------------------------------


def _assign(traced: TracedGraph, matches: dict[torch.fx.Node, _Match]) -> list[Piece]:
    """One pass in original order; consecutive splitting ops form one boundary."""
    pieces: list[Piece] = []
    home: dict[torch.fx.Node, Piece] = {}
    for node in iter_calls(traced.graph):
        kind = Kind.BOUNDARY if node in matches else Kind.REGION
        producer = node.args[0] if node.target is operator.getitem else None
        if isinstance(producer, torch.fx.Node) and _is_tuple(producer):
            piece = home[producer]
        elif pieces and pieces[-1].kind is kind:
            piece = pieces[-1]
        else:
            piece = Piece(index=len(pieces), kind=kind, reason="", nodes=[])
            pieces.append(piece)
        piece.nodes.append(node)
        home[node] = piece
        if node in matches:
            piece.splitting[node] = matches[node].name
    return _absorb_inline(pieces)


def _is_tuple(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (tuple, list))


def _absorb_inline(pieces: list[Piece]) -> list[Piece]:
    """Give pieces without a kernel to a boundary beside them, and join boundaries that meet."""
    joined: list[Piece] = []
    for piece in pieces:
        if piece.kind is Kind.REGION and all(_is_inline(n) for n in piece.nodes):
            piece.kind = Kind.BOUNDARY if len(pieces) > 1 else Kind.INLINE
        if joined and joined[-1].kind is piece.kind is Kind.BOUNDARY:
            joined[-1].nodes += piece.nodes
            joined[-1].splitting |= piece.splitting
        else:
            piece.index = len(joined)
            joined.append(piece)
    return joined


def _is_inline(node: torch.fx.Node) -> bool:
    """Whether a node launches nothing: an uninitialised allocation, a view, or a size."""
    value = node.meta.get("example_value")
    if isinstance(value, (int, torch.SymInt, torch.Size)):
        return True
    name = op_names(node)[0].split("::")[-1]
    if name in ALLOCATIONS:
        return True
    source = node.args[0] if node.args else None
    if name not in _VIEWS or not isinstance(source, torch.fx.Node):
        return False
    # reshape copies when it must: a view shares its source's storage.
    before = pytree.tree_leaves(source.meta.get("example_value"))
    after = pytree.tree_leaves(value)
    return all(isinstance(t, torch.Tensor) for t in [*before, *after]) and {
        torch_private.storage_id(t) for t in after
    } <= {torch_private.storage_id(t) for t in before}


# ---- pieces --------------------------------------------------------------------------------------


def _connect(traced: TracedGraph, pieces: list[Piece]) -> None:
    """Find what crosses each border."""
    home = {node: piece for piece in pieces for node in piece.nodes}
    for piece in pieces:
        used = (n for node in piece.nodes for n in node.all_input_nodes)
        piece.inputs = list(dict.fromkeys(n for n in used if home.get(n) is not piece))
    crossing = {n for piece in pieces for n in piece.inputs}
    crossing |= set(traced.graph.output_node().all_input_nodes)
    for piece in pieces:
        piece.outputs = [n for n in piece.nodes if n in crossing]
        for node in piece.outputs:
            if not isinstance(node.meta.get("example_value"), (torch.Tensor, int, torch.SymInt)):
                raise SplitError(
                    f"{piece.name}: {op_names(node)[0]} at {user_line(node)} gives a "
                    f"{type(node.meta.get('example_value')).__name__} that is used behind a "
                    "splitting op; only tensors and ints can cross. Unpack it before the op."
                )


def _refuse_open_autocast(pieces: list[Piece]) -> None:
    """Refuse an autocast block that a splitting op lies in: its kernel would run without it."""
    still_open: list[torch.fx.Node] = []
    for piece in pieces:
        if piece.kind is not Kind.REGION:
            if still_open and piece.splitting:
                op, name = next(iter(piece.splitting.items()))
                raise SplitError(
                    f"{name} at {user_line(op)}: a splitting op inside a torch.autocast block "
                    "would run without it. Close the block before the op, or set autocast inside "
                    "the op's kernel."
                )
            continue
        for node in piece.nodes:
            kind = torch_private.autocast_kind(node.target)
            if kind == "enter":
                still_open.append(node)
            elif kind == "exit":
                still_open.remove(node.args[0])  # type: ignore[arg-type]


def document_of(traced: TracedGraph, piece: Piece) -> Document:
    """Return the canonical form of a region.

    Raises:
        TraceError: an int in it depends on data, and would be frozen.
    """
    for node in piece.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            traced.size_of(value)
    number = {node: at for at, node in enumerate([*piece.inputs, *piece.nodes])}
    return {
        "inputs": [_input_spec(traced, node) for node in piece.inputs],
        "rows": [encode_row(node, number.__getitem__) for node in piece.nodes],
        "outputs": [number[node] for node in piece.outputs],
        "assumes": list(traced.predicate.conditions),
    }


def _input_spec(traced: TracedGraph, node: torch.fx.Node) -> list[Any]:
    value = node.meta["example_value"]
    if isinstance(value, torch.Tensor):
        return traced.spec_of(node).as_json()
    return ["int", traced.size_of(value)]


def _prove_order(pieces: list[Piece]) -> None:
    """Every input of a piece comes from a placeholder or from an earlier piece."""
    made: set[torch.fx.Node] = set()
    for piece in pieces:
        late = [n for n in piece.inputs if n.op != "placeholder" and n not in made]
        assert not late, f"{piece.name} reads {late}, which a later piece computes"
        made |= set(piece.outputs)


def check_aliases(partition: Partition) -> None:
    """Refuse cuts at which a compiler that re-makes views would lose a write.

    Inductor gives a region's results storages of its own choice. Two results of one region that
    share a storage would part where a later piece writes; so would a result and what the region
    reads, if the region writes to it as well.

    Raises:
        SplitError: naming the line of the write.
    """
    written = _writes(partition)
    for piece in partition.pieces:
        if piece.kind is not Kind.REGION:
            continue
        seen: dict[int, tuple[str, torch.fx.Node]] = {}
        for node in _tensors(piece.inputs):
            storage = torch_private.storage_id(node.meta["example_value"])
            if any(index == piece.index for index, _ in written.get(storage, ())):
                seen[storage] = "a result and what it writes", node
        for node in _tensors(piece.outputs):
            storage = torch_private.storage_id(node.meta["example_value"])
            later = [n for index, n in written.get(storage, ()) if index > piece.index]
            if storage in seen and later:
                what, other = seen[storage]
                raise SplitError(
                    f"{piece.name}: {what} share memory ({user_line(other) or other.name} and "
                    f"{user_line(node)}) and are written to behind the splitting op, at "
                    f"{user_line(later[-1])}; compiled pieces cannot keep that. Use "
                    "compiler=eager, or write to a copy."
                )
            seen.setdefault(storage, ("two of its results", node))


def _writes(partition: Partition) -> dict[int, list[tuple[int, torch.fx.Node]]]:
    """Return who writes to each storage, in order, with the piece's place."""
    found: dict[int, list[tuple[int, torch.fx.Node]]] = {}
    for piece in partition.pieces:
        for node in piece.nodes:
            for arg in mutated_args(node):
                storage = torch_private.storage_id(arg.meta["example_value"])
                found.setdefault(storage, []).append((piece.index, node))
    return found


def _tensors(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    return [n for n in nodes if isinstance(n.meta["example_value"], torch.Tensor)]


def _reasons(pieces: list[Piece], matches: dict[torch.fx.Node, _Match]) -> None:
    for piece in pieces:
        if piece.kind is Kind.BOUNDARY:
            named = {matches[n] for n in piece.splitting}
            piece.reason = "; ".join(sorted(f"{m.name}: {m.reason}" for m in named))
        elif piece.kind is Kind.INLINE:
            piece.reason = "allocations and views only, nothing to replay"
        else:
            piece.reason = _place(pieces, piece)


def _place(pieces: list[Piece], piece: Piece) -> str:
    before = any(p.kind is Kind.BOUNDARY for p in pieces[: piece.index])
    after = any(p.kind is Kind.BOUNDARY for p in pieces[piece.index + 1 :])
    if before and after:
        return "between two splitting ops"
    if after:
        return "before the first splitting op"
    return "after the last splitting op" if before else "no splitting op in the graph"
