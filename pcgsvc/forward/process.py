"""The one piece of process-wide state: the lock that serialises builds and captures.

In: nothing. Out: `BUILD_LOCK`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

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
