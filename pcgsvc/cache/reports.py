"""Looking at a whole store: is it sound, what is in it, what comes nearest to some facts.

In: the entries of a store and their index. Out: typed reports. Changes nothing unless asked to.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcgsvc.cache.entries import Entries, WriteError
from pcgsvc.cache.envelope import AbsentError, Kind, MissError
from pcgsvc.cache.index import Index
from pcgsvc.program.keys import flatten

ABSENT = "(absent)"
"""Stands for a fact that one of the two sides does not have."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be."""

    what: str
    """`program 0123…`, `piece 0123…` or `index`."""
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
    """Files that are no entry: left by a killed writer."""
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


def check(entries: Entries, index: Index, *, fix: bool) -> CheckReport:
    """Read every entry and compare files and piece lists.

    Args:
        entries: of the store.
        index: of the same store.
        fix: put damaged entries aside, drop incomplete programs, delete stray files and a damaged
            index.
    """
    fault = index.fault()
    problems = [] if fault is None else [Problem("index", fault)]
    if problems and fix:
        index.clear()
    programs: dict[str, tuple[str, ...]] = {}
    pieces: set[str] = set()
    size = 0
    for record in entries.scan():
        try:
            entry = entries.read(record.kind, record.key, heal=fix)
        except AbsentError:
            continue  # dropped meanwhile
        except MissError as miss:
            problems.append(Problem(_label(record.kind, record.key), str(miss)))
            continue
        size += record.size
        if record.kind is Kind.PIECE:
            pieces.add(record.key)
        else:
            programs[record.key] = entry.pieces
    problems += _incomplete(entries, programs, pieces, fix=fix)
    return CheckReport(
        num_programs=len(programs),
        num_pieces=len(pieces),
        num_bytes=size,
        problems=problems,
        orphans=sorted(pieces.difference(*programs.values())),
        strays=entries.strays(delete=fix),
        quarantined=entries.quarantine.items(),
    )


def _incomplete(
    entries: Entries, programs: Mapping[str, tuple[str, ...]], pieces: set[str], *, fix: bool
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
                entries.delete(Kind.PROGRAM, program)
    return problems


def list_programs(entries: Entries, index: Index) -> list[ProgramInfo]:
    """Return the stored programs, most recently used first; unreadable ones are left out."""
    headers = index.headers()
    records = {(record.kind, record.key): record for record in entries.scan()}
    infos = []
    for key, header in headers.items():
        record = records.get((Kind.PROGRAM, key))
        if record is None:
            continue  # dropped meanwhile
        pieces = [records.get((Kind.PIECE, piece)) for piece in set(header.pieces)]
        infos.append(
            ProgramInfo(
                key=key,
                num_bytes=record.size + sum(piece.size for piece in pieces if piece),
                num_pieces=len(pieces),
                created=header.created,
                last_use=record.last_use,
                facts=header.facts,
            )
        )
    return sorted(infos, key=lambda info: info.last_use, reverse=True)


def differing_facts(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[FactDifference]:
    """Return the facts in which two programs differ, by name."""
    old, new = flatten(stored), flatten(wanted)
    return [
        FactDifference(name, old.get(name, ABSENT), new.get(name, ABSENT))
        for name in sorted({*old, *new})
        if _canonical(old.get(name, ABSENT)) != _canonical(new.get(name, ABSENT))
    ]


def _canonical(value: Any) -> str:
    """Return equal text for values that are equal after a round trip through JSON."""
    return json.dumps(value, sort_keys=True, default=repr)


def _label(kind: Kind, key: str) -> str:
    return f"{kind.value} {key[:12]}"
