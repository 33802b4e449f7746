"""The pipeline: config and model -> runner, the stages in order.

In: a validated config and a model. Out: a `Runner` with its report. Each stage is a function of an
earlier module; this file only hands results on, counts, and times.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.arguments import bundle_specs, input_specs, resampler, split_arguments
from pcgsvc.artifacts import Artifacts, NoProgramError, Tally, file_digest, require_warm
from pcgsvc.canonical import buffer_names, refuse_outputs, tensors_of
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.config import CacheMode, Compiler, Config, Graphs, Mode, Strategy, resolve, validate
from pcgsvc.devices import device_of, dtype_of
from pcgsvc.dispatch import (
    BatchDescriptor,
    DispatchTable,
    Resolution,
    resolve_mode,
    wanted_entries,
)
from pcgsvc.errors import CacheError, ConfigError, VerifyError
from pcgsvc.facts import program_facts
from pcgsvc.graphs.capture import CaptureOptions, GraphTable, capture_entries
from pcgsvc.graphs.cuda import CudaEngine
from pcgsvc.graphs.recorded import RecordedEngine
from pcgsvc.image import ProgramImage, image_of
from pcgsvc.keys import key_of
from pcgsvc.models.base import ModelBundle
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.registry import find_spec
from pcgsvc.ops.support import Support
from pcgsvc.partition.breakable import (
    PIECE,
    Learned,
    ModulePiece,
    boundary_names,
    learn,
)
from pcgsvc.partition.fx import check_aliases, partition_fx
from pcgsvc.partition.inductor import partition_inductor
from pcgsvc.partition.pieces import Kind, Partition, Piece
from pcgsvc.partition.submodules import chosen, compile_submodules
from pcgsvc.program import CompiledPiece, Program
from pcgsvc.progress import Progress, Silent
from pcgsvc.reads import NotCanonicalError, files_of, reads_of
from pcgsvc.report.report import build_report
from pcgsvc.rows import python_of
from pcgsvc.runner import OutputPlan, Runner, RunnerParts
from pcgsvc.samples import Samples
from pcgsvc.store import Store
from pcgsvc.trace import trace
from pcgsvc.traced import Binding, InputSpec, TracedGraph
from pcgsvc.verify import preserved, self_check
from pcgsvc.workspace import Workspace, cache_geometry, usable_sizes

logger = logging.getLogger(__name__)


class _BuildLock:
    """Serialises builds and captures of this process, and hands capture streams on.

    Dynamo and CUDA capture are process-wide. cuBLAS keeps a workspace for every stream that was
    ever used, for good; a closed runner's stream is used again, so that building and closing
    runners keeps memory flat. No two open runners share one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: dict[torch.device, list[torch.cuda.Stream]] = {}

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def take_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return a capture stream for one runner; None on the CPU."""
        if device.type != "cuda":
            return None
        with self._lock:
            idle = self._idle.setdefault(device, [])
            return idle.pop() if idle else torch.cuda.Stream(device)

    def give_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Take a stream back whose runner is closed."""
        if stream is not None:
            with self._lock:
                self._idle.setdefault(stream.device, []).append(stream)


BUILD_LOCK = _BuildLock()


@dataclass(kw_only=True)
class Request:
    """What is to be built."""

    config: Config
    """Resolved and validated."""
    device: torch.device
    bundle: ModelBundle
    inputs: list[InputSpec]
    constants: Mapping[str, Any]
    """Arguments that are no tensors; frozen."""
    weights_s: float = 0.0
    """How long the model took to build, in seconds."""
    import_s: float = 0.0
    """How long it took to import what loads compiled pieces, in seconds."""


@dataclass(kw_only=True)
class Built:
    """What the stages before capture gave; `job=plan` and `job=compile` end here."""

    request: Request
    image: ProgramImage
    program: Program | None
    """None when nothing was to be compiled."""
    resolution: Resolution
    support: Support
    attention: type[AttentionBackend] | None
    sizes: list[int]
    """Capture sizes, ascending."""
    start: str
    """`cold` (traced here) or `warm` (loaded)."""
    tally: Tally
    cache: dict[str, Any]
    """The report's words on the disk cache."""
    seconds: dict[str, float]
    warnings: list[str]
    captured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that the forward holds and that are no parameter or buffer, by binding name."""
    workspace: Workspace | None = None
    """Set where the forward had to be run to learn what it does."""


# ---- doors ---------------------------------------------------------------------------------------


def build_runner(
    module: Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_dims: Mapping[str, int],
    config: Config | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Build, or start warm, a runner for any `nn.Module` or callable.

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
        CacheError: the disk cache is not safe to use, or `cache.require_warm=true` met a miss.
        VerifyError: a captured entry does not give what the module gives.
    """
    tensors, constants = split_arguments(module, example_inputs)
    specs = input_specs(tensors, dynamic_dims)
    device = specs[0].example.device
    given = resolve(config or Config(), device_type=device.type)
    validate(given, device_type=device.type)
    if isinstance(module, torch.nn.Module) and module.training:
        raise ConfigError("module: it is in training mode; call module.eval() first.")
    bundle = ModelBundle(
        module=module, make_inputs=resampler(specs), dynamic_dims=dict(dynamic_dims)
    )
    request = Request(config=given, device=device, bundle=bundle, inputs=specs, constants=constants)
    return build(request, progress or Silent())


def build_from_config(config: Config, progress: Progress | None = None) -> Runner:
    """Build the configured model and a runner for it; `config` is as composed or resolved."""
    return build(request_of(config), progress or Silent())


def request_of(config: Config) -> Request:
    """Resolve and validate a config and build its model."""
    started = time.perf_counter()
    device = device_of(config)
    config = resolve(config, device_type=device.type)
    validate(config, device_type=device.type)
    validate_model(config)
    bundle = build_model(config, device=device, dtype=dtype_of(config))
    return Request(
        config=config,
        device=device,
        bundle=bundle,
        inputs=bundle_specs(bundle),
        constants={},
        weights_s=time.perf_counter() - started,
    )


def build(request: Request, progress: Progress) -> Runner:
    """Trace or load, compile, capture, check."""
    started = time.perf_counter()
    config = request.config
    with _building(request) as folder:
        built = prepare(request, folder, progress)
        tensors = {**tensors_of(request.bundle.module), **built.captured}
        workspace = built.workspace or _workspace(
            request, built.image.spec.bindings, built.image.bind(tensors)
        )
        samples = _samples(request, workspace)
        with preserved({name: workspace.tensors[name] for name in built.image.mutated}):
            table = _capture(built, workspace, samples, progress)
            built.seconds["total"] = time.perf_counter() - started + request.weights_s
            parts = _parts(built, workspace, table)
            parts.report = build_report(built, table, workspace)
            runner = Runner(parts, at_close=lambda: _at_close(folder, workspace))
            if config.capture.self_check:
                _self_check(runner, samples)
    if config.strict and table.skipped:
        runner.close()
        raise ConfigError(f"strict=true, and some sizes were not captured: {table.skipped}")
    return runner


def _at_close(folder: CompilerFolder, workspace: Workspace) -> None:
    folder.close()
    stream, workspace.stream = workspace.stream, None
    BUILD_LOCK.give_stream(stream)


def prepare_only(request: Request, progress: Progress, *, compile_pieces: bool) -> Built:
    """Run the stages before capture; `job=plan` and `job=compile`."""
    with _building(request) as folder:
        try:
            return prepare(request, folder, progress, compile_pieces=compile_pieces)
        finally:
            folder.close()


@contextmanager
def _building(request: Request) -> Iterator[CompilerFolder]:
    """Hold the build lock, fix torch's modes, and give the compilers a folder of ours."""
    folder = CompilerFolder()
    inductor = request.config.compiler.name is Compiler.INDUCTOR
    plain = torch.autocast(request.device.type, enabled=False)  # the caller's is not built in
    with BUILD_LOCK, torch.inference_mode(False), torch.no_grad(), plain:
        started = time.perf_counter()
        try:
            with folder.in_use(inductor=inductor, threads=request.config.compiler.threads):
                request.import_s = time.perf_counter() - started
                yield folder
        except BaseException:
            folder.close()
            raise


# ---- the stages ----------------------------------------------------------------------------------


def prepare(
    request: Request, folder: CompilerFolder, progress: Progress, *, compile_pieces: bool = True
) -> Built:
    """Load the program, or trace, split and compile it; then resolve the mode."""
    config = request.config
    if config.compiler.passes:
        from pcgsvc.compilers.passes import find_passes

        find_passes(config.compiler.passes)  # an unknown name is told before anything is traced
    seconds = dict.fromkeys(
        ("import", "weights", "trace", "split", "compile", "load", "warmup", "capture", "total"),
        0.0,
    )
    seconds["import"], seconds["weights"] = request.import_s, request.weights_s
    with _open_store(config, used=compile_pieces) as store:
        artifacts = Artifacts(config, request.device, store, folder)
        stages = _Stages(request, artifacts, store, seconds, progress)
        image, pieces = stages.run(compile_pieces=compile_pieces)
        cache = {
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
    attention = _attention_of(request)
    resolution, support = _resolve(config, image, attention)
    built = Built(
        request=request,
        image=image,
        program=None if pieces is None else Program(image.spec, pieces, artifacts.specialized),
        resolution=resolution,
        support=support,
        attention=attention,
        sizes=sizes,
        start=stages.start,
        tally=artifacts.tally,
        cache=cache,
        seconds=seconds,
        warnings=[*resolution.reasons, *dropped, *stages.warnings],
        workspace=stages.workspace,
        captured=stages.captured,
    )
    for warning in built.warnings:
        logger.warning("%s", warning)
    if config.strict and built.warnings:
        raise ConfigError(
            "strict=true, and what was asked for is not done: " + "; ".join(built.warnings)
        )
    return built


class _Stages:
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
        self._artifacts, self._store = artifacts, store
        self._seconds, self._progress = seconds, progress
        self.start = "cold"
        self.key: str | None = None
        self.misses: list[str] = []
        self.warnings: list[str] = []
        self.captured: dict[str, torch.Tensor] = {}
        self.workspace: Workspace | None = None

    def run(self, *, compile_pieces: bool) -> tuple[ProgramImage, dict[str, CompiledPiece] | None]:
        """Return the program; its pieces are None when nothing was to be compiled."""
        if self._config.partition.strategy is Strategy.BREAKABLE:
            return self._learn()
        if not compile_pieces:
            return self.plan(), None
        return self.load_or_make()

    def _learn(self) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        """Run the forward as it is; there is nothing to trace and nothing to store."""
        request, names = self._request, self._config.partition
        module = request.bundle.module
        boundaries = boundary_names(names.splitting_ops, names.extra_splitting_ops)
        inputs = [Binding(kind="input", name=s.name, spec=None) for s in request.inputs]
        workspace = _workspace(request, inputs, tensors_of(module))
        buffers = {n: t for n, t in workspace.tensors.items() if n in buffer_names(module)}
        largest = workspace.max_tokens
        with (
            _phase("split", self._seconds, self._progress),
            _capture_stream(workspace),
            preserved(buffers),
        ):
            learned = learn(
                module,
                workspace,
                _samples(request, workspace),
                request.constants,
                boundaries,
                (largest, max(1, largest - 1)),
            )
        self.workspace = workspace
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
        with _phase("import", self._seconds, self._progress):
            torch_private.import_compilers(inductor=True)
        names = chosen(module, learned.one, self._config.partition.compile_modules)
        with _phase("compile", self._seconds, self._progress, total=len(names)):
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
            found = self._load(facts) if held and self._store.writable else None
            return found or self._make(facts)

    def plan(self) -> ProgramImage:
        """Trace and split only."""
        traced, plan = self._trace_and_split()
        return image_of(traced, plan, plan, reads=[], files={})

    def _facts(self) -> dict[str, Any] | None:
        request = self._request
        try:
            return program_facts(
                self._config,
                request.bundle.module,
                request.inputs,
                request.constants,
                request.device,
            )
        except NotCanonicalError as error:
            self._uncacheable([f"constant arguments: {error}"])
            return None

    def _load(
        self, facts: Mapping[str, Any]
    ) -> tuple[ProgramImage, dict[str, CompiledPiece]] | None:
        with _phase("load", self._seconds, self._progress):
            try:
                found = self._artifacts.load(
                    facts, self._request.bundle.module, self._request.constants
                )
            except NoProgramError as error:
                if str(error) not in self.misses:
                    self.misses.append(str(error))
                    logger.info("cache: no stored program fits: %s", str(error))
                return None
        self.start = "warm"
        return found

    def _make(
        self, facts: Mapping[str, Any] | None
    ) -> tuple[ProgramImage, dict[str, CompiledPiece]]:
        traced, plan = self._trace_and_split()
        whole = self._config.partition.strategy is Strategy.INDUCTOR
        partition = partition_inductor(traced, plan) if whole else plan
        module, constants = self._request.bundle.module, self._request.constants
        reads, problems = reads_of(traced.guards, module, constants)
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
        image = image_of(traced, partition, plan, reads=reads, files=files)
        unique, sized = partition.unique(), self._artifacts.sized(image)
        with _phase("compile", self._seconds, self._progress, total=len(unique) + len(sized)):
            self._artifacts.prepare_toolchain()
            pieces = {key: self._compile(piece) for key, piece in unique.items()}
            for size, key in sized:
                special = self._artifacts.specialized.setdefault(size, {})
                special[key] = self._compile(unique[key], size)
        if problems:
            self._uncacheable(problems)
        elif facts is not None and not self._artifacts.tally.unsaved:
            self._artifacts.save(facts, image)
        return image, pieces

    def _trace_and_split(self) -> tuple[TracedGraph, Partition]:
        request, config = self._request, self._config
        inductor = config.compiler.name is Compiler.INDUCTOR
        with _phase("import", self._seconds, self._progress):
            torch_private.import_compilers(inductor=inductor)
        with _phase("trace", self._seconds, self._progress):
            traced = trace(request.bundle.module, request.inputs, request.constants)
        refuse_outputs(traced)
        with _phase("split", self._seconds, self._progress):
            names = config.partition
            partition = partition_fx(traced, names.splitting_ops, names.extra_splitting_ops)
            if inductor and config.partition.strategy is Strategy.FX:
                check_aliases(partition)
        for note in partition.warnings:
            logger.info("%s", note)
        return traced, partition

    def _compile(self, piece: Piece, size: int | None = None) -> CompiledPiece:
        folder = self._config.debug.dump_dir
        dump_path = None
        if folder is not None and piece.document is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{piece.name}.fx.py").write_text(python_of(piece.document, "piece"))
            suffix = "" if size is None else f".size_{size}"
            dump_path = Path(folder) / f"{piece.name}{suffix}.inductor.py"
        compiled = self._artifacts.piece(piece, dump_path, size)
        logger.debug("%s (%s): %d ops", piece.name, str(piece.hash)[:12], len(piece.nodes))
        self._progress.advance()
        return compiled

    def _uncacheable(self, problems: list[str]) -> None:
        words = "the program cannot be stored: " + "; ".join(problems)
        self.misses.append(words)
        if self._config.cache.mode is not CacheMode.OFF:
            self.warnings.append(words)


def _open_store(config: Config, *, used: bool) -> Store:
    if not used or config.cache.mode is CacheMode.OFF:
        return Store(None)
    return Store.open(config.cache.dir, mode=config.cache.mode, max_bytes=config.cache.max_bytes)


def _attention_of(request: Request) -> type[AttentionBackend] | None:
    if request.bundle.attention is None:
        return None
    return find_backend(request.config.attention.name)


def _resolve(
    config: Config, image: ProgramImage, attention: type[AttentionBackend] | None
) -> tuple[Resolution, Support]:
    """Turn the requested mode into one that the ops of the graph allow."""
    levels = [(_support_of(name, config, attention), name) for name in image.matched]
    support, why = min(levels, default=(Support.ALWAYS, ""))
    op = find_spec(why)
    if op is not None and op.support is None:
        why = f"attention={config.attention.name}"
    uncut = [
        name
        for name in sorted(set(image.ops) - set(image.matched))
        if find_spec(name) is not None
        and _support_of(name, config, attention) is not Support.ALWAYS
    ]
    if uncut and config.mode is not Mode.NONE:
        reason = (
            f"{config.mode.value} was asked for, but {uncut} would lie inside the graphs, since "
            "partition.splitting_ops leaves them out, and they cannot be captured: nothing is"
        )
        return Resolution(requested=config.mode, resolved=Mode.NONE, reasons=[reason]), support
    resolution = resolve_mode(
        config.mode,
        support,
        num_boundaries=image.count(Kind.BOUNDARY),
        uniform_query_len=config.capture.uniform_query_len,
        why=why,
    )
    return resolution, support


def _support_of(name: str, config: Config, attention: type[AttentionBackend] | None) -> Support:
    """Return how far an op may go into a graph; ops that nobody registered never do."""
    op = find_spec(name)
    if op is None:
        return Support.NEVER
    if op.support is not None:
        return op.support
    return attention.cudagraph_support if attention is not None else Support.NEVER


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
    with _capture_stream(workspace):
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


# ---- parts ---------------------------------------------------------------------------------------


def _workspace(
    request: Request, bindings: Sequence[Binding], tensors: Mapping[str, torch.Tensor]
) -> Workspace:
    """Allocate the static memory of a runner."""
    config, spec = request.config, request.bundle.attention
    sizes, _ = usable_sizes(config)
    max_tokens = max(sizes)
    max_reqs = config.attention.max_num_reqs or max_tokens
    geometry, attention, backend = None, None, _attention_of(request)
    if spec is not None and backend is not None:
        geometry = cache_geometry(config, spec, max_tokens=max_tokens, max_reqs=max_reqs)
        attention = backend(
            spec,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            device=request.device,
            dtype=dtype_of(config),
        )
    return Workspace(
        inputs=request.inputs,
        bindings=bindings,
        tensors=tensors,
        max_tokens=max_tokens,
        max_reqs=max_reqs,
        attention=attention,
        geometry=geometry,
        device=request.device,
        stream=BUILD_LOCK.take_stream(request.device),
    )


def _samples(request: Request, workspace: Workspace) -> Samples:
    return Samples(
        workspace,
        request.bundle.make_inputs,
        seed=request.config.seed,
        query_len=request.config.capture.uniform_query_len,
    )


def _parts(built: Built, workspace: Workspace, table: GraphTable) -> RunnerParts:
    request, image, program = built.request, built.image, built.program
    assert program is not None
    dispatch = DispatchTable(
        built.resolution,
        table.entries,
        uniform_query_len=request.config.capture.uniform_query_len,
        max_reqs=workspace.max_reqs,
        skipped=table.skipped,
    )
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
        dispatch=dispatch,
        predicate=image.predicate,
        outputs=outputs,
        constants=request.constants,
        make_inputs=request.bundle.make_inputs,
        tokenizer=request.bundle.tokenizer,
        is_language_model=request.bundle.is_language_model,
        mutated=list(image.mutated),
    )


@contextmanager
def _phase(
    name: str, seconds: dict[str, float], progress: Progress, total: int = 1
) -> Iterator[None]:
    progress.start(name, total)
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - started
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
