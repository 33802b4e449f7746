"""`parallel.tensor`: which part of each weight a rank holds, and how whole weights are cut.

In: a model's dimensions, and a rank's place. Out: the dimensions of one rank, and a `Cut` for each
parameter that is shared out. Knows nothing of modules, files or collectives.

Query heads and feed-forward features are shared out in the order of the ranks. Where there are more
ranks than KV heads, neighbours hold the same one. The embedding is on every rank; a head of its own
is shared out by its rows, the vocabulary, if the ranks divide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from pcgsvc.errors import ConfigError
from pcgsvc.models.llama_dims import LlamaDims
from pcgsvc.ops.collectives import of_ranks
from pcgsvc.ops.expert_group import Place


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a tensor whose parts lie one behind the other along `dim`."""

    dim: int
    parts: tuple[tuple[int, slice], ...]
    """For each part its whole length, and which stretch of it is here."""

    def of(self, whole: Any) -> torch.Tensor:
        """Return this rank's stretches of a whole tensor, or of what reads one as it is indexed."""
        found, first = [], 0
        for (length, _), index in zip(self.parts, self.indices(), strict=True):
            stretch = index[self.dim]
            at = slice(first + stretch.start, first + stretch.stop)
            found.append(whole[*index[: self.dim], at])
            first += length
        return torch.cat(found, self.dim)

    def indices(self) -> Iterator[tuple[slice, ...]]:
        """Yield what each part, as a tensor of its own, is indexed with."""
        for _, stretch in self.parts:
            yield (*(slice(None),) * self.dim, stretch)

    def whole(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the whole tensor, of which `shape` is here."""
        lengths = [length for length, _ in self.parts]
        return (*shape[: self.dim], sum(lengths), *shape[self.dim + 1 :])


def share(length: int, place: Place) -> slice:
    """Return one rank's stretch of `length` features, which the ranks divide."""
    each = length // place.world
    return slice(place.rank * each, (place.rank + 1) * each)


def kv_share(heads: int, head_dim: int, place: Place) -> slice:
    """Return the features of one rank's KV heads; of too few, neighbours have the same one."""
    if heads >= place.world:
        return share(heads * head_dim, place)
    first = place.rank * heads // place.world * head_dim
    return slice(first, first + head_dim)


def check_heads(world: int, heads: int, kv_heads: int, names: tuple[str, str]) -> None:
    """Raise ConfigError unless `world` ranks can share out the heads; `names`: of both counts."""
    fits = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if world not in fits:
        raise ConfigError(
            f"parallel.tensor: got {world}, which {heads} query heads ({names[0]}) and {kv_heads} "
            f"KV heads ({names[1]}) cannot be shared out to. Choices: {', '.join(map(str, fits))}."
        )


def shard_dims(dims: LlamaDims, world: int) -> LlamaDims:
    """Return the heads and feed-forward features of one of `world` ranks; the rest is as it was.

    Raises:
        ConfigError: `world` does not divide them.
    """
    check_heads(world, dims.num_heads, dims.num_kv_heads, ("model.num_heads", "model.num_kv_heads"))
    if dims.intermediate_size % world:
        raise ConfigError(
            f"parallel.tensor: got {world}, which does not divide model.intermediate_size="
            f"{dims.intermediate_size}."
        )
    return replace(
        dims,
        num_heads=dims.num_heads // world,
        num_kv_heads=max(1, dims.num_kv_heads // world),
        intermediate_size=dims.intermediate_size // world,
    )


def splits_head(dims: LlamaDims, world: int) -> bool:
    """Whether the head's rows are shared out: it has a weight of its own that the ranks divide."""
    return world > 1 and not dims.tie_embeddings and dims.vocab_size % world == 0


def cuts_of(dims: LlamaDims, place: Place) -> dict[str, Cut]:
    """Return the cuts of a Llama's parameters by full name; those not named are on every rank."""
    if place.world == 1:
        return {}
    inner, queries = dims.intermediate_size, dims.num_heads * dims.head_dim
    inner_share, keys = share(inner, place), dims.num_kv_heads * dims.head_dim
    kv = (keys, kv_share(dims.num_kv_heads, dims.head_dim, place))
    layer = {
        "qkv_proj.weight": Cut(0, ((queries, share(queries, place)), kv, kv)),
        "o_proj.weight": Cut(1, ((queries, share(queries, place)),)),
        "gate_up_proj.weight": Cut(0, ((inner, inner_share),) * 2),
        "down_proj.weight": Cut(1, ((inner, inner_share),)),
    }
    found = {f"layers.{n}.{k}": cut for n in range(dims.num_layers) for k, cut in layer.items()}
    if splits_head(dims, place.world):
        found["lm_head.weight"] = Cut(0, ((dims.vocab_size, share(dims.vocab_size, place)),))
    return found


def sum_over_ranks(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return x, contiguous and written over by the sum of every rank's."""
    if ranks > 1:
        torch.ops.pcgsvc.all_reduce(x, "sum", of_ranks(ranks))
    return x


def gather_columns(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return every rank's x [T, C] as [T, ranks * C]."""
    out = x.new_empty(ranks, *x.shape)
    torch.ops.pcgsvc.all_gather_into(x, out, of_ranks(ranks))
    return out.transpose(0, 1).flatten(1)


def in_words(*, is_head_split: bool, kv_heads: int, world: int) -> dict[str, str]:
    """Return what becomes of embedding, head and KV heads among ranks, for the report."""
    copies = max(1, world // kv_heads)
    return {
        "embeddings": "replicated",
        "head": "split" if is_head_split else "replicated",
        "kv_heads": "split" if copies == 1 else f"replicated on {copies} ranks each",
    }
