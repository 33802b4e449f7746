"""A piece with its compiler's files as one run of bytes: round trips, and what is refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from pcgsvc.compilers import blob
from pcgsvc.errors import CompileError

FILES = {"ab/kernel.so": b"\x00\x01" * 50, "ab/kernel.cpp": b"int x;", "triton/k/k.cubin": b""}


def filled(folder: Path) -> Path:
    for path, content in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def raw(header: Any, rest: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + rest


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("artifact", [b"", b"artifact", bytes(range(256)) * 40])
def test_what_is_packed_comes_out_in_another_folder(tmp_path: Path, artifact: bytes) -> None:
    source = filled(tmp_path / "a")
    data = blob.pack(artifact, source, blob.snapshot(source))
    (tmp_path / "b").mkdir()
    assert blob.unpack(data, tmp_path / "b") == artifact
    assert contents(tmp_path / "b") == FILES
    assert (tmp_path / "b/ab/kernel.so").stat().st_mode & 0o777 == 0o700


def test_equal_files_in_any_order_give_equal_bytes(tmp_path: Path) -> None:
    source = filled(tmp_path)
    files = sorted(FILES)
    assert blob.pack(b"x", source, files) == blob.pack(b"x", source, reversed(files))


def test_a_snapshot_leaves_out_locks_and_the_compilers_own_caches(tmp_path: Path) -> None:
    filled(tmp_path)
    for path in ("locks/x", "ab/x.lock", "fxgraph/a/b", "aotautograd/c/d"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    assert blob.snapshot(tmp_path) == set(FILES)


def test_a_file_that_is_there_stays_and_one_that_differs_is_replaced(tmp_path: Path) -> None:
    source = filled(tmp_path / "a")
    data = blob.pack(b"x", source, FILES)
    target = filled(tmp_path / "b")
    (target / "ab/kernel.cpp").write_bytes(b"other")
    before = (target / "ab/kernel.so").stat()
    blob.unpack(data, target)
    assert contents(target) == FILES
    after = (target / "ab/kernel.so").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../../x", "/etc/x", "..", ".", "", "a/..", "//x", "a\0b"],
)
def test_a_path_that_leaves_the_folder_is_refused_before_anything_is_written(
    tmp_path: Path, path: str
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    data = raw({"artifact": 1, "files": [["good", 1], [path, 1]]}, b"aGB")
    with pytest.raises(CompileError, match="leaves its folder"):
        blob.unpack(data, folder)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 2**63),
        raw(b"{}"),
        raw(b"[]"),
        raw(b"3"),
        raw(b"null"),
        raw(b"{"),
        raw(b"\xff\xfe"),
        raw({"artifact": 1}),
        raw({"artifact": 1, "files": 3}),
        raw({"artifact": 1, "files": [3]}),
        raw({"artifact": 1, "files": [["a"]]}, b"x"),
        raw({"artifact": "x", "files": []}),
        raw({"artifact": None, "files": []}),
        raw({"artifact": 5, "files": []}, b"x"),
        raw({"artifact": 1, "files": []}, b"xy"),
        raw({"artifact": -1, "files": [["a", 3]]}, b"xy"),
        raw({"artifact": 3, "files": [["a", -1]]}, b"xy"),
        raw({"artifact": 1, "files": [["a", 1]]}, b"xy", length=3),
    ],
)
def test_malformed_bytes_are_refused_and_write_nothing(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CompileError, match="stored piece"):
        blob.unpack(data, tmp_path)
    assert contents(tmp_path) == {}


def test_every_truncation_and_extension_is_refused(tmp_path: Path) -> None:
    source = filled(tmp_path / "a")
    data = blob.pack(b"artifact", source, FILES)
    (tmp_path / "b").mkdir()
    for length in range(len(data)):
        with pytest.raises(CompileError):
            blob.unpack(data[:length], tmp_path / "b")
    with pytest.raises(CompileError):
        blob.unpack(data + b"x", tmp_path / "b")
    assert contents(tmp_path / "b") == {}


def test_flipped_bytes_never_escape_the_folder_and_raise_nothing_else(tmp_path: Path) -> None:
    source = filled(tmp_path / "a")
    data = blob.pack(b"artifact", source, FILES)
    rng = random.Random(0)
    for turn in range(300):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        folder = tmp_path / "deep" / str(turn)
        folder.mkdir(parents=True)
        try:
            blob.unpack(bytes(broken), folder)
        except CompileError:
            continue
    outside = {p.parts[0] for p in map(Path, contents(tmp_path / "deep"))}
    assert outside <= {str(turn) for turn in range(300)}
    assert set(contents(tmp_path)) - {f"a/{f}" for f in FILES} == {
        f"deep/{f}" for f in contents(tmp_path / "deep")
    }


@pytest.mark.parametrize("files", [[["a", 1], ["a/b", 1]], [["x" * 300, 1], ["b", 1]]])
def test_paths_that_cannot_be_written_are_an_error_of_ours(tmp_path: Path, files: Any) -> None:
    with pytest.raises(CompileError, match="cannot be written"):
        blob.unpack(raw({"artifact": 0, "files": files}, b"xy"), tmp_path)
