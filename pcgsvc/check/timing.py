"""Timing of captured entries, regions and boundaries apart, against plain execution.

In: a compiled model with its captured entries. Out: one row per (mode, size) in the report's form.
Times are microseconds; host time is until everything is enqueued, step time is per step of a
back-to-back run. Knows nothing of how entries were captured.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.session import Entry
from pcgsvc.config import Config, Mode
from pcgsvc.forward.plain import words_of
from pcgsvc.forward.samples import Samples
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.context import use_context
from pcgsvc.program.model import CompiledModel

logger = logging.getLogger(__name__)

_MAX_SECONDS = 0.2
"""A figure is taken of fewer repeats than asked for once it has taken this long (3 at least)."""
_WARMUPS = 4
"""Calls before `reduce-overhead` is timed: it compiles, warms up, records, and replays."""
_RUNS = 5
"""Runs that the back-to-back repeats are divided into, for their spread."""


class Times(NamedTuple):
    """What some calls take, in microseconds each time."""

    host: float
    """Until everything is enqueued; median."""
    step: float
    """Of runs back to back; their median."""
    low: float
    """Of the fastest such run."""
    high: float
    """Of the slowest."""


def time_entries(
    model: CompiledModel,
    memory: Workspace,
    table: GraphTable,
    samples: Samples,
    config: Config,
    *,
    rival: ReduceOverhead | None = None,
    on_entry: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Time every captured entry and the module on the same inputs.

    Where other processes run the same program, as many repeats are taken as `bench.repeats` asks
    for, however long they take: their boundaries must be called as often.

    Args:
        model: what was captured.
        memory: the workspace that it was captured on; its inputs are overwritten.
        table: the captured entries.
        samples: source of valid inputs and batches.
        config: `bench.repeats` timed calls are taken of each entry.
        rival: is timed beside them; None: nothing is.
        on_entry: called after each entry.

    Returns:
        Per entry: host_us (enqueue), step_us with step_low_us and step_high_us (its fastest and
        slowest run), plain_us (the module), region_us and boundary_us (only such steps of it), a
        verdict on what bounds it, and with a rival its reduce_overhead_us, unless it failed.
    """
    rows = []
    limit_s = float("inf") if model.ranks.many else _MAX_SECONDS
    sync = torch.cuda.synchronize if memory.stream is not None else lambda: None
    with torch.no_grad():
        for (mode, descriptor), entry in table.entries.items():
            size = descriptor.num_tokens
            batch = samples.batch(size, uniform=descriptor.uniform)
            query_len = config.capture.uniform_query_len if descriptor.uniform else None
            with memory.on_stream():
                memory.load(samples.inputs(size), size, size)
                full = mode is Mode.FULL
                with use_context(memory.context(batch, size, query_len, in_full_graph=full)):
                    plain = functools.partial(model.run_module, memory.views(size))
                    row = _time_entry(entry, plain, sync, config.bench.repeats, limit_s)
                    if rival is not None:
                        once = functools.partial(rival.call, memory.views(size))
                        if (step_us := rival.time(once, sync, config.bench.repeats)) is not None:
                            row["reduce_overhead_us"] = step_us
            rows.append({"mode": mode.value, "size": size, **row})
            on_entry()
    return rows


class ReduceOverhead:
    """A model's module under `torch.compile(mode="reduce-overhead")`: CUDA graphs of torch's own.

    Args:
        model: whose module is compiled, at the first call.
    """

    def __init__(self, model: CompiledModel) -> None:
        self._constants = model.arguments.constants
        self._compiled = torch.compile(model.module, mode="reduce-overhead", dynamic=True)
        self._works = True

    def call(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Call it; what it returns is overwritten by the next call."""
        torch.compiler.cudagraph_mark_step_begin()
        self._compiled(**inputs, **self._constants)

    def time(
        self, once: Callable[[], None], sync: Callable[[], None], repeats: int
    ) -> float | None:
        """Return microseconds of a call; None, with a warning, once it has failed."""
        if not self._works:
            return None
        try:
            for _ in range(_WARMUPS):
                once()
            return time_calls([once], sync, repeats).step
        except Exception as error:  # noqa: BLE001 - a comparison must not fail the job
            self._works = False
            words = "bench: reduce-overhead is not timed, since it failed: %s"
            logger.warning(words, words_of(error))
            return None


def _time_entry(
    entry: Entry,
    plain: Callable[[], Any],
    sync: Callable[[], None],
    repeats: int,
    limit_s: float,
) -> dict[str, Any]:
    pairs = list(zip(entry.steps, entry.is_region, strict=True))
    regions = [s for s, is_region in pairs if is_region]
    boundaries = [s for s, is_region in pairs if not is_region]
    whole = time_calls(entry.calls, sync, repeats, limit_s)
    region = time_calls(regions, sync, repeats, limit_s).step
    boundary = time_calls(boundaries, sync, repeats, limit_s).step
    return {
        "host_us": whole.host,
        "step_us": whole.step,
        "step_low_us": whole.low,
        "step_high_us": whole.high,
        "plain_us": time_calls([plain], sync, repeats, limit_s).step,
        "region_us": region,
        "boundary_us": boundary,
        "verdict": _verdict(whole.host, whole.step, region, boundary),
    }


def time_calls(
    calls: Sequence[Callable[[], Any]],
    sync: Callable[[], None],
    repeats: int,
    limit_s: float = _MAX_SECONDS,
) -> Times:
    """Return what calling all takes, `repeats` times one by one and as many back to back."""
    if not calls:
        return Times(0.0, 0.0, 0.0, 0.0)
    hosts: list[float] = []
    for call in calls:
        call()
    sync()
    begun = time.perf_counter()
    while len(hosts) < repeats and (len(hosts) < 3 or time.perf_counter() - begun < limit_s):
        started = time.perf_counter()
        for call in calls:
            call()
        hosts.append(time.perf_counter() - started)
        sync()
    counts = [len(hosts[at::_RUNS]) for at in range(min(_RUNS, len(hosts)))]
    runs = [_run_us(calls, sync, count) for count in counts]
    each = [run / count for run, count in zip(runs, counts, strict=True)]
    host = 1e6 * statistics.median(hosts)
    return Times(host, statistics.median(each), min(each), max(each))


def _run_us(calls: Sequence[Callable[[], Any]], sync: Callable[[], None], times: int) -> float:
    """Return microseconds of calling all so many times back to back."""
    started = time.perf_counter()
    for _ in range(times):
        for call in calls:
            call()
    sync()
    return 1e6 * (time.perf_counter() - started)


def _verdict(host: float, step: float, region: float, boundary: float) -> str:
    """Say what a step's time goes into."""
    if boundary > region:
        return "boundary-bound"
    return "launch-bound" if host >= 0.9 * step else "compute-bound"
