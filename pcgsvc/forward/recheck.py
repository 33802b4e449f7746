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

_FORM_VERSION = 2
"""Of `marshal`: the last one that writes equal bytes for equal values, whoever else holds them. An
int of 32 bits is `i` and four bytes, lowest first; a list or tuple `[` or `(`, then its length."""

_ONE = np.ones((), np.int64)
"""Added to an array in half the time of a Python int."""


class _Tables(NamedTuple):
    """Block tables as they were passed, and what they allow."""

    form: Any
    """What was passed: lists as bytes, else (shape, dtype, all values as bytes)."""
    blocks: Ints
    """A copy of it."""
    rows: list[list[int]] | None
    """Lists as they were passed; None for other things."""
    reach: list[int]
    """Tokens that each request's leading blocks hold, as far as they are the caller's."""


class _Decode:
    """Requests of one new token each, and what their next step is.

    Lengths are compared as bytes. In these a tuple of ints has as many for each, lowest first: when
    each int grows by one, then the bytes, as one number, grow by what is the same at every step.
    """

    def __init__(self, batch: CheckedBatch, cache: CacheGeometry) -> None:
        lens, count = batch.seq_lens, len(batch.seq_lens)
        self.batch = batch
        """The last step."""
        self._block_size = cache.block_size
        self._left = cache.max_model_len - max(lens)
        """Steps until a request is as long as one may be."""
        self._one_each = marshal.dumps(batch.query_lens, _FORM_VERSION)
        self._lens, self._growth = _number(lens), _number((2,) * count) - _number((1,) * count)
        self._rows = np.array((batch.positions, batch.slot_mapping), np.int64)
        """Position and slot of each row."""
        self._starts: dict[int, list[int]] = {}
        """Requests that begin a block, by the steps left then, modulo the block size."""
        for request, length in enumerate(lens):
            self._starts.setdefault((self._left + length) % cache.block_size, []).append(request)

    def step(
        self, seq_lens: tuple[Any, ...], batch: Batch, tables: _Tables, *, kept: bool
    ) -> CheckedBatch | None:
        """Return a batch of these lengths and tables if it is the next step, checked; else None.

        `kept`: whether the tables are those of the last step.
        """
        last, lens = self.batch, self._lens + self._growth
        form = lens.to_bytes(len(self._one_each), "little")
        if self._left < 1 or marshal.dumps(seq_lens, _FORM_VERSION) != form:
            return None
        if marshal.dumps(_copied(batch.query_lens), _FORM_VERSION) != self._one_each:
            return None
        used = last.block_tables
        assert used is not None, "no attention"
        if not (kept or _begins_with(tables.blocks, used)):
            return None
        rows, starting = self._rows + _ONE, self._starts.get(self._left % self._block_size)
        if starting is not None:
            used, slots = used.copy(), rows[1]
            for request in starting:
                if seq_lens[request] > tables.reach[request]:
                    return None
                column = (seq_lens[request] - 1) // self._block_size
                used[request, column] = block = tables.blocks[request, column]
                slots[request] = block * self._block_size
            if len(set(slots.tolist())) < len(slots):
                return None
            used.setflags(write=False)
        rows.setflags(write=False)
        self._rows, self._lens, self._left = rows, lens, self._left - 1
        self.batch = CheckedBatch(
            last.query_lens,
            seq_lens,
            last.num_tokens,
            last.owners,
            rows[0],
            used,
            rows[1],
            batch.extras,
            last.cache,
            False,
        )
        return self.batch


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
        """The last batch, if it was accepted and its slots were not given."""
        self._tables: _Tables | None = None
        """Its block tables; None without."""
        self._ends: list[int] | None = None
        """The column of each request's last token in them; None: not known."""
        self._decode: _Decode | None = None
        """The last decode; it goes on where the last batch is its."""

    def check(self, batch: Batch, num_tokens: int) -> CheckedBatch:
        """Check a batch against the rows of a call's inputs and the KV cache; touches no buffer.

        Returns:
            The very object of the call before, if nothing differs.

        Raises:
            BatchError: naming the field, what was got and what fits.
        """
        last, self._last, tables = self._last, None, None  # none, should this not come to its end
        if self._cache is not None and isinstance(batch, Batch) and batch.block_tables is not None:
            tables = _read(batch.block_tables, self._tables, self._cache)
        if last is not None and last.num_tokens == num_tokens and type(batch) is Batch:
            found = self._next(last, batch, tables)
            if found is not None:
                self._last = found
                return found
        if tables is not None:  # the caller may write to its own meanwhile
            batch = replace(batch, block_tables=tables.blocks)
        checked = check_batch(batch, num_tokens, self._cache)
        refuse_lost_context(checked)
        self._last = None if batch.slot_mapping is not None else checked
        self._tables, self._ends = tables, None
        return checked

    def _next(self, last: CheckedBatch, batch: Batch, given: _Tables | None) -> CheckedBatch | None:
        """Return a batch of the last one's query lengths, checked; None: `check_batch` must."""
        cache, kept = self._cache, given is self._tables
        if given is not None and last.num_tokens == len(last.query_lens):
            found = self._step(last, batch, given, kept=kept)
            if found is not None:
                self._tables, self._ends = given, None
                return found
        seq_lens = _seq_lens(batch, last)
        if seq_lens is None:
            return None
        if cache is None or given is None:
            is_same = kept and seq_lens == last.seq_lens and batch.block_tables is None
            return _with_extras(last, batch) if is_same else None
        if kept and seq_lens == last.seq_lens:
            return _with_extras(last, batch)
        if len(given.reach) != len(seq_lens) or any(map(operator.gt, seq_lens, given.reach)):
            return None
        size, tables = cache.block_size, given.blocks
        ends = [(n - 1) // size for n in seq_lens]
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

    def _step(
        self, last: CheckedBatch, batch: Batch, tables: _Tables, *, kept: bool
    ) -> CheckedBatch | None:
        """Return a batch that is the next step of a decode, checked; None: it may be another."""
        lens, decode, cache = _copied(batch.seq_lens), self._decode, self._cache
        if not lens or type(lens[0]) is not int or lens[0] != last.seq_lens[0] + 1:
            return None
        if batch.slot_mapping is not None or cache is None or last.is_scratch:
            return None
        if decode is None or decode.batch is not last:
            decode = self._decode = _Decode(last, cache)
        try:
            return decode.step(lens, batch, tables, kept=kept)
        except ValueError:  # lengths that are no numbers have no bytes
            return None


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
    found = _copied(given)
    return found if found is not None and set(map(type, found)) == {int} else None


def _copied(given: Any) -> tuple[Any, ...] | None:
    """Return what a list, an array or a tensor holds; None for anything else."""
    if type(given) in (np.ndarray, torch.Tensor):
        try:
            given = given.tolist()
        except RuntimeError:  # meta, sparse, quantized
            return None
    return tuple(given) if type(given) is list else None


def _read(given: Any, before: _Tables | None, cache: CacheGeometry) -> _Tables | None:
    """Return a copy of block tables, the one before if they are the same; None: they are none."""
    form: Any
    blocks: Ints | None = None
    rows: list[list[int]] | None = None
    try:
        if type(given) is list:
            form = marshal.dumps(given, _FORM_VERSION)
            if before is not None and form == before.form:
                return before
            rows = _plain_rows(form)
            blocks = _with_changed_rows(rows, before)
            if blocks is None:
                blocks = host_ints("block_tables", rows, 2)
        elif type(given) is np.ndarray:
            form = given.shape, given.dtype, given.tobytes()
            if before is not None and form == before.form:
                return before
            own = np.frombuffer(form[2], given.dtype).reshape(given.shape)
            blocks = host_ints("block_tables", own, 2)
    except (ValueError, OverflowError):  # no plain numbers; a `BatchError` may be one
        blocks = rows = None
    if blocks is None:
        try:
            blocks = host_ints("block_tables", given, 2).copy()
        except BatchError:
            return None
        form = blocks.shape, blocks.dtype, blocks.tobytes()
        if before is not None and form == before.form:
            return before
    bad = np.ones((len(blocks), blocks.shape[1] + 1), np.bool_)  # one more column, nobody's
    bad[:, :-1] = (blocks < cache.first_free_block) | (blocks >= cache.num_blocks)
    reach = np.minimum(bad.argmax(1) * cache.block_size, cache.max_model_len).tolist()
    return _Tables(form, blocks, rows, reach)


def _begins_with(blocks: Ints, used: Ints) -> bool:
    """Whether tables have what is used of others in the same places."""
    if blocks.shape != used.shape:
        return False
    return np.where(used == NULL_BLOCK, NULL_BLOCK, blocks).tobytes() == used.tobytes()


def _with_changed_rows(rows: list[list[int]], before: _Tables | None) -> Ints | None:
    """Return the blocks before with the rows that differ, where no more than that is other."""
    if before is None or before.rows is None:
        return None
    if before.blocks.shape != (len(rows), max(map(len, rows), default=0)):
        return None
    blocks = before.blocks.copy()
    for at, (old, new) in enumerate(zip(before.rows, rows, strict=True)):
        if old != new:
            blocks[at, : len(new)] = new
            blocks[at, len(new) :] = NULL_BLOCK
    return blocks


def _plain_rows(form: bytes) -> list[list[int]]:
    """Return lists of whole numbers, or of such lists, from their bytes; ValueError: they are none.

    Each list's head and each number of 32 bits is five bytes, of which the first says what it is;
    so whatever comes first that is neither would be seen.
    """
    rows, kinds = marshal.loads(form), form[::5]
    if set(map(type, rows)) != {list} or kinds.count(b"[") + kinds.count(b"i") != len(kinds):
        raise ValueError("no lists of ints")
    found: list[list[int]] = rows
    return found


def _number(lens: tuple[int, ...]) -> int:
    """Return the bytes of lengths as one number."""
    return int.from_bytes(marshal.dumps(lens, _FORM_VERSION), "little")


def _with_extras(last: CheckedBatch, batch: Batch) -> CheckedBatch:
    """Return the last batch, with another one's extras where they are others."""
    if batch.extras is last.extras or not (batch.extras or last.extras):
        return last
    return last._replace(extras=batch.extras)
