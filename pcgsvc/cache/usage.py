"""Who uses an entry, when it was last used, and what goes when there is too much.

In: kind and key. Out: pins, times, and the entries dropped. Knows nothing of what entries hold
beyond the list of pieces that a program needs.

One empty file per entry does both: a process that uses the entry holds a shared flock on it (so a
killed process uses nothing), and a program's last use is the file's modification time, which costs
a hit one system call rather than a write to the database.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from pcgsvc.cache.bytes_disk import row_name
from pcgsvc.cache.envelope import Kind, MissError, UnavailableError
from pcgsvc.cache.file_lock import Held, acquire
from pcgsvc.cache.reader import Record
from pcgsvc.cache.table import Table
from pcgsvc.cache.writer import WriteError
from pcgsvc.errors import CacheError

logger = logging.getLogger(__name__)

_EVICTION_LOCK = "evict.lock"
_WAIT_S = 5.0
"""How long a user waits for an evictor, which takes milliseconds per entry."""


class Pins:
    """The entries that this process uses. Safe from any thread.

    Args:
        folder: made, 0700, when the first pin is.
        writable: otherwise only pins that are there already are held, and no time is recorded.
    """

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self._folder = folder
        self._writable = writable
        self._held: dict[Path, Held] = {}
        self._mutex = threading.Lock()

    def hold(self, kind: Kind, key: str, *, create: bool) -> bool:
        """Mark an entry as used by this process until `close` or `release`.

        Args:
            kind: of the entry.
            key: of the entry.
            create: make the pin if nobody has; only for an entry that is there.

        Returns:
            Whether it is marked.
        """
        path = self._path(kind, key)
        with self._mutex:
            old = self._held.get(path)
            if old is not None and old.is_current():
                return True
            held = None
            with contextlib.suppress(OSError):  # an entry without a pin can be evicted, no more
                if create and self._writable:
                    self._folder.mkdir(mode=0o700, exist_ok=True)
                held = acquire(
                    path, shared=True, timeout_s=_WAIT_S, create=create and self._writable
                )
            if old is not None:
                del self._held[path]
                old.release()
            if held is not None:
                self._held[path] = held
            return held is not None

    def touch(self, kind: Kind, key: str) -> None:
        """Record a use just now."""
        if self._writable:
            with contextlib.suppress(OSError):
                os.utime(self._path(kind, key))

    def last_use(self, record: Record) -> float:
        """Return when an entry was last used, in seconds since the epoch."""
        try:
            return self._path(record.kind, record.key).stat().st_mtime
        except OSError:
            return record.stored

    def claim(self, kind: Kind, key: str) -> Held | None:
        """Return the right to drop an entry, or None if any process uses it, this one included.

        Release it with `unlink=True` when the entry is gone.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            return acquire(self._path(kind, key))
        except OSError:
            return None

    def release(self, kind: Kind, key: str) -> None:
        """Give up one pin."""
        with self._mutex:
            held = self._held.pop(self._path(kind, key), None)
            if held is not None:
                held.release()

    def abandon(self, kind: Kind, key: str) -> None:
        """Give up one pin, and delete it unless another process uses it: the entry is gone."""
        self.release(kind, key)
        with contextlib.suppress(OSError):
            held = acquire(self._path(kind, key), create=False)
            if held is not None:
                held.release(unlink=True)

    def close(self) -> None:
        """Give up all pins; twice is fine."""
        with self._mutex:
            for held in self._held.values():
                held.release()
            self._held.clear()

    def clear(self) -> None:
        """Forget who uses what, other processes included: there is nothing left to use."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, kind: Kind, key: str) -> Path:
        return self._folder / row_name(kind, key)


@contextlib.contextmanager
def no_eviction(data: Path) -> Iterator[None]:
    """Let no process drop anything for the budget, as long as this lasts.

    Raises:
        CacheError: another process is dropping entries and does not come to an end.
    """
    held = acquire(data / _EVICTION_LOCK, timeout_s=_WAIT_S)
    if held is None:
        raise CacheError("cache: another process is dropping entries; try again later.")
    with held:
        yield


def enforce_budget(table: Table, pins: Pins, max_bytes: int) -> int:
    """Drop whole programs, least recently used first, until the rest fits.

    Pieces that no program lists go first (their builder died before it wrote the program), pieces
    that no remaining program lists go with the last one. What any process uses stays.

    Args:
        table: where the entries lie.
        pins: who uses them.
        max_bytes: the budget, in bytes of envelopes.

    Returns:
        By how many bytes what is left, and so in use, is over the budget; 0 if it fits, or if
        somebody else is at it.
    """
    try:
        held = acquire(table.data / _EVICTION_LOCK)
        if held is None:
            return 0  # another process is at it, or an import wants nothing to go
        with held:
            return _Eviction(table, pins, max_bytes).run()
    except (MissError, WriteError, OSError) as error:
        logger.warning("cache: cannot bring it below %d bytes: %s", max_bytes, error)
        return 0


class _Eviction:
    """One pass over all entries."""

    def __init__(self, table: Table, pins: Pins, max_bytes: int) -> None:
        self._table = table
        self._pins = pins
        self._max_bytes = max_bytes
        self._sizes = {(r.kind, r.key): r.size for r in table.listing().records}
        self._total = sum(self._sizes.values())
        self._programs: dict[str, tuple[Record, frozenset[str]]] = {}
        """By key, with the pieces that each lists."""

    def run(self) -> int:
        if self._total <= self._max_bytes:
            return 0
        self._learn()
        for kind, key in list(self._sizes):
            if kind is Kind.PIECE and not self._is_listed(key):
                self._drop(kind, key)
        for record, pieces in sorted(self._programs.values(), key=self._last_use):
            if self._total <= self._max_bytes:
                break
            if self._drop(Kind.PROGRAM, record.key):
                del self._programs[record.key]
                for piece in pieces:
                    self._drop(Kind.PIECE, piece)
        return max(0, self._total - self._max_bytes)

    def _learn(self) -> None:
        """Read the programs that are new since the last time.

        Raises:
            UnavailableError: the pieces of one are unknown, so that no piece may go.
        """
        records = {r.key: r for r in self._table.listing().records if r.kind is Kind.PROGRAM}
        for key in self._programs.keys() - records.keys():
            del self._programs[key]
        for key, record in records.items():
            if key in self._programs and self._programs[key][0] == record:
                continue
            self._programs.pop(key, None)
            try:
                pieces = self._table.read(Kind.PROGRAM, key).pieces
            except UnavailableError:
                raise
            except MissError:  # damaged, and dropped for that
                self._total -= self._sizes.pop((Kind.PROGRAM, key), 0)
                continue
            self._programs[key] = (record, frozenset(pieces))

    def _is_listed(self, piece: str) -> bool:
        return any(piece in pieces for _, pieces in self._programs.values())

    def _last_use(self, program: tuple[Record, frozenset[str]]) -> float:
        return self._pins.last_use(program[0])

    def _drop(self, kind: Kind, key: str) -> bool:
        """Drop an entry, unless it is in use or a program lists it."""
        if (kind, key) not in self._sizes:
            return False
        claim = self._pins.claim(kind, key)
        if claim is None:
            return False
        with claim:
            if kind is Kind.PIECE:
                # Whoever stores a program pins its pieces first: from our claim on nobody can, and
                # whoever did before is seen now.
                self._learn()
                if self._is_listed(key):
                    return False
            self._table.delete(kind, key)
            claim.release(unlink=True)
        size = self._sizes.pop((kind, key))
        self._total -= size
        logger.info("cache: dropped %s %s, %d bytes, for the budget", kind.value, key[:12], size)
        return True
