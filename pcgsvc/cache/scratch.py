"""Folders for the compilers' own caches, under our root or nowhere.

In: the data folder, or None. Out: two folders. Nothing of ours leans on what is in them: they do
not count for the budget and may be deleted whenever nobody compiles.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from pcgsvc.cache.file_lock import acquire

_NAMES = ("inductor", "triton")
_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class CompilerDirs:
    """Scratch folders for the compilers' own caches."""

    inductor: Path
    triton: Path


class Scratch:
    """The scratch folders of one store. Safe from any thread.

    Args:
        data: where they lie; None: in a temporary folder that `close` removes.
    """

    def __init__(self, data: Path | None) -> None:
        self._data = data
        self._dirs: CompilerDirs | None = None
        self._at_close = contextlib.ExitStack()
        self._mutex = threading.Lock()

    def dirs(self) -> CompilerDirs:
        """Return the folders, made 0700 at the first call.

        Raises:
            OSError: they cannot be made.
        """
        with self._mutex:
            if self._dirs is None:
                self._dirs = self._make()
            return self._dirs

    def clear(self) -> None:
        """Delete what is in the folders, unless a store that is open now uses them."""
        if self._data is None or not any((self._data / name).exists() for name in _NAMES):
            return
        held = acquire(self._data / "scratch.lock")
        if held is not None:
            with held:
                for name in _NAMES:
                    shutil.rmtree(self._data / name, ignore_errors=True)

    def close(self) -> None:
        """Stop using the folders; twice is fine."""
        with self._mutex:
            self._dirs = None
            self._at_close.close()

    def _make(self) -> CompilerDirs:
        folder = self._data
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="pcgsvc-", ignore_cleanup_errors=True)
            folder = Path(self._at_close.enter_context(temporary))
        else:
            held = acquire(folder / "scratch.lock", shared=True, timeout_s=_WAIT_S)
            if held is not None:
                self._at_close.callback(held.release)
        for name in _NAMES:
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        return CompilerDirs(*(folder / name for name in _NAMES))
