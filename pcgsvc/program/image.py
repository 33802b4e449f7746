"""The program image: everything but functions that a runner needs from tracing and splitting.

In: a traced graph and its partition, or JSON. Out: `ProgramImage`. A cold start makes it, a warm
start reads it, and all later stages see only it: one path, whatever the start. Knows nothing of
where it is stored.
"""

from __future__ import annotations

import functools
import json
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, get_args, get_origin, get_type_hints

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.errors import CompileError
from pcgsvc.forward.results import ResultTree, from_text
from pcgsvc.forward.specs import SizePredicate, TensorSpec
from pcgsvc.ops.collectives import (
    COLLECTIVES,
    EXCHANGE,
    rank_and_world,
    ranks_of,
    unnamed_boundaries,
)
from pcgsvc.ops.registry import find_spec
from pcgsvc.program.forms import NotCanonicalError, code_digest, reach_digest
from pcgsvc.program.guards import StoredGuard
from pcgsvc.program.pieces import Kind, Partition
from pcgsvc.program.program import ProgramSpec, program_of
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.literals import LITERAL, literal
from pcgsvc.trace.nodes import iter_calls
from pcgsvc.trace.rows import Document, digest


@dataclass(frozen=True, kw_only=True)
class PieceInfo:
    """One piece of the plan, as reports show it."""

    name: str
    kind: str
    reason: str
    ops: int
    hash: str | None


@dataclass(frozen=True, kw_only=True)
class ProgramImage:
    """See the module docstring."""

    spec: ProgramSpec
    outputs: tuple[tuple[str, int], ...]
    """Per tensor leaf of the result: ("graph", result index) or ("input", input index)."""
    output_specs: tuple[TensorSpec, ...]
    out_tree: str | None
    """Nesting of the forward's result, written down; None: it holds a class that cannot be found
    again by its name, and the program cannot be stored."""
    constants: dict[int, Any]
    """Leaves of the result that are no tensors."""
    predicate: SizePredicate
    """Which row counts the trace is valid for."""
    mutated: tuple[str, ...]
    """Parameters and buffers that the program writes to."""
    pieces: tuple[PieceInfo, ...]
    unique_regions: int
    """Regions that differ from each other."""
    documents: dict[str, Document]
    """The unique regions' canonical forms by hash."""
    matched: dict[str, int]
    """How often each splitting op occurs."""
    ops: dict[str, int]
    """How often each op occurs in the traced graph."""
    schemas: dict[str, str]
    """Schema, tags and kernels of every op that is not torch's own, by name."""
    guards: tuple[StoredGuard, ...] = ()
    """What must still hold on a warm start."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 of the source files that tracing entered, by place (`pcgsvc.program.sources`)."""
    modules: tuple[str, ...] = ()
    """Modules that registered the ops. They must be imported before the program can be loaded; no
    name of a stored file is ever imported."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a splitting op is one, where that is more than being registered."""
    num_guards: int = 0
    """How many guards tracing recorded."""
    uncompiled: dict[str, str] = field(default_factory=dict)
    """Regions that run as their own ops, by hash: what the compiler got wrong in them."""
    assumes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What the compiled code of a region assumes of the row count beyond `predicate`, by hash."""
    live_tree: ResultTree | None = field(default=None, compare=False, repr=False)
    """The nesting itself, where the program was traced in this process."""

    @cached_property
    def compiled(self) -> dict[str, Document]:
        """The documents of the regions that run compiled, by hash."""
        return {h: d for h, d in self.documents.items() if h not in self.uncompiled}

    @cached_property
    def general(self) -> SizePredicate:
        """Which row counts the code that is compiled for all of them is valid for."""
        assumed = dict.fromkeys(c for h in self.compiled for c in self.assumes.get(h, ()))
        return self.predicate.requiring(assumed, "the compiler")

    def count(self, kind: Kind) -> int:
        """Return how many pieces are of a kind."""
        return sum(p.kind == kind.value for p in self.pieces)

    def tree(self) -> ResultTree:
        """Return the nesting of the forward's result; CompileError if its text cannot be read."""
        return self.live_tree or from_text(self.out_tree or "")

    def bind(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Return the bound tensors by name; CompileError if the module lacks one.

        Numbers of the source become tensors on the device, which the caller owns.
        """
        wanted = [b.name for b in self.spec.bindings if b.kind in ("param", "constant")]
        missing = [name for name in wanted if name not in tensors]
        if missing:
            raise CompileError(f"program: the module has no tensors {missing}.")
        literals = [b.name for b in self.spec.bindings if b.kind == LITERAL]
        numbers = {name: literal(name, device) for name in literals}
        return {name: tensors[name] for name in wanted} | numbers


def image_of(
    traced: TracedGraph,
    partition: Partition,
    plan: Partition,
    *,
    guards: list[StoredGuard],
    files: dict[str, str],
) -> ProgramImage:
    """Write a traced and partitioned graph down.

    Args:
        traced: the canonical graph.
        partition: what is compiled.
        plan: the same graph cut into regions and boundaries, for reports.
        guards: what must still hold on a warm start.
        files: digests of the source files that tracing entered.
    """
    schemas = op_schemas(traced.graph)
    return ProgramImage(
        spec=program_of(traced, partition),
        outputs=tuple(traced.outputs),
        output_specs=tuple(traced.output_specs),
        out_tree=traced.out_tree.to_text(),
        constants=dict(traced.constants),
        predicate=traced.predicate,
        mutated=tuple(traced.mutated),
        pieces=tuple(
            PieceInfo(
                name=p.name, kind=p.kind.value, reason=p.reason, ops=len(p.nodes), hash=p.hash
            )
            for p in plan.pieces
        ),
        unique_regions=len(plan.unique()) if plan is partition else plan.count(Kind.REGION),
        documents={h: p.document for h, p in partition.unique().items() if p.document is not None},
        matched=dict(partition.matched),
        reasons=dict(partition.reasons),
        ops=dict(traced.ops),
        schemas=schemas,
        guards=tuple(guards),
        files=files,
        modules=tuple(sorted(_op_modules(schemas))),
        num_guards=len(traced.guards),
        live_tree=traced.out_tree,
    )


# ---- custom ops ----------------------------------------------------------------------------------


def op_schemas(graph: torch.fx.Graph) -> dict[str, str]:
    """Return what identifies every op of a graph that is not torch's own."""
    names = {torch_private.op_name(n.target) for n in iter_calls(graph) if n.op == "call_function"}
    own = {n for n in names if n is not None and not n.startswith(("aten::", "prims::"))}
    return {name: op_identity(name) for name in sorted(own)}


def op_identity(name: str) -> str:
    """Return schema, tags, and digests of the Python kernels of one op, in one line.

    Two processes may declare one name differently; Inductor's own key does not see that.
    """
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if packet is None:
        return "absent"
    tags = sorted(t.name for t in torch_private.op_tags(packet))
    spec = find_spec(name)
    kernels = torch_private.op_functions(name) if spec is None else [spec.kernel, spec.fake]
    digests = [code_digest(function) for function in kernels if function is not None]
    schemas = " | ".join(torch_private.op_schemas(packet))
    try:
        baked = _baked_digest(name)
    except NotCanonicalError:
        baked = _ONLY_HERE
    return f"{schemas} tags={tags} kernels={digests} baked={baked}"


def unwritable_ops(names: Iterable[str]) -> list[str]:
    """Return, per op that no other process can compare with its own, why that is."""
    found = []
    for name in names:
        try:
            _baked_digest(name)
        except NotCanonicalError as error:
            found.append(f"operator {name}: {error}")
    return found


def _baked_digest(name: str) -> str | None:
    """Return a digest of the Python function that says what an op gives while a program is made.

    Raises:
        NotCanonicalError: it reads what has no form, or only the dispatcher has it.
    """
    bodies = torch_private.python_bodies(name)
    if bodies:
        raise NotCanonicalError(
            f"the Python function of torch.library.impl that programs are made with cannot be read "
            f"back: {', '.join(bodies)}. Write the op with torch.library.custom_op"
        )
    spec = find_spec(name)
    fake = spec.fake if spec is not None else torch_private.op_functions(name)[-1]
    return None if fake is None else reach_digest(fake)


_ONLY_HERE = uuid.uuid4().hex
"""In place of a digest that cannot be made: equal in no other process."""


def custom_ops(document: Document) -> list[str]:
    """Return the names of the ops in a piece that are not torch's own, sorted."""
    names = {
        "::".join(target.removeprefix("torch.ops.").split(".")[:2])
        for op, target, _, _ in document["rows"]
        if op == "call_function" and target.startswith("torch.ops.")
    }
    return sorted(n for n in names if not n.startswith(("aten::", "prims::")))


def _op_modules(schemas: Mapping[str, str]) -> set[str]:
    found = {s.kernel.__module__ for name in schemas if (s := find_spec(name)) is not None}
    return found - {"__main__"}


def new_boundaries(image: ProgramImage, config: Config) -> list[str]:
    """Return ops of the graph that would be boundaries now and were not when it was partitioned."""
    return sorted((unnamed_boundaries(config) & set(image.ops)) - set(image.matched))


def collectives_of(image: ProgramImage) -> list[list[Any]]:
    """Return the collectives of a program in order: op, and arguments without its tensors."""
    rows: list[Any] = []
    for step in image.spec.steps:
        rows += image.documents[step.piece]["rows"] if step.piece in image.documents else []
        rows += [call.row for call in step.calls]
    names = {f"torch.ops.{name.replace('::', '.')}" for name in COLLECTIVES}
    return [
        [row[1], *(value for kind, value in row[2][1] if kind != "v")]
        for row in rows
        if row[1].removesuffix(".default") in names
    ]


def members_of(image: ProgramImage) -> list[int]:
    """Return the global ranks that run a program together; none: it has no collectives."""
    names, (_, world) = {*image.ops, *image.matched}, rank_and_world() or (0, 1)
    groups = [ranks_of(word) for *_, word in collectives_of(image)]
    if EXCHANGE in names or (not groups and names & COLLECTIVES):
        groups.append(list(range(world)))
    return sorted({rank for group in groups for rank in group})


# ---- JSON ----------------------------------------------------------------------------------------


def to_json(image: ProgramImage) -> bytes:
    """Return an image as JSON."""
    tree = asdict(replace(image, live_tree=None))
    del tree["live_tree"]
    return json.dumps(tree, sort_keys=True, default=lambda member: member.value).encode()


def from_json(data: bytes) -> ProgramImage:
    """Read an image; CompileError if it is not one."""
    try:
        image: ProgramImage = _reader(ProgramImage)(json.loads(data))
        wrong = [h for h, document in image.documents.items() if digest(document) != h]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CompileError(
            f"stored program: malformed ({type(error).__name__}: {error})"
        ) from error
    # A forward that returns its inputs as they are has neither pieces nor steps.
    if wrong or (image.spec.steps and not image.pieces):
        raise CompileError(f"stored program: no pieces, or documents that are not theirs: {wrong}")
    return image


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what makes a value of an annotated type from JSON types: what `asdict` made of it."""
    inner, origin = get_args(kind), get_origin(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        of = [(f.name, _reader(hints[f.name])) for f in fields(kind) if f.compare]
        return lambda tree: kind(**{name: read(tree[name]) for name, read in of})
    if origin is tuple and inner[-1] is ...:
        item = _reader(inner[0])
        return lambda tree: tuple(item(value) for value in tree)
    if origin is tuple:
        items = [_reader(k) for k in inner]
        return lambda tree: tuple(r(value) for r, value in zip(items, tree, strict=True))
    if origin is dict:
        key, item = int if inner[0] is int else str, _reader(inner[1])
        return lambda tree: {key(name): item(value) for name, value in tree.items()}
    if origin is types.UnionType:
        item = _reader(inner[0])
        return lambda tree: None if tree is None else item(tree)
    return Kind if kind is Kind else lambda tree: tree
