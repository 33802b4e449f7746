"""What a mask of transformers' is: causal, a sliding window, or something that we do not have.

In: a mask as transformers describes it, a function of (batch, head, query, key) that says whether
the query's row sees the key. Out: its window, or a `MaskError` with the reason. Knows nothing of
models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MaskError(Exception):
    """The mask is neither causal nor a sliding window; the message continues a sentence."""


def window(mask_function: Callable[..., Any], length: int) -> int | None:
    """Return how many keys a row sees at most, itself included; None: all up to itself.

    Args:
        mask_function: of int64 tensors on the CPU.
        length: longest sequence; a window of that size is none.

    Raises:
        MaskError: it is another mask, or depends on data. Rows are sampled: the first ones, those
            around every power of two, and the last.
    """
    keys = torch.arange(length, device="cpu")
    found = int(_seen(mask_function, length - 1, keys).sum())
    rows = {*range(min(16, length)), length - 1}
    for power in (1 << n for n in range(4, length.bit_length())):
        rows |= {row for row in (power - 1, power, power + 1) if row < length}
    for row in sorted(rows):
        expected = (keys <= row) & (keys > row - found)
        if found < 1 or not torch.equal(_seen(mask_function, row, keys), expected):
            raise MaskError(
                "is neither causal nor a sliding window (chunked attention, a prefix, or the "
                f"like): row {row} sees other keys than the {found} up to itself"
            )
    return found if found < length else None


def _seen(mask_function: Callable[..., Any], row: int, keys: torch.Tensor) -> torch.Tensor:
    """Return which keys a row sees, bool [len(keys)]."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        seen = torch.as_tensor(mask_function(zero, zero, zero + row, keys))
        return seen.expand(len(keys)).bool().cpu()
    except Exception as error:
        raise MaskError(
            f"depends on data; only causal masks and sliding windows are supported ({error})"
        ) from error
