"""Our own Llama: dimensions, presets, the module, its rotary table and its random weights.

In: `LlamaDims`. Out: a module whose forward takes flat tokens, (input_ids [T], positions [T]), and
returns logits [T, vocab]. Knows nothing of checkpoints, tracing or graphs; attention is the
splitting op `pcgsvc::attention`.

All layers have one structure and no constant of their own but the layer number, which goes to the
attention op alone: so the stretches between two attentions are one and the same piece.

Shapes: T = tokens (rows), E = hidden size, F = intermediate size, H = query heads, K = KV heads,
D = head dim, P = positions of the rotary table.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError, near
from pcgsvc.ops import attention as _attention_op  # noqa: F401 - registers pcgsvc::attention
from pcgsvc.ops.attention import AttentionSpec

# ---- dimensions ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaDims:
    """Everything that decides the module's shape; ConfigError names the `model.<field>` at fault."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    rope_factors: tuple[float, ...] | None = None
    """[D / 2]: each rotary frequency is divided by its factor; None: as they are."""

    def __post_init__(self) -> None:
        """Check every range."""
        for name in (f.name for f in fields(self) if f.type in ("int", "float")):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"model.{name}: got {value}, more than 0 is needed.")
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"model.num_kv_heads: got {self.num_kv_heads}, which does not divide "
                f"model.num_heads={self.num_heads}. Choices: {', '.join(map(str, divisors))}."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim: got {self.head_dim}; rotary embeddings turn pairs, so an even "
                "number is needed."
            )
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ConfigError(
                f"model.head_dim: got {self.head_dim}, which needs {self.head_dim // 2} rotary "
                f"scaling factors; there are {len(self.rope_factors)}."
            )

    def attention_spec(self) -> AttentionSpec:
        """Return what the attention backend must know."""
        return AttentionSpec(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            max_position=self.max_position,
        )


PRESETS: dict[str, LlamaDims] = {
    "tiny": LlamaDims(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=256,
    ),
    "160m": LlamaDims(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        max_position=2048,
    ),
    "1b": LlamaDims(  # Llama 3.2 1B, without the rotary scaling that its checkpoints bring
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position=8192,
        rope_theta=500000.0,
        tie_embeddings=True,
    ),
    "8b": LlamaDims(  # Llama 3 8B
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
        rope_theta=500000.0,
    ),
}


def explicit_dims(model: ModelConfig) -> dict[str, Any]:
    """Return the dimensions that the config sets itself, by name."""
    names = [f.name for f in fields(LlamaDims) if hasattr(model, f.name)]
    return {name: getattr(model, name) for name in names if getattr(model, name) is not None}


def preset_dims(model: ModelConfig) -> LlamaDims:
    """Return the preset's dimensions, replaced by those that the config sets itself.

    Raises:
        ConfigError: no such preset, or dimensions that do not go together.
    """
    preset = PRESETS.get(model.preset)
    if preset is None:
        raise ConfigError(
            f"model.preset: got {model.preset!r}{near(model.preset, PRESETS) or '.'} "
            f"Choices: {', '.join(PRESETS)}."
        )
    changes = explicit_dims(model)
    values = asdict(preset) | changes
    if "head_dim" not in changes and {"hidden_size", "num_heads"} & changes.keys():
        hidden, heads = values["hidden_size"], values["num_heads"]
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"model.num_heads: got {heads}, which does not divide model.hidden_size={hidden}; "
                "set model.head_dim, or change one of the two."
            )
        values["head_dim"] = hidden // heads
    return LlamaDims(**values)


# ---- rotary table --------------------------------------------------------------------------------


def inverse_frequencies(dims: LlamaDims) -> torch.Tensor:
    """Return the rotary frequencies [D / 2], fp32 on the CPU, scaling included."""
    exponents = torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim
    frequencies = 1.0 / (dims.rope_theta**exponents)
    if dims.rope_factors is not None:
        frequencies = frequencies / torch.tensor(dims.rope_factors, dtype=torch.float32)
    return frequencies


def rotary_table(dims: LlamaDims) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every position, each [P, D / 2], fp32 on the CPU."""
    positions = torch.arange(dims.max_position, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(dims)
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


class LlamaLayer(nn.Module):
    """One block: attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, dims: LlamaDims, **where: Any) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.widths = [n * dims.head_dim for n in (dims.num_heads, *[dims.num_kv_heads] * 2)]
        hidden, inner = dims.hidden_size, dims.intermediate_size
        self.input_norm = RMSNorm(hidden, dims.norm_eps, **where)
        self.qkv_proj = Linear(sum(self.widths), hidden, **where)
        self.o_proj = Linear(hidden, self.widths[0], **where)
        self.post_norm = RMSNorm(hidden, dims.norm_eps, **where)
        self.gate_up_proj = Linear(2 * inner, hidden, **where)
        self.down_proj = Linear(hidden, inner, **where)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Return the residual stream [T, E] after this block; cos and sin are [T, 1, D / 2]."""
        heads = [
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.qkv_proj(self.input_norm(x)).split(self.widths, dim=-1)
        ]
        q, k, v = rotate(heads[0], cos, sin), rotate(heads[1], cos, sin), heads[2]
        out = torch.empty_like(q)
        torch.ops.pcgsvc.attention(q, k, v, out, layer)
        x = x + self.o_proj(out.flatten(1))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(functional.silu(gate) * up)


class Llama(nn.Module):
    """The whole model. Weights are unset until `initialize` or `checkpoint.load_weights`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, dims: LlamaDims, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dims = dims
        table = torch.empty(dims.vocab_size, dims.hidden_size, **where)
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        self.layers = nn.ModuleList(LlamaLayer(dims, **where) for _ in range(dims.num_layers))
        self.norm = RMSNorm(dims.hidden_size, dims.norm_eps, **where)
        self.lm_head = (
            None if dims.tie_embeddings else Linear(dims.vocab_size, dims.hidden_size, **where)
        )
        for name, values in zip(("cos", "sin"), rotary_table(dims), strict=True):
            self.register_buffer(name, values.to(**where), persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] of input_ids [T] at positions [T], both int64."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.embed_tokens(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, number)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return functional.linear(self.norm(x), head.weight)


def initialize(module: nn.Module, seed: int) -> None:
    """Draw random weights in place: equal for equal seed, device type, dtype and dimensions.

    Matrices get the standard deviation 1 / sqrt(columns), which keeps activations and logits near
    unit variance, so that every layer matters. Norm weights are spread around 1, so that no two
    parameters are alike and a mixed-up one shows.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in module.parameters():
        vector = parameter.ndim == 1
        mean, std = (1.0, 0.1) if vector else (0.0, parameter.shape[-1] ** -0.5)
        parameter.data.normal_(mean, std, generator=generator)
