"""A damaged, deleted or half-made database: named, put aside, made anew."""

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
    expect_rebuilt,
    fill,
    flip_payload,
    hot_journal,
    key,
    misses,
    open_store,
    rebuild,
    value_file,
)

from pcgsvc.cache.envelope import Entry
from pcgsvc.cache.store import Built
from pcgsvc.config import CacheMode

SMALL, PIECE, *_ = PIECES  # the one lies in its row, the other in a value file


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine") / "root"
    with open_store(root) as store:
        fill(store)
        assert misses(store) == []
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


def no_table(path: Path) -> None:
    path.write_bytes(b"")


def all_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def statement_that_is_no_text(path: Path) -> None:
    """SQLite quotes it in its message, which Python then cannot decode."""
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE Cache", b"CREATE T\xe5BLE Cache"))


@pytest.mark.parametrize(
    "damage",
    [garbage_header, half, no_table, all_garbage, foreign, statement_that_is_no_text],
)
def test_a_damaged_database_is_named_put_aside_and_built_again(
    root: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "store" / "db" / "cache.db")
    with open_store(root) as store:
        assert not store.check().ok
        found = store.get_piece(PIECE)
        assert found.value is None
        assert "database damaged" in (found.miss or "")
        assert misses(store) == ["absent"] * (len(PIECES) + len(PROGRAMS))
        assert any("database" in path.name for path in store.check().quarantined)
        fill(store)
        assert misses(store) == []
    assert "database damaged" in caplog.text
    expect_rebuilt(root)


def key_of_a_row(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(PIECE.encode(), b"z" + PIECE[1:].encode(), 1))


@pytest.mark.parametrize("damage", [all_garbage, half, key_of_a_row, statement_that_is_no_text])
def test_a_damaged_database_that_a_write_meets_first_is_put_aside_and_the_write_succeeds(
    root: Path, damage: Callable[[Path], None]
) -> None:
    damage(root / "store" / "db" / "cache.db")
    with open_store(root) as store:
        fill(store)
        assert misses(store) == []
        assert store.check().ok


def test_a_flipped_key_is_called_damage_rather_than_absent(root: Path, tmp_path: Path) -> None:
    raw = (root / "store" / "db" / "cache.db").read_bytes()
    # Of the row, and of the index that look-ups go by.
    places = [i for i in range(len(raw)) if raw.startswith(PIECE.encode(), i)]
    assert len(places) == 2
    for place in places:
        copy = Path(shutil.copytree(root, tmp_path / str(place)))
        (copy / "store" / "db" / "cache.db").write_bytes(raw[:place] + b"z" + raw[place + 1 :])
        with open_store(copy) as store:
            assert "missing from index" in (store.get_piece(key("never stored")).miss or "")
        expect_rebuilt(copy)


def test_a_deleted_database_is_empty_and_its_files_go_with_the_next_write(root: Path) -> None:
    (root / "store" / "db" / "cache.db").unlink()
    with open_store(root) as store:
        assert set(misses(store)) == {"absent"}
        assert store.put_piece(key("new"), b"x", facts={})
        assert not list((root / "store" / "db").rglob("*.val"))
        rebuild(store)
        assert misses(store) == []


def test_files_of_a_killed_writer_go_when_the_next_one_begins(root: Path) -> None:
    stray = root / "store" / "db" / "ab" / "cd" / ("0" * 28 + ".val")
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"x")
    half_made = root / "store" / "db.new"
    half_made.mkdir()
    with open_store(root) as store:
        assert store.check().strays == [stray]
        assert store.put_piece(key("new"), b"x", facts={})
        assert not stray.exists()
        assert misses(store) == []


def test_the_journal_of_a_deleted_database_does_not_get_into_the_new_one(root: Path) -> None:
    hot_journal(root, "DELETE FROM Cache")
    (root / "store" / "db" / "cache.db").unlink()
    with open_store(root) as store:
        rebuild(store)
        assert misses(store) == []
        assert store.check().ok
        assert not store.check().quarantined


def test_a_writer_killed_while_it_makes_the_database_leaves_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
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
                open_store(root).put_piece(PIECE, b"x", facts={})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        with open_store(root) as store:
            assert store.get_piece(PIECE).miss == "absent"
            assert store.check().ok
    with open_store(root) as store:
        rebuild(store)
        assert misses(store) == []
        assert not store.check().quarantined
    assert not caplog.records


def test_a_database_deleted_under_an_open_store_is_made_anew(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(root) as store:
        assert store.put_piece(SMALL, PIECES[SMALL], facts={"of": SMALL})
        (root / "store" / "db" / "cache.db").unlink()
        assert store.put_piece(SMALL, PIECES[SMALL], facts={"of": SMALL})
        rebuild(store)
        assert misses(store) == []
        assert store.check().ok
    assert not caplog.records


def test_a_database_that_was_replaced_meanwhile_is_not_put_aside_for_the_old_one(
    root: Path,
) -> None:
    with open_store(root) as store:
        assert store._entries is not None
        table = store._entries.table
        old = table.reader.inode()
        store.clear()
        rebuild(store)
        assert table.writer is not None
        assert table.writer.put_aside("damage of the old one", old, force=True) is None
        assert misses(store) == []


def test_a_row_replaced_between_look_up_and_read_is_looked_up_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root, CacheMode.READ) as store:
        assert store._entries is not None
        reader = store._entries.table.reader
        stale = [(2, "ab/cd/" + "0" * 28 + ".val", None)]
        real = reader._row
        monkeypatch.setattr(reader, "_row", lambda *a: stale.pop() if stale else real(*a))
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
    all_garbage(root / "store" / "db" / "cache.db")
    with open_store(root, CacheMode.READ) as store:
        assert "database damaged" in (store.get_piece(PIECE).miss or "")


def test_another_process_s_repair_is_not_thrown_away(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_payload(value_file(root, PIECE))
    with open_store(root) as slow, open_store(root) as other:
        assert slow._entries is not None
        table = slow._entries.table
        discard = table._discard

        def late(*arguments: Any) -> Entry:
            other.get_piece(PIECE)
            other.put_piece(PIECE, PIECES[PIECE], facts={"of": PIECE})
            return discard(*arguments)

        monkeypatch.setattr(table, "_discard", late)
        assert slow.get_piece(PIECE).value == PIECES[PIECE]
        assert other.get_piece(PIECE).value == PIECES[PIECE]


def test_a_transaction_of_a_killed_writer_is_rolled_back(root: Path) -> None:
    hot_journal(root, "DELETE FROM Cache")
    with open_store(root) as store:
        assert misses(store) == []
        assert store.check().ok


def test_mode_read_passes_over_the_journal_of_a_killed_writer(root: Path) -> None:
    hot_journal(root)
    with open_store(root, CacheMode.READ) as store:
        assert misses(store) == []
