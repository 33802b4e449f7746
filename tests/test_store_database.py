"""A damaged, deleted or half-made index: named, thrown away, made anew; no entry is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diskcache
import pytest
from store_helpers import (
    PIECES,
    PROGRAMS,
    all_files,
    database,
    expect_rebuilt,
    fill,
    flip_payload,
    hot_journal,
    key,
    misses,
    open_store,
    rebuild,
    sql,
    value_file,
)

from pcgsvc.cache.file_lock import acquire
from pcgsvc.cache.store import Built, Store
from pcgsvc.config import CacheMode

SMALL, PIECE, *_ = PIECES
PROGRAM, *_ = PROGRAMS


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine") / "root"
    with open_store(root) as store:
        fill(store)
        assert misses(store) == []
        store.ls()  # makes the index
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "root"))


def foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95" + b"\0" * 500)


def garbage_header(path: Path) -> None:
    path.write_bytes(os.urandom(100) + path.read_bytes()[100:])


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def all_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def statement_that_is_no_text(path: Path) -> None:
    """SQLite quotes it in its message, which Python then cannot decode."""
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE Cache", b"CREATE T\xe5BLE Cache"))


def expect_sound(store: Store) -> None:
    """Nothing is missing, neither when looked up nor when listed."""
    assert misses(store) == []
    assert {info.key for info in store.ls()} == set(PROGRAMS)
    assert store.check().problems == []
    assert store.check().quarantined == []


DAMAGES = [garbage_header, half, all_garbage, foreign, statement_that_is_no_text]


@pytest.mark.parametrize("fix", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_database_is_named_thrown_away_and_built_again(
    root: Path, damage: Callable[[Path], None], fix: bool, caplog: pytest.LogCaptureFixture
) -> None:
    damage(database(root))
    with open_store(root) as store:
        assert [problem.what for problem in store.check(fix=fix).problems] == ["index"]
        assert misses(store) == []
        expect_sound(store)
    assert ("index damaged" in caplog.text) is not fix
    with open_store(root) as store:
        expect_sound(store)
        assert sql(root, "SELECT count(*) FROM Cache") == [(len(PROGRAMS),)]


def test_an_empty_database_is_filled_again(root: Path) -> None:
    database(root).write_bytes(b"")
    with open_store(root) as store:
        expect_sound(store)
    assert sql(root, "SELECT count(*) FROM Cache") == [(len(PROGRAMS),)]


def key_of_a_row(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(PROGRAM.encode(), b"z" + PROGRAM[1:].encode(), 1))


@pytest.mark.parametrize("damage", [*DAMAGES, key_of_a_row])
def test_a_damaged_database_that_a_write_meets_first_does_not_keep_it_from_success(
    root: Path, damage: Callable[[Path], None]
) -> None:
    damage(database(root))
    with open_store(root) as store:
        fill(store)
        expect_sound(store)


def test_a_flipped_key_is_called_damage_rather_than_absent(root: Path, tmp_path: Path) -> None:
    raw = database(root).read_bytes()
    # Of the row, and of the index that look-ups go by.
    places = [i for i in range(len(raw)) if raw.startswith(PROGRAM.encode(), i)]
    assert len(places) >= 2
    for place in places:
        copy = Path(shutil.copytree(root, tmp_path / str(place)))
        database(copy).write_bytes(raw[:place] + b"z" + raw[place + 1 :])
        with open_store(copy) as store:
            (problem,) = store.check().problems
            assert problem.what == "index"
            assert {info.key for info in store.ls()} == set(PROGRAMS)
        expect_rebuilt(copy)


def test_a_deleted_database_is_made_anew_and_nothing_is_lost(root: Path) -> None:
    database(root).unlink()
    with open_store(root) as store:
        expect_sound(store)
        assert store.put_piece(key("new"), b"x", facts={})
        expect_sound(store)
    assert database(root).exists()


def test_a_database_that_can_only_be_thrown_away_costs_no_entry_its_place_in_the_budget(
    root: Path,
) -> None:
    all_garbage(database(root))
    with open_store(root, max_bytes=1) as store:
        store.put_piece(key("new"), b"x", facts={})
        assert set(misses(store)) == {"absent"}


def test_files_of_a_killed_writer_go_when_the_next_one_begins(root: Path) -> None:
    stray = root / "store" / "entries" / "piece" / "ab" / f".{PIECE}.0123"
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"x")
    cleared = root / "store" / "entries.old"
    cleared.mkdir()
    with open_store(root) as store:
        assert store.check().strays == [stray]
        assert store.put_piece(key("new"), b"x", facts={})
        assert not stray.exists()
        assert not cleared.exists()
        assert misses(store) == []


def test_a_file_that_another_process_is_writing_is_no_stray(root: Path) -> None:
    half_written = root / "store" / "entries" / "piece" / "ab" / f".{PIECE}.0123"
    half_written.parent.mkdir(parents=True, exist_ok=True)
    with (
        acquire(half_written, shared=True) or pytest.fail("not held"),
        open_store(root) as store,
    ):
        assert store.put_piece(key("new"), b"x", facts={})
        assert store.check(fix=True).strays == []
        assert half_written.exists()


def test_a_cache_of_an_earlier_format_is_a_miss_with_its_reason_and_goes_with_the_next_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "root" / "store"
    for name in ("db/ab/cd", "pins"):
        (data / name).mkdir(parents=True, mode=0o700)
    data.chmod(0o700)
    (data / "db" / "cache.db").write_bytes(b"SQLite format 3")
    (data / "db" / "ab" / "cd" / "0.val").write_bytes(b"x" * 5000)
    (data / "db.lock").write_bytes(b"")
    for mode in (CacheMode.READ, CacheMode.READWRITE):
        with open_store(tmp_path / "root", mode) as store:
            assert store.get_piece(PIECE).miss == "absent; the cache is of an earlier format"
            assert store.ls() == []
            assert store.check().ok
    with open_store(tmp_path / "root") as store:
        fill(store)
        expect_sound(store)
    assert {path.name for path in data.iterdir()} == {
        "entries",
        "index",
        "index.lock",
        "evict.lock",
    }
    assert not caplog.records


def test_the_journal_of_a_deleted_database_does_not_get_into_the_new_one(root: Path) -> None:
    hot_journal(root, "DELETE FROM Cache")
    database(root).unlink()
    with open_store(root) as store:
        expect_sound(store)


def test_a_writer_killed_while_it_makes_the_database_leaves_no_damage(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(database(root).parent)
    real = diskcache.Cache.reset
    for call in range(1, 26, 4):
        pid = os.fork()
        if pid == 0:
            left = iter(range(call))

            def reset(*arguments: Any, left: Iterator[int] = left, **named: Any) -> Any:
                if next(left, None) is None:
                    os.kill(os.getpid(), 9)
                return real(*arguments, **named)

            with contextlib.suppress(BaseException):
                diskcache.Cache.reset = reset
                open_store(root).ls()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        with open_store(root) as store:
            assert store.check().ok
            assert misses(store) == []
    with open_store(root) as store:
        expect_sound(store)
    assert not caplog.records


def test_a_database_deleted_under_an_open_store_is_made_anew(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as store:
        assert store.put_piece(SMALL, PIECES[SMALL], facts={"of": SMALL})
        shutil.rmtree(database(root).parent)
        assert store.put_program(PROGRAM, b"{}", pieces=[], facts={})
        assert len(store.ls()) == len(PROGRAMS)
        assert database(root).exists()
        rebuild(store)
        assert store.check().ok
    assert not caplog.records


def test_entries_cleared_and_stored_again_by_another_process_are_found(root: Path) -> None:
    with open_store(root) as store, open_store(root) as other:
        expect_sound(store)
        other.clear()
        assert set(misses(store)) == {"absent"}
        rebuild(other)
        expect_sound(store)


def test_an_entry_replaced_between_look_up_and_read_is_read_whole(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root, CacheMode.READ) as store, open_store(root) as other:
        real = os.pread

        def late(fd: int, length: int, offset: int) -> bytes:
            monkeypatch.undo()
            other.put_piece(PIECE, b"new" * 5000, facts={"of": PIECE})
            return real(fd, length, offset)

        monkeypatch.setattr(os, "pread", late)
        assert store.get_piece(PIECE).value == PIECES[PIECE]
        assert store.get_piece(PIECE).value == b"new" * 5000


def test_a_folder_cleared_while_an_entry_is_written_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root) as store, open_store(root) as other:
        real = os.fsync

        def late(fd: int) -> None:
            monkeypatch.undo()
            real(fd)
            other.clear()

        monkeypatch.setattr(os, "fsync", late)
        assert store.put_piece(PIECE, PIECES[PIECE], facts={"of": PIECE})
        assert store.get_piece(PIECE).value == PIECES[PIECE]


def test_the_whole_folder_deleted_under_an_open_store_is_a_miss(root: Path) -> None:
    with open_store(root) as store:
        fill(store)
        shutil.rmtree(root)
        assert set(misses(store)) == {"absent"}
        assert not store.put_piece(PIECE, b"x", facts={})
        assert store.get_or_build(PIECE, lambda: Built(b"y")).value == b"y"


def test_mode_read_names_damage_and_leaves_it(root: Path) -> None:
    flip_payload(value_file(root, PIECE))
    before = {path: path.read_bytes() for path in all_files(root)}
    with open_store(root, CacheMode.READ) as store:
        assert store.get_piece(PIECE).miss == "digest mismatch"
        assert store.get_piece(PIECE).miss == "digest mismatch"
    assert {path: path.read_bytes() for path in all_files(root)} == before
    all_garbage(database(root))
    with open_store(root, CacheMode.READ) as store:
        assert store.get_piece(PIECE).miss == "digest mismatch"
        assert len(store.ls()) == len(PROGRAMS)


def test_another_process_s_repair_is_not_thrown_away(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_payload(value_file(root, PIECE))
    with open_store(root) as slow, open_store(root) as other:
        quarantine = slow._entries.quarantine
        move = quarantine.move

        def late(*arguments: Any) -> bool:
            other.get_piece(PIECE)
            other.put_piece(PIECE, PIECES[PIECE], facts={"of": PIECE})
            return move(*arguments)

        monkeypatch.setattr(quarantine, "move", late)
        assert slow.get_piece(PIECE).value == PIECES[PIECE]
        assert other.get_piece(PIECE).value == PIECES[PIECE]
        assert len(slow.check().quarantined) == 1


def test_a_transaction_of_a_killed_writer_is_rolled_back(root: Path) -> None:
    hot_journal(root, "DELETE FROM Cache")
    with open_store(root) as store:
        expect_sound(store)
    assert sql(root, "SELECT count(*) FROM Cache") == [(len(PROGRAMS),)]


def test_mode_read_passes_over_the_journal_of_a_killed_writer(root: Path) -> None:
    hot_journal(root)
    with open_store(root, CacheMode.READ) as store:
        assert misses(store) == []
