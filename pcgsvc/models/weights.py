"""Weights of our own models: drawn from a seed, or copied from a checkpoint.

In: a module whose weights are unset. Out: the same module, filled in place. Knows no family and no
file format.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.models.dims import explicit_dims
from pcgsvc.models.sharding import Cut

logger = logging.getLogger(__name__)

_WHOLE: Mapping[str, Cut] = MappingProxyType({})
"""Of a model of which everything is here."""

# ---- random --------------------------------------------------------------------------------------


def initialize(module: nn.Module, seed: int, cuts: Mapping[str, Cut] = _WHOLE) -> None:
    """Draw random weights in place: equal for equal seed, device type, dtype and dimensions.

    `cuts`: of parameters that are shared out among ranks, which together hold the same model.
    """
    generator = generator_for(module, seed)
    for name, parameter in module.named_parameters():
        draw(name, parameter, generator, cuts.get(name))


def generator_for(module: nn.Module, seed: int) -> torch.Generator:
    """Return a generator on the module's device; torch's global one is left alone."""
    return torch.Generator(next(module.parameters()).device).manual_seed(seed)


def draw(
    name: str, parameter: torch.Tensor, generator: torch.Generator, cut: Cut | None = None
) -> None:
    """Draw one parameter in place; of one that is cut the whole, for a moment.

    Matrices get the standard deviation 1 / sqrt(columns), which keeps activations and logits near
    unit variance, so that every layer matters. Vectors are spread around 1, biases around 0, so
    that no two parameters are alike and a mixed-up one shows.
    """
    if cut is not None:
        whole = parameter.new_empty(cut.whole(parameter.shape))
        draw(name, whole, generator)
        parameter.data.copy_(cut.of(whole))
        return
    vector = parameter.ndim == 1
    mean = 1.0 if vector and not name.endswith("bias") else 0.0
    std = 0.1 if vector else parameter.shape[-1] ** -0.5
    parameter.data.normal_(mean, std, generator=generator)


# ---- from a checkpoint ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: complete, of the shapes that its dimensions ask for."""

    path: Path
    """Where it is, for messages."""
    dims: Any
    """Its dimensions, by the names of `model.*`."""
    parts: Mapping[str, Sequence[str]]
    """For each of our parameters, the tensors that are stacked in it, row-wise."""
    read: Callable[[str], Any]
    """Returns one of those tensors on the CPU, in the file's dtype or dequantised to fp32; or what
    reads, when it is indexed as that tensor, no more than it is asked for."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Of a GGUF file: what it says of the model and the tokenizer."""
    stored_dtype: str | None = None
    """What the weights are stored in, where the checkpoint says that of all of them."""

    def tensors(self, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of our parameters by name, on the CPU; of one that is cut, what is here."""
        for name, parts in self.parts.items():
            whole = [(slice(None),)] * len(parts)
            indices = cuts[name].indices() if name in cuts else whole
            tensors = [self.read(part)[at] for part, at in zip(parts, indices, strict=True)]
            yield name, tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def check_explicit(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if the config sets a dimension that the checkpoint contradicts."""
    for name, value in explicit_dims(model, type(checkpoint.dims)).items():
        there = getattr(checkpoint.dims, name)
        # GGUF stores floats in fp32, which 1e-5 and most bases do not fit exactly.
        same = math.isclose(value, there, rel_tol=1e-6) if type(value) is float else value == there
        if not same:
            raise ConfigError(
                f"model.{name}: got {value}, but '{checkpoint.path}' has {there}; "
                f"leave model.{name} out."
            )
    if model.preset != ModelConfig().preset:
        raise ConfigError(
            f"model.preset: got {model.preset!r}, but the dimensions come from "
            f"'{checkpoint.path}'; leave model.preset out."
        )


def load_weights(
    module: nn.Module, checkpoint: Checkpoint, cuts: Mapping[str, Cut] = _WHOLE
) -> None:
    """Copy the checkpoint's tensors into the module, in its dtype and on its device.

    `cuts`: of parameters that are shared out among ranks; no more is read than this rank holds.
    """
    start = time.perf_counter()
    parameters = dict(module.named_parameters())
    total = 0
    for name, tensor in checkpoint.tensors(cuts):
        parameters.pop(name).data.copy_(tensor)
        total += tensor.numel()
    assert not parameters, f"parameters that no checkpoint tensor fills: {list(parameters)}"
    seconds = time.perf_counter() - start
    logger.info("weights: %.1f M values from %s, %.1f s", total / 1e6, checkpoint.path, seconds)
