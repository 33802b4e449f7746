"""`partition.strategy=breakable`: the module's own forward, cut while it is captured. No trace.

In: a module and a workspace to run it in. Out: a program whose only piece is the module. Works for
models that cannot be traced whole. Python outside breaks runs once, at capture; what can be seen of
that going wrong is refused or reported here. Knows nothing of how segments are captured.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import CaptureError, SplitError, TraceError
from pcgsvc.forward.objects import tensors_held, tensors_of
from pcgsvc.forward.results import ResultTree, flatten, tensors_in
from pcgsvc.forward.samples import Samples
from pcgsvc.forward.specs import Binding, SizePredicate, TensorSpec
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.breaks import handle_breaks
from pcgsvc.ops.context import use_context
from pcgsvc.ops.registry import default_boundaries, why_boundary
from pcgsvc.partition.fx import canonical_op_name
from pcgsvc.partition.submodules import Calls, in_place, watched
from pcgsvc.program.image import PieceInfo, ProgramImage
from pcgsvc.program.pieces import Kind
from pcgsvc.program.program import Boundaries, ProgramSpec, Step
from pcgsvc.trace.dynamo import Attributes
from pcgsvc.trace.sources import line_that_sets

PIECE = "module"
_MET = "break met in the forward"


class ModulePiece:
    """The module as a piece that breaks itself."""

    opaque = False

    def __init__(
        self,
        module: Callable[..., Any],
        names: Sequence[str],
        constants: Mapping[str, Any],
        boundaries: Boundaries,
    ) -> None:
        self._module, self._names, self._constants = module, list(names), constants
        self.boundaries: Boundaries | None = boundaries
        self.forwards: dict[str, Callable[..., Any]] = {}
        """Compiled forwards of submodules."""
        self.kernels = 0
        """Kernels of the plain forward, as they were counted in a run of it."""

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the module; its tensor results that are no inputs, in tree order."""
        given_names = dict(zip(self._names, args, strict=True))
        with in_place(self._module, self.forwards):
            result = self._module(**given_names, **self._constants)
        given = {id(a) for a in args}
        return [t for t in tensors_in(result) if id(t) not in given]

    def source(self) -> str:
        """See `CompiledPiece.source`."""
        return ""

    def num_kernels(self) -> int:
        """See `CompiledPiece.num_kernels`."""
        return self.kernels


def boundary_names(splitting_ops: Sequence[str] | None, extra: Sequence[str]) -> Boundaries:
    """Return the ops at which an untraced forward breaks."""
    asked = frozenset(canonical_op_name(n) for n in [*(splitting_ops or ()), *extra])
    return Boundaries(
        names=asked | default_boundaries(splitting_ops), order=None, rows=None, in_place_only=True
    )


def learn(
    module: Callable[..., Any],
    workspace: Workspace,
    samples: Samples,
    constants: Mapping[str, Any],
    boundaries: Boundaries,
    sizes: tuple[int, int],
    least: int,
) -> Learned:
    """Run the forward a few times and write down what it returned and where it breaks.

    Args:
        module: what is run.
        workspace: static memory; its inputs are overwritten. Those of its tensors are taken out
            that the forward itself replaces by others.
        samples: source of valid inputs.
        constants: arguments that are no tensors.
        boundaries: where it breaks.
        sizes: two row counts; what differs between them are the row dimensions.
        least: the smallest row count that is captured; its result must be like the others.

    Raises:
        CaptureError: a Python side effect, or a break whose frozen arguments change.
        SplitError: no break was met, though the forward calls an attention that torch knows.
        TraceError: a result that cannot be cut back to the true rows, or that is another for other
            row counts; or a write to an input.
    """
    before, writes = Attributes(module), _Writes(workspace)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(_Tee(printed)):
            runs = [
                _run(module, workspace, samples, constants, boundaries, writes, size)
                for size in (sizes[0], sizes[0], sizes[1], least)
            ]
    finally:
        changed = before.restore()
        writes.put_back()
    if changed:
        lines = [f" at {line}" for name in changed if (line := line_that_sets(module, name))]
        raise CaptureError(
            f"the forward sets {sorted(changed)}{', '.join(lines)}: a Python side effect, which "
            "would happen once, at capture, and never again. Write into a registered buffer in "
            "place, or do it in a @pcgsvc.eager_break."
        )
    first, again, other, small = runs
    _refuse_changing_arguments(first, again)
    _refuse_unmarked_attention(first)
    warnings = []
    if printed.getvalue():
        line = printed.getvalue().strip().split("\n")[0]
        warnings.append(f"the forward prints ({line!r}): that happens at capture, not at replay")
    for run, size in ((other, sizes[1]), (small, least)):
        _refuse_other_result(first, run, (sizes[0], size))
    _forget_replaced(module, workspace)
    image = _image(workspace, first, other, sizes, writes.parameters())
    return Learned(
        image=image,
        warnings=warnings,
        kernels=first.kernels,
        one=first.calls,
        other=other.calls,
    )


@dataclass(kw_only=True)
class Learned:
    """What running the forward has shown."""

    image: ProgramImage
    warnings: list[str]
    """On what the forward does that happens at capture only."""
    kernels: list[str]
    """Names of the ops that compute something outside breaks, in order."""
    one: Calls
    """Calls of submodules."""
    other: Calls
    """The same with another row count."""


@dataclass
class _Run:
    """What one run of the forward did."""

    views: dict[str, torch.Tensor]
    result: Any = None
    events: list[str] = field(default_factory=list)
    """`kernel`, or the name of a break, in order."""
    kernels: list[str] = field(default_factory=list)
    """Names of the kernels' ops."""
    frozen: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    attention: set[str] = field(default_factory=set)
    calls: Calls = field(default_factory=Calls)

    def at_function(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """See `BreakHandler.at_function`."""
        self.broke(name, args, kwargs)
        return function(*args, **kwargs)

    def broke(self, name: str, args: Any, kwargs: Any) -> None:
        """Note a break and what of its arguments will be frozen."""
        self.events.append(name)
        self.calls.broke()
        leaves = pytree.tree_leaves([args, kwargs])
        self.frozen.append((name, tuple(v for v in leaves if not isinstance(v, torch.Tensor))))


def _run(
    module: Callable[..., Any],
    workspace: Workspace,
    samples: Samples,
    constants: Mapping[str, Any],
    boundaries: Boundaries,
    writes: _Writes,
    size: int,
) -> _Run:
    batch = samples.batch(size, uniform=False)
    workspace.load(samples.inputs(size), size, size)
    views = workspace.views(size)
    run = _Run(views)
    with (
        use_context(workspace.context(batch, size)),
        handle_breaks(run),
        watched(module, run.calls),
        _Functions(run),
        _Ops(run, boundaries, writes),
    ):
        run.result = module(**views, **constants)
    return run


class _Ops(torch_private.RecordingMode):
    """Notes breaks, and whether kernels run between them."""

    def __init__(self, run: _Run, boundaries: Boundaries, writes: _Writes) -> None:
        super().__init__()
        self._run, self._names, self._writes = run, boundaries.names, writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name)
        if func._schema.is_mutable:
            self._writes.before(name, func._schema, args, kwargs)
        if name in self._names:
            self._run.broke(name, args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        launches = not name.startswith(("aten::empty", "aten::new_empty", "prim::"))
        if launches and not func.is_view:
            self._run.events.append("kernel")
            self._run.kernels.append(name)
        return result


class _Writes:
    """Keeps parameters as they were before the forward writes to them, and inputs from writes."""

    def __init__(self, workspace: Workspace) -> None:
        storage_id = torch_private.storage_id
        self._inputs = {storage_id(b): name for name, b in workspace.buffers.items()}
        self._parameters: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in workspace.tensors.items():
            if _is_parameter(tensor) and can_be_put_back(tensor):
                self._parameters.setdefault(storage_id(tensor), []).append((name, tensor))
        self._saved: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def before(self, op: str, schema: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Look at what an op is about to write to."""
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        for leaf in pytree.tree_leaves([given.get(name) for name in written]):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = torch_private.storage_id(leaf)
            if storage in self._inputs:
                raise TraceError(
                    f"the forward writes to its input {self._inputs[storage]!r} with {op}; a "
                    "runner copies inputs, so the caller's tensor would not change. Write to a "
                    "clone."
                )
            for name, tensor in self._parameters.get(storage, ()):
                if name not in self._saved:
                    self._saved[name] = (tensor, tensor.clone())

    def put_back(self) -> None:
        """Undo what was written to parameters."""
        for tensor, value in self._saved.values():
            tensor.copy_(value)

    def parameters(self) -> set[str]:
        """Return the names of the parameters that were written to."""
        return set(self._saved)


def can_be_put_back(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content can be copied back; torch writes to no others itself."""
    overlaps = tensor.layout is torch.strided and any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    dense = tensor.layout is torch.strided and tensor.device.type != "meta"
    return dense and not overlaps and not tensor.is_inference()


def _forget_replaced(module: Callable[..., Any], workspace: Workspace) -> None:
    """Take out the tensors that breaks put others in place of; no graph may read those."""
    if workspace.tensors:
        held = {id(t) for t in [*tensors_of(module).values(), *tensors_held(module).values()]}
        for name in [n for n, t in workspace.tensors.items() if id(t) not in held]:
            del workspace.tensors[name]


class _Functions(TorchFunctionMode):
    """Notes calls of attention that is no break."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
            self._run.attention.add(name)
        return func(*args, **(kwargs or {}))


class _Tee(io.TextIOBase):
    """Keeps what is printed, and prints it."""

    def __init__(self, copy: io.StringIO) -> None:
        self._copy, self._out = copy, sys.stdout

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()


def _refuse_changing_arguments(first: _Run, again: _Run) -> None:
    if first.frozen == again.frozen:
        return
    pairs = zip(first.frozen, again.frozen, strict=False)
    name, one, two = next(
        ((a[0], a[1], b[1]) for a, b in pairs if a != b), ("the number of breaks", "", "")
    )
    raise CaptureError(
        f"{name}: differs between two equal runs ({one} and {two}). Arguments of a break that are "
        "no tensors are frozen at capture: read what changes from pcgsvc.current_context(), or "
        "pass it in a tensor that is updated in place."
    )


def _refuse_unmarked_attention(run: _Run) -> None:
    if run.attention and not run.frozen:
        raise SplitError(
            f"partition.strategy=breakable: the forward met no break, but calls "
            f"{sorted(run.attention)}: it would be captured with the lengths of the capture run. "
            "Call a @pcgsvc.splitting_op or @pcgsvc.eager_break there, name the operator in "
            "partition.splitting_ops, or use mode=none."
        )


# ---- what was learned ----------------------------------------------------------------------------


def _refuse_other_result(one: _Run, other: _Run, sizes: tuple[int, int]) -> None:
    """Refuse a result that is another for another row count: one form is captured for all."""
    (leaves, tree), (twins, other_tree) = flatten(one.result), flatten(other.result)
    found = ""
    if tree != other_tree or len(leaves) != len(twins):
        found = f"the result is nested as {_form(tree)} and {_form(other_tree)}"
    for at, (leaf, twin) in enumerate(zip(leaves, twins, strict=False)):
        kinds = [_kind(value, run.views) for value, run in ((leaf, one), (twin, other))]
        if not found and kinds[0] != kinds[1]:
            found = f"result leaf {at} is {kinds[0]} and {kinds[1]}"
    if found:
        raise TraceError(
            f"{found}, for {sizes[0]} and {sizes[1]} rows: Python outside breaks runs once, at "
            "capture, so the result must be the same whatever the row count. Return what depends "
            "on it as a tensor, or compute it outside."
        )


def _form(tree: ResultTree) -> str:
    text = " ".join(str(tree.spec).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _kind(leaf: Any, views: Mapping[str, torch.Tensor]) -> str:
    """Say what of a leaf must not depend on the row count."""
    if not isinstance(leaf, torch.Tensor):
        plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str))
        return repr(leaf) if plain else f"a {type(leaf).__name__}"
    given = [f"the input {name!r}" for name, view in views.items() if view is leaf]
    return given[0] if given else f"a {leaf.dtype} tensor of {leaf.dim()} dimensions"


def _image(
    workspace: Workspace,
    one: _Run,
    other: _Run,
    sizes: tuple[int, int],
    written: Collection[str],
) -> ProgramImage:
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
            specs.append(_spec(at, leaf, twin, sizes))
        elif leaf is None or isinstance(leaf, (bool, str)):
            constants[at] = leaf
        else:
            raise TraceError(
                f"result leaf {at}: got {type(leaf).__name__}; a forward may return tensors, "
                "None, bools and strings."
            )
    names = [spec.name for spec in workspace.inputs]
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
            for n, t in workspace.tensors.items()
            if n in written or (not _is_parameter(t) and can_be_put_back(t))
        ),
        pieces=tuple(_pieces(one.events)),
        unique_regions=sum(p.kind == Kind.REGION.value for p in _pieces(one.events)),
        documents={},
        matched={name: one.events.count(name) for name in dict.fromkeys(n for n, _ in one.frozen)},
        reasons={name: why for name, _ in one.frozen if (why := _why(name)) != _MET},
        ops={"kernel": one.events.count("kernel")},
        schemas={},
    )


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


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


__all__ = ["ModulePiece", "boundary_names", "learn"]
