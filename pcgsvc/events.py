"""Structured log events: ordinary log records that also carry fields for programs.

In: a logger, an event's name, a message, fields. Out: a record with `record.event` and an attribute
per field. Configures no handler and no level; a JSON formatter, or a filter on `record.event`, is
the reader's. Long phases are timed, logged and reported to a progress listener by `Phases`.

| event | level | fields |
|---|---|---|
| `phase_start` | DEBUG | phase, total (units, 0: unknown) |
| `phase_end` | INFO | phase, seconds, ok (false: an error ended it) |
| `capture` | DEBUG | mode, size, uniform, graphs |
| `capture_skipped` | WARNING | mode, size, reason |
| `cache_miss` | INFO for a program, DEBUG for its pieces | reason |
| `healed` | WARNING | reason (a stored program was wrong, and is built cold) |
| `fallback` | INFO, or WARNING where graphs were meant to serve | reason, num_tokens, uniform |
| `ready` | INFO | start (cold, warm or plan), seconds, parts (seconds by name; their sum is that) |
| `progress` | INFO | phase, done, total (units), seconds (a phase that takes long, no terminal) |
| `fallbacks` | INFO | reason, calls (in all; one event per reason when the runner is closed) |

Phases: import, trace, split, compile, load, check, capture, verify, prove, count, bench, traffic.

Where OpenTelemetry's API is installed, phases, steps of `Slots`, `generate` and `embed` are spans
as well, of whatever tracer provider the process has set; calls of a runner are not.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pcgsvc.version import __version__

logger = logging.getLogger(__name__)

EVENTS = (
    "phase_start",
    "phase_end",
    "capture",
    "capture_skipped",
    "cache_miss",
    "healed",
    "fallback",
    "ready",
    "progress",
    "fallbacks",
)


def log_event(
    logger: logging.Logger, level: int, event: str, message: str, *args: Any, **fields: Any
) -> None:
    """Log a message as an event, as if from the caller's line."""
    if logger.isEnabledFor(level):
        logger.log(level, message, *args, extra={"event": event, **fields}, stacklevel=2)


def count(number: int, one: str, many: str | None = None) -> str:
    """Return a number and its noun."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def memory(num_bytes: int) -> str:
    """Return bytes in the unit that people read."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


PHASES = ("import", "weights", "trace", "split", "compile", "load", "warmup", "capture", "total")
"""What `Phases.seconds` always has, in the order of the report."""


class Progress(Protocol):
    """Listens to long phases."""

    def start(self, phase: str, total: int) -> None:
        """A phase of `total` units begins."""

    def advance(self) -> None:
        """One unit is done."""

    def stop(self) -> None:
        """The phase is over."""


class Silent:
    """Progress that nothing shows."""

    def start(self, phase: str, total: int) -> None:
        """See `Progress.start`."""

    def advance(self) -> None:
        """See `Progress.advance`."""

    def stop(self) -> None:
        """See `Progress.stop`."""


class Phases:
    """Times the phases of a job, logs them, and reports them to a progress listener.

    Args:
        progress: None for none.
        weights_s: how long the model took to build before the first phase, in seconds.
    """

    def __init__(self, progress: Progress | None = None, weights_s: float = 0.0) -> None:
        self.progress = progress or Silent()
        self.seconds = {**dict.fromkeys(PHASES, 0.0), "weights": weights_s}
        """Per phase, in seconds; a phase that runs twice is added up."""
        self._started = time.perf_counter() - weights_s

    @contextlib.contextmanager
    def phase(self, name: str, total: int = 1) -> Iterator[list[str]]:
        """Time a block of `total` units; log its start and its end, also if it fails.

        Yields a list; what the block puts into it is logged at the end as well.
        """
        self.progress.start(name, total)
        started = time.perf_counter()
        try:
            with phase_events(logger, name, total) as details:
                yield details
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.progress.stop()

    def ready(self, start: str) -> dict[str, Any]:
        """Log that all is done, as an event; return its fields, which a report has as `ready`."""
        total = time.perf_counter() - self._started
        parts = {"model" if k == "weights" else k: v for k, v in self.seconds.items() if v}
        parts["other"] = total - sum(parts.values())
        fields = {"start": start, "seconds": total, "parts": parts}
        words = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
        message = "ready: %.3f s, %s start: %s"
        log_event(logger, logging.INFO, "ready", message, total, start, words, **fields)
        return fields

    def since_start(self) -> dict[str, float]:
        """Return the seconds of every phase, `total` being the time since the job began."""
        return {**self.seconds, "total": time.perf_counter() - self._started}


@contextlib.contextmanager
def phase_events(logger: logging.Logger, phase: str, total: int) -> Iterator[list[str]]:
    """Log the start and the end of a phase around a block; also of one that fails.

    Yields a list; what the block puts into it is logged at the end as well.
    """
    details: list[str] = []
    log_event(logger, logging.DEBUG, "phase_start", "%s: begins", phase, phase=phase, total=total)
    started, ok = time.perf_counter(), False
    try:
        with span(f"pcgsvc.{phase}"):
            yield details
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
            "".join(f", {part}" for part in details),
            phase=phase,
            seconds=seconds,
            ok=ok,
        )


@functools.cache
def _tracer() -> Any:
    """Return OpenTelemetry's tracer, which follows the provider that is set later; None without."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("pcgsvc", __version__)


@contextlib.contextmanager
def span(name: str, **attributes: int) -> Iterator[Callable[..., None]]:
    """Make a block an OpenTelemetry span with attributes `pcgsvc.…`, where its API is installed.

    Yields what takes further ones, once they are known.
    """
    tracer = _tracer()
    if tracer is None:
        yield lambda **more: None
        return
    with tracer.start_as_current_span(name, attributes=_prefixed(attributes)) as current:
        yield lambda **more: current.set_attributes(_prefixed(more))


def _prefixed(attributes: dict[str, int]) -> dict[str, int]:
    return {f"pcgsvc.{key}": value for key, value in attributes.items()}
