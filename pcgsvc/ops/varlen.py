"""`attention=varlen`: a loop over the requests with host lengths, as real varlen backends plan.

Support NEVER: the lengths are host values of one step. Plain torch, CPU and CUDA; the simplest
statement of what every other backend must compute.
"""

from __future__ import annotations

import torch

from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.context import ForwardContext
from pcgsvc.ops.support import Support


class VarlenAttention(AttentionBackend):
    """See the module docstring."""

    cudagraph_support = Support.NEVER

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
        num_tokens = context.num_tokens
        keys, values = self.kv_cache[layer].flatten(1, 2)  # [N * S, K, D] each
        slots = context.slot_mapping[:num_tokens].long()
        keys.index_copy_(0, slots, k[:num_tokens])
        values.index_copy_(0, slots, v[:num_tokens])
        first = 0
        for request, (query_len, seq_len) in enumerate(
            zip(context.query_lens, context.seq_lens_host, strict=True)
        ):
            blocks = context.block_tables[request, : -(-seq_len // self.block_size)].long()
            past = self.kv_cache[layer][:, blocks].flatten(1, 2)[:, :seq_len]  # [2, seq, K, D]
            rows = slice(first, first + query_len)
            output[rows] = self._attend(q[rows], past[0], past[1], layer)
            first += query_len
        output[num_tokens:].zero_()

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Causal attention of the last rows of one sequence: q [Q, H, D], k and v [L, K, D]."""
        spec, window = self.spec, self.spec.window(layer)
        groups = spec.num_heads // spec.num_kv_heads
        k, v = (t.repeat_interleave(groups, 1).float() for t in (k, v))
        scores = torch.einsum("qhd,lhd->hql", q.float(), k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        past = k.shape[0] - q.shape[0]
        every = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)  # [Q, L]
        hidden = every.triu(past + 1)
        if window is not None:
            hidden |= every.tril(past - window)
        scores.masked_fill_(hidden, float("-inf"))
        return torch.einsum("hql,lhd->qhd", scores.softmax(-1), v).to(q.dtype)
