"""Locks between processes: `flock` on a file, freed by the kernel when the holder dies.

In: a path. Out: a `Held` lock, or None when the time is up. Knows nothing of what it guards.

A flock lives as long as any copy of its file descriptor: a child made by a bare `os.fork` keeps it
alive, a program started by `subprocess` does not, since the descriptor is closed on exec.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

_LONGEST_SLEEP_S = 0.02


class Held:
    """A lock on an open file, held until `release`. Rename the file, and set `path` to its name."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self.path = path

    @property
    def fd(self) -> int:
        """The open file, readable; writable as well if `acquire` may have made it."""
        assert self._fd is not None, "the lock was released"
        return self._fd

    def is_current(self) -> bool:
        """Return whether the file at `path` still is the locked one, and was not replaced."""
        return self._fd is not None and _same_file(self._fd, self.path)

    def release(self, *, unlink: bool = False) -> None:
        """Free the lock; twice is fine.

        Args:
            unlink: remove the file first. A process that waits for the old file notices, and
                starts again on a new one.
        """
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if unlink and _same_file(fd, self.path):
            with contextlib.suppress(OSError):
                self.path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
        os.close(fd)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def acquire(
    path: Path, *, shared: bool = False, timeout_s: float = 0.0, create: bool = True
) -> Held | None:
    """Lock the file at `path`.

    Args:
        path: made, empty and mode 0600, if it is not there.
        shared: let other shared holders in, and keep exclusive ones out.
        timeout_s: how long to try; 0 tries once.
        create: make a missing file; otherwise a missing file gives None, and the file is opened
            for reading only.

    Returns:
        The lock, or None when it could not be taken in time.

    Raises:
        OSError: the file cannot be opened or made.
    """
    deadline = time.monotonic() + timeout_s
    sleep_s = 0.001
    while True:
        try:
            held = _attempt(path, shared=shared, create=create)
        except FileNotFoundError:
            if create:
                raise
            return None
        if held is not None and held.is_current():
            return held
        if held is not None:
            held.release()  # its last holder unlinked it between our open and our lock
            continue
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(sleep_s, left_s))
        sleep_s = min(sleep_s * 2, _LONGEST_SLEEP_S)


def _attempt(path: Path, *, shared: bool, create: bool) -> Held | None:
    # A read-only descriptor is enough for flock, and serves on a read-only file system.
    # O_NONBLOCK: opening a FIFO must not wait for its other end.
    flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY | os.O_NONBLOCK
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        if shared and not create and error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            return Held(fd, path)  # a file system without locks: no exclusive holder either
        os.close(fd)
        raise
    except BaseException:
        os.close(fd)
        raise
    return Held(fd, path)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
