"""Structured log events: ordinary log records that also carry fields for programs.

In: a logger, an event's name, a message, fields. Out: a record with `record.event` and an attribute
per field. Configures no handler and no level; a JSON formatter, or a filter on `record.event`, is
the reader's. Knows nothing of what happens.

| event | level | fields |
|---|---|---|
| `phase_start` | DEBUG | phase, total (units, 0: unknown) |
| `phase_end` | INFO | phase, seconds, ok (false: an error ended it) |
| `capture` | DEBUG | mode, size, uniform, graphs |
| `capture_skipped` | WARNING | mode, size, reason |
| `cache_miss` | INFO for a program, DEBUG for its pieces | reason |
| `fallback` | INFO, or WARNING where graphs were meant to serve | reason, num_tokens, uniform |
| `fallbacks` | INFO | reason, calls (in all; one event per reason when the runner is closed) |

Phases: import, trace, split, compile, load, capture, verify, bench, traffic.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

logger = logging.getLogger(__name__)

EVENTS = (
    "phase_start",
    "phase_end",
    "capture",
    "capture_skipped",
    "cache_miss",
    "fallback",
    "fallbacks",
)


def log_event(
    logger: logging.Logger, level: int, event: str, message: str, *args: Any, **fields: Any
) -> None:
    """Log a message as an event, as if from the caller's line."""
    if logger.isEnabledFor(level):
        logger.log(level, message, *args, extra={"event": event, **fields}, stacklevel=2)


@contextlib.contextmanager
def phase_events(logger: logging.Logger, phase: str, total: int) -> Iterator[list[str]]:
    """Log the start and the end of a phase around a block; also of one that fails.

    Yields a list; what the block puts into it is said at the end as well.
    """
    said: list[str] = []
    log_event(logger, logging.DEBUG, "phase_start", "%s: begins", phase, phase=phase, total=total)
    started, ok = time.perf_counter(), False
    try:
        yield said
        ok = True
    finally:
        seconds = time.perf_counter() - started
        words = "%s: %.3f s%s" if ok else "%s: failed after %.3f s%s"
        log_event(
            logger,
            logging.INFO,
            "phase_end",
            words,
            phase,
            seconds,
            "".join(f", {part}" for part in said),
            phase=phase,
            seconds=seconds,
            ok=ok,
        )


@contextlib.contextmanager
def phase(
    name: str, seconds: dict[str, float], progress: Progress, total: int = 1
) -> Iterator[None]:
    """Time a phase, report it, and log one line."""
    progress.start(name, total)
    started = time.perf_counter()
    try:
        with phase_events(logger, name, total):
            yield
    finally:
        seconds[name] += time.perf_counter() - started
        progress.stop()


class Progress(Protocol):
    """Hears of long phases."""

    def start(self, phase: str, total: int) -> None:
        """A phase of `total` units begins."""

    def advance(self) -> None:
        """One unit is done."""

    def stop(self) -> None:
        """The phase is over."""


class Silent:
    """Progress that nobody watches."""

    def start(self, phase: str, total: int) -> None:
        """See `Progress.start`."""

    def advance(self) -> None:
        """See `Progress.advance`."""

    def stop(self) -> None:
        """See `Progress.stop`."""
