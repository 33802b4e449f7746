"""`model=encoder` and `model=minilm`: from settings to a bundle.

In: a `Config`. Out: a `ModelBundle` whose runner gives sentence vectors. Knows nothing of tracing
or graphs.
"""

from __future__ import annotations

import logging

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import EmbeddingSpec, ModelBundle
from pcgsvc.models import minilm
from pcgsvc.models.checkpoint import check_explicit
from pcgsvc.models.encoder import Encoder, EncoderDims, initialize, preset_dims, refuse_attention
from pcgsvc.models.encoder_checkpoint import EncoderCheckpoint, open_encoder

logger = logging.getLogger(__name__)


def open_of(config: Config) -> EncoderDims | EncoderCheckpoint:
    """Return the preset's dimensions, or the checkpoint that the settings name.

    Raises:
        ConfigError: naming the setting, what was got and what to do.
    """
    refuse_attention(config)
    model = config.model
    if model.name == "encoder" and model.weights is None:
        return preset_dims(model)
    path = minilm.find_weights(model)
    checkpoint = open_encoder(path)
    check_explicit(model, checkpoint)
    if model.name == "minilm" and checkpoint.tokenizer is None:
        raise ConfigError(
            f"model.weights: '{checkpoint.path}' has no tokenizer.json; model=minilm needs a "
            "tokenizer, model=encoder does without."
        )
    return checkpoint


def build(config: Config, device: torch.device, dtype: torch.dtype) -> ModelBundle:
    """Return the model, with random weights from `config.seed` or the checkpoint's."""
    source = open_of(config)
    if isinstance(source, EncoderDims):
        module = Encoder(source, device=device, dtype=dtype)
        initialize(module, config.seed)
        return _bundle(module, device, EmbeddingSpec(max_length=source.max_position))
    module = Encoder(source.dims, device=device, dtype=dtype)
    if not torch_private.shapes_only():
        source.load_into(module)
    encode = None
    if source.tokenizer is None:
        logger.info("no tokenizer.json, so runner.embed takes no texts; embed_ids takes ids")
    else:
        encode = minilm.WordPiece(source.tokenizer).encode
    return _bundle(module, device, EmbeddingSpec(max_length=source.max_length, encode=encode))


def _bundle(module: Encoder, device: torch.device, embedding: EmbeddingSpec) -> ModelBundle:
    dims = module.dims

    def make_inputs(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Random tokens of random types at the positions 0, 1, …, again from 0 past the last."""

        def draw(limit: int) -> torch.Tensor:
            return torch.randint(limit, (rows,), generator=generator, device=generator.device)

        ids, types = draw(dims.vocab_size), draw(dims.type_vocab_size)
        return {
            "input_ids": ids.to(device),
            "positions": torch.arange(rows, device=device) % dims.max_position,
            "token_types": types.to(device),
        }

    return ModelBundle(
        module=module,
        make_inputs=make_inputs,
        dynamic_dims={"input_ids": 0, "positions": 0, "token_types": 0},
        embedding=embedding,
    )
