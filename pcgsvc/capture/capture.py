"""Capture: a program -> one entry per (mode, size), largest size first, in one pool.

In: a compiled model, its workspace and the entries wanted. Out: `GraphTable`. Knows nothing of
compilers, disks or how a call finds its entry.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pcgsvc import torch_private
from pcgsvc.capture.call_copies import CallCopies, with_copies
from pcgsvc.capture.cuda import CudaEngine
from pcgsvc.capture.cuda_composer import CudaComposer
from pcgsvc.capture.plan import CapturePlan, EntryKey
from pcgsvc.capture.recorded import RecordedEngine
from pcgsvc.capture.session import Engine, Entry, Session, ranged
from pcgsvc.capture.sources import Boundary, Step
from pcgsvc.capture.stitch import Joined, join
from pcgsvc.config import Config, Mode, Outputs, Replay
from pcgsvc.cuda_driver import DriverError, find_driver
from pcgsvc.errors import CaptureError, PcgError
from pcgsvc.events import Phases, count, log_event
from pcgsvc.forward.samples import Samples
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.context import ForwardContext, use_context
from pcgsvc.ops.registry import traced_name
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.program import Direct, Program

logger = logging.getLogger(__name__)

_OWN_FOLDER = str(Path(__file__).parent)


@dataclass(kw_only=True)
class GraphTable:
    """The captured entries of one runner. In this process only: never written to disk."""

    entries: dict[EntryKey, Entry] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    """Sizes for which something wanted was not captured, with the reason."""
    warmup_seconds: float = 0.0
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    """Memory of the graph pool (recorded: of the segments' results)."""
    device_bytes: int = 0
    """How much free device memory fell while capturing, driver memory included."""
    graph_bytes: int = 0
    """Of it, what the driver keeps of the graphs themselves, beside their pool."""
    workspace_bytes: int = 0
    """Of it, what torch's allocator keeps outside the pool: the libraries' workspaces."""
    returned_bytes: int = 0
    """What autotuning and warm-up had taken besides, and the device has back."""

    @property
    def device_parts(self) -> dict[str, int]:
        """What `device_bytes` are made of; the rest is the modules of kernels that were loaded."""
        parts = {
            "pool": self.pool_bytes,
            "workspaces": self.workspace_bytes,
            "graphs": self.graph_bytes,
        }
        rest = max(0, self.device_bytes - sum(parts.values()))
        return {**parts, "kernels": rest} if self.device_bytes else {}

    @property
    def num_graphs(self) -> int:
        """Captured segments of all entries."""
        return sum(entry.num_graphs for entry in self.entries.values())

    @property
    def sizes(self) -> list[int]:
        """Sizes that have an entry, ascending."""
        return sorted({descriptor.num_tokens for _, descriptor in self.entries})

    def skip(self, key: EntryKey, reason: str) -> None:
        """Note why an entry is not there; of several reasons for a size, the first."""
        mode, descriptor = key
        self.skipped.setdefault(descriptor.num_tokens, f"{mode.value}: {reason}")

    def without(self, reasons: dict[EntryKey, str]) -> GraphTable:
        """Return the table without some entries, which are then skipped for these reasons."""
        left = GraphTable(
            entries={key: e for key, e in self.entries.items() if key not in reasons},
            skipped=dict(self.skipped),
            warmup_seconds=self.warmup_seconds,
            capture_seconds=self.capture_seconds,
            pool_bytes=self.pool_bytes - sum(self.entries[key].owned_bytes for key in reasons),
            device_bytes=self.device_bytes,
            graph_bytes=self.graph_bytes,
            workspace_bytes=self.workspace_bytes,
            returned_bytes=self.returned_bytes,
        )
        for key, reason in reasons.items():
            left.skip(key, reason)
        return left


def capture(
    model: CompiledModel,
    memory: Workspace,
    plan: CapturePlan,
    samples: Samples,
    phases: Phases,
) -> GraphTable:
    """Capture every planned entry that can be captured.

    Args:
        model: compiled.
        memory: static memory of the runner; its inputs are overwritten.
        plan: the entries, largest size first.
        samples: source of valid inputs and batches.
        phases: `capture` is timed; one unit per entry.

    Returns:
        Graphs by mode and size. Results of an entry alias graph memory and are overwritten by the
        next replay of any entry; the memory lives as long as any of the entries.

    Raises:
        CaptureError: nothing at all could be captured, or the device is broken.
        PeerError: another process that captures the same is gone.
    """
    table = GraphTable()
    if not plan.entries and not plan.invalid:
        return table
    failures: list[CaptureError] = []
    for key, reason in plan.invalid:
        _skip(table, key, reason)
    engine = make_engine(memory, plan.config)
    reads = model.reads_metadata
    recorder = _Recorder(model.program, memory, engine, samples, plan.config, reads)
    engine.give_back()
    free, reserved = engine.free_bytes(), engine.reserved_bytes()
    total = len(plan.entries)
    with phases.phase("capture", total) as details, memory.on_stream(), _collector_held():
        for key in plan.entries:
            why = model.ranks.first(recorder.attempt(key, table, failures))
            if why is not None:  # here, or at another rank
                if table.entries.pop(key, None) is not None and not table.entries:
                    engine.discard_pool()
                _skip(table, key, why)
            phases.progress.advance()
        owned_bytes = sum(entry.owned_bytes for entry in table.entries.values())
        table.pool_bytes = engine.pool_bytes() + owned_bytes
        used = engine.reserved_bytes()
        engine.give_back()
        kept = engine.reserved_bytes()
        table.device_bytes = max(0, free - engine.free_bytes())
        table.workspace_bytes = max(0, kept - reserved - table.pool_bytes)
        table.returned_bytes = used - kept
        details += _details(table, engine)
    if failures and not table.entries:
        raise failures[0]
    return table


def make_engine(memory: Workspace, config: Config) -> Engine:
    """Return what captures segments on the workspace's device."""
    if memory.stream is None:
        return RecordedEngine()
    composer: CudaComposer | str
    try:
        composer = CudaComposer(find_driver(), memory.device)
    except DriverError as error:
        composer = str(error)
        level = logging.WARNING if config.capture.replay is Replay.STITCHED else logging.INFO
        words = "capture.replay: pieces, and copies outside of graphs, since %s"
        log_event(logger, level, "no_driver", words, composer)
    return CudaEngine(memory.stream, config.capture.error_mode.value, composer)


@dataclass(frozen=True)
class _Recorder:
    """Captures one entry after the other with the same program, memory and engine."""

    program: Program
    memory: Workspace
    engine: Engine
    samples: Samples
    config: Config
    reads_metadata: bool

    def attempt(self, key: EntryKey, table: GraphTable, failures: list[CaptureError]) -> str | None:
        """Record an entry, or return why it cannot be, and add that to the failures of capture."""
        try:
            self.record(key, table)
        except PcgError as error:
            failures += [error] if isinstance(error, CaptureError) else []
            return str(error)
        return None

    def record(self, key: EntryKey, table: GraphTable) -> None:
        """Warm an entry up, capture it, and put it into the table, or leave nothing of it.

        Raises:
            CaptureError: it cannot be captured.
            PcgError: there is no batch of its size, or `capture.memory_budget` would be passed.
        """
        program = self.program.for_size(key[1].num_tokens)
        free = self.engine.free_bytes()
        step, values = self._prepared(key)
        # Boundaries may launch other kernels for uniform batches: those are warmed up as well.
        is_warm = any(captured[1] == key[1] for captured in table.entries)
        started = time.perf_counter()
        if not is_warm:
            self._warm_up(program, values, step, key)
        warmed = time.perf_counter()
        table.warmup_seconds += warmed - started
        before = self._not_the_drivers()
        entry = self._capture(program, values, step, key, pool_in_use=bool(table.entries))
        table.graph_bytes += max(0, before - self._not_the_drivers())
        table.capture_seconds += time.perf_counter() - warmed
        _check_boundaries(program, entry, key)
        used = max(0, free - self.engine.free_bytes()) + entry.owned_bytes + table.device_bytes
        budget = self.config.capture.memory_budget
        if budget is not None and used > budget:
            del entry
            if not table.entries:
                self.engine.discard_pool()
            raise PcgError(
                f"capture.memory_budget={budget} bytes would be passed: {used} bytes with this "
                "entry"
            )
        table.device_bytes = used
        table.entries[key] = entry
        _log_entry(key, entry)

    def _not_the_drivers(self) -> int:
        """Return the device memory that is free, or that torch's allocator holds."""
        return self.engine.free_bytes() + self.engine.reserved_bytes()

    def _prepared(self, key: EntryKey) -> tuple[Callable[[], ForwardContext], list[object]]:
        """Load valid inputs; return what makes a run's context, and the program's bound values."""
        mode, descriptor = key
        size, memory = descriptor.num_tokens, self.memory
        batch = self.samples.batch(size, uniform=descriptor.uniform)
        memory.load(self.samples.inputs(size), size, size)
        query_len = self.config.capture.uniform_query_len if descriptor.uniform else None

        def step() -> ForwardContext:
            """Return the context of one run; every run is planned anew, as every call is."""
            return memory.context(batch, size, query_len, in_full_graph=mode is Mode.FULL)

        return step, memory.values(memory.views(size), size)

    def _warm_up(
        self,
        program: Program,
        values: list[object],
        step: Callable[[], ForwardContext],
        key: EntryKey,
    ) -> None:
        """Run plainly, so that lazy initialisation and autotuning happen outside graphs."""
        try:
            for _ in range(self.config.capture.warmup_calls):
                with use_context(step()):
                    program.run(values, Direct())
        except PcgError:
            raise
        except Exception as error:
            self.engine.probe(error)
            first = (str(error).strip().splitlines() or [""])[0]
            raise CaptureError(
                f"warming up {_words(key)} failed: {type(error).__name__}: {first}"
            ) from error

    def _capture(
        self,
        program: Program,
        values: list[object],
        step: Callable[[], ForwardContext],
        key: EntryKey,
        *,
        pool_in_use: bool,
    ) -> Entry:
        """Capture one entry, or leave nothing of it behind and say why."""
        engine, ranges = self.engine, self.config.debug.profile_ranges
        with use_context(step()) as context:
            breaks = key[0] is Mode.PIECEWISE
            session = Session(engine, context, breaks=breaks, ranges=ranges)
            try:
                with engine.session():
                    entry = session.finish(program.run(values, session))
                if breaks:
                    entry.joined = self._joined(entry, session.parts)
                entry.copies = self._copies(entry, key[1].num_tokens)
                return entry
            except BaseException as error:
                session.abort()
                if not isinstance(error, Exception):
                    raise
                engine.probe(error)
                if not pool_in_use:
                    engine.discard_pool()
                raise _capture_error(error, program, key) from error

    def _copies(self, entry: Entry, size: int) -> CallCopies | None:
        """Return the entry's steps with a call's copies in them, where the device does that."""
        memory, composer, debug = self.memory, self.engine.composer, self.config.debug
        if isinstance(composer, str) or debug.profile_ranges:
            return None
        inputs = [memory.views(size)[spec.name] for spec in memory.inputs]
        metadata = memory.step.memory if self.reads_metadata and not memory.plans else []
        results = entry.outputs if self.config.outputs is Outputs.CLONE else []
        pairs = zip(entry.steps, entry.is_region, strict=True)
        segments = {id(step) for step, is_region in pairs if is_region}
        steps = [(step, id(step) in segments) for step in entry.calls]
        try:
            return with_copies(steps, composer, inputs, metadata, results)
        except DriverError as error:
            logger.info("calls of size %s copy outside of its graphs: %s", size, error)
            return None

    def _joined(self, entry: Entry, parts: Sequence[Step | Boundary]) -> Joined:
        """Return how a piecewise entry is replayed, as `capture.replay` says."""
        wanted, composer = self.config.capture.replay, self.engine.composer
        if wanted is Replay.PIECES:
            return Joined(why="capture.replay=pieces")
        if isinstance(composer, str):
            joined = Joined(why=composer)
        else:
            joined = join(entry.steps, parts, composer, auto=wanted is Replay.AUTO)
        if self.config.debug.profile_ranges:
            joined.steps = [ranged("stitched", step) for step in joined.steps]
        if joined.missing is not None and wanted is Replay.STITCHED:
            if self.config.strict:
                raise CaptureError(f"capture.replay=stitched is not done: {joined.missing}")
            logger.warning("capture.replay=stitched is not done: %s", joined.missing)
        return joined


def _words(key: EntryKey) -> str:
    return f"{key[0].value} size {key[1].num_tokens}"


def _capture_error(error: Exception, program: Program, key: EntryKey) -> CaptureError:
    """Say which entry failed, at which op or line, and what to do."""
    text = str(error).strip().split("\n")[0]
    kind = "" if isinstance(error, PcgError) else f"{type(error).__name__}: "
    where = _where(error, program)
    return CaptureError(f"capturing {_words(key)} failed{where}: {kind}{text}{_way_out(text)}")


def _way_out(text: str) -> str:
    """Return what to do about an error of CUDA's that does not say so itself."""
    if "Cannot copy between CPU and CUDA" in text:
        return (
            " What is copied lives on the host: keep it on the device, as a buffer of the model. "
            "A list as index (x[:, [0, 2]]) and a number that is assigned to one element "
            "(x[0] = 2; x[0].fill_(2) is not) are copied as well."
        )
    if "unjoined" not in text:
        return ""
    return (
        ". A side stream still works when the segment ends: before the next splitting op, let the "
        "current stream wait for it (torch.cuda.current_stream().wait_stream(side))"
    )


def _where(error: BaseException, program: Program) -> str:
    """Return the op or the user's line that an error came from, for the message."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        source = program.source_line(frame.filename, frame.lineno or 0)
        if source is not None:
            return f" at {source}"
        path = frame.filename
        if not torch_private.is_torch_file(path) and not path.startswith(_OWN_FOLDER):
            return f" at {path}:{frame.lineno} in {frame.name}"
    return ""


def _check_boundaries(program: Program, entry: Entry, key: EntryKey) -> None:
    traced = program.boundaries
    hit = tuple(map(traced_name, entry.boundaries))
    if traced is None or hit == traced:
        return
    unused = sorted((Counter(traced) - Counter(hit)).elements())
    why = ""
    if unused and len(hit) < len(traced):
        why = (
            f" Nothing reads what {unused} return or write, so the compiler left them out. Take "
            "those calls out of the forward, return their results, or use partition.strategy=fx."
        )
    elif not unused and len(hit) == len(traced):
        why = (
            " The compiler changed the order of calls that do not depend on each other; "
            "partition.strategy=fx keeps it."
        )
    raise CaptureError(
        f"capturing {_words(key)}: the splitting ops hit were {list(entry.boundaries)}, those "
        f"traced were {list(traced)}.{why}"
    )


@contextlib.contextmanager
def _collector_held() -> Iterator[None]:
    """Collect once, then keep the garbage collector out of captures; restore it whatever happens.

    A graph that dies in a collection during another capture makes that capture fail.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- log -----------------------------------------------------------------------------------------


def _skip(table: GraphTable, key: EntryKey, reason: str) -> None:
    table.skip(key, reason)
    words = "capture: %s skipped: %s"
    fields = {"mode": key[0].value, "size": key[1].num_tokens, "reason": reason}
    log_event(logger, logging.WARNING, "capture_skipped", words, _words(key), reason, **fields)


def _log_entry(key: EntryKey, entry: Entry) -> None:
    fields = {
        "mode": key[0].value,
        "size": key[1].num_tokens,
        "uniform": key[1].uniform,
        "graphs": entry.num_graphs,
    }
    words = "captured %s: %s"
    graphs = count(entry.num_graphs, "graph")
    log_event(logger, logging.DEBUG, "capture", words, _words(key), graphs, **fields)


def _details(table: GraphTable, engine: Engine) -> Iterable[str]:
    yield f"{table.warmup_seconds:.3f} s of them warm-up"
    entries = count(len(table.entries), "entry", "entries")
    yield f"{entries}, {count(table.num_graphs, 'graph')} ({engine.name})"
    yield f"{table.pool_bytes / 2**20:.1f} MiB pool"
