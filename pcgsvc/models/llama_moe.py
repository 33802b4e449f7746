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
from pcgsvc.models.sharding import Cut, cuts_of, shard_dims, share, sum_over_ranks
from pcgsvc.models.weights import draw, generator_for
from pcgsvc.ops import experts as _expert_ops  # noqa: F401 - registers the ops
from pcgsvc.ops.expert_group import Place, place_of, tensor_place


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeDims:
    """The mixture's dimensions. ConfigError names the `model.moe.<field>` at fault."""

    num_experts: int
    top_k: int
    backend: MoeBackend = MoeBackend.LOCAL
    place: Place
    """Among the processes that share the experts."""

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
    place, dims = place_of(config), preset_dims(config.model, PRESETS)
    shard_dims(dims, config.parallel.tensor)
    return dims, MoeDims(**{**_EXPERTS, **set_here, "place": place})


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
    """A block whose feed-forward part is a mixture of experts.

    Of `ranks` that share out the layer, each holds whole experts (`all_to_all`), and routes a share
    of the rows; or a share of every expert's features, and then their results are summed.
    """

    def __init__(
        self, dims: LlamaDims, ranks: int = 1, *, moe: MoeDims, whole: LlamaDims, **where: Any
    ) -> None:
        super().__init__(dims, ranks, **where)
        self.top_k, self.ranks = moe.top_k, ranks
        self.exchanges = moe.backend is MoeBackend.ALL_TO_ALL
        self.router = Linear(moe.num_experts, dims.hidden_size, **where)
        self.experts = Experts(whole if self.exchanges else dims, moe, **where)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `DecoderLayer.feed_forward`."""
        logits, out = self.router(x), torch.empty_like(x)
        gate_up, down, ops = self.experts.gate_up, self.experts.down, torch.ops.pcgsvc
        if self.exchanges:
            ops.moe_all_to_all(x, logits, gate_up, down, out, self.top_k, self.ranks > 1)
            return out
        ops.moe_experts(x, logits, gate_up, down, out, self.top_k)
        return sum_over_ranks(out, self.ranks)


class LlamaMoe(Llama):
    """The whole model; see `Llama`."""

    def __init__(
        self,
        dims: LlamaDims,
        moe: MoeDims,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ranks: int = 1,
    ) -> None:
        make_layer = functools.partial(MoeLayer, moe=moe, whole=dims)
        super().__init__(dims, device=device, dtype=dtype, ranks=ranks, make_layer=make_layer)
        self.moe = moe


def initialize(module: LlamaMoe, seed: int, place: Place) -> None:
    """Draw weights as `weights.initialize` does; the same model however it is shared.

    `place`: among the ranks of `parallel.tensor`.
    """
    generator, moe, inner = generator_for(module, seed), module.moe, module.dims.intermediate_size
    cuts = cuts_of(module.dims, place)
    part = (inner, share(inner, place))
    of_expert = {"gate_up": Cut(0, (part, part)), "down": Cut(1, (part,))}
    for name, parameter in module.named_parameters():
        if parameter.ndim < 3:
            draw(name, parameter, generator, cuts.get(name))
            continue
        local = place.world > 1 and moe.place.world == 1
        cut = of_expert[name.rpartition(".")[2]] if local else None
        drawn = torch.empty_like(parameter[0])
        for expert in range(moe.num_experts):  # drawn one by one, kept where it belongs
            draw(name, drawn, generator, cut)
            owner, at = divmod(expert, moe.num_local)
            if owner == moe.place.rank:
                parameter.data[at].copy_(drawn)


def build(config: Config, device: torch.device, dtype: torch.dtype) -> LlamaMoe:
    """Return the model with random weights from `config.seed`.

    Raises:
        ConfigError: dimensions do not go together.
    """
    dims, moe = dims_of(config)
    place = tensor_place(config)
    module = LlamaMoe(dims, moe, device=device, dtype=dtype, ranks=place.world)
    initialize(module, config.seed, place)
    return module
