"""`pcgsvc::moe_experts` and `pcgsvc::moe_all_to_all`: routing and expert dispatch as boundaries.

In: hidden rows, router logits and the experts' weights of one layer. Out: the mixed rows in the
output buffer. How many rows an expert gets depends on the data and is read on the host, so neither
op can be captured. Knows nothing of models, tracing or graphs.

Only true rows are routed: padding rows reach no expert, travel nowhere, and come out as zero.

Shapes: T = rows of the step with padding, N = true rows, E = hidden size, F = width of an expert,
X = experts, L = experts of this process, W = processes, K = experts per row. One *copy* of a row
goes to each of its K experts: N * K copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed
from torch.nn import functional

from pcgsvc.errors import PcgError
from pcgsvc.ops.collectives import all_gather, of_ranks
from pcgsvc.ops.context import current_context
from pcgsvc.ops.expert_choice import choose
from pcgsvc.ops.expert_group import Place
from pcgsvc.ops.registry import register_splitting_op
from pcgsvc.ops.support import Support

_ALONE = Place()
Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(copies [N * K, E] in the order of their experts, counts [X])` -> what the experts make."""


def moe_experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
) -> None:
    """Write the mixture of experts of x [T, E] into `out` [T, E]; every expert is here.

    Args:
        x: rows behind the norm.
        router_logits: [T, X].
        gate_up: [X, 2 F, E], gate rows first.
        down: [X, E, F].
        out: padding rows become zero.
        top_k: K; the K largest probabilities are scaled to the sum 1.
    """
    _mix(x, router_logits, out, top_k, lambda copies, n: _run(copies, n.tolist(), gate_up, down))


def moe_all_to_all(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    same_rows: bool = False,
) -> None:
    """As `moe_experts`, with the experts spread over the default process group.

    Process r holds the experts r * L to (r + 1) * L - 1: gate_up [L, 2 F, E], down [L, E, F]. Every
    process of the group must make the same calls, each with rows of its own, however many; or all
    with the `same_rows`: then each routes a share of them, and the results are gathered.
    """

    def compute(copies: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        world, here = distributed.get_world_size(), gate_up.shape[0]
        if world * here != len(counts):
            raise PcgError(
                f"pcgsvc::moe_all_to_all: {here} of {len(counts)} experts are here, but the group "
                f"has {world} processes; build the runner again after the group has changed."
            )
        send = counts.view(world, here)  # [W, L], by receiver
        receive = torch.empty_like(send)  # [W, L], by sender
        distributed.all_to_all_single(receive, send)
        leaving, coming = send.sum(1).tolist(), receive.sum(1).tolist()
        guests = copies.new_empty(sum(coming), copies.shape[1])
        distributed.all_to_all_single(guests, copies, coming, leaving)
        # They come by sender, then by expert; an expert wants its own in one piece.
        experts = torch.arange(here, device=send.device).repeat(world)
        order = experts.repeat_interleave(receive.flatten()).argsort(stable=True)
        made = torch.empty_like(guests)
        made[order] = _run(guests[order], receive.sum(0).tolist(), gate_up, down)
        back = torch.empty_like(copies)
        distributed.all_to_all_single(back, made, leaving, coming)
        return back

    rank, world = distributed.get_rank(), distributed.get_world_size()
    _mix(x, router_logits, out, top_k, compute, Place(rank, world) if same_rows else _ALONE)


def _mix(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    compute: Compute,
    place: Place = _ALONE,
) -> None:
    """Route the true rows, let `compute` run the experts, and write the weighted sums.

    `place`: among the processes that have the same rows; each mixes a share of them.
    """
    total = current_context().num_tokens
    each = -(-total // place.world)
    first = min(place.rank * each, total)
    x, logits = x[first : min(first + each, total)], router_logits[first : first + each]
    rows = len(x)
    logits = logits[:rows].float()
    experts = choose(logits, top_k)
    weights = logits.softmax(-1).gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=logits.shape[1])
    made = x.new_empty(rows * top_k, x.shape[1])
    made[order] = compute(x[order // top_k], counts)
    mixed = made.view(rows, top_k, x.shape[1]).float() * weights[:, :, None]
    out[total:].zero_()
    if place.world == 1:
        out[:total] = mixed.sum(1)
        return
    mine = x.new_zeros(each, x.shape[1])
    mine[:rows] = mixed.sum(1)
    out[:total] = all_gather(mine, place.world, of_ranks(place.world))[:total]


def _run(
    copies: torch.Tensor, counts: list[int], gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return the SwiGLU of each copy by its expert; copies lie in the order of the experts."""
    made, first = torch.empty_like(copies), 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(first, first + count)
            gate, up = functional.linear(copies[rows], gate_up[expert]).chunk(2, dim=-1)
            made[rows] = functional.linear(functional.silu(gate) * up, down[expert])
            first += count
    return made


register_splitting_op(
    "pcgsvc::moe_experts",
    moe_experts,
    mutates_args=("out",),
    support=Support.NEVER,
    zeroes_padding=True,
    reason="which rows go to which expert depends on the data",
)
register_splitting_op(
    "pcgsvc::moe_all_to_all",
    moe_all_to_all,
    mutates_args=("out",),
    support=Support.NEVER,
    zeroes_padding=True,
    reason="model.moe.backend=all_to_all exchanges rows between processes, as the data asks for",
)
