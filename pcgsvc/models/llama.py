"""Our own Llama: the module and its rotary table.

In: `LlamaDims`, and among how many ranks its layers are shared out. Out: a module whose forward
takes flat tokens, (input_ids [T], positions [T]), and returns logits [T, vocab], on every rank.
Knows nothing of checkpoints, tracing or graphs; attention is the splitting op `pcgsvc::attention`.

All layers have one structure and no constant of their own but the layer number, which goes to the
attention op alone: so the stretches between two attentions are one and the same piece.

Shapes: T = tokens (rows), E = hidden size, F = intermediate size, H = query heads, K = KV heads,
D = head dim, P = positions of the rotary table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pcgsvc.models.llama_dims import LlamaDims
from pcgsvc.models.sharding import gather_columns, shard_dims, splits_head, sum_over_ranks
from pcgsvc.ops import attention as _attention_op  # noqa: F401 - registers pcgsvc::attention

# ---- rotary table --------------------------------------------------------------------------------


def rotary_table(dims: LlamaDims) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every position, scaled, each [P, D / 2], fp32 on the CPU."""
    exponents = torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim
    frequencies = 1.0 / (dims.rope_theta**exponents)
    if dims.rope_factors is not None:
        frequencies = frequencies / torch.tensor(dims.rope_factors, dtype=torch.float32)
    positions = torch.arange(dims.max_position, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [T, heads, D] by cos and sin [T, 1, D / 2]; feature i pairs with i + D / 2.

    Source: `apply_rotary_pos_emb` of transformers ("rotate half"), with equal rounding.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# ---- module --------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A weight [rows, columns] without bias; left unset, and torch's global RNG untouched."""

    def __init__(self, rows: int, columns: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, **where), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, columns] as [T, rows]."""
        return functional.linear(x, self.weight)


class SummedLinear(Linear):
    """A linear layer whose columns are shared out among `ranks`: it sums their products."""

    def __init__(self, rows: int, columns: int, ranks: int, **where: Any) -> None:
        super().__init__(rows, columns, **where)
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, columns] as [T, rows], the same on every rank."""
        return sum_over_ranks(super().forward(x), self.ranks)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, cast back before the weight as in transformers."""

    def __init__(self, width: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, **where), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, E] normed."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class DecoderLayer(nn.Module):
    """One block: attention and a feed-forward part, each behind a norm, added to the stream.

    `dims`: heads and feed-forward features of one of the `ranks`.
    """

    def __init__(self, dims: LlamaDims, ranks: int = 1, **where: Any) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.num_heads, self.num_kv_heads = dims.num_heads, dims.num_kv_heads
        hidden, queries = dims.hidden_size, dims.num_heads * dims.head_dim
        self.input_norm = RMSNorm(hidden, dims.norm_eps, **where)
        self.qkv_proj = Linear(queries + 2 * dims.num_kv_heads * dims.head_dim, hidden, **where)
        self.o_proj = SummedLinear(hidden, queries, ranks, **where)
        self.post_norm = RMSNorm(hidden, dims.norm_eps, **where)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Return the residual stream [T, E] after this block; cos and sin are [T, 1, D / 2]."""
        heads = self.qkv_proj(self.input_norm(x)).unflatten(-1, (-1, self.head_dim))
        turned, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        # Queries and keys are turned alike, so in one kernel.
        q, k = rotate(turned, cos, sin).split((self.num_heads, self.num_kv_heads), dim=1)
        out = q.new_empty(q.shape)
        torch.ops.pcgsvc.attention(q, k, v, out, layer)
        x = x + self.o_proj(out.flatten(1))
        return x + self.feed_forward(self.post_norm(x))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward part of normed rows x [T, E]."""
        raise NotImplementedError


class LlamaLayer(DecoderLayer):
    """A block whose feed-forward part is SwiGLU."""

    def __init__(self, dims: LlamaDims, ranks: int = 1, **where: Any) -> None:
        super().__init__(dims, ranks, **where)
        hidden, inner = dims.hidden_size, dims.intermediate_size
        self.gate_up_proj = Linear(2 * inner, hidden, **where)
        self.down_proj = SummedLinear(hidden, inner, ranks, **where)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayer.feed_forward`."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        down: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return down


class Llama(nn.Module):
    """The whole model, or what one of `ranks` holds of it. Its weights are unset; see `weights`.

    `make_layer(dims, ranks, device=…, dtype=…)`: returns one block.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        dims: LlamaDims,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ranks: int = 1,
        make_layer: Callable[..., DecoderLayer] = LlamaLayer,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dims, self.ranks = dims, ranks
        here = shard_dims(dims, ranks)
        table = torch.empty(dims.vocab_size, dims.hidden_size, **where)
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        self.layers = nn.ModuleList(
            make_layer(here, ranks, **where) for _ in range(dims.num_layers)
        )
        self.norm = RMSNorm(dims.hidden_size, dims.norm_eps, **where)
        self.splits_head = splits_head(dims, ranks)
        rows = dims.vocab_size // ranks if self.splits_head else dims.vocab_size
        self.lm_head = None if dims.tie_embeddings else Linear(rows, dims.hidden_size, **where)
        for name, values in zip(("cos", "sin"), rotary_table(dims), strict=True):
            self.register_buffer(name, values.to(**where), persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] of input_ids [T] at positions [T], both int64."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.embed_tokens(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, number)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = functional.linear(self.norm(x), head.weight)
        return gather_columns(logits, self.ranks) if self.splits_head else logits
