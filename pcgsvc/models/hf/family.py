"""`model=hf`: from the settings to a `ModelBundle`.

In: a `Config`. Out: a bundle whose attention is `pcgsvc::attention`. The steps: the config alone is
judged (`source`), one forward is watched on the meta device (`probe`), weights are made or loaded
(`weights`), and the result is compared with transformers' own forward (`reference`).
"""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.config.devices import device_of
from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.models.hf import attention, probe, reference, sharding, weights
from pcgsvc.models.hf.generation import sampling_of
from pcgsvc.models.hf.source import Source, open_source
from pcgsvc.models.hf.tokenizer import has_tokenizer, load_tokenizer
from pcgsvc.models.language import language_bundle
from pcgsvc.models.sharding import check_heads, in_words
from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.expert_group import Place, tensor_place

logger = logging.getLogger(__name__)

SETTINGS = frozenset({"path", "config", "reference_check"})
"""The `model.*` settings that it reads."""
_SHALLOW = 4
"""Layers of the model that stands for a checkpoint loaded by parts."""


def validate(config: Config) -> None:
    """Check everything that needs no weights: the config, and what the model asks of attention."""
    source = open_source(config.model)
    _specs(source, tensor_place(config))
    if config.prompt is not None and not has_tokenizer(source):
        raise source.refuse(
            "prompt is set, but there is no tokenizer beside it; leave the prompt out, or name a "
            "checkpoint with one as model.path."
        )


def build(config: Config, device: torch.device, dtype: torch.dtype) -> ModelBundle:
    """Return the model with its tokenizer, compared with transformers unless that is off."""
    source = open_source(config.model)
    tokenizer = load_tokenizer(source)
    if getattr(source.config, "auto_map", None):
        logger.warning(
            "%s: '%s' asks for code of its own (auto_map), which is not run; transformers' own "
            "class is used",
            source.setting,
            source.label,
        )
    attention.register()
    place, values = tensor_place(config), not torch_private.shapes_only()
    by_parts = place.world > 1 and source.path is not None and values
    if by_parts and (others := weights.renamed(source)):
        by_parts = False
        whole = (
            f"{source.setting}: '{source.label}' is loaded whole by each rank, and then cut: its "
            f"checkpoint has {len(others)} parameters under other names ({others[0]}, …)"
        )
        if config.strict:
            raise ConfigError(f"strict=true, and {whole}")
        logger.warning("%s", whole)
    if by_parts and config.model.reference_check:
        _build(_shallow(source), config, place, device, dtype)
    module, specs = (_load_parts if by_parts else _build)(source, config, place, device, dtype)
    bundle = language_bundle(
        module,
        specs.here,
        _vocab_size(source),
        tokenizer=tokenizer,
        sampling=sampling_of(source),
        facts=source.facts(),
    )
    stored = getattr(source.config, "dtype", None)
    bundle.stored_dtype = None if stored is None else str(stored).removeprefix("torch.")
    bundle.plan_notes = _experts_note(config, source, device, dtype)
    if place.world > 1:
        head: Any = module.model.get_output_embeddings()  # type: ignore[operator]
        bundle.parallel = in_words(
            is_head_split=isinstance(head, sharding.RowsOfLinear),
            kv_heads=specs.whole.num_kv_heads,
            world=place.world,
        )
    return bundle


class _Specs(NamedTuple):
    """What attention is in the whole model, and on one rank."""

    whole: AttentionSpec
    here: AttentionSpec


def _build(
    source: Source, config: Config, place: Place, device: torch.device, dtype: torch.dtype
) -> tuple[attention.HfCausalLM, _Specs]:
    """Return the model, or one rank's part of it, and its attention; made whole at first."""
    with torch_private.real_tensors():  # it watches a forward on the meta device
        specs = _specs(source, place)
    model = weights.build(
        source, attention.IMPLEMENTATION, device=device, dtype=dtype, seed=config.seed
    )
    if specs is None:
        spec = probe.spec_of_model(source, model)
        specs = _Specs(spec, spec)
    expected = (
        reference.take(source, model, specs.whole, _vocab_size(source), config.seed)
        if config.model.reference_check and not torch_private.shapes_only()
        else None
    )
    weights.freeze_frequencies(model)
    if place.world > 1:
        sharding.shard(source, model, specs.whole, place)
    module = attention.HfCausalLM(model, attention.first_position(model))
    if expected is not None:
        kind = find_backend(config.attention.name)
        error = reference.check(source, expected, module, specs.here, kind, dtype=dtype)
        logger.info("logits equal transformers' own within %.2g", error)
    return module, specs


def _load_parts(
    source: Source, config: Config, place: Place, device: torch.device, dtype: torch.dtype
) -> tuple[attention.HfCausalLM, _Specs]:
    """Return one rank's part of a checkpoint's model, and its attention."""
    specs = _specs(source, place)
    assert specs is not None, "ranks are refused a model whose attention is not known"
    shard = functools.partial(sharding.shard, source, spec=specs.whole, place=place)
    model = weights.load_shards(source, attention.IMPLEMENTATION, shard, device=device, dtype=dtype)
    weights.freeze_frequencies(model)
    return attention.HfCausalLM(model, attention.first_position(model)), specs


def _specs(source: Source, place: Place) -> _Specs | None:
    """Return what attention is; None: the forward needs real tensors to tell.

    Raises:
        ConfigError: the model is refused, or cannot be shared out.
    """
    whole = probe.spec_of_source(source)
    if place.world == 1:
        return None if whole is None else _Specs(whole, whole)
    if whole is None or source.gguf is not None:
        reason = "a .gguf file" if whole is not None else "a model whose forward reads values"
        raise source.refuse(f"parallel.tensor={place.world} does not go with {reason}.")
    names = ("num_attention_heads", "num_key_value_heads")
    check_heads(place.world, whole.num_heads, whole.num_kv_heads, names)
    shard = functools.partial(sharding.shard, source, spec=whole, place=place)
    here = probe.spec_of_source(source, shard)
    assert here is not None, "the whole model's forward read no values"
    return _Specs(whole, here)


def _shallow(source: Source) -> Source:
    """Return the model with random weights and few layers, to be compared with transformers.

    A checkpoint that is loaded by parts is nowhere whole. What this cannot see are layers that
    differ from the first ones.
    """
    config = copy.deepcopy(source.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = count = min(_SHALLOW, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    return replace(source, config=config, path=None)


def _vocab_size(source: Source) -> int:
    return int(source.config.get_text_config(decoder=True).vocab_size)


def _experts_note(
    config: Config, source: Source, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Say where a plan's experts differ from those of a run on the device that it is for."""
    here, there = (weights.experts_for(d, dtype) for d in (device, device_of(config)))
    if here == there or not weights.has_experts(source.config):
        return []
    return [
        f"experts: planned as {here}, since {there} has no form for the CPU's tensors; a run uses "
        f"{there}, so the ops, hashes and memory of regions with experts differ from the plan's"
    ]
