"""What is known of each job of a sweep, on disk, in whichever process it ran.

In: a sweep's folder, and what launchers bring home from others. Out: a `Record` per job. Knows
nothing of Hydra or processes.

A record is written as `running` before its job starts and again when it ends, so that a job whose
process was lost has left a trace.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pcgsvc.report.files import write_json, write_whole

NAME = "job.json"
"""A record's file, in its job's folder."""
REPORT = "report.json"
"""A job's report there."""
OUTPUT = "output.txt"
"""What a job prints, there."""


class Status(enum.StrEnum):
    """How a job ended, or that it has not."""

    DONE = "done"
    FAILED = "failed"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One job of a sweep."""

    sweep: str
    """Which sweep; folders of an earlier one may be beside it."""
    number: int
    """Its place in the sweep, from 0."""
    overrides: list[str]
    folder: str
    """Absolute."""
    host: str | None = None
    """Name of the machine that ran it; None: it was never begun."""
    status: Status = Status.RUNNING
    reason: str | None = None
    """What went wrong; None if nothing did."""
    seconds: float = 0.0
    """Wall time, the start of its process included."""
    peak_host_bytes: int | None = None
    """The most memory that its process held; None: not known."""
    report: str | None = None
    """Absolute path of its report; None: it wrote none."""
    output: str | None = None
    """Absolute path of what it printed; None: it printed into the sweep's own output."""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """What a job of a sweep gives back through its launcher."""

    record: Record
    place: str
    """Its folder, below the sweep's."""
    files: dict[str, bytes]
    """Its report and the end of its output, under their names in that folder."""
    value: int | float | list[float]
    """For the sweeper."""


def keep(returned: Returned, folder: Path) -> None:
    """Write what a job gave back into the sweep's folder, unless it ran there and has done so."""
    record, here = returned.record, folder / returned.place
    if _read(here / NAME) == record:
        return
    here.mkdir(parents=True, exist_ok=True)
    for name, content in returned.files.items():
        write_whole(here / name, content)
    report, output = (
        str(here / name) if name in returned.files else None for name in (REPORT, OUTPUT)
    )
    write_record(replace(record, folder=str(here), report=report, output=output))


def write_record(record: Record) -> None:
    """Write a job's record into its folder."""
    write_json(Path(record.folder) / NAME, asdict(record))


def read_records(
    folder: Path,
    sweep: str,
    overrides: Sequence[list[str]] | None,
    lost: Mapping[int, Record],
    *,
    interrupted: bool,
) -> list[Record]:
    """Return a record per job, by number; jobs that left none are `NOT_RUN`.

    Args:
        folder: of the sweep.
        sweep: which one; records of others are passed over.
        overrides: of each expected job; None: take those that left a record.
        lost: the jobs that gave nothing back, by number, with the reason.
        interrupted: whether the sweep was ended from outside.
    """
    ended = "the sweep was interrupted" if interrupted else None
    found = {}
    for path in folder.rglob(NAME):
        record = _read(path)
        if record is None or record.sweep != sweep:
            continue
        if record.status is Status.RUNNING:
            status = Status.INTERRUPTED if interrupted else Status.FAILED
            reason = ended or "the process that ran it ended without a word"
            record = replace(record, status=status, reason=reason)
        found[record.number] = record
    for number, record in lost.items():
        begun = found.get(number, record)
        found[number] = replace(begun, status=record.status, reason=record.reason)
    for number, words in enumerate(overrides or []):
        missing = Record(
            sweep=sweep,
            number=number,
            overrides=words,
            folder=str(folder),
            status=Status.NOT_RUN,
            reason=ended or "the launcher never started it",
        )
        found.setdefault(number, missing)
    return [found[number] for number in sorted(found)]


def _read(path: Path) -> Record | None:
    """Return a record; None for any other file of that name."""
    try:
        tree = json.loads(path.read_text())
        return Record(**{**tree, "status": Status(tree["status"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
