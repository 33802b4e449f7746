"""A sweep from its first job to its table.

In: a composed command, and a function that lets Hydra run it. Out: an exit code. Hydra's callbacks
say where the sweep's folder is and how many jobs are over; they reach the process of the command
line only, and do nothing in a launcher's own processes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from pcgsvc.config.compose import Command
from pcgsvc.events import Progress
from pcgsvc.jobs.sweep.finish import finish_sweep
from pcgsvc.jobs.sweep.outcome import FAILED, OK
from pcgsvc.jobs.sweep.task import Membership, run_task
from pcgsvc.report.progress import progress_for
from pcgsvc.report.tables import console

Task = Callable[[DictConfig], int]

_CURRENT: ContextVar[Watch | None] = ContextVar("_CURRENT", default=None)

_CALLBACK = f"++hydra.callbacks.pcgsvc._target_={__name__}.current"
"""The override that has Hydra call the watch of this process."""


def run_sweep(
    command: Command,
    launch: Callable[[Task, str], None],
    complain: Callable[[Exception], object],
) -> int:
    """Run a sweep; its table and its exit code come from what the jobs left on disk.

    Args:
        command: as composed.
        launch: lets Hydra run the task for each job, with one more override of Hydra's own.
        complain: prints an error.

    Raises:
        KeyboardInterrupt: the sweep was ended from outside; its table has been printed.
        Exception: it failed before its first job.
    """
    total = None if command.overrides is None else len(command.overrides)
    membership = Membership(uuid.uuid4().hex, total)

    def task(composed: DictConfig) -> int:  # a launcher may send it to another process
        return run_task(composed, membership)

    error: BaseException | None = None
    with term_interrupts(), watching(total) as watch:
        try:
            launch(task, _CALLBACK)
        except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - raised after the table
            error = raised
    code = None
    if watch.folder is not None and watch.folder.is_dir():
        interrupted = isinstance(error, KeyboardInterrupt)
        words = command.overrides
        code = finish_sweep(watch.folder, membership.sweep, words, interrupted=interrupted)
    if isinstance(error, Exception) and code is not None:  # it broke in the midst of its jobs
        complain(error)
        return FAILED
    if error is not None:
        raise error
    return OK if code is None else code


@contextlib.contextmanager
def term_interrupts() -> Iterator[None]:
    """Let SIGTERM end a sweep as Ctrl-C does: its job is ended, and what is done is shown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# ---- Hydra's callbacks ---------------------------------------------------------------------------


class Watch(Callback):
    """Notes a sweep's folder; draws a bar where jobs run one by one and print nothing here."""

    def __init__(self, total: int | None) -> None:
        self.folder: Path | None = None
        """Absolute; None: Hydra has not come so far."""
        self._total = total
        self._progress: Progress | None = None
        self._stack = contextlib.ExitStack()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See `Callback`; Hydra has resolved the sweep's folder."""
        self.folder = Path(config.hydra.sweep.dir).absolute()
        one_by_one = config.hydra.launcher._target_.endswith(f".{BasicLauncher.__name__}")
        if self._total is not None and one_by_one and config.sweep.isolate:
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
