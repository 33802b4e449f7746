"""The store when nothing is damaged: entries, modes, one builder per key, budget, reports."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import diskcache
import pytest
from store_helpers import (
    PIECES,
    PROGRAMS,
    all_files,
    fill,
    key,
    misses,
    open_store,
    sql,
    stored_files,
)

from pcgsvc.config import CacheMode
from pcgsvc.disk import bytes_disk
from pcgsvc.disk.bytes_disk import open_cache, row_name
from pcgsvc.disk.envelope import Entry, Kind
from pcgsvc.disk.file_lock import acquire
from pcgsvc.errors import CacheError
from pcgsvc.store import Built, Store

A, B, C, P, Q = (key(name) for name in "abcpq")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


# ---- entries -------------------------------------------------------------------------------------


def test_what_was_stored_comes_back_with_facts_and_pieces_in_a_new_store(root: Path) -> None:
    facts = {"torch": "2.13", "sizes": [1, 2], "nested": {"a": None}}
    with open_store(root) as store:
        assert store.put_piece(A, b"\0\xff" * 5000, facts=facts)
        assert store.put_program(P, b"{}", pieces=[A], facts={})
    with open_store(root) as store:
        found = store.get_piece(A)
        assert (found.value, found.miss, found.facts) == (b"\0\xff" * 5000, None, facts)
        assert (store.get_program(P).value, store.get_program(P).pieces) == (b"{}", (A,))


def test_a_missing_entry_is_absent_and_counted(root: Path) -> None:
    with open_store(root) as store:
        assert store.get_piece(A).miss == "absent"
        store.put_piece(A, b"x", facts={})
        assert store.get_piece(A).hit
        assert (store.counts.hits, store.counts.misses, store.counts.stored) == (1, 1, 1)
        assert store.counts.miss_reasons == [f"piece {A[:12]}: absent"]


def test_a_program_and_a_piece_of_one_key_are_two_entries(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"piece", facts={})
        store.put_program(A, b"program", pieces=[], facts={})
        assert (store.get_piece(A).value, store.get_program(A).value) == (b"piece", b"program")


def test_storing_again_replaces_and_leaves_no_old_file(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"1" * 5000, facts={})
        store.put_piece(A, b"2" * 5000, facts={})
        assert store.get_piece(A).value == b"2" * 5000
        assert len(list((root / "store" / "db").rglob("*.val"))) == 1
        assert store.check().ok


@pytest.mark.parametrize("bad", ["", "abc", A.upper(), A + "0", "../" + A[3:], 7, None])
def test_a_malformed_key_is_an_error_not_a_miss(root: Path, bad: Any) -> None:
    with open_store(root) as store:
        with pytest.raises(CacheError, match="64 lower-case hex"):
            store.get_piece(bad)
        with pytest.raises(CacheError, match="64 lower-case hex"):
            store.put_piece(bad, b"x", facts={})


@pytest.mark.parametrize("mode", list(CacheMode))
def test_an_empty_payload_and_facts_that_are_no_json_are_errors_in_every_mode(
    root: Path, mode: CacheMode
) -> None:
    with Store.open(str(root), mode=mode) as store:
        with pytest.raises(CacheError, match="payload is empty"):
            store.put_piece(A, b"", facts={})
        with pytest.raises(CacheError, match="no JSON"):
            store.put_piece(A, b"x", facts={"a": object()})
        with pytest.raises(CacheError, match="no JSON"):
            store.put_piece(A, b"x", facts={"a": float("nan")})


def test_a_program_whose_pieces_are_not_stored_is_not_stored(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"x", facts={})
        assert not store.put_program(P, b"{}", pieces=[A, B], facts={})
        assert store.get_program(P).miss == "absent"
    assert B[:12] in caplog.text


def test_after_close_all_is_a_miss_and_close_twice_is_fine(root: Path) -> None:
    store = open_store(root)
    store.put_piece(A, b"x", facts={})
    store.close()
    store.close()
    assert store.get_piece(A).miss == "store is closed"
    assert not store.put_piece(A, b"x", facts={})


def test_eight_threads_share_one_store(root: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                name = key(f"{number} {turn}")
                assert store.put_piece(name, name.encode() * 40, facts={})
                assert store.get_piece(name).value == name.encode() * 40
        except BaseException as error:  # noqa: BLE001 - judged below
            errors.append(error)

    with open_store(root) as store:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert store.check().num_pieces == 40
        assert store.check().ok


def test_a_store_opened_before_a_fork_serves_parent_and_child(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"x", facts={})
        pid = os.fork()
        if pid == 0:
            ok = store.get_piece(A).hit and store.put_piece(B, b"y", facts={})
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.get_piece(B).value == b"y"


# ---- diskcache -----------------------------------------------------------------------------------


def test_diskcache_takes_nothing_but_bytes_under_names_of_ours(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "db", timeout_s=1, size_limit=1)
    name = row_name(Kind.PIECE, A)
    for bad in ({"a": 1}, "text", 7, None, bytearray(b"x")):
        with pytest.raises(CacheError, match="only bytes"):
            cache.set(name, bad)
    for bad_key in (("a", "b"), 7, "name", b"bytes"):
        with pytest.raises(CacheError, match="our own form"):
            cache.set(bad_key, b"x")
    with pytest.raises(CacheError, match="only bytes"):
        cache.set(name, io.BytesIO(b"x"), read=True)
    assert len(cache) == 0
    cache.close()


def test_diskcache_itself_refuses_a_pickle_on_read(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "db", timeout_s=1, size_limit=1)
    name = row_name(Kind.PIECE, A)
    cache.set(name, b"x")
    with cache.transact():
        cache._sql("UPDATE Cache SET mode = 4, value = ?", (pickle.dumps(1),))
    with pytest.raises(Exception, match="mode pickle"):
        cache.get(name)
    cache.close()


def test_every_setting_is_given_at_each_open_whatever_the_database_says(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"x" * 3000, facts={})
    sql(root, "UPDATE Settings SET value='least-recently-used' WHERE key='eviction_policy'")
    sql(root, "UPDATE Settings SET value=10 WHERE key IN ('size_limit', 'cull_limit')")
    with open_store(root) as store:
        store.put_piece(B, b"y" * 3000, facts={})
        assert store.get_piece(A).hit
    settings = dict(sql(root, "SELECT key, value FROM Settings"))
    assert (settings["eviction_policy"], settings["cull_limit"]) == ("none", 0)
    assert (settings["sqlite_mmap_size"], settings["sqlite_synchronous"]) == (0, 2)
    given = {name for name in diskcache.DEFAULT_SETTINGS if name in settings}
    assert given == set(diskcache.DEFAULT_SETTINGS)


def test_one_module_alone_imports_diskcache() -> None:
    package = Path(bytes_disk.__file__).parent.parent
    users = [p.name for p in package.rglob("*.py") if "import diskcache" in p.read_text()]
    assert users == ["bytes_disk.py"]


def test_the_store_imports_no_torch() -> None:
    code = "import sys, pcgsvc.store, pcgsvc.bundle; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_warm_start_changes_nothing_in_the_database(root: Path) -> None:
    with open_store(root) as store:
        fill(store)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in stored_files(root)}
    with open_store(root) as store:
        assert misses(store) == []
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in stored_files(root)}


# ---- modes ---------------------------------------------------------------------------------------


def test_mode_off_leaves_no_file_and_reads_none(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"x", facts={})
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = all_files(tmp_path)
    with Store.open(str(root), mode=CacheMode.OFF) as store:
        assert store.get_piece(A).miss == "cache off"
        assert not store.put_piece(B, b"x", facts={})
        assert store.get_or_build(C, lambda: Built(b"c")).value == b"c"
        assert (store.ls(), store.nearest({}), store.num_bytes()) == ([], None, 0)
        assert store.check().ok
        dirs = store.compiler_dirs()
        assert dirs.inductor.is_dir()
        assert dirs.triton.is_relative_to(scratch)
        (dirs.triton / "file").write_text("x")
        with pytest.raises(CacheError, match=r"cache\.mode=off"):
            store.clear()
    assert all_files(tmp_path) == before
    assert not list(scratch.iterdir())


def test_mode_read_serves_hits_and_stores_nothing(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"x", facts={})
    before = {path: path.stat().st_mtime_ns for path in all_files(root)}
    with open_store(root, CacheMode.READ) as store:
        assert store.get_piece(A).value == b"x"
        assert not store.put_piece(B, b"y", facts={})
        assert store.get_or_build(B, lambda: Built(b"y")).stored is False
        assert store.get_piece(B).miss == "absent"
        assert not store.compiler_dirs().inductor.is_relative_to(root)
        with pytest.raises(CacheError, match=r"cache\.mode=read"):
            store.clear()
    assert before == {path: path.stat().st_mtime_ns for path in all_files(root)}


def test_mode_read_makes_no_folder(root: Path) -> None:
    with open_store(root, CacheMode.READ) as store:
        assert store.get_piece(A).miss == "absent"
    assert not root.exists()


def test_mode_refresh_misses_once_and_then_serves_what_it_renewed(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"old", facts={})
    with open_store(root, CacheMode.REFRESH) as store:
        assert store.get_piece(A).miss == "refresh"
        made = store.get_or_build(A, lambda: Built(b"new"))
        assert (made.value, made.stored, made.miss) == (b"new", True, "refresh")
        assert store.get_piece(A).value == b"new"
    with open_store(root) as store:
        assert store.get_piece(A).value == b"new"


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


def test_a_held_write_lock_lets_reads_through_and_writes_fail_once_loudly(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as store:
        fill(store)
    with (
        open_store(root, timeout_s=0.2) as store,
        closing(sqlite3.connect(root / "store" / "db" / "cache.db", isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        assert misses(store) == []
        assert not store.put_piece(A, b"x", facts={})
        started = time.monotonic()
        assert not store.put_piece(B, b"x", facts={})
        assert time.monotonic() - started < 0.2  # not waited for again
        other.execute("ROLLBACK")
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.getMessage() for r in warnings if "locked" in r.getMessage()]
    assert len(warnings) == 1


def test_a_database_locked_for_readers_is_a_miss_not_damage(root: Path) -> None:
    with open_store(root) as store:
        fill(store)
    with (
        open_store(root, timeout_s=0.1) as store,
        closing(sqlite3.connect(root / "store" / "db" / "cache.db", isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        assert "locked" in (store.get_piece(next(iter(PIECES))).miss or "")
        other.execute("ROLLBACK")
        assert misses(store) == []
        assert not store.check().quarantined


# ---- budget --------------------------------------------------------------------------------------


def put_programs(root: Path, names: str, **settings: Any) -> None:
    """Store programs of one private piece each, and a piece that all share; the first is oldest."""
    for age, name in enumerate(reversed(names)):
        with open_store(root, **settings) as store:
            store.put_piece(key("shared"), b"s" * 1000, facts={})
            store.put_piece(key(f"piece {name}"), name.encode() * 10000, facts={})
            pieces = [key("shared"), key(f"piece {name}")]
            assert store.put_program(key(name), name.encode(), pieces=pieces, facts={"n": name})
        when = time.time() - 1000 * (age + 1)
        os.utime(root / "store" / "pins" / row_name(Kind.PROGRAM, key(name)), (when, when))


def programs(root: Path) -> set[str]:
    with open_store(root, CacheMode.READ) as store:
        return {info.facts["n"] for info in store.ls()}


def test_the_least_recently_used_program_goes_first_and_takes_its_own_pieces_along(
    root: Path,
) -> None:
    put_programs(root, "abcd")
    with open_store(root) as store:
        assert store.get_program(key("a")).hit  # a, the oldest, is used again
    put_programs(root, "e", max_bytes=45_000)
    assert programs(root) == {"a", "c", "d", "e"}
    with open_store(root) as store:
        assert store.get_piece(key("shared")).hit
        assert store.get_piece(key("piece b")).miss == "absent"
        report = store.check()
        assert (report.ok, report.orphans, report.strays) == (True, [], [])
        assert report.num_bytes <= 45_000
        assert len(list((root / "store" / "pins").iterdir())) == report.num_programs * 2 + 1


def test_a_program_in_use_by_another_process_is_never_dropped(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_programs(root, "ab")
    with open_store(root, CacheMode.READ) as user:
        assert user.get_program(key("a")).hit
        put_programs(root, "c", max_bytes=12_000)
        assert programs(root) == {"a", "c"}
        assert "in use" in caplog.text
        assert user.get_piece(key("piece a")).hit
    put_programs(root, "d", max_bytes=12_000)
    assert programs(root) == {"d"}


def test_pieces_of_a_build_in_progress_are_not_dropped_and_those_of_a_dead_one_are(
    root: Path,
) -> None:
    with open_store(root) as dead:
        dead.put_piece(A, b"a" * 20_000, facts={})
    with open_store(root) as builder:
        builder.put_piece(B, b"b" * 20_000, facts={})
        with open_store(root, max_bytes=5_000) as store:
            store.put_piece(C, b"c", facts={})
            assert store.get_piece(A).miss == "absent"
        assert builder.put_program(P, b"{}", pieces=[B], facts={})
        assert builder.get_piece(B).hit


def test_a_piece_that_a_remaining_program_lists_stays(root: Path) -> None:
    put_programs(root, "ab")
    with open_store(root, max_bytes=25_000) as store:
        store.put_piece(C, b"c" * 10_000, facts={})
        assert store.put_program(key("c"), b"c", pieces=[C], facts={"n": "c"})
        assert store.get_program(key("a")).miss == "absent"
        assert store.get_piece(key("shared")).hit
        assert store.check().ok


def test_what_was_got_is_in_use_even_if_its_pin_was_lost(root: Path) -> None:
    put_programs(root, "a")
    shutil.rmtree(root / "store" / "pins")
    with open_store(root) as user:
        assert user.get_program(key("a")).hit
        put_programs(root, "b", max_bytes=1)
        assert programs(root) == {"a", "b"}


def test_within_its_budget_nothing_is_dropped(root: Path) -> None:
    put_programs(root, "abcdefgh", max_bytes=100_000)
    assert programs(root) == set("abcdefgh")


# ---- reports -------------------------------------------------------------------------------------


def test_ls_gives_size_last_use_and_the_facts_that_tell_programs_apart(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"x" * 2000, facts={})
        store.put_program(P, b"{}", pieces=[A], facts={"torch": "2", "config": {"x": 1, "y": 0}})
        store.put_program(Q, b"{}", pieces=[A], facts={"torch": "2", "config": {"x": 2, "y": 0}})
        old = time.time() - 1000
        os.utime(root / "store" / "pins" / row_name(Kind.PROGRAM, P), (old, old))
        newest, oldest = store.ls()
        assert (newest.key, oldest.key) == (Q, P)
        assert abs(oldest.last_use - old) < 1
        assert abs(newest.last_use - time.time()) < 60
        assert (oldest.summary, newest.summary) == ({"config.x": 1}, {"config.x": 2})
        assert newest.num_pieces == 1
        assert newest.num_bytes > 2000


def test_nearest_names_exactly_the_facts_that_differ(root: Path) -> None:
    with open_store(root) as store:
        store.put_program(P, b"{}", pieces=[], facts={"a": 1, "config": {"x": 1, "y": [1, 2]}})
        store.put_program(Q, b"{}", pieces=[], facts={"a": 2, "config": {"x": 2}})
        near = store.nearest({"a": 1, "config": {"x": 1, "y": [1, 3]}, "new": True})
        assert near is not None
        assert near.key == P
        assert [(d.name, d.stored, d.wanted) for d in near.differences] == [
            ("config.y", [1, 2], [1, 3]),
            ("new", "(absent)", True),
        ]
        exact = store.nearest({"a": 2, "config": {"x": 2}})
        assert exact is not None
        assert (exact.key, exact.differences) == (Q, [])


def test_nearest_of_an_empty_store_is_none(root: Path) -> None:
    with open_store(root) as store:
        assert store.nearest({"a": 1}) is None


def test_facts_of_true_and_one_differ(root: Path) -> None:
    with open_store(root) as store:
        store.put_program(P, b"{}", pieces=[], facts={"a": True})
        near = store.nearest({"a": 1})
        assert near is not None
        assert [d.name for d in near.differences] == ["a"]


def test_check_finds_orphans_and_strays_and_fix_deletes_strays(root: Path) -> None:
    with open_store(root) as store:
        fill(store)
        store.put_piece(A, b"x", facts={})
        stray = root / "store" / "db" / "ab" / "cd" / ("0" * 28 + ".val")
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_bytes(b"x")
        report = store.check()
        assert (report.ok, report.orphans, report.strays) == (True, [A], [stray])
        assert (report.num_programs, report.num_pieces) == (len(PROGRAMS), len(PIECES) + 1)
        assert store.check(fix=True).strays == [stray]
        assert not stray.exists()
        assert misses(store) == []


def test_check_finds_a_missing_piece_and_fix_drops_the_program(root: Path) -> None:
    with open_store(root) as store:
        fill(store)
        first = next(iter(PIECES))
        store.drop(Kind.PIECE, first)
        (problem,) = store.check().problems
        assert "pieces missing" in problem.cause
        assert first[:12] in problem.cause
        store.check(fix=True)
        assert store.check().ok


def test_clear_deletes_all_entries_and_the_store_goes_on(root: Path) -> None:
    with open_store(root) as other, open_store(root) as store:
        fill(store)
        assert other.get_piece(next(iter(PIECES))).hit
        assert store.clear() > 8000
        assert not stored_files(root)
        assert set(misses(other)) == {"absent"}
        fill(other)
        assert misses(store) == []
        assert store.check().ok


def test_clear_leaves_scratch_that_another_store_uses(root: Path) -> None:
    with open_store(root) as store:
        with open_store(root) as compiling:
            mine = compiling.compiler_dirs().inductor / "file"
            mine.write_text("x")
            assert (mine.parent.stat().st_mode & 0o777) == 0o700
            store.clear()
            assert mine.exists()
        store.clear()
        assert not mine.exists()


def test_an_entry_is_put_back_as_it_was_read(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store, open_store(tmp_path / "other") as other:
        store.put_piece(A, b"x", facts={"f": 1})
        entry = store.read(Kind.PIECE, A)
        assert isinstance(entry, Entry)
        assert other.put(entry)
        assert other.read(Kind.PIECE, A) == entry
