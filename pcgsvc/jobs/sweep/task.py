"""What Hydra calls for each job: a single one here, one of a sweep apart from the others.

In: a composed job, while Hydra's own settings for it are in force. Out: its exit code; a sweep's
job leaves its record too. May run in a process of a launcher's (joblib, submitit).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pcgsvc.config import Config
from pcgsvc.config.compose import from_tree
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.sweep.isolate import Isolated, run_isolated
from pcgsvc.jobs.sweep.outcome import BAD_CONFIG, FAILED, OK, Outcome, perform
from pcgsvc.jobs.sweep.records import Record, Status, write_record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Membership:
    """Which sweep a job belongs to."""

    sweep: str
    total: int | None
    """Number of its jobs; None: only the sweeper knows."""


def run_task(composed: DictConfig, membership: Membership | None) -> int:
    """Run one job; `membership` is None for a job that is no part of a sweep."""
    if membership is not None:
        return _run_in_sweep(composed, membership)
    config = _config(composed)
    if isinstance(config, Outcome):
        return config.code
    with contextlib.chdir(HydraConfig.get().runtime.cwd):  # paths mean what the shell meant
        return perform(config, _report_path(config), verbose=bool(HydraConfig.get().verbose)).code


def _run_in_sweep(composed: DictConfig, membership: Membership) -> int:
    hydra = HydraConfig.get()
    record = Record(
        sweep=membership.sweep,
        number=hydra.job.num,
        overrides=list(hydra.overrides.task),
        folder=str(Path(hydra.runtime.output_dir)),
    )
    (Path(record.folder) / "report.json").unlink(missing_ok=True)  # of an earlier sweep
    write_record(record)
    started = time.perf_counter()
    config = _config(composed)
    if isinstance(config, Outcome):
        outcome = config
    else:
        with contextlib.chdir(hydra.runtime.cwd):
            if config.sweep.isolate:
                outcome, record = _isolated(config, record)
            else:
                outcome = perform(config, _report_path(config), verbose=bool(hydra.verbose))
    record = replace(
        record,
        status=Status.DONE if outcome.code == OK else Status.FAILED,
        reason=outcome.reason,
        seconds=time.perf_counter() - started,
        report=str(outcome.report) if outcome.report else None,
    )
    write_record(record)
    _say(record, membership)
    return OK if outcome.code == OK else FAILED


def _config(composed: DictConfig) -> Config | Outcome:
    """Convert what Hydra composed; other sweepers than Hydra's own are met here only."""
    try:
        return from_tree(composed)
    except ConfigError as error:
        reason = f"ConfigError: {error}"
        logger.error("%s", reason)
        return Outcome(code=BAD_CONFIG, reason=reason)


def _report_path(config: Config) -> Path:
    """Return where a job's report goes, as an absolute path."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    return Path(config.report).absolute() if config.report else folder / "report.json"


def _isolated(config: Config, record: Record) -> tuple[Outcome, Record]:
    hydra = HydraConfig.get()
    logging_config: Any = OmegaConf.to_container(hydra.job_logging, resolve=True)
    verbose = hydra.verbose
    if OmegaConf.is_config(verbose):
        verbose = OmegaConf.to_container(verbose, resolve=True)
    try:
        done: Isolated = run_isolated(
            config,
            _report_path(config),
            Path(record.folder),
            logging_config=logging_config,
            verbose=verbose,
            timeout_s=config.sweep.timeout_s,
        )
    except OSError as error:  # no memory for a process, no room for its output
        return Outcome(code=FAILED, reason=f"the job's process cannot be started: {error}"), record
    return done.outcome, replace(
        record, peak_host_bytes=done.peak_host_bytes, output=str(done.output)
    )


def _say(record: Record, membership: Membership) -> None:
    """Log one line per job."""
    total = membership.total
    name = f"job {record.number}"
    if total is not None:
        name += f" ({record.number + 1} of {total})"
    if record.status is Status.DONE:
        logger.info("%s: done in %.1f s", name, record.seconds)
        return
    where = os.path.relpath(record.output or record.folder, HydraConfig.get().runtime.cwd)
    logger.error("%s: failed after %.1f s: %s [%s]", name, record.seconds, record.reason, where)
