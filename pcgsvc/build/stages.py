"""The stages that make a program: trace, split, compile, store.

In: a request, or what the stage before gave. Out: a traced graph, its partitions, an image with
compiled pieces, a `CompiledModel`. Each stage is timed; none is called here by another.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pcgsvc.build.dump import dump_source
from pcgsvc.build.environment import BuildEnvironment
from pcgsvc.build.load import ProgramLookup
from pcgsvc.cache.programs import file_digest
from pcgsvc.config import Compiler, Config, Strategy, captures
from pcgsvc.errors import CaptureError
from pcgsvc.events import Phases, count
from pcgsvc.forward.request import Request, check_forward
from pcgsvc.forward.results import refuse_subclasses
from pcgsvc.ops.breaks import HOST_READS, host_reads_refused
from pcgsvc.ops.collectives import is_among_many, unnamed_boundaries
from pcgsvc.partition.fx import check_aliases, partition_fx
from pcgsvc.partition.inductor import partition_inductor
from pcgsvc.program.guards import stored_guards
from pcgsvc.program.image import ProgramImage, image_of, unwritable_ops
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.pieces import Kind, Partition, Piece
from pcgsvc.program.program import CompiledPiece, Program
from pcgsvc.program.sources import files_of
from pcgsvc.trace.canonical import refuse_outputs
from pcgsvc.trace.dynamo import trace
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import op_names, user_line

logger = logging.getLogger(__name__)


class Split(NamedTuple):
    """A traced graph in pieces."""

    compiled: Partition
    """What is compiled: with `partition.strategy=inductor` one piece that breaks itself."""
    shown: Partition
    """The graph cut into regions and boundaries, as reports show it."""


@dataclass(frozen=True)
class MadeProgram:
    """A program before it is checked and stored."""

    model: CompiledModel
    regions: Partition | None = None
    """Its regions as FX graphs; None: it was loaded, or is not traced, and is not stored."""
    problems: list[str] = field(default_factory=list)
    """What keeps it from being stored."""


def trace_forward(request: Request, phases: Phases) -> TracedGraph:
    """Trace the module whole; runs no kernel. TraceError says at which line that is impossible."""
    with phases.phase("trace"):
        if not is_among_many():  # the others may have loaded the program, and would not run it
            refuse_subclasses(check_forward(request))
        traced = trace(request.bundle.module, request.inputs, request.constants)
    refuse_outputs(traced)
    return traced


def split(traced: TracedGraph, config: Config, phases: Phases) -> Split:
    """Cut the graph at its splitting ops, as the configured strategy does."""
    names, inductor = config.partition, config.compiler.name is Compiler.INDUCTOR
    with phases.phase("split"):
        unnamed = unnamed_boundaries(config)
        shown = partition_fx(traced, names.splitting_ops, names.extra_splitting_ops, unnamed)
        if inductor and names.strategy is Strategy.FX:
            check_aliases(shown)
        whole = names.strategy is Strategy.INDUCTOR
        compiled = partition_inductor(traced, shown) if whole else shown
    for note in shown.warnings:
        logger.info("%s", note)
    if captures(config):
        refuse_host_reads(shown)
    return Split(compiled, shown)


def refuse_host_reads(shown: Partition) -> None:
    """Refuse regions in which the host waits for a value, which no capture allows.

    Raises:
        CaptureError: with the lines, and the ways out.
    """
    regions = [piece for piece in shown.pieces if piece.kind is Kind.REGION]
    lines = [
        user_line(node)
        for piece in regions
        for node in piece.nodes
        if any(name in HOST_READS for name in op_names(node))
    ]
    if lines:
        raise CaptureError(host_reads_refused(lines))


def write_down(
    request: Request, traced: TracedGraph, parts: Split
) -> tuple[ProgramImage, list[str]]:
    """Return the program as data, and what keeps it from being stored.

    The image has the guards that must still hold when it is loaded.
    """
    module = request.bundle.module
    guards, problems = stored_guards(traced.guards, module, request.constants)
    problems += [
        f"captured tensor {name}: it is no parameter or buffer, so a new process cannot find it"
        for name in captured_tensors(traced)
    ]
    files = {f: d for f in files_of(traced.guards, module) if (d := file_digest(f))}
    image = image_of(traced, parts.compiled, parts.shown, guards=guards, files=files)
    problems += unwritable_ops(image.schemas)
    return image, problems


def captured_tensors(traced: TracedGraph) -> list[str]:
    """Return the names of bound tensors that are no parameter or buffer."""
    return [b.name for b in traced.bindings if b.kind == "constant"]


def compile_pieces(
    partition: Partition, image: ProgramImage, config: Config, env: BuildEnvironment
) -> tuple[ProgramImage, Mapping[str, CompiledPiece]]:
    """Compile each unique piece once, or load it where another program has stored it.

    Pieces for exact sizes are kept in `env.artifacts.specialized`.

    Returns:
        The image with what the compiler assumes of the row count, and the pieces by hash.
    """
    artifacts, unique = env.artifacts, partition.unique()
    asked = artifacts.pieces.sized(image)

    def compiled(piece: Piece, size: int | None = None) -> CompiledPiece:
        return compile_piece(piece, size, config, env)

    with env.phases.phase("compile", len(unique) + len(asked)):
        pieces = {key: compiled(piece) for key, piece in unique.items()}
        assumes = {k: tuple(p.assumes) for k, p in pieces.items() if p.assumes}
        image = replace(image, assumes=assumes)
        sized = artifacts.pieces.sized(image)
        _log_own_code(image, {size for size, _ in sized})
        for size, key in sized:
            artifacts.specialized.setdefault(size, {})[key] = compiled(unique[key], size)
    artifacts.kernels.start()
    return image, pieces


def _log_own_code(image: ProgramImage, sizes: Collection[int]) -> None:
    """Say for which sizes more is compiled than was asked for; warn of many."""
    for why, many in Counter(map(image.general.broken_by, sizes)).items():
        if why is not None:
            logger.log(
                logging.WARNING if many > _MANY_SIZES else logging.INFO,
                "compile: code of its own for %s, since that for all needs %s; fewer "
                "capture.sizes compile faster",
                count(many, "capture size"),
                why,
            )


_MANY_SIZES = 8


def compile_piece(
    piece: Piece, size: int | None, config: Config, env: BuildEnvironment
) -> CompiledPiece:
    """Compile or load one piece, for one size or for all; one unit of the phase."""
    source = dump_source(piece, size, config)
    done = env.artifacts.pieces.load_or_compile(piece, source, size)
    logger.debug("%s (%s): %d ops", piece.name, str(piece.hash)[:12], len(piece.nodes))
    env.phases.progress.advance()
    return done


def assemble(
    request: Request,
    traced: TracedGraph,
    image: ProgramImage,
    pieces: Mapping[str, CompiledPiece],
    env: BuildEnvironment,
) -> CompiledModel:
    """Return what was made as a model; nothing of it is stored."""
    return CompiledModel(
        module=request.bundle.module,
        arguments=request.arguments,
        image=image,
        program=Program(image.spec, pieces, env.artifacts.specialized),
        start="cold",
        counts=env.artifacts.pieces.counts,
        tensors={name: traced.tensors[name] for name in captured_tensors(traced)},
        ranks=env.ranks,
    )


def store_program(made: MadeProgram, found: ProgramLookup, env: BuildEnvironment) -> CompiledModel:
    """Store a model, where that is possible, and return it with what came of that."""
    artifacts, model = env.artifacts, made.model
    if made.regions is None:
        return model
    problems = [*found.problems, *made.problems]
    unsaved = artifacts.pieces.counts.unsaved
    unstored = [*problems, *unsaved]
    if found.facts is not None and not unstored and not artifacts.save(found.facts, model.image):
        unstored = [*unsaved] or [env.store.why_not_stored()]
    env.until_stored.close()
    refusal = [f"the program cannot be stored: {_first(problems)}"] if problems else []
    return replace(
        model,
        facts=None if unstored else found.facts,
        unstored=unstored,
        misses=[*found.misses, *refusal],
        warnings=[
            *model.warnings,
            *dict.fromkeys(artifacts.pieces.counts.problems),
            *(refusal if env.store.enabled else []),
        ],
    )


def _first(problems: Sequence[str]) -> str:
    """Return the first three of several reasons, each once, and how many more there are."""
    each = list(dict.fromkeys(problems))
    more = f"; and {len(each) - 3} more" if len(each) > 3 else ""
    return "; ".join(each[:3]) + more
