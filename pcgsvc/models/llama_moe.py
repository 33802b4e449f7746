"""`model=llama_moe`: our Llama with a mixture of experts for its feed-forward part.

In: `model.*`, and this process's place among those that share the experts. Out: a `ModelBundle`
with two kinds of boundary per layer: attention, and the experts. Knows nothing of tracing.

A row's K experts are those with the largest router logits; their probabilities are scaled to the
sum 1 (as in Mixtral). There is no capacity: every true row reaches all of its experts.

Shapes: T = rows, E = hidden size, F = width of an expert, X = experts, L = experts of this process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from pcgsvc.config import Config, MoeBackend
from pcgsvc.errors import ConfigError
from pcgsvc.models.llama import DecoderLayer, Linear, Llama
from pcgsvc.models.llama_dims import PRESETS as LLAMA_PRESETS
from pcgsvc.models.llama_dims import LlamaDims, preset_dims
from pcgsvc.models.weights import draw, generator_for
from pcgsvc.ops import experts as _expert_ops  # noqa: F401 - registers the ops
from pcgsvc.ops.expert_group import Place, place_of, require_group


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeDims:
    """The mixture's dimensions. ConfigError names the `model.moe.<field>` at fault."""

    num_experts: int
    top_k: int
    backend: MoeBackend = MoeBackend.LOCAL
    place: Place

    def __post_init__(self) -> None:
        """Check every range."""
        for name in ("num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model.moe.{name}: got {getattr(self, name)}, at least 1 is needed."
                )
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"model.moe.top_k: got {self.top_k}, but there are model.moe.num_experts="
                f"{self.num_experts}; a row goes to 1 to {self.num_experts} of them."
            )
        world = self.place.world
        if self.num_experts % world:
            raise ConfigError(
                f"model.moe.num_experts: got {self.num_experts}, which the {world} processes of "
                f"model.moe.backend=all_to_all cannot share equally; use a multiple of {world}, or "
                "another number of processes."
            )

    @property
    def num_local(self) -> int:
        """Experts of this process (L)."""
        return self.num_experts // self.place.world


PRESETS: dict[str, LlamaDims] = {
    "tiny": LLAMA_PRESETS["tiny"],
    "8x7b": LlamaDims(  # Mixtral 8x7B
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=32768,
        rope_theta=1000000.0,
    ),
}
_EXPERTS = {"num_experts": 8, "top_k": 2}
"""Of both presets."""


def dims_of(config: Config) -> tuple[LlamaDims, MoeDims]:
    """Return the dimensions that a config asks for; ConfigError if they do not go together."""
    moe = config.model.moe
    set_here = {f.name: v for f in fields(moe) if (v := getattr(moe, f.name)) is not None}
    place = place_of(config)
    return preset_dims(config.model, PRESETS), MoeDims(**{**_EXPERTS, **set_here, "place": place})


class Experts(nn.Module):
    """The experts of one layer that this process holds; weights left unset."""

    def __init__(self, dims: LlamaDims, moe: MoeDims, **where: Any) -> None:
        super().__init__()
        count, hidden, inner = moe.num_local, dims.hidden_size, dims.intermediate_size
        for name, shape in (
            ("gate_up", (count, 2 * inner, hidden)),
            ("down", (count, hidden, inner)),
        ):
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, **where), requires_grad=False)
            )


class MoeLayer(DecoderLayer):
    """A block whose feed-forward part is a mixture of experts."""

    def __init__(self, dims: LlamaDims, moe: MoeDims, **where: Any) -> None:
        super().__init__(dims, **where)
        self.top_k = moe.top_k
        self.exchanges = moe.backend is MoeBackend.ALL_TO_ALL
        self.router = Linear(moe.num_experts, dims.hidden_size, **where)
        self.experts = Experts(dims, moe, **where)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayer.feed_forward`."""
        logits, out = self.router(x), torch.empty_like(x)
        experts = self.experts
        if self.exchanges:
            torch.ops.pcgsvc.moe_all_to_all(
                x, logits, experts.gate_up, experts.down, out, self.top_k
            )
        else:
            torch.ops.pcgsvc.moe_experts(x, logits, experts.gate_up, experts.down, out, self.top_k)
        return out


class LlamaMoe(Llama):
    """The whole model; see `Llama`."""

    def __init__(
        self, dims: LlamaDims, moe: MoeDims, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(
            dims, device=device, dtype=dtype, make_layer=functools.partial(MoeLayer, moe=moe)
        )
        self.moe = moe


def initialize(module: LlamaMoe, seed: int) -> None:
    """Draw weights as `weights.initialize` does; the same model however it is shared."""
    generator, moe = generator_for(module, seed), module.moe
    for name, parameter in module.named_parameters():
        if parameter.ndim < 3:
            draw(name, parameter, generator)
            continue
        drawn = torch.empty_like(parameter[0])
        for expert in range(moe.num_experts):  # drawn one by one, kept where it belongs
            draw(name, drawn, generator)
            owner, at = divmod(expert, moe.num_local)
            if owner == moe.place.rank:
                parameter.data[at].copy_(drawn)


def build(config: Config, device: torch.device, dtype: torch.dtype) -> LlamaMoe:
    """Return the model with random weights from `config.seed`.

    Raises:
        ConfigError: dimensions do not go together, or `all_to_all` without a process group.
    """
    dims, moe = dims_of(config)
    if moe.backend is MoeBackend.ALL_TO_ALL:
        require_group(device)
    module = LlamaMoe(dims, moe, device=device, dtype=dtype)
    initialize(module, config.seed)
    return module
