"""`pcgsvc.true_rows`: which rows of a step are not padding, as a tensor that graphs can read.

In: a row-wise tensor. Out: a mask. It is an ordinary op of a region, not a boundary: it reads the
true row count from the device, where the runner rewrites it before every replay.
"""

from __future__ import annotations

import torch

from pcgsvc.errors import ConfigError
from pcgsvc.ops.context import find_context

_LIBRARY = torch.library.Library("pcgsvc", "FRAGMENT")
_LIBRARY.define("true_rows(Tensor x) -> Tensor")


def _true_rows(x: torch.Tensor) -> torch.Tensor:
    rows, context = x.shape[0], find_context()
    if context is None or rows != context.padded_tokens:
        return torch.ones(rows, dtype=torch.bool, device=x.device)
    return torch.arange(rows, device=x.device) < context.num_tokens_tensor


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:1], dtype=torch.bool)


_LIBRARY.impl("true_rows", _true_rows, "CompositeExplicitAutograd")
torch.library.register_fake("pcgsvc::true_rows", _fake, lib=_LIBRARY)


def true_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a mask [T] that is False for the padding rows of a step.

    For state that a forward keeps over all rows, such as a running sum: mask what goes into it with
    `torch.where` (0 * NaN is NaN). Outside a runner every row is a true one.

    Args:
        x: a tensor whose first dimension is the step's rows, T.

    Raises:
        ConfigError: it is no such tensor.
    """
    if not isinstance(x, torch.Tensor) or not x.dim():
        raise ConfigError(
            f"true_rows: got {x!r}; a tensor with rows is needed: pcgsvc.true_rows(x)."
        )
    mask: torch.Tensor = torch.ops.pcgsvc.true_rows(x)
    return mask
