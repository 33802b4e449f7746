"""Output of one process among several that torchrun has started.

In: a stream, and torchrun's variables. Out: the same stream, with the rank before each line.
"""

from __future__ import annotations

import io
import os
from typing import TextIO


def rank_among_many() -> int | None:
    """Return this process's rank; None: it was not started as one of several."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else None


class RankedStream(io.TextIOBase, TextIO):
    """Text on its way to a stream that others write to as well; never a terminal.

    Args:
        stream: where the text goes; flushed, not closed.
        rank: stands before each line.
    """

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream, self._prefix = stream, f"[rank {rank}] "
        self._at_start = True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute
        """The stream's."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write text, the rank before each line that it begins."""
        if text:
            lines = text[:-1].replace("\n", f"\n{self._prefix}") + text[-1]
            self._stream.write(self._prefix * self._at_start + lines)
            self._at_start = text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self._stream.fileno()
