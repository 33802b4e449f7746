"""A BERT checkpoint on disk, as sentence-transformers lays it out.

In: a folder with `model.safetensors` and `config.json`, and beside them, where there are any,
`tokenizer.json` and the files of `sentence_modules`. Out: `EncoderCheckpoint`, of which everything
but the tensors' values has been checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcgsvc.errors import ConfigError
from pcgsvc.models.dims import stated_dims
from pcgsvc.models.encoder import Encoder, EncoderDims
from pcgsvc.models.files import Shape, check_stated, check_tensors, open_safetensors, read_json
from pcgsvc.models.sentence_modules import SentenceModules, read_sentence_modules
from pcgsvc.models.weights import Checkpoint

_DIMS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "norm_eps": "layer_norm_eps",
}
"""Our dimension: its name in config.json."""
_STATED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
}
"""What config.json must say, or leave out."""
_WHOLE = {
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
_LAYER = {
    "qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "attention_out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "inner": ("intermediate.dense",),
    "outer": ("output.dense",),
    "output_norm": ("output.LayerNorm",),
}
"""Our name of a layer's part: transformers' names of what is stacked in it, row-wise."""
_UNUSED = ("pooler.", "cls.", "embeddings.position_ids")
"""Tensors of a BERT that no sentence vector depends on."""


@dataclass(frozen=True, kw_only=True)
class EncoderCheckpoint(Checkpoint):
    """An opened checkpoint of an encoder; `path` is its folder."""

    dims: EncoderDims
    max_length: int
    """Longest text in tokens, special ones included, as the checkpoint states it."""
    sentence: SentenceModules
    """What is done with texts before the encoder, and with its rows behind it."""
    tokenizer: Path | None
    """The tokenizer's file, if there is one."""


def open_encoder(weights: str | Path) -> EncoderCheckpoint:
    """Read a checkpoint's headers and check it whole; no tensor is read.

    Raises:
        ConfigError: the path, architecture, pooling, or the set or shape of the tensors is not
            what an encoder needs, or a package to read it is missing.
    """
    path = Path(weights).expanduser()
    if not path.exists():
        raise ConfigError(
            f"model.weights: '{path}' does not exist; name a folder with model.safetensors and "
            "config.json, or leave it out for random weights. all-MiniLM-L6-v2 is fetched by "
            "scripts/fetch-minilm and found by model=minilm."
        )
    sentence = read_sentence_modules(path if path.is_dir() else path.parent)
    folder = sentence.folder if path.is_dir() else path.parent
    file = folder / "model.safetensors" if path.is_dir() else path
    if file.suffix != ".safetensors" or not file.is_file():
        raise ConfigError(
            f"model.weights: got '{path}'; a .safetensors file is needed, or a folder with "
            "model.safetensors."
        )
    dims = _dims(folder / "config.json")
    handle = open_safetensors(file, "encoder")
    names = {name.removeprefix("bert."): name for name in handle.keys()}  # noqa: SIM118
    names = {k: v for k, v in names.items() if not k.startswith(_UNUSED)}
    _check_whole(file, dims, handle, names)
    parts = {name: parts_of(name) for name in _own_shapes(dims)}
    tokenizer = folder / "tokenizer.json"
    return EncoderCheckpoint(
        path=folder,
        dims=dims,
        max_length=min(sentence.max_length or dims.max_position, dims.max_position),
        sentence=sentence,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        parts=parts,
        read=lambda part: handle.get_tensor(names[part]),
    )


def parts_of(name: str) -> list[str]:
    """Return transformers' names of what is stacked in one of our parameters."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return [f"{_WHOLE[module]}.{kind}"]
    _, number, part = module.split(".")
    return [f"encoder.layer.{number}.{theirs}.{kind}" for theirs in _LAYER[part]]


def _dims(path: Path) -> EncoderDims:
    data = read_json(path, dict)
    check_stated(path, data, _STATED, "this encoder")
    try:
        values = {ours: data[theirs] for ours, theirs in _DIMS.items()}
    except KeyError as error:
        raise ConfigError(f"model.weights: '{path}' does not state {error}.") from None
    return stated_dims(EncoderDims, path, **values)


def _own_shapes(dims: EncoderDims) -> dict[str, Shape]:
    """Return the shape of each of our parameters."""
    module = Encoder(dims, device=torch.device("meta"), dtype=torch.float32)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _check_whole(file: Path, dims: EncoderDims, handle: Any, names: dict[str, str]) -> None:
    needed: dict[str, Shape] = {}
    for name, (rows, *others) in _own_shapes(dims).items():
        parts = parts_of(name)
        needed |= dict.fromkeys(parts, (rows // len(parts), *others))
    there = {n: tuple(handle.get_slice(own).get_shape()) for n, own in names.items()}
    model = f"An encoder of {dims.num_layers} layers"
    check_tensors(file, needed, there, own_name=lambda name: names.get(name, name), model=model)
