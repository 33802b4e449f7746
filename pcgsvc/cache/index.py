"""The index: what stored programs say of themselves, in a database that can be thrown away.

In: the entries of a store. Out: the header (facts, pieces, date) of each program, without reading
its payload again. Holds nothing that the entries do not: a row counts only while it agrees with the
entry's file, and an index that is missing, locked, damaged or foreign is made anew from the files.
The only module that imports diskcache.

diskcache unpickles on read whatever a row says is a pickle (CVE-2025-69872, no fixed release), so
its serialisation is cut down here to bytes in the row itself, and these bytes are envelopes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import diskcache

from pcgsvc.cache.entries import Entries
from pcgsvc.cache.envelope import DamagedError, Entry, Kind, MissError, check_key, decode, encode
from pcgsvc.cache.file_lock import acquire
from pcgsvc.cache.root import INDEX_NAME
from pcgsvc.errors import CacheError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WAIT_S = 1.0
"""How long the index is waited for: reading the entries instead costs little more."""
_MODE_RAW = 1
_MODES = {2: "file", 3: "text", 4: "pickle"}
_NOT_DAMAGE = ("SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_IOERR")


class Index:
    """The headers of the programs of one store. Safe from any thread.

    Args:
        entries: of the store. What may be written there is kept in a database beside them.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._folder = entries.data / INDEX_NAME
        self._headers: dict[str, Entry] = {}
        """By key; the payload of each is the seal of the file that it was read from."""
        self._mutex = threading.Lock()

    def headers(self) -> dict[str, Entry]:
        """Return the readable programs by key, each with its file's seal in place of its payload.

        What is damaged is put aside, as by any look-up, and left out.
        """
        keys = [record.key for record in self._entries.scan(Kind.PROGRAM)]
        with self._mutex:
            seals = {key: self._entries.seal(Kind.PROGRAM, key) for key in keys}
            known = _agreeing(self._headers, seals)
            rows = {} if known.keys() == seals.keys() else self._use(_rows) or {}
            known |= _agreeing(rows, seals)
            new = {}
            for key in [key for key in keys if key not in known]:
                with contextlib.suppress(MissError):  # logged as it is put aside
                    header = self._entries.read(Kind.PROGRAM, key)
                    if seal := seals[key]:
                        new[key] = replace(header, payload=seal)
            if new:
                gone = rows.keys() - seals.keys()
                self._use(lambda cache: _update(cache, new, gone), make=True)
            self._headers = known | new
            return dict(self._headers)

    def fault(self) -> str | None:
        """Return what is wrong with the database; None: nothing, or it is not kept or not there."""
        try:
            self._use(_rows, heal=False)
        except Exception as error:  # noqa: BLE001 - damage makes diskcache raise anything
            return str(error) if _is_damage(error) else None
        return None

    def clear(self) -> None:
        """Delete the database; it is made anew when it is needed."""
        with self._mutex:
            self._headers.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _database(self) -> Path:
        return self._folder / "cache.db"

    def _use(
        self, operation: Callable[[Any], T], *, make: bool = False, heal: bool = True
    ) -> T | None:
        """Run an operation on diskcache; None if there is no database or it cannot be used.

        Args:
            operation: on a `diskcache.Cache`. No connection outlives it: none is carried over a
                fork, or kept on a deleted database.
            make: make a missing database.
            heal: delete a damaged one, and say so in the log; otherwise its error is raised.
        """
        if not self._entries.writable or not (make or self._database.exists()):
            return None
        held = None
        with contextlib.suppress(OSError):
            held = acquire(self._folder.with_name("index.lock"), timeout_s=_WAIT_S)
        if held is None:
            return None
        with held:
            try:
                with self._open() as cache:
                    return operation(cache)
            except Exception as error:  # damage makes diskcache raise anything
                if not heal:
                    raise
                level = logging.WARNING if _is_damage(error) else logging.DEBUG
                words = "cache: index damaged (%s): thrown away, and made anew from the entries"
                logger.log(level, words, error)
                shutil.rmtree(self._folder, ignore_errors=True)
                return None

    def _open(self) -> Any:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(self._database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # diskcache retries a locked database for 60 s per statement: find out here instead.
        with contextlib.closing(sqlite3.connect(self._database, timeout=_WAIT_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            ((found,),) = connection.execute("PRAGMA integrity_check(1)").fetchall()
        if found != "ok":
            raise DamagedError(" ".join(found.split()))
        return open_cache(self._folder)


def _agreeing(headers: Mapping[str, Entry], seals: Mapping[str, bytes | None]) -> dict[str, Entry]:
    """Return those headers that were read from the files that are there now."""
    return {key: header for key, header in headers.items() if header.payload == seals.get(key)}


def _rows(cache: Any) -> dict[str, Entry]:
    return {key: decode(cache.get(key, b""), Kind.PROGRAM, key) for key in cache}


def _update(cache: Any, new: Mapping[str, Entry], gone: Set[str]) -> None:
    with cache.transact():
        for key, header in new.items():
            cache.set(key, encode(header))
        for key in gone:
            cache.delete(key)


def _is_damage(error: Exception) -> bool:
    """Whether it says something of the database, rather than of the disk or the memory."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(_NOT_DAMAGE):
        return bool(name == "SQLITE_IOERR_SHORT_READ")
    return not isinstance(error, (OSError, MemoryError))


# ---- diskcache -----------------------------------------------------------------------------------


class _HeaderDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serialisation, cut down to bytes under our keys, in the row itself."""

    def put(self, key: object) -> tuple[str, bool]:
        """Return the database key of `key`."""
        return check_key(key), True  # type: ignore[arg-type]

    def get(self, key: object, raw: object) -> str:
        """Return the key of a database key."""
        try:
            return check_key(key)  # type: ignore[arg-type]
        except CacheError as error:
            raise DamagedError(f"row refused: its key is {key!r}") from error

    def store(
        self, value: object, read: bool, key: object = None
    ) -> tuple[int, int, str | None, bytes | None]:
        """Return size, mode, file name and value of a row."""
        if read or type(value) is not bytes:
            raise CacheError(f"cache index: got {type(value).__name__}; only bytes are stored.")
        return len(value), _MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        """Return the bytes of a row; nothing else in it is believed."""
        if mode == _MODE_RAW and filename is None and type(value) is bytes and not read:
            return value
        word = _MODES.get(mode, repr(mode)) if isinstance(mode, int) else repr(mode)
        raise DamagedError(f"row refused: a value of mode {word}")

    def remove(self, file_path: object) -> None:
        """Delete nothing: no row of ours names a file."""


def open_cache(folder: Path) -> Any:
    """Return a `diskcache.Cache` with every setting given: else it takes them from the file."""
    return diskcache.Cache(
        str(folder),
        timeout=_WAIT_S,
        disk=_HeaderDisk,
        statistics=0,
        tag_index=0,
        eviction_policy="none",
        size_limit=2**30,  # written down only: diskcache evicts nothing
        cull_limit=0,
        sqlite_auto_vacuum=1,
        sqlite_cache_size=2**10,
        # No write-ahead log: it takes a second file, and one of shared memory.
        sqlite_journal_mode="delete",
        sqlite_mmap_size=0,  # truncating a mapped file kills the process that reads it (SIGBUS)
        sqlite_synchronous=0,  # a power cut may damage it: it is made anew
        disk_min_file_size=2**62,
        disk_pickle_protocol=4,  # never used, but one of diskcache's settings
    )
