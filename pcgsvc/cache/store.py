"""Key and bytes: the disk store of programs and the pieces that they share.

In: hex keys, bytes, readable facts. Out: the same bytes, or a miss that names its cause; never an
exception for what lies on the disk, and never anything but what was written. Knows nothing of
graphs, torch or models, and not what a key is made of.

Below the data folder (`cache_root`): `db/` (diskcache: rows and value files), `db.lock`,
`evict.lock`, `locks/` (one writer per key), `pins/` (who uses what, and since when), `quarantine/`,
`inductor/` and `triton/` (scratch of the compilers).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pcgsvc.cache import reports
from pcgsvc.cache.entries import Entries
from pcgsvc.cache.envelope import AbsentError, Entry, Kind, MissError, check_key, encode
from pcgsvc.cache.lookup import Built, Counts, Lookup, Made
from pcgsvc.cache.reports import CheckReport, FactDifference, Nearest, ProgramInfo
from pcgsvc.cache.root import DataFolder, find_root, open_data_folder
from pcgsvc.cache.scratch import CompilerDirs, Scratch
from pcgsvc.cache.usage import no_eviction
from pcgsvc.cache.writer import WriteError
from pcgsvc.config import CacheMode
from pcgsvc.errors import CacheError

__all__ = [
    "Built",
    "CheckReport",
    "CompilerDirs",
    "Counts",
    "Entry",
    "FactDifference",
    "Kind",
    "Lookup",
    "Made",
    "MissError",
    "Nearest",
    "ProgramInfo",
    "Store",
]

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 8 << 30
"""Budget of a store: programs with all their pieces, in bytes."""
DEFAULT_TIMEOUT_S = 10.0
"""How long one read or write waits for other processes."""
LOCK_TIMEOUT_S = 600.0
"""How long a build waits for another process that builds the same: a cold compile takes minutes."""


class Store:
    """Programs and pieces in one data folder; `Store.open` finds and checks it.

    Safe from any thread and from any number of processes. What was got or put is in use by this
    process, and so kept from eviction, until `close`.

    Args:
        folder: where; None leaves no file anywhere.
        mode: what may be done; without a folder it is `off`.
        max_bytes: budget; whole programs go, least recently used first, when it is passed.
        timeout_s: how long one read or write waits for other processes.
    """

    def __init__(
        self,
        folder: DataFolder | None,
        *,
        mode: CacheMode = CacheMode.READWRITE,
        max_bytes: int = DEFAULT_MAX_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.folder = folder
        self.mode = CacheMode.OFF if folder is None else mode
        self.max_bytes = max_bytes
        self.counts = Counts()
        self._entries: Entries | None = None
        if folder is not None and mode is not CacheMode.OFF:
            self._entries = Entries(folder, mode=mode, max_bytes=max_bytes, timeout_s=timeout_s)
        self._scratch = Scratch(folder.data if folder is not None and self.writable else None)
        self._mutex = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: str | None = None,
        *,
        mode: CacheMode = CacheMode.READWRITE,
        max_bytes: int = DEFAULT_MAX_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Store:
        """Find the root (see `cache_root.find_root`), check it, and open the store in it.

        Raises:
            CacheError: the place is not safe to load from, or is no folder.
        """
        if mode is CacheMode.OFF:
            return cls(None)
        root, source = find_root(directory)
        folder = open_data_folder(root, source, write=mode is not CacheMode.READ)
        logger.debug("cache: %s (%s), mode %s", folder.data, source, mode.value)
        return cls(folder, mode=mode, max_bytes=max_bytes, timeout_s=timeout_s)

    @property
    def writable(self) -> bool:
        """Whether anything is stored."""
        return self._entries is not None and self._entries.writable

    # ---- single entries --------------------------------------------------------------------------

    def get_program(self, key: str) -> Lookup:
        """Return a program's manifest, the keys of its pieces and its facts, or the miss.

        Raises:
            CacheError: the key is malformed; nothing else is raised.
        """
        found = self._get(Kind.PROGRAM, key)
        self._count(Kind.PROGRAM, key, found.miss)
        return found

    def get_piece(self, key: str) -> Lookup:
        """Return a piece's bytes and facts, or the miss; see `get_program`."""
        found = self._get(Kind.PIECE, key)
        self._count(Kind.PIECE, key, found.miss)
        return found

    def put_program(
        self, key: str, manifest: bytes, *, pieces: Sequence[str], facts: Mapping[str, Any]
    ) -> bool:
        """Store a program, after its pieces.

        Args:
            key: hex sha256 over the facts.
            manifest: what is needed to put the program together again; not empty.
            pieces: keys of all pieces that it needs.
            facts: what the key was made of, of JSON types.

        Returns:
            Whether it lies in the store now. If not, the reason was logged.

        Raises:
            CacheError: a malformed key, an empty manifest, or facts that JSON cannot hold.
        """
        return self.put(Built(manifest, facts, pieces).entry(Kind.PROGRAM, key))

    def put_piece(self, key: str, value: bytes, *, facts: Mapping[str, Any]) -> bool:
        """Store a piece; see `put_program`."""
        return self.put(Built(value, facts).entry(Kind.PIECE, key))

    def read(self, kind: Kind, key: str) -> Entry:
        """Return a whole entry or raise the `MissError`; counts nothing, holds nothing in use."""
        if self._entries is None:
            raise AbsentError("cache off")
        return self._entries.table.read(kind, key)

    def put(self, entry: Entry, *, in_use: bool = True) -> bool:
        """Store a whole entry as it is; see `put_program`. `in_use`: until `close`."""
        if self._entries is None or self._closed:
            encode(entry)  # a caller's mistake is an error in every mode
            return False
        stored = self._entries.put(entry, in_use=in_use)
        with self._mutex:
            self.counts.stored += stored
        return stored

    def drop(self, kind: Kind, key: str) -> None:
        """Delete one entry, whoever uses it; a missing one is fine.

        Raises:
            CacheError: the store cannot be written.
        """
        try:
            self._writing("drop").table.delete(kind, key)
        except WriteError as error:
            raise CacheError(f"cache drop: {error}.") from error

    def _get(self, kind: Kind, key: str) -> Lookup:
        check_key(key)
        if self._closed:
            return Lookup(None, "store is closed")
        return Lookup(None, "cache off") if self._entries is None else self._entries.get(kind, key)

    def _count(self, kind: Kind, key: str, miss: str | None) -> None:
        with self._mutex:
            self.counts.add(kind, key, miss)

    # ---- one builder per key ---------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self, key: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[bool]:
        """Keep other processes and threads from building the same; a killed holder frees it.

        A thread may take it twice. Take a program's before those of its pieces.

        Yields:
            Whether the lock is held. True as well where nothing is stored, and so nobody could
            load what another one built.
        """
        check_key(key)
        if self._entries is None or not self.writable:
            yield True
            return
        with self._entries.lock(key, timeout_s) as held:
            yield held

    def get_or_build(
        self,
        key: str,
        build: Callable[[], Built],
        *,
        kind: Kind = Kind.PIECE,
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> Made:
        """Load an entry, or build and store it, once among all processes.

        Args:
            key: of the entry.
            build: called at most once, with the key's lock held; its errors come out as they are.
            kind: of the entry.
            timeout_s: how long to wait for another process that builds it. After that it is built
                here and not stored.
        """
        found = self._get(kind, key)
        if found.value is None:
            with self.lock(key, timeout_s) as held:
                miss = found.miss
                found = self._get(kind, key)  # whoever held the lock before may have stored it
                if found.value is None:
                    self._count(kind, key, miss)
                    return self._build(kind, key, build, miss, store=held)
        self._count(kind, key, None)
        return Made(found.value, found.facts, found.pieces, None, True)

    def _build(
        self, kind: Kind, key: str, build: Callable[[], Built], miss: str | None, *, store: bool
    ) -> Made:
        if not store:
            logger.warning(
                "cache: %s %s: its lock is not to be had: built here as well, and not stored",
                kind.value,
                key[:12],
            )
        built = build()
        stored = store and self.put(built.entry(kind, key))
        return Made(built.value, built.facts, tuple(built.pieces), miss, stored)

    # ---- the whole store -------------------------------------------------------------------------

    def check(self, *, fix: bool = False) -> CheckReport:
        """Read every entry, and compare rows, files and piece lists.

        Args:
            fix: put damaged entries aside, drop incomplete programs, delete stray files.
        """
        if self._entries is None:
            return reports.NOTHING
        return reports.check(self._entries.table, fix=fix and self.writable)

    def ls(self) -> list[ProgramInfo]:
        """Return the stored programs, most recently used first; none if they cannot be read."""
        if self._entries is None:
            return []
        return reports.list_programs(self._entries.table, self._entries.pins)

    def nearest(self, facts: Mapping[str, Any]) -> Nearest | None:
        """Return the stored program that differs from `facts` in the fewest, and in which."""
        if self._entries is None:
            return None
        return reports.nearest_program(self._entries.table, self._entries.pins, facts)

    def num_bytes(self) -> int:
        """Return the size of all entries; 0 if they cannot be read."""
        return 0 if self._entries is None else reports.num_bytes(self._entries.table)

    def clear(self) -> int:
        """Delete all entries, those in use and the quarantine included; return their bytes.

        The compilers' scratch folders stay if a store that is open now uses them.

        Raises:
            CacheError: the store is not ours to write, or another process is writing.
        """
        entries = self._writing("clear")
        num_bytes = self.num_bytes()
        try:
            entries.clear()
            self._scratch.clear()
        except (WriteError, OSError) as error:
            raise CacheError(f"cache clear: {error}; try again later.") from error
        return num_bytes

    @contextlib.contextmanager
    def no_eviction(self) -> Iterator[None]:
        """Let no process drop anything for the budget, as long as this lasts.

        Raises:
            CacheError: the store is not ours to write, or entries are being dropped right now.
        """
        with no_eviction(self._writing("import").table.data):
            yield

    def _writing(self, what: str) -> Entries:
        if self._entries is None or not self._entries.writable or self._closed:
            reason = self.why_not_writable() or "the store is closed"
            raise CacheError(f"cache {what}: nothing can be written: {reason}.")
        return self._entries

    def why_not_writable(self) -> str:
        """Return why nothing is stored, or an empty string."""
        if self.writable:
            return ""
        reason = self.folder.reason if self.folder is not None else ""
        return reason or f"cache.mode={self.mode.value}"

    # ---- compilers, and the end ------------------------------------------------------------------

    def compiler_dirs(self) -> CompilerDirs:
        """Return scratch folders for Inductor and Triton, made 0700.

        They lie beside the entries; where nothing is stored, in a temporary folder that `close`
        removes.

        Raises:
            CacheError: they cannot be made.
        """
        try:
            return self._scratch.dirs()
        except OSError as error:
            raise CacheError(f"the compilers' scratch folders cannot be made: {error}.") from error

    def close(self) -> None:
        """Let go of all entries and remove temporary folders; twice is fine. Then all is a miss."""
        self._closed = True
        if self._entries is not None:
            self._entries.pins.close()
        self._scratch.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
