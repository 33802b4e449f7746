"""Where a program comes from: the store, or the stages that make it.

In: a request and the stored programs. Out: a program image and its compiled pieces. Traces, splits
and compiles; knows nothing of capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.cache.programs import Artifacts, NoProgramError, file_digest, require_warm
from pcgsvc.cache.store import Store
from pcgsvc.config import CacheMode, Compiler, Strategy
from pcgsvc.errors import CacheError
from pcgsvc.events import Progress, log_event, phase
from pcgsvc.forward.objects import tensors_held, tensors_of
from pcgsvc.forward.request import Request, make_samples, make_workspace
from pcgsvc.forward.specs import Binding
from pcgsvc.forward.workspace import Workspace, preserved, usable_sizes
from pcgsvc.partition.breakable import (
    PIECE,
    Learned,
    ModulePiece,
    boundary_names,
    can_be_put_back,
    learn,
)
from pcgsvc.partition.fx import check_aliases, partition_fx
from pcgsvc.partition.inductor import partition_inductor
from pcgsvc.partition.submodules import chosen, compile_submodules
from pcgsvc.program.facts import program_facts
from pcgsvc.program.forms import NotCanonicalError
from pcgsvc.program.guards import stored_guards
from pcgsvc.program.image import ProgramImage, image_of
from pcgsvc.program.keys import key_of
from pcgsvc.program.pieces import Partition, Piece
from pcgsvc.program.program import Boundaries, CompiledPiece
from pcgsvc.program.sources import files_of
from pcgsvc.trace.canonical import refuse_outputs
from pcgsvc.trace.dynamo import trace
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.rows import Document, python_of

logger = logging.getLogger(__name__)


class Stages:
    """Where a program comes from: the store, or the stages that make it."""

    def __init__(
        self,
        request: Request,
        artifacts: Artifacts,
        store: Store,
        seconds: dict[str, float],
        progress: Progress,
    ) -> None:
        self._request, self._config = request, request.config
        self._artifacts, self._store, self._folder = artifacts, store, artifacts.folder
        self._seconds, self._progress = seconds, progress
        self.start = "cold"
        self.key: str | None = None
        self.misses: list[str] = []
        self.warnings: list[str] = []
        self.captured: dict[str, torch.Tensor] = {}
        self.workspace: Workspace | None = None
        self.finish: Callable[[], None] = lambda: None
        """Stores what only running the program tells; see `Artifacts.finish`."""

    def run(self) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        """Return the program and its pieces."""
        if self._config.partition.strategy is Strategy.BREAKABLE:
            return self._learn()
        return self.load_or_make()

    def _learn(self) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        """Run the forward as it is; there is nothing to trace and nothing to store."""
        request = self._request
        module = request.bundle.module
        learned, self.workspace, boundaries = learn_forward(request, self._seconds, self._progress)
        self.warnings += learned.warnings
        self.misses.append("partition.strategy=breakable: the forward is run anew at each start")
        piece = ModulePiece(module, [s.name for s in request.inputs], request.constants, boundaries)
        piece.kernels = learned.image.ops["kernel"]
        if self._config.compiler.name is Compiler.INDUCTOR and isinstance(module, torch.nn.Module):
            self._compile_submodules(module, piece, learned)
        return learned.image, {PIECE: piece}

    def _compile_submodules(
        self, module: torch.nn.Module, piece: ModulePiece, learned: Learned
    ) -> None:
        """Compile the parts of an untraced model that hit no break."""
        with phase("import", self._seconds, self._progress):
            self._ready_compilers(inductor=True)
        names = chosen(module, learned.one, self._config.partition.compile_modules)
        with phase("compile", self._seconds, self._progress, total=len(names)):
            self._artifacts.prepare_toolchain()
            piece.forwards, warnings = compile_submodules(
                module, names, learned.one, learned.other, self._compile
            )
        self.warnings += warnings

    def load_or_make(self) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        """Return the program, loaded if the store has one that fits."""
        facts = self._facts()
        if facts is None:
            if self._config.cache.require_warm:
                raise CacheError(f"cache.require_warm=true, and {self.misses[-1]}")
            return self._make(None)
        self.key = key_of(facts)
        found = self._load(facts)
        if found is not None:
            return found
        if self._config.cache.require_warm:
            raise require_warm(self._store, facts, self.misses[-1])
        with self._artifacts.lock(facts) as held:
            # Whoever held the lock before may have stored it meanwhile.
            there = held and self._store.writable and self._artifacts.has_program(facts)
            found = self._load(facts) if there else None
            return found or self._make(facts)

    def _facts(self) -> dict[str, Any] | None:
        request = self._request
        try:
            return program_facts(
                self._config,
                request.bundle.module,
                request.inputs,
                request.constants,
                request.device,
                request.bundle.facts,
            )
        except NotCanonicalError as error:
            self._uncacheable([f"constant arguments: {error}"])
            return None

    def _load(
        self, facts: Mapping[str, Any]
    ) -> tuple[ProgramImage, dict[str, CompiledPiece]] | None:
        with phase("load", self._seconds, self._progress):
            try:
                found = self._artifacts.load(
                    facts, self._request.bundle.module, self._request.constants
                )
            except NoProgramError as error:
                reason = str(error)  # not the error: a log record would keep its frames alive
                if reason not in self.misses:
                    self.misses.append(reason)
                    words = "cache: no stored program fits: %s"
                    log_event(logger, logging.INFO, "cache_miss", words, reason, reason=reason)
                return None
        self._dump_loaded(*found)
        self.start = "warm"
        self.finish = partial(self._artifacts.finish, facts, *found)
        return found

    def _make(
        self, facts: Mapping[str, Any] | None
    ) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        inductor = self._config.compiler.name is Compiler.INDUCTOR
        traced, plan = trace_and_split(
            self._request,
            self._seconds,
            self._progress,
            ready=partial(self._ready_compilers, inductor=inductor),
        )
        whole = self._config.partition.strategy is Strategy.INDUCTOR
        partition = partition_inductor(traced, plan) if whole else plan
        module, constants = self._request.bundle.module, self._request.constants
        guards, problems = stored_guards(traced.guards, module, constants)
        self.captured = {
            b.name: traced.tensors[b.name] for b in traced.bindings if b.kind == "constant"
        }
        problems += [
            f"captured tensor {b.name}: it is no parameter or buffer, so a new process cannot "
            "find it"
            for b in traced.bindings
            if b.kind == "constant"
        ]
        files = {f: d for f in files_of(traced.guards, module) if (d := file_digest(f))}
        image = image_of(traced, partition, plan, guards=guards, files=files)
        unique, sized = partition.unique(), self._artifacts.sized(image)
        with phase("compile", self._seconds, self._progress, total=len(unique) + len(sized)):
            self._artifacts.prepare_toolchain()
            pieces = {key: self._compile(piece) for key, piece in unique.items()}
            for size, key in sized:
                special = self._artifacts.specialized.setdefault(size, {})
                special[key] = self._compile(unique[key], size)
        if problems:
            self._uncacheable(problems)
        elif facts is not None and not self._artifacts.tally.unsaved:
            self._artifacts.save(facts, image)
            self.finish = partial(self._artifacts.finish, facts, image, pieces)
        return image, pieces

    def _compile(self, piece: Piece, size: int | None = None) -> CompiledPiece:
        folder = self._config.debug.dump_dir
        dump_path = None
        if folder is not None and piece.document is not None:
            _dump_document(Path(folder), piece.name, piece.document)
            dump_path = _generated_path(Path(folder), piece.name, size)
        compiled = self._artifacts.piece(piece, dump_path, size)
        logger.debug("%s (%s): %d ops", piece.name, str(piece.hash)[:12], len(piece.nodes))
        self._progress.advance()
        return compiled

    def _dump_loaded(self, image: ProgramImage, pieces: Mapping[str, CompiledPiece]) -> None:
        """Write what `_compile` writes, of pieces that were loaded."""
        if self._config.debug.dump_dir is None:
            return
        folder = Path(self._config.debug.dump_dir)
        names = {s.piece: s.name for s in reversed(image.spec.steps) if s.piece is not None}
        for key, document in image.documents.items():
            _dump_document(folder, names[key], document)
        if self._config.compiler.name is not Compiler.INDUCTOR:
            return
        for size, group in [(None, pieces), *self._artifacts.specialized.items()]:
            for key, piece in group.items():
                self._dump_generated(_generated_path(folder, names[key], size), piece)

    def _dump_generated(self, path: Path, piece: CompiledPiece) -> None:
        from pcgsvc.compilers.inductor import InductorPiece

        try:
            if isinstance(piece, InductorPiece):
                path.write_text(piece.generated())
        except Exception as error:  # noqa: BLE001 - torch's artifact format is young
            words = f"{type(error).__name__}: {error}"
            logger.warning("debug.dump_dir: %s cannot be written: %s", path.name, words)

    def _ready_compilers(self, *, inductor: bool) -> None:
        if inductor:
            self._folder.ready_inductor()
        torch_private.import_compilers(inductor=inductor)

    def _uncacheable(self, problems: list[str]) -> None:
        words = "the program cannot be stored: " + "; ".join(problems)
        self.misses.append(words)
        if self._config.cache.mode is not CacheMode.OFF:
            self.warnings.append(words)


def _dump_document(folder: Path, name: str, document: Document) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.fx.py").write_text(python_of(document, "piece"))


def _generated_path(folder: Path, name: str, size: int | None) -> Path:
    suffix = "" if size is None else f".size_{size}"
    return folder / f"{name}{suffix}.inductor.py"


def trace_and_split(
    request: Request,
    seconds: dict[str, float],
    progress: Progress,
    *,
    ready: Callable[[], None],
) -> tuple[TracedGraph, Partition]:
    """Trace the model and cut it by the `fx` strategy, of which every traced strategy makes use.

    Args:
        request: what is built.
        seconds: gets the phases' times.
        progress: hears of the phases.
        ready: imports what is needed, so that the seconds it takes can be told apart.
    """
    config = request.config
    with phase("import", seconds, progress):
        ready()
    with phase("trace", seconds, progress):
        traced = trace(request.bundle.module, request.inputs, request.constants)
    refuse_outputs(traced)
    with phase("split", seconds, progress):
        names = config.partition
        partition = partition_fx(traced, names.splitting_ops, names.extra_splitting_ops)
        if config.compiler.name is Compiler.INDUCTOR and names.strategy is Strategy.FX:
            check_aliases(partition)
    for note in partition.warnings:
        logger.info("%s", note)
    return traced, partition


def learn_forward(
    request: Request, seconds: dict[str, float], progress: Progress
) -> tuple[Learned, Workspace, Boundaries]:
    """Run an untraced model's forward to learn what it returns and where it breaks."""
    names, module = request.config.partition, request.bundle.module
    boundaries = boundary_names(names.splitting_ops, names.extra_splitting_ops)
    inputs = [Binding(kind="input", name=s.name, spec=None) for s in request.inputs]
    own = tensors_of(module)
    if request.planned is None:  # a plan has no memory to change
        known = {id(t) for t in own.values()}
        own |= {n: t for n, t in tensors_held(module).items() if id(t) not in known}
    workspace = make_workspace(request, inputs, own)
    state = {
        n: t for n, t in own.items() if not isinstance(t, torch.nn.Parameter) and can_be_put_back(t)
    }
    largest = workspace.max_tokens
    with (
        phase("split", seconds, progress),
        workspace.on_stream(),
        preserved(state),
    ):
        learned = learn(
            module,
            workspace,
            make_samples(request, workspace),
            request.constants,
            boundaries,
            (largest, max(1, largest - 1)),
            min(usable_sizes(request.config)[0]),
        )
    return learned, workspace, boundaries
