"""A sweep from its first job to its table.

In: a composed command, and what lets Hydra run it. Out: an exit code. Knows nothing of how one job
is run.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from types import FrameType

from omegaconf import DictConfig

from pcgsvc.config.compose import Command
from pcgsvc.jobs.sweep.finish import finish_sweep
from pcgsvc.jobs.sweep.outcome import FAILED, OK
from pcgsvc.jobs.sweep.task import Membership, run_task
from pcgsvc.jobs.sweep.watch import OVERRIDE, watching

Task = Callable[[DictConfig], int]


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
            launch(task, OVERRIDE)
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
