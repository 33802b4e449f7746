"""Look-ups and writes under a cache mode: what `Store` does to single entries.

In: an `Entry`, or kind and key. Out: a `Lookup`, or whether it was stored. Turns everything that
can go wrong on the disk into a miss or a False, said once in the log.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from pcgsvc.cache.envelope import AbsentError, Entry, Kind, MissError, UnavailableError, encode
from pcgsvc.cache.file_lock import acquire
from pcgsvc.cache.lookup import Lookup
from pcgsvc.cache.root import DataFolder
from pcgsvc.cache.table import Table
from pcgsvc.cache.usage import Pins, enforce_budget
from pcgsvc.cache.writer import WriteError
from pcgsvc.config import CacheMode

logger = logging.getLogger(__name__)


class Entries:
    """The entries of one data folder. Safe from any thread.

    Args:
        folder: where.
        mode: any but `off`.
        max_bytes: budget.
        timeout_s: how long one read or write waits for other processes.
    """

    def __init__(
        self, folder: DataFolder, *, mode: CacheMode, max_bytes: int, timeout_s: float
    ) -> None:
        self.mode = mode
        self.writable = folder.writable and mode in (CacheMode.READWRITE, CacheMode.REFRESH)
        self.table = Table(
            folder.data,
            writable=self.writable,
            immutable=folder.immutable,
            timeout_s=timeout_s,
            size_limit=max_bytes,
        )
        self.pins = Pins(folder.data / "pins", writable=self.writable)
        self._max_bytes = max_bytes
        self._renewed: set[tuple[Kind, str]] = set()
        self._owners: set[tuple[int, str]] = set()
        self._said: set[str] = set()
        self._mutex = threading.Lock()
        if not self.writable and mode is not CacheMode.READ:
            self.warn_once(f"{folder.reason}: hits are served, nothing is stored")

    def get(self, kind: Kind, key: str) -> Lookup:
        """Return an entry, which is in use from now on, or the miss.

        In `refresh` mode all is a miss but what was put through this object.
        """
        if self.mode is CacheMode.REFRESH and (kind, key) not in self._renewed:
            return Lookup(None, "refresh")
        # Held before it is read: an evictor must not come in between.
        held = self.pins.hold(kind, key, create=False)
        try:
            entry = self.table.read(kind, key)
            if not held and self.pins.hold(kind, key, create=True):  # it had lost its pin
                entry = self.table.read(kind, key)
        except MissError as miss:
            self._let_go(kind, key, miss)
            if not isinstance(miss, AbsentError):
                self.warn_once(f"{kind.value} {key[:12]}: a miss: {miss}", topic=str(miss))
            return Lookup(None, str(miss))
        self.pins.touch(kind, key)
        return Lookup(entry.payload, None, entry.facts, entry.pieces)

    def put(self, entry: Entry, *, in_use: bool) -> bool:
        """Store an entry and return whether it lies in the store now.

        Args:
            entry: a program only after its pieces.
            in_use: keep it and its pieces from eviction until the pins are closed.

        Raises:
            CacheError: the entry itself cannot be stored.
        """
        raw = encode(entry)  # a caller's mistake is an error in every mode
        if not self.writable:
            return False
        keys = [(Kind.PIECE, piece) for piece in dict.fromkeys(entry.pieces)]
        keys.append((entry.kind, entry.key))
        for kind, key in keys:
            self.pins.hold(kind, key, create=True)
        try:
            self._require_pieces(entry)
            self.table.write(entry.kind, entry.key, raw)
        except (WriteError, MissError) as error:
            self._let_go(entry.kind, entry.key, error)
            self._say_not_stored(error)
            return False
        finally:
            for kind, key in keys if not in_use else []:
                self.pins.release(kind, key)
        self.pins.touch(entry.kind, entry.key)
        with self._mutex:
            self._renewed.add((entry.kind, entry.key))
        if over := enforce_budget(self.table, self.pins, self._max_bytes):
            self.warn_once(
                f"{over} bytes over its budget of {self._max_bytes}: what is left is in use",
                topic="over budget",
            )
        return True

    @contextlib.contextmanager
    def lock(self, key: str, timeout_s: float) -> Iterator[bool]:
        """Take the lock of one key; yields whether it is held. A thread may take it twice."""
        owner = (threading.get_ident(), key)
        if owner in self._owners:
            yield True
            return
        held = None
        path = self.table.data / "locks" / key
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            held = acquire(path)
            if held is None:
                logger.info("cache: waiting for another process that builds %s", key[:12])
                held = acquire(path, timeout_s=timeout_s)
        except OSError as error:
            self.warn_once(f"no lock can be taken: {error}")
        try:
            if held is not None:
                self._owners.add(owner)
            yield held is not None
        finally:
            self._owners.discard(owner)
            if held is not None:
                held.release(unlink=True)

    def clear(self) -> None:
        """Delete all entries, those in use and the quarantine included.

        Raises:
            WriteError: other processes are writing for longer than the time-out.
            OSError: the folder cannot be written.
        """
        self.table.clear()
        self.pins.clear()
        with self._mutex:
            self._renewed.clear()

    def warn_once(self, message: str, *, topic: str | None = None) -> None:
        """Log a warning; again only for debugging.

        Args:
            message: what the user asked for and does not get.
            topic: messages on one topic count as the same.
        """
        with self._mutex:
            level = logging.DEBUG if (topic or message) in self._said else logging.WARNING
            self._said.add(topic or message)
        logger.log(level, "cache: %s", message)

    def _require_pieces(self, program: Entry) -> None:
        """Refuse a program one of whose pieces failed to be stored, or was dropped meanwhile."""
        if not program.pieces:
            return
        there = {r.key for r in self.table.listing().records if r.kind is Kind.PIECE}
        missing = [piece for piece in program.pieces if piece not in there]
        for piece in missing:
            self.pins.abandon(Kind.PIECE, piece)
        if missing:
            short = ", ".join(piece[:12] for piece in missing)
            raise AbsentError(f"program {program.key[:12]}: its pieces {short} are not stored")

    def _let_go(self, kind: Kind, key: str, why: Exception) -> None:
        if isinstance(why, UnavailableError) or not self.writable:
            self.pins.release(kind, key)
        else:
            self.pins.abandon(kind, key)

    def _say_not_stored(self, error: Exception) -> None:
        # A program without its pieces only follows from a failed write, which was said already.
        topic = f"not stored: {error.fault}" if isinstance(error, WriteError) else "not stored"
        self.warn_once(f"not stored, going on without: {error}", topic=topic)
        with self._mutex:
            self._said.add("not stored")
