"""Stored programs: between the stages and the store.

In: facts, a module, a program image. Out: the image with its compiled pieces, loaded or stored.
Knows nothing of graphs.

A program entry holds up to `MAX_VARIANTS` images under one key: instances that look alike from
outside but differ in something that tracing read. Which one fits is found by reading it again.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch

from pcgsvc.cache.envelope import Kind, MissError
from pcgsvc.cache.pieces import NoPieceError, Pieces
from pcgsvc.cache.reports import ABSENT, FactDifference, ProgramInfo, differing_facts
from pcgsvc.cache.store import Store
from pcgsvc.cache.toolchain import BoundaryKernels
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.config import Config
from pcgsvc.config.choices import Job
from pcgsvc.errors import CacheError, CompileError
from pcgsvc.ops.collectives import rank_and_world
from pcgsvc.program.facts import file_digest as digest_of
from pcgsvc.program.guards import first_broken
from pcgsvc.program.image import ProgramImage, from_json, new_boundaries, op_identity, to_json
from pcgsvc.program.keys import key_of
from pcgsvc.program.program import CompiledPiece
from pcgsvc.program.sources import path_of

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
        self._config, self._store, self.folder = config, store, folder
        self.pieces = Pieces(config, device, store, folder)
        self.kernels = BoundaryKernels(store, folder)
        self.specialized: dict[int, dict[str, CompiledPiece]] = {}
        """Pieces of the program for exact sizes, by size and hash."""
        self._elsewhere = _Manifest()
        """What the remote has under the key of a program that is stored here, and does not fit."""
        self._companion_keys: set[str] = set()
        """Keys of what the stored program has beside its pieces; see `finish`."""
        # Where it is told with its values as well, the names of the facts would stand twice.
        self._nearest_was_named = config.cache.require_warm or config.job is Job.CACHE

    def drop(self, image: ProgramImage, hashes: Collection[str]) -> None:
        """Forget pieces of a program that compute something wrong; see `Pieces.drop`."""
        self.pieces.drop(image, hashes)
        for group in self.specialized.values():
            for name in hashes:
                group.pop(name, None)

    # ---- loading ---------------------------------------------------------------------------------

    def lock(self, facts: Mapping[str, Any]) -> AbstractContextManager[bool]:
        """Keep other processes from building the same program; see `Store.lock`."""
        return self._store.lock(key_of(facts), self._config.cache.lock_timeout_s)

    def load(
        self, facts: Mapping[str, Any], module: Callable[..., Any], constants: Mapping[str, Any]
    ) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        """Return the stored program of these facts, ready to run.

        Raises:
            NoProgramError: there is none, or none that still holds; the message says why.
        """
        found = self._store.get_program(key_of(facts))
        if found.value is None:
            raise NoProgramError(f"{found.miss}{self._versions(facts)}{self._nearest(facts)}")
        reasons = []
        for manifest, data in self._candidates(key_of(facts), found.value):
            self._companion_keys = set(manifest.companion_keys)
            try:
                image = from_json(data)
                self._still_holds(image, module, constants)
                pieces, self.specialized = self.pieces.load(image, self._companion_keys)
            except (CompileError, NoPieceError, NoProgramError) as error:
                reasons.append(str(error))
                continue
            if self.kernels.key(facts) in self._companion_keys:
                if self.pieces.toolchain is not None:
                    self.pieces.toolchain.unpack()  # Triton's own helper, which they need as well
                self.kernels.unpack(facts)
            self.kernels.start()
            return image, pieces
        raise NoProgramError("; ".join(dict.fromkeys(reasons)) or "no program in the entry")

    def _candidates(self, key: str, value: bytes) -> Iterator[tuple[_Manifest, bytes]]:
        """Yield the variants of an entry, then those that only the remote has under its key."""
        known = _read_manifest(value)
        yield from ((known, data) for data in known.variants)
        other = None if self._store.sharing is None else self._store.sharing.other_program(key)
        if other is not None:
            self._elsewhere = _read_manifest(other)
            new = [data for data in self._elsewhere.variants if data not in known.variants]
            yield from ((self._elsewhere, data) for data in new)

    def load_all(self, info: ProgramInfo) -> str | None:
        """Load every program under one key as a start does, but for what a module must have.

        Args:
            info: of the entry, which was stored with this build's compiler settings.

        Returns:
            Why this machine or process has no use for it; None: all is loaded.

        Raises:
            NoProgramError: it is meant for this machine, and cannot be loaded.
        """
        differences = differing_facts(info.facts, self.pieces.environment)
        differing = [d.name for d in differences if d.wanted != ABSENT]
        if differing:
            return f"made where {', '.join(differing[:4])} differ"
        manifest = _read_manifest(self._store.read(Kind.PROGRAM, info.key).payload)
        if not manifest.variants:
            raise NoProgramError("its entry is malformed")
        try:
            for data in manifest.variants:
                image = from_json(data)
                missing = [name for name in image.modules if name not in sys.modules]
                if missing:
                    return (
                        f"its operators come from modules that are not imported: {missing}; "
                        "name the model, as for a run, and they are"
                    )
                image.tree()
                self.pieces.load(image, set(manifest.companion_keys))
        except (CompileError, NoPieceError) as error:
            raise NoProgramError(str(error)) from error
        return None

    def _versions(self, facts: Mapping[str, Any]) -> str:
        """Return of which versions the remote's programs are, if none is of this one."""
        sharing = None if self._store.refresh else self._store.sharing
        versions = () if sharing is None else sharing.foreign_versions(facts)
        return f", whose programs are of {', '.join(versions[:4])}" if versions else ""

    def _nearest(self, facts: Mapping[str, Any]) -> str:
        """Return the names of what differs from the nearest stored program, once per build."""
        if self._nearest_was_named or self._store.refresh:
            return ""
        self._nearest_was_named = True
        nearest = self._store.nearest(facts)
        if nearest is None or not nearest.differences:
            return ""
        names = [d.name for d in _causes(nearest.differences)]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"; the nearest stored program differs in {', '.join(names[:8])}{more}"

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
        added = new_boundaries(image, self._config)
        if added:
            reasons.append(f"operators {added} have become splitting ops")
        if not reasons:
            changed = first_broken(image.guards, module, constants)
            reasons = [] if changed is None else [f"read while tracing: {changed}"]
        if reasons:
            raise NoProgramError("; ".join(reasons))
        try:
            image.tree()
        except Exception as error:  # a class of results that is not registered here
            raise NoProgramError(f"the form of the result cannot be read: {error}") from error

    # ---- storing ---------------------------------------------------------------------------------

    def save(self, facts: Mapping[str, Any], image: ProgramImage) -> bool:
        """Store a program beside those that differ from it in what tracing read."""
        if image.out_tree is None:
            self.pieces.counts.not_saved(
                "the result", "a class in it cannot be found again by its name"
            )
            return False
        with self.lock(facts):  # processes of one group store their own variants
            return self._save(facts, image)

    def _save(self, facts: Mapping[str, Any], image: ProgramImage) -> bool:
        key, toolchain = key_of(facts), self.pieces.toolchain
        known, has_piece = self._known(key), partial(self._store.has, Kind.PIECE)
        variants, pieces = [to_json(image).decode()], set(self.pieces.keys(image))
        _, world = rank_and_world() or (0, 1)
        max_variants = MAX_VARIANTS * world
        if toolchain is not None and toolchain.stored:
            pieces.add(toolchain.key)  # goes where the program goes, or a fresh machine compiles it
        for other, needed in self._others(known, image):
            if len(variants) < max_variants and all(map(has_piece, needed - pieces)):
                variants.append(other.decode())
                pieces |= needed
        beside = sorted({*filter(has_piece, known.companion_keys), *self._companion_keys})
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
        keys = [
            self.pieces.store_direct(image, name, piece, size)
            for size, group in [(None, pieces), *self.specialized.items()]
            for name, piece in group.items()
        ]
        new = {key for key in [*keys, self.kernels.store(facts)] if key is not None}
        if not new <= self._companion_keys:
            self._companion_keys |= new
            self.save(facts, image)

    def _known(self, key: str) -> _Manifest:
        """Return what is stored under a key, here and on the remote."""
        try:
            known = _read_manifest(self._store.read(Kind.PROGRAM, key).payload)
        except MissError:
            known = _Manifest()
        variants, companions = (
            list(dict.fromkeys([*ours, *theirs]))
            for ours, theirs in zip(astuple(known), astuple(self._elsewhere), strict=True)
        )
        return _Manifest(variants, companions)

    def _others(self, known: _Manifest, image: ProgramImage) -> Iterator[tuple[bytes, set[str]]]:
        """Yield the variants of an entry that an image does not replace, and their pieces.

        Those that capture sizes have on their own are for the sizes of whoever stored them.
        """
        for data in known.variants:
            try:
                other = from_json(data)
            except CompileError:  # of another version of ours
                continue
            if (other.guards, other.files) != (image.guards, image.files):
                general = self.pieces.keys(replace(other, assumes={}))
                own = filter(partial(self._store.has, Kind.PIECE), self.pieces.keys(other))
                yield data, {*general, *own}


def file_digest(place: str) -> str | None:
    """Return the sha256 of a file that `sources.files_of` named, or None if it cannot be read."""
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
    companion_keys: Sequence[str] = ()
    """Keys of entries that spare a start some work; it works without them."""


def _read_manifest(payload: bytes) -> _Manifest:
    try:
        tree = json.loads(payload)
        variants = [str(v).encode() for v in tree["variants"]]
        return _Manifest(variants, [str(key) for key in tree["beside"]])
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("cache: a program entry is malformed: %s", error)
        return _Manifest()
