"""Batches of one runner, each checked by what it differs in from the one before.

In: batches, as callers keep and change them, in place too. Out: what `check_batch` gives for them,
or what it raises. Only content counts: it is compared with copies of the last batch's.
"""

from __future__ import annotations

import marshal
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from pcgsvc.errors import BatchError
from pcgsvc.forward.batch import (
    Batch,
    CacheGeometry,
    CheckedBatch,
    check_batch,
    check_distinct,
    refuse_lost_context,
)
from pcgsvc.forward.host_values import Ints, host_ints
from pcgsvc.ops.attention import NULL_BLOCK

_FEW = 32
"""Most requests of one token each whose slots are looked up one by one, which then is faster."""

_FORM_VERSION = 2
"""Of `marshal`: the last one that writes equal bytes for equal values, whoever else holds them."""


class _Tables(NamedTuple):
    """Block tables as they were passed, and what they allow."""

    form: Any
    """What was passed, as bytes: a list per request, else (shape, dtype, all values)."""
    blocks: Ints
    """A copy of it."""
    rows: list[list[int]]
    """The same once more."""
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
        self._tables: _Tables | None = None
        """Its block tables; None without."""
        self._ends: list[int] | None = None
        """The column of each request's last token in them; None: not known."""

    def check(self, batch: Batch, num_tokens: int) -> CheckedBatch:
        """Check a batch against the rows of a call's inputs and the KV cache; touches no buffer.

        Returns:
            The very object of the call before, if nothing differs.

        Raises:
            BatchError: naming the field, what was got and what fits.
        """
        last, tables = self._last, None
        if last is not None and last.num_tokens == num_tokens and type(batch) is Batch:
            seq_lens = _seq_lens(batch, last)
            if seq_lens is not None:
                found = self._next(last, batch, seq_lens)
                if found is not None:
                    self._last = found
                    return found
        if self._cache is not None and isinstance(batch, Batch) and batch.block_tables is not None:
            tables = _read(batch.block_tables, None, self._cache)
            if tables is not None:  # the caller may write to its own meanwhile
                batch = replace(batch, block_tables=tables.blocks)
        checked = check_batch(batch, num_tokens, self._cache)
        refuse_lost_context(checked)
        self._last = None if batch.slot_mapping is not None else checked
        self._tables, self._ends = tables, None
        return checked

    def _next(
        self, last: CheckedBatch, batch: Batch, seq_lens: tuple[int, ...]
    ) -> CheckedBatch | None:
        """Return a batch of the last one's query lengths, checked; None: `check_batch` must."""
        cache, before, is_same = self._cache, self._tables, seq_lens == last.seq_lens
        if cache is None or batch.block_tables is None:
            return _with_extras(last, batch) if is_same and before is None else None
        given = _read(batch.block_tables, before, cache)
        if given is None:
            return None
        kept = given is before
        if kept and is_same:
            return _with_extras(last, batch)
        if len(given.reach) != len(seq_lens) or any(map(operator.gt, seq_lens, given.reach)):
            return None
        size, tables = cache.block_size, given.blocks
        ends = [(n - 1) // size for n in seq_lens]
        if last.num_tokens == len(seq_lens) <= _FEW:
            last_rows = [n - 1 for n in seq_lens]
            pairs = zip(given.rows, ends, last_rows, strict=True)
            slots = np.array([row[end] * size + n % size for row, end, n in pairs])
            positions = np.array(last_rows)
        else:
            moved = np.asarray(seq_lens) - np.asarray(last.seq_lens)
            positions = last.positions + moved[last.owners]
            slots = tables[last.owners, positions // size] * size + positions % size
        check_distinct(slots, cache)
        if not kept or ends != self._ends or last.block_tables is None:
            used = np.arange(tables.shape[1]) <= np.asarray(ends)[:, None]
            tables = np.where(used, tables, NULL_BLOCK)
            tables.setflags(write=False)
        else:
            tables = last.block_tables
        positions.setflags(write=False)
        slots.setflags(write=False)
        self._tables, self._ends = given, ends
        return CheckedBatch(
            query_lens=last.query_lens,
            seq_lens=seq_lens,
            num_tokens=last.num_tokens,
            owners=last.owners,
            positions=positions,
            block_tables=tables,
            slot_mapping=slots,
            extras=batch.extras,
            cache=cache,
            is_scratch=False,
        )


def _seq_lens(batch: Batch, last: CheckedBatch) -> tuple[int, ...] | None:
    """Return a copy of a batch's sequence lengths if they fit and its requests are the last's."""
    if batch.slot_mapping is not None or _lens(batch.query_lens) != last.query_lens:
        return None
    if batch.seq_lens is None:
        return last.query_lens
    found = _lens(batch.seq_lens)
    if found is None or len(found) != len(last.query_lens):
        return None
    return None if any(map(operator.lt, found, last.query_lens)) else found


def _lens(given: Any) -> tuple[int, ...] | None:
    """Return a copy of given lengths, or None where `check_batch` must say what they are."""
    if type(given) in (np.ndarray, torch.Tensor):
        try:
            given = given.tolist()
        except RuntimeError:  # meta, sparse, quantized
            return None
    return tuple(given) if type(given) is list and set(map(type, given)) == {int} else None


def _read(given: Any, before: _Tables | None, cache: CacheGeometry) -> _Tables | None:
    """Return a copy of block tables, the one before if they are the same; None: they are none."""
    form: Any
    blocks: Ints | None = None
    try:
        if type(given) is list:
            form = [marshal.dumps(row, _FORM_VERSION) for row in given]
            if before is not None and form == before.form:
                return before
            blocks = _with_changed_rows(form, before)
            if blocks is None:
                blocks = host_ints("block_tables", [_numbers(row) for row in form], 2)
        elif type(given) is np.ndarray:
            form = given.shape, given.dtype, given.tobytes()
            if before is not None and form == before.form:
                return before
            own = np.frombuffer(form[2], given.dtype).reshape(given.shape)
            blocks = host_ints("block_tables", own, 2)
    except (ValueError, OverflowError):  # no plain numbers; a `BatchError` may be one
        blocks = None
    if blocks is None:
        try:
            blocks = host_ints("block_tables", given, 2).copy()
        except BatchError:
            return None
        form = blocks.shape, blocks.dtype, blocks.tobytes()
        if before is not None and form == before.form:
            return before
    bad = (blocks < cache.first_free_block) | (blocks >= cache.num_blocks)
    good = np.where(bad.any(1), bad.argmax(1), blocks.shape[1]) * cache.block_size
    reach = np.minimum(good, cache.max_model_len).tolist()
    return _Tables(form, blocks, blocks.tolist(), reach)


def _with_changed_rows(form: list[bytes], before: _Tables | None) -> Ints | None:
    """Return the blocks before with the rows that differ, where no more than that is other."""
    if before is None or type(before.form) is not list or len(before.form) != len(form):
        return None
    if max(map(len, before.form)) != max(map(len, form)):
        return None
    blocks = before.blocks.copy()
    for at, (old, new) in enumerate(zip(before.form, form, strict=True)):
        if old != new:
            row = _numbers(new)
            blocks[at, : len(row)] = row
            blocks[at, len(row) :] = NULL_BLOCK
    return blocks


def _numbers(row: bytes) -> list[int]:
    """Return a row of plain whole numbers; ValueError: it is none."""
    found = marshal.loads(row)
    if type(found) is not list or set(map(type, found)) != {int}:
        raise ValueError("no list of ints")
    return found


def _with_extras(last: CheckedBatch, batch: Batch) -> CheckedBatch:
    """Return the last batch, with another one's extras where they are others."""
    if batch.extras is last.extras or not (batch.extras or last.extras):
        return last
    return last._replace(extras=batch.extras)
