"""The sweep as Hydra sees it: where its folder is, and how many of its jobs are over.

In: Hydra's callbacks. Out: the folder, and a progress bar in a terminal. Lives in the process of
the command line; a launcher's own processes get a copy that does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from pcgsvc.events import Progress
from pcgsvc.report.progress import progress_for
from pcgsvc.report.tables import console

_CURRENT: ContextVar[Watch | None] = ContextVar("_CURRENT", default=None)

OVERRIDE = f"++hydra.callbacks.pcgsvc._target_={__name__}.current"
"""Has Hydra call the watch of this process; it goes before the overrides of a command line."""


class Watch(Callback):
    """What Hydra tells of one sweep."""

    def __init__(self, total: int | None) -> None:
        self.folder: Path | None = None
        """Absolute; None: Hydra has not come so far."""
        self._total = total
        self._progress: Progress | None = None
        self._stack = contextlib.ExitStack()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the folder; draw a bar where jobs run one by one and print nothing here."""
        self.folder = Path(config.hydra.sweep.dir).absolute()
        one_by_one = config.hydra.launcher._target_.endswith(f".{BasicLauncher.__name__}")
        if self._total is None or not (one_by_one and config.sweep.isolate):
            return
        self._progress = self._stack.enter_context(progress_for(console()))
        self._progress.start("sweep", self._total)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Count a job."""
        if self._progress is not None:
            self._progress.advance()

    def close(self) -> None:
        """Take the bar away."""
        self._progress = None
        self._stack.close()

    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        """Be nothing in another process."""
        return Callback, ()


def current() -> Callback:
    """Return the watch of the sweep that is running; for Hydra."""
    return _CURRENT.get() or Callback()


@contextlib.contextmanager
def watching(total: int | None) -> Iterator[Watch]:
    """Yield a watch that Hydra will find; the bar is gone at the end of the block."""
    watch = Watch(total)
    token = _CURRENT.set(watch)
    try:
        yield watch
    finally:
        _CURRENT.reset(token)
        watch.close()
