"""Calls from many CUDA streams: each runs on its caller's stream, after the call before it.

In: the stream that a runner was built on. Out: an order of calls. Knows nothing of what is called.

While callers stay on one stream nothing is waited for and no event is recorded: replays follow each
other there, and results belong to it.
"""

from __future__ import annotations

import torch

from pcgsvc import torch_private
from pcgsvc.errors import PcgError


class CallOrder:
    """Orders the calls of one runner; used under its lock.

    Args:
        stream: where the runner's memory was written last.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.index = stream.device.index
        """Of the device."""
        self._stream, self.raw = stream, stream.cuda_stream
        """The last call's stream, and its handle."""
        self._event = torch.cuda.Event()
        self.is_external = False
        """Whether the last stream is not torch's: its owner may destroy it, and its handle may come
        back as another stream's. An event is then recorded at each call."""

    def enter(self) -> None:
        """Have the current stream wait for the last call, if that was on another stream.

        Raises:
            PcgError: the current stream is being captured; a replay cannot be part of that graph.
        """
        raw = torch_private.current_raw_stream(self.index)
        if torch.cuda.is_current_stream_capturing():
            raise PcgError(
                "the runner was called while its caller's stream is being captured into another "
                "CUDA graph. Capture what is around the call, and call the runner between graphs."
            )
        if raw != self.raw or self.is_external:
            if not self.is_external:
                self._event.record(self._stream)
            stream = torch.cuda.current_stream(self.index)
            stream.wait_event(self._event)
            self.is_external = torch_private.is_external_stream(stream)
            self._stream, self.raw = stream, raw

    def leave(self) -> None:
        """Note the end of a call's work."""
        if self.is_external:
            self._event.record(self._stream)

    def is_done(self) -> bool:
        """Whether the last call's work is done; another thread may ask."""
        return self._stream.query()

    def synchronize(self) -> None:
        """Wait until the last call's work is done."""
        if not self.is_external:
            self._event.record(self._stream)
        self._event.synchronize()
