"""Attention backends of the middle support levels, and one that plans on the host.

Each is right outside graphs for any batch, and inside a full graph only for the batches that its
level names: captured for any other, it gives wrong results or raises, so that tests can fail.
"""

from __future__ import annotations

from typing import Any

import torch

import pcgsvc
from pcgsvc.ops.varlen import VarlenAttention


class _Uniform(VarlenAttention):
    """Takes row r of a full graph for token r % Q of request r // Q; lengths from the device."""

    captured: list[int | None]
    """Rows per request of each capture."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.captured = []

    def _query_len(self, context: pcgsvc.ForwardContext) -> int:
        raise NotImplementedError

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: pcgsvc.ForwardContext,
    ) -> None:
        """See `AttentionBackend.forward`."""
        if not context.in_full_graph:
            super().forward(q, k, v, output, layer, context)
            return
        query_len, rows, device = self._query_len(context), q.shape[0], q.device
        if context.in_segment:
            self.captured.append(context.uniform_query_len)
        requests = torch.arange(rows, device=device) // query_len
        lengths = context.seq_lens[requests].long()
        positions = lengths - query_len + torch.arange(rows, device=device) % query_len
        live = lengths > 0
        tables = context.block_tables[requests].long()  # [T, B]
        size = self.block_size
        at = positions.clamp_min(0)
        slots = tables.gather(1, (at // size)[:, None])[:, 0] * size + at % size
        slots = torch.where(live, slots, 0)
        cache = self.kv_cache[layer].flatten(1, 2)
        for half, fresh in zip(cache, (k, v), strict=True):
            half.index_copy_(0, slots, fresh.masked_fill(~live[:, None, None], 0))
        where = torch.arange(tables.shape[1] * size, device=device)
        past = cache[:, tables[:, where // size] * size + where % size]  # [2, T, L, K, D]
        groups = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = past.repeat_interleave(groups, 3).float()
        scores = torch.einsum("thd,tlhd->thl", q.float(), keys) * self.spec.scale
        seen = (where <= positions[:, None])[:, None]  # [T, 1, L]
        weights = scores.masked_fill(~seen, -1e30).softmax(-1)
        result = torch.einsum("thl,tlhd->thd", weights, values).to(q.dtype)
        output.copy_(result.masked_fill(~live[:, None, None], 0))


class UniformBatch(_Uniform):
    """`UNIFORM_BATCH`."""

    cudagraph_support = pcgsvc.Support.UNIFORM_BATCH

    def _query_len(self, context: pcgsvc.ForwardContext) -> int:
        # Captured for any batch at all, it guesses: one token per request.
        return context.uniform_query_len or 1


class SingleToken(_Uniform):
    """`UNIFORM_SINGLE_TOKEN_DECODE`."""

    cudagraph_support = pcgsvc.Support.UNIFORM_SINGLE_TOKEN_DECODE

    def _query_len(self, context: pcgsvc.ForwardContext) -> int:
        return 1


class HostPlanned(VarlenAttention):
    """`ALWAYS`, by planning: FlashInfer's kind.

    `plan` computes from host values which slots each row reads, and writes them into device buffers
    of its own, one set per number of rows; `forward` looks at nothing else.
    """

    cudagraph_support = pcgsvc.Support.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots: dict[int, torch.Tensor] = {}
        """By rows: [T, L], the slots that each row reads; those past `lengths` do not count."""
        self.lengths: dict[int, torch.Tensor] = {}
        """By rows: [T], keys that each row reads; 0 for padding rows."""
        self.writes: dict[int, torch.Tensor] = {}
        """By rows: [T], the slot that each row writes."""
        self.plans: list[bool] = []
        """Per plan: whether it was for a full graph."""
        self.steps: list[int] = []
        """Per run of layer 0: how many plans there had been."""
        self.in_segment = 0
        """Plans that were made while a segment was captured."""

    def plan(self, context: pcgsvc.ForwardContext) -> None:
        """See `AttentionBackend.plan`."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.in_segment += context.in_segment or capturing
        self.plans.append(context.in_full_graph)
        rows, size = context.padded_tokens, self.block_size
        width = context.block_tables.shape[1] * size
        if rows not in self.slots:
            device = context.block_tables.device
            self.slots[rows] = torch.zeros(rows, width, dtype=torch.long, device=device)
            self.lengths[rows] = torch.zeros(rows, dtype=torch.long, device=device)
            self.writes[rows] = torch.zeros(rows, dtype=torch.long, device=device)
        slots, lengths, writes = (torch.zeros_like(t[rows], device="cpu") for t in self._buffers())
        row = 0
        pairs = zip(context.query_lens, context.seq_lens_host, strict=True)
        for request, (query_len, seq_len) in enumerate(pairs):
            blocks = torch.as_tensor(context.block_tables_host[request])
            where = torch.arange(seq_len)
            mine = blocks[where // size] * size + where % size
            for position in range(seq_len - query_len, seq_len):
                slots[row, : position + 1] = mine[: position + 1]
                lengths[row], writes[row] = position + 1, mine[position]
                row += 1
        for buffer, planned in zip(self._buffers(), (slots, lengths, writes), strict=True):
            buffer[rows].copy_(planned)

    def _buffers(self) -> tuple[dict[int, torch.Tensor], ...]:
        return self.slots, self.lengths, self.writes

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: pcgsvc.ForwardContext,
    ) -> None:
        """See `AttentionBackend.forward`."""
        if layer == 0:
            self.steps.append(len(self.plans))
        slots, lengths, writes = (b[q.shape[0]] for b in self._buffers())
        live = (lengths > 0)[:, None, None]
        cache = self.kv_cache[layer].flatten(1, 2)
        for half, fresh in zip(cache, (k, v), strict=True):
            half.index_copy_(0, writes, fresh.masked_fill(~live, 0))
        groups = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = cache[:, slots].repeat_interleave(groups, 3).float()  # [T, L, H, D] each
        scores = torch.einsum("thd,tlhd->thl", q.float(), keys) * self.spec.scale
        seen = (torch.arange(slots.shape[1], device=q.device) < lengths[:, None])[:, None]
        weights = scores.masked_fill(~seen, -1e30).softmax(-1)
        result = torch.einsum("thl,tlhd->thd", weights, values).to(q.dtype)
        output.copy_(result.masked_fill(~live, 0))


pcgsvc.register_attention_backend("toy_uniform_batch", UniformBatch)
pcgsvc.register_attention_backend("toy_single_token", SingleToken)
pcgsvc.register_attention_backend("toy_host_planned", HostPlanned)
