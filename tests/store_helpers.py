"""Small stores to damage, and what must hold of whatever comes out of them. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pcgsvc.cache.root import open_data_folder
from pcgsvc.cache.store import Store
from pcgsvc.config import CacheMode


def key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def open_store(root: Path, mode: CacheMode = CacheMode.READWRITE, **settings: Any) -> Store:
    folder = open_data_folder(root, "cache.dir", write=mode is not CacheMode.READ)
    return Store(folder, mode=mode, **settings)


# Two programs that share a piece.
PIECES = {key(f"piece {i}"): random.Random(i).randbytes(300 if i == 0 else 4000) for i in range(4)}
_KEYS = list(PIECES)
PROGRAMS = {
    key("program a"): (b'{"name": "a"}' * 100, _KEYS[:3]),
    key("program b"): (b'{"name": "b"}', _KEYS[2:]),
}


def fill(store: Store) -> None:
    for name, value in PIECES.items():
        assert store.put_piece(name, value, facts={"of": name})
    for name, (manifest, pieces) in PROGRAMS.items():
        assert store.put_program(name, manifest, pieces=pieces, facts={"of": name, "config.x": 1})


def rebuild(store: Store) -> None:
    """Store again what is missing, as the next run does."""
    for name, value in PIECES.items():
        assert store.get_piece(name).hit or store.put_piece(name, value, facts={"of": name})
    for name, (manifest, pieces) in PROGRAMS.items():
        facts = {"of": name, "config.x": 1}
        hit = store.get_program(name).hit
        assert hit or store.put_program(name, manifest, pieces=pieces, facts=facts)


def misses(store: Store) -> list[str]:
    """Look everything up; a hit must be exactly what was stored."""
    found = []
    for name, value in PIECES.items():
        lookup = store.get_piece(name)
        assert lookup.value in (None, value)
        assert lookup.miss is not None or lookup.facts == {"of": name}
        found.append(lookup.miss)
    for name, (manifest, pieces) in PROGRAMS.items():
        lookup = store.get_program(name)
        assert lookup.value in (None, manifest)
        assert lookup.miss is not None or list(lookup.pieces) == pieces
        found.append(lookup.miss)
    return [miss for miss in found if miss is not None]


def stored_files(root: Path) -> list[Path]:
    """Return the entries, what lies beside them, and the index."""
    return [p for name in ("entries", "index") for p in all_files(root / "store" / name)]


def all_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def database(root: Path) -> Path:
    return root / "store" / "index" / "cache.db"


def sql(root: Path, statement: str, *values: object) -> list[Any]:
    """Change the index behind the store's back."""
    with closing(sqlite3.connect(database(root))) as connection, connection:
        return connection.execute(statement, values).fetchall()


def entry_files(root: Path, name: str = "*", kind: str = "*") -> list[Path]:
    """Return the files of one key, or of all."""
    return sorted((root / "store" / "entries").glob(f"{kind}/??/{name}"))


def value_file(root: Path, name: str) -> Path:
    (path,) = entry_files(root, name)
    return path


def as_user(uid: int, work: Callable[[], str]) -> str:
    """Return what `work` returns in a child process of another user; an error as its text."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                text = work()
            except BaseException as error:  # noqa: BLE001 - the parent judges it
                text = repr(error)
            os.write(send, text.encode())
        os._exit(0)
    os.close(send)
    with open(receive) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder that other users may enter; pytest's own are 0700 above."""
    with tempfile.TemporaryDirectory(prefix="pcgsvc-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def expect_rebuilt(root: Path) -> None:
    """A later run stores again what is missing, and the store is sound then."""
    with open_store(root) as store:
        rebuild(store)
    with open_store(root) as store:
        assert misses(store) == []
        store.check(fix=True)
        assert misses(store) == []
        assert store.check().problems == []


def flip_payload(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def hot_journal(root: Path, statement: str = "SELECT 1") -> None:
    """Kill a writer inside a transaction that has reached the disk."""
    code = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA cache_size=1'); c.execute('BEGIN IMMEDIATE')\n"
        "c.execute(sys.argv[2]); c.execute('CREATE TABLE junk (x)')\n"
        "for _ in range(200): c.execute('INSERT INTO junk VALUES (zeroblob(1000))')\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(database(root)), statement])
    journal = database(root).with_name("cache.db-journal")
    assert journal.stat().st_size > 0


def damage_entry(path: Path) -> None:
    """Flip a byte in the middle of an entry's envelope."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
