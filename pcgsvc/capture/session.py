"""The capture session: runs a program once and records it as replay steps.

In: a program's calls, as an executor. Out: an `Entry`: a flat tuple of zero-argument callables.
Knows nothing of how a segment is captured (that is the engine's), of dispatch, or of disks.

A session captures a segment. When a splitting op is met it ends the segment, has the engine execute
it (kernels do not run while they are captured), runs the op eagerly, records the op with its bound
arguments as a step, and goes on with the next segment. So the capture run is a true run, and no op
ever sees what has not been computed. FULL is the same session with breaks off: one segment.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.capture.bridges import BoundResults, Step
from pcgsvc.capture.call_copies import CallCopies
from pcgsvc.capture.sources import Boundary, Composer
from pcgsvc.capture.stitch import Joined
from pcgsvc.errors import CaptureError
from pcgsvc.ops.breaks import handle_breaks
from pcgsvc.ops.context import ForwardContext
from pcgsvc.ops.registry import OpSpec, find_spec
from pcgsvc.program.program import (
    Boundaries,
    BoundCall,
    CompiledPiece,
    Memory,
    apart,
    tensors_in,
    written_rows,
    zero_padding,
)


class Engine(Protocol):
    """What captures and executes segments."""

    name: str

    @property
    def composer(self) -> Composer | str:
        """What joins segments, splitting ops and copies, or why nothing does."""

    def begin(self) -> None:
        """Start capturing a segment."""

    def end(self) -> Step | None:
        """End the segment, execute it exactly once, and return what replays it (None: empty)."""

    def abort(self) -> None:
        """Leave a segment that failed, with nothing captured and nothing kept."""

    def run_piece(self, piece: CompiledPiece, args: list[Any]) -> Sequence[Any]:
        """Run a compiled piece inside the segment."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Return a block around a whole session."""

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a segment of this runner allocated the tensor's memory."""

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory, to be bound to a step.

        It owns the memory unless a segment allocated it: every replay rewrites that before
        anything reads it, and letting go of it lets the pool reuse it.
        """

    def take_owned(self) -> list[torch.Tensor]:
        """Return what segments have allocated since the last call; empty where a pool has it."""

    def discard_pool(self) -> None:
        """Let go of the pool, of which no entry is left, and take a new one."""

    def probe(self, cause: Exception) -> None:
        """End the job if a failed capture has left the device unusable.

        Raises:
            RuntimeError: it is unusable, because of `cause`.
        """

    def pool_bytes(self) -> int:
        """Return the bytes of device memory that graph pools have mapped; 0 without a pool."""

    def free_bytes(self) -> int:
        """Return the device's free memory in bytes; 0 where it is not counted."""

    def reserved_bytes(self) -> int:
        """Return the device memory that torch's allocator holds, pools included, in bytes."""

    def give_back(self) -> None:
        """Give the device back what torch's allocator holds and nothing uses."""


@dataclass(kw_only=True)
class Entry:
    """One captured (mode, size): calling every step in order is one forward."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]
    """Per step: its piece's name, or those of splitting ops that follow one another."""
    is_region: tuple[bool, ...]
    """Per step: a captured segment, or splitting ops."""
    outputs: list[torch.Tensor]
    """The graph's results; they alias memory that any later replay of the runner overwrites."""
    boundaries: tuple[str, ...]
    """Splitting ops hit, in order."""
    keep: list[Any] = field(default_factory=list)
    """What must outlive the steps."""
    owned: list[torch.Tensor] = field(default_factory=list)
    """Recorded graphs: memory that the segments allocated, for `debug.poison`."""
    joined: Joined | None = None
    """How its pieces are replayed; None: it is one full graph."""
    copies: CallCopies | None = None
    """The same steps with a call's copies in them; None: calls make their copies themselves."""

    @property
    def calls(self) -> Sequence[Step]:
        """What a forward calls in order: the steps, or fewer that do the same."""
        return self.joined.steps if self.joined is not None and self.joined.steps else self.steps

    @property
    def owned_bytes(self) -> int:
        """Bytes of `owned`."""
        return sum(t.untyped_storage().nbytes() for t in self.owned)

    @property
    def num_graphs(self) -> int:
        """Captured segments."""
        return sum(self.is_region)


class Session:
    """Executes a program while capturing it. Used once, by one thread."""

    def __init__(
        self, engine: Engine, context: ForwardContext, *, breaks: bool, ranges: bool = False
    ) -> None:
        self._engine = engine
        self._context = context
        self._breaks = breaks
        self._ranges = ranges
        self._steps: list[tuple[str, bool, Step]] = []
        self.parts: list[Step | Boundary] = []
        """The steps again, with what is known of splitting ops."""
        self._boundaries: list[str] = []
        self.frozen: list[tuple[Any, ...]] = []
        """Per boundary: the arguments that are no tensors, and so are frozen."""
        self._keep: list[Any] = []
        self._open: list[str] = []
        """Names of the pieces in the open segment; empty when none is open."""
        self._within: str | None = None
        """The piece that runs now and calls splitting ops itself."""
        self._listener: _Listener | None = None
        """What hears those calls."""

    # -- Executor --

    def region(self, name: str, piece: CompiledPiece, args: list[Any]) -> Sequence[Any]:
        """Run a region inside the current segment, or several that the piece breaks itself."""
        if piece.boundaries is None:
            self._begin(name)
            return self._engine.run_piece(piece, args)
        self._within = name
        self._begin(name)
        self._listener = _Listener(self, piece.boundaries)
        try:
            with self._listener, handle_breaks(self):
                return self._engine.run_piece(piece, args)
        finally:
            self._within = self._listener = None

    def splitting(self, call: BoundCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Break the segment at a splitting op, or capture the op when breaks are off."""
        name = call.call.splitting or str(call.call.row[1])
        at = _Break(name, call.kernel, args, kwargs, call.spec)
        at.written = written_rows(call, args, kwargs)
        at.row_result, at.written_later = call.call.row_result, call.call.written_later
        return self._at_break(at)

    # -- breaks that a piece reaches by itself --

    def at_op(self, func: Any, at: int, boundaries: Boundaries, args: Any, kwargs: Any) -> Any:
        """Run a splitting op that was called through the dispatcher."""
        name = str(func._schema.name)
        spec = find_spec(name)
        kernel = spec.kernel if spec is not None else func
        found = _Break(name, kernel, list(args), dict(kwargs), spec)
        if spec is None or not spec.zeroes_padding:
            found.written = self._row_wise(func, at, boundaries, args, kwargs)
            rows = boundaries.rows[at] if boundaries.rows is not None else None
            found.row_result = rows == (-1,) and not found.written
        result = self._at_break(found)
        if boundaries.in_place_only:
            self._refuse_fresh(name, result)
        return result

    def at_function(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a Python function marked with `eager_break`; see `BreakHandler`."""
        if not self._breaks:
            raise CaptureError(
                f"{name}: an eager_break is met in a full graph; it runs between graphs only. Use "
                "mode=piecewise."
            )
        listener = self._listener
        assert listener is not None, "a break is met while no piece runs"
        # Modes are a stack: the engine may have to leave its own, which lies under the listener.
        listener.__exit__(None, None, None)
        try:
            result = self._at_break(_Break(name, function, list(args), kwargs, declared=False))
        finally:
            listener.__enter__()
        self._refuse_fresh(name, result)
        return result

    def _row_wise(
        self, func: Any, at: int, boundaries: Boundaries, args: Any, kwargs: Any
    ) -> list[torch.Tensor]:
        """Return the arguments whose padding rows must be zero after a splitting op."""
        rows = boundaries.rows[at] if boundaries.rows is not None else None
        written = [
            (n, args[n] if n < len(args) else kwargs.get(a.name))
            for n, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if rows is not None:
            return [t for n, t in written if n in rows]
        # Not traced: memory that a segment of this session made, with the step's rows, is row-wise;
        # a cache that happens to have as many rows is not such memory.
        size = self._context.padded_tokens
        return [
            t
            for _, t in written
            if isinstance(t, torch.Tensor)
            and t.dim() > 0
            and t.shape[0] == size
            and self._engine.made(t)
        ]

    @staticmethod
    def _refuse_fresh(name: str, result: Any) -> None:
        if any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(result)):
            raise CaptureError(
                f"{name}: a break returned a tensor. The next graph reads the memory of the "
                "capture run, not what a later call returns: let the break write into a buffer "
                "that it is given, and return nothing."
            )

    # -- all breaks --

    def _at_break(self, at: _Break) -> Any:
        self._boundaries.append(at.name)
        leaves = pytree.tree_leaves([at.args, at.kwargs])
        self.frozen.append(tuple(v for v in leaves if not isinstance(v, torch.Tensor)))
        if not self._breaks:
            self._begin(at.name)
            result = at.kernel(*at.args, **at.kwargs)
            if at.row_result:
                result = apart(result, [at.args, at.kwargs], always=True)
            self._mask_padding([*at.written, *(tensors_in(result) if at.row_result else ())])
            return result
        self._end()
        with handle_breaks(None):
            result = at.kernel(*at.args, **at.kwargs)
        result, step = self._bind(at, result)
        self._steps.append((at.name, False, step))
        if self._within is not None:
            self._begin(self._within)
        return result

    def finish(self, outputs: Sequence[Any]) -> Entry:
        """End the last segment and return the entry."""
        self._end()
        held = [self._engine.hold(t) for t in outputs]
        if self._ranges:
            self._steps = [(n, r, ranged(n, s)) for n, r, s in self._steps]
        steps = list(_without_gaps(self._steps))
        return Entry(
            steps=tuple(s for _, _, s in steps),
            names=tuple(n for n, _, _ in steps),
            is_region=tuple(r for _, r, _ in steps),
            outputs=held,
            boundaries=tuple(self._boundaries),
            keep=[*self._keep, self._engine],
            owned=self._engine.take_owned(),
        )

    def abort(self) -> None:
        """Leave the open segment, if any; the session cannot be used any more."""
        self._context.in_segment = False
        self._open = []
        self._engine.abort()
        self._steps.clear()
        self.parts.clear()
        self._keep.clear()

    # -- segments --

    def _begin(self, name: str) -> None:
        if not self._open:
            self._engine.begin()
            self._context.in_segment = True
        self._open.append(name)

    def _end(self) -> None:
        if not self._open:
            return
        name = "+".join(self._open) if len(self._open) <= 2 else f"{self._open[0]}…{self._open[-1]}"
        self._context.in_segment = False
        replay = self._engine.end()
        self._open = []
        if replay is not None:
            self._steps.append((name, True, replay))
            self.parts.append(replay)

    # -- splitting ops --

    def _bind(self, at: _Break, result: Any) -> tuple[Any, Step]:
        """Return the op's result as later pieces may see it, and the step that recomputes it."""

        def hold(value: Any) -> Any:
            if type(value) is torch.Tensor and not vars(value):
                value = value.detach()  # later pieces may turn the tensor itself round: `x.t_()`
            return self._engine.hold(value) if isinstance(value, torch.Tensor) else value

        held_args = pytree.tree_map(hold, at.args)
        held_kwargs = pytree.tree_map(hold, at.kwargs)
        bind = at.spec.bind if at.spec is not None else None
        bound = bind(*held_args, **held_kwargs) if bind is not None else None
        self._keep += [held_args, held_kwargs] if bound is not None else []
        run = bound or functools.partial(at.kernel, *held_args, **held_kwargs)
        results = BoundResults(
            at.name,
            result,
            Memory([at.args, at.kwargs]),
            row_wise=at.row_result,
            written_later=at.written_later,
        )
        self._keep += results.bridges
        rows = [hold(t) for t in at.written] + (results.bridges if at.row_result else [])
        zero_padding(rows)
        step = results.step(run, rows)
        plain = functools.partial(at.kernel, *held_args, **held_kwargs)
        self.parts.append(
            Boundary(
                name=at.name,
                step=step,
                run=results.step(plain, rows),
                args=held_args,
                kwargs=held_kwargs,
                plan=None if at.spec is None else at.spec.plan_launches,
                why_not=at.why_outside(result),
            )
        )
        return results.value, step

    def _mask_padding(self, tensors: Sequence[torch.Tensor]) -> None:
        """Zero padding rows with device values only, as a captured segment must."""
        for tensor in tensors:
            rows = torch.arange(tensor.shape[0], device=tensor.device)
            padding = rows >= self._context.num_tokens_tensor
            tensor.masked_fill_(padding.view(-1, *([1] * (tensor.dim() - 1))), 0)


@dataclass
class _Break:
    """A splitting op that is met, with its arguments."""

    name: str
    kernel: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    spec: OpSpec | None = None
    written: list[torch.Tensor] = field(default_factory=list)
    """Arguments whose padding rows must be zero afterwards."""
    row_result: bool = False
    """Whether the padding rows of its results must be."""
    written_later: bool = True
    """See `Call.written_later`; True where that is not known."""
    declared: bool = True
    """Whether it is an op, whose schema says what it writes."""

    def why_outside(self, result: Any) -> str | None:
        """Return why it must stay outside of any graph, given what it returned."""
        if not self.declared:
            return "it is a Python function, which declares no writes"
        return "it returns tensors" if tensors_in(result) else None


def _without_gaps(steps: list[tuple[str, bool, Step]]) -> Iterator[tuple[str, bool, Step]]:
    """Yield the steps, splitting ops that follow one another without a segment as one."""
    for is_region, group in itertools.groupby(steps, lambda step: step[1]):
        several = list(group)
        if is_region or len(several) == 1:
            yield from several
        else:
            runs = [step for _, _, step in several]
            yield "+".join(name for name, _, _ in several), False, _in_order(runs)


def _in_order(runs: list[Step]) -> Step:
    def step() -> None:
        for run in runs:
            run()

    return step


def ranged(name: str, step: Step) -> Step:
    """Wrap a step in a profiler range that carries its piece's name."""

    def ranged() -> None:
        with torch.profiler.record_function(name):
            step()

    return ranged


class _Listener(torch_private.RecordingMode):
    """Hears the splitting ops that a piece calls through the dispatcher."""

    def __init__(self, session: Session, boundaries: Boundaries) -> None:
        super().__init__()
        self._session, self._boundaries, self._heard = session, boundaries, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name)
        if name not in self._boundaries.names:
            return func(*args, **kwargs)
        at, self._heard = self._heard, self._heard + 1
        return self._session.at_op(func, at, self._boundaries, args, kwargs)
