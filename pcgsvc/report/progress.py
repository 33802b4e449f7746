"""Progress bars for long phases, in a terminal only.

In: phases and units. Out: bars. Knows nothing of what the phases do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pcgsvc.progress import Progress as Listener
from pcgsvc.progress import Silent


class Bars:
    """One bar per phase; a phase that is over stays as a line."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("start", total=1, visible=False)

    def start(self, phase: str, total: int) -> None:
        """See `progress.Progress.start`."""
        self._task = self._bars.add_task(phase, total=total)

    def advance(self) -> None:
        """See `progress.Progress.advance`."""
        self._bars.advance(self._task)

    def stop(self) -> None:
        """See `progress.Progress.stop`."""
        task = self._bars.tasks[self._task]
        self._bars.update(self._task, completed=task.total)


@contextlib.contextmanager
def progress_for(console: Console) -> Iterator[Listener]:
    """Yield a listener that draws bars if `console` is a terminal, else one that is silent."""
    if not console.is_terminal:
        yield Silent()
        return
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield Bars(bars)
