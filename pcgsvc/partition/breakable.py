"""`partition.strategy=breakable`: the module's own forward, cut while it is captured. No trace.

In: what a run of the forward has shown. Out: a program whose only piece is the module. Works for
models that cannot be traced whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pcgsvc.config import Config
from pcgsvc.errors import TraceError
from pcgsvc.forward.results import flatten, refused_leaf, tensors_in
from pcgsvc.forward.specs import Binding, SizePredicate, TensorSpec
from pcgsvc.forward.state import can_be_put_back
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.collectives import unnamed_boundaries
from pcgsvc.ops.registry import why_boundary
from pcgsvc.partition.fx import canonical_op_name
from pcgsvc.partition.probe import ForwardProbe
from pcgsvc.partition.submodules import in_place
from pcgsvc.program.image import PieceInfo, ProgramImage
from pcgsvc.program.pieces import Kind
from pcgsvc.program.program import Boundaries, CompiledPiece, ProgramSpec, Step

PIECE = "module"
_MET = "break met in the forward"


class ModulePiece(CompiledPiece):
    """The module as a piece that breaks itself."""

    def __init__(
        self,
        module: Callable[..., Any],
        names: Sequence[str],
        constants: Mapping[str, Any],
        boundaries: Boundaries,
    ) -> None:
        self._module, self._names, self._constants = module, list(names), constants
        self.boundaries = boundaries
        self.forwards: dict[str, Callable[..., Any]] = {}
        """Compiled forwards of submodules."""
        self.kernels = 0
        """Kernels of the plain forward, as they were counted in a run of it."""

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the module; its tensor results that are no inputs, in tree order."""
        result = self.whole(dict(zip(self._names, args, strict=True)))
        given = {id(a) for a in args}
        return [t for t in tensors_in(result) if id(t) not in given]

    def whole(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Run the module; its whole result."""
        with in_place(self._module, self.forwards):
            return self._module(**inputs, **self._constants)

    def num_kernels(self) -> int:
        """See `CompiledPiece.num_kernels`."""
        return self.kernels


def boundary_names(config: Config) -> Boundaries:
    """Return the ops at which an untraced forward breaks."""
    names = config.partition
    named = [*(names.splitting_ops or ()), *names.extra_splitting_ops]
    asked = frozenset(canonical_op_name(n) for n in named)
    return Boundaries(
        names=asked | unnamed_boundaries(config), order=None, rows=None, in_place_only=True
    )


def image_of_forward(probe: ForwardProbe, memory: Workspace) -> ProgramImage:
    """Return the program whose only piece is the module.

    Raises:
        TraceError: a result that cannot be cut back to the true rows.
    """
    one, other = probe.largest, probe.other
    leaves, tree = flatten(one.result)
    twins, _ = flatten(other.result)
    inputs = {id(v): at for at, v in enumerate(one.views.values())}
    outputs: list[tuple[str, int]] = []
    constants: dict[int, Any] = {}
    specs: list[TensorSpec] = []
    for at, (leaf, twin) in enumerate(zip(leaves, twins, strict=True)):
        if isinstance(leaf, torch.Tensor) and id(leaf) in inputs:
            outputs.append(("input", inputs[id(leaf)]))
        elif isinstance(leaf, torch.Tensor):
            outputs.append(("graph", len(specs)))
            specs.append(_spec(at, leaf, twin, (one.size, other.size)))
        elif leaf is None or isinstance(leaf, (bool, str)):
            constants[at] = leaf
        else:
            raise TraceError(refused_leaf(at, leaf))
    pieces = tuple(_pieces(one.events))
    names = [spec.name for spec in memory.inputs]
    bindings = tuple(Binding(kind="input", name=name, spec=None) for name in names)
    count = len(names)
    numbers = tuple(range(count, count + len(specs)))
    step = Step(
        name=PIECE, kind=Kind.REGION, piece=PIECE, inputs=tuple(range(count)), outputs=numbers
    )
    return ProgramImage(
        spec=ProgramSpec(
            bindings=bindings, num_values=count + len(specs), steps=(step,), outputs=numbers
        ),
        outputs=tuple(outputs),
        output_specs=tuple(specs),
        out_tree=None,
        live_tree=tree,
        constants=constants,
        predicate=SizePredicate(()),
        mutated=tuple(
            n
            for n, t in memory.tensors.items()
            if n in probe.written or (not isinstance(t, torch.nn.Parameter) and can_be_put_back(t))
        ),
        pieces=pieces,
        unique_regions=sum(p.kind == Kind.REGION.value for p in pieces),
        documents={},
        matched={name: one.events.count(name) for name in dict.fromkeys(n for n, _ in one.frozen)},
        reasons={name: why for name, _ in one.frozen if (why := _why(name)) != _MET},
        ops={"kernel": one.events.count("kernel"), **Counter(one.collectives)},
        schemas={},
    )


def _spec(at: int, leaf: torch.Tensor, twin: torch.Tensor, sizes: tuple[int, int]) -> TensorSpec:
    shape: list[int | str] = []
    for a, b in zip(leaf.shape, twin.shape, strict=True):
        if a != b and (a, b) != sizes:
            raise TraceError(
                f"result {at}: a dimension is {a} for {sizes[0]} rows and {b} for {sizes[1]}, so "
                "padding rows cannot be cut off. Return one row per input row."
            )
        shape.append("s" if a != b else a)
    return TensorSpec(
        dtype=str(leaf.dtype), shape=tuple(shape), stride=(), offset=0, device=str(leaf.device)
    )


def _pieces(events: Sequence[str]) -> Iterator[PieceInfo]:
    """Yield regions and boundaries as the session will cut them."""
    groups: list[tuple[str, list[str]]] = []
    for event in events:
        kind = "region" if event == "kernel" else "boundary"
        if groups and groups[-1][0] == kind:
            groups[-1][1].append(event)
        else:
            groups.append((kind, [event]))
    for at, (kind, names) in enumerate(groups):
        reason = "captured as the forward runs"
        if kind == "boundary":
            reason = "; ".join(f"{n}: {_why(n)}" for n in dict.fromkeys(names))
        yield PieceInfo(name=f"piece_{at:02d}", kind=kind, reason=reason, ops=len(names), hash=None)


def _why(name: str) -> str:
    return why_boundary(name, _MET)
