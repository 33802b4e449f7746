"""`attention=paged`: paged attention in plain torch with all metadata in device tensors.

Support ALWAYS: shapes depend on the capture size alone, nothing is read on the host, so a captured
call serves every batch of its size. It reads `max_model_len` keys for every row, whatever the
lengths: right everywhere, fast nowhere.
"""

from __future__ import annotations

import torch

from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.context import ForwardContext
from pcgsvc.ops.support import Support

_CHUNK_ELEMENTS = 1 << 24
"""Most elements of gathered keys at a time, so that long tables do not need long buffers."""


class PagedAttention(AttentionBackend):
    """See the module docstring."""

    cudagraph_support = Support.ALWAYS

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> None:
        """See `AttentionBackend.forward`."""
        rows = q.shape[0]
        kv_lens = context.kv_lens[:rows].long()
        self._write(layer, k, v, context.slot_mapping[:rows].long(), kv_lens)
        tables = context.block_tables[context.token_to_req[:rows].long()].long()  # [T, B]
        output.copy_(self._attend(q, layer, tables, kv_lens))

    def _write(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> None:
        # Padding rows all write slot 0 of the null block; zeros, so that it stays zero.
        padding = (kv_lens == 0)[:, None, None]
        keys, values = self.kv_cache[layer].flatten(1, 2)
        keys.index_put_((slots,), k.masked_fill(padding, 0))
        values.index_put_((slots,), v.masked_fill(padding, 0))

    def _attend(
        self, q: torch.Tensor, layer: int, tables: torch.Tensor, kv_lens: torch.Tensor
    ) -> torch.Tensor:
        """Softmax over the keys, chunk by chunk with a running maximum; fp32 inside."""
        spec, (rows, blocks) = self.spec, tables.shape
        groups = spec.num_heads // spec.num_kv_heads
        q = q.float().view(rows, spec.num_kv_heads, groups, spec.head_dim) * spec.scale
        top = q.new_full(q.shape[:3], float("-inf"))
        total, mixed = torch.zeros_like(top), torch.zeros_like(q)
        window = spec.window(layer)
        per_block = rows * self.block_size * spec.num_kv_heads * spec.head_dim
        step = max(1, _CHUNK_ELEMENTS // per_block)
        for first in range(0, blocks, step):
            chunk = self.kv_cache[layer][:, tables[:, first : first + step]]
            keys, values = chunk.flatten(2, 3).float()  # [T, L, K, D] each
            where = torch.arange(keys.shape[1], device=q.device) + first * self.block_size
            live = where < kv_lens[:, None]  # [T, L]
            if window is not None:
                live = live & (where >= kv_lens[:, None] - window)
            # Dead slots may hold anything, NaN included, and 0 * NaN is NaN.
            values = values.masked_fill(~live[:, :, None, None], 0)
            scores = torch.einsum("tkgd,tlkd->tkgl", q, keys)
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            scores = scores.masked_fill(~live[:, None, None, :], float("-inf"))
            higher = torch.maximum(top, scores.amax(-1))
            safe = higher.masked_fill(higher == float("-inf"), 0)
            weights = torch.exp(scores - safe[..., None])
            scale = torch.exp(top - safe)
            total = total * scale + weights.sum(-1)
            mixed = mixed * scale[..., None] + torch.einsum("tkgl,tlkd->tkgd", weights, values)
            top = higher
        mixed = mixed / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
        return mixed.reshape(rows, spec.num_heads, spec.head_dim).masked_fill(
            (kv_lens == 0)[:, None, None], 0
        )
