"""Stored programs: between the stages and the store.

In: facts, a module, a partition. Out: a program image with its compiled pieces, loaded or to be
stored. The only module that knows both what a program is and where it lies. Knows nothing of
graphs.

A program entry holds up to `MAX_VARIANTS` images under one key: instances that look alike from
outside but differ in something that tracing read. Which one fits is found by reading it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pcgsvc.compilers import blob
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.config import Compiler, Config
from pcgsvc.disk.lookup import Built
from pcgsvc.disk.reports import FactDifference
from pcgsvc.errors import CacheError, CompileError
from pcgsvc.facts import piece_facts
from pcgsvc.image import ProgramImage, from_json, new_boundaries, op_identity, to_json
from pcgsvc.keys import key_of
from pcgsvc.partition.pieces import Piece
from pcgsvc.program import CompiledPiece, boundaries_of
from pcgsvc.reads import first_difference
from pcgsvc.rows import Document
from pcgsvc.store import Store

logger = logging.getLogger(__name__)

MAX_VARIANTS = 8


class NoProgramError(Exception):
    """There is no stored program that fits; `str()` of it is why."""


@dataclass(kw_only=True)
class Tally:
    """What became of the pieces."""

    compiled: int = 0
    loaded: int = 0
    unsaved: list[str] = field(default_factory=list)
    """Pieces that were compiled and could not be stored, with the reason."""


class Artifacts:
    """The stored programs of one build.

    Args:
        config: resolved.
        device: what is compiled for.
        store: may be off.
        folder: the compilers' scratch folder of this build.
    """

    def __init__(
        self, config: Config, device: torch.device, store: Store, folder: CompilerFolder
    ) -> None:
        self._config, self._device = config, device
        self._store, self._folder = store, folder
        self.tally = Tally()
        self._toolchain: set[str] = set()

    @property
    def _inductor(self) -> bool:
        return self._config.compiler.name is Compiler.INDUCTOR

    # -- programs --

    def load(
        self, facts: Mapping[str, Any], module: Callable[..., Any], constants: Mapping[str, Any]
    ) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        """Return the stored program of these facts, ready to run.

        Raises:
            NoProgramError: there is none, or none that still holds; the message says why.
        """
        found = self._store.get_program(key_of(facts))
        if found.value is None:
            raise NoProgramError(found.miss or "absent")
        reasons = []
        for data in _variants(found.value):
            try:
                image = from_json(data)
                self._still_holds(image, module, constants)
                return image, self._load_pieces(image)
            except (CompileError, NoProgramError) as error:
                reasons.append(str(error))
        raise NoProgramError("; ".join(dict.fromkeys(reasons)) or "no program in the entry")

    def save(self, facts: Mapping[str, Any], image: ProgramImage) -> bool:
        """Store a program beside those that differ from it in what tracing read."""
        key = key_of(facts)
        known = self._store.get_program(key) if self._store.writable else None
        others = _variants(known.value) if known is not None and known.value is not None else []
        data = to_json(image)
        kept = [d for d in others if _reads(d) != _reads(data)][: MAX_VARIANTS - 1]
        images = [data, *kept]
        pieces = sorted({k for d in images for k in self._piece_keys(from_json(d))})
        manifest = json.dumps({"variants": [d.decode() for d in images]}).encode()
        return self._store.put_program(key, manifest, pieces=pieces, facts=facts)

    @contextlib.contextmanager
    def lock(self, facts: Mapping[str, Any]) -> Iterator[bool]:
        """Keep other processes from building the same program."""
        timeout_s = self._config.cache.lock_timeout_s
        with self._store.lock(key_of(facts), timeout_s) as held:
            yield held

    def _still_holds(
        self, image: ProgramImage, module: Callable[..., Any], constants: Mapping[str, Any]
    ) -> None:
        """Compare what the program was made from with what there is now."""
        for name in image.modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise NoProgramError(f"module {name} cannot be imported: {error}") from error
        for path, digest in image.files.items():
            if file_digest(path) != digest:
                raise NoProgramError(f"source file {path} has changed")
        for name, identity in image.schemas.items():
            if op_identity(name) != identity:
                raise NoProgramError(f"operator {name} is declared differently")
        added = new_boundaries(image, self._config.partition.splitting_ops)
        if added:
            raise NoProgramError(f"operators {added} have become splitting ops")
        changed = first_difference(image.reads, module, constants)
        if changed is not None:
            raise NoProgramError(f"read while tracing: {changed}")

    # -- pieces --

    def _piece_facts(self, key: str, num_outputs: int) -> dict[str, Any]:
        return piece_facts(key, self._config, self._device, num_outputs=num_outputs)

    def _piece_keys(self, image: ProgramImage) -> list[str]:
        return [
            key_of(self._piece_facts(h, len(document["outputs"])))
            for h, document in image.documents.items()
        ]

    def _load_pieces(self, image: ProgramImage) -> dict[str, CompiledPiece]:
        self._unpack_toolchain()
        pieces: dict[str, CompiledPiece] = {}
        for name, document in image.documents.items():
            num_outputs = len(document["outputs"])
            found = self._store.get_piece(key_of(self._piece_facts(name, num_outputs)))
            if found.value is None:
                raise NoProgramError(f"piece {name[:12]}: {found.miss}")
            pieces[name] = self._load_piece(name, found.value, document)
            self.tally.loaded += 1
        return pieces

    def _load_piece(self, name: str, data: bytes, document: Document) -> CompiledPiece:
        """Make a piece of bytes whose digest the store has compared."""
        if not self._inductor:
            return EagerPiece.from_bytes(data, name)
        from pcgsvc.compilers.inductor import InductorPiece

        artifact = blob.unpack(data, self._folder.path)
        try:
            return InductorPiece.from_bytes(
                artifact, len(document["outputs"]), boundaries_of(document)
            )
        except Exception as error:  # torch's loader raises whatever its pickle does
            raise NoProgramError(
                f"piece {name[:12]}: torch cannot load it ({type(error).__name__}: {error})"
            ) from error

    def piece(self, piece: Piece, dump_path: Path | None) -> CompiledPiece:
        """Return a compiled piece: loaded if some program has stored it, compiled otherwise."""
        assert piece.hash is not None
        assert piece.document is not None
        num_outputs = len(piece.document["outputs"])
        facts = self._piece_facts(piece.hash, num_outputs)
        fresh: list[CompiledPiece] = []

        def build() -> Built:
            self.tally.compiled += 1
            compiled, data = self._compile(piece, dump_path)
            fresh.append(compiled)
            return Built(data, facts)

        try:
            made = self._store.get_or_build(
                key_of(facts), build, timeout_s=self._config.cache.lock_timeout_s
            )
        except _UnsavedError as error:
            self.tally.unsaved.append(f"{piece.name}: {error}")
            logger.warning("cache: %s is not stored: %s", piece.name, error)
            return error.piece
        if fresh:
            return fresh[0]
        try:
            loaded = self._load_piece(piece.hash, made.value, piece.document)
        except (CompileError, NoProgramError) as error:
            logger.warning("cache: %s; compiled again", error)
            self.tally.compiled += 1
            compiled, data = self._compile(piece, dump_path)
            self._store.put_piece(key_of(facts), data, facts=facts)
            return compiled
        self.tally.loaded += 1
        return loaded

    def _compile(self, piece: Piece, dump_path: Path | None) -> tuple[CompiledPiece, bytes]:
        assert piece.document is not None
        if not self._inductor:
            eager = EagerPiece(piece.document)
            return eager, eager.to_bytes()
        from pcgsvc.compilers.inductor import compile_piece

        compiled = compile_piece(piece, self._config.compiler.options, dump_path)
        try:
            artifact = compiled.to_bytes()
        except Exception as error:  # torch's artifact format is young; a good compile still counts
            raise _UnsavedError(compiled, error) from error
        # All kernels of this build so far: one that an earlier piece has made as well is not made
        # again, and this piece must be able to do without that one.
        files = blob.snapshot(self._folder.path) - self._toolchain
        return compiled, blob.pack(artifact, self._folder.path, files)

    # -- what the compiler asks of the machine --

    def prepare_toolchain(self) -> None:
        """Load or make the files by which Inductor knows its compiler, before the first compile.

        Inductor tries what the C++ compiler and the CPU can do, and Triton builds its helper: once
        per process, in whatever folder is set then. Kept as an entry of their own, so that a start
        on a fresh machine compiles nothing.
        """
        if not self._inductor:
            return
        if not self._unpack_toolchain():
            self._make_toolchain()
        self._toolchain = blob.snapshot(self._folder.path)

    def _make_toolchain(self) -> None:
        from pcgsvc.compilers.inductor import compile_probe

        before = blob.snapshot(self._folder.path)
        compile_probe(self._device)
        files = blob.snapshot(self._folder.path) - before
        facts = self._toolchain_facts()
        data = blob.pack(b"toolchain", self._folder.path, files)
        self._store.put_piece(key_of(facts), data, facts=facts)

    def _unpack_toolchain(self) -> bool:
        if not self._inductor:
            return False
        found = self._store.get_piece(key_of(self._toolchain_facts()))
        if found.value is None:
            return False
        try:
            blob.unpack(found.value, self._folder.path)
        except CompileError as error:
            logger.warning("cache: toolchain files: %s", error)
            return False
        return True

    def _toolchain_facts(self) -> dict[str, Any]:
        return {**self._piece_facts("toolchain", 1), "kind": "toolchain"}


class _UnsavedError(Exception):
    """A piece was compiled and cannot be written down."""

    def __init__(self, piece: CompiledPiece, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.piece = piece


def file_digest(path: str) -> str | None:
    """Return the sha256 of a source file, or None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def require_warm(store: Store, facts: Mapping[str, Any], reason: str) -> CacheError:
    """Return the error of `cache.require_warm=true`, which names the facts that differ."""
    return CacheError(
        f"cache.require_warm=true, and there is no stored program that fits: {reason}. "
        f"{explain(store, facts)} Build it with job=compile first, or set cache.require_warm=false."
    )


def explain(store: Store, facts: Mapping[str, Any]) -> str:
    """Say which facts differ from the nearest stored program."""
    nearest = store.nearest(facts)
    if nearest is None:
        return "The store holds no program."
    if not nearest.differences:
        return "The nearest program has the same facts."
    causes = _causes(nearest.differences)
    words = "; ".join(f"{d.name}: stored {d.stored!r}, wanted {d.wanted!r}" for d in causes)
    following = len(nearest.differences) - len(causes)
    more = f" (and {following} facts that follow from it)" if following else ""
    return f"The nearest program differs in: {words}{more}."


def _causes(differences: Sequence[FactDifference]) -> list[FactDifference]:
    """Leave out what follows from other differences: settings bring their own facts along."""
    settings = [d for d in differences if d.name.startswith("config.")]
    if settings:
        return settings
    named = {d.name for d in differences}
    return [d for d in differences if d.name != "tensors.digest" or "tensors" not in named]


def _variants(manifest: bytes) -> list[bytes]:
    try:
        tree = json.loads(manifest)
        return [str(v).encode() for v in tree["variants"]]
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("cache: a program entry is malformed: %s", error)
        return []


def _reads(data: bytes) -> Any:
    tree = json.loads(data)
    return [tree["reads"], tree["files"]]
