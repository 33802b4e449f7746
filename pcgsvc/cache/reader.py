"""The database as it lies there, read and nothing else.

In: kind and key. Out: the stored bytes, rows, and what is wrong with the database file. Writes
nothing, puts nothing aside; errors of SQLite come out as they are.

Goes straight to SQLite and the value files, past diskcache, so that a warm start opens nothing for
writing, and a read-only root is read in the same way as any other. No connection outlives the call
that made it: none is carried over a fork, or kept on a database that was put aside.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pcgsvc.cache.bytes_disk import fetch, parse_row_name, row_name
from pcgsvc.cache.envelope import AbsentError, DamagedError, Entry, Kind, decode
from pcgsvc.cache.faults import READ_ERRORS, Fault, classify

_COLUMNS = "key, raw, store_time, size, mode, filename, value"


@dataclass(frozen=True, slots=True)
class Record:
    """What the database says of one entry, unread."""

    kind: Kind
    key: str
    size: int
    """Of the envelope, in bytes."""
    stored: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All rows of a database."""

    records: list[Record]
    """Rows that carry a name of ours."""
    foreign: list[str]
    """Names of rows that are none of ours."""
    filenames: set[str]
    """Value files that rows name, relative to diskcache's folder."""


class Reader:
    """Look-ups in the database of one folder.

    Args:
        folder: diskcache's directory; it need not exist.
        query: of the SQLite URI: `mode=rw`, `mode=ro` or `mode=ro&immutable=1`.
        timeout_s: how long one statement waits for other connections.
    """

    def __init__(self, folder: Path, query: str, timeout_s: float) -> None:
        self.folder = folder
        self.database = folder / "cache.db"
        self.query = query
        self._timeout_s = timeout_s

    def read(self, kind: Kind, key: str) -> Entry:
        """Return the entry as it was written.

        Raises:
            MissError: there is none, or it is damaged.
            READ_ERRORS: the database cannot be read.
        """
        before = None
        while True:
            row = self._row(kind, key)
            if row is None:
                raise AbsentError("absent")
            try:
                return decode(fetch(self.folder, *row), kind, key)
            except FileNotFoundError:
                if row == before:
                    raise DamagedError("value file missing") from None
                before = row  # a writer may have replaced the row since we read it: look again

    def listing(self) -> Listing:
        """Return all rows.

        Raises:
            READ_ERRORS: the database cannot be read.
        """
        if not self.database.exists():
            return Listing([], [], set())
        sql = "SELECT key, size, store_time, filename FROM Cache ORDER BY key"
        with self.connect() as connection:
            found = connection.execute(sql).fetchall()
        records, foreign = [], []
        for name, size, stored, _ in found:
            if parsed := parse_row_name(name):
                records.append(Record(*parsed, int(_number(size)), _number(stored)))
            else:
                foreign.append(repr(name))
        return Listing(records, foreign, {f for *_, f in found if isinstance(f, str)})

    def fault(self) -> str | None:
        """Return what is wrong with the database file; None: nothing, or it cannot be judged."""
        try:
            if not self.database.exists():
                return None
            with self.connect() as connection:
                rows = connection.execute("PRAGMA integrity_check(1)").fetchall()
                connection.execute(f"SELECT {_COLUMNS} FROM Cache LIMIT 0")
                connection.execute("SELECT key, value FROM Settings LIMIT 0")
        except READ_ERRORS as error:
            fault, cause = classify(error, self.database)
            return cause if fault is Fault.BAD else None
        if rows == [("ok",)]:
            return None
        return " ".join(str(rows[0][0]).replace("*** in database main ***", "").split())

    def inode(self) -> int | None:
        """Return which file the database is, so that a replaced one is recognised."""
        # Only ever stat it: closing an ordinary descriptor of it would drop SQLite's own locks.
        try:
            return self.database.stat().st_ino
        except OSError:
            return None

    @contextlib.contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection that is closed at the end, and never makes a missing file."""
        uri = f"file:{quote(str(self.database))}?{self.query}"
        with contextlib.closing(
            sqlite3.connect(uri, uri=True, timeout=self._timeout_s, isolation_level=None)
        ) as connection:
            # Damaged text must reach our own checks, not fail in Python's decoder.
            connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            yield connection

    def _row(self, kind: Kind, key: str) -> tuple[object, object, object] | None:
        if not self.database.exists():
            return None
        sql = "SELECT mode, filename, value FROM Cache WHERE key = ? AND raw = 1"
        with self.connect() as connection:
            found = connection.execute(sql, (row_name(kind, key),)).fetchone()
        return None if found is None else (found[0], found[1], found[2])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
