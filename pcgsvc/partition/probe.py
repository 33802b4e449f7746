"""Running a forward that is not traced, to learn what it returns and where it breaks.

In: a module and a workspace to run it in. Out: a `ForwardProbe`. Python outside breaks runs once,
at capture; what can be seen of that going wrong is refused or reported here.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import CaptureError, SplitError, TraceError
from pcgsvc.forward.objects import tensors_held, tensors_of
from pcgsvc.forward.plain import line_of
from pcgsvc.forward.results import flatten, kind_of
from pcgsvc.forward.samples import Samples
from pcgsvc.forward.state import Attributes, Writes, may_write
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.breaks import (
    HOST_READS,
    handle_breaks,
    higher_order_refusal,
    host_reads_refused,
    without_reads,
)
from pcgsvc.ops.collectives import COLLECTIVES, FOREIGN
from pcgsvc.ops.context import use_context
from pcgsvc.partition.submodules import Calls, watched
from pcgsvc.program.program import Boundaries
from pcgsvc.trace.sources import line_that_sets, made_permanent


@dataclass(kw_only=True)
class ForwardProbe:
    """What running the forward has shown."""

    largest: ForwardRun
    """With the most rows that memory holds."""
    other: ForwardRun
    """With one row less, which tells the row dimensions of results."""
    written: set[str]
    """Names of the parameters that were written to; they have been put back."""
    warnings: list[str]
    """On what the forward does that happens at capture only."""


@dataclass(frozen=True)
class Forward:
    """A forward that is not traced, with what it runs on."""

    module: Callable[..., Any]
    memory: Workspace
    """Its inputs are overwritten."""
    samples: Samples
    constants: Mapping[str, Any]
    boundaries: Boundaries
    captures: bool = True
    """Whether it will be captured."""

    def probe(self, least: int) -> ForwardProbe:
        """Run the forward a few times and write down what it returned and where it breaks.

        Of the tensors of `memory`, those are taken out that the forward itself replaces by others.

        Args:
            least: the smallest row count that is captured; its result must be like the others.

        Raises:
            CaptureError: a Python side effect, or a break whose frozen arguments change.
            SplitError: no break was met, though the forward calls an attention that torch knows.
            TraceError: a result that is another for other row counts; or a write to an input.
        """
        most = self.memory.max_tokens
        tensors = self.memory.tensors.items()
        parameters = {n: t for n, t in tensors if isinstance(t, torch.nn.Parameter)}
        before, writes = Attributes(self.module), Writes(parameters, self.memory.buffers)
        printed, stdout = io.StringIO(), sys.stdout
        try:
            with contextlib.redirect_stdout(_Tee(printed)):
                sizes = (most, most, max(1, most - 1), least)
                first, again, other, small = [self._run(n, writes, stdout) for n in sizes]
        finally:
            changed = before.restore()
            writes.put_back()
        if self.captures and first.host_reads:
            raise CaptureError(host_reads_refused(first.host_reads))
        _refuse_side_effects(self.module, changed)
        _refuse_changing_arguments(first, again)
        _refuse_unmarked_attention(first)
        warnings = []
        if printed.getvalue():
            line = printed.getvalue().strip().split("\n")[0]
            words = f"the forward prints ({line!r}): that happens at capture, not at replay"
            warnings.append(words)
        for run in (other, small):
            _refuse_other_result(first, run)
        _forget_replaced(self.module, self.memory)
        return ForwardProbe(largest=first, other=other, written=writes.written, warnings=warnings)

    def _run(self, size: int, writes: Writes, stdout: TextIO) -> ForwardRun:
        memory = self.memory
        batch = self.samples.batch(size, uniform=False)
        memory.load(self.samples.inputs(size), size, size)
        run = ForwardRun(size, memory.views(size), stdout)
        with (
            use_context(memory.context(batch, size)),
            handle_breaks(run),
            watched(self.module, run.calls),
            _Functions(run),
            _Ops(run, self.boundaries, writes),
        ):
            run.result = self.module(**run.views, **self.constants)
        return run


def _refuse_side_effects(module: Callable[..., Any], changed: Mapping[str, Any]) -> None:
    if changed:
        lines = [f" at {line}" for name in changed if (line := line_that_sets(module, name))]
        way = made_permanent(module, changed) or (
            "write into a registered buffer in place, or do it in a @pcgsvc.eager_break"
        )
        raise CaptureError(
            f"the forward sets {sorted(changed)}{', '.join(lines)}: a Python side effect, which "
            f"would happen once, at capture, and never again. Way out: {way}."
        )


@dataclass
class ForwardRun:
    """What one run of the forward did."""

    size: int
    """Row count."""
    views: dict[str, torch.Tensor]
    stdout: TextIO
    """Where breaks print; they do so at replays as well, so nothing is to be said of it."""
    result: Any = None
    events: list[str] = field(default_factory=list)
    """`kernel`, or the name of a break, in order."""
    kernels: list[str] = field(default_factory=list)
    """Names of the kernels' ops."""
    collectives: list[str] = field(default_factory=list)
    """Those that are no breaks."""
    frozen: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    attention: set[str] = field(default_factory=set)
    calls: Calls = field(default_factory=Calls)
    host_reads: list[str] = field(default_factory=list)
    """The lines outside breaks at which the host waits for a value."""
    in_break: bool = False

    def at_function(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """See `BreakHandler.at_function`."""
        self.broke(name, args, kwargs)
        self.in_break = True
        try:
            with contextlib.redirect_stdout(self.stdout):
                return function(*args, **kwargs)
        finally:
            self.in_break = False

    def broke(self, name: str, args: Any, kwargs: Any) -> None:
        """Note a break and what of its arguments will be frozen."""
        self.events.append(name)
        self.calls.broke()
        leaves = pytree.tree_leaves([args, kwargs])
        self.frozen.append((name, tuple(v for v in leaves if not isinstance(v, torch.Tensor))))


class _Ops(torch_private.RecordingMode):
    """Notes breaks, and whether kernels run between them; refuses higher-order operators."""

    supports_higher_order_operators = True

    def __init__(self, run: ForwardRun, boundaries: Boundaries, writes: Writes) -> None:
        super().__init__()
        self._run, self._names, self._writes = run, boundaries.names, writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (higher := torch_private.higher_order_name(func)) is not None:
            if self._run.in_break:
                return func(*args, **kwargs)
            raise higher_order_refusal(higher, line_of(traceback.extract_stack()))
        name = str(func._schema.name)
        if may_write(func):
            self._writes.before(name, func._schema, args, kwargs)
        if name in self._names:
            self._run.broke(name, args, kwargs)
            with contextlib.redirect_stdout(self._run.stdout):
                return func(*args, **kwargs)
        if name.startswith(FOREIGN) and not self._run.in_break:
            raise CaptureError(
                f"{name} at {line_of(traceback.extract_stack())}: partition.strategy=breakable "
                "holds no collective of torch.distributed's. Use partition.strategy=fx, or call it "
                "in a @pcgsvc.eager_break."
            )
        if name in COLLECTIVES:
            self._run.collectives.append(name)
        if name in HOST_READS and not self._run.in_break:
            self._run.host_reads.append(line_of(traceback.extract_stack()))
        result = func(*args, **kwargs)
        launches = not name.startswith(("aten::empty", "aten::new_empty", "prim::"))
        if launches and not func.is_view:
            self._run.events.append("kernel")
            self._run.kernels.append(name)
        return result


def _forget_replaced(module: Callable[..., Any], workspace: Workspace) -> None:
    """Take out the tensors that breaks put others in place of; no graph may read those."""
    if workspace.tensors:
        held = {id(t) for t in [*tensors_of(module).values(), *tensors_held(module).values()]}
        for name in [n for n, t in workspace.tensors.items() if id(t) not in held]:
            del workspace.tensors[name]


class _Functions(TorchFunctionMode):
    """Notes calls of attention that is no break."""

    def __init__(self, run: ForwardRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
            self._run.attention.add(name)
        func, args, kwargs = without_reads(func, args, kwargs or {})
        return func(*args, **kwargs)


class _Tee(io.TextIOBase):
    """Keeps what is printed, and prints it."""

    def __init__(self, copy: io.StringIO) -> None:
        self._copy, self._out = copy, sys.stdout

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()


def _refuse_changing_arguments(first: ForwardRun, again: ForwardRun) -> None:
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


def _refuse_unmarked_attention(run: ForwardRun) -> None:
    if run.attention and not run.frozen:
        raise SplitError(
            f"partition.strategy=breakable: the forward met no break, but calls "
            f"{sorted(run.attention)}: it would be captured with the lengths of the capture run. "
            "Call a @pcgsvc.splitting_op or @pcgsvc.eager_break there, name the operator in "
            "partition.splitting_ops, or use mode=none."
        )


def _refuse_other_result(one: ForwardRun, other: ForwardRun) -> None:
    """Refuse a result that is another for another row count: one form is captured for all."""
    (leaves, tree), (twins, other_tree) = flatten(one.result), flatten(other.result)
    found = ""
    if tree != other_tree or len(leaves) != len(twins):
        found = f"the result is nested as {tree} and {other_tree}"
    for at, (leaf, twin) in enumerate(zip(leaves, twins, strict=False)):
        kinds = [_kind(value, run.views) for value, run in ((leaf, one), (twin, other))]
        if not found and kinds[0] != kinds[1]:
            found = f"result leaf {at} is {kinds[0]} and {kinds[1]}"
    if found:
        raise TraceError(
            f"{found}, for {one.size} and {other.size} rows: Python outside breaks runs once, at "
            "capture, so the result must be the same whatever the row count. Return what depends "
            "on it as a tensor, or compute it outside."
        )


def _kind(leaf: Any, views: Mapping[str, torch.Tensor]) -> str:
    """Say what of a leaf must not depend on the row count."""
    if not isinstance(leaf, torch.Tensor):
        return kind_of(leaf, "")
    given = [f"the input {name!r}" for name, view in views.items() if view is leaf]
    return given[0] if given else f"a {leaf.dtype} tensor of {leaf.dim()} dimensions"
