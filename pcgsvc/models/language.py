"""What every language model's bundle has in common: flat tokens in, logits out.

In: a module. Out: a `ModelBundle`. Knows nothing of where the module comes from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pcgsvc.forward.bundle import ModelBundle, Tokenizer
from pcgsvc.forward.sampling import Sampling
from pcgsvc.ops.attention import AttentionSpec


def language_bundle(
    module: nn.Module,
    attention: AttentionSpec,
    vocab_size: int,
    *,
    tokenizer: Tokenizer | None = None,
    sampling: Sampling | None = None,
    facts: dict[str, Any] | None = None,
) -> ModelBundle:
    """Return the bundle of a module of (input_ids [T], positions [T]) -> logits [T, vocab].

    Args:
        module: on its device.
        attention: what its layers need.
        vocab_size: one above the largest token id.
        tokenizer: None: prompts cannot be served.
        sampling: see `ModelBundle.sampling`.
        facts: see `ModelBundle.facts`.
    """
    device = next(module.parameters()).device

    def make_inputs(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Random tokens at the positions 0, 1, …, again from 0 past the last one."""
        ids = torch.randint(vocab_size, (rows,), generator=generator, device=generator.device)
        positions = torch.arange(rows, device=device) % attention.max_position
        return {"input_ids": ids.to(device), "positions": positions}

    return ModelBundle(
        module=module,
        make_inputs=make_inputs,
        dynamic_dims={"input_ids": 0, "positions": 0},
        attention=attention,
        tokenizer=tokenizer,
        is_language_model=True,
        vocab_size=vocab_size,
        sampling=sampling,
        facts=facts or {},
    )
