"""Structured log events: which there are, what they carry, and that they are few."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from core_helpers import build, make_config, rows, toy

import pcgsvc
from pcgsvc import events
from pcgsvc.config import CacheConfig
from pcgsvc.errors import SplitError
from pcgsvc.events import EVENTS, log_event, phase_events

DOCUMENTED = {
    name: re.findall(r"[a-z_]+", re.sub(r"\(.*?\)", "", fields))
    for name, fields in re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", events.__doc__ or "", re.M)
}
"""Fields by event, as the table in the module's docstring has them."""


class Kept(logging.Handler):
    """Keeps the records that it is given."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What pcgsvc logs during a test, all levels."""
    logger, kept = logging.getLogger("pcgsvc"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    yield kept.records
    logger.removeHandler(kept)
    logger.setLevel(level)


def named(records: list[logging.LogRecord], event: str) -> list[dict[str, Any]]:
    """Return the fields of each record of an event."""
    found = [vars(r) for r in records if getattr(r, "event", None) == event]
    return [{name: r[name] for name in DOCUMENTED[event]} for r in found]


def test_the_table_documents_every_event() -> None:
    assert set(DOCUMENTED) == set(EVENTS)
    assert DOCUMENTED["phase_end"] == ["phase", "seconds", "ok"]


def test_a_build_tells_its_phases_captures_and_cache_misses(
    records: list[logging.LogRecord], tmp_path: Any
) -> None:
    config = make_config(sizes=[2, 4])
    config.cache = CacheConfig(dir=str(tmp_path / "cache"))
    with pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config):
        started = [r["phase"] for r in named(records, "phase_start")]
        ended = named(records, "phase_end")
        assert sorted(started) == sorted(r["phase"] for r in ended)
        assert {"trace", "split", "compile", "load", "capture"} <= set(started)
        assert all(r["ok"] and r["seconds"] >= 0 for r in ended)
        (ready,) = named(records, "ready")
        assert ready["start"] == "cold"
        assert {"check", "trace", "capture", "verify", "other"} <= set(ready["parts"])
        assert sum(ready["parts"].values()) == pytest.approx(ready["seconds"])
        assert min(ready["parts"].values()) >= 0
        assert named(records, "capture") == [
            {"mode": "piecewise", "size": size, "uniform": False, "graphs": 2} for size in (4, 2)
        ]
        program, *pieces = named(records, "cache_miss")
        assert program["reason"] == "absent"
        assert len(pieces) >= 2
        assert all("absent" in row["reason"] for row in pieces)
    records.clear()
    with pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config):
        assert not named(records, "cache_miss")


def test_a_skipped_size_is_an_event(records: list[logging.LogRecord]) -> None:
    with build(toy(1), sizes=[2, 4], memory_budget=100):
        skipped = named(records, "capture_skipped")
    assert skipped
    assert all("memory_budget=100" in row["reason"] for row in skipped)
    assert {row["mode"] for row in skipped} == {"piecewise"}


def test_a_phase_that_fails_says_so(records: list[logging.LogRecord]) -> None:
    with pytest.raises(SplitError), phase_events(logging.getLogger("pcgsvc"), "split", 1):
        raise SplitError("no")
    assert [row["ok"] for row in named(records, "phase_end")] == [False]


def test_fallbacks_are_logged_once_per_reason_and_counted_at_the_end(
    records: list[logging.LogRecord],
) -> None:
    with build(toy(1), sizes=[2, 4], max_num_reqs=3) as runner:
        for count in (5, 6, 7, 8):
            runner(rows(count))
        for count in (4, 5):
            runner(rows(count), batch=pcgsvc.Batch(query_lens=[1] * count))
        told = named(records, "fallback")
        assert not named(records, "fallbacks")
    above, many = "above the largest capture size", "more requests than attention.max_num_reqs=3"
    assert told == [
        {"reason": above, "num_tokens": 5, "uniform": False},
        {"reason": many, "num_tokens": 4, "uniform": True},
    ]
    assert named(records, "fallbacks") == [
        {"reason": above, "calls": 4},
        {"reason": many, "calls": 2},
    ]
    levels = {r.levelname for r in records if getattr(r, "event", "") == "fallback"}
    assert levels == {"WARNING"}
    assert len(runner.stats()["fallbacks"]) == 6


def test_calls_that_no_graph_was_meant_for_are_no_warning(
    records: list[logging.LogRecord],
) -> None:
    with build(toy(1), mode="none") as runner:
        runner(rows(3))
    (record,) = [r for r in records if getattr(r, "event", "") == "fallback"]
    assert record.levelname == "INFO"


def test_a_served_call_logs_nothing(records: list[logging.LogRecord]) -> None:
    with build(toy(1), sizes=[4]) as runner:
        records.clear()
        for _ in range(3):
            runner(rows(3))
        assert not records


def test_an_event_carries_the_line_that_logged_it(records: list[logging.LogRecord]) -> None:
    log_event(logging.getLogger("pcgsvc.x"), logging.INFO, "cache_miss", "m", reason="r")
    assert records[-1].filename == "test_events.py"
    assert records[-1].getMessage() == "m"
    log_event(logging.getLogger("pcgsvc.x"), logging.NOTSET + 1, "cache_miss", "m", reason="r")
    assert len(records) == 1
