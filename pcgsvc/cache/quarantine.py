"""Where damaged entries are put aside, so that a person can look at them.

In: an open file and a name. Out: nothing; what is in here is never loaded again. Bounded in bytes,
the oldest go first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from pcgsvc.cache.file_lock import Held

MAX_BYTES = 256 << 20


class Quarantine:
    """The folder `quarantine/` of a store."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def move(self, held: Held, name: str) -> bool:
        """Move a damaged file in, in one step.

        Args:
            held: the file, open; its `path` is where it goes.
            name: kind, key and cause; anything but letters and digits is replaced.

        Returns:
            Whether it was moved. False: another process has put a new file in its place, which
            stays there.

        Raises:
            OSError: it cannot be moved.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        place, target = held.path, self._path(name)
        place.rename(target)
        held.path = target
        if not held.is_current():  # replaced between the look at it and the move: put it back
            with contextlib.suppress(FileExistsError):
                os.link(target, place)
            target.unlink()
            return False
        self.trim()
        return True

    def items(self) -> list[Path]:
        """Return what is in here, oldest first."""
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
            remove(item)
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


def remove(path: Path) -> None:
    """Delete a file or folder as far as that is possible; a missing one is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
