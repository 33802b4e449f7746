"""Progress bars for long phases, in a terminal only.

In: phases and units. Out: bars.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pcgsvc.events import Progress as Listener
from pcgsvc.events import Silent


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


@contextlib.contextmanager
def progress_for(console: Console) -> Iterator[Listener]:
    """Yield a listener that draws bars if `console` is a terminal, else one that is silent."""
    if not console.is_terminal:
        yield Silent()
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
