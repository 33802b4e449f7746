"""The store when nothing is damaged: entries, what diskcache may do, modes."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import diskcache
import pytest
from store_helpers import (
    all_files,
    database,
    fill,
    key,
    misses,
    open_store,
    sql,
    stored_files,
)

from pcgsvc.cache import index
from pcgsvc.cache.index import open_cache
from pcgsvc.cache.store import Built, Store
from pcgsvc.config import CacheMode
from pcgsvc.errors import CacheError

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
        assert len(stored_files(root)) == 1
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
    cache = open_cache(tmp_path / "index")
    for bad in ({"a": 1}, "text", 7, None, bytearray(b"x")):
        with pytest.raises(CacheError, match="only bytes"):
            cache.set(A, bad)
    for bad_key in (("a", "b"), 7, "name", b"bytes"):
        with pytest.raises(CacheError, match="64 lower-case hex"):
            cache.set(bad_key, b"x")
    with pytest.raises(CacheError, match="only bytes"):
        cache.set(A, io.BytesIO(b"x"), read=True)
    assert len(cache) == 0
    cache.close()


def test_diskcache_itself_refuses_a_pickle_on_read(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "index")
    cache.set(A, b"x")
    with cache.transact():
        cache._sql("UPDATE Cache SET mode = 4, value = ?", (pickle.dumps(1),))
    with pytest.raises(Exception, match="mode pickle"):
        cache.get(A)
    cache.close()


def test_every_setting_is_given_at_each_open_whatever_the_database_says(root: Path) -> None:
    with open_store(root) as store:
        store.put_program(A, b"x" * 3000, pieces=[], facts={})
        assert [info.key for info in store.ls()] == [A]
    sql(root, "UPDATE Settings SET value='least-recently-used' WHERE key='eviction_policy'")
    sql(root, "UPDATE Settings SET value=10 WHERE key IN ('size_limit', 'cull_limit')")
    with open_store(root) as store:
        store.put_program(B, b"y" * 3000, pieces=[], facts={})
        assert {info.key for info in store.ls()} == {A, B}
    settings = dict(sql(root, "SELECT key, value FROM Settings"))
    assert len(sql(root, "SELECT key FROM Cache")) == 2
    assert (settings["eviction_policy"], settings["cull_limit"]) == ("none", 0)
    assert (settings["sqlite_mmap_size"], settings["sqlite_synchronous"]) == (0, 0)
    given = {name for name in diskcache.DEFAULT_SETTINGS if name in settings}
    assert given == set(diskcache.DEFAULT_SETTINGS)


def test_one_module_alone_imports_diskcache() -> None:
    package = Path(index.__file__).parent.parent
    users = [p.name for p in package.rglob("*.py") if "import diskcache" in p.read_text()]
    assert users == ["index.py"]


def test_the_store_imports_no_torch() -> None:
    code = "import sys, pcgsvc.cache.store, pcgsvc.cache.bundle; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_warm_start_changes_nothing_in_the_database(root: Path) -> None:
    """Nor in the entries, but the time of their last use."""
    with open_store(root) as store:
        fill(store)
        store.ls()
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in all_files(root)}
    written = database(root).stat().st_mtime_ns
    with open_store(root) as store:
        assert misses(store) == []
    assert before == {path: (path.stat().st_ino, path.read_bytes()) for path in all_files(root)}
    assert database(root).stat().st_mtime_ns == written


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
