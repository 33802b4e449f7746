"""Which position transformers gives the first token of a sequence, if the caller gives none.

In: a transformers model, on any device. Out: an int. Runs no forward of it.

RoBERTa and its relatives count from `padding_idx + 1`: an embedding of theirs makes positions from
the tokens, and is called here for one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pcgsvc import torch_private

_MAKER = "create_position_ids_from_input_ids"
"""What transformers calls the method, in all of these models."""


def first_position(model: nn.Module) -> int:
    """Return the position of the first token; 0 but for models that make theirs from tokens."""
    for module in model.modules():
        maker: Callable[..., torch.Tensor] | None = getattr(module, _MAKER, None)
        padding: Any = getattr(module, "padding_idx", None)
        if maker is not None and isinstance(padding, int):
            with torch_private.real_tensors():
                return int(maker(torch.full((1, 1), padding + 1, device="cpu"), padding))
    return 0
