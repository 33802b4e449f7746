"""A Llama checkpoint on disk: its dimensions, and its tensors under our fused names.

In: a path to `.gguf`, `.safetensors` or a directory with safetensors. Out: a `Checkpoint`, of which
everything but the tensors' values has been checked. Knows nothing of the two file formats.
"""

from __future__ import annotations

from pathlib import Path

import torch

from pcgsvc.errors import ConfigError
from pcgsvc.models.files import Shape, check_tensors
from pcgsvc.models.gguf_llama import GgufLlama
from pcgsvc.models.llama_dims import LlamaDims
from pcgsvc.models.safetensors_llama import SafetensorsLlama
from pcgsvc.models.weights import Checkpoint

SUFFIXES = (".gguf", ".safetensors")
"""What a checkpoint file's name may end in."""

_LAYER_PARTS = {
    "input_norm": ("input_layernorm",),
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""Our fused name of a layer's weight: transformers' names of what is stacked in it, row-wise."""


def open_checkpoint(weights: str | Path) -> Checkpoint:
    """Read a checkpoint's header and check it whole; no tensor is read but a duplicate head.

    Raises:
        ConfigError: the path, suffix, architecture, metadata, or the set or shape of the tensors
            is not what a Llama needs, or a package to read it is missing.
    """
    path = Path(weights).expanduser()
    if not path.exists():
        raise ConfigError(
            f"model.weights: '{path}' does not exist; name a .gguf or .safetensors file, "
            "or leave it out for random weights."
        )
    if not path.is_dir() and path.suffix not in SUFFIXES:
        raise ConfigError(
            f"model.weights: '{path}' ends in {path.suffix!r}. Choices: {', '.join(SUFFIXES)}, "
            "or a directory with model.safetensors."
        )
    if path.suffix == ".gguf" and path.is_dir():
        raise ConfigError(f"model.weights: '{path}' is a directory; name the .gguf file itself.")
    source: GgufLlama | SafetensorsLlama
    try:
        source = GgufLlama(path) if path.suffix == ".gguf" else SafetensorsLlama(path)
    except OSError as error:
        raise ConfigError(f"model.weights: '{path}' cannot be read: {error}.") from error
    _check_whole(path, source)
    return Checkpoint(
        path=path,
        dims=source.dims,
        parts=_parts(source.dims),
        read=source.read,
        metadata=source.metadata,
        stored_dtype=source.stored_dtype,
    )


def _parts(dims: LlamaDims) -> dict[str, tuple[str, ...]]:
    """Return, for each of our parameters, transformers' names of its parts."""
    parts: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not dims.tie_embeddings:
        parts["lm_head.weight"] = ("lm_head.weight",)
    for layer in range(dims.num_layers):
        for ours, theirs in _LAYER_PARTS.items():
            names = tuple(f"model.layers.{layer}.{name}.weight" for name in theirs)
            parts[f"layers.{layer}.{ours}.weight"] = names
    return parts


def _expected_shapes(dims: LlamaDims) -> dict[str, Shape]:
    """Return the shape of every tensor, by transformers' names."""
    hidden, inner = dims.hidden_size, dims.intermediate_size
    q, kv = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    by_module = {
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (dims.vocab_size, hidden),
        "lm_head": (dims.vocab_size, hidden),
    }
    names = [name for parts in _parts(dims).values() for name in parts]
    return {name: by_module.get(name.split(".")[-2], (hidden,)) for name in names}


def _check_whole(path: Path, source: GgufLlama | SafetensorsLlama) -> None:
    there = dict(source.shapes)
    if source.dims.tie_embeddings and "lm_head.weight" in there:
        _check_duplicate_head(path, source)
        del there["lm_head.weight"]
    model = f"A Llama of {source.dims.num_layers} layers"
    needed = _expected_shapes(source.dims)
    check_tensors(path, needed, there, own_name=source.own_name, model=model)


def _check_duplicate_head(path: Path, source: GgufLlama | SafetensorsLlama) -> None:
    head, table = (source.read(f"{name}.weight")[:] for name in ("lm_head", "model.embed_tokens"))
    if not torch.equal(head, table):
        raise ConfigError(
            f"model.weights: '{path}' says that the head is tied to the embedding, but holds a "
            "lm_head.weight that differs; set tie_word_embeddings to false in its config.json."
        )
