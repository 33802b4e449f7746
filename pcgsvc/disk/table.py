"""Entries by kind and key, and what happens to damage.

In: an `Entry`, or kind and key. Out: the entry as it was written, or a `MissError` that names its
cause. Knows nothing of budgets, of who builds what, or of what the bytes mean.

Reads go through `Reader`; writes go through diskcache, opened at the first of them.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pcgsvc.disk.bytes_disk import open_cache, row_name
from pcgsvc.disk.envelope import (
    AbsentError,
    DamagedError,
    DatabaseDamagedError,
    Entry,
    Kind,
    MissError,
    UnavailableError,
    check_key,
    decode,
)
from pcgsvc.disk.faults import READ_ERRORS, Fault, classify
from pcgsvc.disk.file_lock import Held, acquire
from pcgsvc.disk.quarantine import Quarantine
from pcgsvc.disk.reader import Listing, Reader
from pcgsvc.errors import PcgError

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_PAUSE_S = 60.0
"""How long nothing is written after the database stayed locked: each try costs the time-out."""


class WriteError(Exception):
    """Nothing was stored; `str()` of it is the cause."""

    def __init__(self, fault: Fault, cause: str) -> None:
        super().__init__(cause)
        self.fault = fault


class Table:
    """The entries below one data folder. Safe from any thread.

    Args:
        data: the folder; it need not exist unless `writable`.
        writable: whether damage may be put aside and entries written.
        immutable: read without any lock and without looking for a journal (read-only media).
        timeout_s: how long to wait for other connections and processes.
        size_limit: handed to diskcache, in bytes.
    """

    def __init__(
        self, data: Path, *, writable: bool, immutable: bool, timeout_s: float, size_limit: int
    ) -> None:
        self.data = data
        self.folder = data / "db"
        self.quarantine = Quarantine(data / "quarantine")
        self._writable = writable
        # A writer may have died with a journal left: only a writable connection can roll it back.
        query = "mode=rw" if writable else "mode=ro&immutable=1" if immutable else "mode=ro"
        self.reader = Reader(self.folder, query, timeout_s)
        self._timeout_s = timeout_s
        self._size_limit = size_limit
        self._cache: Any = None
        self._mutex = threading.RLock()
        self._verified = False
        self._no_write_before = 0.0

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, kind: Kind, key: str) -> Entry:
        """Return the entry as it was written.

        Raises:
            MissError: `AbsentError`, `DamagedError` (put aside, if writable), `UnavailableError`.
        """
        check_key(key)
        with self._mutex:
            try:
                return self._healing(lambda: self.reader.read(kind, key))
            except AbsentError:
                if fault := self._verify_once():
                    raise DatabaseDamagedError(f"database damaged: {fault}") from None
                raise
            except DamagedError as damage:
                return self._discard(kind, key, damage)

    def listing(self) -> Listing:
        """Return all rows.

        Raises:
            MissError: the database cannot be read.
        """
        with self._mutex:
            return self._healing(self.reader.listing)

    def _healing(self, look: Callable[[], T]) -> T:
        """Run a read; put a damaged database aside, and say so in the miss."""
        cause = ""
        for attempt in range(3):
            inode = self.reader.inode()
            try:
                return look()
            except READ_ERRORS as error:
                fault, cause = classify(error, self.reader.database)
            if fault is Fault.GONE:
                raise AbsentError("absent")
            if fault is Fault.DENIED and self.reader.query == "mode=ro":
                self.reader.query += (
                    "&immutable=1"  # a dead writer's journal, not ours to roll back
                )
            elif fault is not Fault.BAD:
                raise UnavailableError(f"database unreadable: {cause}")
            elif self._writable and (moved := self._put_aside(cause, inode, force=attempt > 0)):
                raise DatabaseDamagedError(f"database damaged: {moved}")
        raise DatabaseDamagedError(f"database damaged: {cause}")

    def _verify_once(self) -> str | None:
        """Check the database before the first "absent" is believed: a flipped key looks like it."""
        if self._verified:
            return None
        self._verified = True
        return self.verify()

    def verify(self) -> str | None:
        """Return what is wrong with the database file, which is put aside for it if writable."""
        inode = self.reader.inode()
        fault = self.reader.fault()
        if fault and self._writable:
            return self._put_aside(fault, inode, force=False)
        return fault

    # ---- damage ----------------------------------------------------------------------------------

    def _put_aside(self, cause: str, inode: int | None, *, force: bool) -> str | None:
        """Move the database with its value files into the quarantine.

        Args:
            cause: why.
            inode: of the database that was found bad; another one by now is left alone.
            force: without proof from an integrity check.

        Returns:
            What is wrong with it, or None if it stays: it is sound, or replaced already.
        """
        try:
            with self._exclusive() as held:
                if held is None or self.reader.inode() != inode:
                    return None
                fault = cause if force else self.reader.fault()
                if fault is not None:
                    self._move(fault)
                return fault
        except OSError as error:
            logger.warning("cache: database damaged (%s), not put aside: %s", cause, error)
            return cause

    def _move(self, fault: str) -> None:
        """Move the database away; only with all writers kept out."""
        self._cache = None
        target = self.quarantine.move(self.folder, f"database {fault}")
        logger.warning("cache: database damaged (%s), put aside as %s", fault, target)

    def _discard(self, kind: Kind, key: str, damage: DamagedError) -> Entry:
        """Drop a damaged entry, unless another process has replaced it meanwhile."""
        label = f"{kind.value} {key[:12]}"
        if not self._writable:
            logger.warning("cache: %s: %s; it is left as it is: not ours to write", label, damage)
            raise damage
        try:
            replaced = self._change(lambda cache: _delete_if_damaged(cache, kind, key))
        except (WriteError, MissError) as error:
            logger.warning("cache: %s: %s; it could not be dropped: %s", label, damage, error)
            raise damage from error
        if replaced is not None:
            return replaced
        self.quarantine.keep(f"{label} {damage}", damage.raw)
        logger.warning("cache: %s: %s; put aside, it will be built again", label, damage)
        raise damage

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, kind: Kind, key: str, raw: bytes) -> None:
        """Store an envelope and read it back.

        Raises:
            WriteError: nothing was stored.
        """
        name = row_name(kind, key)
        with self._mutex:
            for last in (False, True):
                self._change(lambda cache: cache.set(name, raw))
                try:
                    self.read(kind, key)
                    return
                except MissError as miss:
                    if last:
                        raise WriteError(Fault.OTHER, f"read back after writing: {miss}") from miss

    def delete(self, kind: Kind, key: str) -> None:
        """Drop an entry; a missing one is fine.

        Raises:
            WriteError: it could not be dropped.
        """
        name = row_name(kind, key)
        self._change(lambda cache: cache.delete(name))

    def strays(self, *, delete: bool) -> list[Path]:
        """Return the files that no row names; nothing while others write, or without a database.

        Args:
            delete: delete them; only where the folder is ours to write.
        """
        if not self._writable:
            return self._strays()
        with self._mutex, contextlib.suppress(OSError), self._exclusive(timeout_s=0.0) as held:
            if held is not None:
                return self._sweep() if delete else self._strays()
        return []

    def _sweep(self) -> list[Path]:
        """Delete the stray files; only with all writers kept out."""
        strays = self._strays()
        for path in strays:
            with contextlib.suppress(OSError):
                path.unlink()
        return strays

    def _strays(self) -> list[Path]:
        try:
            named = {self.folder / name for name in self.reader.listing().filenames}
        except READ_ERRORS:
            return []
        files = (p for p in self.folder.rglob("*") if not p.is_dir() or p.is_symlink())
        return [p for p in files if p not in named and not p.name.startswith("cache.db")]

    def clear(self) -> None:
        """Delete all entries, readable or not.

        Raises:
            WriteError: other processes are writing for longer than the time-out.
        """
        with self._mutex, self._exclusive() as held:
            if held is None:
                raise WriteError(Fault.BUSY, "another process is writing")
            self._cache = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def _change(self, operation: Callable[[Any], T]) -> T:
        """Run an operation on diskcache; a damaged database is put aside, and it is run again."""
        with self._mutex:
            if time.monotonic() < self._no_write_before:
                raise WriteError(Fault.BUSY, "the database stayed locked a moment ago")
            fault, cause = Fault.OTHER, ""
            for attempt in range(4):
                inode = self.reader.inode()
                try:
                    return self._attempt(operation)
                except (PcgError, MissError):
                    raise
                except Exception as error:  # noqa: BLE001 - damage makes diskcache raise anything
                    fault, cause = classify(error, self.reader.database)
                self._cache = None
                if fault is Fault.BUSY:
                    self._no_write_before = time.monotonic() + BUSY_PAUSE_S
                if fault is Fault.BAD:
                    self._put_aside(cause, inode, force=attempt > 0)
                elif fault is not Fault.GONE:
                    break
            raise WriteError(fault, cause)

    def _attempt(self, operation: Callable[[Any], T]) -> T:
        if self._cache is None:
            self._open()
        # Shared: writers may work side by side, but none while the database is opened or moved.
        held = acquire(self.data / "db.lock", shared=True, timeout_s=self._timeout_s)
        if held is None:
            raise TimeoutError
        cache, committed = self._cache, False
        with held:
            try:
                result = operation(cache)
                committed = True
                return result
            finally:
                cache.disk.settle(committed=committed)
                cache.close()

    def _open(self) -> None:
        """Open diskcache, which sets the database up outside any transaction: one at a time."""
        with self._exclusive() as held:
            if held is None:
                raise TimeoutError
            if self.reader.database.exists():
                # diskcache retries a locked database for 60 s per statement: wait here instead.
                with self.reader.connect() as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("ROLLBACK")
                if fault := self.reader.fault():  # before anything is added to it
                    self._move(fault)
            if not self.reader.database.exists():
                self._create()
            self._sweep()  # after killed writers, whose files nobody else would ever delete
            self._cache = self._open_cache(self.folder)

    def _create(self) -> None:
        """Make the database elsewhere and move it in, so that nobody ever sees half of it."""
        new = self.data / "db.new"
        shutil.rmtree(new, ignore_errors=True)  # of a killed process
        try:
            self._open_cache(new)
            database = new / self.reader.database.name
            database.chmod(0o600)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            # A journal of a database that was deleted would be rolled back into this one.
            self.reader.database.with_name(f"{database.name}-journal").unlink(missing_ok=True)
            database.rename(self.reader.database)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _open_cache(self, folder: Path) -> Any:
        cache = open_cache(folder, timeout_s=self._timeout_s, size_limit=self._size_limit)
        cache.close()
        return cache

    @contextlib.contextmanager
    def _exclusive(self, timeout_s: float | None = None) -> Iterator[Held | None]:
        """Keep all writers out; None when they do not leave in time."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        held = acquire(self.data / "db.lock", timeout_s=timeout_s)
        try:
            yield held
        finally:
            if held is not None:
                held.release()


def _delete_if_damaged(cache: Any, kind: Kind, key: str) -> Entry | None:
    """Delete an entry inside one transaction if it still is damaged; else return it."""
    name = row_name(kind, key)
    with cache.transact():
        try:
            raw = cache.get(name)
            return None if raw is None else decode(raw, kind, key)
        except DamagedError:
            cache.delete(name)
            return None
