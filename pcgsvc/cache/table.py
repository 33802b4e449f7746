"""Entries by kind and key, and what happens to damage.

In: an envelope, or kind and key. Out: the entry as it was written, or a `MissError` that names its
cause. Knows nothing of budgets, of who builds what, or of what the bytes mean.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pcgsvc.cache.bytes_disk import row_name
from pcgsvc.cache.envelope import (
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
from pcgsvc.cache.faults import READ_ERRORS, Fault, classify
from pcgsvc.cache.quarantine import Quarantine
from pcgsvc.cache.reader import Listing, Reader
from pcgsvc.cache.writer import WriteError, Writer, stray_files

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        self.quarantine = Quarantine(data / "quarantine")
        # A writer may have died with a journal left: only a writable connection can roll it back.
        query = "mode=rw" if writable else "mode=ro&immutable=1" if immutable else "mode=ro"
        self.reader = Reader(data / "db", query, timeout_s)
        self.writer: Writer | None = None
        if writable:
            self.writer = Writer(
                data, self.reader, self.quarantine, timeout_s=timeout_s, size_limit=size_limit
            )
        self._mutex = threading.RLock()
        self._verified = False

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, kind: Kind, key: str) -> Entry:
        """Return the entry as it was written.

        Raises:
            MissError: `AbsentError`, `UnavailableError`, or `DamagedError` and
                `DatabaseDamagedError`, after what is damaged was put aside, if writable.
        """
        check_key(key)
        with self._mutex:
            try:
                return self._healing(lambda: self.reader.read(kind, key))
            except AbsentError:
                # A flipped key looks like it: check before the first "absent" is believed.
                fault = None if self._verified else self.verify()
                if fault is None:
                    raise
                raise DatabaseDamagedError(f"database damaged: {fault}") from None
            except DamagedError as damage:
                return self._discard(kind, key, damage)

    def listing(self) -> Listing:
        """Return all rows.

        Raises:
            MissError: the database cannot be read.
        """
        with self._mutex:
            return self._healing(self.reader.listing)

    def verify(self) -> str | None:
        """Return what is wrong with the database file, which is put aside for it if writable."""
        self._verified = True
        inode = self.reader.inode()
        fault = self.reader.fault()
        if fault is None or self.writer is None:
            return fault
        return self.writer.put_aside(fault, inode, force=False)

    def strays(self, *, delete: bool) -> list[Path]:
        """Return the files that no row names, as far as nobody is writing.

        Args:
            delete: delete them, if writable.
        """
        if self.writer is None:
            return stray_files(self.reader)
        return self.writer.strays(delete=delete)

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
                # A dead writer's journal, which is not ours to roll back.
                self.reader.query = "mode=ro&immutable=1"
            elif fault is not Fault.BAD:
                raise UnavailableError(f"database unreadable: {cause}")
            elif self.writer is not None:
                moved = self.writer.put_aside(cause, inode, force=attempt > 0)
                if moved is not None:
                    raise DatabaseDamagedError(f"database damaged: {moved}")
        raise DatabaseDamagedError(f"database damaged: {cause}")

    def _discard(self, kind: Kind, key: str, damage: DamagedError) -> Entry:
        """Drop a damaged entry, unless another process has replaced it meanwhile."""
        label = f"{kind.value} {key[:12]}"
        if self.writer is None:
            logger.warning("cache: %s: %s; it is left as it is: not ours to write", label, damage)
            raise damage
        try:
            replaced = self.writer.change(lambda cache: _delete_if_damaged(cache, kind, key))
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
                self._require_writer().change(lambda cache: cache.set(name, raw))
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
        self._require_writer().change(lambda cache: cache.delete(name))

    def clear(self) -> None:
        """Delete all entries and the quarantine.

        Raises:
            WriteError: other processes are writing for longer than the time-out.
            OSError: the folder cannot be changed.
        """
        self._require_writer().clear()
        self.quarantine.clear()

    def _require_writer(self) -> Writer:
        assert self.writer is not None, "whoever writes has asked whether it is writable"
        return self.writer


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
