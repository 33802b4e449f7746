"""`model=encoder`: our own BERT, for sentence vectors.

In: `EncoderDims`. Out: a module whose forward takes flat tokens, (input_ids [T], positions [T],
token_types [T]), and returns hidden rows [T, E], one per token. One vector per request is another
number of rows than a step has, so pooling is done on what the runner returns; see
`pcgsvc.serve.embed`. Knows nothing of checkpoints, tracing or graphs; attention is
`pcgsvc::encoder_attention`.

Shapes: T = tokens (rows), E = hidden size, F = intermediate size, H = heads, D = head dim.

Source: BertModel of transformers 5.24 without its pooler.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pcgsvc.config import AttentionConfig, Config, ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.models.dims import check_numbers, dim_settings, explicit_dims, find_preset
from pcgsvc.ops import encoder_attention as _attention_op  # noqa: F401 - registers the op


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderDims:
    """What decides the module's shape. ConfigError names the `model.<field>` at fault."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    type_vocab_size: int = 2
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        """Check every range."""
        check_numbers(self)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.num_heads: got {self.num_heads}, which does not divide "
                f"model.hidden_size={self.hidden_size}; change one of the two."
            )


SETTINGS = frozenset({"preset", "weights", *dim_settings(EncoderDims)})
"""The `model.*` settings that an encoder reads."""
PRESETS: dict[str, EncoderDims] = {
    "tiny": EncoderDims(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=4,
        num_heads=4,
        max_position=256,
    ),
    "minilm": EncoderDims(  # all-MiniLM-L6-v2
        vocab_size=30522,
        hidden_size=384,
        intermediate_size=1536,
        num_layers=6,
        num_heads=12,
        max_position=512,
    ),
    "base": EncoderDims(  # BERT base, uncased
        vocab_size=30522,
        hidden_size=768,
        intermediate_size=3072,
        num_layers=12,
        num_heads=12,
        max_position=512,
    ),
}


def preset_dims(model: ModelConfig) -> EncoderDims:
    """Return the preset's dimensions, replaced by those that the config sets itself."""
    preset = find_preset(model, PRESETS)
    return EncoderDims(**asdict(preset) | explicit_dims(model, EncoderDims))


def refuse_attention(config: Config) -> None:
    """Raise ConfigError if a setting of the KV cache is set: an encoder has none."""
    unset = AttentionConfig()
    for name in ("name", "block_size", "num_blocks", "max_cache_bytes"):
        value = getattr(config.attention, name)
        if value != getattr(unset, name):
            setting = "attention" if name == "name" else f"attention.{name}"
            raise ConfigError(
                f"{setting}: got {value!r}, but model={config.model.name} does not read it: an "
                "encoder has no KV cache, and its attention is pcgsvc::encoder_attention. Of "
                "attention.* it reads max_model_len and max_num_reqs; leave the rest out."
            )


# ---- module --------------------------------------------------------------------------------------


class Affine(nn.Module):
    """A weight [rows, columns] with a bias; left unset, and torch's global RNG untouched."""

    def __init__(self, rows: int, columns: int, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, **where), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows, **where), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, columns] as [T, rows]."""
        return functional.linear(x, self.weight, self.bias)


class EncoderLayer(nn.Module):
    """One block: attention and a GELU layer, each added to its input and normed behind."""

    def __init__(self, dims: EncoderDims, **where: Any) -> None:
        super().__init__()
        hidden, inner = dims.hidden_size, dims.intermediate_size
        self.head_dim = hidden // dims.num_heads
        self.qkv = Affine(3 * hidden, hidden, **where)
        self.attention_out = Affine(hidden, hidden, **where)
        self.attention_norm = nn.LayerNorm(hidden, dims.norm_eps, **where)
        self.inner = Affine(inner, hidden, **where)
        self.outer = Affine(hidden, inner, **where)
        self.output_norm = nn.LayerNorm(hidden, dims.norm_eps, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden rows [T, E] after this block."""
        heads = [h.unflatten(-1, (-1, self.head_dim)) for h in self.qkv(x).chunk(3, dim=-1)]
        out = torch.empty_like(heads[0], memory_format=torch.contiguous_format)
        torch.ops.pcgsvc.encoder_attention(*heads, out)
        x = self.attention_norm(x + self.attention_out(out.flatten(1)))
        made: torch.Tensor = self.outer(functional.gelu(self.inner(x)))
        normed: torch.Tensor = self.output_norm(x + made)
        return normed


class Encoder(nn.Module):
    """The whole model. Its weights are unset; see `weights`."""

    def __init__(self, dims: EncoderDims, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dims = dims

        def table(rows: int) -> nn.Module:
            made: nn.Module = nn.Embedding.from_pretrained(
                torch.empty(rows, dims.hidden_size, **where)
            )
            return made

        self.word_embeddings = table(dims.vocab_size)
        self.position_embeddings = table(dims.max_position)
        self.token_type_embeddings = table(dims.type_vocab_size)
        self.embedding_norm = nn.LayerNorm(dims.hidden_size, dims.norm_eps, **where)
        self.layers = nn.ModuleList(EncoderLayer(dims, **where) for _ in range(dims.num_layers))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """Return hidden rows [T, E] of tokens at positions in their requests; all [T], int64."""
        x: torch.Tensor = self.word_embeddings(input_ids) + self.token_type_embeddings(token_types)
        x = self.embedding_norm(x + self.position_embeddings(positions))
        for layer in self.layers:
            x = layer(x)
        return x
