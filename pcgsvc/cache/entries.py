"""Entries as files that prove themselves: one envelope each, in use or free to go.

In: entries. Out: the same entries, or a `MissError` that names its cause, after a damaged file was
put aside. Knows nothing of modes, of budgets, or of what an entry means.

The file of an entry is `entries/<kind>/<first two digits of the key>/<key>`. It is written beside
its place, synced, read back and renamed, so that every process sees the old entry, the new one or
none. Reading one needs nothing else, and works in the same way on read-only media.

A process that uses an entry, or is writing one, holds a shared flock on the file itself; what can
be locked exclusively is free to be dropped, and a killed process holds nothing. Beside an entry,
under another name, is what is being written, and what was replaced while it was in use. The last
use of an entry is the modification time of its file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from pcgsvc.cache.envelope import (
    NUM_PREFIX_BYTES,
    AbsentError,
    DamagedError,
    Entry,
    Kind,
    MissError,
    UnavailableError,
    check_key,
    decode,
)
from pcgsvc.cache.file_lock import Held, acquire
from pcgsvc.cache.quarantine import Quarantine, remove
from pcgsvc.cache.root import ENTRIES_NAME, is_ours_alone

logger = logging.getLogger(__name__)

_WAIT_S = 5.0
"""How long a user waits for a process that drops entries, which takes milliseconds each."""
_PLACE = re.compile(r"(program|piece)/([0-9a-f]{2})/\2[0-9a-f]{62}")
_CLEARED = "entries.old"
_FORMER = ("db", "db.lock", "db.new", "db.old", "pins", "inductor", "triton", "scratch.lock")
"""What a data folder of an earlier format holds."""


class WriteError(Exception):
    """Nothing was changed; `str()` of it is the cause."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the file system says of one entry, unread."""

    kind: Kind
    key: str
    size: int
    """Of the envelope, in bytes."""
    last_use: float
    """Seconds since the epoch."""


class Entries:
    """The entries of one data folder. Safe from any thread.

    Args:
        data: the folder; it need not exist unless `writable`.
        writable: whether damage may be put aside and entries written.
    """

    def __init__(self, data: Path, *, writable: bool) -> None:
        self.data = data
        self.writable = writable
        self.quarantine = Quarantine(data / "quarantine")
        self._folder = data / ENTRIES_NAME
        self._in_use: dict[tuple[Kind, str], Held] = {}
        self._mutex = threading.RLock()
        self._swept = False

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, kind: Kind, key: str, *, use: bool = False, heal: bool = True) -> Entry:
        """Return the entry as it was written.

        Args:
            kind: of the entry.
            key: of the entry.
            use: keep it from being dropped until `close`, and record that it was used now.
            heal: put a damaged file aside, if writable.

        Raises:
            MissError: `AbsentError`, `UnavailableError` or `DamagedError`.
        """
        with self._mutex:
            used = (kind, key) in self._in_use  # if replaced since, the new file is
            while True:
                held = self._open(kind, key)
                try:
                    entry = decode(_contents(held.fd), kind, key)
                    break
                except MissError as miss:
                    stands = held.is_current()
                    if stands and heal and isinstance(miss, DamagedError):
                        stands = self._put_aside(held, miss)
                    self.release(kind, key)
                    if stands:
                        raise
            if use and self.writable:
                with contextlib.suppress(OSError):
                    os.utime(held.fd)
            elif not use and not used:
                self.release(kind, key)
            return entry

    def has(self, kind: Kind, key: str) -> bool:
        """Whether there is a sound entry; see `read`."""
        try:
            self.read(kind, key)
        except MissError:
            return False
        return True

    def seal(self, kind: Kind, key: str) -> bytes | None:
        """Return the first bytes of an entry's file, which hold its digest; None if unreadable."""
        with contextlib.suppress(OSError):
            fd = os.open(self.path(kind, key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return os.pread(fd, NUM_PREFIX_BYTES, 0)
            finally:
                os.close(fd)
        return None

    def scan(self, kind: Kind | None = None) -> list[Record]:
        """Return all entries, or all of a kind, by key."""
        records = []
        for each in Kind if kind is None else [kind]:
            for folder in _items(self._folder / each.value):
                for item in _items(folder.path):
                    if not _PLACE.fullmatch(f"{each.value}/{folder.name}/{item.name}"):
                        continue
                    with contextlib.suppress(OSError):  # dropped meanwhile
                        status = item.stat(follow_symlinks=False)
                        records.append(Record(each, item.name, status.st_size, status.st_mtime))
        return sorted(records, key=lambda record: record.key)

    def strays(self, *, delete: bool) -> list[Path]:
        """Return, and delete if asked to, files that are no entry and that no process uses."""
        files = [Path(folder, name) for folder, _, names in os.walk(self._folder) for name in names]
        strays = []
        for path in files:
            if _PLACE.fullmatch(path.relative_to(self._folder).as_posix()):
                continue
            if _drop_if_free(path, drop=delete):
                strays.append(path)
        return strays

    def path(self, kind: Kind, key: str) -> Path:
        """Return the place of an entry's file."""
        return self._folder / kind.value / check_key(key)[:2] / key

    # ---- in use ----------------------------------------------------------------------------------

    def is_used(self, kind: Kind, key: str) -> bool:
        """Whether this process keeps an entry from being dropped."""
        held = self._in_use.get((kind, key))
        return held is not None and held.is_current()

    def hold(self, kind: Kind, key: str) -> bool:
        """Keep an entry from being dropped until `close` or `release`; False if it is not there."""
        try:
            with self._mutex:
                self._open(kind, key)
        except MissError:
            return False
        return True

    def release(self, kind: Kind, key: str) -> None:
        """Stop using an entry."""
        with self._mutex:
            held = self._in_use.pop((kind, key), None)
            if held is not None:
                replaced = not held.is_current()
                held.release()
                if replaced and self.writable:
                    self._drop_replaced(kind, key)

    def claim(self, kind: Kind, key: str) -> Held | None:
        """Return the right to drop an entry, or None if any process uses it, this one included.

        Release it with `unlink=True` to drop the entry.
        """
        with contextlib.suppress(OSError):
            claim = acquire(self.path(kind, key), create=False)
            if claim is None or self._drop_replaced(kind, key):
                return claim
            claim.release()
        return None

    def close(self) -> None:
        """Stop using all entries; twice is fine."""
        with self._mutex:
            for name in list(self._in_use):
                self.release(*name)

    def _drop_replaced(self, kind: Kind, key: str) -> bool:
        """Delete the former files of an entry; False if a process still uses one, or writes it."""
        return all([_drop_if_free(path) for path in self.path(kind, key).parent.glob(f".{key}.*")])

    def _open(self, kind: Kind, key: str) -> Held:
        """Return an entry's file, opened and in use from now on."""
        if self.is_used(kind, key):
            return self._in_use[kind, key]
        self.release(kind, key)
        path = self.path(kind, key)
        try:
            held = acquire(path, shared=True, timeout_s=_WAIT_S, create=False)
        except OSError as error:
            raise UnavailableError(f"entry unreadable: {error.strerror}") from error
        if held is None and os.path.lexists(path):
            raise UnavailableError("entry unreadable: another process is dropping it")
        if held is None:
            former = (self.data / "db").is_dir()
            raise AbsentError("absent; the cache is of an earlier format" if former else "absent")
        if not is_ours_alone(os.fstat(held.fd)):
            held.release()
            raise UnavailableError(f"entry unreadable: others may write to {path}")
        self._in_use[kind, key] = held
        return held

    def _put_aside(self, held: Held, damage: DamagedError) -> bool:
        """Move a damaged file into the quarantine; False if it has been replaced meanwhile."""
        label = f"{held.path.parent.parent.name} {held.path.name[:12]}"
        outcome = "put aside, it will be built again"
        try:
            if not self.writable:
                outcome = "it is left as it is: not ours to write"
            elif not self.quarantine.move(held, f"{label} {damage}"):
                return False
        except OSError as error:
            outcome = f"it could not be put aside: {error}"
        logger.warning("cache: %s: %s; %s", label, damage, outcome)
        return True

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, kind: Kind, key: str, raw: bytes) -> None:
        """Store an envelope, which is in use from now on.

        Raises:
            WriteError: nothing was changed.
        """
        if not self._swept:
            self._sweep()
        try:
            try:
                held = self._write(kind, key, raw)
            except FileNotFoundError:  # the folder was cleared meanwhile
                held = self._write(kind, key, raw)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cause = "no space left on the disk" if full else error.strerror or str(error)
            raise WriteError(cause) from error
        except DamagedError as damage:
            raise WriteError(f"read back after writing: {damage}") from damage
        with self._mutex:
            self.release(kind, key)
            self._in_use[kind, key] = held
        self._drop_replaced(kind, key)

    def delete(self, kind: Kind, key: str) -> None:
        """Drop an entry, in use or not; a missing one is fine.

        Raises:
            WriteError: it could not be dropped.
        """
        self.release(kind, key)
        try:
            self.path(kind, key).unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(error.strerror or str(error)) from error

    def clear(self) -> None:
        """Delete all entries, those in use and the quarantine included.

        Raises:
            OSError: the folder cannot be changed.
        """
        self.close()
        old = self.data / _CLEARED
        shutil.rmtree(old, ignore_errors=True)  # of a killed process
        if self._folder.exists():
            self._folder.rename(old)  # at once: programs and pieces go together
        self.quarantine.clear()
        self._sweep()

    def _write(self, kind: Kind, key: str, raw: bytes) -> Held:
        path = self.path(kind, key)
        for folder in (self._folder, path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        # Locked from the start, so that no other process takes it for the rest of a killed one.
        temporary = path.with_name(f".{key}.{secrets.token_hex(8)}")
        held = acquire(temporary, shared=True, timeout_s=_WAIT_S)
        if held is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        try:
            left = memoryview(raw)
            while left:
                left = left[os.write(held.fd, left) :]
            os.fsync(held.fd)
            decode(_contents(held.fd), kind, key)
            if path.is_dir():
                with contextlib.suppress(MissError):
                    self.read(kind, key)  # puts it aside: nothing can be renamed onto a folder
            with contextlib.suppress(OSError):  # there is none yet, say
                os.link(path, path.with_name(f".{key}.{secrets.token_hex(8)}"))
            temporary.rename(path)
        except BaseException:
            held.release(unlink=True)
            raise
        held.path = path
        return held

    def _sweep(self) -> None:
        """Delete what killed writers left, and the entries of an earlier format."""
        self._swept = True
        self.strays(delete=True)
        for name in (_CLEARED, *_FORMER):
            remove(self.data / name)


def _drop_if_free(path: Path, *, drop: bool = True) -> bool:
    """Delete a file unless a process holds its lock; return whether none does."""
    with contextlib.suppress(OSError):  # of a link, say: no process has it open
        held = acquire(path, create=False)
        if held is None:
            return not os.path.lexists(path)
        held.release()
    if drop:
        with contextlib.suppress(OSError):
            path.unlink()
    return True


def _items(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except OSError:
        return []


def _contents(fd: int) -> bytes:
    """Return all bytes of an open file, from any position."""
    parts, offset = [], 0
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError("entry unreadable: it is no file")
    try:
        while part := os.pread(fd, max(1, status.st_size - offset), offset):
            parts.append(part)
            offset += len(part)
    except OSError as error:
        raise UnavailableError(f"entry unreadable: {error.strerror}") from error
    return b"".join(parts)
