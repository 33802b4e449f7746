"""Locks between processes: `flock` on a file, freed by the kernel when the holder dies.

In: a path. Out: a `Held` lock, or None when the time is up. Knows nothing of what it guards.

diskcache's own `Lock` stores a row, which outlives a killed holder; a flock does not. It lives as
long as any copy of its file descriptor: a child made by a bare `os.fork` keeps it alive, a program
started by `subprocess` does not, since the descriptor is closed on exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

_LONGEST_SLEEP_S = 0.02


class Held:
    """A lock that is held until `release`."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self.path = path

    def is_current(self) -> bool:
        """Return whether `path` still is the file that is locked, and nobody replaced it."""
        return self._fd is not None and _same_file(self._fd, self.path)

    def release(self, *, unlink: bool = False) -> None:
        """Free the lock; twice is fine.

        Args:
            unlink: remove the file first. Only for an exclusive holder: whoever waits on the old
                file notices and starts again on a new one.
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
        create: make a missing file; otherwise a missing file gives None.

    Returns:
        The lock, or None when it was not to be had in time.

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
    flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return Held(fd, path)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
