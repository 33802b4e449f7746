"""The model families by name, and the one door to them.

In: a `Config`. Out: a `ModelBundle`. Knows nothing of tracing or graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config, ModelConfig, to_dict
from pcgsvc.errors import ConfigError, near
from pcgsvc.forward.bundle import ModelBundle, Tokenizer
from pcgsvc.forward.process import refuse_autocast
from pcgsvc.models import encoder, encoder_family, llama_moe, two_regions
from pcgsvc.models import module as users
from pcgsvc.models.checkpoint import open_checkpoint
from pcgsvc.models.files import find_weights
from pcgsvc.models.hf import family as hf
from pcgsvc.models.language import language_bundle
from pcgsvc.models.llama import Llama
from pcgsvc.models.llama_dims import LlamaDims, preset_dims
from pcgsvc.models.sharding import cuts_of, in_words, shard_dims
from pcgsvc.models.tokenizer import GgufTokenizer, unsupported
from pcgsvc.models.weights import Checkpoint, check_explicit, initialize, load_weights
from pcgsvc.ops.expert_group import require_group, tensor_place

logger = logging.getLogger(__name__)

_SHARED_OUT = ("llama", "smollm2", "hf", "llama_moe")
"""Families that `parallel.tensor` shares out among ranks."""


@dataclass(frozen=True)
class Family:
    """One entry of the table."""

    settings: frozenset[str]
    """The `model.*` settings that it reads, `name` aside."""
    validate: Callable[[Config], object]
    """Checks what the settings say, without building anything."""
    build: Callable[[Config, torch.device, Any], ModelBundle]
    """Makes the model. For a plan it is called where tensors have no values: it then reads no
    checkpoint and checks no result (`torch_private.shapes_only`)."""


def families() -> dict[str, Family]:
    """Return the model families by the name that `model=` takes."""
    own = {"target", "kwargs", "inputs"}  # of model=module
    every = frozenset(f.name for f in fields(ModelConfig)) - {"name"} - hf.SETTINGS - own
    dense = every - {"moe"}
    return {
        "llama": Family(dense, _open, _build),
        "smollm2": Family(dense, _open, _build),
        "hf": Family(hf.SETTINGS, hf.validate, hf.build),
        "llama_moe": Family(every - {"weights"}, llama_moe.dims_of, _build_llama_moe),
        "encoder": Family(encoder.SETTINGS, encoder_family.open_of, encoder_family.build),
        "minilm": Family(
            encoder.SETTINGS - {"preset"}, encoder_family.open_of, encoder_family.build
        ),
        "module": Family(frozenset(own | {"weights"}), users.validate, users.build),
        "two_regions": Family(frozenset({"hidden_size"}), two_regions.validate, two_regions.build),
    }


def validate_model(config: Config) -> None:
    """Check everything about the model that can be judged without building it.

    That is: the family, which settings it reads, presets and dimensions, and a checkpoint's
    existence, architecture, completeness and agreement with explicit dimensions.

    Raises:
        ConfigError: naming the setting, what was got and what to do.
    """
    family = _find_family(config.model)
    if config.parallel.tensor > 1 and config.model.name not in _SHARED_OUT:
        raise ConfigError(
            f"parallel.tensor: got {config.parallel.tensor}, but model={config.model.name} does "
            f"not read it. Models that do: {', '.join(_SHARED_OUT)}."
        )
    family.validate(config)


def build_model(config: Config, *, device: torch.device, dtype: torch.dtype | None) -> ModelBundle:
    """Build the model of `config.model`; see `ModelBundle` for its state.

    Random weights come from `config.seed`. `dtype=None` (`model=module` only): as it is made.

    Raises:
        ConfigError: as `validate_model`; or the caller is inside `torch.autocast`, or there is no
            process group where several processes share the model.
    """
    refuse_autocast(device)
    if not torch_private.shapes_only():
        require_group(config, device)
    bundle = _find_family(config.model).build(config, device, dtype)
    if isinstance(bundle.module, torch.nn.Module):
        bundle.module.eval().requires_grad_(False)
    return bundle


def _find_family(model: ModelConfig) -> Family:
    table = families()
    family = table.get(model.name)
    if family is None:
        raise ConfigError(
            f"model: got {model.name!r}{near(model.name, table)} Choices: {', '.join(table)}."
        )
    unset = ModelConfig()
    for f in fields(ModelConfig):
        value = getattr(model, f.name)
        if f.name in family.settings | {"name"} or value == getattr(unset, f.name):
            continue
        name = f.name
        if is_dataclass(value):  # a group: name the setting in it
            name, value = next(
                (f"{name}.{k}", v)
                for k, v in to_dict(value).items()
                if v != to_dict(getattr(unset, name))[k]
            )
        raise ConfigError(
            f"model.{name}: got {value!r}, but model={model.name} does not read it. "
            f"It reads: {', '.join('model.' + name for name in sorted(family.settings))}."
        )
    return family


# ---- language models -----------------------------------------------------------------------------


def _open(config: Config) -> LlamaDims | Checkpoint:
    """Return the preset's dimensions, or the checkpoint that the settings name."""
    model = config.model
    if model.name == "llama" and model.weights is None:
        dims = preset_dims(model)
        shard_dims(dims, config.parallel.tensor)
        return dims
    path = find_weights(model)
    if model.name == "smollm2" and path.suffix != ".gguf":
        raise ConfigError(
            f"model.weights: got '{path}'; model=smollm2 needs a .gguf file, which has the "
            "tokenizer in it. Use model=llama for other checkpoints."
        )
    checkpoint = open_checkpoint(path)
    check_explicit(model, checkpoint)
    shard_dims(checkpoint.dims, config.parallel.tensor)
    reason = unsupported(checkpoint.metadata)
    if model.name == "smollm2" and reason is not None:
        raise ConfigError(
            f"model.weights: '{checkpoint.path}': {reason}; model=smollm2 needs a tokenizer, "
            "model=llama does without."
        )
    return checkpoint


def _build(config: Config, device: torch.device, dtype: torch.dtype) -> ModelBundle:
    """Return a Llama, with random weights from `config.seed` or the checkpoint's."""
    source, place = _open(config), tensor_place(config)
    dims = source if isinstance(source, LlamaDims) else source.dims
    module = Llama(dims, device=device, dtype=dtype, ranks=place.world)
    if isinstance(source, LlamaDims):
        initialize(module, config.seed, cuts_of(dims, place))
        return _bundle(module)
    if not torch_private.shapes_only():
        load_weights(module, source, cuts_of(dims, place))
    reason = unsupported(source.metadata)
    if reason is not None:
        logger.info("no tokenizer, so prompts cannot be served: %s", reason)
    bundle = _bundle(module, GgufTokenizer(source.metadata) if reason is None else None)
    bundle.stored_dtype = source.stored_dtype
    return bundle


def _build_llama_moe(config: Config, device: torch.device, dtype: torch.dtype) -> ModelBundle:
    return _bundle(llama_moe.build(config, device, dtype))


def _bundle(module: Llama, tokenizer: Tokenizer | None = None) -> ModelBundle:
    dims, ranks = module.dims, module.ranks
    here = shard_dims(dims, ranks).attention_spec()
    bundle = language_bundle(module, here, dims.vocab_size, tokenizer=tokenizer)
    if ranks > 1:
        bundle.parallel = in_words(
            is_head_split=module.splits_head, kv_heads=dims.num_kv_heads, world=ranks
        )
    return bundle
