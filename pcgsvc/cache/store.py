"""Key and bytes: the disk store of programs and the pieces that they share.

In: hex keys, bytes, readable facts. Out: the same bytes, or a miss that names its cause; never an
exception for what is on the disk, and never anything but what was written. Knows nothing of
graphs, torch or models, and not what a key is made of.

Below the data folder (see `cache.root`): `entries/` (a file each: the truth), `index/` (diskcache:
nothing that the entries do not say), `locks/` (one builder per key), `quarantine/`, `index.lock`
and `evict.lock`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pcgsvc.cache import reports
from pcgsvc.cache.entries import Entries, WriteError
from pcgsvc.cache.envelope import (
    AbsentError,
    Built,
    Counts,
    Entry,
    Kind,
    Lookup,
    MissError,
    check_key,
    encode,
)
from pcgsvc.cache.eviction import enforce_budget, no_eviction
from pcgsvc.cache.file_lock import acquire
from pcgsvc.cache.index import Index
from pcgsvc.cache.remote import Remote
from pcgsvc.cache.reports import CheckReport, Nearest, ProgramInfo
from pcgsvc.cache.root import DataFolder, find_root, open_data_folder
from pcgsvc.cache.sharing import Sharing
from pcgsvc.config import CacheMode
from pcgsvc.errors import CacheError

__all__ = ["Built", "Counts", "Entry", "Kind", "Lookup", "MissError", "Store"]

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 8 << 30
"""Budget of a store: programs with all their pieces, in bytes."""
LOCK_TIMEOUT_S = 600.0
"""How long a build waits for another process that builds the same: a cold compile takes minutes."""
_NOWHERE = Path(os.devnull)
"""The data folder where the cache is off: nothing can be below it."""


class Store(contextlib.AbstractContextManager["Store"]):
    """Programs and pieces in one data folder; `Store.open` finds and checks it.

    Safe from any thread and from any number of processes. What was got or put is in use by this
    process, and so kept from eviction, until `close`. What goes wrong on the disk is a miss or a
    False, and one warning.

    Args:
        folder: where; None leaves no file anywhere.
        mode: what may be done; without a folder it is `off`.
        max_bytes: budget; whole programs go, least recently used first, when it is passed.
        refresh: whether nothing is loaded but what was stored since, as in that mode.
        remote: what is asked for entries that are missing here, and gets those built here.
    """

    def __init__(
        self,
        folder: DataFolder | None,
        *,
        mode: CacheMode = CacheMode.READWRITE,
        max_bytes: int = DEFAULT_MAX_BYTES,
        refresh: bool = False,
        remote: Remote | None = None,
    ) -> None:
        self.folder = folder
        self.mode = CacheMode.OFF if folder is None else mode
        self.max_bytes = max_bytes
        self.refresh = refresh or self.mode is CacheMode.REFRESH
        self.counts = Counts()
        wanted = self.mode in (CacheMode.READWRITE, CacheMode.REFRESH)
        self._entries = Entries(
            folder.data if folder is not None and self.enabled else _NOWHERE,
            writable=wanted and folder is not None and folder.writable,
        )
        self._index = Index(self._entries)
        put = partial(self.put, publish=False)
        self.sharing = None if remote is None else Sharing(remote, self._entries, put)
        self._renewed: set[tuple[Kind, str]] = set()
        self._owners: set[tuple[int, str]] = set()
        self._logged: set[str] = set()
        self._failure = ""
        self._mutex = threading.Lock()
        self._closed = False
        if wanted and not self.writable:
            self._warn_once(f"{self.why_not_writable()}: hits are served, nothing is stored")

    @classmethod
    def open(
        cls,
        directory: str | None = None,
        *,
        mode: CacheMode = CacheMode.READWRITE,
        max_bytes: int = DEFAULT_MAX_BYTES,
        refresh: bool = False,
        remote: Remote | None = None,
    ) -> Store:
        """Find the root (see `root.find_root`), check it, and open the store in it.

        Raises:
            CacheError: the place is not safe to load from, or is no folder.
        """
        if mode is CacheMode.OFF:
            return cls(None)
        root, source = find_root(directory)
        folder = open_data_folder(root, source, write=mode is not CacheMode.READ)
        logger.debug("cache: %s (%s), mode %s", folder.data, source, mode.value)
        return cls(folder, mode=mode, max_bytes=max_bytes, refresh=refresh, remote=remote)

    @property
    def enabled(self) -> bool:
        """Whether anything may be loaded: every mode but `off`."""
        return self.mode is not CacheMode.OFF

    @property
    def writable(self) -> bool:
        """Whether anything is stored."""
        return self._entries.writable

    def why_not_writable(self) -> str:
        """Return why nothing is stored, or an empty string."""
        if self.writable:
            return ""
        reason = self.folder.reason if self.folder is not None else ""
        return reason or f"cache.mode={self.mode.value}"

    def why_not_stored(self) -> str:
        """Return why the last entry was not stored, as far as it was not written."""
        return self.why_not_writable() or self._failure

    # ---- single entries --------------------------------------------------------------------------

    def get_program(self, key: str) -> Lookup:
        """Return a program's manifest, the keys of its pieces and its facts, or the miss.

        Raises:
            CacheError: the key is malformed; nothing else is raised.
        """
        return self._counted(Kind.PROGRAM, key)

    def get_piece(self, key: str) -> Lookup:
        """Return a piece's bytes and facts, or the miss; see `get_program`."""
        return self._counted(Kind.PIECE, key)

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
            Whether it is in the store now. If not, the reason was logged.

        Raises:
            CacheError: a malformed key, an empty manifest, or facts that JSON cannot hold.
        """
        return self.put(Built(manifest, facts, pieces).entry(Kind.PROGRAM, key))

    def put_piece(self, key: str, value: bytes, *, facts: Mapping[str, Any]) -> bool:
        """Store a piece; see `put_program`."""
        return self.put(Built(value, facts).entry(Kind.PIECE, key))

    def read(self, kind: Kind, key: str) -> Entry:
        """Return a whole entry or raise the `MissError`; counts nothing, holds nothing in use."""
        if not self.enabled:
            raise AbsentError("cache off")
        return self._entries.read(kind, key)

    def has(self, kind: Kind, key: str) -> bool:
        """Whether a sound entry is in the store; see `read`."""
        return self._entries.has(kind, key)

    def available(self, kind: Kind, key: str) -> bool:
        """Whether an entry is in the store, or on the remote, where it may turn out unsound."""
        found = self.has(kind, key)
        if found or self.sharing is None or self.refresh:
            return found
        return self.sharing.has(kind, key)

    def put(self, entry: Entry, *, in_use: bool = True, publish: bool = True) -> bool:
        """Store a whole entry as it is; see `put_program`. `in_use`: until `close`."""
        raw = encode(entry)  # a caller's mistake is an error in every mode
        if not self.writable or self._closed:
            return False
        names = [*((Kind.PIECE, piece) for piece in entry.pieces), (entry.kind, entry.key)]
        free = [] if in_use else [name for name in names if not self._entries.is_used(*name)]
        try:
            self._require_pieces(entry)
            self._entries.write(entry.kind, entry.key, raw)
        except (WriteError, MissError) as error:
            # A program without its pieces only follows from a failed write, which was logged.
            topic = f"not stored: {error}" if isinstance(error, WriteError) else "not stored"
            self._failure = str(error)
            self._warn_once(f"not stored, going on without: {error}", topic, "not stored")
            return False
        finally:
            for name in free:
                self._entries.release(*name)
        with self._mutex:
            self._renewed.add((entry.kind, entry.key))
            self.counts.stored += 1
        if over := enforce_budget(self._entries, self._index, self.max_bytes):
            self._warn_once(
                f"{over} bytes over its budget of {self.max_bytes}: what is left is in use",
                "over budget",
            )
        if publish and self.sharing is not None:
            self.sharing.publish(entry.kind, entry.key)
        return True

    def drop(self, kind: Kind, key: str) -> None:
        """Delete one entry, in use or not, on the remote as well; a missing one is fine.

        Raises:
            CacheError: the store cannot be written.
        """
        self._require_writable("drop")
        if self.sharing is not None:
            self.sharing.drop(kind, key)
        try:
            self._entries.delete(kind, key)
        except WriteError as error:
            raise CacheError(f"cache drop: {error}.") from error

    def drop_program(self, key: str) -> int:
        """Delete a program, then the pieces that it names; return how many. See `drop`."""
        try:
            pieces = self.read(Kind.PROGRAM, key).pieces
        except MissError:  # another process has dropped it
            pieces = ()
        self.drop(Kind.PROGRAM, key)
        for piece in pieces:
            self.drop(Kind.PIECE, piece)
        return len(pieces)

    def _counted(self, kind: Kind, key: str) -> Lookup:
        found = self._get(kind, key)
        self._count(kind, key, found.miss)
        return found

    def _get(self, kind: Kind, key: str) -> Lookup:
        """Return an entry, which is in use from now on, or the miss."""
        check_key(key)
        if self._closed:
            return Lookup(None, "store is closed")
        if not self.enabled:
            return Lookup(None, "cache off")
        if self.refresh and (kind, key) not in self._renewed:
            return Lookup(None, "refresh")
        try:
            entry = self._entries.read(kind, key, use=True)
        except MissError as miss:
            if not isinstance(miss, AbsentError):
                self._warn_once(f"{kind.value} {key[:12]}: a miss: {miss}", str(miss))
            if self.sharing is None:
                return Lookup(None, str(miss))
            try:
                entry = self.sharing.fetch(kind, key)
            except MissError as other:
                return Lookup(None, f"{miss}; {other}")
        return Lookup(entry.payload, None, entry.facts, entry.pieces)

    def _require_pieces(self, program: Entry) -> None:
        """Refuse a program one of whose pieces failed to be stored, or was dropped meanwhile."""
        missing = [p[:12] for p in program.pieces if not self._entries.hold(Kind.PIECE, p)]
        if missing:
            label = f"program {program.key[:12]}"
            raise AbsentError(f"{label}: its pieces {', '.join(missing)} are not stored")

    def _count(self, kind: Kind, key: str, miss: str | None) -> None:
        with self._mutex:
            if miss is None:
                self.counts.hits += 1
            else:
                self.counts.misses += 1
                self.counts.miss_reasons.append(f"{kind.value} {key[:12]}: {miss}")

    def _warn_once(self, message: str, *topics: str) -> None:
        """Log a warning; only for debugging if one with the first of its topics was logged."""
        topics = topics or (message,)
        with self._mutex:
            level = logging.DEBUG if topics[0] in self._logged else logging.WARNING
            self._logged.update(topics)
        logger.log(level, "cache: %s", message)

    # ---- one builder per key ---------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self, key: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[bool]:
        """Keep other processes and threads from building the same; a killed holder frees it.

        A thread may take it twice. Take a program's before those of its pieces. With a remote,
        other machines are kept from it as well, as far as `Sharing.claim` can.

        Yields:
            Whether the lock is held. True as well where nothing is stored: no process could load
            what another one built.
        """
        check_key(key)
        owner = (threading.get_ident(), key)
        if not self.writable or owner in self._owners:
            yield True
            return
        held = None
        path = self._entries.data / "locks" / key
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            held = acquire(path)
            if held is None:
                logger.info("cache: waiting for another process that builds %s", key[:12])
                held = acquire(path, timeout_s=timeout_s)
        except OSError as error:
            self._warn_once(f"no lock can be taken: {error}")
        if held is None:
            yield False
            return
        self._owners.add(owner)
        try:
            if self.sharing is not None:
                self.sharing.claim(key, timeout_s)
            yield True
        finally:
            if self.sharing is not None:
                self.sharing.release(key)
            self._owners.discard(owner)
            held.release(unlink=True)

    def get_or_build(
        self,
        key: str,
        build: Callable[[], Built],
        *,
        timeout_s: float = LOCK_TIMEOUT_S,
    ) -> Lookup:
        """Load a piece, or build and store it, once among all processes.

        Args:
            key: of the piece.
            build: called at most once, with the key's lock held; its errors come out as they are.
            timeout_s: how long to wait for another process that builds it. After that it is built
                here and not stored.
        """
        found = self._get(Kind.PIECE, key)
        miss = found.miss
        if miss is not None:
            with self.lock(key, timeout_s) as held:
                found = self._get(Kind.PIECE, key)  # the last holder may have stored it
                if found.miss is not None:
                    self._count(Kind.PIECE, key, miss)
                    return self._build(key, build, miss, store=held)
        self._count(Kind.PIECE, key, None)
        return found

    def _build(self, key: str, build: Callable[[], Built], miss: str, *, store: bool) -> Lookup:
        if not store:
            words = "cache: piece %s: its lock timed out; building it here as well, not stored"
            logger.warning(words, key[:12])
        built = build()
        stored = store and self.put(built.entry(Kind.PIECE, key))
        return Lookup(built.value, miss, built.facts, tuple(built.pieces), stored)

    # ---- the whole store -------------------------------------------------------------------------

    def check(self, *, fix: bool = False) -> CheckReport:
        """Read every entry, and compare files and piece lists.

        Args:
            fix: put damaged entries aside, drop incomplete programs, delete stray files.
        """
        return reports.check(self._entries, self._index, fix=fix and self.writable)

    def ls(self) -> list[ProgramInfo]:
        """Return the stored programs, most recently used first; unreadable ones are left out."""
        return reports.list_programs(self._entries, self._index)

    def nearest(self, facts: Mapping[str, Any]) -> Nearest | None:
        """Return the stored program that differs from `facts` in the fewest, and in which.

        Of several the most recently used; None: there is none.
        """
        found = [Nearest(i.key, reports.differing_facts(i.facts, facts)) for i in self.ls()]
        return min(found, key=lambda near: len(near.differences), default=None)

    def num_bytes(self) -> int:
        """Return the size of all entries."""
        return sum(record.size for record in self._entries.scan())

    def clear(self) -> int:
        """Delete all entries, those in use and the quarantine included; return their bytes.

        Raises:
            CacheError: the store cannot be written.
        """
        self._require_writable("clear")
        num_bytes = self.num_bytes()
        try:
            self._entries.clear()
        except OSError as error:
            raise CacheError(f"cache clear: {error}; try again later.") from error
        self._index.clear()
        with self._mutex:
            self._renewed.clear()
        return num_bytes

    @contextlib.contextmanager
    def no_eviction(self) -> Iterator[None]:
        """Let no process drop anything for the budget, as long as this lasts.

        Raises:
            CacheError: the store cannot be written, or entries are being dropped right now.
        """
        self._require_writable("import")
        with no_eviction(self._entries.data):
            yield

    def _require_writable(self, what: str) -> None:
        if not self.writable or self._closed:
            reason = self.why_not_writable() or "the store is closed"
            raise CacheError(f"cache {what}: nothing can be written: {reason}.")

    def close(self) -> None:
        """Publish what waits for it, and stop using all entries; from then on all is a miss."""
        self._closed = True
        if self.sharing is not None:
            self.sharing.close()
        self._entries.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
