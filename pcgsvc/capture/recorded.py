"""`capture.graphs=recorded`: the CPU's stand-in for CUDA graphs.

In: a segment that runs under two torch modes. Out: a function that re-issues what was recorded onto
the same memory. Same rules as CUDA graphs: static addresses, no host reads, no data-dependent
shapes, no fresh host data. Never faster than plain execution; it exists so that everything but the
device effect can be tried without a GPU. Knows nothing of programs or dispatch.

Recording a segment executes it, so `end` need not replay it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pcgsvc import torch_private
from pcgsvc.capture.sources import Comparison, Step
from pcgsvc.cuda_driver import Launch
from pcgsvc.errors import CaptureError
from pcgsvc.ops.breaks import HOST_READS, without_reads
from pcgsvc.program.program import CompiledPiece

_SYNCS = {
    **dict.fromkeys(
        HOST_READS, "the host waits for a device value (.item(), bool(), int(), float(), if)"
    ),
    "aten::nonzero": "the result's size depends on data (nonzero, where with one argument)",
    "aten::masked_select": "the result's size depends on data (masked_select)",
    "aten::_unique2": "the result's size depends on data (unique)",
    "aten::unique_consecutive": "the result's size depends on data (unique_consecutive)",
    "aten::repeat_interleave.Tensor": "the result's size depends on data (repeat_interleave)",
    "aten::equal": "the host waits for a device value (torch.equal)",
    "aten::allclose": "the host waits for a device value (torch.allclose)",
    "aten::bincount": "the result's size depends on data (bincount)",
    "aten::resize_": "a tensor's size changes",
    "aten::set_": "a tensor's storage is replaced",
}
HOST_DATA = {
    torch.tensor: "fresh host data is copied to the device (torch.tensor)",
    torch.as_tensor: "fresh host data is copied to the device (torch.as_tensor)",
    torch.asarray: "fresh host data is copied to the device (torch.asarray)",
    torch.Tensor.new_tensor: "fresh host data is copied to the device (new_tensor)",
    torch.from_numpy: "fresh host data is copied to the device (torch.from_numpy)",
}
"""Functions that make tensors of host data; a trace lifts those of numbers out of the segments."""
HOST_FUNCTIONS = {
    **HOST_DATA,
    torch.Tensor.tolist: "the host waits for device values (.tolist())",
    torch.Tensor.numpy: "the host waits for device values (.numpy())",
    torch.Tensor.__array__: "the host waits for device values (numpy.asarray)",
    torch.Tensor.__repr__: "the host waits for device values (a tensor as text: print, str)",
    **dict.fromkeys(
        (torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_),
        "the host computes, by a Python function of each element",
    ),
}
"""Functions that a segment must not call, each with the reason; no dispatch mode sees them."""


def _forbidden(what: str, why: str) -> CaptureError:
    return CaptureError(
        f"{what}: not permitted while a segment is captured: {why}. It would be frozen at its "
        "value of the capture run. Compute it outside the forward, or put it into a splitting op."
    )


def why_forbidden(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why a segment must not call an op (an OpOverload) on these arguments, or None."""
    name = str(func._schema.name)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
        i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        return "the result's size depends on data (a boolean mask as index)"
    return _SYNCS.get(name) or _SYNCS.get(f"{name}.{func._schema.overload_name}")


class _HostReads(TorchFunctionMode):
    """Catches, inside segments, what never reaches a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        why = HOST_FUNCTIONS.get(func)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and _has_list(args[1]):
            why = "a list as index is fresh host data, copied to the device"
        if why is not None:
            raise _forbidden(getattr(func, "__name__", str(func)), why)
        func, args, kwargs = without_reads(func, args, kwargs)
        return func(*args, **kwargs)


def _has_list(index: Any) -> bool:
    """Whether there are numbers of the host in an index; a trace has made tensors of them."""
    return isinstance(index, list) or (
        isinstance(index, tuple) and any(isinstance(i, (list, tuple)) for i in index)
    )


class _Recorder(torch_private.RecordingMode):
    """Runs every op and records how to run it again on the same memory."""

    def __init__(self, owner: RecordedEngine) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (why := why_forbidden(func, args, kwargs)) is not None:
            full = f"{func._schema.name}.{func._schema.overload_name}"
            raise _forbidden(full.removesuffix(".").replace(".default", ""), why)
        result = func(*args, **kwargs)
        self.record(func, args, kwargs, result, func._schema.is_mutable)
        return result

    def record(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, mutates: bool
    ) -> None:
        """Keep a step that computes `result` again, unless nothing needs computing.

        What it keeps are aliases: the forward may turn a tensor itself round later (`h.t_()`).
        """
        if torch.Tag.inplace_view in torch_private.op_tags(func):
            return  # no memory is written
        if torch.is_inference_mode_enabled():
            raise CaptureError(
                "the forward makes tensors in torch.inference_mode, which nothing may write to "
                "outside of it, as a replay does. Leave it out, since a runner computes no "
                "gradients."
            )
        args, kwargs = _aliases(args), _aliases(kwargs)
        if mutates:
            self.steps.append(lambda: func(*args, **kwargs))
            return
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((*args, *kwargs.values()))}
        leaves = _aliases(_tensors((result,)))
        fresh = [t for t in leaves if t.untyped_storage().data_ptr() not in inputs]
        self._owner.adopt(fresh)
        name = getattr(getattr(func, "_schema", None), "name", "")
        if not fresh or name.startswith(("aten::empty", "aten::new_empty")):
            return  # a view of static memory, or memory that nothing has been written to

        def step() -> None:
            for old, new in zip(leaves, _tensors((func(*args, **kwargs),)), strict=True):
                if old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.steps.append(step)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an op's arguments or results, and in lists and dicts of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def _aliases(value: Any) -> Any:
    """Return an op's arguments with tensors of the same memory and layout in place of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_aliases, value)) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: _aliases(item) for name, item in value.items()}
    return value


class RecordedComposer:
    """Joins recorded segments and launches: what CUDA would replay at once, called in order."""

    is_timed = False

    def address(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Composer.address`; a recorded launch takes tensors."""
        return tensor

    def copy_launch(self, size: int) -> Launch | None:
        """See `Composer.copy_launch`."""
        return None

    def compose(self, parts: Sequence[Step | Launch]) -> RecordedComposed:
        """See `Composer.compose`."""
        return RecordedComposed(parts)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """See `Composer.aside`."""
        return contextlib.nullcontext()

    def capture(self, run: Step) -> Sequence[Launch]:
        """See `Composer.capture`: the op itself is the kernel, as nothing can keep its ops back."""
        return [Launch(lambda grid: run(), (1, 1, 1), (1, 1, 1), 0, ())]

    def launch(self, launches: Sequence[Launch]) -> None:
        """See `Composer.launch`."""
        for launch in launches:
            launch.function(launch.grid, *launch.args)

    def compare(self, pieces: Sequence[Step], stitched: Sequence[Step], anew: Step) -> Comparison:
        """Refuse: see `is_timed`."""
        raise AssertionError("recorded graphs are not timed")


class RecordedComposed:
    """See `Composed`."""

    def __init__(self, parts: Sequence[Step | Launch]) -> None:
        self._parts = [RecordedNode(p) if isinstance(p, Launch) else p for p in parts]
        self.nodes = [p for p in self._parts if isinstance(p, RecordedNode)]

    def replay(self, *, patched: bool) -> None:
        """See `Composed.replay`."""
        for part in self._parts:
            part()


class RecordedNode:
    """See `Node`."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._enabled = launch, True

    def __call__(self) -> None:
        """Make the launch that is set."""
        if self._enabled:
            self._launch.function(self._launch.grid, *self._launch.args)

    def set(self, launch: Launch) -> None:
        """See `Node.set`."""
        self._launch = launch

    def pack(self, args: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Any]]:
        """See `Node.pack`."""
        return args

    def pack_words(self, words: Sequence[int]) -> Sequence[tuple[int, Any]]:
        """See `Node.pack_words`."""
        return list(enumerate(words))

    def change(self, grid: tuple[int, int, int] | None, packed: Sequence[tuple[int, Any]]) -> None:
        """See `Node.change`."""
        new = dict(packed)
        values = tuple(new.get(at, value) for at, value in enumerate(self._launch.args))
        self._launch = self._launch._replace(grid=grid or self._launch.grid, args=values)

    def enable(self, enabled: bool) -> None:
        """See `Node.enable`."""
        self._enabled = enabled


class RecordedEngine:
    """Records segments. One per runner; used under the runner's lock."""

    name = "recorded"

    def __init__(self) -> None:
        self.composer = RecordedComposer()
        self._reads = _HostReads()
        self._recorder: _Recorder | None = None
        self._current: list[torch.Tensor] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `Engine.session`.

        The function mode lasts for the whole session and is told when a segment is open: a break
        may be met inside a call that the mode itself is handling, where it cannot be left.
        """
        with self._reads:
            yield

    def begin(self) -> None:
        """See `Engine.begin`."""
        self._enter(_Recorder(self))

    def end(self) -> Step | None:
        """See `Engine.end`; recording has executed the segment already."""
        steps = tuple(self._leave().steps)
        if not steps:
            return None

        def replay() -> None:
            for step in steps:
                step()

        return replay

    def abort(self) -> None:
        """See `Engine.abort`."""
        if self._recorder is not None:
            self._leave()
        self._current = []

    def _enter(self, recorder: _Recorder) -> None:
        recorder.__enter__()
        self._recorder = recorder
        self._reads.active = True

    def _leave(self) -> _Recorder:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "no segment is open"
        self._reads.active = False
        recorder.__exit__(None, None, None)
        return recorder

    def run_piece(self, piece: CompiledPiece, args: list[Any]) -> Sequence[Any]:
        """Run a piece under the modes, or as one recorded call when its kernels are invisible."""
        if not piece.opaque:
            return piece(*args)
        recorder = self._leave()
        try:
            results = piece(*args)
        finally:
            self._enter(recorder)
        known = len(recorder.steps)
        recorder.record(piece, tuple(args), {}, results, mutates=False)
        if len(recorder.steps) == known:  # it writes to its inputs at most, and returns views
            recorder.steps.append(lambda: piece(*args))
        return results

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Engine.hold`; host memory is held strongly."""
        return tensor

    def made(self, tensor: torch.Tensor) -> bool:
        """See `Engine.made`."""
        address = tensor.untyped_storage().data_ptr()
        return any(t.untyped_storage().data_ptr() == address for t in self._current)

    # -- what the segments own --

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note memory that a segment allocated."""
        self._current += tensors

    def take_owned(self) -> list[torch.Tensor]:
        """See `Engine.take_owned`."""
        owned, self._current = self._current, []
        return owned

    def discard_pool(self) -> None:
        """See `Engine.discard_pool`; recordings have none."""

    def probe(self, cause: Exception) -> None:
        """See `Engine.probe`; a failed recording breaks nothing."""

    def pool_bytes(self) -> int:
        """See `Engine.pool_bytes`."""
        return 0

    def free_bytes(self) -> int:
        """See `Engine.free_bytes`."""
        return 0

    def reserved_bytes(self) -> int:
        """See `Engine.reserved_bytes`."""
        return 0

    def give_back(self) -> None:
        """See `Engine.give_back`."""
