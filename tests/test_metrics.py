"""Prometheus metrics against what was called, and OpenTelemetry spans."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_helpers import build, toy

import pcgsvc
from pcgsvc import events

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

from pcgsvc.metrics import BUCKETS_S, PrometheusCollector  # noqa: E402  (after the skip)


@pytest.fixture
def runner() -> Iterator[pcgsvc.Runner]:
    with build(toy(1), sizes=[4, 8]) as runner:
        yield runner


def call(runner: pcgsvc.Runner, *rows: int) -> None:
    for count in rows:
        example = runner.memory.inputs[0].empty(count, torch.device("cpu")).zero_()
        runner(example)


def scraped(*collectors: PrometheusCollector) -> dict[tuple[str, ...], float]:
    """Return samples by name and label values, from the text that a server would read."""
    registry = prometheus_client.CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    text = prometheus_client.generate_latest(registry).decode()
    families = parser.text_string_to_metric_families(text)
    return {
        (sample.name, *(v for k, v in sample.labels.items() if k != "runner")): sample.value
        for family in families
        for sample in family.samples
    }


def test_counts_are_exactly_what_was_called(runner: pcgsvc.Runner) -> None:
    collector = PrometheusCollector(runner)
    call(runner, 1, 4, 3, 7, 9, 9, 20)
    got = scraped(collector)
    mode = runner.plan(4).mode.value
    replays = {key[1:]: v for key, v in got.items() if key[0] == "pcgsvc_replays_total"}
    assert replays == {(mode, "4"): 3, (mode, "8"): 1}
    assert sum(v for k, v in got.items() if k[0] == "pcgsvc_fallbacks_total") == 3
    assert got["pcgsvc_fallbacks_total", "above the largest capture size"] == 3
    assert got["pcgsvc_rows_total",] == 53
    assert got["pcgsvc_padding_rows_total",] == 3 + 1 + 1
    assert got["pcgsvc_call_seconds_count",] == 7
    assert got["pcgsvc_call_seconds_bucket", "+Inf"] == 7
    assert got["pcgsvc_call_seconds_sum",] > 0
    assert got["pcgsvc_graph_pool_bytes",] == runner.report["graphs"]["pool_bytes"]
    assert got["pcgsvc_start_info", "eager", "recorded", "cold"] == 1
    total = runner.report["compile"]["seconds"]["total"]
    assert got["pcgsvc_start_seconds", "total"] == total > 0


def test_a_call_that_is_refused_is_not_counted(runner: pcgsvc.Runner) -> None:
    collector = PrometheusCollector(runner)
    with pytest.raises(pcgsvc.PcgError):
        runner(torch.zeros(1))
    got = scraped(collector)
    assert (got["pcgsvc_rows_total",], got["pcgsvc_call_seconds_count",]) == (0, 0)


def test_buckets_are_cumulative_and_their_edges_count_below() -> None:
    with build(toy(1), sizes=[4]) as runner:
        collector = PrometheusCollector(runner, buckets_s=[0.5, 1.0])
        for seconds in (0.1, 0.5, 0.7, 3.0):
            runner._calls.counts.listeners[0](seconds)
        got = scraped(collector)
    buckets = [got["pcgsvc_call_seconds_bucket", edge] for edge in ("0.5", "1.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert got["pcgsvc_call_seconds_sum",] == pytest.approx(4.3)
    assert list(BUCKETS_S) == sorted(BUCKETS_S)


def test_runners_of_one_collector_are_told_apart_and_closed_ones_are_gone() -> None:
    first, second = build(toy(1), sizes=[4]), build(toy(1), sizes=[4])
    collector = PrometheusCollector({"a": first, "b": second})
    call(first, 2)

    def rows() -> dict[str, float]:
        (family,) = [f for f in collector.collect() if f.name == "pcgsvc_rows"]
        return {sample.labels["runner"]: sample.value for sample in family.samples}

    assert rows() == {"a": 2, "b": 0}
    first.close()
    assert rows() == {"b": 0}
    second.close()
    del first, second
    gc.collect()
    assert rows() == {}


def test_kv_blocks_are_free_or_held() -> None:
    from generate_helpers import load

    with load(**{"model.num_layers": 1, "capture.sizes": "[4]"}) as runner:
        collector = PrometheusCollector(runner)
        assert runner.blocks is not None
        held = runner.blocks.allocate(3)
        assert held is not None
        got = scraped(collector)
        assert got["pcgsvc_kv_blocks", "held"] == 3
        assert got["pcgsvc_kv_blocks", "free"] == runner.blocks.num_free


def test_without_listeners_a_call_takes_no_time(
    runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("the clock was read"))
    call(runner, 4)


def test_a_missing_package_is_named(runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(pcgsvc.PcgError, match=r"pcgsvc\[metrics\]"):
        PrometheusCollector(runner)


# ---- spans ---------------------------------------------------------------------------------------


class Tracer:
    """What `span` uses of OpenTelemetry's."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, int]]] = []

    def start_as_current_span(self, name: str, attributes: dict[str, int]) -> Any:
        self.spans.append((name, attributes))
        return nullcontext(SimpleNamespace(set_attributes=attributes.update))


def test_phases_steps_and_generate_are_spans_and_calls_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from generate_helpers import load

    tracer = Tracer()
    monkeypatch.setattr(events, "_tracer", lambda: tracer)
    with load(**{"model.num_layers": 1, "capture.sizes": "[4]"}) as runner:
        assert {"pcgsvc.trace", "pcgsvc.capture"} <= {name for name, _ in tracer.spans}
        tracer.spans.clear()
        runner(torch.tensor([1, 2]), torch.arange(2))
        assert tracer.spans == []
        runner.generate([[1, 2, 3]], 2, return_ids=True)
    assert tracer.spans == [
        ("pcgsvc.generate", {"pcgsvc.prompts": 1}),
        ("pcgsvc.step", {"pcgsvc.requests": 1, "pcgsvc.num_tokens": 3}),
        ("pcgsvc.step", {"pcgsvc.requests": 1, "pcgsvc.num_tokens": 1}),
    ]


def test_without_opentelemetry_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracer = events._tracer.__wrapped__()
    assert tracer is None
    monkeypatch.setattr(events, "_tracer", lambda: tracer)
    with events.span("x", texts=1):
        pass


WITH_SDK = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pcgsvc.events import span

with span("before"):
    pass  # the provider may be set later
spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
try:
    with span("outer", texts=1) as tell, span("inner"):
        tell(texts=2)
        raise ValueError("x")
except ValueError:
    pass
inner, outer = spans.get_finished_spans()
assert (inner.name, outer.name, dict(outer.attributes)) == ("inner", "outer", {"pcgsvc.texts": 2})
assert inner.parent.span_id == outer.context.span_id
assert not inner.status.is_ok
"""


def test_spans_reach_the_provider_that_the_process_has_set() -> None:
    pytest.importorskip("opentelemetry.sdk")
    subprocess.run([sys.executable, "-c", WITH_SDK], check=True, timeout=60)
