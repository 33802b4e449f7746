"""How far results may be from each other that were computed in another order.

In: tensors. Out: their relative difference, and the most that it may be.

A fused kernel rounds once where separate ops round many times, and in a deep model such differences
grow: how far is a property of the model, so it is measured, by redrawing the rounding of every op's
half-precision results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc.errors import VerifyError
from pcgsvc.forward.specs import holds_nan
from pcgsvc.torch_private import RecordingMode

TOLERANCE = {
    **dict.fromkeys((torch.float32, torch.float64, torch.complex64, torch.complex128), 1e-4),
    **{torch.float16: 2e-2, torch.complex32: 2e-2, torch.bfloat16: 5e-2},
}
"""max|a-b| / max|b| up to which results that were computed in another order are equal."""

NOISE_FACTOR = 2
"""Of a module's own noise."""

NOISE_LIMIT = 0.5
"""Whatever the noise is; a stale or mixed-up tensor gives an error near 1."""
INTEGERS_DIFFER = NOISE_LIMIT
"""The least error of integers that are not equal: an identifier or a time is large, and another one
is near it. Integers of 16 bits and less may be numbers that were rounded (sound, images)."""
NOT_FINITE = 1e30
"""The error of results of which one is NaN or infinite where the other is not; reports hold it."""

DRAWS = 4
"""How often roundings are drawn: a router between two equal experts moves in some draws only."""


def near_ties(results: Sequence[torch.Tensor]) -> float:
    """Return `TOLERANCE` of results; up to it, a router may hold two experts for equal."""
    dtype = next((t.dtype for t in results if holds_nan(t.dtype)), torch.float32)
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
    dtype = next((t.dtype for t in wanted if holds_nan(t.dtype)), torch.float32)
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
    """Return max|a-b| / max|b| over all tensors; NaN in one place only counts as infinite.

    Of complex numbers real and imaginary parts are compared; of large integers, see
    `INTEGERS_DIFFER`.
    """
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape:
            raise VerifyError(f"results differ in shape: {tuple(a.shape)} and {tuple(b.shape)}.")
        if not a.numel():
            continue
        x, y = _parts(a).double(), _parts(b).double()
        gap = (x - y).abs()
        gap = torch.where((x == y) | (x.isnan() & y.isnan()), torch.zeros_like(gap), gap)
        scale = y.abs().nan_to_num(0.0, posinf=0.0).max().clamp_min(1e-30)
        error = gap.max() / scale
        worst = max(worst, float(error) if bool(error.isfinite()) else NOT_FINITE)
        if not holds_nan(b.dtype) and b.dtype.itemsize > 2 and bool((a != b).any()):
            worst = max(worst, INTEGERS_DIFFER)
    return worst


def spoilt_state(
    after: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    tolerance: float,
) -> list[str]:
    """Return the state that padding rows reached: that differs from a run of the true rows."""
    return [
        name
        for name, tensor in wanted.items()
        if _error_of_change(after[name], tensor, before[name])
        > (tolerance if tensor.dtype in TOLERANCE else 0.0)
    ]


def _error_of_change(got: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor) -> float:
    """Return the error of state after a step, by how much it had to change.

    A count may be large, and what padding rows add to it small. Roundings of the state itself are
    left out, and all of half precision, whose changes are roundings.
    """
    error = error_of([got], [wanted])
    if not error or error == NOT_FINITE or wanted.dtype in HALF or not holds_nan(wanted.dtype):
        return error
    new, old, found = (_parts(t).double().nan_to_num(0, 0, 0) for t in (wanted, before, got))
    rounding = 8 * torch.finfo(wanted.dtype).eps * float(new.abs().max())
    gap, change = float((found - new).abs().max()) - rounding, float((new - old).abs().max())
    return max(error, gap / max(change, 1e-30)) if gap > 0 else error


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_words(error: float) -> str:
    """Return an error as people read it."""
    return "NaN or infinite" if error >= NOT_FINITE else f"{error:.3g}"


def differ(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether results are not those of the same computation."""
    if [t.shape for t in got] != [t.shape for t in wanted]:
        return True
    return error_of(got, wanted) > near_ties(wanted)


HALF = (torch.float16, torch.bfloat16)

_MOVES = frozenset(f"aten::{name}" for name in ("clone", "cat", "index", "embedding", "gather"))
"""Ops that copy values as they are."""


class Redrawn(RecordingMode):
    """A block in which each half-precision result of an op is off by up to half a unit of rounding.

    Writes in place, views and copies are left alone, and so is what a splitting op computes.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the op, and redraw the last bits of what it computed."""
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable or schema.name in _MOVES:
            return result
        if any(r.alias_info is not None for r in schema.returns):
            return result
        return pytree.tree_map_only(torch.Tensor, self._redraw, result)

    def _redraw(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in HALF:
            return tensor
        draw = torch.rand(tensor.shape, generator=self._generator, device=tensor.device)
        factor = 1 + (draw - 0.5) * torch.finfo(tensor.dtype).eps
        return (tensor * factor).to(tensor.dtype)


def redrawn(
    call: Callable[[], list[torch.Tensor]], device: torch.device, seed: int = 0
) -> list[torch.Tensor]:
    """Return what `call` gives when its roundings fall otherwise, as `seed` draws them."""
    with Redrawn(seed, device):
        return call()
