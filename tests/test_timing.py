"""Times of entries: medians of runs with their spread, and torch's reduce-overhead beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cli_helpers import Cli

from pcgsvc.check import timing
from pcgsvc.check.timing import time_calls
from pcgsvc.config import from_dict, resolve

TIMED = ["model.num_layers=1", "compiler=eager", "capture.sizes=[1,2]", "mode=piecewise"]
TIMED += ["bench.repeats=5", "device=cpu", "cache.mode=off"]


def test_one_slow_run_moves_the_spread_and_not_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], itertools.count(1)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 10.0 if next(calls) == 10 else 1.0

    times = time_calls([call], lambda: None, 5, float("inf"))
    assert times.host == times.step == times.low == 1e6
    assert times.high == 1e7


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Have torch.compile return the module, and keep what it was asked for."""
    asked: list[dict[str, Any]] = []

    def compile_(module: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
        asked.append(settings)
        return module

    rivals(monkeypatch, compile_)
    return asked


def rivals(monkeypatch: pytest.MonkeyPatch, made: Callable[..., Any]) -> None:
    """Replace torch.compile where it is asked for reduce-overhead; tracing uses it as well."""
    real = torch.compile

    def compile_(module: Any, **settings: Any) -> Any:
        return made(module, settings) if "mode" in settings else real(module, **settings)

    monkeypatch.setattr(torch, "compile", compile_)


def test_reduce_overhead_stands_beside_plain_and_replay(
    cli: Cli, compiled: list[dict[str, Any]], validate_report: Any
) -> None:
    done = cli(*TIMED, "bench.reduce_overhead=true")
    assert done.code == 0, done.out
    assert compiled == [{"mode": "reduce-overhead", "dynamic": True}]
    (report,) = done.reports
    validate_report(report)
    assert len(report["bench"]) == 2
    assert all(row["reduce_overhead_us"] > 0 for row in report["bench"])
    assert "reduce-" in done.out


def test_where_reduce_overhead_fails_it_is_said_once_and_the_job_goes_on(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no backend\nof that name")

    rivals(monkeypatch, lambda module, settings: broken)
    done = cli(*TIMED, "bench.reduce_overhead=true")
    assert done.code == 0, done.out
    assert not any("reduce_overhead_us" in row for row in done.reports[0]["bench"])
    words = "bench: reduce-overhead is not timed, since it failed: RuntimeError: no backend\n"
    assert done.out.count(words) == 1


def test_reduce_overhead_is_not_timed_where_an_op_may_not_be_captured(
    cli: Cli, compiled: list[dict[str, Any]]
) -> None:
    done = cli(*TIMED, "bench.reduce_overhead=true", "attention=varlen")
    assert done.code == 0, done.out
    assert not compiled


@pytest.mark.parametrize(
    ("tree", "device", "sizes", "timed", "rival"),
    [
        ({"prompt": "x"}, "cpu", [1, 16], False, False),
        ({"prompt": "x"}, "cuda", [1, 16], False, True),
        ({"prompt": "x", "capture": {"max_size": 8}}, "cpu", [1, 8], False, False),
        ({"prompt": "x", "capture": {"sizes": [3]}}, "cpu", [3], False, False),
        ({"prompt": "x", "bench": {"enabled": True}}, "cpu", [1, 16], True, False),
        ({"capture": {"max_size": 4}}, "cuda", [1, 2, 4], True, True),
        ({"capture": {"max_size": 1}}, "cpu", [1], True, False),
    ],
)
def test_a_prompt_has_few_sizes_and_no_times_unless_they_are_asked_for(
    tree: dict[str, Any], device: str, sizes: list[int], timed: bool, rival: bool
) -> None:
    done = resolve(from_dict(tree), device_type=device)
    assert done.capture.sizes == sizes
    assert (done.bench.enabled, done.bench.reduce_overhead) == (timed, rival)
