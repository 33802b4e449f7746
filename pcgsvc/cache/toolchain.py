"""The compilers' files that belong to no piece: Inductor's toolchain, and kernels of boundaries.

In: the compilers' folder and the store. Out: entries of their own, or the files of stored ones in
the folder. Knows nothing of programs or pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.cache.store import Store
from pcgsvc.compilers import blob
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.errors import CompileError
from pcgsvc.program.keys import key_of

logger = logging.getLogger(__name__)


class Toolchain:
    """The files by which Inductor knows its compiler.

    Inductor tries what the C++ compiler and the CPU can do, and Triton builds its helper: once per
    process, in the folder that is set then. Kept as an entry of their own, so that a start on a
    fresh machine compiles nothing. `facts` are what decides them; see `Artifacts` for the rest.
    """

    def __init__(
        self, facts: Mapping[str, Any], device: torch.device, store: Store, folder: CompilerFolder
    ) -> None:
        self._facts, self._device = facts, device
        self._store, self._folder = store, folder
        self.key = key_of(facts)
        self.stored = False
        """Whether the entry is in the store, and its files are in the folder."""
        self.files: set[str] | None = None
        """What was in the folder before the first piece was compiled; None: not prepared."""

    def prepare(self) -> None:
        """Load or make the files, before the first piece is loaded or compiled; once."""
        if self.files is None:
            if not self.unpack():
                self._make()
            self.files = blob.snapshot(self._folder.path)

    def unpack(self) -> bool:
        """Write the stored files into the folder, once; return whether they are there."""
        if not self.stored:
            self.stored = _unpack(self._store, self.key, self._folder, "toolchain files")
        return self.stored

    def _make(self) -> None:
        from pcgsvc.compilers.inductor import compile_probe

        compile_probe(self._device)
        files = blob.snapshot(self._folder.path)  # tracing may have made some of them
        data = blob.pack(b"toolchain", self._folder.path, files)
        self.stored = self._store.put_piece(self.key, data, facts=self._facts)


class BoundaryKernels:
    """The kernels that boundaries compile for themselves when they first run."""

    def __init__(self, store: Store, folder: CompilerFolder) -> None:
        self._store, self._folder = store, folder
        self._known: set[str] | None = None
        """Files that are stored already, or came from the store; None: not started."""
        self._loaded: set[str] = set()
        """Those of them that boundaries made."""

    def key(self, facts: Mapping[str, Any]) -> str:
        """Return the key of the kernels of a program with these facts."""
        return key_of(_kernel_facts(facts))

    def start(self) -> None:
        """Take what is compiled from here on for kernels of boundaries: all pieces are there."""
        if self._known is None:
            self._known = blob.snapshot(self._folder.path)

    def unpack(self, facts: Mapping[str, Any]) -> None:
        """Write a program's stored kernels where Triton looks for them."""
        before = blob.snapshot(self._folder.path)
        if _unpack(self._store, self.key(facts), self._folder, "kernels of the boundaries"):
            torch_private.settle_triton_cache(self._folder.path / "triton")
            self._loaded = blob.snapshot(self._folder.path) - before

    def store(self, facts: Mapping[str, Any]) -> str | None:
        """Store the kernels of a program that has run; return their key, None if none are new."""
        new = blob.snapshot(self._folder.path) - (self._known or set())
        made = {file for file in new if file.startswith("triton/")}
        if not made:
            return None
        data = blob.pack(b"kernels", self._folder.path, made | self._loaded)
        stored = self._store.put_piece(self.key(facts), data, facts=_kernel_facts(facts))
        return self.key(facts) if stored else None


def _kernel_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {**facts, "kind": "kernels"}


def _unpack(store: Store, key: str, folder: CompilerFolder, what: str) -> bool:
    """Write the files of an entry into the folder; False if there is none, or it is malformed."""
    found = store.get_piece(key)
    try:
        if found.value is not None:
            blob.unpack(found.value, folder.path)
    except CompileError as error:
        logger.warning("cache: %s: %s", what, error)
        return False
    return found.value is not None
