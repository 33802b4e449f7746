"""Looking at a whole store: is it sound, what is in it, what comes nearest to some facts.

In: a `Table` and its `Pins`. Out: typed reports. Changes nothing unless asked to.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pcgsvc.cache.envelope import AbsentError, Entry, Kind, MissError
from pcgsvc.cache.faults import READ_ERRORS
from pcgsvc.cache.reader import Record
from pcgsvc.cache.table import Table
from pcgsvc.cache.usage import Pins
from pcgsvc.cache.writer import WriteError

logger = logging.getLogger(__name__)

ABSENT = "(absent)"
"""Stands for a fact that one of the two sides does not have."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be."""

    what: str
    """`program 0123…`, `piece 0123…`, `row …` or `database`."""
    cause: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found."""

    num_programs: int
    """Sound ones."""
    num_pieces: int
    """Sound ones."""
    num_bytes: int
    """Of all sound entries."""
    problems: list[Problem]
    """Damage. Each is a miss when it is met, never a wrong result."""
    orphans: list[str]
    """Sound pieces that no program lists: of a build that runs now, or that was killed."""
    strays: list[Path]
    """Files that no row names: left by a killed writer."""
    quarantined: list[Path]
    """What was put aside."""

    @property
    def ok(self) -> bool:
        """Whether there is no damage; orphans and strays only take space."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """One stored program."""

    key: str
    num_bytes: int
    """Of its manifest and its pieces; shared pieces count for each program."""
    num_pieces: int
    created: float
    """Seconds since the epoch."""
    last_use: float
    """Seconds since the epoch."""
    summary: Mapping[str, Any]
    """The facts in which the stored programs differ; empty for a single one."""
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FactDifference:
    """One fact that differs."""

    name: str
    stored: Any
    """`ABSENT` if the stored program has no such fact."""
    wanted: Any
    """`ABSENT` if the wanted program has no such fact."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The stored program that differs in the fewest facts."""

    key: str
    differences: list[FactDifference]
    """By name; empty if all facts agree."""


NOTHING = CheckReport(0, 0, 0, [], [], [], [])
"""What `check` finds where nothing is stored."""


def check(table: Table, *, fix: bool) -> CheckReport:
    """Read every entry and compare rows, files and piece lists.

    Args:
        table: where the entries lie.
        fix: put damaged entries aside, drop incomplete programs, delete stray files.
    """
    fault = table.verify() if fix else table.reader.fault()
    problems = [Problem("database", fault)] if fault else []
    look = table if fix else table.reader  # the table puts aside what the reader only sees
    try:
        listing = look.listing()
    except (MissError, *READ_ERRORS) as error:
        problems = problems or [Problem("database", str(error))]
        return replace(NOTHING, problems=problems, quarantined=table.quarantine.items())
    problems += [Problem(f"row {name}", "no row of pcgsvc") for name in listing.foreign]
    programs: dict[str, tuple[str, ...]] = {}
    pieces: set[str] = set()
    size = 0
    for record in listing.records:
        try:
            entry = look.read(record.kind, record.key)
        except AbsentError:
            continue  # dropped since the listing
        except (MissError, *READ_ERRORS) as error:
            problems.append(Problem(_label(record.kind, record.key), str(error)))
            continue
        size += record.size
        if record.kind is Kind.PIECE:
            pieces.add(record.key)
        else:
            programs[record.key] = entry.pieces
    problems += _incomplete(table, programs, pieces, fix=fix)
    return CheckReport(
        num_programs=len(programs),
        num_pieces=len(pieces),
        num_bytes=size,
        problems=problems,
        orphans=sorted(pieces.difference(*programs.values())),
        strays=table.strays(delete=fix),
        quarantined=table.quarantine.items(),
    )


def _incomplete(
    table: Table, programs: Mapping[str, tuple[str, ...]], pieces: set[str], *, fix: bool
) -> list[Problem]:
    problems = []
    for program, needed in programs.items():
        missing = [key[:12] for key in needed if key not in pieces]
        if not missing:
            continue
        cause = f"{len(missing)} of its {len(needed)} pieces missing: {', '.join(missing)}"
        problems.append(Problem(_label(Kind.PROGRAM, program), cause))
        if fix:
            with contextlib.suppress(WriteError):
                table.delete(Kind.PROGRAM, program)
    return problems


def num_bytes(table: Table) -> int:
    """Return the size of all entries; 0 if they cannot be read."""
    return sum(record.size for record in _records(table))


def list_programs(table: Table, pins: Pins) -> list[ProgramInfo]:
    """Return the stored programs, most recently used first; none if they cannot be read."""
    sizes = {(record.kind, record.key): record.size for record in _records(table)}
    programs = list(_programs(table))
    flat = [flatten(entry.facts) for _, entry in programs]
    names = sorted({name for facts in flat for name in facts})
    differing = [n for n in names if len({_canonical(f.get(n, ABSENT)) for f in flat}) > 1]
    infos = [
        ProgramInfo(
            key=record.key,
            num_bytes=record.size + sum(sizes.get((Kind.PIECE, p), 0) for p in set(entry.pieces)),
            num_pieces=len(set(entry.pieces)),
            created=entry.created,
            last_use=pins.last_use(record),
            summary={name: facts.get(name, ABSENT) for name in differing},
            facts=entry.facts,
        )
        for (record, entry), facts in zip(programs, flat, strict=True)
    ]
    return sorted(infos, key=lambda info: info.last_use, reverse=True)


def nearest_program(table: Table, pins: Pins, facts: Mapping[str, Any]) -> Nearest | None:
    """Return the stored program whose facts differ least, or None if there is none.

    Of several the most recently used.
    """
    found = [
        (len(differences), -pins.last_use(record), Nearest(record.key, differences))
        for record, entry in _programs(table)
        for differences in [differing_facts(entry.facts, facts)]
    ]
    return min(found, key=lambda item: item[:2])[2] if found else None


def differing_facts(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[FactDifference]:
    """Return the facts in which two programs differ, by name."""
    old, new = flatten(stored), flatten(wanted)
    return [
        FactDifference(name, old.get(name, ABSENT), new.get(name, ABSENT))
        for name in sorted({*old, *new})
        if _canonical(old.get(name, ABSENT)) != _canonical(new.get(name, ABSENT))
    ]


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names; lists stay whole."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def _records(table: Table) -> list[Record]:
    try:
        return table.listing().records
    except MissError as miss:
        logger.warning("cache: %s", miss)
        return []


def _programs(table: Table) -> Iterator[tuple[Record, Entry]]:
    for record in _records(table):
        if record.kind is Kind.PROGRAM:
            with contextlib.suppress(MissError):  # damaged ones are logged where they are met
                yield record, table.read(record.kind, record.key)


def _canonical(value: Any) -> str:
    """Return equal text for values that are equal after a round trip through JSON."""
    return json.dumps(value, sort_keys=True, default=repr)


def _label(kind: Kind, key: str) -> str:
    return f"{kind.value} {key[:12]}"
