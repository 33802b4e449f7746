"""What Hydra calls for each job: a single one here, one of a sweep apart from the others.

In: a composed job, while Hydra's own settings for it are in force. Out: its exit code; a sweep's
job leaves its record in its folder and returns it too. May run in a process of a launcher's, also
on another machine (joblib, Ray, submitit).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pcgsvc.config.tree import from_tree, plain
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.sweep.isolate import run_isolated
from pcgsvc.jobs.sweep.objective import result_of
from pcgsvc.jobs.sweep.outcome import BAD_CONFIG, FAILED, OK, Outcome, perform
from pcgsvc.jobs.sweep.records import OUTPUT, REPORT, Record, Returned, Status, write_record

logger = logging.getLogger(__name__)


_MOST_OUTPUT = 1 << 20
"""Bytes of a job's output, its last ones, that come back from another machine."""


@dataclass(frozen=True)
class Membership:
    """Which sweep a job belongs to."""

    sweep: str
    total: int | None
    """Number of its jobs; None: only the sweeper knows."""


def run_task(composed: DictConfig) -> int:
    """Run a job that is no part of a sweep; return its exit code."""
    return _run(composed, may_isolate=False).code


def run_member(composed: DictConfig, membership: Membership) -> Returned:
    """Run one job of a sweep."""
    hydra = HydraConfig.get()
    record = Record(
        sweep=membership.sweep,
        number=hydra.job.num,
        overrides=list(hydra.overrides.task),
        folder=hydra.runtime.output_dir,
        host=socket.gethostname(),
    )
    (Path(record.folder) / REPORT).unlink(missing_ok=True)  # of an earlier sweep
    write_record(record)
    started = time.perf_counter()
    outcome = _run(composed, may_isolate=True)
    record = replace(
        record,
        status=Status.DONE if outcome.code == OK else Status.FAILED,
        reason=outcome.reason,
        seconds=time.perf_counter() - started,
        peak_host_bytes=outcome.peak_host_bytes,
        report=outcome.report,
        output=outcome.output,
    )
    write_record(record)
    _log(record, membership.total)
    files = {REPORT: outcome.report, OUTPUT: outcome.output}
    return Returned(
        record=record,
        place=str(hydra.sweep.subdir),
        files={name: _end_of(Path(path), name) for name, path in files.items() if path},
        value=result_of(outcome.code, outcome.report, composed.sweep.objective),
    )


def _end_of(path: Path, name: str) -> bytes:
    content = path.read_bytes()
    return content if name == REPORT else content[-_MOST_OUTPUT:]


def _run(composed: DictConfig, *, may_isolate: bool) -> Outcome:
    """Run a job as Hydra composed it, in a process of its own if its config asks for that."""
    hydra = HydraConfig.get()
    try:
        config = from_tree(composed)  # the first check of jobs of other sweepers than Hydra's own
    except ConfigError as error:
        reason = f"ConfigError: {error}"
        logger.error("%s", reason)
        return Outcome(code=BAD_CONFIG, reason=reason)
    folder = Path(hydra.runtime.output_dir)
    with _in_folder(hydra.runtime.cwd):
        report = Path(config.report).absolute() if config.report else folder / REPORT
        if not (may_isolate and config.sweep.isolate):
            return perform(config, report, verbose=bool(hydra.verbose))
        verbose, logs = plain(hydra.verbose), plain(hydra.job_logging)
        try:
            return run_isolated(config, report, folder, logging_config=logs, verbose=verbose)
        except OSError as error:  # no memory for a process, no room for its output
            reason = f"the job's process cannot be started: {error}"
            return Outcome(code=FAILED, reason=reason)


def _in_folder(name: str) -> contextlib.AbstractContextManager[None]:
    """Let paths mean what the shell meant, unless another machine has no such folder."""
    return contextlib.chdir(name) if Path(name).is_dir() else contextlib.nullcontext()


def _log(record: Record, total: int | None) -> None:
    """Log one line per job."""
    name = f"job {record.number}"
    if total is not None:
        name += f" ({record.number + 1} of {total})"
    if record.status is Status.DONE:
        logger.info("%s: done in %.1f s", name, record.seconds)
        return
    where = os.path.relpath(record.output or record.folder, HydraConfig.get().runtime.cwd)
    logger.error("%s: failed after %.1f s: %s [%s]", name, record.seconds, record.reason, where)
