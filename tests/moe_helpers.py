"""A small mixture of experts: settings, layers, a reference, and its runs by the command line."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pcgsvc.config import Config, ModelConfig, MoeConfig
from pcgsvc.models.catalog import build_model

CPU = torch.device("cpu")
TINY = [
    "model=llama_moe",
    "model.num_layers=2",
    "compiler=eager",
    "capture.sizes=[4,8]",
    "bench.enabled=false",
    "device=cpu",
]
ALL_TO_ALL = [*TINY, "model.moe.backend=all_to_all", "mode=piecewise"]


def moe_config(**moe: Any) -> Config:
    return Config(model=ModelConfig(name="llama_moe", num_layers=2, moe=MoeConfig(**moe)))


def build(**moe: Any) -> Any:
    return build_model(moe_config(**moe), device=CPU, dtype=torch.float32)


def reference(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Compute the mixture row by row, in float64, from its description."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(len(x)):
        probabilities = logits[row].double().softmax(0)
        best = sorted(range(len(probabilities)), key=lambda e: -float(probabilities[e]))[:top_k]
        total = sum(float(probabilities[e]) for e in best)
        for expert in best:
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            made = down[expert].double() @ (functional.silu(gate) * up)
            out[row] += float(probabilities[expert]) / total * made
    return out.float()


def layer_tensors(experts: int = 6, seed: int = 0) -> list[torch.Tensor]:
    """Return x, router logits, gate_up and down of one layer, 9 rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(9, 8), (9, experts), (experts, 20, 8), (experts, 8, 10)]
    return [torch.randn(shape, generator=generator) for shape in shapes]
