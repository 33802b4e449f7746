"""The pipeline: config and model -> runner, the stages in order.

In: a validated config and a model. Out: a `Runner` with its report. Each stage is a function of an
earlier module; this file only hands results on, counts, and times.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pcgsvc.arguments import bundle_specs, input_specs, resampler, split_arguments
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.config import Compiler, Config, Graphs, resolve, validate
from pcgsvc.devices import device_of, dtype_of
from pcgsvc.dispatch import (
    BatchDescriptor,
    DispatchTable,
    Resolution,
    resolve_mode,
    wanted_entries,
)
from pcgsvc.errors import ConfigError, TraceError, VerifyError
from pcgsvc.graphs.capture import CaptureOptions, GraphTable, capture_entries
from pcgsvc.graphs.cuda import CudaEngine
from pcgsvc.graphs.recorded import RecordedEngine
from pcgsvc.models.base import ModelBundle
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.support import Support
from pcgsvc.partition.fx import check_aliases, partition_fx
from pcgsvc.partition.pieces import Kind, Partition
from pcgsvc.program import CompiledPiece, Program, program_of
from pcgsvc.progress import Progress, Silent
from pcgsvc.report.report import build_report
from pcgsvc.runner import OutputPlan, Runner, RunnerParts
from pcgsvc.samples import Samples
from pcgsvc.trace import trace
from pcgsvc.traced import InputSpec, TracedGraph
from pcgsvc.verify import preserved, self_check
from pcgsvc.workspace import Workspace, cache_geometry, usable_sizes

logger = logging.getLogger(__name__)

BUILD_LOCK = threading.RLock()
"""Serialises builds and captures of this process: Dynamo and CUDA capture are process-wide."""


@dataclass(kw_only=True)
class Built:
    """What the stages before capture gave; `job=plan` and `job=compile` end here."""

    config: Config
    bundle: ModelBundle
    device: torch.device
    inputs: list[InputSpec]
    traced: TracedGraph
    partition: Partition
    resolution: Resolution
    support: Support
    program: Program | None
    attention: type[AttentionBackend] | None
    sizes: list[int]
    """Capture sizes, ascending."""
    seconds: dict[str, float]
    warnings: list[str] = field(default_factory=list)
    num_compiled: int = 0


# ---- doors ---------------------------------------------------------------------------------------


def build_runner(
    module: Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_dims: Mapping[str, int],
    config: Config | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Build a runner for any `nn.Module` or callable.

    Args:
        module: in eval mode; its parameters are used where they are, never copied.
        example_inputs: a tuple of arguments, or a dict by argument name. Tensors become inputs of
            the runner; everything else is frozen into the graph.
        dynamic_dims: which dimension of which tensor input carries the rows (tokens), by name.
        config: settings; `model` and `attention` are not read. None: the defaults.
        progress: hears of long phases.

    Raises:
        ConfigError: a setting or an argument is wrong.
        TraceError, SplitError, CompileError, CaptureError: a stage failed.
        VerifyError: a captured entry does not give what the module gives.
    """
    given = config or Config()
    tensors, constants = split_arguments(module, example_inputs)
    specs = input_specs(tensors, dynamic_dims)
    device = specs[0].example.device
    given = resolve(given, device_type=device.type)
    validate(given, device_type=device.type)
    if isinstance(module, torch.nn.Module) and module.training:
        raise ConfigError("module: it is in training mode; call module.eval() first.")
    bundle = ModelBundle(
        module=module,
        make_inputs=resampler(specs),
        dynamic_dims=dict(dynamic_dims),
    )
    return _build(bundle, specs, constants, given, device, progress or Silent())


def build_from_config(config: Config, progress: Progress | None = None) -> Runner:
    """Build the configured model and a runner for it; `config` is as composed or resolved."""
    started = time.perf_counter()
    config, device, bundle = load_model(config)
    specs = bundle_specs(bundle)
    weights = time.perf_counter() - started
    return _build(bundle, specs, {}, config, device, progress or Silent(), weights_s=weights)


def load_model(config: Config) -> tuple[Config, torch.device, ModelBundle]:
    """Resolve and validate a config and build its model."""
    from pcgsvc.models.catalog import build_model, validate_model

    device = device_of(config)
    config = resolve(config, device_type=device.type)
    validate(config, device_type=device.type)
    validate_model(config)
    return config, device, build_model(config, device=device, dtype=dtype_of(config))


def prepare_from_config(config: Config, *, compile_pieces: bool) -> Built:
    """Run the stages before capture; `job=plan` and `job=compile`."""
    started = time.perf_counter()
    config, device, bundle = load_model(config)
    specs = bundle_specs(bundle)
    weights = time.perf_counter() - started
    with BUILD_LOCK, torch.inference_mode(False), torch.no_grad():
        return prepare(
            bundle,
            specs,
            {},
            config,
            device,
            Silent(),
            compile_pieces=compile_pieces,
            weights_s=weights,
        )


# ---- the stages ----------------------------------------------------------------------------------


def _build(
    bundle: ModelBundle,
    specs: list[InputSpec],
    constants: Mapping[str, Any],
    config: Config,
    device: torch.device,
    progress: Progress,
    *,
    weights_s: float = 0.0,
) -> Runner:
    """Trace, split, compile, capture, check."""
    started = time.perf_counter()
    with BUILD_LOCK, torch.inference_mode(False), torch.no_grad():
        built = prepare(bundle, specs, constants, config, device, progress, weights_s=weights_s)
        workspace = _workspace(built)
        samples = Samples(
            workspace,
            bundle.make_inputs,
            seed=config.seed,
            query_len=config.capture.uniform_query_len,
        )
        state = {name: built.traced.tensors[name] for name in built.traced.mutated}
        with preserved(state):
            table = _capture(built, workspace, samples, progress)
            parts = _parts(built, workspace, table, constants)
            built.seconds["total"] = time.perf_counter() - started + weights_s
            parts.report = build_report(built, table, workspace)
            runner = Runner(parts)
            if config.capture.self_check:
                _self_check(runner, samples)
    _strict(config, built, table)
    return runner


def prepare(
    bundle: ModelBundle,
    specs: list[InputSpec],
    constants: Mapping[str, Any],
    config: Config,
    device: torch.device,
    progress: Progress,
    *,
    compile_pieces: bool = True,
    weights_s: float = 0.0,
) -> Built:
    """Trace, split, resolve the mode, and compile."""
    seconds = dict.fromkeys(
        ("import", "weights", "trace", "split", "compile", "load", "warmup", "capture", "total"),
        0.0,
    )
    seconds["weights"] = weights_s
    with _phase("trace", seconds, progress):
        traced = trace(bundle.module, specs, constants, avoid_sizes=config.capture.sizes or ())
    _refuse_outputs(traced)
    with _phase("split", seconds, progress):
        partition = partition_fx(
            traced, config.partition.splitting_ops, config.partition.extra_splitting_ops
        )
        if config.compiler.name is Compiler.INDUCTOR:
            check_aliases(partition)
    logger.info(
        "split: %d ops into %d regions (%d unique) and %d boundaries",
        sum(traced.ops.values()),
        partition.count(Kind.REGION),
        len(partition.unique()),
        partition.count(Kind.BOUNDARY),
    )
    sizes, dropped = usable_sizes(config)
    attention = find_backend(config.attention.name) if bundle.attention is not None else None
    spec = program_of(traced, partition)
    resolution, support = _resolve(config, spec_calls=partition, attention=attention)
    built = Built(
        config=config,
        bundle=bundle,
        device=device,
        inputs=specs,
        traced=traced,
        partition=partition,
        resolution=resolution,
        support=support,
        program=None,
        attention=attention,
        sizes=sizes,
        seconds=seconds,
        warnings=[*resolution.reasons, *dropped],
    )
    for warning in built.warnings:
        logger.warning("%s", warning)
    if config.strict and built.warnings:
        raise ConfigError(
            "strict=true, and what was asked for is not done: " + "; ".join(built.warnings)
        )
    if compile_pieces:
        with _phase("compile", seconds, progress, total=len(partition.unique())):
            pieces = _compile(partition, config, progress)
            built.num_compiled = len(pieces)
        built.program = Program(spec, pieces)
    return built


def _compile(partition: Partition, config: Config, progress: Progress) -> dict[str, CompiledPiece]:
    """Compile each unique piece once."""
    compiled: dict[str, CompiledPiece] = {}
    for key, piece in partition.unique().items():
        assert piece.document is not None
        eager = EagerPiece(piece.document)
        if config.debug.dump_dir is not None:
            _dump(Path(config.debug.dump_dir), piece.name, eager.source())
        if config.compiler.name is Compiler.INDUCTOR:
            from pcgsvc.compilers.inductor import compile_piece

            compiled[key] = compile_piece(
                piece, config.compiler.options, _dump_path(config, piece.name)
            )
        else:
            compiled[key] = eager
        logger.debug("compiled %s (%s): %d ops", piece.name, key[:12], len(piece.nodes))
        progress.advance()
    return compiled


def _resolve(
    config: Config, *, spec_calls: Partition, attention: type[AttentionBackend] | None
) -> tuple[Resolution, Support]:
    from pcgsvc.ops.registry import find_spec

    support, why = Support.ALWAYS, "every splitting op"
    for name in spec_calls.matched:
        op = find_spec(name)
        level = Support.NEVER if op is None else op.support
        if level is None:
            level = attention.cudagraph_support if attention is not None else Support.NEVER
            name = f"attention={config.attention.name}"
        if level < support:
            support, why = level, name
    resolution = resolve_mode(
        config.mode,
        support,
        num_boundaries=spec_calls.count(Kind.BOUNDARY),
        uniform_query_len=config.capture.uniform_query_len,
        why=why,
    )
    return resolution, support


def _capture(
    built: Built, workspace: Workspace, samples: Samples, progress: Progress
) -> GraphTable:
    """Capture what the resolved mode wants."""
    config, program = built.config, built.program
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
    )
    progress.start("capture", len(wanted))
    with _capture_stream(workspace):
        table = capture_entries(
            program,
            workspace,
            engine,
            wanted,
            predicate=built.traced.predicate,
            options=options,
            prepare=load,
            on_entry=lambda key: progress.advance(),
        )
    progress.stop()
    built.seconds["warmup"] = table.warmup_seconds
    built.seconds["capture"] = table.capture_seconds
    graphs = sum(e.num_graphs for e in table.entries.values())
    logger.info(
        "capture: %d entries, %d graphs (%s), %.1f MiB pool, %.3f s and %.3f s of warm-up",
        len(table.entries),
        graphs,
        engine.name,
        table.pool_bytes / 2**20,
        table.capture_seconds,
        table.warmup_seconds,
    )
    return table


def _self_check(runner: Runner, samples: Samples) -> None:
    """Replay every entry once against the module; a difference ends the build."""
    try:
        self_check(runner, samples)
    except VerifyError:
        runner.close()
        raise


def _strict(config: Config, built: Built, table: GraphTable) -> None:
    """Under `strict=true`, sizes that were not captured are an error."""
    if config.strict and table.skipped:
        raise ConfigError(f"strict=true, and some sizes were not captured: {table.skipped}")


# ---- parts ---------------------------------------------------------------------------------------


def _workspace(built: Built) -> Workspace:
    """Allocate the static memory of a runner."""
    config, spec = built.config, built.bundle.attention
    max_tokens = max(built.sizes)
    max_reqs = config.attention.max_num_reqs or max_tokens
    geometry, attention = None, None
    if spec is not None and built.attention is not None:
        geometry = cache_geometry(config, spec, max_tokens=max_tokens, max_reqs=max_reqs)
        attention = built.attention(
            spec,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            device=built.device,
            dtype=dtype_of(config),
        )
    return Workspace(
        inputs=built.inputs,
        bindings=built.traced.bindings,
        tensors=built.traced.tensors,
        max_tokens=max_tokens,
        max_reqs=max_reqs,
        attention=attention,
        geometry=geometry,
        device=built.device,
    )


def _parts(
    built: Built, workspace: Workspace, table: GraphTable, constants: Mapping[str, Any]
) -> RunnerParts:
    traced, program = built.traced, built.program
    assert program is not None
    dispatch = DispatchTable(
        built.resolution,
        table.entries,
        uniform_query_len=built.config.capture.uniform_query_len,
        max_reqs=workspace.max_reqs,
        skipped=table.skipped,
    )
    outputs = OutputPlan(
        leaves=traced.outputs,
        constants=traced.constants,
        tree=traced.out_tree,
        specs=traced.output_specs,
    )
    return RunnerParts(
        config=built.config,
        module=built.bundle.module,
        program=program,
        workspace=workspace,
        table=table,
        dispatch=dispatch,
        predicate=traced.predicate,
        outputs=outputs,
        constants=constants,
        make_inputs=built.bundle.make_inputs,
        tokenizer=built.bundle.tokenizer,
        is_language_model=built.bundle.is_language_model,
        mutated=traced.mutated,
    )


def _refuse_outputs(traced: TracedGraph) -> None:
    """Refuse results that cannot be cut back to the true rows."""
    for at, spec in enumerate(traced.output_specs):
        odd = [s for s in spec.shape if isinstance(s, str) and s != "s"]
        if odd:
            raise TraceError(
                f"result {at}: its shape {spec.shape} depends on the row count s other than by "
                "being it, so padding rows cannot be cut off. Return one row per input row."
            )


@contextmanager
def _phase(
    name: str, seconds: dict[str, float], progress: Progress, total: int = 1
) -> Iterator[None]:
    progress.start(name, total)
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
    progress.stop()
    logger.info("%s: %.3f s", name, seconds[name])


@contextmanager
def _capture_stream(workspace: Workspace) -> Iterator[None]:
    if workspace.stream is None:
        yield
        return
    workspace.stream.wait_stream(torch.cuda.current_stream(workspace.device))
    with torch.cuda.stream(workspace.stream):
        yield
    torch.cuda.current_stream(workspace.device).wait_stream(workspace.stream)


def _dump(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.fx.py").write_text(text)


def _dump_path(config: Config, name: str) -> Path | None:
    folder = config.debug.dump_dir
    return None if folder is None else Path(folder) / f"{name}.inductor.py"
