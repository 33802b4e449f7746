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
from pcgsvc.cache.envelope import DamagedError, Entry, Kind, decode, encode
from pcgsvc.cache.quarantine import Quarantine

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
