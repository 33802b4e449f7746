"""Batches as callers describe them, and the static buffers that carry them to the device.

In: `Batch`: request lengths, block tables, slots. Out: a `ForwardContext` over static buffers.

Shapes: T = rows with padding, R = most requests, B = KV blocks per request.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from pcgsvc.errors import BatchError
from pcgsvc.forward.host_values import Ints, host_ints, host_lengths
from pcgsvc.forward.staging import Copied, Staging
from pcgsvc.ops.attention import NULL_BLOCK, AttentionBackend
from pcgsvc.ops.context import ForwardContext

_FEW = 16
"""Most lengths that are copied from a tuple faster than they are made of an array."""

_LONGEST = 2**31 - 1
"""Most tokens of a request: the buffers are of int32."""


@dataclass(kw_only=True)
class Batch:
    """The requests whose new tokens are the rows of one call, in row order. Host values."""

    query_lens: Sequence[int]
    """New tokens (rows) of each request, at least 1."""
    seq_lens: Sequence[int] | None = None
    """Length of each request after this call, its new tokens included; None: all are new."""
    block_tables: Any = None
    """KV blocks of each request, [requests, blocks], from those that are the caller's
    (`runner.report["kv_cache"]` says how many scratch blocks come first); None: scratch blocks,
    contents undefined before and after the call, so only whole new requests are possible."""
    slot_mapping: Any = None
    """KV slot (block * block_size + offset) that each row writes; None: derived from the tables."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Anything that the caller's own splitting ops read through the context."""


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """Where a runner's KV cache may be written."""

    block_size: int
    num_blocks: int
    scratch_blocks: int
    """Blocks 1 … scratch_blocks are the runner's own, for calls without block tables."""
    max_model_len: int

    @property
    def first_free_block(self) -> int:
        """First block that callers may use."""
        return 1 + self.scratch_blocks

    @property
    def blocks_per_request(self) -> int:
        """Width of the block tables."""
        return -(-self.max_model_len // self.block_size)


class CheckedBatch(NamedTuple):
    """A batch that has been found to fit; what the buffers are filled from.

    What it holds is its own and cannot be written to, extras aside.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_tokens: int
    owners: Ints
    """Request of each row."""
    positions: Ints
    """Position of each row in its request."""
    block_tables: Ints | None
    slot_mapping: Ints | None
    extras: Mapping[str, Any]
    cache: CacheGeometry | None
    """What it was checked for."""
    is_scratch: bool
    """Whether no block tables were given."""


def check_batch(
    batch: Batch | None,
    num_tokens: int,
    cache: CacheGeometry | None,
    *,
    for_timing: bool = False,
) -> CheckedBatch:
    """Check a batch against the call's rows and the KV cache; touches no buffer.

    Args:
        batch: None means one new request.
        num_tokens: rows of the call's inputs.
        cache: None for models without attention.
        for_timing: results are thrown away, so that requests may share any blocks.

    Raises:
        BatchError: naming the field, what was got and what fits.
    """
    if batch is None:
        batch = Batch(query_lens=[num_tokens])
    if not isinstance(batch, Batch):
        raise BatchError(f"batch: got {type(batch).__name__}, a pcgsvc.Batch is needed.")
    query_lens = host_lengths("query_lens", batch.query_lens)
    if sum(query_lens) != num_tokens:
        raise BatchError(
            f"batch.query_lens: got {query_lens}, {sum(query_lens)} rows in all, but the inputs "
            f"have {num_tokens} rows; they must agree."
        )
    seq_lens = query_lens
    if batch.seq_lens is not None:
        seq_lens = host_lengths("seq_lens", batch.seq_lens)
        if len(seq_lens) != len(query_lens) or any(map(operator.lt, seq_lens, query_lens)):
            raise BatchError(
                f"batch.seq_lens: got {seq_lens} with query_lens {query_lens}; one length per "
                "request is needed, its new tokens included."
            )
    if cache is None and max(seq_lens) > _LONGEST:
        raise BatchError(
            f"batch.seq_lens: got {max(seq_lens)}; lengths are kept in 32 bits, so the longest "
            f"request is {_LONGEST}."
        )
    owners, positions = _rows(query_lens, seq_lens)
    tables = slots = None
    if cache is not None:
        tables = _check_tables(batch, seq_lens, cache, 1 if for_timing else cache.first_free_block)
        slots = _check_slots(batch, num_tokens, cache)
        if slots is None:
            size = cache.block_size
            slots = tables[owners, positions // size] * size + positions % size
        if batch.block_tables is not None and not for_timing:
            check_distinct(slots, cache)
    for array in (owners, positions, tables, slots):
        if array is not None:
            array.setflags(write=False)
    return CheckedBatch(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_tokens=num_tokens,
        owners=owners,
        positions=positions,
        block_tables=tables,
        slot_mapping=slots,
        extras=batch.extras,
        cache=cache,
        is_scratch=batch.block_tables is None,
    )


def refuse_lost_context(batch: CheckedBatch) -> None:
    """Refuse requests with earlier tokens whose blocks the caller did not name.

    Not a part of `check_batch`: verification times and compares such steps over scratch blocks.
    """
    if batch.is_scratch and batch.seq_lens != batch.query_lens and batch.cache is not None:
        raise BatchError(
            f"batch.seq_lens: got {[*batch.seq_lens]} with query_lens {[*batch.query_lens]} and no "
            "block_tables; without them a request is in scratch blocks, which hold nothing of "
            "its earlier tokens. Pass the blocks that they were written to."
        )


def refuse_other_runner(batch: CheckedBatch, cache: CacheGeometry | None) -> None:
    """Refuse a batch that was checked for another KV cache: nothing in it is known to fit."""
    if batch.cache is not cache and batch.cache != cache:
        raise BatchError(
            f"batch: it was checked for {batch.cache}, the runner has {cache}. Pass the Batch "
            "itself, or check it for this runner."
        )


def _check_tables(
    batch: Batch, seq_lens: list[int], cache: CacheGeometry, first_block: int
) -> Ints:
    """Return block tables that cover every request, made up of scratch blocks if none are given."""
    if max(seq_lens) > cache.max_model_len:
        raise BatchError(
            f"batch.seq_lens: got {max(seq_lens)}, the longest sequence is "
            f"attention.max_model_len={cache.max_model_len}."
        )
    if batch.block_tables is None:
        if batch.slot_mapping is not None:
            raise BatchError("batch.slot_mapping: given without block_tables; pass both.")
        return _scratch_tables(seq_lens, cache)
    tables = host_ints("block_tables", batch.block_tables, 2)
    return _check_blocks(tables, seq_lens, cache, first_block)


def _check_slots(batch: Batch, num_tokens: int, cache: CacheGeometry) -> Ints | None:
    if batch.slot_mapping is None:
        return None
    slots = host_ints("slot_mapping", batch.slot_mapping, 1)
    low, high = cache.first_free_block * cache.block_size, cache.num_blocks * cache.block_size
    if len(slots) != num_tokens or slots.min() < low or slots.max() >= high:
        raise BatchError(
            f"batch.slot_mapping: got {len(slots)} slots from {slots.min()} to {slots.max()}; "
            f"{num_tokens} slots from {low} to {high - 1} are needed (block {NULL_BLOCK} is the "
            f"null block, those below {cache.first_free_block} are the runner's own)."
        )
    return slots.copy()


def check_distinct(slots: Ints, cache: CacheGeometry) -> None:
    """Refuse two rows that write one slot: which of them stays would be chance.

    Raises:
        BatchError: naming the first such slot.
    """
    if len(set(slots.tolist())) == len(slots):
        return
    ordered = np.sort(slots)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    block, offset = divmod(int(twice[0]), cache.block_size)
    raise BatchError(
        f"batch: two rows write KV slot {twice[0]} (block {block}, offset {offset}). Requests "
        "may share blocks that they only read; give each its own for the new tokens."
    )


def _check_blocks(
    tables: Ints, seq_lens: list[int], cache: CacheGeometry, first_block: int
) -> Ints:
    """Return the tables with nothing in the columns that no request reaches."""
    needed = [-(-s // cache.block_size) for s in seq_lens]
    if len(tables) != len(seq_lens) or tables.shape[1] < max(needed):
        raise BatchError(
            f"batch.block_tables: got {tables.shape[0]} rows of {tables.shape[1]} blocks; "
            f"{len(seq_lens)} rows of at least {max(needed)} are needed for seq_lens {seq_lens}."
        )
    used = np.arange(tables.shape[1])[None] < np.asarray(needed)[:, None]
    blocks = tables[used]
    if blocks.min() < first_block or blocks.max() >= cache.num_blocks:
        raise BatchError(
            f"batch.block_tables: got blocks from {blocks.min()} to {blocks.max()}; blocks "
            f"{cache.first_free_block} … {cache.num_blocks - 1} are the caller's (block "
            f"{NULL_BLOCK} is the null block, those below {cache.first_free_block} are the "
            "runner's own)."
        )
    return np.where(used, tables, NULL_BLOCK)


def _scratch_tables(seq_lens: list[int], cache: CacheGeometry) -> Ints:
    needed = [-(-s // cache.block_size) for s in seq_lens]
    if sum(needed) > cache.scratch_blocks:
        raise BatchError(
            f"batch: {sum(needed)} KV blocks are needed for seq_lens {seq_lens}, and calls without "
            f"block_tables have {cache.scratch_blocks} scratch blocks; pass block_tables."
        )
    tables = np.zeros((len(seq_lens), max(needed)), dtype=np.int64)
    first = 1
    for row, count in enumerate(needed):
        tables[row, :count] = np.arange(first, first + count)
        first += count
    return tables


def _rows(query_lens: list[int], seq_lens: list[int]) -> tuple[Ints, Ints]:
    """Return the request and the position of each row."""
    if len(query_lens) == 1:
        length, end = query_lens[0], seq_lens[0]
        return np.zeros(length, np.int64), np.arange(end - length, end)
    lens, seqs = np.asarray(query_lens), np.asarray(seq_lens)
    requests, total = np.arange(len(query_lens)), int(lens.sum())
    if len(query_lens) == total:
        return requests, seqs - 1
    first = seqs - lens - (lens.cumsum() - lens)  # position of a row minus its row number
    return requests.repeat(lens), np.arange(total) + first.repeat(lens)


class StepBuffers:
    """Static device buffers of one step's metadata, filled from the host in one copy.

    All fields share one int32 buffer, block tables last, so that a step copies a prefix: without
    them where they are the ones of the step before. On CUDA the copy is from pinned memory in two
    halves, each written again only when all copies from it are done; a half holds many steps, so
    that a host which is a few of them ahead waits for nothing. Not safe across threads; the
    runner's lock guards it.
    """

    HALF = 1 << 14
    """Least length of a half, in int32; at least two whole steps go in."""

    def __init__(
        self, *, max_tokens: int, max_reqs: int, blocks_per_request: int, device: torch.device
    ) -> None:
        self.max_tokens, self.max_reqs = max_tokens, max_reqs
        self._width = blocks_per_request
        sizes = (1, max_tokens, max_tokens, max_tokens, max_reqs + 1, max_reqs)
        table = (max_reqs + 1) * blocks_per_request
        total = sum(sizes) + table
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        fields = torch.split(self._device, [*sizes, table])
        self.num_tokens, self.slot_mapping, self.token_to_req, self.kv_lens = fields[:4]
        self.query_start_loc, self.seq_lens = fields[4:6]
        self.block_tables = fields[6].view(max_reqs + 1, blocks_per_request)
        self._table_start = sum(sizes)
        half = max(2 * total, self.HALF)
        self._staging = Staging(self._device, half) if device.type == "cuda" else None
        is_host = self._staging is None
        self._flat = self._device.numpy() if is_host else np.zeros(total, np.int32)
        self._fields = np.split(self._flat, np.cumsum(sizes))
        self._fields[-1] = self._fields[-1].reshape(max_reqs + 1, blocks_per_request)
        self._layout: tuple[int, tuple[int, ...]] = 0, ()
        """The padded size and the query lengths that were filled in last; of no step while some of
        them are."""
        self._moving: tuple[Any, ...] = ()
        """What each step of that layout writes: the slots and the key counts of its true rows, and
        the lengths of its requests."""
        self._tables: Ints | None = None
        """The block tables that were; they cannot be written to."""
        self._next_tables: Ints | None = None
        """Those that are there once what is staged has been copied."""
        self._context = ForwardContext(
            padded_tokens=0,
            num_tokens=0,
            query_lens=(),
            seq_lens_host=(),
            slot_mapping=self.slot_mapping,
            token_to_req=self.token_to_req,
            kv_lens=self.kv_lens,
            block_tables=self.block_tables,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            num_tokens_tensor=self.num_tokens,
        )
        """Of no step; what all have."""

    @property
    def num_bytes(self) -> int:
        """Device memory of all fields together."""
        return self._device.nbytes

    def fill(self, batch: CheckedBatch, padded_tokens: int) -> None:
        """Write one step's metadata; on CUDA the copy is queued on the current stream."""
        self.stage(batch, padded_tokens)
        if self._staging is not None:
            self._staging.send()
        self.sent()

    def stage(self, batch: CheckedBatch, padded_tokens: int) -> None:
        """Write one step's metadata on the host, for whoever copies `staged` and tells `sent`.

        On the host nothing is left to do.
        """
        reqs, tables = len(batch.query_lens), self._fields[-1]
        if self._layout != (padded_tokens, batch.query_lens):
            self._write_layout(batch, padded_tokens)
        slots, kv_lens, seqs = self._moving
        one_each = len(kv_lens) == reqs
        if one_each and reqs > _FEW:
            kv_lens[:] = batch.positions + 1
            seqs[:] = kv_lens
        else:
            seqs[:] = batch.seq_lens
            kv_lens[:] = seqs if one_each else batch.positions + 1
        if batch.slot_mapping is not None:
            slots[:] = batch.slot_mapping
        used, given, before = self._table_start, batch.block_tables, self._tables
        self._tables, self._next_tables = None, given
        if given is not None and before is not None and given is not before:
            is_same = given.shape == before.shape and given.tobytes() == before.tobytes()
            before = given if is_same else before
        if given is not None and given is not before:
            width = min(given.shape[1], self._width)
            tables[:reqs, :width] = given[:, :width]
            used += reqs * self._width
        if self._staging is not None:
            self._staging.stage(self._flat[:used])

    @property
    def memory(self) -> list[torch.Tensor]:
        """The device's memory that metadata is copied to; none on the host."""
        return [] if self._staging is None else [self._device]

    @property
    def staged(self) -> Copied:
        """The copy of the last step's metadata, on a device."""
        assert self._staging is not None, "metadata on the host is not copied"
        return self._staging.staged

    def sent(self) -> None:
        """Note that the copy of what is staged has been queued."""
        self._tables = self._next_tables

    def _write_layout(self, batch: CheckedBatch, padded_tokens: int) -> None:
        """Write what the query lengths and the padded size decide."""
        num, slots, owner, kv_lens, starts, seqs, _ = self._fields
        true, reqs = batch.num_tokens, len(batch.query_lens)
        self._layout = 0, ()
        num[0] = true
        owner[:true] = batch.owners
        owner[true:padded_tokens] = self.max_reqs
        kv_lens[true:padded_tokens] = slots[true:padded_tokens] = 0
        starts[1 : reqs + 1] = list(itertools.accumulate(batch.query_lens))
        starts[reqs + 1 :] = true
        seqs[reqs:] = 0
        self._moving = slots[:true], kv_lens[:true], seqs[:reqs]
        self._layout = padded_tokens, batch.query_lens

    def context(
        self,
        batch: CheckedBatch,
        padded_tokens: int,
        attention: AttentionBackend | None,
        uniform_query_len: int | None = None,
        *,
        in_full_graph: bool = False,
    ) -> ForwardContext:
        """Return the context of a step whose metadata has been filled in."""
        return self._context.of_step(
            padded_tokens=padded_tokens,
            num_tokens=batch.num_tokens,
            query_lens=batch.query_lens,
            seq_lens_host=batch.seq_lens,
            block_tables_host=batch.block_tables,
            extras=batch.extras,
            attention=attention,
            uniform_query_len=uniform_query_len,
            in_full_graph=in_full_graph,
        )
