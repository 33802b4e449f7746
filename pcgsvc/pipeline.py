"""The pipeline: config and model -> runner, the stages in order.

In: a validated config and a model. Out: a `Runner` with its report. Each stage is a function of an
earlier module; this file only hands results on, counts, and times.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pcgsvc.cache.pieces import PieceCounts
from pcgsvc.cache.programs import Artifacts
from pcgsvc.cache.store import Store
from pcgsvc.capture.capture import CaptureOptions, GraphTable, capture_entries
from pcgsvc.capture.cuda import CudaEngine
from pcgsvc.capture.plan import BatchDescriptor, no_uniform_size, resolve_boundaries, wanted_entries
from pcgsvc.capture.recorded import RecordedEngine
from pcgsvc.check.verify import refusal, verify
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.config import Config, Graphs
from pcgsvc.errors import ConfigError, VerifyError
from pcgsvc.events import Progress, Silent, log_event, phase, phase_events
from pcgsvc.forward.arguments import DynamicDims, MakeInputs
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.process import BUILD_LOCK
from pcgsvc.forward.request import Request, attention_of, make_samples, make_workspace, request_for
from pcgsvc.forward.samples import Samples
from pcgsvc.forward.workspace import Workspace, preserved, usable_sizes
from pcgsvc.models.request import request_of
from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.modes import Resolution
from pcgsvc.ops.support import Support
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.outputs import OutputPlan
from pcgsvc.program.pieces import Kind
from pcgsvc.program.program import Program
from pcgsvc.report.report import build_report
from pcgsvc.serve.dispatch import DispatchTable
from pcgsvc.serve.runner import Runner, RunnerParts
from pcgsvc.stages import Stages

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Built:
    """What the stages before capture gave; `job=compile` ends here."""

    request: Request
    image: ProgramImage
    program: Program | None
    """None for a plan, which compiles nothing."""
    resolution: Resolution
    support: Support
    attention: type[AttentionBackend] | None
    sizes: list[int]
    """Capture sizes, ascending."""
    start: str
    """`cold` (traced here) or `warm` (loaded)."""
    tally: PieceCounts
    cache: dict[str, Any]
    """The report's words on the disk cache."""
    seconds: dict[str, float]
    warnings: list[str]
    captured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that the forward holds and that are no parameter or buffer, by binding name."""
    finish: Callable[[], None]
    """Stores what only running the program tells, once it has run; see `Artifacts.finish`."""
    workspace: Workspace | None = None
    """Set where the forward had to be run to learn what it does."""


# ---- doors ---------------------------------------------------------------------------------------


def build_runner(
    module: Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_dims: DynamicDims,
    config: Config | None = None,
    make_inputs: MakeInputs | None = None,
    attention: AttentionSpec | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Build, or start warm, a runner for any `nn.Module` or callable.

    Args:
        module: in eval mode; its parameters are used where they are, never copied.
        example_inputs: a tuple of arguments, or a dict by argument name. Tensors become inputs of
            the runner; everything else is frozen into the graph, and a call that passes another
            value is refused.
        dynamic_dims: which dimension, or dimensions, of which tensor input carry the rows
            (tokens), by name; all of them are one number.
        config: settings; `model` is not read, and `attention` only with `attention=`. None: the
            defaults.
        make_inputs: `make_inputs(rows, generator)` gives valid tensor inputs by name, for
            verification; None: drawn from a normal distribution, integers from the examples'.
        attention: for a module that calls `pcgsvc::attention`: what its layers need. The runner
            then has a paged KV cache, and the backend that `config.attention` names.
        progress: hears of long phases.

    Raises:
        ConfigError: a setting or an argument is wrong.
        TraceError, SplitError, CompileError, CaptureError: a stage failed.
        CacheError: the disk cache is not safe to use, or `cache.require_warm=true` met a miss.
        VerifyError: a captured entry does not give what the module gives.
    """
    request = request_for(
        module,
        example_inputs,
        dynamic_dims,
        config or Config(),
        make_inputs=make_inputs,
        attention=attention,
    )
    return build(request, progress or Silent())


def build_from_config(
    config: Config, progress: Progress | None = None, *, check: bool | None = None
) -> Runner:
    """Build the configured model and a runner for it.

    Args:
        config: as composed or resolved.
        progress: hears of long phases.
        check: whether captured entries are verified; None: as `capture.self_check` says.
    """
    progress = progress or Silent()
    return build(request_of(config, progress), progress, check=check)


def build(request: Request, progress: Progress, *, check: bool | None = None) -> Runner:
    """Trace or load, compile, capture, verify; report and runner are made of what is left."""
    started = time.perf_counter()
    config = request.config
    with _building(request) as folder, _open_store(config) as store:
        built = prepare(request, folder, store, progress)
        tensors = {**tensors_of(request.bundle.module), **built.captured}
        workspace = built.workspace or make_workspace(
            request, built.image.spec.bindings, built.image.bind(tensors)
        )
        samples = make_samples(request, workspace)
        with preserved({name: workspace.tensors[name] for name in built.image.mutated}):
            table = _capture(built, workspace, samples, progress)
            built.finish()
            built.seconds["total"] = time.perf_counter() - started + request.weights_s
            parts = _parts(built, workspace, table)
            rows = None
            if config.capture.self_check if check is None else check:
                rows = _verify(request, parts, progress)
                built.image = replace(built.image, predicate=parts.predicate)
            parts.report = build_report(built, table, workspace)
            if rows is not None:
                parts.report["verify"] = rows
            wrong = refusal(parts, rows or [])
            if wrong is not None:
                _at_close(folder, workspace)
                raise VerifyError(wrong, parts.report)
            parts.dispatch = _dispatch_table(built, workspace, table)
            runner = Runner(parts, at_close=lambda: _at_close(folder, workspace))
    if config.strict and table.skipped:
        runner.close()
        raise ConfigError(f"strict=true, and some sizes were not captured: {table.skipped}")
    return runner


def _at_close(folder: CompilerFolder, workspace: Workspace) -> None:
    folder.close()
    stream, workspace.stream = workspace.stream, None
    BUILD_LOCK.give_stream(stream)


def prepare_only(request: Request, progress: Progress) -> Built:
    """Run the stages before capture; `job=compile`."""
    with _building(request) as folder, _open_store(request.config) as store:
        try:
            built = prepare(request, folder, store, progress)
            built.finish()
            return built
        finally:
            folder.close()


@contextmanager
def _building(request: Request) -> Iterator[CompilerFolder]:
    """Hold the build lock, fix torch's modes, and give the compilers a folder of ours."""
    folder = CompilerFolder()
    plain = torch.autocast(request.device.type, enabled=False)  # the caller's is not built in
    with BUILD_LOCK, torch.inference_mode(False), torch.no_grad(), plain:
        try:
            with folder.in_use(request.config.compiler.threads):
                yield folder
        except BaseException:
            folder.close()
            raise


# ---- the stages ----------------------------------------------------------------------------------


def prepare(request: Request, folder: CompilerFolder, store: Store, progress: Progress) -> Built:
    """Load the program, or trace, split and compile it; then resolve the mode."""
    config = request.config
    if config.compiler.passes:
        from pcgsvc.compilers.passes import find_passes

        find_passes(config.compiler.passes)  # an unknown name is told before anything is traced
    seconds = dict.fromkeys(
        ("import", "weights", "trace", "split", "compile", "load", "warmup", "capture", "total"),
        0.0,
    )
    seconds["weights"] = request.weights_s
    artifacts = Artifacts(config, request.device, store, folder)
    stages = Stages(request, artifacts, store, seconds, progress)
    image, pieces = stages.run()
    cache: dict[str, Any] = {
        "mode": config.cache.mode.value,
        "dir": str(store.folder.data) if store.folder is not None else None,
        "program_key": stages.key,
        "hits": store.counts.hits,
        "misses": store.counts.misses,
        "miss_reasons": list(
            dict.fromkeys(
                [
                    *stages.misses,
                    *store.counts.miss_reasons,
                    *(f"cannot be written down: {u}" for u in artifacts.tally.unsaved),
                ]
            )
        ),
        "bytes": store.num_bytes(),
    }
    for reason in cache["miss_reasons"]:
        if reason not in stages.misses:  # those are logged where they are met
            log_event(logger, logging.DEBUG, "cache_miss", "cache: %s", reason, reason=reason)
    logger.info(
        "%s start: %d ops in %d regions (%d unique) and %d boundaries; %d compiled, %d loaded",
        stages.start,
        sum(image.ops.values()),
        image.count(Kind.REGION),
        image.unique_regions,
        image.count(Kind.BOUNDARY),
        artifacts.tally.compiled,
        artifacts.tally.loaded,
    )
    sizes, dropped = usable_sizes(config)
    attention = attention_of(request)
    resolution, support = resolve_boundaries(config, image, attention)
    built = Built(
        request=request,
        image=image,
        program=Program(image.spec, pieces, artifacts.specialized),
        resolution=resolution,
        support=support,
        attention=attention,
        sizes=sizes,
        start=stages.start,
        tally=artifacts.tally,
        cache=cache,
        seconds=seconds,
        warnings=[
            *resolution.reasons,
            *dropped,
            *no_uniform_size(resolution, sizes, config.capture.uniform_query_len),
            *stages.warnings,
        ],
        workspace=stages.workspace,
        captured=stages.captured,
        finish=stages.finish,
    )
    tell(built)
    return built


def tell(built: Built) -> None:
    """Log what is not done as asked; ConfigError under `strict=true`."""
    for warning in built.warnings:
        logger.warning("%s", warning)
    if built.request.config.strict and built.warnings:
        raise ConfigError(
            "strict=true, and what was asked for is not done: " + "; ".join(built.warnings)
        )


def _open_store(config: Config) -> Store:
    return Store.open(config.cache.dir, mode=config.cache.mode, max_bytes=config.cache.max_bytes)


def _capture(
    built: Built, workspace: Workspace, samples: Samples, progress: Progress
) -> GraphTable:
    """Capture what the resolved mode wants."""
    config, program = built.request.config, built.program
    assert program is not None
    if config.capture.graphs is Graphs.OFF:
        return GraphTable()
    engine: CudaEngine | RecordedEngine
    if workspace.stream is not None:
        engine = CudaEngine(workspace.stream, config.capture.error_mode.value)
    else:
        engine = RecordedEngine()
    wanted = wanted_entries(
        built.resolution,
        built.support,
        built.sizes,
        config.capture.uniform_query_len,
    )

    def load(descriptor: BatchDescriptor) -> Any:
        size = descriptor.num_tokens
        batch = samples.batch(size, uniform=descriptor.uniform)
        workspace.load(samples.inputs(size), size, size)
        return batch

    options = CaptureOptions(
        warmup_calls=config.capture.warmup_calls,
        memory_budget=config.capture.memory_budget,
        uniform_query_len=config.capture.uniform_query_len,
        profile_ranges=config.debug.profile_ranges,
    )
    progress.start("capture", len(wanted))
    with phase_events(logger, "capture", len(wanted)) as said, workspace.on_stream():
        table = capture_entries(
            program,
            workspace,
            engine,
            wanted,
            predicate=built.image.predicate,
            options=options,
            prepare=load,
            on_entry=lambda key: progress.advance(),
        )
        graphs = sum(e.num_graphs for e in table.entries.values())
        said.append(f"{table.warmup_seconds:.3f} s of them warm-up")
        said.append(f"{len(table.entries)} entries, {graphs} graphs ({engine.name})")
        said.append(f"{table.pool_bytes / 2**20:.1f} MiB pool")
    progress.stop()
    built.seconds["warmup"] = table.warmup_seconds
    built.seconds["capture"] = table.capture_seconds
    return table


def _verify(request: Request, parts: RunnerParts, progress: Progress) -> list[dict[str, Any]]:
    """Verify every entry on samples that capture has not seen."""
    config = request.config
    samples = make_samples(request, parts.workspace, seed=config.seed + 1)
    with phase("verify", {"verify": 0.0}, progress, total=len(parts.table.entries)):
        seed = random.Random(config.seed).getrandbits(32)
        return verify(parts, samples, seed=seed, on_entry=progress.advance)


def _dispatch_table(built: Built, workspace: Workspace, table: GraphTable) -> DispatchTable:
    return DispatchTable(
        built.resolution,
        table.entries,
        uniform_query_len=built.request.config.capture.uniform_query_len,
        max_reqs=workspace.max_reqs,
        skipped=table.skipped,
    )


def _parts(built: Built, workspace: Workspace, table: GraphTable) -> RunnerParts:
    request, image, program = built.request, built.image, built.program
    assert program is not None
    outputs = OutputPlan(
        leaves=list(image.outputs),
        constants=image.constants,
        tree=image.tree(),
        specs=list(image.output_specs),
    )
    return RunnerParts(
        config=request.config,
        module=request.bundle.module,
        program=program,
        workspace=workspace,
        table=table,
        dispatch=_dispatch_table(built, workspace, table),
        predicate=image.predicate,
        outputs=outputs,
        arguments=request.arguments,
        make_inputs=request.bundle.make_inputs,
        tokenizer=request.bundle.tokenizer,
        is_language_model=request.bundle.is_language_model,
        embedding=request.bundle.embedding,
        mutated=list(image.mutated),
    )
