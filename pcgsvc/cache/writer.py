"""Changes to the database and its folder: through diskcache, by many processes, without leftovers.

In: an operation on a `diskcache.Cache`. Out: its result, or a `WriteError` that names its cause.
Knows nothing of what rows hold.

`db.lock` orders the processes: shared for a change, exclusive for whatever needs that nobody else
writes (opening, which diskcache does outside any transaction; moving the database; sweeping).
diskcache is opened at the first change, and no connection outlives the change that made it: none is
carried over a fork, or kept on a database that was put aside.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pcgsvc.cache.bytes_disk import open_cache
from pcgsvc.cache.envelope import MissError
from pcgsvc.cache.faults import READ_ERRORS, Fault, classify
from pcgsvc.cache.file_lock import Held, acquire
from pcgsvc.cache.quarantine import Quarantine
from pcgsvc.cache.reader import Reader
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


class Writer:
    """The writing side of one data folder. Safe from any thread.

    Args:
        data: the folder.
        reader: of the database in it; must be able to write (`mode=rw`) to roll journals back.
        quarantine: for damaged databases.
        timeout_s: how long to wait for other connections and processes.
        size_limit: handed to diskcache, in bytes.
    """

    def __init__(
        self,
        data: Path,
        reader: Reader,
        quarantine: Quarantine,
        *,
        timeout_s: float,
        size_limit: int,
    ) -> None:
        self._data = data
        self._reader = reader
        self._quarantine = quarantine
        self._timeout_s = timeout_s
        self._size_limit = size_limit
        self._cache: Any = None
        self._mutex = threading.RLock()
        self._not_before = 0.0

    def change(self, operation: Callable[[Any], T]) -> T:
        """Run an operation on diskcache; a damaged database is put aside, and it is run again.

        Raises:
            WriteError: nothing was changed.
            MissError, PcgError: the operation's own.
        """
        with self._mutex:
            if time.monotonic() < self._not_before:
                raise WriteError(Fault.BUSY, "the database stayed locked a moment ago")
            fault, cause = Fault.OTHER, ""
            for attempt in range(4):
                inode = self._reader.inode()
                try:
                    return self._attempt(operation)
                except (PcgError, MissError):
                    raise
                except Exception as error:  # noqa: BLE001 - damage makes diskcache raise anything
                    fault, cause = classify(error, self._reader.database)
                self._cache = None
                if fault is Fault.BUSY:
                    self._not_before = time.monotonic() + BUSY_PAUSE_S
                if fault is Fault.BAD:
                    self.put_aside(cause, inode, force=attempt > 0)
                elif fault is not Fault.GONE:
                    break
            raise WriteError(fault, cause)

    def put_aside(self, cause: str, inode: int | None, *, force: bool) -> str | None:
        """Move the database with its value files into the quarantine.

        Args:
            cause: why.
            inode: of the database that was found bad; another one by now is left alone.
            force: without proof from an integrity check.

        Returns:
            What is wrong with it, or None if it stays: it is sound, or replaced already.
        """
        try:
            with self._mutex, self._exclusive() as held:
                if held is None or self._reader.inode() != inode:
                    return None
                fault = cause if force else self._reader.fault()
                if fault is not None:
                    self._move(fault)
                return fault
        except OSError as error:
            logger.warning("cache: database damaged (%s), not put aside: %s", cause, error)
            return cause

    def strays(self, *, delete: bool) -> list[Path]:
        """Return the files that no row names, as far as nobody else is writing.

        Args:
            delete: delete them.
        """
        with self._mutex, contextlib.suppress(OSError), self._exclusive(timeout_s=0.0) as held:
            if held is not None:
                return self._sweep() if delete else stray_files(self._reader)
        return []

    def clear(self) -> None:
        """Delete all entries, readable or not.

        Raises:
            WriteError: other processes are writing for longer than the time-out.
            OSError: the folder cannot be changed.
        """
        with self._mutex, self._exclusive() as held:
            if held is None:
                raise WriteError(Fault.BUSY, "another process is writing")
            self._cache = None
            old = self._data / "db.old"
            shutil.rmtree(old, ignore_errors=True)  # of a killed process
            if self._reader.folder.exists():
                self._reader.folder.rename(old)  # at once: rows and files go together
            shutil.rmtree(old, ignore_errors=True)

    def _attempt(self, operation: Callable[[Any], T]) -> T:
        if self._cache is None:
            self._open()
        held = acquire(self._data / "db.lock", shared=True, timeout_s=self._timeout_s)
        if held is None:
            raise TimeoutError
        cache, committed = self._cache, False
        with held:
            if not self._reader.database.exists():  # SQLite would make an empty one
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            try:
                result = operation(cache)
                committed = True
                return result
            finally:
                cache.disk.settle(committed=committed)
                cache.close()

    def _open(self) -> None:
        with self._exclusive() as held:
            if held is None:
                raise TimeoutError
            if self._reader.database.exists():
                # diskcache retries a locked database for 60 s per statement: wait here instead.
                with self._reader.connect() as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("ROLLBACK")
                if fault := self._reader.fault():  # before anything is added to it
                    self._move(fault)
            if not self._reader.database.exists():
                self._create()
            self._sweep()  # after killed writers, whose files nobody else would ever delete
            self._cache = self._open_cache(self._reader.folder)

    def _create(self) -> None:
        """Make the database elsewhere and move it in, so that nobody ever sees half of it."""
        new = self._data / "db.new"
        shutil.rmtree(new, ignore_errors=True)  # of a killed process
        try:
            self._open_cache(new)
            database = new / self._reader.database.name
            database.chmod(0o600)
            self._reader.folder.mkdir(mode=0o700, exist_ok=True)
            # A journal of a database that was deleted would be rolled back into this one.
            self._reader.database.with_name(f"{database.name}-journal").unlink(missing_ok=True)
            database.rename(self._reader.database)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _open_cache(self, folder: Path) -> Any:
        cache = open_cache(folder, timeout_s=self._timeout_s, size_limit=self._size_limit)
        cache.close()
        return cache

    def _move(self, fault: str) -> None:
        """Move the database away; only with all writers kept out."""
        self._cache = None
        target = self._quarantine.move(self._reader.folder, f"database {fault}")
        logger.warning("cache: database damaged (%s), put aside as %s", fault, target)

    def _sweep(self) -> list[Path]:
        """Delete the stray files; only with all writers kept out."""
        strays = stray_files(self._reader)
        for path in strays:
            with contextlib.suppress(OSError):
                path.unlink()
        return strays

    @contextlib.contextmanager
    def _exclusive(self, timeout_s: float | None = None) -> Iterator[Held | None]:
        """Keep all writers out; None when they do not leave in time."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        held = acquire(self._data / "db.lock", timeout_s=timeout_s)
        try:
            yield held
        finally:
            if held is not None:
                held.release()


def stray_files(reader: Reader) -> list[Path]:
    """Return the files that no row names; none if the database cannot be read."""
    try:
        named = {reader.folder / name for name in reader.listing().filenames}
    except READ_ERRORS:
        return []
    files = (p for p in reader.folder.rglob("*") if not p.is_dir() or p.is_symlink())
    return [p for p in files if p not in named and not p.name.startswith("cache.db")]
