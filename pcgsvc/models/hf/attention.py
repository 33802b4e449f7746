"""How a transformers model runs here: flat tokens in, our attention op inside, logits out.

In: a causal language model of transformers. Out: `HfCausalLM`, whose forward takes what every
language model of pcgsvc takes. Knows nothing of checkpoints, probing or graphs.

transformers looks the attention function up by the name in its config, in a registry that is open
to others: ours is called `IMPLEMENTATION`. No mask function is registered under that name, so the
models make no mask: the op knows from the step's metadata which keys a row sees.

Shapes: T = tokens (rows), H = query heads, K = KV heads, D = features of a query or key,
V = features of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pcgsvc import torch_private
from pcgsvc.models.files import require
from pcgsvc.ops import attention as _attention_op  # noqa: F401 - registers pcgsvc::attention

IMPLEMENTATION = "pcgsvc"
"""What `attn_implementation` is called in transformers."""
_MAKER = "create_position_ids_from_input_ids"
"""What transformers calls the method that makes positions from tokens, in all models with one."""


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; twice is fine."""
    require("transformers", "hf").AttentionInterface.register(IMPLEMENTATION, attend)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from query [1, H, T, D] to key [1, K, T, D] and value [1, K, T, V], and the KV cache.

    Values narrower than keys (multi-head latent attention) are padded with zeros in the cache. What
    `settings` say of scale, window and softcap is in the backend's `AttentionSpec`, which `probe`
    learned from these very calls.

    Returns:
        [1, T, H, V], and no attention weights.
    """
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    width = v.shape[-1]
    if width != k.shape[-1]:
        v = functional.pad(v, (0, k.shape[-1] - width))
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    torch.ops.pcgsvc.attention(q, k, v, output, module.layer_idx)
    return output[..., :width].unsqueeze(0), None


def first_position(model: nn.Module) -> int:
    """Return which position transformers gives the first token of a sequence.

    0, but RoBERTa and its relatives count from `padding_idx + 1`: an embedding of theirs makes
    positions from the tokens, and is called here for one token. Runs no forward of the model.
    """
    for module in model.modules():
        maker: Callable[..., torch.Tensor] | None = getattr(module, _MAKER, None)
        padding: Any = getattr(module, "padding_idx", None)
        if maker is not None and isinstance(padding, int):
            with torch_private.real_tensors():
                return int(maker(torch.full((1, 1), padding + 1, device="cpu"), padding))
    return 0


class HfCausalLM(nn.Module):
    """A causal language model of transformers as (input_ids [T], positions [T]) -> logits [T, V].

    `partition.compile_modules` and the names of parameters see it under `model`.
    """

    def __init__(self, model: nn.Module, first_position: int = 0) -> None:
        """`first_position`: what transformers calls position 0, see `first_position`."""
        super().__init__()
        self.model = model
        self.first_position = first_position

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocab] of input_ids [T] at positions [T], both int64."""
        if self.first_position:
            positions = positions + self.first_position
        result = self.model(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        logits: torch.Tensor = result.logits.squeeze(0)
        return logits
