"""The compilers' own caches, in a temporary folder of ours for as long as a build needs them.

In: nothing. Out: a folder, and a block in which Inductor and Triton use it. What is in it counts
for nothing: a stored piece brings its files along, and they are written anew from checked bytes.
Knows nothing of pieces or stores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from pcgsvc import torch_private


class CompilerFolder:
    """A folder that is removed by `close`, at the latest when the process ends."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pcgsvc-"))
        self._block: contextlib.ExitStack | None = None
        self._threads, self._ready = 1, False
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @contextlib.contextmanager
    def in_use(self, threads: int = 1) -> Iterator[None]:
        """Point the compilers at the folder for a block; restore the environment afterwards.

        Args:
            threads: Inductor's worker processes, which end with the block; 1: none.
        """
        places = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.path),
            "TRITON_CACHE_DIR": str(self.path / "triton"),
        }
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            with contextlib.ExitStack() as self._block:
                self._threads = threads
                yield
        finally:
            self._block = None
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def ready_inductor(self) -> None:
        """Import Inductor, with our settings for the rest of the block; twice is fine.

        Not done when the block begins: a warm start mostly does without.
        """
        if self._block is None:
            raise RuntimeError("ready_inductor: only inside in_use")
        if not self._ready:
            self._ready = True
            self._block.callback(self._unready)
            self._block.enter_context(torch_private.inductor_defaults(self._threads))

    def _unready(self) -> None:
        self._ready = False
        if self._threads > 1:
            torch_private.stop_compile_workers()

    def close(self) -> None:
        """Remove the folder; twice is fine."""
        self._remove()
