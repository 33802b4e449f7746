"""Page-locked memory of the host, through which a step's metadata gets to the device.

In: numbers. Out: copies of them that are queued, or that somebody else queues. Knows nothing of
what the numbers mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Copied = tuple[int, int, int]
"""A copy: the address that it is to, the one that it is from, and bytes."""


class Staging:
    """Pinned memory in two halves, out of which copies to the device are queued."""

    MAX_VIEWS = 1024
    """Most remembered views: making one takes as long as half a copy."""

    def __init__(self, target: torch.Tensor, half: int) -> None:
        self._target, self._half, self._at, self._end = target, half, 0, half
        self._pinned = torch.zeros(2 * half, dtype=torch.int32, pin_memory=True)
        self._host: npt.NDArray[np.int32] = self._pinned.numpy()
        self._target_address, self._address = target.data_ptr(), self._pinned.data_ptr()
        self.staged: Copied = 0, 0, 0
        """Of what was staged last."""
        self._done = {end: torch.cuda.Event() for end in (half, 2 * half)}
        """By a half's end: when the copies from it are done."""
        self._views: dict[Copied, tuple[torch.Tensor, torch.Tensor]] = {}
        """Where a copy goes, and the pinned memory that it is from."""

    def stage(self, source: npt.NDArray[np.int32]) -> None:
        """Write to the host's memory what is to be copied to the start of the target.

        The copy is to be queued before the next call, on a stream that the next call's waits for.
        """
        count = len(source)
        if self._at + count > self._end:
            self._done[self._end].record()
            self._end = 3 * self._half - self._end
            self._at = self._end - self._half
            self._done[self._end].synchronize()
        self._host[self._at : self._at + count] = source
        self.staged = self._target_address, self._address + 4 * self._at, 4 * count
        self._at += count

    def send(self) -> None:
        """Queue the copy on the current stream."""
        views = self._views.get(self.staged)
        if views is None:
            if len(self._views) >= self.MAX_VIEWS:
                self._views.clear()
            count = self.staged[2] // 4
            pinned = self._pinned[self._at - count : self._at]
            views = self._views[self.staged] = self._target[:count], pinned
        views[0].copy_(views[1], non_blocking=True)
