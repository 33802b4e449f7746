"""Modes, descriptors and sizes: which captured graph serves which batch.

In: the requested mode, what the program's boundaries support, and the entries that exist. Out: a
`Dispatch` per batch. Knows nothing of how entries are captured or replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pcgsvc.capture.plan import BatchDescriptor, EntryKey
from pcgsvc.config import Mode
from pcgsvc.forward.specs import InputSpec, SizePredicate
from pcgsvc.ops.modes import NEAR_ROWS, NONE, Resolution, fewest_rows
from pcgsvc.program.model import IDENTITY, LAYOUT


def unlike_traced(
    depends_on: frozenset[str], specs: Sequence[InputSpec], values: Sequence[torch.Tensor]
) -> str | None:
    """Return why the traced forward does not stand for a call of these inputs, or None.

    `depends_on`: on what of its inputs besides their values the forward depends.
    """
    if IDENTITY in depends_on and len({id(v) for v in values}) < len(values):
        return (
            "one tensor is passed twice, and the forward depends on that; run by the module itself"
        )
    pairs = zip(specs, values, strict=True) if LAYOUT in depends_on else ()
    others = [spec.name for spec, value in pairs if not spec.is_laid_out(value)]
    if not others:
        return None
    return (
        f"{', '.join(others)}: the memory layout is not the example's, and the forward depends on "
        "it; run by the module itself"
    )


_ANY_SIZE = SizePredicate(())


@dataclass(frozen=True)
class Dispatch:
    """What a batch would run."""

    mode: Mode
    """`full`, `piecewise` or `none`."""
    descriptor: BatchDescriptor
    """The entry, or for `none` the batch as it is."""
    reason: str
    """Why this and not another."""


class DispatchTable:
    """Finds the entry of a batch. Made from the entries that exist, not from those asked for."""

    def __init__(
        self,
        resolution: Resolution,
        entries: Iterable[EntryKey],
        *,
        uniform_query_len: int,
        max_padding: int,
        max_reqs: int,
        skipped: dict[int, str],
        predicate: SizePredicate = _ANY_SIZE,
        for_all: SizePredicate = _ANY_SIZE,
    ) -> None:
        self._resolution = resolution
        self._predicate, self._for_all = predicate, for_all
        self._query_len, self._max_padding = uniform_query_len, max_padding
        self._max_reqs = max_reqs
        self._skipped = skipped
        keys = list(entries)
        self._sizes = {key[1].num_tokens for key in keys}
        self._uniform = self._ladder(k for k in keys if k[1].uniform)
        self._general = self._ladder(k for k in keys if not k[1].uniform)

    def _ladder(self, keys: Iterable[EntryKey]) -> list[EntryKey | None]:
        """Return by row count the next entry that is large enough (index 0 is unused).

        None for row counts that the traced graph is not valid for, or that are too far from it.
        """
        found: list[EntryKey | None] = [None]
        for key in sorted(keys, key=lambda k: k[1].num_tokens):
            size = key[1].num_tokens
            fewest = fewest_rows(size, self._max_padding)
            rows = range(len(found), size + 1)
            valid = (n >= fewest and self._predicate.broken_by(n) is None for n in rows)
            found += [key if is_valid else None for is_valid in valid]
        return found

    def is_valid(self, num_tokens: int) -> bool:
        """Whether the program may run a row count without a graph; else the module itself must."""
        return self._for_all.broken_by(num_tokens) is None

    def is_uniform(self, query_lens: Sequence[int]) -> bool:
        """Whether every request has exactly the uniform number of new tokens."""
        return query_lens.count(self._query_len) == len(query_lens)

    def find(self, num_tokens: int, num_reqs: int, uniform: bool) -> EntryKey | None:
        """Return the entry that serves a batch, or None."""
        if num_reqs > self._max_reqs:
            return None
        if uniform and num_tokens < len(self._uniform):
            own = self._uniform[num_tokens]
            if own is not None:
                return own
        if num_tokens < len(self._general):
            return self._general[num_tokens]
        return None

    def plan(self, num_tokens: int, num_reqs: int, uniform: bool) -> Dispatch:
        """Return what a batch would run and why."""
        found = self.find(num_tokens, num_reqs, uniform)
        if found is not None:
            mode, key = found
            padding = key.num_tokens - num_tokens
            reason = f"{'uniform' if key.uniform else 'any'} batch, {padding} padding rows"
            if uniform and not key.uniform and num_tokens < len(self._uniform):
                far = next(k for k in self._uniform[num_tokens:] if k is not None)
                reason += f"; for uniform batches {self._too_far(far[1].num_tokens)}"
            if (broken := self._for_all.broken_by(key.num_tokens)) is not None:
                reason += f"; compiled on its own, since code for all sizes needs {broken}"
            return Dispatch(mode, key, reason)
        batch = BatchDescriptor(num_tokens, num_reqs, uniform)
        return Dispatch(NONE, batch, self.why_none(num_tokens, num_reqs, uniform))

    def why_none(self, num_tokens: int, num_reqs: int, uniform: bool) -> str:
        """Return why no entry serves a batch."""
        reason = self._why_none(num_tokens, num_reqs, uniform)
        broken = self._for_all.broken_by(num_tokens)
        if broken is not None:
            reason += f"; run by the module itself, since the traced graph needs {broken}"
        return reason

    def _why_none(self, num_tokens: int, num_reqs: int, uniform: bool) -> str:
        if not self.wants(uniform):
            return f"mode {self._resolution.resolved.value} captures nothing for such batches"
        if num_reqs > self._max_reqs:
            return f"more requests than attention.max_num_reqs={self._max_reqs}"
        skipped = min((s for s in self._skipped if s >= num_tokens), default=None)
        far = min((s for s in self._sizes if s >= num_tokens), default=None)
        if skipped is not None and (far is None or skipped < far):
            return f"size {skipped} was skipped: {self._skipped[skipped]}"
        if far is None:
            return "above the largest capture size"
        return self._too_far(far)

    def _too_far(self, size: int) -> str:
        limit = f"capture.max_padding={self._max_padding} times the rows"
        return f"the next size, {size}, is more than {limit} and more than {NEAR_ROWS} rows away"

    def wants(self, uniform: bool) -> bool:
        """Whether the mode means to serve such batches with graphs at all."""
        return (self._resolution.decode if uniform else self._resolution.mixed) is not NONE
