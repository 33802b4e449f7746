"""One file with programs and their pieces, to bake into an image or carry to another machine.

In: a `Store` and a path. Out: the file, or a filled store. Knows only envelopes and digests.

The file is a plain tar: `manifest.json` first, then `pieces/<key>` and `programs/<key>`, each the
envelope as it is stored. The same entries give the same bytes. Digests inside a bundle show that it
is whole, not who made it, and loading what is in it runs code: pin the file's own sha256 when it
comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import secrets
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from pcgsvc.cache.envelope import (
    NAME,
    DamagedError,
    Entry,
    Kind,
    MissError,
    check_key,
    decode,
    encode,
    name_of,
)
from pcgsvc.cache.store import Store
from pcgsvc.errors import CacheError
from pcgsvc.events import count

logger = logging.getLogger(__name__)

FORMAT = "pcgsvc-bundle"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 64 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BundleInfo:
    """What a bundle holds."""

    path: Path
    sha256: str
    """Of the whole file: what an import can be pinned to."""
    num_programs: int
    num_pieces: int
    num_bytes: int
    """Of all envelopes."""


@dataclass(frozen=True, slots=True)
class ImportInfo:
    """What an import did."""

    bundle: BundleInfo
    num_written: int
    """Entries that are new in the store."""
    num_present: int
    """Entries that were there already, and were left as they are."""


@dataclass(frozen=True, slots=True)
class _Member:
    """One line of a manifest."""

    kind: Kind
    key: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """In the tar."""
        return name_of(self.kind, self.key)


# ---- export --------------------------------------------------------------------------------------


def export_bundle(
    store: Store, path: str | Path, *, keys: Iterable[str] | None = None
) -> BundleInfo:
    """Write sound programs with all their pieces to one file, which appears whole or not at all.

    Args:
        store: what is exported.
        path: replaced if it is there.
        keys: of the programs; None: all. Damaged and incomplete ones are left out with a warning,
            unless they were asked for by key.

    Raises:
        CacheError: there is nothing to export, a program asked for is not whole, or the file
            cannot be written.
    """
    path = Path(path)
    members = _members(store, keys)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb+") as file:
            _write(store, file, members)
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.replace(temporary, path)
    except (OSError, MissError) as error:
        raise CacheError(f"cache export: {path} cannot be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    info = _info(path, digest, members)
    counts = f"{info.num_programs} programs, {info.num_pieces} pieces, {info.num_bytes} bytes"
    logger.info("cache: exported %s to %s, sha256 %s", counts, path, digest)
    return info


def _members(store: Store, keys: Iterable[str] | None) -> list[_Member]:
    """Read all that goes in once, and note its digests; pieces first."""
    pieces: dict[str, _Member] = {}
    programs: list[_Member] = []
    wanted = [info.key for info in store.ls()] if keys is None else [check_key(k) for k in keys]
    for key in sorted(set(wanted)):
        try:
            program = store.read(Kind.PROGRAM, key)
            new = {
                piece: _member(store.read(Kind.PIECE, piece))
                for piece in program.pieces
                if piece not in pieces
            }
        except MissError as miss:
            if keys is not None:
                words = f"cache export: program {key[:12]} is not whole: {miss}."
                raise CacheError(words) from miss
            logger.warning("cache: program %s is left out of the bundle: %s", key[:12], miss)
            continue
        pieces |= new
        programs.append(_member(program))
    if not programs:
        raise CacheError("cache export: the store holds no program; run job=compile first.")
    return [pieces[key] for key in sorted(pieces)] + programs


def _member(entry: Entry) -> _Member:
    raw = encode(entry)
    return _Member(entry.kind, entry.key, len(raw), hashlib.sha256(raw).hexdigest())


def _write(store: Store, file: BinaryIO, members: list[_Member]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        _add(archive, MANIFEST, _manifest(members))
        for member in members:
            raw = encode(store.read(member.kind, member.key))
            if hashlib.sha256(raw).hexdigest() != member.sha256:
                words = f"cache export: {member.name} was replaced meanwhile; export again."
                raise CacheError(words)
            _add(archive, member.name, raw)


def _manifest(members: list[_Member]) -> bytes:
    entries = [asdict(member) | {"kind": member.kind.value} for member in members]
    about = {"format": FORMAT, "version": FORMAT_VERSION, "entries": entries}
    return json.dumps(about, indent=1).encode()


def _add(archive: tarfile.TarFile, name: str, raw: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(raw), 0o644  # owner and time stay 0: equal entries, equal bytes
    archive.addfile(info, io.BytesIO(raw))


# ---- import --------------------------------------------------------------------------------------


def import_bundle(
    store: Store, path: str | Path, *, expected_sha256: str | None = None
) -> ImportInfo:
    """Verify a whole bundle, then write what the store does not have yet.

    Args:
        store: must be writable.
        path: of the bundle.
        expected_sha256: of the whole file, hex; None: not pinned.

    Raises:
        CacheError: the file is not the pinned one or not a sound bundle (nothing was written), the
            store cannot be written, or it is too small (what was written is dropped again).
    """
    path = Path(path)
    if reason := store.why_not_writable():
        raise CacheError(f"cache import: nothing can be written: {reason}.")
    try:
        with open(path, "rb") as file:
            digest, members = _verify(file, path)
            if expected_sha256 is not None and digest != expected_sha256.strip().lower():
                raise CacheError(
                    f"cache import: {path} has sha256 {digest}, pinned is {expected_sha256}; "
                    "nothing was written."
                )
            info = _info(path, digest, list(members.values()))
            if info.num_bytes > store.max_bytes:
                raise CacheError(
                    f"cache import: {path} holds {info.num_bytes} bytes, the store's budget is "
                    f"{store.max_bytes}; raise it."
                )
            file.seek(0)
            written = _fill(store, file, path, members)
    except (OSError, tarfile.TarError) as error:
        raise CacheError(
            f"cache.file: {path} cannot be read as a bundle: {error}; action=export writes one."
        ) from error
    present = len(members) - written
    entries = count(written, "entry", "entries")
    logger.info("cache: imported %s from %s, %d already stored", entries, path, present)
    return ImportInfo(info, written, present)


def _verify(file: BinaryIO, path: Path) -> tuple[str, dict[str, _Member]]:
    """Read the whole file once; return its sha256 and its members by name."""
    source = _Hashing(file)
    programs: list[Entry] = []
    members: dict[str, _Member] = {}
    seen: set[str] = set()
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for name, raw in _contents(archive, path):
            if not seen and name == MANIFEST:
                members = _parse_manifest(raw, path)
            elif name not in members:
                raise _refusal(path, f"{name!r} is not in its manifest")
            elif name in seen:
                raise _refusal(path, f"{name!r} is there twice")
            else:
                entry = _checked(members[name], raw, path)
                programs += [entry] if entry.kind is Kind.PROGRAM else []
            seen.add(name)
    if any(list(source.read_rest())):
        raise _refusal(path, "there is more after its end")
    if missing := sorted(members.keys() - seen):
        raise _refusal(path, f"{len(missing)} members are missing, such as {missing[0]!r}")
    needed = {piece for program in programs for piece in program.pieces}
    there = {member.key for member in members.values() if member.kind is Kind.PIECE}
    if needed != there:
        raise _refusal(path, "its pieces are not those that its programs need")
    return source.digest.hexdigest(), members


def _contents(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every member; anything but a plain file of ours is refused."""
    for info in archive:
        if info.type != tarfile.REGTYPE or info.pax_headers or info.issparse():
            raise _refusal(path, f"{info.name!r} is no plain file")
        # Names are compared, never used as paths, so that none can lead out of the store.
        if info.name != MANIFEST and not NAME.fullmatch(info.name):
            raise _refusal(path, f"{info.name!r} is no name of a bundle")
        if info.name == MANIFEST and info.size > _MAX_MANIFEST_BYTES:
            raise _refusal(path, "its manifest is too large")
        file = archive.extractfile(info)
        raw = file.read() if file is not None else b""
        if len(raw) != info.size:
            raise _refusal(path, f"{info.name!r} is truncated")
        yield info.name, raw


def _parse_manifest(raw: bytes, path: Path) -> dict[str, _Member]:
    try:
        about = json.loads(raw)
        if about["format"] != FORMAT or about["version"] != FORMAT_VERSION:
            found = f"it is {about['format']!r} version {about['version']!r}"
            wanted = f"this pcgsvc reads {FORMAT!r} version {FORMAT_VERSION}"
            raise _refusal(path, f"{found}, {wanted}")
        listed = [
            _Member(Kind(e["kind"]), check_key(e["key"]), int(e["size"]), str(e["sha256"]))
            for e in about["entries"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise _refusal(path, f"its manifest is unreadable: {error}") from error
    members = {member.name: member for member in listed}
    if not listed or len(members) != len(listed):
        raise _refusal(path, "its manifest is empty or names an entry twice")
    return members


def _checked(member: _Member, raw: bytes, path: Path) -> Entry:
    """Return the entry in `raw`, which must be the one of the manifest."""
    label = f"{member.kind.value} {member.key[:12]}"
    if len(raw) != member.size or hashlib.sha256(raw).hexdigest() != member.sha256:
        raise _refusal(path, f"{label} does not have the digest of the manifest")
    try:
        return decode(raw, member.kind, member.key)
    except DamagedError as damage:
        raise _refusal(path, f"{label}: {damage}") from damage


def _fill(store: Store, file: BinaryIO, path: Path, members: Mapping[str, _Member]) -> int:
    """Write what is missing, pieces before programs; on failure drop it again."""
    written: list[Entry] = []
    try:
        with store.no_eviction(), tarfile.open(fileobj=file, mode="r|") as archive:
            for name, raw in _contents(archive, path):
                if name == MANIFEST or name not in members:
                    continue
                entry = _checked(members[name], raw, path)  # the file may have changed since
                if store.has(entry.kind, entry.key):
                    continue
                written.append(entry)
                if not store.put(entry, in_use=False):
                    raise CacheError(f"cache import: {path}: the store took no more of it.")
    except BaseException:
        for entry in reversed(written):
            with contextlib.suppress(CacheError):
                store.drop(entry.kind, entry.key)
        raise
    return len(written)


def _info(path: Path, digest: str, members: list[_Member]) -> BundleInfo:
    kinds = [member.kind for member in members]
    return BundleInfo(
        path=path,
        sha256=digest,
        num_programs=kinds.count(Kind.PROGRAM),
        num_pieces=kinds.count(Kind.PIECE),
        num_bytes=sum(member.size for member in members),
    )


def _refusal(path: Path, cause: str) -> CacheError:
    return CacheError(f"cache import: {path} is refused: {cause}; nothing was written.")


class _Hashing(io.RawIOBase):
    """A file that is read once from start to end, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes."""
        data = self._file.read(size)
        self.digest.update(data)
        return data

    def read_rest(self) -> Iterator[bool]:
        """Read on to the end; yields whether each part holds anything but zeros."""
        while data := self.read(_CHUNK):
            yield data.strip(b"\0") != b""
