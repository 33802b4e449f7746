"""Capture: a program -> one entry per (mode, size), largest size first, in one pool.

In: a program, a workspace, an engine and the entries wanted. Out: `GraphTable`. Knows nothing of
compilers, disks or how a call finds its entry.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pcgsvc import torch_private
from pcgsvc.capture.cuda import CudaEngine
from pcgsvc.capture.plan import BatchDescriptor
from pcgsvc.capture.recorded import RecordedEngine
from pcgsvc.capture.session import Entry, Session
from pcgsvc.config import Mode
from pcgsvc.errors import CaptureError, PcgError
from pcgsvc.events import log_event
from pcgsvc.forward.batch import CheckedBatch
from pcgsvc.forward.specs import SizePredicate
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.context import ForwardContext, use_context
from pcgsvc.ops.registry import traced_name
from pcgsvc.program.program import Direct, Program

logger = logging.getLogger(__name__)

Key = tuple[Mode, BatchDescriptor]

_OWN_FOLDER = str(Path(__file__).parent)


@dataclass(kw_only=True)
class GraphTable:
    """The captured entries of one runner. In this process only: never written to disk."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    """Sizes for which something wanted was not captured, with the reason."""
    owned: dict[Key, list[torch.Tensor]] = field(default_factory=dict)
    """Recorded graphs: memory that each entry's segments allocated, for `debug.poison`."""
    warmup_seconds: float = 0.0
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    """Memory of the graph pool (recorded: of the segments' results)."""
    device_bytes: int = 0
    """How much free device memory fell while capturing, driver memory included."""


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """What capture needs to know of the config."""

    warmup_calls: int
    memory_budget: int | None
    uniform_query_len: int
    profile_ranges: bool = False


def capture_entries(
    program: Program,
    workspace: Workspace,
    engine: CudaEngine | RecordedEngine,
    wanted: Sequence[Key],
    *,
    predicate: SizePredicate,
    options: CaptureOptions,
    prepare: Callable[[BatchDescriptor], CheckedBatch],
    on_entry: Callable[[Key], None] = lambda key: None,
) -> GraphTable:
    """Capture every wanted entry that can be captured.

    Args:
        program: compiled.
        workspace: static memory; its inputs are overwritten.
        engine: what captures; its pool belongs to the runner.
        wanted: entries, largest size first.
        predicate: sizes that break it are skipped.
        options: see `CaptureOptions`.
        prepare: loads valid inputs for a descriptor and returns its batch; may raise `BatchError`
            or `ConfigError` to refuse a size.
        on_entry: told of each entry that was tried.

    Raises:
        CaptureError: nothing at all could be captured, or the device is broken.
    """
    table = GraphTable()
    free = _free_bytes(workspace)
    failures: list[CaptureError] = []
    with _collector_held():
        for key in wanted:
            broken = predicate.broken_by(key[1].num_tokens)
            if broken is not None:
                _skip(table, key, f"the traced graph is not valid for it: {broken}")
            else:
                try:
                    _capture_one(program, workspace, engine, key, table, options, prepare)
                except PcgError as error:
                    _skip(table, key, str(error))
                    if isinstance(error, CaptureError):
                        failures.append(error)
            on_entry(key)
    if wanted and failures and not table.entries:
        raise failures[0]
    table.pool_bytes = _pool_bytes(engine, table)
    table.device_bytes = max(0, free - _free_bytes(workspace))
    return table


def _capture_one(
    program: Program,
    workspace: Workspace,
    engine: CudaEngine | RecordedEngine,
    key: Key,
    table: GraphTable,
    options: CaptureOptions,
    prepare: Callable[[BatchDescriptor], CheckedBatch],
) -> None:
    mode, descriptor = key
    size = descriptor.num_tokens
    program = program.for_size(size)
    before = _free_bytes(workspace)
    batch = prepare(descriptor)
    query_len = options.uniform_query_len if descriptor.uniform else None

    def step() -> ForwardContext:
        """Return the context of one run; every run is planned anew, as every call is."""
        return workspace.context(batch, size, query_len, in_full_graph=mode is Mode.FULL)

    values = workspace.values(workspace.views(size), size)
    started = time.perf_counter()
    # Boundaries may launch other kernels for uniform batches: those are warmed up as well.
    if not any(k[1] == descriptor for k in table.entries):
        try:
            warm_up(program, values, step, options.warmup_calls)
        except PcgError:
            raise
        except Exception as error:
            if isinstance(engine, CudaEngine):
                _probe(error)
            raise CaptureError(
                f"warming up {mode.value} size {size} failed: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error
    warmed = time.perf_counter()
    table.warmup_seconds += warmed - started
    with use_context(step()) as context:
        entry = _record(
            program,
            engine,
            context,
            values,
            key,
            pool_in_use=bool(table.entries),
            ranges=options.profile_ranges,
        )
        table.capture_seconds += time.perf_counter() - warmed
    _check_boundaries(program, entry, key)
    owned = engine.take_owned() if isinstance(engine, RecordedEngine) else []
    taken = before - _free_bytes(workspace) if not owned else sum(map(_bytes, owned))
    used = table.device_bytes + max(0, taken)
    if options.memory_budget is not None and used > options.memory_budget:
        del entry
        if isinstance(engine, CudaEngine) and not table.entries:
            engine.renew_pool()
            torch.cuda.empty_cache()
        raise PcgError(
            f"capture.memory_budget={options.memory_budget} bytes would be passed: {used} bytes "
            "with this entry"
        )
    table.device_bytes = used
    table.entries[key] = entry
    table.owned[key] = owned
    log_event(
        logger,
        logging.DEBUG,
        "capture",
        "captured %s size %d: %d graphs",
        mode.value,
        size,
        entry.num_graphs,
        mode=mode.value,
        size=size,
        uniform=descriptor.uniform,
        graphs=entry.num_graphs,
    )


def warm_up(
    program: Program, values: list[object], step: Callable[[], ForwardContext], calls: int
) -> None:
    """Run a program plainly, so that lazy initialisation and autotuning happen outside graphs."""
    for _ in range(calls):
        with use_context(step()):
            program.run(values, Direct())


def _record(
    program: Program,
    engine: CudaEngine | RecordedEngine,
    context: ForwardContext,
    values: list[object],
    key: Key,
    *,
    pool_in_use: bool,
    ranges: bool,
) -> Entry:
    """Capture one entry, or leave nothing of it behind and say why."""
    mode, descriptor = key
    session = Session(engine, context, breaks=mode is Mode.PIECEWISE, ranges=ranges)
    try:
        with engine.session():
            return session.finish(program.run(values, session))
    except BaseException as error:
        session.abort()
        if not isinstance(error, Exception):
            raise
        if isinstance(engine, CudaEngine):
            _probe(error)
            if not pool_in_use:
                engine.renew_pool()
        text = str(error).strip().split("\n")[0]
        kind = "" if isinstance(error, PcgError) else f"{type(error).__name__}: "
        raise CaptureError(
            f"capturing {mode.value} size {descriptor.num_tokens} failed"
            f"{_where(error, program)}: {kind}{text}{_way_out(text)}"
        ) from error


def _way_out(text: str) -> str:
    """Return what to do about an error of CUDA's that does not say so itself."""
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


def _probe(cause: Exception) -> None:
    """End the job if the device is unusable after a failed capture."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise RuntimeError(f"the GPU is unusable after a failed capture: {error}") from cause


def _check_boundaries(program: Program, entry: Entry, key: Key) -> None:
    traced = program.boundaries
    if traced is not None and tuple(map(traced_name, entry.boundaries)) != traced:
        raise CaptureError(
            f"capturing {key[0].value} size {key[1].num_tokens}: the splitting ops hit were "
            f"{list(entry.boundaries)}, those traced were {list(traced)}."
        )


def _skip(table: GraphTable, key: Key, reason: str) -> None:
    mode, descriptor = key
    log_event(
        logger,
        logging.WARNING,
        "capture_skipped",
        "capture: %s size %d skipped: %s",
        mode.value,
        descriptor.num_tokens,
        reason,
        mode=mode.value,
        size=descriptor.num_tokens,
        reason=reason,
    )
    table.skipped.setdefault(descriptor.num_tokens, f"{mode.value}: {reason}")


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


def _free_bytes(workspace: Workspace) -> int:
    """Return the device's free memory; 0 on the CPU."""
    return torch.cuda.mem_get_info(workspace.device)[0] if workspace.stream is not None else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _pool_bytes(engine: CudaEngine | RecordedEngine, table: GraphTable) -> int:
    if isinstance(engine, CudaEngine):
        return engine.pool_bytes()
    return sum(_bytes(t) for owned in table.owned.values() for t in owned)
