"""Stored programs: between the stages and the store.

In: facts, a module, a partition. Out: a program image with its compiled pieces, loaded or to be
stored. The only module that knows both what a program is and where it lies. Knows nothing of
graphs.

A program entry holds up to `MAX_VARIANTS` images under one key: instances that look alike from
outside but differ in something that tracing read. Which one fits is found by reading it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.cache.envelope import Kind, MissError
from pcgsvc.cache.lookup import Built
from pcgsvc.cache.reports import FactDifference
from pcgsvc.cache.store import Store
from pcgsvc.compilers import blob
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.compilers.environment import environment_facts
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.compilers.specialize import baked_inputs, specialized
from pcgsvc.config import CacheMode, Compiler, Config
from pcgsvc.errors import CacheError, CompileError
from pcgsvc.program.facts import file_digest as digest_of
from pcgsvc.program.facts import piece_facts
from pcgsvc.program.guards import first_difference, path_of
from pcgsvc.program.image import (
    ProgramImage,
    custom_ops,
    from_json,
    new_boundaries,
    op_identity,
    to_json,
)
from pcgsvc.program.keys import key_of
from pcgsvc.program.pieces import Piece, PieceCounts
from pcgsvc.program.program import Boundaries, CompiledPiece, boundaries_of
from pcgsvc.trace.rows import Document

logger = logging.getLogger(__name__)

MAX_VARIANTS = 8


class NoProgramError(Exception):
    """There is no stored program that fits; `str()` of it is why."""


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
        self._store, self.folder = store, folder
        self.counts = PieceCounts()
        # Once, before anything is imported or compiled: compilers change some settings themselves.
        self.environment = environment_facts(config, device)
        """Versions, hardware and numerics flags, for facts."""
        self.specialized: dict[int, dict[str, CompiledPiece]] = {}
        """Pieces of the program for exact sizes, by size and hash."""
        self._toolchain: set[str] = set()
        self._there: set[str] = set()
        """Keys of toolchain entries that were seen in the store."""
        self._beside: set[str] = set()
        """Keys of what the stored program has beside its pieces; see `finish`."""
        self._files: set[str] = set()
        """The compilers' files that are stored, or came from the store."""
        self._kernel_files: set[str] = set()
        """Those of them that boundaries made."""
        self._said_nearest = False

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
            raise NoProgramError(f"{found.miss}{self._nearest(facts)}")
        manifest = _read_manifest(found.value)
        self._beside = set(manifest.beside)
        reasons = []
        for data in manifest.variants:
            try:
                image = from_json(data)
                self._still_holds(image, module, constants)
                pieces = self._load_pieces(image)
            except (CompileError, NoProgramError) as error:
                reasons.append(str(error))
                continue
            self.counts.loaded += len(pieces) + sum(map(len, self.specialized.values()))
            self._unpack_kernels(facts)
            self._files = blob.snapshot(self.folder.path)
            return image, pieces
        raise NoProgramError("; ".join(dict.fromkeys(reasons)) or "no program in the entry")

    def _nearest(self, facts: Mapping[str, Any]) -> str:
        """Return the names of what differs from the nearest stored program, once per build."""
        if self._said_nearest or self._store.mode is CacheMode.REFRESH:
            return ""
        self._said_nearest = True
        nearest = self._store.nearest(facts)
        if nearest is None or not nearest.differences:
            return ""
        names = [d.name for d in _causes(nearest.differences)]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"; the nearest stored program differs in {', '.join(names[:8])}{more}"

    def save(self, facts: Mapping[str, Any], image: ProgramImage) -> bool:
        """Store a program beside those that differ from it in what tracing read."""
        if image.out_tree is None:
            self._unsaved("the result", "a class in it cannot be found again by its name")
            return False
        if not self._files:
            self._files = blob.snapshot(self.folder.path)
        key, data = key_of(facts), to_json(image)
        known = self._known(key)
        variants, pieces = [data.decode()], set(self._piece_keys(image))
        if self._inductor:  # goes where the program goes, or a fresh machine would compile it
            pieces |= {key_of(self._toolchain_facts())} & self._there
        for other, needed in self._others(known, image):
            if len(variants) < MAX_VARIANTS and all(map(self._has, needed - pieces)):
                variants.append(other.decode())
                pieces |= needed
        beside = sorted({*filter(self._has, known.beside), *self._beside})
        manifest = json.dumps({"variants": variants, "beside": beside}).encode()
        needed = {*pieces, *beside}
        return self._store.put_program(key, manifest, pieces=sorted(needed), facts=facts)

    def finish(
        self,
        facts: Mapping[str, Any],
        image: ProgramImage,
        pieces: Mapping[str, CompiledPiece],
    ) -> None:
        """Store what only running the program tells, after it has run; nothing if all is there.

        That is: the form of Inductor's pieces that loads without Inductor, whose kernels are chosen
        when they first run; and the kernels that boundaries have compiled for themselves.
        """
        before = set(self._beside)
        if self._inductor and self._device.type == "cuda":
            for size, group in [(None, pieces), *self.specialized.items()]:
                for name, piece in group.items():
                    self._finish_piece(image, name, piece, size)
        self._finish_kernels(facts)
        if self._beside != before:
            self.save(facts, image)

    def _finish_piece(
        self, image: ProgramImage, name: str, piece: CompiledPiece, size: int | None
    ) -> None:
        from pcgsvc.compilers.inductor import InductorPiece

        if not isinstance(piece, InductorPiece) or piece.is_direct:
            return
        piece_facts = self._piece_facts(name, image.documents[name], image.schemas, size)
        facts = {**piece_facts, "form": "direct"}
        try:
            form, files = piece.to_direct(self.folder.path)
        except torch_private.NotDirectError as error:
            logger.info("piece %s will be loaded by Inductor: %s", name[:12], error)
            return
        if self._store.put_piece(
            key_of(facts), blob.pack(form, self.folder.path, files), facts=facts
        ):
            self._beside.add(key_of(facts))

    def _finish_kernels(self, facts: Mapping[str, Any]) -> None:
        made = {f for f in blob.snapshot(self.folder.path) - self._files if f.startswith("triton/")}
        if not made:
            return
        kernel_facts = {**facts, "kind": "kernels"}
        data = blob.pack(b"kernels", self.folder.path, made | self._kernel_files)
        if self._store.put_piece(key_of(kernel_facts), data, facts=kernel_facts):
            self._beside.add(key_of(kernel_facts))

    def _unpack_kernels(self, facts: Mapping[str, Any]) -> None:
        """Write the kernels that boundaries compiled for themselves where Triton looks for them."""
        key = key_of({**facts, "kind": "kernels"})
        found = self._store.get_piece(key) if key in self._beside else None
        if found is None or found.value is None:
            return
        self._unpack_toolchain()  # Triton's own helper, which they need as well
        before = blob.snapshot(self.folder.path)
        try:
            blob.unpack(found.value, self.folder.path)
            torch_private.settle_triton_cache(self.folder.path / "triton")
        except CompileError as error:
            logger.warning("cache: kernels of the boundaries: %s", error)
        self._kernel_files = blob.snapshot(self.folder.path) - before

    def _known(self, key: str) -> _Manifest:
        try:
            return _read_manifest(self._store.read(Kind.PROGRAM, key).payload)
        except MissError:
            return _Manifest()

    def _others(self, known: _Manifest, image: ProgramImage) -> Iterator[tuple[bytes, set[str]]]:
        """Yield the variants of an entry that an image does not replace, and their pieces."""
        for data in known.variants:
            try:
                other = from_json(data)
            except CompileError:  # of another version of ours
                continue
            if (other.reads, other.files) != (image.reads, image.files):
                yield data, set(self._piece_keys(other))

    def has_program(self, facts: Mapping[str, Any]) -> bool:
        """Whether there is an entry under these facts; not counted as a look-up."""
        return self._has(key_of(facts), Kind.PROGRAM)

    def _has(self, key: str, kind: Kind = Kind.PIECE) -> bool:
        try:
            self._store.read(kind, key)
        except MissError:
            return False
        return True

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
        reasons = []
        missing = [n for n in image.modules if n not in sys.modules]
        if missing:  # not imported here: a stored file does not say what code is run
            reasons.append(f"modules that registered its operators are not imported: {missing}")
        for place, digest in image.files.items():
            if file_digest(place) != digest:
                reasons.append(f"source file {path_of(place) or place} has changed")
        for name, identity in image.schemas.items():
            if op_identity(name) != identity:
                reasons.append(f"operator {name} is declared differently")
        added = new_boundaries(image, self._config.partition.splitting_ops)
        if added:
            reasons.append(f"operators {added} have become splitting ops")
        if not reasons:
            changed = first_difference(image.reads, module, constants)
            reasons = [] if changed is None else [f"read while tracing: {changed}"]
        if reasons:
            raise NoProgramError("; ".join(reasons))
        try:
            image.tree()
        except Exception as error:  # a class of results that nobody has registered here
            raise NoProgramError(f"the form of the result cannot be read: {error}") from error

    # -- pieces --

    def _piece_facts(
        self,
        key: str,
        document: Document,
        schemas: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> dict[str, Any]:
        """Return the facts of a piece; `schemas`: of its ops, as a stored program has them."""
        names = custom_ops(document)
        ops = {n: op_identity(n) if schemas is None else schemas.get(n, "absent") for n in names}
        outputs = len(document["outputs"])
        return piece_facts(
            key, self._config, self.environment, num_outputs=outputs, ops=ops, size=size
        )

    def _piece_keys(self, image: ProgramImage) -> list[str]:
        wanted = [*((None, h) for h in image.documents), *self.sized(image)]
        return [
            key_of(self._piece_facts(h, image.documents[h], image.schemas, size))
            for size, h in wanted
        ]

    def sized(self, image: ProgramImage) -> list[tuple[int, str]]:
        """Return (size, hash) of the pieces that a program has for exact sizes."""
        sizes = self._config.compiler.specialize_sizes
        return specialized(image.documents, image.predicate, sizes)

    def _load_pieces(self, image: ProgramImage) -> dict[str, CompiledPiece]:
        self.specialized = {}
        pieces: dict[str, CompiledPiece] = {}
        for size, name in [*((None, h) for h in image.documents), *self.sized(image)]:
            document = image.documents[name]
            facts = self._piece_facts(name, document, size=size)
            group = pieces if size is None else self.specialized.setdefault(size, {})
            direct = key_of({**facts, "form": "direct"})
            loaded = self._load_direct(direct, document, size) if direct in self._beside else None
            if loaded is not None:
                group[name] = loaded
                continue
            self._unpack_toolchain()
            found = self._store.get_piece(key_of(facts))
            if found.value is None:
                raise NoProgramError(f"piece {name[:12]}: {found.miss}")
            group[name] = self._load_piece(name, found.value, document, size)
        return pieces

    def _load_direct(self, key: str, document: Document, size: int | None) -> CompiledPiece | None:
        """Load the form that does without Inductor; None if that fails."""
        from pcgsvc.compilers.inductor import InductorPiece

        found = self._store.get_piece(key)
        if found.value is None:
            return None
        try:
            form = blob.unpack(found.value, self.folder.path)
            return InductorPiece.from_direct(
                form, self.folder.path, self._device.index or 0, *_signature(document, size)
            )
        except Exception as error:  # noqa: BLE001 - the driver may refuse a binary
            logger.warning(
                "piece %s: its direct form cannot be loaded (%s: %s); Inductor loads it",
                key[:12],
                type(error).__name__,
                error,
            )
            return None

    def _load_piece(
        self, name: str, data: bytes, document: Document, size: int | None = None
    ) -> CompiledPiece:
        """Make a piece of bytes whose digest the store has compared."""
        if not self._inductor:
            return EagerPiece.from_bytes(data, name)
        from pcgsvc.compilers.inductor import InductorPiece

        artifact = blob.unpack(data, self.folder.path)
        self.folder.ready_inductor()
        try:
            return InductorPiece.from_bytes(artifact, *_signature(document, size))
        except Exception as error:  # torch's loader raises whatever its pickle does
            raise NoProgramError(
                f"piece {name[:12]}: torch cannot load it ({type(error).__name__}: {error})"
            ) from error

    def piece(self, piece: Piece, dump_path: Path | None, size: int | None = None) -> CompiledPiece:
        """Return a compiled piece: loaded if some program has stored it, compiled otherwise.

        Args:
            piece: a region.
            dump_path: file that gets the source that the compiler generated.
            size: the only row count that it will run with; None: any.
        """
        assert piece.hash is not None
        assert piece.document is not None
        facts = self._piece_facts(piece.hash, piece.document, size=size)
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
            try:
                loaded = self._load_piece(piece.hash, made.value, piece.document, size)
            except (CompileError, NoProgramError) as error:
                logger.warning("cache: %s; compiled again", error)
                self._store.put_piece(key_of(facts), build().value, facts=facts)
                return fresh[0]
        except _UnsavedError as error:
            self._unsaved(piece.name, str(error))
            return error.piece
        self.counts.loaded += 1
        return loaded

    def _unsaved(self, what: str, why: str) -> None:
        self.counts.unsaved.append(f"{what} cannot be written down: {why}")
        logger.warning("cache: %s cannot be written down: %s", what, why)

    def _compile(
        self, piece: Piece, dump_path: Path | None, size: int | None
    ) -> tuple[CompiledPiece, bytes]:
        assert piece.document is not None
        if not self._inductor:
            eager = EagerPiece(piece.document)
            return eager, eager.to_bytes()
        from pcgsvc.compilers.inductor import compile_piece

        compiled = compile_piece(piece, self._config.compiler, dump_path, size=size)
        try:
            artifact = compiled.to_bytes()
            if not artifact:
                raise ValueError("torch gave no bytes")
        except Exception as error:  # torch's artifact format is young; a good compile still counts
            raise _UnsavedError(compiled, error) from error
        # All kernels of this build so far: one that an earlier piece has made as well is not made
        # again, and this piece must be able to do without that one.
        files = blob.snapshot(self.folder.path) - self._toolchain
        return compiled, blob.pack(artifact, self.folder.path, files)

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
        self._toolchain = blob.snapshot(self.folder.path)

    def _make_toolchain(self) -> None:
        from pcgsvc.compilers.inductor import compile_probe

        compile_probe(self._device)
        files = blob.snapshot(self.folder.path)  # tracing may have made some of them
        facts = self._toolchain_facts()
        data = blob.pack(b"toolchain", self.folder.path, files)
        if self._store.put_piece(key_of(facts), data, facts=facts):
            self._there.add(key_of(facts))

    def _unpack_toolchain(self) -> bool:
        key = key_of(self._toolchain_facts())
        if not self._inductor or key in self._there:
            return self._inductor
        found = self._store.get_piece(key)
        if found.value is None:
            return False
        try:
            blob.unpack(found.value, self.folder.path)
        except CompileError as error:
            logger.warning("cache: toolchain files: %s", error)
            return False
        self._there.add(key)
        return True

    def _toolchain_facts(self) -> dict[str, Any]:
        nothing: Document = {"rows": [], "outputs": []}
        return {**self._piece_facts("toolchain", nothing), "kind": "toolchain"}


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


def file_digest(place: str) -> str | None:
    """Return the sha256 of a file that `reads.files_of` named, or None if it cannot be read."""
    path = path_of(place)
    return None if path is None else digest_of(path)


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
    named = {d.name for d in differences}
    sources = any(name.startswith("source.") for name in named)
    settings = [d for d in differences if d.name.startswith("config.")]
    if settings:
        return settings
    follow = {"tensors.digest"} if "tensors" in named else set()
    return [
        d
        for d in differences
        if d.name not in follow and not (sources and d.name.startswith("module.code."))
    ]


@dataclass(frozen=True)
class _Manifest:
    """What a program entry holds."""

    variants: Sequence[bytes] = ()
    """Images, newest first."""
    beside: Sequence[str] = ()
    """Keys of entries that spare a start some work; it works without them."""


def _read_manifest(payload: bytes) -> _Manifest:
    try:
        tree = json.loads(payload)
        variants = [str(v).encode() for v in tree["variants"]]
        return _Manifest(variants, [str(key) for key in tree["beside"]])
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("cache: a program entry is malformed: %s", error)
        return _Manifest()
