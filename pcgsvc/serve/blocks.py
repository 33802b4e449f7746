"""Who holds which KV blocks of a runner.

In: counts. Out: block numbers. Touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from pcgsvc.errors import PcgError
from pcgsvc.forward.batch import CacheGeometry


class BlockAllocator:
    """Gives out the KV blocks of a runner that are its callers', each to one owner at a time.

    `runner.blocks` is the one of a runner; `generate`, `stream` and `Slots` take theirs from it,
    and a caller with block tables of its own should as well. Used under `runner.lock`.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self._free = list(range(geometry.num_blocks - 1, geometry.first_free_block - 1, -1))
        self._held: set[int] = set()

    def __repr__(self) -> str:
        """Return how many there are, and are free."""
        return f"BlockAllocator({self.num_free} of {self.num_blocks} blocks free)"

    @property
    def num_blocks(self) -> int:
        """Blocks that callers may use, free or not."""
        return len(self._free) + len(self._held)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, length: int) -> int:
        """Return how many blocks a sequence of `length` tokens needs."""
        return -(-length // self._geometry.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks of undefined content, or None if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            PcgError: one of them is not held; none was taken back.
        """
        given = list(blocks)
        if len(set(given)) < len(given) or not self._held.issuperset(given):
            raise PcgError(f"blocks: got {given}, which are not held, or name a block twice.")
        self._held.difference_update(given)
        self._free += reversed(given)
