"""Collectives as ops that return once their result is there: nothing can be cut between the two.

In: tensors, and a process group by its word. Out: `pcgsvc::all_reduce` and its like, boundaries or
parts of regions as `parallel.collectives` says. Knows nothing of graphs.

A group's word is the same on all of its ranks and in every process, so that a program that names it
can be stored and shared: `4@2` are 4 ranks 2 apart, the group of that form in a mesh that holds
this rank; `0,1,5` are ranks of no such form; `#1` behind either is the second group of these ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from pcgsvc import torch_private
from pcgsvc.config import Collectives, Config
from pcgsvc.errors import ConfigError, PcgError, PeerError
from pcgsvc.ops.registry import default_boundaries, register_splitting_op


def rank_and_world() -> tuple[int, int] | None:
    """Return this process's rank and how many processes there are; None: no group was made."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def is_among_many() -> bool:
    """Whether a process group of several processes was made."""
    place = rank_and_world()
    return place is not None and place[1] > 1


def group_word(group: Any) -> str:
    """Return the word of a process group that this process is in."""
    groups = torch_private.process_groups()
    ranks = groups[group]
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    place = f"{len(ranks)}@{step}"
    if step < 1 or _ranks_at(place) != ranks:
        place = ",".join(map(str, ranks))
    at = [g for g, other in groups.items() if other == ranks].index(group)
    return f"{place}#{at}" if at else place


def of_ranks(count: int) -> str:
    """Return the word of a group of `count` ranks one behind the other."""
    return f"{count}@1"


def check_backend(group: Any, device: torch.device) -> None:
    """Raise ConfigError unless a process group can reduce tensors of a device."""
    config = distributed.get_backend_config(group)
    backends = dict(pair.split(":", 1) for pair in config.split(","))
    wrong = "gloo" if device.type == "cuda" else "nccl"
    if backends.get(device.type, wrong) == wrong:
        need = "nccl" if device.type == "cuda" else "gloo"
        raise ConfigError(
            f"the process group {group_word(group)!r} has the backends {config}, and the model's "
            f"tensors are on {device}: initialise it with {need!r}, or move the model."
        )


def ranks_of(word: str) -> list[int]:
    """Return the global ranks of a group of this process by its word."""
    place = word.partition("#")[0]
    return _ranks_at(place) if "@" in place else [int(rank) for rank in place.split(",")]


def group_of(word: str) -> Any:
    """Return the process group that a word means here; PcgError if there is none (any more)."""
    groups = torch_private.process_groups()
    if groups:
        ranks, at = ranks_of(word), int(word.partition("#")[2] or 0)
        same = [group for group, other in groups.items() if other == ranks]
        if at < len(same):
            return same[at]
    raise PcgError(
        f"there is no process group {word!r} here: it was destroyed, or never created. Create it "
        "before the runner is built (or started warm), and close the runner before it is destroyed."
    )


def _ranks_at(place: str) -> list[int]:
    count, step = map(int, place.split("@"))
    rank = distributed.get_rank()
    first = rank - rank // step % count * step
    return [first + step * n for n in range(count)]


# ---- ops -----------------------------------------------------------------------------------------


def all_reduce(x: torch.Tensor, reduce: str, group: str) -> None:
    """Reduce a contiguous tensor over a group, in place.

    Args:
        x: of one shape on all ranks.
        reduce: `sum`, `avg`, `product`, `min`, `max`, ….
        group: its word.
    """
    _waited(distributed.all_reduce, x, _reduction(reduce), group_of(group))


def broadcast(x: torch.Tensor, source: int, group: str) -> None:
    """Fill a contiguous tensor with what it is at one rank of a group, in place."""
    _waited(distributed.broadcast, x, None, group_of(group), False, source)


def all_gather(x: torch.Tensor, count: int, group: str) -> torch.Tensor:
    """Return the tensors of all `count` ranks of a group, one after the other in dimension 0."""
    out = _gathered(x, count, group)
    gather = _first_of("all_gather_single", "all_gather_into_tensor")
    _waited(gather, out, x.contiguous(), group_of(group))
    return out


def all_gather_into(x: torch.Tensor, out: torch.Tensor, group: str) -> None:
    """Write the tensors [T, C] of all ranks of a group into `out` [ranks, T, C], contiguous.

    A shape with the row count T itself in it, which what Inductor compiles behind it needs.
    """
    gather = _first_of("all_gather_single", "all_gather_into_tensor")
    _waited(gather, out.flatten(0, 1), x.contiguous(), group_of(group))


def reduce_scatter(x: torch.Tensor, reduce: str, count: int, group: str) -> torch.Tensor:
    """Return this rank's part, of `count` in dimension 0, of a tensor reduced over a group."""
    out = _scattered(x, reduce, count, group)
    scatter = _first_of("reduce_scatter_single", "reduce_scatter_tensor")
    _waited(scatter, out, x.contiguous(), _reduction(reduce), group_of(group))
    return out


def _waited(collective: Callable[..., Any], *args: Any) -> None:
    try:
        collective(*args)
    except (RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise PeerError(
            f"{collective.__name__} failed: a process that takes part has ended, or calls another "
            f"collective or another size: {first}"
        ) from error


def _first_of(*names: str) -> Callable[..., Any]:
    """Return the first of torch.distributed's functions; torch 2.13 has renamed some."""
    found: Callable[..., Any] = next(f for n in names if (f := getattr(distributed, n, None)))
    return found


def _gathered(x: torch.Tensor, count: int, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] * count, *x.shape[1:]))


def _scattered(x: torch.Tensor, reduce: str, count: int, group: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // count, *x.shape[1:]))


def _reduction(name: str) -> Any:
    return getattr(distributed.ReduceOp, name.upper())


def _bind_all_reduce(x: torch.Tensor, reduce: str, group: str) -> Callable[[], None]:
    given = x, _reduction(reduce), group_of(group)
    return functools.partial(_waited, distributed.all_reduce, *given)


_WHY = "parallel.collectives=boundary: processes wait for each other between graphs"
register_splitting_op(
    "pcgsvc::all_reduce",
    all_reduce,
    mutates_args=["x"],
    zeroes_padding=True,  # nothing is written across rows
    bind=_bind_all_reduce,
    reason=_WHY,
)
register_splitting_op(
    "pcgsvc::broadcast", broadcast, mutates_args=["x"], zeroes_padding=True, reason=_WHY
)
register_splitting_op(
    "pcgsvc::all_gather_into",
    all_gather_into,
    mutates_args=["out"],
    zeroes_padding=True,  # as of all_reduce
    reason=_WHY,
)
register_splitting_op("pcgsvc::all_gather", all_gather, fake=_gathered, reason=_WHY)
register_splitting_op("pcgsvc::reduce_scatter", reduce_scatter, fake=_scattered, reason=_WHY)

COLLECTIVES = frozenset(
    f"pcgsvc::{op.__name__}"
    for op in (all_reduce, broadcast, all_gather, all_gather_into, reduce_scatter)
)


FOREIGN = ("_c10d_functional::", "_c10d_functional_autograd::", "c10d::", "symm_mem::")
"""How names of torch's own collectives begin: they return before their result is there."""
EXCHANGE = "pcgsvc::moe_all_to_all"
"""Rows travel between processes by it, each with a batch of its own."""


def unnamed_boundaries(config: Config) -> frozenset[str]:
    """Return the splitting ops that are boundaries without being named, if they occur."""
    registered = default_boundaries(config.partition.splitting_ops)
    if config.parallel.collectives is Collectives.REGION:
        return registered - COLLECTIVES
    return registered | COLLECTIVES
