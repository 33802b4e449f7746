"""What goes when there is too much: whole programs, least recently used first.

In: the entries of a store and a budget. Out: entries dropped. Knows nothing of what entries hold
beyond the list of pieces that a program needs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from pcgsvc.cache.entries import Entries
from pcgsvc.cache.envelope import Kind, UnavailableError
from pcgsvc.cache.file_lock import acquire
from pcgsvc.cache.index import Index
from pcgsvc.errors import CacheError

logger = logging.getLogger(__name__)

_LOCK = "evict.lock"
_WAIT_S = 5.0
"""How long an import waits for a process that drops entries, which takes milliseconds each."""


@contextlib.contextmanager
def no_eviction(data: Path) -> Iterator[None]:
    """Let no process drop anything for the budget, as long as this lasts.

    Raises:
        CacheError: another process is dropping entries and does not come to an end.
    """
    held = acquire(data / _LOCK, timeout_s=_WAIT_S)
    if held is None:
        raise CacheError("cache: another process is dropping entries; try again later.")
    with held:
        yield


def enforce_budget(entries: Entries, index: Index, max_bytes: int) -> int:
    """Drop whole programs, least recently used first, until the rest fits.

    Pieces that no program lists go first (their builder died before it wrote the program), pieces
    that no remaining program lists go with the last one. What any process uses stays.

    Returns:
        By how many bytes of envelopes what is left, and so in use, is over the budget; 0 if it
        fits, or if another process is dropping entries already.
    """
    try:
        held = acquire(entries.data / _LOCK)
        if held is None:
            return 0  # another process drops entries, or an import wants all of them to stay
        with held:
            return _Eviction(entries, index, max_bytes).run()
    except (UnavailableError, OSError) as error:
        logger.warning("cache: cannot bring it below %d bytes: %s", max_bytes, error)
        return 0


class _Eviction:
    """One pass over all entries."""

    def __init__(self, entries: Entries, index: Index, max_bytes: int) -> None:
        self._entries = entries
        self._index = index
        self._max_bytes = max_bytes
        records = entries.scan()
        self._sizes = {(r.kind, r.key): r.size for r in records}
        self._programs = [r for r in records if r.kind is Kind.PROGRAM]
        self._total = sum(self._sizes.values())

    def run(self) -> int:
        if self._total <= self._max_bytes:
            return 0
        listed = self._listed()
        for kind, key in list(self._sizes):
            if kind is Kind.PIECE and not any(key in pieces for pieces in listed.values()):
                self._drop(kind, key)
        for record in sorted(self._programs, key=lambda record: record.last_use):
            if self._total <= self._max_bytes:
                break
            if self._drop(Kind.PROGRAM, record.key):
                for piece in listed.get(record.key, ()):
                    self._drop(Kind.PIECE, piece)
        return max(0, self._total - self._max_bytes)

    def _listed(self) -> dict[str, frozenset[str]]:
        """Return the pieces of all programs that are stored now.

        Raises:
            UnavailableError: those of one are unknown, so that no piece may go.
        """
        before = {record.key for record in self._entries.scan(Kind.PROGRAM)}
        headers = self._index.headers()
        for key in before - headers.keys():
            if self._entries.path(Kind.PROGRAM, key).exists():
                raise UnavailableError(f"program {key[:12]} is unreadable, and so its pieces")
        return {key: frozenset(header.pieces) for key, header in headers.items()}

    def _drop(self, kind: Kind, key: str) -> bool:
        """Drop an entry, unless it is in use or a program lists it."""
        claim = self._entries.claim(kind, key) if (kind, key) in self._sizes else None
        if claim is None:
            return False
        with claim:
            # A process that stores a program uses its pieces first: after our claim none can, and
            # one that did before is seen now.
            if kind is Kind.PIECE and any(key in pieces for pieces in self._listed().values()):
                return False
            claim.release(unlink=True)
        size = self._sizes.pop((kind, key))
        self._total -= size
        logger.info("cache: dropped %s %s, %d bytes, for the budget", kind.value, key[:12], size)
        return True
