"""Timing of captured entries, regions and boundaries apart, against plain execution.

In: the parts of a runner. Out: one row per (mode, size) in the report's form. Times are
microseconds; host time is until everything is enqueued, step time is per step of a back-to-back
run. Knows nothing of how entries were captured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pcgsvc.capture.session import Entry
from pcgsvc.check.verify import module_results
from pcgsvc.config import Mode
from pcgsvc.forward.samples import Samples
from pcgsvc.ops.context import use_context
from pcgsvc.serve.runner import RunnerParts

_MAX_SECONDS = 0.2
"""A figure is taken of fewer repeats than asked for once it has taken this long (3 at least)."""


def bench_entries(
    parts: RunnerParts,
    samples: Samples,
    *,
    repeats: int,
    lockstep: bool = False,
    on_entry: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Time every captured entry and the module on the same inputs.

    `lockstep`: take as many repeats as asked for, however long they take, since the boundaries
    wait for other processes that must call them as often.

    Returns:
        Per entry: host_us (enqueue), step_us, plain_us (the module), region_us and boundary_us
        (only such steps of it), and a verdict on what bounds it.
    """
    rows = []
    limit_s = float("inf") if lockstep else _MAX_SECONDS
    with torch.no_grad():
        for (mode, descriptor), entry in parts.table.entries.items():
            size = descriptor.num_tokens
            batch = samples.batch(size, uniform=descriptor.uniform)
            with parts.workspace.on_stream():
                parts.workspace.load(samples.inputs(size), size, size)
                query_len = parts.config.capture.uniform_query_len if descriptor.uniform else None
                context = parts.workspace.context(
                    batch, size, query_len, in_full_graph=mode is Mode.FULL
                )
                with use_context(context):
                    row = _time_entry(parts, entry, size, repeats, limit_s)
            rows.append({"mode": mode.value, "size": size, **row})
            on_entry()
    return rows


def _time_entry(
    parts: RunnerParts, entry: Entry, size: int, repeats: int, limit_s: float
) -> dict[str, Any]:
    views = parts.workspace.views(size)
    sync = _synchronise if parts.workspace.stream is not None else _nothing
    pairs = list(zip(entry.steps, entry.is_region, strict=True))
    regions = [s for s, is_region in pairs if is_region]
    boundaries = [s for s, is_region in pairs if not is_region]
    host, step = time_calls(entry.steps, sync, repeats, limit_s)
    _, region = time_calls(regions, sync, repeats, limit_s)
    _, boundary = time_calls(boundaries, sync, repeats, limit_s)
    _, plain = time_calls([lambda: module_results(parts, views)], sync, repeats, limit_s)
    return {
        "host_us": host,
        "step_us": step,
        "plain_us": plain,
        "region_us": region,
        "boundary_us": boundary,
        "verdict": _verdict(host, step, region, boundary),
    }


def time_calls(
    calls: Sequence[Callable[[], Any]],
    sync: Callable[[], None],
    repeats: int,
    limit_s: float = _MAX_SECONDS,
) -> tuple[float, float]:
    """Return (median host time, mean time per run back to back) of calling all, in µs."""
    if not calls:
        return 0.0, 0.0
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
    started = time.perf_counter()
    for _ in hosts:
        for call in calls:
            call()
    sync()
    total = time.perf_counter() - started
    return 1e6 * statistics.median(hosts), 1e6 * total / len(hosts)


def _verdict(host: float, step: float, region: float, boundary: float) -> str:
    """Say what a step's time goes into."""
    if boundary > region:
        return "boundary-bound"
    return "launch-bound" if host >= 0.9 * step else "compute-bound"


def _synchronise() -> None:
    torch.cuda.synchronize()


def _nothing() -> None:
    return None
