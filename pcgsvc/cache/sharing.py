"""One store's use of a remote: entries fetched, entries published, one builder among machines.

In: what the store looks up, stores and locks. Out: entries that were missing here; what went wrong
is a warning and a miss, and no error. The remote is left alone for the rest of a build after the
first call that fails, so that one that is down costs one time-out.

Entries are published by a thread, in the order in which they were stored, one at a time. A claim on
the remote is what a lock is on one machine: its holder rewrites it every few seconds, and one that
has not changed for `_STALE_S` is taken over. It saves work only; where two machines hold it, both
build, and the last one published stays.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pcgsvc.cache.entries import Entries
from pcgsvc.cache.envelope import (
    AbsentError,
    Entry,
    Kind,
    MissError,
    UnavailableError,
    encode,
    name_of,
)
from pcgsvc.cache.remote import Remote, RemoteError, version_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BEAT_S = 5.0
"""How often claims are rewritten."""
_STALE_S = 30.0
"""How long a claim counts that is not rewritten."""
_LONGEST_SLEEP_S = 1.0
_MAX_PENDING = 1024
"""Most entries that wait to be published; they are read from the store when it is their turn."""


class Sharing:
    """What one store fetches from a remote and publishes there.

    Args:
        remote: which; None of its failures comes out.
        entries: of the store, from which entries are published.
        keep: stores a fetched entry.
    """

    def __init__(self, remote: Remote, entries: Entries, keep: Callable[[Entry], bool]) -> None:
        self._remote, self._entries, self._keep = remote, entries, keep
        self.problems: list[str] = []
        """What was not done as asked, in words; each was logged."""
        self._counts = dict.fromkeys(("hits", "misses", "refused", "published", "waited"), 0)
        self._num_wanted = 0
        self._there: set[tuple[Kind, str]] = set()
        """Entries that are on the remote, as far as this process has seen."""
        self._down: dict[str, str] = {}
        """Why nothing more is read, or written."""
        self._claims: dict[str, bytes] = {}
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue(_MAX_PENDING)
        self._thread: threading.Thread | None = None
        self._settled = threading.Event()
        self._topics: set[str] = set()
        self._mutex = threading.Lock()
        self._me = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"

    def section(self) -> dict[str, Any]:
        """Return the report's `cache.remote`, once the uploads are done or have been given up."""
        self.settle()
        return {
            "url": self._remote.url,
            **self._counts,
            "unpublished": self._num_wanted - self._counts["published"],
            "problems": list(self.problems),
        }

    # ---- fetching --------------------------------------------------------------------------------

    def fetch(self, kind: Kind, key: str) -> Entry:
        """Return an entry of the remote; where the store is written, it and its pieces are kept.

        Raises:
            MissError: there is none that may be loaded.
        """
        found = self._fetched(kind, key)
        self._keep(found)
        return found

    def other_program(self, key: str) -> bytes | None:
        """Return the manifest that the remote has of a program; its pieces are kept, it is not."""
        try:
            return self._fetched(Kind.PROGRAM, key).payload
        except MissError:
            return None

    def _fetched(self, kind: Kind, key: str) -> Entry:
        """Return an entry, after its pieces were kept."""
        (found,) = self._get(kind, [key])
        if isinstance(found, MissError):
            raise self._missed(kind, key, found)
        # Else they are fetched when each is asked for.
        wanted = found.pieces if self._entries.writable else ()
        missing = [piece for piece in wanted if not self._entries.has(Kind.PIECE, piece)]
        for piece, part in zip(missing, self._get(Kind.PIECE, missing), strict=True):
            if isinstance(part, MissError):
                cause = self._missed(Kind.PIECE, piece, part)
                raise type(cause)(f"its piece {piece[:12]} {cause}") from cause
            self._keep(part)
        return found

    def has(self, kind: Kind, key: str) -> bool:
        """Whether the remote has an entry, sound or not."""
        return self._try("read", lambda: self._remote.size_of(kind, key)) is not None

    def foreign_versions(self, facts: Mapping[str, Any]) -> list[str]:
        """Return the versions that have stored programs, if those of `facts` are not among them."""
        versions = self._try("read", self._remote.versions) or []
        return [] if version_of(facts) in versions else versions

    def _get(self, kind: Kind, keys: Sequence[str]) -> Sequence[Entry | MissError]:
        found = self._try("read", lambda: self._remote.get(kind, keys))
        if found is None:
            return [UnavailableError(self._down["read"])] * len(keys)
        there = {(each.kind, each.key) for each in found if isinstance(each, Entry)}
        self._counts["hits"] += len(there)
        self._there |= there
        return found

    def _missed(self, kind: Kind, key: str, miss: MissError) -> MissError:
        """Count a miss, and warn unless there simply is none; return it in words."""
        self._counts["misses"] += 1
        words = f"on the remote: {miss}"
        if "read" not in self._down and not isinstance(miss, AbsentError):
            self._counts["refused"] += 1
            self._warn(f"{kind.value} {key[:12]} is not loaded: {miss}", topic=str(miss))
        return type(miss)(words)

    # ---- publishing ------------------------------------------------------------------------------

    def publish(self, kind: Kind, key: str) -> None:
        """Have the thread write an entry of the store to the remote."""
        self._num_wanted += 1
        self._later(lambda: self._publish(kind, key))

    def drop(self, kind: Kind, key: str) -> None:
        """Have the thread delete an entry that has turned out wrong, lest others load it."""
        self._there.discard((kind, key))
        self._later(lambda: self._try("write", lambda: self._remote.remove(name_of(kind, key))))

    def settle(self) -> None:
        """Wait until all is published, as long as one call may take; what is left is given up."""
        if self._thread is None or "write" in self._down:
            return
        self._settled.clear()
        self._later(self._settled.set)
        if not self._settled.wait(self._remote.timeout_s):
            self._fail("write", f"not all was published within {self._remote.timeout_s:g} s")

    def close(self) -> None:
        """Settle, and end the thread; twice is fine."""
        self.settle()
        if self._thread is not None:
            self._later(None)
        self._thread = None

    def _publish(self, kind: Kind, key: str) -> None:
        """Write an entry, after those of its pieces that are not there."""
        try:
            entry = self._entries.read(kind, key)
            for piece in entry.pieces:
                self._publish_missing(piece)
        except MissError as miss:
            self._warn(f"{kind.value} {key[:12]} is not published: {miss}")
            return
        if self._write(entry):
            self._counts["published"] += 1
        if kind is Kind.PROGRAM:
            version = f"versions/{version_of(entry.facts)}"
            self._try("write", lambda: self._remote.write(version, b""))

    def _publish_missing(self, piece: str) -> None:
        if (Kind.PIECE, piece) in self._there:
            return
        entry = self._entries.read(Kind.PIECE, piece)
        size = self._try("write", lambda: self._remote.size_of(Kind.PIECE, piece))
        if size != len(encode(entry)):
            self._write(entry)

    def _write(self, entry: Entry) -> bool:
        """Write an entry; whether that worked."""

        def work() -> bool:
            self._remote.put(entry)
            return True

        if not self._try("write", work):
            return False
        self._there.add((entry.kind, entry.key))
        return True

    # ---- one builder among machines --------------------------------------------------------------

    def claim(self, key: str, timeout_s: float) -> None:
        """Wait until no other machine builds what `key` names, and say that this one does.

        Nothing is claimed of what another machine has published meanwhile. A remote that fails, or
        a claim that is still held after `timeout_s`, is not waited for.
        """
        deadline, sleep_s = time.monotonic() + timeout_s, 0.02
        seen, since, is_stale = b"", time.monotonic(), False
        while True:
            other = self._try("write", partial(self._claim, key, is_stale))
            if other is None or key in self._claims:
                return
            if other and not seen:
                self._counts["waited"] += 1
                logger.info("cache: waiting for another machine, which builds %s", key[:12])
            now = time.monotonic()
            if other != seen:
                is_let_go = seen and _owner(other) != _owner(seen)
                if is_let_go and any(self.has(kind, key) for kind in Kind):
                    return  # it is there, and need not be built
                seen, since = other, now
            is_stale = now - since > _STALE_S
            if now > deadline:
                self._warn(f"{key[:12]} is being built elsewhere; building it here as well")
                return
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def release(self, key: str) -> None:
        """Have the thread take a claim back, after all that was published until now."""
        if key in self._claims:
            self._later(lambda: self._release(key))

    def _claim(self, key: str, is_stale: bool) -> bytes:
        """Return what stands in a claim, which is in `_claims` if it is ours.

        A lost machine's is overwritten; of those that do so at once, the last one has it.
        """
        name, mine = _claim_name(key), self._stamp()
        is_made = not is_stale and self._remote.create(name, mine)
        if is_stale:
            self._remote.write(name, mine)
            time.sleep(_LONGEST_SLEEP_S)
        found = mine if is_made else self._remote.read(name) or b""
        if found == mine:
            self._claims[key] = mine
            self._start()
        return found

    def _release(self, key: str) -> None:
        """Take a claim back unless another machine has taken it over."""
        mine = self._claims.pop(key)

        def work() -> None:
            if self._remote.read(_claim_name(key)) == mine:
                self._remote.remove(_claim_name(key))

        self._try("write", work)

    def _beat(self) -> None:
        """Rewrite the claims, so that no other machine takes them over."""
        for key in list(self._claims):
            self._claims[key] = self._stamp()
            self._try("write", partial(self._remote.write, _claim_name(key), self._claims[key]))

    def _stamp(self) -> bytes:
        return f"{self._me} {time.time():.3f}".encode()

    # ---- the thread, and what fails --------------------------------------------------------------

    def _later(self, task: Callable[[], object] | None) -> None:
        """Have the thread do something; None ends it."""
        if "write" in self._down:
            return
        self._start()
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._fail("write", f"{_MAX_PENDING} entries wait to be published")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pcgsvc-publish", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        beaten = time.monotonic()
        while "write" not in self._down:
            try:
                task = self._tasks.get(timeout=_BEAT_S)
            except queue.Empty:
                task = self._beat
            if task is None:
                return
            task()
            if time.monotonic() - beaten > _BEAT_S:
                self._beat()
                beaten = time.monotonic()

    def _try(self, way: str, work: Callable[[], T]) -> T | None:
        """Return what a call of the remote gives; None if it failed, now or earlier."""
        if way in self._down:
            return None
        try:
            return work()
        except RemoteError as error:
            self._fail(way, str(error))
            return None

    def _fail(self, way: str, cause: str) -> None:
        """Leave the remote alone; one that cannot be read is not written either."""
        if way in self._down:
            return
        self._down |= {way: cause, "write": cause}
        self._settled.set()  # nothing comes after this
        left = "it is left alone" if way == "read" else "nothing more is published"
        self._warn(f"{cause}; {left} in this build")

    def _warn(self, message: str, topic: str = "") -> None:
        """Log a warning and note it; only for debugging if one of its topic was logged."""
        with self._mutex:
            is_new = (topic or message) not in self._topics
            self._topics.add(topic or message)
            if is_new:
                self.problems.append(message)
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "cache.remote %s: %s", self._remote.url, message)


def _owner(stamp: bytes) -> bytes:
    return stamp.rpartition(b" ")[0]


def _claim_name(key: str) -> str:
    return f"claims/{key}"
