"""One stored entry as bytes that prove themselves: header, payload, length, digest.

In: an `Entry`. Out: bytes, and back; anything else than what was written raises `DamagedError`,
which names its cause. Beside it are the records that go into a store and come out of it. Knows
nothing of where the bytes are stored.

Layout, little-endian: magic (8 bytes), format version (u32), header length (u32), payload length
(u64), sha256 of all the rest (32 bytes), header (JSON), payload. The header names kind and key, so
that a sound envelope under the wrong key is found out as well.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcgsvc.errors import CacheError

MAGIC = b"PCGSTORE"
FORMAT_VERSION = 1
_PREFIX = struct.Struct("<8sIIQ32s")
NUM_PREFIX_BYTES = _PREFIX.size
"""Length of the first part of an envelope, which holds the digest of all the rest."""
_KEY = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"(program|piece)s/([0-9a-f]{64})")
"""An entry's name outside of a store, in a bundle or a remote; see `name_of`."""


class Kind(enum.Enum):
    """What an entry is: a program's manifest, or a piece that programs share."""

    PROGRAM = "program"
    PIECE = "piece"


class MissError(Exception):
    """Why there is no usable entry; `str()` of it is the cause."""


class AbsentError(MissError):
    """Nothing is stored under the key."""


class DamagedError(MissError):
    """Something is stored, and it is not what was written."""


class UnavailableError(MissError):
    """The file cannot be read just now, or may not be trusted; its content was not looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What is stored under one key."""

    kind: Kind
    key: str
    """Hex sha256 over the facts."""
    payload: bytes
    """Never empty."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the key was made of: JSON types."""
    pieces: tuple[str, ...] = ()
    """Keys of the pieces that a program needs."""
    created: float = 0.0
    """Seconds since the epoch."""


def name_of(kind: Kind, key: str) -> str:
    """Return an entry's name in a bundle or a remote."""
    return f"{kind.value}s/{key}"


def check_key(key: str) -> str:
    """Return `key`.

    Raises:
        CacheError: it is not the hex form of a sha256 (64 lower-case digits).
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise CacheError(f"cache key: got {key!r}; a key is a sha256 as 64 lower-case hex digits.")
    return key


def encode(entry: Entry) -> bytes:
    """Return the envelope of `entry`.

    Raises:
        CacheError: a malformed key, an empty payload, or facts that JSON cannot hold.
    """
    for key in (entry.key, *entry.pieces):
        check_key(key)
    if not entry.payload:
        raise CacheError(f"{entry.kind.value} {entry.key[:12]}: its payload is empty; store bytes.")
    about = {
        "kind": entry.kind.value,
        "key": entry.key,
        "created": entry.created,
        "pieces": list(entry.pieces),
        "facts": dict(entry.facts),
    }
    try:
        header = json.dumps(about, sort_keys=True, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise CacheError(
            f"{entry.kind.value} {entry.key[:12]}: its facts are no JSON ({error}); "
            "use text, numbers, booleans, None, lists and dicts with text keys."
        ) from error
    lengths = (FORMAT_VERSION, len(header), len(entry.payload))
    prefix = _PREFIX.pack(MAGIC, *lengths, _digest(lengths, header, entry.payload))
    return b"".join((prefix, header, entry.payload))


def decode(raw: bytes, kind: Kind, key: str) -> Entry:
    """Return the entry in `raw`, which must be the one of `kind` and `key`.

    Raises:
        DamagedError: named by what is wrong.
    """
    if not raw:
        raise DamagedError("empty entry")
    if len(raw) < _PREFIX.size:
        raise DamagedError(f"truncated: {len(raw)} bytes, the prefix alone has {_PREFIX.size}")
    magic, version, num_header, num_payload, digest = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise DamagedError("foreign bytes: no envelope of pcgsvc")
    if version != FORMAT_VERSION:
        raise DamagedError(f"format version {version}, this pcgsvc reads {FORMAT_VERSION}")
    expected = _PREFIX.size + num_header + num_payload
    if len(raw) != expected:
        word = "truncated" if len(raw) < expected else "too long"
        raise DamagedError(f"{word}: {len(raw)} bytes, the envelope says {expected}")
    view = memoryview(raw)[_PREFIX.size :]
    header, payload = view[:num_header], view[num_header:]
    if _digest((version, num_header, num_payload), header, payload) != digest:
        raise DamagedError("digest mismatch")
    return _entry(bytes(header), bytes(payload), kind, key)


def _entry(header: bytes, payload: bytes, kind: Kind, key: str) -> Entry:
    """Read a header whose digest matched."""
    try:
        about = json.loads(header)
        entry = Entry(
            kind=Kind(about["kind"]),
            key=check_key(about["key"]),
            payload=payload,
            facts=dict(about["facts"]),
            pieces=tuple(check_key(piece) for piece in about["pieces"]),
            created=float(about["created"]),
        )
    except (ValueError, TypeError, KeyError, CacheError) as error:
        raise DamagedError(f"header unreadable: {error}") from error
    if not payload:
        raise DamagedError("empty payload")
    if (entry.kind, entry.key) != (kind, key):
        other = f"{entry.kind.value} {entry.key[:12]}"
        raise DamagedError(f"entry of another key: {other}")
    return entry


def _digest(lengths: tuple[int, int, int], *parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(struct.pack("<8sIIQ", MAGIC, *lengths))
    for part in parts:
        digest.update(part)
    return digest.digest()


# ---- what goes into a store and what comes out of it ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Lookup:
    """What was found under a key, or built for it."""

    value: bytes | None
    miss: str | None = None
    """Why it was not found, in words: `absent`, `digest mismatch`, …"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    pieces: tuple[str, ...] = ()
    """Keys of the pieces that a program needs."""
    stored: bool = True
    """Whether it is in the store now; for what was built."""

    @property
    def hit(self) -> bool:
        """Whether it was found."""
        return self.miss is None

    @property
    def built(self) -> bool:
        """Whether it was built, since it was not found."""
        return self.miss is not None and self.value is not None


@dataclass(frozen=True, slots=True)
class Built:
    """What a builder hands over to be stored."""

    value: bytes
    """Not empty."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the key was made of: JSON types."""
    pieces: Sequence[str] = ()
    """Keys of the pieces that a program needs; stored before it."""

    def entry(self, kind: Kind, key: str) -> Entry:
        """Return what is stored of it, created now."""
        return Entry(
            kind=kind,
            key=key,
            payload=self.value,
            facts=self.facts,
            pieces=tuple(self.pieces),
            created=time.time(),
        )


@dataclass(slots=True)
class Counts:
    """What a store did since it was opened."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    miss_reasons: list[str] = field(default_factory=list)
    """One per miss: `piece 0123456789ab: digest mismatch`."""
