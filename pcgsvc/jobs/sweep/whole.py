"""A sweep from its first job to its table.

In: a composed command, and a function that lets Hydra run it. Out: an exit code. Hydra's callbacks
say where the sweep's folder is and how many jobs are over; they reach the process of the command
line only, and do nothing in a launcher's own processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.markup import escape

from pcgsvc.config.compose import Command
from pcgsvc.errors import ConfigError
from pcgsvc.events import Progress
from pcgsvc.jobs.sweep.launchers import taking_from
from pcgsvc.jobs.sweep.objective import write_best
from pcgsvc.jobs.sweep.outcome import FAILED, OK
from pcgsvc.jobs.sweep.records import Record, Returned, Status, keep, read_records
from pcgsvc.jobs.sweep.task import Membership, run_member
from pcgsvc.report.comparison import show_and_write
from pcgsvc.report.progress import progress_for
from pcgsvc.report.rows import Facts, Row, differing_overrides, facts_of
from pcgsvc.report.tables import console

Task = Callable[[DictConfig], object]

_CURRENT: ContextVar[Watch | None] = ContextVar("_CURRENT", default=None)

_CALLBACK = f"++hydra.callbacks.pcgsvc._target_={__name__}.current"
"""The override that has Hydra call the watch of this process."""


def run_sweep(
    command: Command,
    launch: Callable[[Task, str], None],
    complain: Callable[[Exception], object],
) -> int:
    """Run a sweep; its table and its exit code come from what the jobs left and gave back.

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

    # A launcher may send it to another process, on another machine.
    def task(composed: DictConfig) -> Returned:
        return run_member(composed, membership)

    error: BaseException | None = None
    with term_interrupts(), watching(membership) as watch:
        try:
            launch(task, _CALLBACK)
        except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - raised after the table
            error = raised
    code = None
    if watch.folder is not None and watch.folder.is_dir():
        interrupted = isinstance(error, KeyboardInterrupt)
        records = read_records(
            watch.folder,
            membership.sweep,
            command.overrides,
            watch.lost,
            interrupted=interrupted,
        )
        code = _show(records, watch.folder)
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
    """Notes a sweep's folder and what its jobs give back.

    Draws a bar where jobs run one by one and print nothing here.
    """

    def __init__(self, membership: Membership, stack: contextlib.ExitStack) -> None:
        self.folder: Path | None = None
        """Absolute; None: Hydra has not come so far."""
        self.lost: dict[int, Record] = {}
        """Jobs that gave nothing back, by number, with the reason."""
        self._membership, self._stack = membership, stack
        self._progress: Progress | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """See `Callback`; Hydra has resolved the sweep's folder."""
        self.folder = Path(config.hydra.sweep.dir).absolute()
        launcher, total = config.hydra.launcher._target_, self._membership.total
        self._stack.enter_context(taking_from(launcher, self._take))
        if (
            total is not None
            and launcher.endswith(f".{BasicLauncher.__name__}")
            and config.sweep.isolate
        ):
            self._progress = self._stack.enter_context(progress_for(console()))
            self._progress.start("sweep", total)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Count a job."""
        if self._progress is not None:
            self._progress.advance()

    def _take(self, number: int, overrides: list[str], given: Returned | Exception) -> None:
        """Keep what a job gave back, or why it gave nothing."""
        assert self.folder is not None
        if isinstance(given, Returned):
            keep(given, self.folder)
            return
        self.lost[number] = Record(
            sweep=self._membership.sweep,
            number=number,
            overrides=overrides,
            folder=str(self.folder),
            status=Status.FAILED,
            reason=f"lost: {type(given).__name__}: {str(given).strip()}",
        )

    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        """Be nothing in another process."""
        return Callback, ()


def current() -> Callback:
    """Return the watch of the sweep that is running; for Hydra."""
    return _CURRENT.get() or Callback()


@contextlib.contextmanager
def watching(membership: Membership) -> Iterator[Watch]:
    """Yield a watch that Hydra will find; the bar is gone at the end of the block."""
    with contextlib.ExitStack() as stack:
        watch = Watch(membership, stack)
        stack.callback(_CURRENT.reset, _CURRENT.set(watch))
        yield watch


# ---- the table -----------------------------------------------------------------------------------


def _show(records: Sequence[Record], folder: Path) -> int | None:
    """Print and write how every job ended.

    Returns:
        0 if every job was done, else 1; None if none was begun, and nothing is written then.
    """
    if all(record.status is Status.NOT_RUN for record in records):
        return None
    rows = _rows(records, folder)
    counts = Counter(row.status for row in rows)
    jobs = f"{len(rows)} job{'s' if len(rows) > 1 else ''}"
    title = f"sweep of {jobs}: {', '.join(f'{n} {status}' for status, n in counts.items())}"
    show_and_write(console(), title, rows, folder)
    for path in write_best(rows, folder):
        use = f"--config-dir={path.parents[1]} preset={path.stem}"
        console().print(f"[bold]best[/]      {escape(use)}", soft_wrap=True)
    return OK if all(row.ok for row in rows) else FAILED


def _rows(records: Sequence[Record], folder: Path) -> list[Row]:
    differs, rows = differing_overrides([record.overrides for record in records]), []
    for at, record in enumerate(records):
        facts, fault = _facts(record)
        failed = fault is not None and record.status is Status.DONE
        rows.append(
            Row(
                name=str(record.number),
                differs=differs[at],
                status=Status.FAILED if failed else record.status,
                reason=fault if failed else record.reason,
                overrides=record.overrides,
                place=_within(record.report, folder),
                output=_within(record.output, folder),
                wall_s=record.seconds or None,
                peak_host_bytes=record.peak_host_bytes,
                host=record.host,
                facts=facts,
            )
        )
    return rows


def _facts(record: Record) -> tuple[Facts | None, str | None]:
    """Read a job's report; what is wrong with it, if anything, comes second."""
    if record.report is None:
        return None, None
    try:
        return facts_of(json.loads(Path(record.report).read_text())), None
    except (OSError, ValueError, ConfigError) as error:
        return None, f"its report cannot be read: {error}"


def _within(path: str | None, folder: Path) -> str | None:
    """Return a path relative to the sweep's folder, so that the folder may be moved."""
    return None if path is None else os.path.relpath(path, folder)
