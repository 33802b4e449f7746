"""The dimensions of a Llama, its presets, and what the config sets.

In: `ModelConfig`, or a checkpoint's statements. Out: `LlamaDims`. Imports no module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.models.dims import check_numbers, explicit_dims, find_preset
from pcgsvc.ops.attention import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaDims:
    """What decides the module's shape. ConfigError names the `model.<field>` at fault."""

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
        check_numbers(self)
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
    "70b": LlamaDims(  # Llama 3 70B
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
        rope_theta=500000.0,
    ),
}


def preset_dims(model: ModelConfig, presets: Mapping[str, LlamaDims] = PRESETS) -> LlamaDims:
    """Return the preset's dimensions, replaced by those that the config sets itself.

    Raises:
        ConfigError: no such preset, or dimensions that do not go together.
    """
    changes = explicit_dims(model, LlamaDims)
    values = asdict(find_preset(model, presets)) | changes
    if "head_dim" not in changes and {"hidden_size", "num_heads"} & changes.keys():
        hidden, heads = values["hidden_size"], values["num_heads"]
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"model.num_heads: got {heads}, which does not divide model.hidden_size={hidden}; "
                "set model.head_dim, or change one of the two."
            )
        values["head_dim"] = hidden // heads
    return LlamaDims(**values)
