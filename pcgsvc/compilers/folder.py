"""The compilers' own caches, in a temporary folder of ours for as long as a build needs them.

In: nothing. Out: a folder, and a block in which Inductor and Triton use it. What is in it counts
for nothing: a stored piece brings its files along, and they are written anew from checked bytes.
Knows nothing of pieces or stores.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pcgsvc import torch_private


class CompilerFolder:
    """A folder that is removed by `close`, at the latest when the process ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pcgsvc-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)

    @contextlib.contextmanager
    def in_use(self, *, inductor: bool) -> Iterator[None]:
        """Point the compilers at the folder for a block; restore the environment afterwards."""
        places = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.path),
            "TRITON_CACHE_DIR": str(self.path / "triton"),
        }
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            with torch_private.inductor_defaults() if inductor else contextlib.nullcontext():
                yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """Remove the folder; twice is fine."""
        self._folder.cleanup()
