"""The program: what runs for one step, as data, without Dynamo and without graphs.

In: a partition and compiled pieces. Out: `Program`, which runs under an executor: directly, or
inside a capture session. Knows nothing of CUDA graphs or the disk.

Values are numbered: graph inputs first, then what each step computes. Everything but the functions
is of JSON types, so that a program can be stored and started without tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import CompileError
from pcgsvc.forward.specs import Binding
from pcgsvc.ops.context import current_context
from pcgsvc.ops.registry import OpSpec, find_spec, stand_ins
from pcgsvc.program.pieces import Kind, Partition
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import mutated_args
from pcgsvc.trace.rows import decode, digest, encode_row, find_target, refs


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """The splitting ops that a piece calls by itself, where it is not cut beforehand."""

    names: frozenset[str]
    order: tuple[str, ...] | None
    """In the order of the trace; None: not traced."""
    rows: tuple[tuple[int, ...], ...] | None
    """Per boundary: places of the written arguments whose first dimension is the row count, or
    (-1,) for a result that has it; None: not traced."""
    in_place_only: bool = False
    """Whether a splitting op that returns a tensor is an error."""


def boundaries_of(document: Mapping[str, Any]) -> Boundaries | None:
    """Return the boundaries that a piece's document names, or None for a region."""
    listed = document.get("boundaries")
    if listed is None:
        return None
    names = {name for name, _ in listed}
    return Boundaries(
        names=frozenset(names | stand_ins(names)),
        order=tuple(name for name, _ in listed),
        rows=tuple(tuple(rows) for _, rows in listed),
    )


class CompiledPiece(Protocol):
    """What a compiler makes of a unique piece."""

    opaque: bool = False
    """Whether its kernels are invisible to a recorder that listens to dispatched ops."""
    boundaries: Boundaries | None = None
    """The splitting ops that it calls by itself; None: it is a region."""
    assumes: Sequence[str] = ()
    """What its compiler assumes of the row count `s`, beyond its document: Python source."""

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the piece; results in the order of its document's outputs."""

    def source(self) -> str:
        """Return the Python source that runs; empty for opaque pieces."""
        return ""

    def num_kernels(self) -> int:
        """Return about how many kernels a run launches."""


class Executor(Protocol):
    """How a program's steps are carried out."""

    def region(self, name: str, piece: CompiledPiece, args: list[Any]) -> Sequence[Any]:
        """Run a region."""

    def splitting(self, call: BoundCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run one splitting op."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One op of a boundary: a splitting op, or an allocation or view beside it."""

    row: list[Any]
    """As in `pcgsvc.trace.rows`, over the program's value numbers."""
    out: int
    """Number of the value it makes."""
    splitting: str | None
    """Name of the splitting op; None for inline ops."""
    row_args: tuple[int, ...] = ()
    """Value numbers of written tensors whose first dimension is the row count."""
    row_result: bool = False
    """Whether the op's result is a tensor whose first dimension is the row count."""
    written_later: bool = False
    """Whether memory of its tensor arguments or results is written to after it, so that whether a
    result is new memory or an argument's decides what later pieces read."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One piece of the program."""

    name: str
    kind: Kind
    piece: str | None = None
    """Regions: hash of the compiled piece."""
    inputs: tuple[int, ...] = ()
    """Regions: value numbers of the arguments."""
    outputs: tuple[int, ...] = ()
    """Regions: value numbers of the results."""
    calls: tuple[Call, ...] = ()
    """Boundaries and inline pieces."""
    dead: tuple[int, ...] = ()
    """Values that no later step reads."""


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """A program without its functions."""

    bindings: tuple[Binding, ...]
    """What the first values are bound to."""
    num_values: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    """Value numbers of the graph's results."""


class BoundCall:
    """A `Call` with its function found: the kernel itself of an op that pcgsvc registered."""

    __slots__ = ("call", "kernel", "spec")

    def __init__(self, call: Call) -> None:
        op, target = call.row[0], call.row[1]
        self.call = call
        self.spec: OpSpec | None = None
        self.kernel: Callable[..., Any]
        if op == "call_method":
            self.kernel = getattr(torch.Tensor, target)
            return
        self.spec = None if call.splitting is None else find_spec(call.splitting)
        self.kernel = find_target(target) if self.spec is None else self.spec.kernel

    @property
    def zeroes(self) -> tuple[int, ...]:
        """Value numbers of the written tensors whose padding rows the boundary must zero."""
        done = self.spec is not None and self.spec.zeroes_padding
        return () if done else self.call.row_args


class Program:
    """A runnable program. Stateless between runs; holds the functions, not the tensors."""

    def __init__(
        self,
        spec: ProgramSpec,
        pieces: Mapping[str, CompiledPiece],
        specialized: Mapping[int, Mapping[str, CompiledPiece]] | None = None,
    ) -> None:
        missing = {s.piece for s in spec.steps if s.piece is not None} - set(pieces)
        if missing:
            raise CompileError(f"program: {len(missing)} of its pieces are not compiled: {missing}")
        self.spec = spec
        self.pieces = pieces
        self._calls = {c.out: BoundCall(c) for s in spec.steps for c in s.calls}
        self._sized = {
            size: Program(spec, {**pieces, **own}) for size, own in (specialized or {}).items()
        }

    @property
    def exact_sizes(self) -> list[int]:
        """Sizes for which it was compiled once more, ascending."""
        return sorted(self._sized)

    def replacing(self, pieces: Mapping[str, CompiledPiece]) -> Program:
        """Return the same program with some regions run by other pieces, at every size."""
        sized = {size: {**own.pieces, **pieces} for size, own in self._sized.items()}
        return Program(self.spec, {**self.pieces, **pieces}, sized)

    def for_size(self, size: int) -> Program:
        """Return the program compiled for exactly so many rows, or this one, which fits all."""
        return self._sized.get(size, self)

    @property
    def boundaries(self) -> tuple[str, ...] | None:
        """The splitting ops that a run must meet, in order; None when that is not known."""
        names: list[str] = []
        for step in self.spec.steps:
            within = self.pieces[step.piece].boundaries if step.piece is not None else None
            if within is not None and within.order is None:
                return None
            names += within.order or () if within is not None else ()
            names += (c.splitting for c in step.calls if c.splitting is not None)
        return tuple(names)

    def num_kernels(self) -> int:
        """Return about how many kernels the regions of one step launch."""
        pieces = [self.pieces[s.piece] for s in self.spec.steps if s.piece is not None]
        counts = {id(piece): piece.num_kernels() for piece in {id(p): p for p in pieces}.values()}
        return sum(counts[id(piece)] for piece in pieces)

    def source_line(self, filename: str, line: int) -> str | None:
        """Return the line of a piece's generated source that a traceback points to, or None."""
        for step in self.spec.steps:
            piece = self.pieces.get(step.piece or "")
            source = piece.source() if piece is not None and not piece.opaque else ""
            if source and filename == f"<pcgsvc {digest(source)[:12]}>":
                return f"{step.name}: {source.splitlines()[line - 1].strip()}"
        return None

    def run(self, inputs: Sequence[Any], executor: Executor) -> list[Any]:
        """Run on bound values (one per binding) and return the graph's results."""
        spec = self.spec
        values: list[Any] = [*inputs, *([None] * (spec.num_values - len(inputs)))]
        for step in spec.steps:
            if step.piece is not None:
                args = [values[i] for i in step.inputs]
                results = executor.region(step.name, self.pieces[step.piece], args)
                for number, result in zip(step.outputs, results, strict=True):
                    values[number] = result
                del args, results
            for call in step.calls:
                values[call.out] = self._call(self._calls[call.out], values, executor)
            for number in step.dead:
                values[number] = None
        return [values[number] for number in spec.outputs]

    @staticmethod
    def _call(bound: BoundCall, values: list[Any], executor: Executor) -> Any:
        row = bound.call.row
        args, kwargs = decode(row[2], values), decode(row[3], values)
        if bound.call.splitting is None:
            return bound.kernel(*args, **kwargs)
        return executor.splitting(bound, args, kwargs)


class Direct:
    """The executor that just runs: mode none, uncovered sizes, warm-up."""

    def region(self, name: str, piece: CompiledPiece, args: list[Any]) -> Sequence[Any]:
        """See `Executor.region`."""
        return piece(*args)

    def splitting(self, call: BoundCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """See `Executor.splitting`."""
        result = call.kernel(*args, **kwargs)
        written = written_rows(call, args, kwargs)
        if call.call.row_result:
            result = apart(result, [args, kwargs])
            written += tensors_in(result)
        zero_padding(written)
        return result


def written_rows(call: BoundCall, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments whose padding rows must be zero after a splitting op."""
    return [_argument(call, number, args, kwargs) for number in call.zeroes]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors of nested values, in order."""
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


class Memory:
    """The memory that some tensors' storages occupy."""

    def __init__(self, values: Any) -> None:
        storages = [t.untyped_storage() for t in tensors_in(values) if _is_dense(t)]
        self._ranges = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor begins in it."""
        address = tensor.data_ptr() if _is_dense(tensor) else 0
        return any(begin <= address < end for begin, end in self._ranges)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and torch_private.has_memory(tensor)


def apart(result: Any, inputs: Any, *, always: bool = False) -> Any:
    """Return a splitting op's row-wise result with copies of what lies in its inputs' memory.

    The padding rows of a result are zeroed, those of an input that the op only reads are not. With
    no padding rows it is returned as it is, unless the row count is that of later steps (`always`).
    """
    if not (always or has_padding()):
        return result
    memory = Memory(inputs)

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and memory.holds(value) else value

    return pytree.tree_map(copied, result)


def has_padding() -> bool:
    """Whether the step has rows that are none of the caller's, as the host knows it."""
    context = current_context()
    return context.num_tokens < context.padded_tokens


def _argument(call: BoundCall, number: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    encoded_args, encoded_kwargs = call.call.row[2][1], call.call.row[3][1]
    places = [(item, args[at]) for at, item in enumerate(encoded_args)]
    places += [(item, kwargs[key[1]]) for key, item in encoded_kwargs]
    for item, value in places:
        if item == ["v", number]:
            return value
        if item[0] in ("list", "tuple") and ["v", number] in item[1]:
            return value[item[1].index(["v", number])]
    raise AssertionError(f"value {number} is no argument of {call.call.row[1]}")


def zero_padding(tensors: Sequence[torch.Tensor]) -> None:
    """Zero the rows at and above the step's true row count, as the host knows it."""
    if tensors and has_padding():
        rows = current_context().num_tokens
        for tensor in tensors:
            tensor[rows:].zero_()


# ---- partition -> program ------------------------------------------------------------------------


def program_of(traced: TracedGraph, partition: Partition) -> ProgramSpec:
    """Number the values of a partition and write its steps down."""
    numbers: dict[torch.fx.Node, int] = {}

    def number(node: torch.fx.Node) -> int:
        return numbers.setdefault(node, len(numbers))

    for node in traced.graph.find_nodes(op="placeholder"):
        number(node)
    later = _written_later(partition)
    steps: list[Step] = []
    for piece in partition.pieces:
        step = Step(name=piece.name, kind=piece.kind)
        if piece.kind is Kind.REGION:
            inputs = tuple(map(number, piece.inputs))
            outputs = tuple(map(number, piece.outputs))
            step = replace(step, piece=piece.hash, inputs=inputs, outputs=outputs)
        else:
            calls = [_call_of(traced, n, piece.splitting.get(n), number) for n in piece.nodes]
            nodes = zip(piece.nodes, calls, strict=True)
            calls = [replace(call, written_later=node in later) for node, call in nodes]
            step = replace(step, calls=tuple(calls))
        steps.append(step)
    results: Any = traced.graph.output_node().args[0]
    outputs = tuple(map(number, results))
    return ProgramSpec(
        bindings=tuple(traced.bindings),
        num_values=len(numbers),
        steps=tuple(_with_dead(steps, outputs)),
        outputs=outputs,
    )


def _call_of(
    traced: TracedGraph,
    node: torch.fx.Node,
    splitting: str | None,
    number: Callable[[torch.fx.Node], int],
) -> Call:
    def rows_of(example: Any) -> bool:
        if not isinstance(example, torch.Tensor) or not example.dim():
            return False
        return traced.size_of(example.shape[0]) == "s"

    call = Call(row=encode_row(node, number), out=number(node), splitting=splitting)
    if splitting is None:
        return call
    written = {number(a) for a in mutated_args(node) if rows_of(a.meta.get("example_value"))}
    made = pytree.tree_leaves(node.meta.get("example_value"))
    row_result = bool(made) and all(map(rows_of, made))
    return replace(call, row_args=tuple(sorted(written)), row_result=row_result)


def _written_later(partition: Partition) -> set[torch.fx.Node]:
    """Return the splitting ops after which memory is written that they may have returned.

    A schema does not say that a result is an argument's memory where it is at some steps only. So
    storages that a splitting op takes and returns are taken for one, whatever the trace made them.
    """
    nodes = [n for piece in partition.pieces for n in piece.nodes]
    splitting = {n for piece in partition.pieces for n in piece.splitting}
    group: dict[int, int] = {}
    """Per storage: the storage that stands for all that may be the same memory."""
    for node in nodes:
        made = _storages(node)
        joined = made | {s for n in node.all_input_nodes for s in _storages(n)}
        if node in splitting and made:
            old = {group.get(s, s) for s in joined}
            group |= dict.fromkeys(joined, first := min(old))
            group = {s: first if root in old else root for s, root in group.items()}
    written: set[int] = set()
    found: set[torch.fx.Node] = set()
    for node in reversed(nodes):
        touched = {s for n in (node, *node.all_input_nodes) for s in _storages(n)}
        if node in splitting and written & {group.get(s, s) for s in touched}:
            found.add(node)
        written |= {group.get(s, s) for n in mutated_args(node) for s in _storages(n)}
    return found


def _storages(node: torch.fx.Node) -> set[int]:
    tensors = tensors_in(node.meta.get("example_value"))
    return {torch_private.storage_id(t) for t in tensors if t.layout is torch.strided}


def _with_dead(steps: list[Step], outputs: Sequence[int]) -> list[Step]:
    """Say after which step each value may be dropped, so that graph memory is reused."""
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        used = set(step.inputs) | set(step.outputs)
        for call in step.calls:
            used |= refs(call.row[2]) | refs(call.row[3]) | {call.out}
        last |= dict.fromkeys(used, at)
    dead: dict[int, list[int]] = {}
    for value, at in last.items():
        if value not in outputs:
            dead.setdefault(at, []).append(value)
    return [replace(s, dead=tuple(sorted(dead.get(at, ())))) for at, s in enumerate(steps)]
