"""Where damaged entries and databases are put aside, so that a person can look at them.

In: a path or bytes with a name. Out: nothing; what lies here is never read by us again. Bounded in
bytes, the oldest go first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20


class Quarantine:
    """The folder `quarantine/` of a store."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def keep(self, name: str, raw: bytes) -> None:
        """Write down the bytes of a damaged entry, if that is possible.

        Args:
            name: kind, key and cause; anything that is no letter or digit is replaced.
            raw: what was found; empty when nothing was left.
        """
        if not raw or len(raw) > self._max_bytes:
            return
        path = self._path(name)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(raw)
        except OSError as error:  # a full disk, say: the entry is dropped all the same
            logger.debug("cache: no room in the quarantine for %s: %s", name, error)
            with contextlib.suppress(OSError):
                path.unlink()
        self.trim()

    def move(self, path: Path, name: str) -> Path:
        """Move a file or folder in, in one step.

        Raises:
            OSError: it cannot be moved.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        target = self._path(name)
        path.rename(target)
        self.trim()
        return target

    def items(self) -> list[Path]:
        """Return what lies here, oldest first."""
        try:
            return sorted(self._folder.iterdir())
        except OSError:
            return []

    def trim(self) -> None:
        """Delete the oldest until the rest fits."""
        sizes = {item: num_bytes(item) for item in self.items()}
        total = sum(sizes.values())
        for item, size in sizes.items():
            if total <= self._max_bytes:
                return
            _remove(item)
            total -= size

    def clear(self) -> None:
        """Delete everything."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        # The time first, so that names sort by age; nanoseconds and pid, so that none meet.
        safe = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:120]
        return self._folder / f"{time.time_ns():020d}-{os.getpid()}-{safe}"


def num_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a folder."""
    files = [path] if not path.is_dir() else [Path(d) / f for d, _, fs in os.walk(path) for f in fs]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_size
        except OSError:  # another process is deleting
            continue
    return total


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
