"""How large a CUDA graph pool becomes: torch's caching allocator, simulated.

In: allocations and frees in the order of capture. Out: bytes of the segments that they need.

Source: `c10/cuda/CUDACachingAllocator.cpp` of torch 2.11 to 2.14 with its default settings: sizes
are rounded up to 512 bytes; up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of
20 MiB, and what is larger from a segment of its own, rounded up to 2 MiB. A free block is split,
and joined with free neighbours again. `expandable_segments` and other allocator settings change
this a little.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1 << 20
_GRAIN = 512
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_LARGE_LIMIT = 10 * MIB
_ROUND = 2 * MIB


class Event(NamedTuple):
    """One step in the life of memory."""

    kind: str
    """`alloc`, `free`, or `boundary`: a splitting op runs here, and `key` is its name."""
    key: Hashable
    num_bytes: int = 0


@dataclass(eq=False)
class _Block:
    size: int
    number: int
    """Of equally large free blocks the one with the lowest number is taken."""
    segment: list[_Block]
    """All blocks of its segment, by address."""
    small: bool
    """Whether its segment is one for small blocks."""


class Pool:
    """The segments of one pool. Grows and never shrinks, as a pool with live graphs does."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of all segments."""
        self.peak = 0
        """Most bytes in use at once, before any rounding."""
        self._used = 0
        self._free: set[_Block] = set()
        self._taken: dict[Hashable, tuple[_Block, int]] = {}
        self._numbers = itertools.count()

    def play(self, events: Iterable[Event]) -> None:
        """Carry out events; boundaries allocate nothing by themselves."""
        for event in events:
            if event.kind == "alloc":
                self.allocate(event.key, event.num_bytes)
            elif event.kind == "free":
                self.release(event.key)

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Take a block; nothing is taken for zero bytes."""
        if num_bytes <= 0:
            return
        self._used += num_bytes
        self.peak = max(self.peak, self._used)
        size = _rounded(num_bytes, _GRAIN)
        small = size <= _SMALL
        fitting = (b for b in self._free if b.small is small and b.size >= size)
        block = min(fitting, key=lambda b: (b.size, b.number), default=None)
        if block is None:
            block = self._new_segment(size, small)
        self._free.discard(block)
        rest = block.size - size
        if rest >= _GRAIN if small else rest > _SMALL:
            block.size = size
            tail = _Block(rest, next(self._numbers), block.segment, small)
            block.segment.insert(block.segment.index(block) + 1, tail)
            self._free.add(tail)
        self._taken[key] = (block, num_bytes)

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            whole = _SMALL_SEGMENT
        else:
            whole = _LARGE_SEGMENT if size < _LARGE_LIMIT else _rounded(size, _ROUND)
        self.num_bytes += whole
        block = _Block(whole, next(self._numbers), [], small)
        block.segment.append(block)
        return block

    def release(self, key: Hashable) -> None:
        """Give a block back and join it with free neighbours; unknown keys have no block."""
        block, num_bytes = self._taken.pop(key, (None, 0))
        if block is None:
            return
        self._used -= num_bytes
        segment = block.segment
        at = segment.index(block)
        if at + 1 < len(segment) and segment[at + 1] in self._free:
            block.size += self._removed(segment, at + 1)
        if at and segment[at - 1] in self._free:
            block = segment[at - 1]
            block.size += self._removed(segment, at)
        self._free.add(block)

    def _removed(self, segment: list[_Block], at: int) -> int:
        """Take a block out of its segment and return its size."""
        block = segment.pop(at)
        self._free.discard(block)
        return block.size


def _rounded(num_bytes: int, grain: int) -> int:
    return -(-num_bytes // grain) * grain
