"""Damaged entries: a miss with a named cause, put aside, built again; never a wrong result."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_helpers import (
    PIECES,
    PROGRAMS,
    expect_rebuilt,
    fill,
    flip_payload,
    key,
    misses,
    open_store,
    sql,
    stored_files,
    value_file,
)

from pcgsvc.cache import envelope
from pcgsvc.cache.envelope import NUM_PREFIX_BYTES, DamagedError, Entry, Kind, decode, encode
from pcgsvc.cache.file_lock import acquire
from pcgsvc.cache.quarantine import Quarantine
from pcgsvc.config import CacheMode

_, PIECE, *_ = PIECES
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
        assert "absent" not in found  # damage is called by its name
        assert len(found) == ("entries" in path.parts)  # and the index holds nothing of its own
        if found:
            assert found[0] in caplog.text
            assert store.check().quarantined
        listed = {info.key: info.facts for info in store.ls()}
        for name in PROGRAMS:
            assert listed.get(name, {"of": name, "config.x": 1}) == {"of": name, "config.x": 1}
        assert len(listed) == len(PROGRAMS) - (path.parent.parent.name == "program")
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
        (folder_in_its_place, "entry unreadable"),
        (fifo_in_its_place, "entry unreadable"),
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


def test_a_deleted_value_file_is_absent_and_check_names_the_program_that_lacks_it(
    root: Path,
) -> None:
    value_file(root, PIECE).unlink()
    with open_store(root) as store:
        (problem,) = store.check().problems
        assert f"pieces missing: {PIECE[:12]}" in problem.cause
        assert misses(store) == ["absent"]
    expect_rebuilt(root)


def test_a_folder_in_the_place_of_an_entry_gives_way_to_a_write(root: Path) -> None:
    folder_in_its_place(value_file(root, PIECE))
    with open_store(root, CacheMode.REFRESH) as store:
        assert store.put_piece(PIECE, b"new", facts={})
        assert store.get_piece(PIECE).value == b"new"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_may_write_to_is_a_miss_until_it_is_written_again(
    root: Path, mode: int
) -> None:
    value_file(root, PIECE).chmod(mode)
    with open_store(root) as store:
        assert "others may write" in (store.get_piece(PIECE).miss or "")
        assert not store.check().quarantined
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
        (tmp_path / "entry").write_bytes(bytes([number]) * 100)
        with acquire(tmp_path / "entry") or pytest.fail("not held") as damaged:
            assert quarantine.move(damaged, f"entry {number}")
    assert [path.read_bytes()[0] for path in quarantine.items()] == [3, 4]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_planted_pickle_is_a_miss_and_never_executed(
    root: Path, tmp_path: Path, in_file: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trap = tmp_path / "executed"
    bomb = pickle.dumps(Trap(str(trap)))
    if in_file:
        value_file(root, PIECE).write_bytes(bomb)
    else:
        sql(root, "UPDATE Cache SET mode = 4, value = ? WHERE key = ?", bomb, PROGRAM)
    with open_store(root) as store:
        assert not store.check().ok
        miss = store.get_piece(PIECE).miss
        assert miss == (None if not in_file else "foreign bytes: no envelope of pcgsvc")
        assert len(store.ls()) == len(PROGRAMS)
        assert ("row refused: a value of mode pickle" in caplog.text) is not in_file
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
        ("mode", 2, "mode file"),
        ("value", "text", "mode 1"),
        ("value", None, "mode 1"),
        ("filename", "../../../secret", "mode 1"),
        ("key", "foreign", "its key is 'foreign'"),
        ("key", 7, "its key is 7"),
        ("key", key("another program"), "entry of another key"),
        ("value", encode(Entry(kind=Kind.PIECE, key=PROGRAM, payload=b"x")), "another key"),
        ("value", b"bytes", "truncated"),
        ("raw", 0, "empty entry"),
    ],
)
def test_a_row_that_is_none_of_ours_is_refused(
    root: Path, column: str, value: Any, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    sql(root, f"UPDATE Cache SET {column} = ? WHERE key = ?", value, PROGRAM)
    with open_store(root) as store:
        (problem,) = store.check().problems
        assert problem.what == "index"
        assert cause in problem.cause
        assert misses(store) == []
        assert len(store.ls()) == len(PROGRAMS)
        assert store.check().ok
    assert cause in caplog.text
    assert {row for (row,) in sql(root, "SELECT key FROM Cache")} == set(PROGRAMS)
    expect_rebuilt(root)


def test_a_row_that_says_something_else_than_the_entry_is_not_believed(root: Path) -> None:
    with open_store(root) as store:
        seal = value_file(root, PROGRAM).read_bytes()[:NUM_PREFIX_BYTES]
        store.put_program(PROGRAM, b"another", pieces=[], facts={"a": 1})
        stale = Entry(kind=Kind.PROGRAM, key=PROGRAM, payload=seal, facts={"a": 0})
        sql(root, "UPDATE Cache SET value = ? WHERE key = ?", encode(stale), PROGRAM)
        assert {info.key: info.facts for info in store.ls()}[PROGRAM] == {"a": 1}


def test_a_row_that_names_a_file_elsewhere_neither_reads_nor_deletes_it(root: Path) -> None:
    secret = root / "secret"
    secret.write_bytes(encode(Entry(kind=Kind.PROGRAM, key=PROGRAM, payload=b"not ours")))
    sql(root, "UPDATE Cache SET filename = '../../secret', value = NULL, mode = 2")
    with open_store(root) as store:
        assert "row refused" in store.check().problems[0].cause
        assert "not ours" not in str(store.ls())
        store.put_piece(PIECE, PIECES[PIECE], facts={})
        store.clear()
    assert secret.exists()


# ---- what is stored -----------------------------------------------------------------------------


def test_all_that_is_stored_is_ours_alone_to_read(root: Path) -> None:
    previous = os.umask(0o002)
    try:
        with open_store(root.with_name("new")) as store:
            fill(store)
            store.ls()
            store.nearest({})
            with store.lock(PIECE), store.no_eviction():
                assert not store.check().problems
    finally:
        os.umask(previous)
    for path in (root.with_name("new") / "store").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_facts_lie_beside_the_entry_as_readable_json(root: Path) -> None:
    raw = value_file(root, PIECE).read_bytes()
    assert f'"of": "{PIECE}"'.encode() in raw
    assert raw.startswith(envelope.MAGIC)
