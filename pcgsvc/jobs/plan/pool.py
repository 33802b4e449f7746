"""How large a CUDA graph pool becomes: torch's caching allocator, played through.

In: allocations and frees in the order of capture. Out: bytes of the segments that they need. Knows
nothing of graphs or models.

Source: `c10/cuda/CUDACachingAllocator.cpp` of torch 2.11 to 2.14 with its default settings: sizes
are rounded up to 512 bytes; up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of
20 MiB, and what is larger from a segment of its own, rounded up to 2 MiB. A free block is split,
and joined with free neighbours again. `expandable_segments` and other allocator settings change
this a little.
"""

from __future__ import annotations

import bisect
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
    small: bool
    number: int
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    def rank(self) -> tuple[int, int]:
        return (self.size, self.number)


class Pool:
    """The segments of one pool. Grows and never shrinks, as a pool with live graphs does."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes of all segments."""
        self.peak = 0
        """Most bytes in use at once, before any rounding."""
        self._used = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._blocks: dict[Hashable, tuple[_Block, int]] = {}
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
        size = -(-num_bytes // _GRAIN) * _GRAIN
        small = size <= _SMALL
        block = self._find(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= _GRAIN if small else rest > _SMALL:
            self._split(block, size)
        self._blocks[key] = (block, num_bytes)

    def release(self, key: Hashable) -> None:
        """Give a block back; it is joined with free neighbours."""
        found = self._blocks.pop(key, None)
        if found is None:
            return
        block, num_bytes = found
        self._used -= num_bytes
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._put(block)

    def _find(self, size: int, small: bool) -> _Block | None:
        """Return the smallest free block that fits, the oldest of equals."""
        free = self._free[small]
        at = bisect.bisect_left(free, size, key=lambda item: item[0])
        if at == len(free):
            return None
        block = free.pop(at)[2]
        block.free = False
        return block

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            whole = _SMALL_SEGMENT
        elif size < _LARGE_LIMIT:
            whole = _LARGE_SEGMENT
        else:
            whole = -(-size // _ROUND) * _ROUND
        self.num_bytes += whole
        return _Block(whole, small, next(self._numbers))

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.small, next(self._numbers))
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._put(rest)

    def _put(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (*block.rank(), block), key=lambda item: item[:2])

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        at = bisect.bisect_left(free, block.rank(), key=lambda item: item[:2])
        free.pop(at)
        block.free = False
