"""What an error of SQLite, diskcache or the operating system means for the store.

In: an exception. Out: a `Fault`, which says what to do, and a cause in words.
"""

from __future__ import annotations

import enum
import errno
import sqlite3
from pathlib import Path

from pcgsvc.cache.bytes_disk import Timeout


class Fault(enum.Enum):
    """What to do about an error."""

    BUSY = "busy"
    """Another connection holds the database: later."""
    FULL = "full"
    """No space: go on uncached."""
    GONE = "gone"
    """The database is not there (any more): open it anew."""
    BAD = "bad"
    """The database is damaged: put it aside."""
    DENIED = "denied"
    """Not ours to write or read: go on uncached."""
    OTHER = "other"
    """It says nothing of the database: go on uncached."""


_BY_CODE = {
    sqlite3.SQLITE_BUSY: Fault.BUSY,
    sqlite3.SQLITE_LOCKED: Fault.BUSY,
    sqlite3.SQLITE_PROTOCOL: Fault.BUSY,
    sqlite3.SQLITE_FULL: Fault.FULL,
    sqlite3.SQLITE_CANTOPEN: Fault.OTHER,
    sqlite3.SQLITE_IOERR: Fault.OTHER,
    sqlite3.SQLITE_NOMEM: Fault.OTHER,
    sqlite3.SQLITE_INTERRUPT: Fault.OTHER,
    sqlite3.SQLITE_READONLY: Fault.DENIED,
    sqlite3.SQLITE_PERM: Fault.DENIED,
    sqlite3.SQLITE_AUTH: Fault.DENIED,
}
_BY_ERRNO = {
    errno.ENOSPC: Fault.FULL,
    errno.EDQUOT: Fault.FULL,
    errno.EACCES: Fault.DENIED,
    errno.EPERM: Fault.DENIED,
    errno.EROFS: Fault.DENIED,
    errno.ENOENT: Fault.GONE,
}

# ValueError: Python's sqlite3 decodes SQLite's message, which may quote damaged text.
READ_ERRORS = (sqlite3.Error, OSError, ValueError, OverflowError, MemoryError)
"""What reading a damaged database raises."""

_FULL = "no space left on the disk"


def classify(error: BaseException, database: Path) -> tuple[Fault, str]:
    """Return what `error` means, and the cause in words.

    Args:
        error: anything that was raised while `database` was worked on. What is not known to have
            another reason is taken for damage.
        database: the file.
    """
    if isinstance(error, (Timeout, TimeoutError)):
        return Fault.BUSY, "the database stays locked by another connection"
    if isinstance(error, OSError):
        fault = _BY_ERRNO.get(error.errno or 0, Fault.OTHER)
        return fault, _FULL if fault is Fault.FULL else error.strerror or str(error)
    if isinstance(error, MemoryError):
        return Fault.OTHER, "out of memory"
    code = getattr(error, "sqlite_errorcode", None)  # Python's own module sets none
    if code is None or code == sqlite3.SQLITE_IOERR_SHORT_READ:
        fault = Fault.BAD
    elif code == sqlite3.SQLITE_READONLY_DBMOVED:
        fault = Fault.GONE
    else:
        fault = _BY_CODE.get(code & 0xFF, Fault.BAD)  # the low byte is the primary code
    if fault in (Fault.OTHER, Fault.BAD) and not database.exists():
        fault = Fault.GONE
    if fault is Fault.FULL:
        return fault, _FULL
    text = str(error) or type(error).__name__
    return fault, text if isinstance(error, sqlite3.Error) else f"{type(error).__name__}: {text}"
