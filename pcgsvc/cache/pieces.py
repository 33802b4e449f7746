"""Compiled pieces: loaded from the store if any program has stored them, compiled otherwise.

In: a piece, or the documents of a stored program. Out: compiled pieces, stored under keys made of
their facts. Knows nothing of the program that they are parts of.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.cache.envelope import Built, Kind
from pcgsvc.cache.store import Store
from pcgsvc.cache.toolchain import Toolchain
from pcgsvc.compilers import blob
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.compilers.environment import environment_facts
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.compilers.specialize import baked_inputs, specialized
from pcgsvc.config import Compiler, Config
from pcgsvc.errors import CompileError
from pcgsvc.program.facts import piece_facts
from pcgsvc.program.image import ProgramImage, custom_ops, op_identity
from pcgsvc.program.keys import key_of
from pcgsvc.program.pieces import Piece, PieceCounts
from pcgsvc.program.program import Boundaries, CompiledPiece, boundaries_of
from pcgsvc.trace.rows import Document

logger = logging.getLogger(__name__)


class NoPieceError(Exception):
    """A stored piece cannot be loaded; `str()` of it is why."""


class Pieces:
    """The pieces of one build; see `Artifacts` for the arguments."""

    def __init__(
        self, config: Config, device: torch.device, store: Store, folder: CompilerFolder
    ) -> None:
        self._config, self._device = config, device
        self._store, self._folder = store, folder
        self.counts = PieceCounts()
        # Once, before anything is imported or compiled: compilers change some settings themselves.
        self.environment = environment_facts(config, device)
        """Versions, hardware and numerics flags, for facts."""
        self.toolchain: Toolchain | None = None
        """Only with Inductor."""
        if config.compiler.name is Compiler.INDUCTOR:
            facts = {**self._facts("toolchain", {"rows": [], "outputs": []}), "kind": "toolchain"}
            self.toolchain = Toolchain(facts, device, store, folder)

    def _facts(
        self,
        name: str,
        document: Document,
        schemas: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> dict[str, Any]:
        """Return the facts of a piece; `schemas`: of its ops, as a stored program has them."""
        ops = {
            op: op_identity(op) if schemas is None else schemas.get(op, "absent")
            for op in custom_ops(document)
        }
        return piece_facts(
            name,
            self._config,
            self.environment,
            num_outputs=len(document["outputs"]),
            ops=ops,
            size=size,
        )

    def sized(self, image: ProgramImage) -> list[tuple[int, str]]:
        """Return (size, hash) of the pieces that a program has for exact sizes."""
        return specialized(image, self._config)

    def keys(self, image: ProgramImage) -> list[str]:
        """Return the keys of all pieces of a program."""
        return [
            key_of(self._facts(name, image.documents[name], image.schemas, size))
            for size, name in self._names(image)
        ]

    def _names(self, image: ProgramImage) -> list[tuple[int | None, str]]:
        return [*((None, name) for name in image.compiled), *self.sized(image)]

    def drop(self, image: ProgramImage, hashes: Collection[str]) -> None:
        """Delete stored pieces, for all sizes, since what they compute is wrong."""
        for size, name in self._names(image) if self._store.writable else ():
            if name in hashes:
                facts = self._facts(name, image.documents[name], image.schemas, size)
                self._store.drop(Kind.PIECE, key_of(facts))

    # ---- loading ---------------------------------------------------------------------------------

    def load(
        self, image: ProgramImage, companion_keys: Collection[str]
    ) -> tuple[dict[str, CompiledPiece], dict[int, dict[str, CompiledPiece]]]:
        """Return the pieces of a stored program, and those for exact sizes.

        Args:
            image: of the program.
            companion_keys: of what is stored with it; pieces among them load without Inductor.

        Raises:
            NoPieceError: one is missing, or torch cannot load it.
            CompileError: one is malformed.
        """
        pieces: dict[str, CompiledPiece] = {}
        sized: dict[int, dict[str, CompiledPiece]] = {}
        for size, name in self._names(image):
            document = image.documents[name]
            facts = self._facts(name, document, size=size)
            direct = key_of(_direct_facts(facts))
            piece = self._load_direct(direct, document, size) if direct in companion_keys else None
            if piece is None:
                if self.toolchain is not None:
                    self.toolchain.unpack()
                found = self._store.get_piece(key_of(facts))
                if found.value is None:
                    rows = "" if size is None else f" for {size} rows"
                    raise NoPieceError(f"piece {name[:12]}{rows}: {found.miss}")
                piece = self._load(name, found.value, document, size)
            group = pieces if size is None else sized.setdefault(size, {})
            group[name] = piece
        self.counts.loaded += len(pieces) + sum(map(len, sized.values()))
        pieces |= {name: EagerPiece(image.documents[name]) for name in image.uncompiled}
        return pieces, sized

    def _load_direct(self, key: str, document: Document, size: int | None) -> CompiledPiece | None:
        """Load the form that does without Inductor; None if that fails."""
        from pcgsvc.compilers.direct import DirectArtifact
        from pcgsvc.compilers.inductor import InductorPiece

        found = self._store.get_piece(key)
        if found.value is None:
            return None
        try:
            form = json.loads(blob.unpack(found.value, self._folder.path))
            artifact = DirectArtifact(form, self._folder.path, self._device.index or 0)
            return InductorPiece(artifact, *_signature(document, size))
        except Exception as error:  # noqa: BLE001 - the driver may refuse a binary
            logger.warning(
                "piece %s: its direct form cannot be loaded (%s: %s); Inductor loads it",
                key[:12],
                type(error).__name__,
                error,
            )
            return None

    def _load(
        self, name: str, data: bytes, document: Document, size: int | None = None
    ) -> CompiledPiece:
        """Make a piece of bytes whose digest the store has compared."""
        if self.toolchain is None:
            return EagerPiece.from_bytes(data, name)
        from pcgsvc.compilers.inductor import InductorPiece

        artifact = blob.unpack(data, self._folder.path)
        self._folder.ready_inductor()
        try:
            return InductorPiece.from_bytes(artifact, *_signature(document, size))
        except Exception as error:  # torch's loader raises whatever its pickle does
            raise NoPieceError(
                f"piece {name[:12]}: torch cannot load it ({type(error).__name__}: {error})"
            ) from error

    # ---- compiling -------------------------------------------------------------------------------

    def load_or_compile(
        self, piece: Piece, dump_path: Path | None, size: int | None = None
    ) -> CompiledPiece:
        """Return a compiled piece: loaded if some program has stored it, compiled otherwise.

        Args:
            piece: a region.
            dump_path: file that gets the source that the compiler generated.
            size: the only row count that it will run with; None: any.
        """
        assert piece.hash is not None
        assert piece.document is not None
        if self.toolchain is not None:
            self.toolchain.prepare()
        facts = self._facts(piece.hash, piece.document, size=size)
        fresh: list[CompiledPiece] = []

        def build() -> Built:
            self.counts.compiled += 1
            compiled, data = self._compile(piece, dump_path, size)
            fresh.append(compiled)
            return Built(data, facts)

        try:
            made = self._store.get_or_build(
                key_of(facts), build, timeout_s=self._config.cache.lock_timeout_s
            )
            if fresh:
                return fresh[0]
            assert made.value is not None
            try:
                loaded = self._load(piece.hash, made.value, piece.document, size)
            except (CompileError, NoPieceError) as error:
                logger.warning("cache: %s; compiled again", error)
                self._store.put_piece(key_of(facts), build().value, facts=facts)
                return fresh[0]
        except _UnsavedError as error:
            self.counts.not_saved(piece.name, str(error))
            return error.piece
        self.counts.loaded += 1
        return loaded

    def _compile(
        self, piece: Piece, dump_path: Path | None, size: int | None
    ) -> tuple[CompiledPiece, bytes]:
        assert piece.document is not None
        if self.toolchain is None:
            eager = EagerPiece(piece.document)
            return eager, eager.to_bytes()
        from pcgsvc.compilers.inductor import compile_piece

        compiled = compile_piece(piece, self._config.compiler, dump_path, size=size)
        self.counts.problems += compiled.problems
        try:
            artifact = compiled.to_bytes()
        except Exception as error:  # torch's artifact format is young; a good compile still counts
            raise _UnsavedError(compiled, error) from error
        # All kernels of this build so far: one that an earlier piece has made as well is not made
        # again, and this piece must be able to do without that one.
        files = blob.snapshot(self._folder.path) - (self.toolchain.files or set())
        return compiled, blob.pack(artifact, self._folder.path, files)

    def store_direct(
        self, image: ProgramImage, name: str, piece: CompiledPiece, size: int | None
    ) -> str | None:
        """Store the form of a piece that has run which loads without Inductor.

        Args:
            image: of the program.
            name: hash of the piece.
            piece: after it has run, since its kernels are chosen when they first run.
            size: the only row count that it runs with; None: any.

        Returns:
            The key, or None if it has no such form, was loaded from it, or could not be stored.
        """
        if self.toolchain is None or self._device.type != "cuda":
            return None
        from pcgsvc.compilers.inductor import InductorPiece

        if not isinstance(piece, InductorPiece) or piece.is_direct:
            return None
        facts = _direct_facts(self._facts(name, image.documents[name], image.schemas, size))
        try:
            form, files = piece.to_direct(self._folder.path)
        except torch_private.NotDirectError as error:
            logger.info("piece %s will be loaded by Inductor: %s", name[:12], error)
            return None
        data = blob.pack(form, self._folder.path, files)
        return key_of(facts) if self._store.put_piece(key_of(facts), data, facts=facts) else None


def _direct_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {**facts, "form": "direct"}


def _signature(
    document: Document, size: int | None
) -> tuple[int, Boundaries | None, Sequence[int]]:
    """Return what a loaded piece must know of its document: results, boundaries, baked inputs."""
    baked = () if size is None else baked_inputs(document)
    return len(document["outputs"]), boundaries_of(document), baked


class _UnsavedError(Exception):
    """A piece was compiled and cannot be written down."""

    def __init__(self, piece: CompiledPiece, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.piece = piece
