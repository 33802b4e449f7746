"""One builder per key, and a database that somebody else holds."""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from store_helpers import (
    PROGRAMS,
    database,
    fill,
    key,
    misses,
    open_store,
)

from pcgsvc.cache.file_lock import acquire
from pcgsvc.cache.store import Built

A, B, C, P, Q = (key(name) for name in "abcpq")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


# ---- one builder per key -------------------------------------------------------------------------


def test_get_or_build_builds_once_and_then_loads(root: Path) -> None:
    built = []

    def build() -> Built:
        built.append(1)
        return Built(b"value", {"fact": 1})

    with open_store(root) as store:
        first, second = (store.get_or_build(A, build) for _ in range(2))
        assert (first.built, first.miss, first.stored) == (True, "absent", True)
        assert (second.built, second.miss, second.value) == (False, None, b"value")
        assert second.facts == {"fact": 1}
        assert len(built) == 1
        assert (store.counts.hits, store.counts.misses) == (1, 1)


def test_the_loser_of_a_race_loads_what_the_winner_built(root: Path) -> None:
    with open_store(root) as winner, open_store(root) as loser:
        results: list[Any] = []
        with winner.lock(A) as held:
            assert held
            thread = threading.Thread(
                target=lambda: results.append(loser.get_or_build(A, lambda: Built(b"loser")))
            )
            thread.start()
            time.sleep(0.1)
            assert not results
            winner.put_piece(A, b"winner", facts={})
        thread.join()
        assert (results[0].value, results[0].built) == (b"winner", False)
        assert loser.counts.misses == 0


def test_a_lock_that_is_not_to_be_had_builds_without_storing_and_says_so(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as holder, open_store(root) as store, holder.lock(A):
        started = time.monotonic()
        made = store.get_or_build(A, lambda: Built(b"mine"), timeout_s=0.2)
        assert 0.2 <= time.monotonic() - started < 2
        assert (made.value, made.stored) == (b"mine", False)
        assert store.get_piece(A).miss == "absent"
    assert "not stored" in caplog.text


def test_locks_of_two_keys_do_not_meet(root: Path) -> None:
    with open_store(root) as store, store.lock(A) as one, store.lock(B, 0.0) as two:
        assert one
        assert two


def test_a_thread_that_holds_a_key_s_lock_may_build_that_key(root: Path) -> None:
    with open_store(root) as store, store.lock(A):
        assert store.get_or_build(A, lambda: Built(b"x"), timeout_s=0.0).stored
        with open_store(root) as other, other.lock(A, 0.0) as held:
            assert not held


def test_a_released_lock_leaves_no_file(root: Path) -> None:
    with open_store(root) as store:
        with store.lock(A):
            assert list((root / "store" / "locks").iterdir())
        assert not list((root / "store" / "locks").iterdir())


def test_a_lock_file_that_its_holder_deletes_as_it_leaves_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    real = fcntl.flock
    left = iter([True])

    def late(fd: int, how: int) -> None:
        if next(left, False):
            path.unlink()  # the holder leaves between our open and our lock
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with acquire(path) or pytest.fail("not held") as held:
        assert held.is_current()
        assert acquire(path) is None


def test_a_builder_that_raises_frees_the_lock_and_stores_nothing(root: Path) -> None:
    def fail() -> Built:
        raise RuntimeError("no compiler")

    with open_store(root) as store:
        with pytest.raises(RuntimeError, match="no compiler"):
            store.get_or_build(A, fail)
        with store.lock(A, 0.0) as held:
            assert held
        assert store.get_piece(A).miss == "absent"


def test_a_killed_holder_frees_its_lock(root: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; sys.path[:0] = [sys.argv[2]];"
        "from store_helpers import *\n"
        "with open_store(Path(sys.argv[1])) as s, s.lock(key('a')):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(root), str(Path(__file__).parent)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as holder, open_store(root) as store:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with store.lock(A, 0.0) as held:
            assert not held
        holder.kill()
        with store.lock(A, 5.0) as held:
            assert held


# ---- busy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_locked_index_lets_reads_and_writes_through_and_is_made_anew_once_loudly(
    root: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as store:
        fill(store)
        assert len(store.ls()) == len(PROGRAMS)
    with (
        open_store(root) as store,
        closing(sqlite3.connect(database(root), isolation_level=None)) as other,
    ):
        other.execute(how)
        assert misses(store) == []
        assert store.put_piece(A, b"x", facts={})
        assert store.put_program(P, b"x", pieces=[A], facts={})
        started = time.monotonic()
        assert len(store.ls()) == len(PROGRAMS) + 1
        assert time.monotonic() - started < 5
        started = time.monotonic()
        assert len(store.ls()) == len(PROGRAMS) + 1
        assert time.monotonic() - started < 0.5  # not waited for again
        other.execute("ROLLBACK")
        assert not store.check().quarantined
        assert store.check().ok
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.getMessage() for r in warnings if "locked" in r.getMessage()]
    assert len(warnings) == 1


def test_an_index_that_another_process_works_on_is_passed_over(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as store:
        fill(store)
        with acquire(root / "store" / "index.lock") or pytest.fail("not held"):
            assert len(store.ls()) == len(PROGRAMS)
        assert not database(root).exists()
    assert not caplog.records
