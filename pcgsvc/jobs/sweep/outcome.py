"""Run one job: its exit code, what went wrong, and the path of its report.

In: a config. Out: an `Outcome`; an error is a log message and never an exception.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pcgsvc.config import Config
from pcgsvc.errors import ConfigError, PcgError

logger = logging.getLogger(__name__)

OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130
"""Exit codes of the command line; 130 is 128 + SIGINT, as shells report it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one job ended."""

    code: int
    reason: str | None = None
    """What went wrong; None if nothing did."""
    report: str | None = None
    """Path of the report that it wrote, also where it failed afterwards; None: it wrote none."""
    peak_host_bytes: int | None = None
    """The most memory that its process held; None: not known, or it had no process of its own."""
    output: str | None = None
    """Path of what it printed; None: it printed into this process's output."""


def perform(config: Config, report_path: Path, *, verbose: bool) -> Outcome:
    """Run a job; an error is logged as one readable message.

    Args:
        config: as composed.
        report_path: where its report is to go.
        verbose: log the traceback of an error as well.
    """
    # These import torch, which a bad command line need not wait for.
    from pcgsvc.jobs.run import run_job
    from pcgsvc.ops.expert_group import command_line_group

    before = _stamp(report_path)
    code, reason = OK, None
    try:
        with command_line_group(config):
            run_job(config, report_path)
    except Exception as error:  # a job's failure is its own: the next one runs
        code = BAD_CONFIG if isinstance(error, ConfigError) else FAILED
        reason = f"{type(error).__name__}: {str(error).strip()}"
        hint = "" if isinstance(error, PcgError) or verbose else " (hydra.verbose=true shows where)"
        logger.error("%s%s", reason, hint, exc_info=error if verbose else None)
    after = _stamp(report_path)
    written = after is not None and after != before
    return Outcome(code=code, reason=reason, report=str(report_path) if written else None)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes whenever a report is written; None: there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
