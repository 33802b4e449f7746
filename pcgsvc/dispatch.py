"""Modes, descriptors and sizes: which captured graph serves which batch.

In: the requested mode, what the program's boundaries support, and the entries that exist. Out: a
`Dispatch` per batch. Knows nothing of how entries are captured or replayed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pcgsvc.config import Mode
from pcgsvc.ops.support import Support

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL

_HALVES: dict[Mode, tuple[Mode, Mode]] = {
    Mode.NONE: (NONE, NONE),
    Mode.PIECEWISE: (PIECEWISE, PIECEWISE),
    Mode.FULL: (FULL, FULL),
    Mode.FULL_DECODE_ONLY: (FULL, NONE),
    Mode.FULL_AND_PIECEWISE: (FULL, PIECEWISE),
}


@dataclass(frozen=True)
class BatchDescriptor:
    """What a captured entry is for; also the key under which it is found."""

    num_tokens: int
    """Rows of the entry: the padded size."""
    num_reqs: int | None
    """Requests of a uniform entry; None for entries that serve any batch."""
    uniform: bool
    """Captured for batches in which every request has the same number of new tokens."""


@dataclass(frozen=True)
class Dispatch:
    """What a batch would run."""

    mode: Mode
    """`full`, `piecewise` or `none`."""
    descriptor: BatchDescriptor
    """The entry, or for `none` the batch as it is."""
    reason: str
    """Why this and not another."""


@dataclass(kw_only=True)
class Resolution:
    """What became of the requested mode."""

    requested: Mode
    resolved: Mode
    reasons: list[str] = field(default_factory=list)

    @property
    def decode(self) -> Mode:
        """What serves uniform decode batches."""
        return _HALVES[self.resolved][0]

    @property
    def mixed(self) -> Mode:
        """What serves all other batches."""
        return _HALVES[self.resolved][1]


def resolve_mode(
    requested: Mode, support: Support, *, num_boundaries: int, uniform_query_len: int, why: str
) -> Resolution:
    """Turn the requested mode into one that the boundaries can serve.

    Args:
        requested: as configured.
        support: the least support of the program's splitting ops.
        num_boundaries: boundaries found in the graph.
        uniform_query_len: tokens per request in a uniform batch.
        why: which op or backend `support` comes from, for the reasons.
    """
    out = Resolution(requested=requested, resolved=requested)
    if num_boundaries == 0:
        if requested in (PIECEWISE, Mode.FULL_AND_PIECEWISE):
            out.resolved = FULL
            out.reasons.append(
                f"{requested.value} was asked for, but no splitting op was found in the graph: "
                "everything in it can be captured, so it runs as full"
            )
        return out
    if requested in (NONE, PIECEWISE) or support is Support.ALWAYS:
        return out
    level = support
    if support is Support.UNIFORM_SINGLE_TOKEN_DECODE and uniform_query_len > 1:
        level = Support.NEVER
        why += f" and capture.uniform_query_len is {uniform_query_len}, not 1"
    if level is Support.NEVER:
        out.resolved = PIECEWISE
        out.reasons.append(
            f"{requested.value} was asked for, but {why} supports no full graphs (support "
            f"{support.name}): piecewise serves every batch"
        )
    elif requested is FULL:
        out.resolved = Mode.FULL_AND_PIECEWISE
        out.reasons.append(
            f"full was asked for, but {why} supports full graphs for uniform batches only (support "
            f"{support.name}): full serves uniform decode, piecewise the rest"
        )
    return out


def uniform_descriptor(size: int, query_len: int) -> BatchDescriptor:
    """Return the key of the entry for uniform batches of `size` rows."""
    return BatchDescriptor(size, size // query_len, True)


def general_descriptor(size: int) -> BatchDescriptor:
    """Return the key of the entry for any batch of `size` rows."""
    return BatchDescriptor(size, None, False)


def wanted_entries(
    resolution: Resolution, support: Support, sizes: Sequence[int], query_len: int
) -> list[tuple[Mode, BatchDescriptor]]:
    """Return the entries to capture, largest size first.

    A full graph of an op that supports any batch serves uniform ones too; otherwise it is captured
    for uniform batches, whose sizes are multiples of `query_len`.
    """
    wanted: list[tuple[Mode, BatchDescriptor]] = []
    general = resolution.mixed
    for size in sorted(sizes, reverse=True):
        if general is not NONE:
            wanted.append((general, general_descriptor(size)))
        if resolution.decode is FULL and general is not FULL and size % query_len == 0:
            wanted.append((FULL, uniform_descriptor(size, query_len)))
    return wanted


def no_uniform_size(resolution: Resolution, sizes: Sequence[int], query_len: int) -> list[str]:
    """Return what to warn of when uniform batches shall have full graphs and no size is theirs."""
    separate = resolution.decode is FULL and resolution.mixed is not FULL
    if not separate or any(size % query_len == 0 for size in sizes):
        return []
    other = "piecewise serves them" if resolution.mixed is PIECEWISE else "nothing is captured"
    return [
        f"capture.sizes: none of {sorted(sizes)} is a multiple of "
        f"capture.uniform_query_len={query_len}, so no full graph can serve uniform batches: "
        f"{other}. Add sizes such as {query_len} and {2 * query_len}"
    ]


class DispatchTable:
    """Finds the entry of a batch. Made from the entries that exist, not from those asked for."""

    def __init__(
        self,
        resolution: Resolution,
        entries: Iterable[tuple[Mode, BatchDescriptor]],
        *,
        uniform_query_len: int,
        max_reqs: int,
        skipped: dict[int, str],
    ) -> None:
        self._resolution = resolution
        self._query_len = uniform_query_len
        self._max_reqs = max_reqs
        self._skipped = skipped
        keys = list(entries)
        self._uniform = self._ladder(k for k in keys if k[1].uniform)
        self._general = self._ladder(k for k in keys if not k[1].uniform)

    @staticmethod
    def _ladder(keys: Iterable[tuple[Mode, BatchDescriptor]]) -> list[tuple[Mode, BatchDescriptor]]:
        """Return by row count the next entry that is large enough (index 0 is unused)."""
        ordered = sorted(keys, key=lambda k: k[1].num_tokens)
        sizes = [k[1].num_tokens for k in ordered]
        rows = range(sizes[-1] + 1) if sizes else ()
        return [ordered[bisect.bisect_left(sizes, n)] for n in rows]

    def is_uniform(self, query_lens: Sequence[int]) -> bool:
        """Whether every request has exactly the uniform number of new tokens."""
        first = self._query_len
        return all(n == first for n in query_lens)

    def find(
        self, num_tokens: int, num_reqs: int, uniform: bool
    ) -> tuple[Mode, BatchDescriptor] | None:
        """Return the entry that serves a batch, or None."""
        if num_reqs > self._max_reqs:
            return None
        if uniform and num_tokens < len(self._uniform):
            return self._uniform[num_tokens]
        if num_tokens < len(self._general):
            return self._general[num_tokens]
        return None

    def plan(self, num_tokens: int, num_reqs: int, uniform: bool) -> Dispatch:
        """Return what a batch would run and why."""
        found = self.find(num_tokens, num_reqs, uniform)
        if found is not None:
            mode, key = found
            padding = key.num_tokens - num_tokens
            what = "uniform batch" if key.uniform else "any batch"
            return Dispatch(mode, key, f"{what}, {padding} padding rows")
        batch = BatchDescriptor(num_tokens, num_reqs, uniform)
        return Dispatch(NONE, batch, self.why_none(num_tokens, num_reqs, uniform))

    def why_none(self, num_tokens: int, num_reqs: int, uniform: bool) -> str:
        """Return why no entry serves a batch."""
        half = self._resolution.decode if uniform else self._resolution.mixed
        if half is NONE:
            return f"mode {self._resolution.resolved.value} captures nothing for such batches"
        if num_reqs > self._max_reqs:
            return f"more requests than attention.max_num_reqs={self._max_reqs}"
        if self._skipped and max(self._skipped) >= num_tokens:
            size = min(s for s in self._skipped if s >= num_tokens)
            return f"size {size} was skipped: {self._skipped[size]}"
        return "above the largest capture size"

    def wants(self, uniform: bool) -> bool:
        """Whether the mode means to serve such batches with graphs at all."""
        return (self._resolution.decode if uniform else self._resolution.mixed) is not NONE
