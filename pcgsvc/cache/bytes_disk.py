"""How diskcache may put values down: bytes under names of ours, and never a pickle.

In: a row name and bytes. Out: the columns of a row, or a value file; and back. The only module that
imports diskcache.

diskcache unpickles on read whatever a row says is a pickle (CVE-2025-69872, no fixed release), so
reading goes by what is allowed: bytes in the row, or bytes in a value file with a name of
diskcache's own form. Everything else is damage.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import diskcache

from pcgsvc.cache.envelope import DamagedError, Kind, UnavailableError
from pcgsvc.errors import CacheError

Timeout: type[Exception] = diskcache.Timeout
"""What diskcache raises when the database stays locked."""

_MODE_RAW, _MODE_BINARY = 1, 2
_MODES = {3: "text", 4: "pickle"}
_NAME = re.compile(r"(program|piece)-([0-9a-f]{64})")
_FILENAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")


def row_name(kind: Kind, key: str) -> str:
    """Return the text key of a row."""
    return f"{kind.value}-{key}"


def parse_row_name(name: object) -> tuple[Kind, str] | None:
    """Return kind and key of a row's name, or None if it is none of ours."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return (Kind(found[1]), found[2]) if found else None


def fetch(folder: Path, mode: object, filename: object, value: object) -> bytes:
    """Return the bytes that a row stands for.

    Args:
        folder: diskcache's directory.
        mode: as in the row, like the others; nothing in it is believed.
        filename: of the value file below `folder`, or None.
        value: bytes held in the row itself, or None.

    Raises:
        FileNotFoundError: there is no such value file; the row may have been replaced just now.
        DamagedError: the row is no row of ours.
        UnavailableError: the value file cannot be read just now.
    """
    if mode == _MODE_RAW and filename is None and isinstance(value, bytes):
        return value
    if mode == _MODE_BINARY and value is None and isinstance(filename, str):
        if not _FILENAME.fullmatch(filename):
            raise DamagedError(f"row refused: its value file is {filename!r}")
        return _read(folder / filename)
    word = _MODES.get(mode, repr(mode)) if isinstance(mode, int) else repr(mode)
    raise DamagedError(
        f"row refused: a value of mode {word}", value if type(value) is bytes else b""
    )


def _read(path: Path) -> bytes:
    try:
        # O_NONBLOCK: a FIFO under the name must not make us wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise
    except (IsADirectoryError, NotADirectoryError) as error:
        raise DamagedError(f"value file unreadable: {error.strerror}") from error
    except OSError as error:
        raise UnavailableError(f"value file unreadable: {error.strerror}") from error


def _create(path: Path) -> int:
    """Open a new file two folders down, while others may be removing empty folders."""
    for left in reversed(range(10)):
        try:
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("unreachable")


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serialisation, cut down to bytes under our row names."""

    def __init__(self, directory: str, min_file_size: int, pickle_protocol: int) -> None:
        super().__init__(directory, min_file_size=min_file_size, pickle_protocol=pickle_protocol)
        self.folder = Path(directory)
        self.pending: list[Path] = []
        """Value files written since `settle`, whose rows may not be committed."""

    def put(self, key: object) -> tuple[str, bool]:
        """Return the database key of `key`."""
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise CacheError(f"cache row: got {key!r}; only names of our own form are stored.")
        return key, True

    def get(self, key: object, raw: object) -> str:
        """Return the key of a database key."""
        if raw != 1 or not isinstance(key, str) or not _NAME.fullmatch(key):
            raise DamagedError(f"row refused: its key is {key!r}")
        return key

    def store(
        self, value: object, read: bool, key: object = None
    ) -> tuple[int, int, str | None, bytes | None]:
        """Return size, mode, file name and value of a row; large values go to a synced file."""
        if read or type(value) is not bytes:
            raise CacheError(f"cache row: got {type(value).__name__}; only bytes are stored.")
        if len(value) < self.min_file_size:
            return len(value), _MODE_RAW, None, value
        filename, full_path = self.filename(key, value)
        path = Path(full_path)
        self.pending.append(path)
        with open(_create(path), "wb") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
        return len(value), _MODE_BINARY, filename, None

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        """Return the bytes that a row stands for; see `fetch` of this module."""
        if read:
            raise CacheError("cache row: values are read whole, not as an open file.")
        try:
            return fetch(self.folder, mode, filename, value)
        except FileNotFoundError as error:  # diskcache would take it for a missing row
            raise DamagedError("value file missing") from error

    def remove(self, file_path: Any) -> None:
        """Delete a value file; a name that leads anywhere else is ignored."""
        if isinstance(file_path, str) and _FILENAME.fullmatch(file_path):
            super().remove(file_path)

    def settle(self, *, committed: bool) -> None:
        """Forget the value files written, deleting them if their rows were not committed."""
        for path in self.pending:
            if not committed:
                with contextlib.suppress(OSError):
                    path.unlink()
        self.pending.clear()


def open_cache(folder: Path, *, timeout_s: float, size_limit: int) -> Any:
    """Return a `diskcache.Cache` with every setting given, since it else takes them from the file.

    Args:
        folder: diskcache's directory; made 0700.
        timeout_s: how long one statement waits for other connections.
        size_limit: in bytes; written down only, since nothing is evicted by diskcache.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    cache = diskcache.Cache(
        str(folder),
        timeout=timeout_s,
        disk=BytesDisk,
        statistics=0,
        tag_index=0,
        eviction_policy="none",
        size_limit=size_limit,
        cull_limit=0,
        sqlite_auto_vacuum=1,
        sqlite_cache_size=2**10,
        # No write-ahead log: everything committed lies in the one file, which can then be read
        # from read-only media, and no shared memory file is needed.
        sqlite_journal_mode="delete",
        sqlite_mmap_size=0,  # a mapped file that somebody truncates kills the process (SIGBUS)
        sqlite_synchronous=0,  # only while opening, which commits some forty times
        disk_min_file_size=2**10,  # the database stays small, damage to a value stays in one file
        disk_pickle_protocol=4,  # never used, but one of diskcache's settings
    )
    for _ in range(2):  # the first switches syncing on, the second brings all of it to the disk
        cache.reset("sqlite_synchronous", 2)
    return cache
