"""Choosing the next tokens of a step.

In: logits, and per row a sampling with its generator and tokens. Out: token ids. Knows nothing of
steps.

Shapes: R = rows, V = vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from pcgsvc.forward.sampling import Sampling


class Chooser(Protocol):
    """What a row's next token is chosen by."""

    sampling: Sampling
    tokens: list[int]
    """Prompt and continuation."""
    random: random.Random


def choose(logits_RV: torch.Tensor, rows: Sequence[Chooser]) -> torch.Tensor:
    """Return one token per row [R], on the logits' device, which is not waited for.

    Rows do not influence each other.

    A greedy row without a repetition penalty gets the first of the highest logits, as they are.
    """
    penalised = [at for at, row in enumerate(rows) if row.sampling.repetition_penalty != 1]
    drawn = [at for at, row in enumerate(rows) if not row.sampling.is_greedy]
    if not penalised and not drawn:
        return logits_RV.argmax(-1)
    scores_RV = logits_RV.float().clone()
    if penalised:
        _penalise(scores_RV, penalised, [rows[at] for at in penalised])
    tokens = scores_RV.argmax(-1)
    if drawn:
        chosen = queued(drawn, scores_RV.device)
        tokens[chosen] = _draw(scores_RV[chosen], [rows[at] for at in drawn])
    return tokens


def queued(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers as a tensor on a device, which is not waited for."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _penalise(scores_RV: torch.Tensor, indices: Sequence[int], rows: Sequence[Chooser]) -> None:
    """Penalise what each of these rows has in its tokens, in one go: P pairs of row and token."""
    each = [set(row.tokens) for row in rows]
    counts = list(map(len, each))
    id_P = list(itertools.chain.from_iterable(each))
    at_P = np.repeat(np.asarray(indices), counts)
    penalty_P = np.repeat([row.sampling.repetition_penalty for row in rows], counts)
    where = tuple(queued(index, scores_RV.device) for index in (at_P, id_P))
    old_P, by_P = scores_RV[where], queued(penalty_P, scores_RV.device, scores_RV.dtype)
    scores_RV[where] = torch.where(old_P < 0, old_P * by_P, old_P / by_P)


def _draw(scores_RV: torch.Tensor, rows: Sequence[Chooser]) -> torch.Tensor:
    """Draw by the inverse of the distribution function: one uniform number per row decides.

    A row without probabilities (a logit is infinite, or no number) gets the highest, which is what
    greedy choice gives.
    """
    ordered_RV, ids_RV = probabilities(scores_RV, [row.sampling for row in rows])
    up_to_RV = ordered_RV.double().cumsum(-1)
    uniform = [[row.random.random()] for row in rows]
    at_R1 = queued(uniform, scores_RV.device, torch.float64) * up_to_RV[:, -1:]
    is_below_RV = ~(up_to_RV > at_R1)  # a comparison with NaN is false
    index_R1 = is_below_RV.sum(-1, keepdim=True).clamp(max=ids_RV.shape[-1] - 1)
    return ids_RV.gather(-1, index_R1)[:, 0]


def probabilities(
    scores_RV: torch.Tensor, samplings: Sequence[Sampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's probabilities, ascending, and the tokens that they belong to.

    As transformers' processors for temperature, top-k and top-p give them, in this order.
    """

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return queued(values, scores_RV.device, dtype)[:, None]

    width = scores_RV.shape[-1]
    scores_RV = scores_RV / column([s.temperature for s in samplings], scores_RV.dtype)
    ordered_RV, ids_RV = scores_RV.sort(dim=-1, stable=True)
    kept = [width - min(s.top_k or width, width) for s in samplings]
    least_R1 = ordered_RV.gather(-1, column(kept, torch.int64))
    ordered_RV = ordered_RV.masked_fill(ordered_RV < least_R1, -torch.inf)
    below_RV = ordered_RV.softmax(-1).cumsum(-1)
    cut_RV = below_RV <= 1 - column([s.top_p for s in samplings], scores_RV.dtype)
    cut_RV &= column([s.top_p for s in samplings], scores_RV.dtype) < 1
    cut_RV[:, -1] = False
    return ordered_RV.masked_fill(cut_RV, -torch.inf).softmax(-1), ids_RV
