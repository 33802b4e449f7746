"""Prometheus metrics of runners; extra `metrics`.

In: runners. Out: metric families, made of the runners' own exact counters when they are scraped.

| metric | labels | what |
|---|---|---|
| `pcgsvc_replays_total` | mode, size | calls that a graph served |
| `pcgsvc_fallbacks_total` | reason | calls without a graph |
| `pcgsvc_rows_total`, `pcgsvc_padding_rows_total` | | rows that ran: the callers', and padding |
| `pcgsvc_call_seconds` (histogram) | | a call; on CUDA until its work is launched |
| `pcgsvc_graph_pool_bytes`, `pcgsvc_device_bytes` | | what the graphs' pool, and the build, took |
| `pcgsvc_kv_blocks` | state: free, held | KV blocks that callers may use |
| `pcgsvc_start_info` | start: cold, warm; compiler; graphs | 1 |
| `pcgsvc_start_seconds` | phase | seconds of the build's phases, `total` being all |

Every metric has the label `runner`. Counters begin again when `reset_stats` is called.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pcgsvc.errors import PcgError
from pcgsvc.models.files import require
from pcgsvc.serve.runner import Runner

BUCKETS_S = tuple(round(base * 10.0**power, 6) for power in range(-5, 1) for base in (1, 2, 5))
"""Upper edges of the histogram's buckets, in seconds: 10 µs to 5 s."""


class PrometheusCollector:
    """Collects the metrics of runners; `prometheus_client.REGISTRY.register(…)` takes it.

    A scrape waits for the call that is running, as any other call does: let a thread serve it that
    may wait, not an event loop. Runners are not kept alive, and one that is closed has no metrics.
    One collector has all runners of a registry, since two would give one metric twice.

    Args:
        runner: one runner, or several by the value of their label `runner`.
        buckets_s: ascending upper edges of the histogram's buckets, in seconds.

    Raises:
        ConfigError: the package `prometheus_client` is missing.
    """

    def __init__(
        self, runner: Runner | Mapping[str, Runner], *, buckets_s: Sequence[float] = BUCKETS_S
    ) -> None:
        self._families = _families(require("prometheus_client.core", "metrics"))
        named = {"default": runner} if isinstance(runner, Runner) else dict(runner)
        self._watched = {name: _Watched(one, buckets_s) for name, one in named.items()}

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        families = {name: make() for name, make in self._families.items()}
        for name, watched in self._watched.items():
            watched.add_to(families, name)
        yield from families.values()


def _families(core: Any) -> dict[str, Callable[[], Any]]:
    """Return what makes each metric's family, by its name without the prefix."""
    counter, gauge = core.CounterMetricFamily, core.GaugeMetricFamily
    rows: list[tuple[Any, str, str, tuple[str, ...]]] = [
        (counter, "replays", "Calls that a graph served.", ("mode", "size")),
        (counter, "fallbacks", "Calls without a graph.", ("reason",)),
        (counter, "rows", "Rows of callers that ran.", ()),
        (counter, "padding_rows", "Rows of padding that ran.", ()),
        (
            core.HistogramMetricFamily,
            "call_seconds",
            "Seconds of a call (CUDA: its launch).",
            (),
        ),
        (gauge, "graph_pool_bytes", "Memory of the graphs' pool.", ()),
        (gauge, "device_bytes", "Device memory that the build took.", ()),
        (gauge, "kv_blocks", "KV blocks that callers may use.", ("state",)),
        (gauge, "start_info", "How the runner was built.", ("start", "compiler", "graphs")),
        (gauge, "start_seconds", "Seconds of the build's phases.", ("phase",)),
    ]
    return {
        name: partial(kind, f"pcgsvc_{name}", words, labels=("runner", *labels))
        for kind, name, words, labels in rows
    }


class _Watched:
    """One runner: a weak reference, and the times of its calls."""

    def __init__(self, runner: Runner, buckets_s: Sequence[float]) -> None:
        self._runner, self._edges = weakref.ref(runner), list(buckets_s)
        self._counts, self._sum = [0] * (len(self._edges) + 1), 0.0
        runner.time_calls(self._observe)

    def _observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(self._edges, seconds)] += 1
        self._sum += seconds

    def add_to(self, families: Mapping[str, Any], name: str) -> None:
        """Add the samples of a runner that is open."""
        runner = self._runner()
        if runner is None:
            return
        with runner.lock:  # one state of all counts
            try:
                runner.ensure_open()
            except PcgError:
                return
            stats, counts, total = runner.stats(), list(self._counts), self._sum
            blocks = runner.blocks
            kv = {} if blocks is None else {"free": blocks.num_free}
            kv |= {} if blocks is None else {"held": blocks.num_blocks - blocks.num_free}
        report = runner.report
        graphs, built = report["graphs"], report["compile"]
        for entry, count in stats["hits"].items():
            families["replays"].add_metric([name, *entry.split(":")], count)
        reasons: Counter[str] = Counter()
        for row in stats["fallbacks"]:
            reasons[row["reason"]] += row["count"]
        for reason, count in reasons.items():
            families["fallbacks"].add_metric([name, reason], count)
        edges = [*map(str, self._edges), "+Inf"]
        buckets = list(zip(edges, itertools.accumulate(counts), strict=True))
        families["call_seconds"].add_metric([name], buckets, sum_value=total)
        for key in ("rows", "padding_rows"):
            families[key].add_metric([name], stats[key])
        families["graph_pool_bytes"].add_metric([name], graphs["pool_bytes"])
        families["device_bytes"].add_metric([name], graphs["device_bytes"])
        for state, count in kv.items():
            families["kv_blocks"].add_metric([name, state], count)
        how = [built["start"], built["compiler"], graphs["backend"]]
        families["start_info"].add_metric([name, *how], 1)
        for phase, seconds in built["seconds"].items():
            families["start_seconds"].add_metric([name, phase], seconds)
