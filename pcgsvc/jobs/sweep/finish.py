"""The end of a sweep: what its jobs left on disk becomes one comparison and one exit code.

In: a sweep's folder. Out: the table, its files, and the code. Knows nothing of how jobs were run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pcgsvc.errors import ConfigError
from pcgsvc.jobs.sweep.outcome import FAILED, OK
from pcgsvc.jobs.sweep.records import Record, Status, read_records
from pcgsvc.report.comparison import show_and_write
from pcgsvc.report.differences import differing_overrides
from pcgsvc.report.rows import Facts, Row, facts_of
from pcgsvc.report.tables import console


def finish_sweep(
    folder: Path, sweep: str, overrides: Sequence[list[str]] | None, *, interrupted: bool
) -> int | None:
    """Print and write what became of every job.

    Args:
        folder: of the sweep.
        sweep: which one.
        overrides: of each job that there should be; None: only the sweeper knew.
        interrupted: whether it was ended from outside.

    Returns:
        0 if every job was done, else 1; None if none was begun, and nothing is written then.
    """
    records = read_records(folder, sweep, overrides, interrupted=interrupted)
    if all(record.status is Status.NOT_RUN for record in records):
        return None
    rows = _rows(records, folder)
    show_and_write(console(), _title(rows), rows, folder)
    return OK if all(row.ok for row in rows) else FAILED


def _title(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    jobs = f"{len(rows)} job{'s' if len(rows) > 1 else ''}"
    return f"sweep of {jobs}: " + ", ".join(f"{n} {status}" for status, n in counts.items())


def _rows(records: Sequence[Record], folder: Path) -> list[Row]:
    differs = differing_overrides([record.overrides for record in records])
    rows = []
    for at, record in enumerate(records):
        facts, fault = _facts(record)
        failed = fault is not None and record.status is Status.DONE
        rows.append(
            Row(
                name=str(record.number),
                differs=differs[at],
                status=(Status.FAILED if failed else record.status).value,
                reason=fault if failed else record.reason,
                overrides=record.overrides,
                place=_within(record.report, folder),
                output=_within(record.output, folder),
                wall_s=record.seconds or None,
                peak_host_bytes=record.peak_host_bytes,
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
