"""The one piece of process-wide state: the lock that serialises builds and captures.

In: nothing. Out: `BUILD_LOCK`; blocks in which the process is as a build needs it: torch's modes,
Python's collector.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator

import torch

from pcgsvc.errors import ConfigError


class _BuildLock:
    """Serialises builds and captures of this process, and hands capture streams on.

    Dynamo and CUDA capture are process-wide. cuBLAS keeps a workspace for every stream that was
    ever used, for good; a closed runner's stream is used again, so that building and closing
    runners keeps memory flat. No two open runners share one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: dict[torch.device, list[torch.cuda.Stream]] = {}
        self.collector = threading.Lock()
        """Held by the one block that has eased Python's collector, and puts it back."""

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def take_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return a capture stream for one runner; None on the CPU."""
        if device.type != "cuda":
            return None
        with self._lock:
            idle = self._idle.setdefault(device, [])
            return idle.pop() if idle else torch.cuda.Stream(device)

    def give_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Take a stream back whose runner is closed."""
        if stream is not None:
            with self._lock:
                self._idle.setdefault(stream.device, []).append(stream)


BUILD_LOCK = _BuildLock()


def refuse_autocast(device: torch.device) -> None:
    """Raise ConfigError inside the caller's `torch.autocast`, which no graph would run under."""
    if torch.is_autocast_enabled(device.type):
        raise ConfigError(
            f"torch.autocast({device.type!r}) is on around the build: a runner works outside of "
            "its caller's autocast, so results would not be of the type that the module gives. "
            "Put the autocast block into the forward, or give the module its type (module.to)."
        )


@contextlib.contextmanager
def build_modes(device: torch.device) -> Iterator[bool]:
    """Hold the build lock, with torch's modes as every build needs them, whatever the caller's.

    Attention modules of torch.nn do without their fused inference path, which Dynamo does not take
    either: what is compared then runs the same ops.

    Yields:
        Whether plain execution takes that path, as the caller has set it.

    Raises:
        ConfigError: see `refuse_autocast`.
    """
    refuse_autocast(device)
    with BUILD_LOCK, torch.inference_mode(False), torch.no_grad():
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield fused
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


_FROZEN_AT_START = 10_000
"""More frozen objects than any Python starts with (3.12: some hundred) were frozen on purpose."""
_NEW_OBJECTS = 50_000
"""New objects, as `gc.set_threshold` counts them, after which a build looks for garbage."""


@contextlib.contextmanager
def collector_eased(own: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Have Python's collector run rarely, and on new objects only, while a block makes what stays.

    Importing and tracing make half a million objects, which it would otherwise walk over and over.
    What is there before the block is left out (`gc.freeze`): if that may hold CUDA memory besides
    `own`, it is collected first, so that dead graphs give theirs back before others are captured. A
    collector that is off stays off, and what the process itself has frozen stays frozen. Inside
    another such block, of any thread, nothing changes.

    Args:
        own: the tensors that are there on purpose.
    """
    if _holds_more(own):
        gc.collect()
    if not BUILD_LOCK.collector.acquire(blocking=False):
        yield
        return
    before = gc.get_threshold()
    freezes = gc.get_freeze_count() < _FROZEN_AT_START
    try:
        if freezes:
            gc.freeze()
        if 0 < before[0] < _NEW_OBJECTS:
            gc.set_threshold(_NEW_OBJECTS, *before[1:])
        yield
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()
        BUILD_LOCK.collector.release()


def _holds_more(own: Iterable[torch.Tensor]) -> bool:
    """Whether torch has given out more memory of CUDA devices than these tensors take."""
    if not torch.cuda.is_initialized():
        return False
    plain = (t for t in own if type(t) in (torch.Tensor, torch.nn.Parameter))
    storages = [t.untyped_storage() for t in plain if t.is_cuda and t.layout is torch.strided]
    sizes = {(s.device, s.data_ptr()): s.nbytes() for s in storages}.values()
    blocks = sum(-(-size // _BLOCK) * _BLOCK for size in sizes)
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.memory_allocated(device) for device in devices) > blocks


_BLOCK = 512
"""Bytes; torch's allocator on CUDA gives out whole blocks."""
