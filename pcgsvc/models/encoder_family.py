"""`model=encoder` and `model=minilm`: from settings to a bundle.

In: a `Config`. Out: a `ModelBundle` whose runner gives sentence vectors. Knows nothing of tracing
or graphs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import EmbeddingSpec, ModelBundle
from pcgsvc.models.encoder import Encoder, EncoderDims, preset_dims, refuse_attention
from pcgsvc.models.encoder_checkpoint import EncoderCheckpoint, open_encoder
from pcgsvc.models.files import find_weights, require
from pcgsvc.models.sentence_modules import SentenceModules
from pcgsvc.models.weights import check_explicit, initialize, load_weights

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
    checkpoint = open_encoder(find_weights(model))
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
        spec = EmbeddingSpec(max_length=source.max_position, vocab_size=source.vocab_size)
        return _bundle(module, device, spec)
    module = Encoder(source.dims, device=device, dtype=dtype)
    if not torch_private.shapes_only():
        load_weights(module, source)
    encode = None
    if source.tokenizer is None:
        logger.info("no tokenizer.json, so runner.embed takes token ids only")
    else:
        encode = WordPiece(source.tokenizer, source.sentence).encode
    embedding = EmbeddingSpec(
        max_length=source.max_length,
        vocab_size=source.dims.vocab_size,
        encode=encode,
        pooling=source.sentence.pooling,
        normalize=source.sentence.normalize,
    )
    return _bundle(module, device, embedding)


class WordPiece:
    """The tokenizer of a `tokenizer.json`; its own padding and truncation are switched off.

    Texts get the checkpoint's default prompt, and the case that it asks for.

    Raises:
        ConfigError: the file cannot be read, or the package `tokenizers` is missing.
    """

    def __init__(self, path: Path, sentence: SentenceModules) -> None:
        self._prompt = sentence.prompt
        package = require("tokenizers", "encoder")
        try:
            self._whole = package.Tokenizer.from_file(str(path))
            self._cut = package.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ConfigError(f"model.weights: '{path}' cannot be read: {error}.") from error
        for tokenizer in (self._whole, self._cut):
            tokenizer.no_padding()
            tokenizer.no_truncation()
            _set_case(package.normalizers, tokenizer, sentence)

    def encode(self, text: str, max_length: int | None = None) -> list[int]:
        """Return the ids of a text between its special tokens; of no more than `max_length`."""
        text = self._prompt + text
        if max_length is None:
            return list(self._whole.encode(text).ids)
        self._cut.enable_truncation(max_length)
        return list(self._cut.encode(text).ids)


def _set_case(normalizers: Any, tokenizer: Any, sentence: SentenceModules) -> None:
    """Have a tokenizer make lower case what the checkpoint's settings say, as transformers does."""
    own = tokenizer.normalizer
    if sentence.tokenizer_lower_case is not None and isinstance(own, normalizers.BertNormalizer):
        own.lowercase = sentence.tokenizer_lower_case
        tokenizer.normalizer = own
    if sentence.lower_case:
        steps = [normalizers.Lowercase(), *([own] if own is not None else [])]
        tokenizer.normalizer = normalizers.Sequence(steps)


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
