"""What goes into the store and what comes out of it, as plain records."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcgsvc.cache.envelope import Entry, Kind


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
