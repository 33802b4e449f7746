"""Batches of one runner, each checked by what it differs in from the one before.

In: batches, as callers keep and change them, in place too. Out: what `check_batch` gives for them,
or what it raises. Only content counts: it is compared with copies of the last batch's.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from pcgsvc.forward.batch import (
    Batch,
    CacheGeometry,
    CheckedBatch,
    Ints,
    check_batch,
    check_distinct,
    host_ints,
    refuse_lost_context,
)
from pcgsvc.ops.attention import NULL_BLOCK

_FEW = 32
"""Most requests of one token each whose slots are looked up one by one, which then is faster."""


class _Given(NamedTuple):
    """Block tables as they were passed, and what they allow."""

    content: bytes
    shape: tuple[int, ...]
    reach: list[int]
    """Tokens that each request's leading blocks hold, as far as they are the caller's."""


class BatchChecker:
    """Checks the batches of one runner; used under its lock.

    A batch of the query lengths of the one before is checked here, and accepted or left to
    `check_batch`, which all other batches go through; so does whatever is refused.

    Args:
        cache: where the runner's KV cache may be written; None for models without attention.
    """

    def __init__(self, cache: CacheGeometry | None) -> None:
        self._cache = cache
        self._last: CheckedBatch | None = None
        """The last batch that was accepted, unless its slots were given."""
        self._tables: _Given | None = None
        """Its block tables; None without."""

    def check(self, batch: Batch, num_tokens: int) -> CheckedBatch:
        """Check a batch against the rows of a call's inputs and the KV cache; touches no buffer.

        Returns:
            The very object of the call before, if nothing differs.

        Raises:
            BatchError: naming the field, what was got and what fits.
        """
        last = self._last
        if last is not None and last.num_tokens == num_tokens and type(batch) is Batch:
            seq_lens = _seq_lens(batch, last)
            if seq_lens is not None:
                found = self._next(last, batch, seq_lens)
                if found is not None:
                    self._last = found
                    return found
        checked = check_batch(batch, num_tokens, self._cache)
        if batch.block_tables is None:
            refuse_lost_context(checked)
        self._last, self._tables = None if batch.slot_mapping is not None else checked, None
        if self._cache is not None and batch.block_tables is not None:
            tables = host_ints("block_tables", batch.block_tables, 2)
            self._tables = _as_given(tables, tables.tobytes(), self._cache)
        return checked

    def _next(self, last: CheckedBatch, batch: Batch, seq_lens: list[int]) -> CheckedBatch | None:
        """Return a batch of the last one's query lengths, checked; None: `check_batch` must."""
        cache, before, is_same = self._cache, self._tables, seq_lens == last.seq_lens
        if cache is None or batch.block_tables is None:
            return _with_extras(last, batch) if is_same and before is None else None
        if max(seq_lens) > cache.max_model_len:
            return None
        tables = host_ints("block_tables", batch.block_tables, 2)
        content = tables.tobytes()
        kept = before is not None and before.shape == tables.shape and before.content == content
        if kept and is_same:
            return _with_extras(last, batch)
        given = before if before is not None and kept else _as_given(tables, content, cache)
        if len(given.reach) != len(seq_lens) or any(map(operator.gt, seq_lens, given.reach)):
            return None
        size = cache.block_size
        if last.num_tokens == len(seq_lens) <= _FEW:
            ends = [n - 1 for n in seq_lens]
            found = [tables.item(at, n // size) * size + n % size for at, n in enumerate(ends)]
            positions, slots = np.array(ends), np.array(found)
        else:
            moved = np.asarray(seq_lens) - np.asarray(last.seq_lens)
            positions = last.positions + moved[last.owners]
            slots = tables[last.owners, positions // size] * size + positions % size
        check_distinct(slots, cache)
        needed = [-(-n // size) for n in seq_lens]
        if not kept or needed != [-(-n // size) for n in last.seq_lens]:
            used = np.arange(tables.shape[1]) < np.asarray(needed)[:, None]
            tables = np.where(used, tables, NULL_BLOCK)
        elif last.block_tables is not None:
            tables = last.block_tables
        self._tables = given
        return CheckedBatch(
            query_lens=last.query_lens,
            seq_lens=seq_lens,
            num_tokens=last.num_tokens,
            owners=last.owners,
            positions=positions,
            block_tables=tables,
            slot_mapping=slots,
            extras=batch.extras,
        )


def _seq_lens(batch: Batch, last: CheckedBatch) -> list[int] | None:
    """Return a copy of a batch's sequence lengths if they fit and its requests are the last's."""
    if batch.slot_mapping is not None or _as_list(batch.query_lens) != last.query_lens:
        return None
    if batch.seq_lens is None:
        return last.query_lens
    found = _as_list(batch.seq_lens)
    if found is None or len(found) != len(last.query_lens):
        return None
    return None if any(map(operator.lt, found, last.query_lens)) else found


def _as_list(given: Any) -> list[int] | None:
    """Return a copy of given lengths, or None where `check_batch` must say what they are."""
    if (
        isinstance(given, (np.ndarray, torch.Tensor))
        and getattr(given, "is_meta", None) is not True
    ):
        given = given.tolist()
    return given.copy() if type(given) is list and set(map(type, given)) == {int} else None


def _as_given(tables: Ints, content: bytes, cache: CacheGeometry) -> _Given:
    bad = (tables < cache.first_free_block) | (tables >= cache.num_blocks)
    good = np.where(bad.any(1), bad.argmax(1), tables.shape[1])
    return _Given(content, tables.shape, (good * cache.block_size).tolist())


def _with_extras(last: CheckedBatch, batch: Batch) -> CheckedBatch:
    """Return the last batch, with another one's extras where they are others."""
    if batch.extras is last.extras or not (batch.extras or last.extras):
        return last
    return replace(last, extras=batch.extras)
