"""`model=hf`: from the settings to a `ModelBundle`.

In: a `Config`. Out: a bundle whose attention is `pcgsvc::attention`. The steps: the config alone is
judged (`source`), one forward is watched on the meta device (`probe`), weights are made or loaded
(`weights`), and the result is compared with transformers' own forward (`reference`).
"""

from __future__ import annotations

import logging

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.config.devices import device_of
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.models.hf import attention, probe, reference, weights
from pcgsvc.models.hf.generation import sampling_of
from pcgsvc.models.hf.positions import first_position
from pcgsvc.models.hf.source import Source, open_source
from pcgsvc.models.hf.tokenizer import has_tokenizer, load_tokenizer
from pcgsvc.models.language import language_bundle
from pcgsvc.ops.backends import find_backend

logger = logging.getLogger(__name__)

SETTINGS = frozenset({"path", "config", "reference_check"})
"""The `model.*` settings that it reads."""


def validate(config: Config) -> None:
    """Check everything that needs no weights: the config, and what the model asks of attention."""
    source = open_source(config.model)
    probe.spec_of_source(source)
    if config.prompt is not None and not has_tokenizer(source):
        raise source.refuse(
            "prompt is set, but there is no tokenizer beside it; leave the prompt out, or name a "
            "checkpoint with one as model.path."
        )


def build(config: Config, device: torch.device, dtype: torch.dtype) -> ModelBundle:
    """Return the model with its tokenizer, compared with transformers unless that is off."""
    source = open_source(config.model)
    with torch_private.real_tensors():  # it watches a forward on the meta device
        known = probe.spec_of_source(source)
    tokenizer = load_tokenizer(source)
    if getattr(source.config, "auto_map", None):
        logger.warning(
            "%s: '%s' asks for code of its own (auto_map), which is not run; transformers' own "
            "class is used",
            source.setting,
            source.label,
        )
    attention.register()
    model = weights.build(
        source, attention.IMPLEMENTATION, device=device, dtype=dtype, seed=config.seed
    )
    spec = known if known is not None else probe.spec_of_model(source, model)
    vocab = source.config.get_text_config(decoder=True).vocab_size
    expected = (
        reference.take(source, model, spec, vocab, config.seed)
        if config.model.reference_check and not torch_private.shapes_only()
        else None
    )
    weights.freeze_frequencies(model)
    module = attention.HfCausalLM(model, first_position(model))
    if expected is not None:
        kind = find_backend(config.attention.name)
        error = reference.check(source, expected, module, spec, kind, dtype=dtype)
        logger.info("logits equal transformers' own within %.2g", error)
    bundle = language_bundle(
        module,
        spec,
        vocab,
        tokenizer=tokenizer,
        sampling=sampling_of(source),
        facts=source.facts(),
    )
    stored = getattr(source.config, "dtype", None)
    bundle.stored_dtype = None if stored is None else str(stored).removeprefix("torch.")
    bundle.plan_notes = _experts_note(config, source, device, dtype)
    return bundle


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
