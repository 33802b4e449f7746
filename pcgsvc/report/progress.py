"""Progress of long phases: bars in a terminal, else a line every few seconds.

In: phases and units. Out: bars, or log lines.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pcgsvc.events import Progress as Listener
from pcgsvc.events import log_event

logger = logging.getLogger(__name__)

_EVERY_S = 5.0
"""Seconds between two lines of a long phase."""


class Bars:
    """The bar of the phase that runs; its result is a log line above."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("start", total=1, visible=False)

    def start(self, phase: str, total: int) -> None:
        """See `events.Progress.start`."""
        # One unit cannot be counted: its bar moves to and fro until it is done.
        self._task = self._bars.add_task(phase, total=total if total > 1 else None)

    def advance(self) -> None:
        """See `events.Progress.advance`."""
        self._bars.advance(self._task)

    def stop(self) -> None:
        """See `events.Progress.stop`."""
        self._bars.update(self._task, visible=False)
        self._bars.stop_task(self._task)


class Lines:
    """A log line every `every_s` seconds of a phase that takes longer, from a thread of its own."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self._done = 0

    def start(self, phase: str, total: int) -> None:
        """See `events.Progress.start`."""
        self._over, self._done = threading.Event(), 0
        threading.Thread(target=self._tell, args=(self._over, phase, total), daemon=True).start()

    def _tell(self, over: threading.Event, phase: str, total: int) -> None:
        started = time.perf_counter()
        while not over.wait(self._every_s):
            seconds, done = time.perf_counter() - started, self._done
            count = f"{done} of {total}, " if total > 1 else ""
            fields: dict[str, Any] = {"phase": phase, "done": done, "total": total}
            words = f"{phase}: {count}still running after {seconds:.0f} s"
            log_event(logger, logging.INFO, "progress", words, seconds=seconds, **fields)

    def advance(self) -> None:
        """See `events.Progress.advance`."""
        self._done += 1

    def stop(self) -> None:
        """See `events.Progress.stop`."""
        self._over.set()


@contextlib.contextmanager
def progress_for(console: Console) -> Iterator[Listener]:
    """Yield a listener: bars if `console` is a terminal, else log lines."""
    if not console.is_terminal:
        lines = Lines(_EVERY_S)
        try:
            yield lines
        finally:
            lines.stop()
        return
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn())
    stdout = sys.stdout
    with (
        Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars,
        _log_above(stdout),
    ):
        yield Bars(bars)


@contextlib.contextmanager
def _log_above(stdout: object) -> Iterator[None]:
    """Send log lines for `stdout` through what rich put there, so that they do not tear the bars.

    A handler keeps the stream that it was made with, and rich replaces `sys.stdout` only.
    """
    moved = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is stdout:
            moved.append((handler, handler.setStream(sys.stdout)))
    try:
        yield
    finally:
        for handler, before in moved:
            handler.setStream(before)
