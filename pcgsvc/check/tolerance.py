"""How far results may be from each other that were computed in another order.

In: tensors. Out: their relative difference, and the most that it may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pcgsvc.check.rounding import HALF, redrawn
from pcgsvc.errors import VerifyError

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""max|a-b| / max|b| up to which results that were computed in another order are equal."""

NOISE_FACTOR = 2
"""Of a module's own noise."""

NOISE_LIMIT = 0.5
NOT_FINITE = 1e30
"""The error of results of which one is NaN or infinite where the other is not; reports hold it."""
"""Whatever the noise is; a stale or mixed-up tensor gives an error near 1."""

DRAWS = 4
"""How often roundings are drawn: a router between two equal experts moves in some draws only."""


def near_ties(results: Sequence[torch.Tensor]) -> float:
    """Return `TOLERANCE` of results; up to it, a router may hold two experts for equal."""
    dtype = next((t.dtype for t in results if t.is_floating_point()), torch.float32)
    return TOLERANCE.get(dtype, 0.0)


def tolerance_of(
    wanted: Sequence[torch.Tensor],
    error: float,
    again: Callable[[], list[torch.Tensor]],
    *,
    always: bool = False,
) -> float:
    """Return up to which error results count as equal that were computed in another order.

    That is `TOLERANCE`, or, where `error` is above it and the results are of half precision, twice
    what the module's own results move when its roundings fall otherwise: in a random 32-layer
    model in bfloat16 that is more than 5e-2, and where a row goes to another expert, much more.

    Args:
        wanted: what the module gave.
        error: of what is compared with it.
        again: computes `wanted` once more.
        always: draw as often even if nothing depends on it, since other processes do so too.
    """
    dtype = next((t.dtype for t in wanted if t.is_floating_point()), torch.float32)
    tolerance = near_ties(wanted)
    if dtype not in HALF or (error <= tolerance and not always):
        return tolerance
    noise = 0.0
    for seed in range(DRAWS):
        if always or NOISE_FACTOR * noise < error:
            noise = max(noise, error_of(redrawn(again, wanted[0].device, seed), wanted))
    return (
        tolerance if error <= tolerance else max(tolerance, min(NOISE_FACTOR * noise, NOISE_LIMIT))
    )


def error_of(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return max|a-b| / max|b| over all tensors; NaN in one place only counts as infinite."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape:
            raise VerifyError(f"results differ in shape: {tuple(a.shape)} and {tuple(b.shape)}.")
        if not a.numel():
            continue
        x, y = a.double(), b.double()
        gap = (x - y).abs()
        gap = torch.where((x == y) | (x.isnan() & y.isnan()), torch.zeros_like(gap), gap)
        scale = y.abs().nan_to_num(0.0, posinf=0.0).max().clamp_min(1e-30)
        error = gap.max() / scale
        worst = max(worst, float(error) if bool(error.isfinite()) else NOT_FINITE)
    return worst


def in_words(error: float) -> str:
    """Return an error as people read it."""
    return "NaN or infinite" if error >= NOT_FINITE else f"{error:.3g}"


def differ(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether results are not those of the same computation."""
    if [t.shape for t in got] != [t.shape for t in wanted]:
        return True
    return error_of(got, wanted) > near_ties(wanted)
