"""Processes that run one program together: in step, and ended together.

In: the ranks of a program's process groups. Out: `Ranks`, by which they agree, and learn that one
has failed or is gone. They talk through the store of torch.distributed's default group, not through
the group: that waits for a peer that is gone, and cannot be destroyed then.

Each process says from a thread that it lives. One whose peer says nothing for half of
`parallel.timeout_s` raises `PeerError` from what it does next; while it waits for that peer inside
of a collective, which nothing can interrupt, the thread ends the process. Not seen: a peer that
lives and does not come, outside of `debug.check_calls`, which a warning names while one builds; one
that ended before it began to build.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import distributed

from pcgsvc import torch_private
from pcgsvc.errors import PcgError, PeerError
from pcgsvc.ops.collectives import group_of, is_among_many, rank_and_world

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_FAILED, _IDLE = "failed: ", "idle"
_NO_STORE = "the process that holds the group's store is gone"
_GRACE_S = 3.0
"""How long a failure must be a peer's last word: it may be of a build before."""


class Ranks:
    """The processes that run one program; of a program without collectives this one alone.

    Args:
        timeout_s: `parallel.timeout_s`.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self.members: Sequence[int] = ()
        """Their global ranks; empty: this process is on its own."""
        self._checks_calls, self._same_rows = False, True
        self._rank, _ = rank_and_world() or (0, 1)
        self._steps = self._calls = 0
        self._prefix = ""
        self._watch: _Watch | None = None

    # -- life --

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Tell peers for a block that this process builds, and what it fails of."""
        if not is_among_many():
            yield
            return
        self._watch = _Watch(self._timeout_s, self._rank)
        weakref.finalize(self, self._watch.stop, _IDLE)  # when the process ends, too
        try:
            yield
        except BaseException as error:
            self._watch.stop(f"{_FAILED}{type(error).__name__}: {error}")
            raise
        self._watch.is_waiting = bool
        if not self.members:
            self.close()

    def join(self, members: Sequence[int], facts: Mapping[str, Any]) -> None:
        """Wait until all members have made or loaded their program.

        Args:
            members: their global ranks, this process's among them; empty: it is on its own.
            facts: what must be equal on all of them.

        Raises:
            PeerError: a member has other facts, failed, or is gone.
        """
        if self._watch is None or len(members) < 2:
            return
        self.members = members
        self._same_rows = bool(facts["the program"])  # else all that they share is experts
        among = f"pcgsvc/{','.join(map(str, members))}"
        count = self._watch.store.add(f"{among}/builds/{self._rank}", 1)
        self._prefix = f"{among}/{count}"
        self._watch.groups = [
            None,
            distributed.group.WORLD,
            *{group_of(word) for *_, word in facts["the program"]},
        ]
        self._watch.peers = dict.fromkeys((r for r in members if r != self._rank), ("", 0.0))
        for name, value in facts.items():
            found = self.exchange(repr(value))
            if len(set(found.values())) > 1:
                raise PeerError(f"{name} differs between ranks: {_listed(found)}.")

    def serve(
        self,
        close: Callable[[], None],
        lock: threading.RLock,
        is_done: Callable[[], bool] | None,
        *,
        check_calls: bool,
    ) -> None:
        """Watch over a runner from now on.

        Args:
            close: its method that closes it.
            lock: held while it is called.
            is_done: whether the device has done the last call; None: calls return when they have.
            check_calls: `debug.check_calls`.
        """
        self._checks_calls = check_calls
        if self._watch is None:
            return
        method = weakref.WeakMethod(close)

        def is_waiting() -> bool:
            if not lock.acquire(blocking=False):
                return True
            lock.release()
            return is_done is not None and not is_done()

        self._watch.is_waiting = is_waiting
        self._watch.close_runner = lambda: (found := method()) is not None and found()

    def close(self) -> None:
        """Tell peers that this process is done."""
        if self._watch is not None:
            self._watch.stop(_IDLE)
            self._watch, self.members = None, ()

    # -- agreement --

    @property
    def many(self) -> bool:
        """Whether other processes must run what this one runs, as often and in the same order."""
        return len(self.members) > 1

    def exchange(self, word: str, limit_s: float = float("inf")) -> dict[int, str]:
        """Return what each member says, by rank; each must ask as often as the others.

        Raises:
            PeerError: a member failed, is gone, or says nothing for `limit_s`.
        """
        if self._watch is None or not self.members:
            return {self._rank: word}
        self._steps += 1
        keys = {rank: f"{self._prefix}/{self._steps}/{rank}" for rank in self.members}
        try:
            return self._exchange(self._watch, keys, word, time.monotonic() + limit_s)
        except RuntimeError as error:  # of the store
            raise PeerError(f"{_NO_STORE} ({error})") from error

    def _exchange(
        self, watch: _Watch, keys: Mapping[int, str], word: str, end: float
    ) -> dict[int, str]:
        store = watch.store
        store.set(keys[self._rank], word)
        say_at = time.monotonic() + self._timeout_s
        while not store.check(list(keys.values())):
            watch.refuse_lost()
            if (now := time.monotonic()) > min(end, say_at):
                late = [rank for rank, key in keys.items() if not store.check([key])]
                if now > end:
                    raise PeerError(f"ranks {late} do not come to what this one does: {word}.")
                logger.warning(
                    "rank %s has not come to what this one does in %g s, and is waited for: it may "
                    "compile; one whose program has other collectives, or none, never comes (%s)",
                    *(", ".join(map(str, late)), self._timeout_s, word[:200]),
                )
                say_at = end
            time.sleep(_POLL_S)
        # Who has written this step has read the one before.
        store.delete_key(f"{self._prefix}/{self._steps - 1}/{self._rank}")
        return {rank: store.get(key).decode() for rank, key in keys.items()}

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any member."""
        return "1" in self.exchange("1" if flag else "").values()

    def first(self, words: str | None) -> str | None:
        """Return this process's words, or those of the first member with some, with its rank."""
        found = self.exchange(words or "")
        return words or next((f"rank {r}: {said}" for r, said in found.items() if said), None)

    def before_call(self, rows: int, served: str) -> None:
        """Refuse a call that peers cannot answer; under `debug.check_calls`, that they do not make.

        Raises:
            PeerError: a member is gone, or calls something else, which is named for each.
            PcgError: the process group is gone.
        """
        if self._watch is None:
            return
        self._watch.refuse_lost()
        if rank_and_world() is None:
            raise PcgError("the runner's process group was destroyed; close the runner first.")
        if self._checks_calls:
            self._calls += 1
            what = f"{rows} rows by {served}" if self._same_rows else "any rows"
            found = self.exchange(f"call {self._calls}, {what}", self._timeout_s)
            if len(set(found.values())) > 1:
                raise PeerError(f"calls differ between ranks, and none is run: {_listed(found)}.")


def _listed(found: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {word}" for rank, word in found.items())


class _Watch:
    """Says that this process lives, and looks whether its peers do, from a thread."""

    def __init__(self, timeout_s: float, rank: int) -> None:
        self.store = torch_private.rendezvous_store()
        self.peers: dict[int, tuple[str, float]] = {}
        """Per rank: its last word, and when it changed."""
        self.groups: list[Any] = [None]
        """The process groups that the program needs; None: the default one."""
        self.is_waiting: Callable[[], object] = lambda: True
        self.close_runner: Callable[[], object] = bool
        self._timeout_s, self._key = timeout_s, f"pcgsvc/alive/{rank}"
        self._lost: str | None = None
        self._lost_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pcgsvc-ranks", daemon=True)
        self._thread.start()

    def refuse_lost(self) -> None:
        """Raise PeerError if a peer failed or is gone."""
        if self._lost is not None:
            raise PeerError(self._lost)

    def stop(self, word: str) -> None:
        """End the thread; `word`: the last one that peers read."""
        if not self._ended.is_set():
            self._ended.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(self._timeout_s / 4)  # a thread inside the store ends badly
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.store.set(self._key, word)

    def _run(self) -> None:
        beat = 0
        while not self._ended.wait(min(self._timeout_s / 20, 1.0)):
            beat += 1
            try:
                self.store.set(self._key, str(beat))
                self._look()
            except RuntimeError as error:
                self._lose(f"{_NO_STORE} ({error})")
            ending = torch_private.ending_groups()
            if any(group in self.groups for group in ending) or rank_and_world() is None:
                logger.warning(
                    "the process group is destroyed before a runner that needs it, which"
                    " is closed now; close it first"
                )
                self.close_runner()
                return
            waited = time.monotonic() - self._lost_at
            if self._lost is not None and self.is_waiting() and waited > self._timeout_s / 4:
                logger.critical("%s; this process waits for it, and ends", self._lost)
                logging.shutdown()
                os._exit(1)

    def _look(self) -> None:
        """Note which peers have failed, or have said nothing new for too long."""
        now = time.monotonic()
        for rank, (word, since) in self.peers.items():
            key = self._key.rpartition("/")[0] + f"/{rank}"
            said = self.store.get(key).decode() if self.store.check([key]) else _IDLE
            if said != word:
                self.peers[rank] = said, now
            elif said.startswith(_FAILED) and now - since > _GRACE_S:
                self._lose(f"rank {rank} {said}")
            elif said != _IDLE and now - since > self._timeout_s / 2:
                self._lose(f"rank {rank} is gone: no sign of life for {now - since:.0f} s")

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost, self._lost_at = why, time.monotonic()
