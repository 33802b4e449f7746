"""When a traced graph allocates and frees memory, by row count.

In: a traced graph and its partition. Out: `Event`s of one run at a size. Runs nothing: sizes are
symbols of the trace, and a storage lives from the node that makes it to the last that reads it.

Under Inductor only some values get memory: those that cross a border of pieces, those that a
kernel which Inductor does not write (a matrix product, a custom op) makes or reads, and those that
are used more than once on both sides of such a kernel. All others are taken to be fused into the
kernels that read them. A generated kernel writes its result over an input of that size that dies
with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.forward.specs import value_at
from pcgsvc.jobs.plan.pool import Event
from pcgsvc.ops.registry import find_spec
from pcgsvc.program.pieces import Partition
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import mutated_args, op_names

_LIBRARY_CALLS = (
    *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "conv", "grouped"),
    *("scaled_dot_product_attention", "sort", "argsort", "topk", "unique"),
)
"""How the names begin of ops that Inductor leaves to a library or to a kernel of their own."""


@dataclass
class _Storage:
    """Memory that one node makes."""

    born: int
    """Number of the node."""
    size: int | CodeType
    """Bytes, or their source over the row count `s`."""
    last: int
    """Number of the node, or of the end of the piece, after which it is free."""
    boundary: bool
    """Whether a splitting op makes it: a bridge outside the pool, where graphs break at it."""
    real: bool = True
    """Whether it gets memory, and is not fused away."""

    def at(self, rows: int) -> int:
        """Return its bytes for a row count."""
        return value_at(self.size, rows)


class Lifetimes:
    """The memory of one traced graph.

    Args:
        traced: the canonical graph.
        plan: cut into regions and boundaries.
        fused: whether Inductor compiles the regions.
        whole: whether it compiles them as one graph, so that borders are no reason for memory.
        results_only: count what regions hand out and nothing else: recordings of opaque pieces.
        opaque_ops: whether a custom op that is not cut at is one step, as in recordings; else what
            it allocates counts.
    """

    def __init__(
        self,
        traced: TracedGraph,
        plan: Partition,
        *,
        fused: bool,
        whole: bool = False,
        results_only: bool = False,
        opaque_ops: bool = False,
    ) -> None:
        self._opaque_ops = opaque_ops
        self._nodes = [node for piece in plan.pieces for node in piece.nodes]
        self._splitting = {
            node: name for piece in plan.pieces for node, name in piece.splitting.items()
        }
        self._generated: set[int] = set()
        """Numbers of the nodes that Inductor writes the kernels of."""
        self._found: dict[int, _Storage] = {}
        """What the nodes make, by storage."""
        crossing = self._find(traced, plan, crossing_counts=not whole)
        if fused:
            self._fuse(crossing, results_only)

    def _find(self, traced: TracedGraph, plan: Partition, *, crossing_counts: bool) -> set[int]:
        """Find the storages and their unfused lifetimes; return those that leave their piece."""
        ends: dict[torch.fx.Node, int] = {}  # the last number of a node's piece
        for piece in plan.pieces:
            ends |= dict.fromkeys(piece.nodes, len(ends) + len(piece.nodes) - 1)
        given = {sid for n in traced.graph.nodes if n.op == "placeholder" for sid in _storages(n)}
        output = next(n for n in traced.graph.nodes if n.op == "output")
        results = {sid for node in output.all_input_nodes for sid in _storages(node)}
        crossing, found = set(results), self._found
        for at, node in enumerate(self._nodes):
            for sid, tensor in _memory(node).items():
                if sid not in given and sid not in found:
                    size = num_bytes(traced, tensor)
                    found[sid] = _Storage(at, size, at, node in self._splitting)
            for used in node.all_input_nodes:
                outside = crossing_counts and ends.get(used) != ends[node]
                for sid in _storages(used) & found.keys():
                    found[sid].last = max(found[sid].last, ends[node] if outside else at)
                    if outside:
                        crossing.add(sid)
        for sid in results & found.keys():
            found[sid].last = len(self._nodes)
        return crossing

    def _fuse(self, crossing: set[int], results_only: bool) -> None:
        """Take memory from what is fused, and keep its inputs until it is computed."""
        library = {node for node in self._nodes if self._is_library_call(node)}
        self._generated = {at for at, node in enumerate(self._nodes) if node not in library}
        needed = set(crossing)
        if not results_only:
            for node in self._nodes:
                stored = [*mutated_args(node)]
                if node in library:
                    stored += [node, *node.all_input_nodes]
                needed.update(sid for value in stored for sid in _storages(value))
            needed |= self._used_later(library)
        for sid, storage in self._found.items():
            storage.real = sid in needed
        for node in reversed(self._nodes):
            made = [self._found[sid] for sid in _storages(node) & self._found.keys()]
            late = max((s.last for s in made if not s.real), default=-1)
            for used in node.all_input_nodes:
                for sid in _storages(used) & self._found.keys():
                    self._found[sid].last = max(self._found[sid].last, late)

    def _used_later(self, library: set[torch.fx.Node]) -> set[int]:
        """Return what is used more than once, and also behind a library call that comes after it.

        A value that is used once is computed where it is used.
        """
        phase = 0  # how many library calls came before
        made: dict[int, int] = {}
        readers: dict[int, dict[torch.fx.Node, int]] = {}
        for node in self._nodes:
            own = _storages(node)
            for used in node.all_input_nodes:
                for sid in _storages(used) - own:  # a view is no use
                    readers.setdefault(sid, {})[node] = phase
            for sid in own:
                made.setdefault(sid, phase)
            phase += node in library
        return {
            sid
            for sid, phases in readers.items()
            if len(phases) > 1 and max(phases.values()) > made.get(sid, phase)
        }

    def _is_library_call(self, node: torch.fx.Node) -> bool:
        if node in self._splitting:
            return True
        space, _, name = op_names(node)[0].rpartition("::")
        if space not in ("aten", "prims", ""):
            return True
        return name.strip("_").startswith(_LIBRARY_CALLS)

    def events(self, rows: int, full: bool) -> Iterator[Event]:
        """Yield what one run allocates and frees, results freed at its end.

        Args:
            rows: of the run.
            full: whether splitting ops are inside the graph.
        """
        sizes = {
            sid: storage.at(rows)
            for sid, storage in self._found.items()
            if storage.real and (full or not storage.boundary)
        }
        born, dies = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for sid in sizes:
            born[self._found[sid].born].append(sid)
            dies[self._found[sid].last].append(sid)
        for at, node in enumerate(self._nodes):
            name = self._splitting.get(node, op_names(node)[0])
            inside = not self._opaque_ops and find_spec(name) is not None
            if node in self._splitting or inside:
                yield Event("boundary", name)
            # What a generated kernel may write its results over.
            inputs = {s for s in dies[at] if self._found[s].born < at and at in self._generated}
            for sid in born[at]:
                over = min((s for s in inputs if sizes[s] == sizes[sid]), default=None)
                if over is not None:
                    inputs.remove(over)
                    dies[at].remove(over)
                    yield Event("free", over)
                yield Event("alloc", sid, sizes[sid])
            yield from (Event("free", sid) for sid in dies[at])
        yield from (Event("free", sid) for sid in dies[len(self._nodes)])

    def bridge_bytes(self, rows: int) -> int:
        """Return the bytes of what splitting ops return, which a piecewise entry keeps."""
        return sum(s.at(rows) for s in self._found.values() if s.boundary)


def _storages(node: torch.fx.Node) -> set[int]:
    return set(_memory(node))


def _memory(node: torch.fx.Node) -> dict[int, torch.Tensor]:
    """Return a tensor of each storage of a node's value."""
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return {torch_private.storage_id(t): t for t in leaves if isinstance(t, torch.Tensor)}


def num_bytes(traced: TracedGraph, tensor: torch.Tensor) -> int | CodeType:
    """Return the bytes of a tensor's storage, or their compiled source over the row count `s`."""
    size: Any = traced.size_of(tensor.untyped_storage().nbytes())
    return size if isinstance(size, int) else compile(size, "<bytes>", "eval")
