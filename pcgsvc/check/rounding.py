"""How much a computation moves when every op rounds a little differently.

In: a call. Out: the same call with the rounding of its half-precision results redrawn. A fused
kernel rounds once where separate ops round many times, and in a deep model such differences grow:
how far is a property of the model, so it is measured. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc.torch_private import RecordingMode

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
