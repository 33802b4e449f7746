"""A compiled piece with the files that its compiler left, as one run of bytes.

In: an artifact and a folder. Out: bytes, and back into another folder. Knows nothing of what an
artifact is, of keys or of stores.

Layout: length of the header (u64, little-endian), header (JSON: length of the artifact, path and
length of each file), the artifact, the files.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from pcgsvc.errors import CompileError

_LENGTH = struct.Struct("<Q")
_SKIP = ("locks", "aotautograd", "fxgraph")
"""Folders of Inductor's that hold its locks and its own caches; an artifact needs neither."""


def snapshot(folder: Path) -> set[str]:
    """Return the paths of the files below a folder that an artifact may need."""
    paths = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {p.as_posix() for p in paths if not set(p.parts) & set(_SKIP) and p.suffix != ".lock"}


def pack(artifact: bytes, folder: Path, files: Iterable[str]) -> bytes:
    """Return an artifact and files of a folder as one run of bytes."""
    contents = [(path, (folder / path).read_bytes()) for path in sorted(files)]
    header = {"artifact": len(artifact), "files": [[p, len(data)] for p, data in contents]}
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, artifact, *(data for _, data in contents)])


def unpack(data: bytes, folder: Path) -> bytes:
    """Write the files into a folder, where they are not there yet, and return the artifact.

    Raises:
        CompileError: the bytes are not of this layout, or a path leaves the folder.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        at = _LENGTH.size + length
        size = int(header["artifact"])
        artifact = data[at : at + size]
        files = [(str(path), int(size)) for path, size in header["files"]]
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise CompileError(f"stored piece: malformed ({error})") from error
    sizes = [size, *(n for _, n in files)]
    if at + sum(sizes) != len(data) or min(sizes) < 0:
        raise CompileError("stored piece: its length does not fit its header")
    for path, _ in files:
        _check(path)
    at += size
    for path, size in files:
        try:
            _write(folder / path, data[at : at + size])
        except OSError as error:
            raise CompileError(f"stored piece: {path} cannot be written: {error}") from error
        at += size
    return artifact


def _check(path: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise CompileError(f"stored piece: the path {path!r} leaves its folder")


def _write(target: Path, content: bytes) -> None:
    if target.is_file() and target.read_bytes() == content:
        return
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, 0o700)
    os.replace(name, target)
