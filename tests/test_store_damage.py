"""Damage of every kind: a miss with a named cause, put aside, built again; never a wrong result."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_helpers import (
    PIECES,
    PROGRAMS,
    all_files,
    as_user,
    fill,
    key,
    misses,
    open_store,
    rebuild,
    shared_folder,
    sql,
    stored_files,
    value_file,
)

from pcgsvc.config import CacheMode
from pcgsvc.disk import envelope
from pcgsvc.disk.envelope import DamagedError, Entry, Kind, decode, encode
from pcgsvc.disk.quarantine import Quarantine
from pcgsvc.store import Built

SMALL, PIECE, *_ = PIECES  # the one lies in its row, the other in a value file
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, or changes its uid")


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


def expect_rebuilt(root: Path) -> None:
    """A later run stores again what is missing, and the store is sound then."""
    with open_store(root) as store:
        rebuild(store)
    with open_store(root) as store:
        assert misses(store) == []
        report = store.check(fix=True)
        if any(problem.what == "database" for problem in report.problems):
            rebuild(store)  # from damage that no look-up had met
        assert misses(store) == []
        assert store.check().problems == []


# ---- any byte of any file ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_a_byte_flipped_anywhere_never_gives_a_wrong_result(
    root: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    files = stored_files(root)
    path = rng.choices(files, [file.stat().st_size for file in files])[0]
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    with open_store(root) as store:
        found = misses(store)
        assert "absent" not in found[:1]  # damage to the database is called by its name
        if path.suffix == ".val":
            assert len(found) == 1
        if found:
            assert found[0] in caplog.text
            assert store.check().quarantined
    expect_rebuilt(root)


def test_a_byte_flipped_anywhere_in_an_envelope_is_found() -> None:
    entry = Entry(kind=Kind.PIECE, key=key("a"), payload=b"payload", facts={"f": 1}, created=1.5)
    raw = encode(entry)
    assert decode(raw, Kind.PIECE, key("a")) == entry
    for offset in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[offset] ^= 1 << bit
            with pytest.raises(DamagedError):
                decode(bytes(flipped), Kind.PIECE, key("a"))


def test_an_envelope_cut_anywhere_is_found() -> None:
    raw = encode(Entry(kind=Kind.PIECE, key=key("a"), payload=b"payload"))
    for length in range(len(raw)):
        with pytest.raises(DamagedError, match=r"truncated|empty"):
            decode(raw[:length], Kind.PIECE, key("a"))


# ---- named causes --------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95" + b"\0" * 500)


def other_version(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, 8, 2)
    path.write_bytes(raw)


def other_entry(path: Path) -> None:
    path.write_bytes(encode(Entry(kind=Kind.PIECE, key=key("other"), payload=b"other's bytes")))


def other_kind(path: Path) -> None:
    path.write_bytes(encode(Entry(kind=Kind.PROGRAM, key=PIECE, payload=b"a program's bytes")))


def flip_payload(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo_in_its_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (cut, "truncated"),
        (empty, "empty entry"),
        (grow, "too long"),
        (foreign, "foreign bytes"),
        (other_version, "format version 2, this pcgsvc reads 1"),
        (other_entry, "entry of another key"),
        (other_kind, "entry of another key"),
        (flip_payload, "digest mismatch"),
        (Path.unlink, "value file missing"),
        (folder_in_its_place, "value file unreadable"),
        (fifo_in_its_place, "empty entry"),
    ],
)
def test_a_damaged_value_file_is_a_miss_named_by_its_cause_and_only_that_entry_goes(
    root: Path, damage: Callable[[Path], None], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(value_file(root, PIECE))
    with open_store(root) as store:
        assert [p.cause for p in store.check().problems if cause in p.cause]
        found = store.get_piece(PIECE)
        assert found.value is None
        assert cause in (found.miss or "")
        assert store.get_piece(PIECE).miss == "absent"
        assert misses(store) == ["absent"]
    assert cause in caplog.text
    assert PIECE[:12] in caplog.text
    expect_rebuilt(root)


def test_a_damaged_entry_is_kept_in_quarantine(root: Path) -> None:
    flip_payload(value_file(root, PIECE))
    with open_store(root) as store:
        store.get_piece(PIECE)
        (kept,) = store.check().quarantined
        assert "digest-mismatch" in kept.name
        assert kept.read_bytes().endswith(PIECES[PIECE][:-1] + bytes([PIECES[PIECE][-1] ^ 1]))
        assert not store.check().strays


def test_the_quarantine_is_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q", max_bytes=250)
    for number in range(5):
        quarantine.keep(f"entry {number}", bytes([number]) * 100)
    assert [path.read_bytes()[0] for path in quarantine.items()] == [3, 4]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_planted_pickle_is_a_miss_and_never_executed(
    root: Path, tmp_path: Path, in_file: bool
) -> None:
    trap = tmp_path / "executed"
    bomb = pickle.dumps(Trap(str(trap)))
    if in_file:
        value_file(root, PIECE).write_bytes(bomb)
        sql(root, "UPDATE Cache SET mode = 4 WHERE key LIKE ?", f"%{PIECE}")
    else:
        sql(
            root,
            "UPDATE Cache SET mode = 4, filename = NULL, value = ? WHERE key LIKE ?",
            bomb,
            f"%{PIECE}",
        )
    with open_store(root) as store:
        assert not store.check().ok
        assert store.get_piece(PIECE).miss == "row refused: a value of mode pickle"
        store.ls()
        store.check(fix=True)
    expect_rebuilt(root)
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.exists()  # the trap does work


@pytest.mark.parametrize(
    ("column", "value", "cause"),
    [
        ("mode", 3, "mode text"),
        ("mode", "x", "mode 'x'"),
        ("mode", 2, "mode 2"),
        ("value", "text", "mode 1"),
        ("value", None, "mode 1"),
        ("filename", "../../../secret", "mode 1"),
    ],
)
def test_a_row_that_is_none_of_ours_is_refused(
    root: Path, column: str, value: Any, cause: str
) -> None:
    sql(root, f"UPDATE Cache SET {column} = ? WHERE key LIKE ?", value, f"%{SMALL}")
    with open_store(root) as store:
        assert cause in (store.get_piece(SMALL).miss or "")
    expect_rebuilt(root)


def test_a_row_that_names_a_file_elsewhere_neither_reads_nor_deletes_it(root: Path) -> None:
    secret = root / "secret"
    secret.write_bytes(encode(Entry(kind=Kind.PIECE, key=PIECE, payload=b"not ours")))
    sql(root, "UPDATE Cache SET filename = '../../secret' WHERE key LIKE ?", f"%{PIECE}")
    with open_store(root) as store:
        assert "row refused" in (store.get_piece(PIECE).miss or "")
        store.put_piece(PIECE, PIECES[PIECE], facts={})
        store.clear()
    assert secret.exists()


# ---- the database itself -------------------------------------------------------------------------


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
    hot_journal(root)
    (root / "store" / "db" / "cache.db").unlink()
    with open_store(root) as store:
        rebuild(store)
        assert misses(store) == []
        assert store.check().ok
        assert not store.check().quarantined


def test_a_database_that_was_replaced_meanwhile_is_not_put_aside_for_the_old_one(
    root: Path,
) -> None:
    with open_store(root) as store:
        assert store._entries is not None
        table = store._entries.table
        old = table.reader.inode()
        store.clear()
        rebuild(store)
        assert table._put_aside("damage of the old one", old, force=True) is None
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


# ---- full disk -----------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    mount = subprocess.run(["mount", *arguments, str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount here: {mount.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@needs_root
def test_a_full_disk_is_warned_of_once_and_leaves_nothing_half_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "small"
    with (
        mounted(root, "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs"),
        open_store(root) as store,
    ):
        fill(store)
        before = stored_files(root)
        big = key("big")
        for _ in range(3):
            assert not store.put_piece(big, os.urandom(400_000), facts={})
        assert not store.put_program(key("p"), b"{}", pieces=[big], facts={})
        assert store.get_or_build(big, lambda: Built(os.urandom(400_000))).stored is False
        assert store.get_piece(big).miss == "absent"
        assert misses(store) == []
        assert stored_files(root) == before
        assert store.check().ok
        assert not store.check().strays
        assert store.put_piece(big, b"smaller", facts={})
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "no space left on the disk" in warnings[0]


@needs_root
@pytest.mark.parametrize("free", [0, 4, 12, 24, 36, 48])
def test_a_disk_full_from_the_start_serves_uncached_until_there_is_room(
    tmp_path: Path, free: int
) -> None:
    root = tmp_path / "small"
    with mounted(root, "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs"):
        (root / "filler").write_bytes(b"x" * (256 - free) * 1024)
        with open_store(root) as store:
            for name in ("a", "b"):
                assert not store.put_piece(key(name), os.urandom(50_000), facts={})
                assert store.get_piece(key(name)).miss == "absent"
        (root / "filler").unlink()
        with open_store(root) as store:
            assert store.put_piece(key("a"), b"x" * 5000, facts={})
            assert store.check().ok
            assert not store.check().quarantined


def test_no_space_for_a_value_file_leaves_no_part_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = stored_files(root)
    with open_store(root) as store:
        monkeypatch.setattr(os, "fsync", full)
        assert not store.put_piece(PIECE, b"new" * 1000, facts={})
        monkeypatch.undo()
        assert stored_files(root) == before
        assert store.get_piece(PIECE).value == PIECES[PIECE]
    assert "no space left on the disk" in caplog.text


def test_what_cannot_be_read_back_is_not_stored(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.fsync

    def lose_it(fd: int) -> None:
        real(fd)
        os.ftruncate(fd, 10)

    with open_store(root) as store:
        monkeypatch.setattr(os, "fsync", lose_it)
        assert not store.put_piece(key("new"), b"new" * 1000, facts={})
        monkeypatch.undo()
        assert store.get_piece(key("new")).miss == "absent"
    assert "read back after writing" in caplog.text


# ---- read-only roots -----------------------------------------------------------------------------


def expect_read_only(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode in (CacheMode.READWRITE, CacheMode.READ):
        with open_store(root, mode) as store:
            assert misses(store) == []
            assert not store.put_piece(key("new"), b"x", facts={})
            assert store.get_piece(key("new")).miss == "absent"
            assert store.get_or_build(key("new"), lambda: Built(b"x")).value == b"x"
            assert store.check().ok
            assert len(store.ls()) == len(PROGRAMS)
            assert not store.compiler_dirs().triton.is_relative_to(root)
    said = [r.getMessage() for r in caplog.records if "nothing is stored" in r.getMessage()]
    assert len(said) == 1


@needs_root
def test_a_read_only_mount_serves_hits_and_says_once_that_nothing_is_stored(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "mounted"
    with mounted(place, "--bind", "-o", "ro", str(root)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        assert os.statvfs(place).f_flag & os.ST_RDONLY
        expect_read_only(place, caplog)


@needs_root
def test_a_root_owned_by_root_serves_hits_to_another_user_once_it_is_readable(
    pristine: Path,
) -> None:
    """As baked into an image: filled by root, used by any uid."""

    def look() -> str:
        with open_store(place) as store:
            assert not store.writable
            assert not store.put_piece(key("new"), b"x", facts={})
            return f"{len(misses(store))} misses, {store.why_not_writable()}"

    with shared_folder() as folder:
        place = Path(shutil.copytree(pristine, folder / "root"))
        text = as_user(12345, look)
        assert text.startswith("6 misses")
        assert "Permission denied" in text
        subprocess.run(["chmod", "-R", "go+rX", str(place)], check=True)
        assert as_user(12345, look).startswith("0 misses")


@needs_root
def test_a_journal_of_a_killed_writer_does_not_hide_the_entries_of_a_read_only_root(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hot_journal(root)
    place = tmp_path / "mounted"
    with mounted(place, "--bind", "-o", "ro", str(root)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        with open_store(place) as store:
            assert misses(store) == []


@pytest.mark.parametrize("mode", [CacheMode.READWRITE, CacheMode.READ])
def test_a_journal_of_a_killed_writer_is_rolled_back_or_passed_over(
    root: Path, mode: CacheMode
) -> None:
    hot_journal(root)
    with open_store(root, mode) as store:
        assert misses(store) == []


def hot_journal(root: Path) -> None:
    """Kill a writer inside a transaction that has reached the disk."""
    code = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA cache_size=1'); c.execute('BEGIN IMMEDIATE')\n"
        "c.execute('CREATE TABLE junk (x)')\n"
        "for _ in range(200): c.execute('INSERT INTO junk VALUES (zeroblob(1000))')\n"
        "os.kill(os.getpid(), 9)"
    )
    database = root / "store" / "db" / "cache.db"
    subprocess.run([sys.executable, "-c", code, str(database)])
    journal = database.with_name("cache.db-journal")
    assert journal.stat().st_size > 0


# ---- what lies there -----------------------------------------------------------------------------


def test_all_that_is_stored_is_ours_alone_to_read(root: Path) -> None:
    previous = os.umask(0o002)
    try:
        with open_store(root.with_name("new")) as store:
            fill(store)
            store.compiler_dirs()
    finally:
        os.umask(previous)
    for path in (root.with_name("new") / "store").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_facts_lie_beside_the_entry_as_readable_json(root: Path) -> None:
    raw = value_file(root, PIECE).read_bytes()
    assert f'"of": "{PIECE}"'.encode() in raw
    assert raw.startswith(envelope.MAGIC)
