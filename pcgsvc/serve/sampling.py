"""Choosing the next tokens of a step.

In: logits, and per row a sampling with its generator and tokens. Out: token ids. Knows nothing of
steps.

Shapes: R = rows, V = vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import torch

from pcgsvc.forward.sampling import Sampling


class Chooser(Protocol):
    """What a row's next token is chosen by."""

    sampling: Sampling
    tokens: list[int]
    """Prompt and continuation."""
    random: random.Random


def choose(logits_RV: torch.Tensor, rows: Sequence[Chooser]) -> list[int]:
    """Return one token per row; rows do not influence each other.

    A greedy row without a repetition penalty gets the first of the highest logits, as they are.
    """
    penalised = [at for at, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    drawn = [at for at, row in enumerate(rows) if not row.sampling.is_greedy]
    if not penalised and not drawn:
        return logits_RV.argmax(-1).tolist()
    scores_RV = logits_RV.float().clone()
    for at in penalised:
        _penalise(scores_RV[at], rows[at])
    tokens = scores_RV.argmax(-1)
    if drawn:
        chosen = torch.tensor(drawn, device=scores_RV.device)
        tokens[chosen] = _draw(scores_RV[chosen], [rows[at] for at in drawn])
    return tokens.tolist()


def _penalise(scores_V: torch.Tensor, row: Chooser) -> None:
    ids = torch.tensor(sorted(set(row.tokens)), device=scores_V.device)
    penalty, old = row.sampling.repetition_penalty, scores_V[ids]
    scores_V[ids] = torch.where(old < 0, old * penalty, old / penalty)


def _draw(scores_RV: torch.Tensor, rows: Sequence[Chooser]) -> torch.Tensor:
    """Draw by the inverse of the distribution function: one uniform number per row decides."""
    ordered_RV, ids_RV = probabilities(scores_RV, [row.sampling for row in rows])
    up_to_RV = ordered_RV.double().cumsum(-1)
    uniform = [[row.random.random()] for row in rows]
    at_R1 = torch.tensor(uniform, dtype=torch.float64).to(scores_RV.device) * up_to_RV[:, -1:]
    index_R1 = (up_to_RV <= at_R1).sum(-1, keepdim=True).clamp(max=ids_RV.shape[-1] - 1)
    return ids_RV.gather(-1, index_R1)[:, 0]


def probabilities(
    scores_RV: torch.Tensor, samplings: Sequence[Sampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's probabilities, ascending, and the tokens that they belong to.

    As transformers' processors for temperature, top-k and top-p give them, in this order.
    """

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(scores_RV.device)[:, None]

    width = scores_RV.shape[-1]
    scores_RV = scores_RV / column([s.temperature for s in samplings], scores_RV.dtype)
    ordered_RV, ids_RV = scores_RV.sort(-1)
    kept = [width - min(s.top_k or width, width) for s in samplings]
    least_R1 = ordered_RV.gather(-1, column(kept, torch.int64))
    ordered_RV = ordered_RV.masked_fill(ordered_RV < least_R1, -torch.inf)
    below_RV = ordered_RV.softmax(-1).cumsum(-1)
    cut_RV = below_RV <= 1 - column([s.top_p for s in samplings], scores_RV.dtype)
    cut_RV &= column([s.top_p for s in samplings], scores_RV.dtype) < 1
    cut_RV[:, -1] = False
    return ordered_RV.masked_fill(cut_RV, -torch.inf).softmax(-1), ids_RV
