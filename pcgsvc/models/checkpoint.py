"""A Llama checkpoint on disk: its dimensions, and its tensors under our fused names.

In: a path to `.gguf`, `.safetensors` or a directory with safetensors. Out: `Checkpoint`, of which
everything but the tensors' values has been checked. Knows nothing of the two file formats.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.models.gguf_llama import GgufLlama
from pcgsvc.models.llama import Llama
from pcgsvc.models.llama_dims import LlamaDims, explicit_dims
from pcgsvc.models.safetensors_llama import SafetensorsLlama

logger = logging.getLogger(__name__)

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


class WeightSource(Protocol):
    """Llama weights in some file format, by transformers' names and in transformers' layout."""

    dims: LlamaDims
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, Any]

    def own_name(self, name: str) -> str:
        """Return what the file calls, or would call, a tensor."""

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: complete, of the shapes that its dimensions ask for."""

    path: Path
    dims: LlamaDims
    metadata: Mapping[str, Any]
    """GGUF metadata; empty for safetensors."""
    _source: WeightSource

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (our name, tensor on the CPU in the file's dtype, or fp32 if it is quantised)."""
        for name, parts in _parts(self.dims).items():
            tensors = [self._source.read(part) for part in parts]
            yield name, tensors[0] if len(tensors) == 1 else torch.cat(tensors)


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
    try:
        source: WeightSource = GgufLlama(path) if path.suffix == ".gguf" else SafetensorsLlama(path)
    except OSError as error:
        raise ConfigError(f"model.weights: '{path}' cannot be read: {error}.") from error
    _check_tensors(path, source)
    return Checkpoint(path, source.dims, source.metadata, source)


class Opened(Protocol):
    """An opened checkpoint of any family."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def dims(self) -> Any:
        """Its dimensions, by the names of `model.*`."""


def check_explicit(model: ModelConfig, checkpoint: Opened) -> None:
    """Raise ConfigError if the config sets a dimension that the checkpoint contradicts."""
    for name, value in explicit_dims(model).items():
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


def load_weights(module: Llama, checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's tensors into the module, in its dtype and on its device."""
    start = time.perf_counter()
    parameters = dict(module.named_parameters())
    total = 0
    for name, tensor in checkpoint.tensors():
        parameters.pop(name).data.copy_(tensor)
        total += tensor.numel()
    assert not parameters, f"parameters that no checkpoint tensor fills: {list(parameters)}"
    logger.info(
        "weights: %.1f M values from %s, %.1f s",
        total / 1e6,
        checkpoint.path,
        time.perf_counter() - start,
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


def _expected_shapes(dims: LlamaDims) -> dict[str, tuple[int, ...]]:
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


def _check_tensors(path: Path, source: WeightSource) -> None:
    expected, shapes = _expected_shapes(source.dims), dict(source.shapes)
    if source.dims.tie_embeddings and "lm_head.weight" in shapes:
        _check_duplicate_head(path, source)
        del shapes["lm_head.weight"]
    missing = sorted(source.own_name(name) for name in expected.keys() - shapes.keys())
    surplus = sorted(source.own_name(name) for name in shapes.keys() - expected.keys())
    for word, names in (("lacks", missing), ("has surplus", surplus)):
        if names:
            listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
            raise ConfigError(
                f"model.weights: '{path}' {word} {len(names)} tensors: {listed}. A Llama of "
                f"{source.dims.num_layers} layers has {len(expected)}; convert it again."
            )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ConfigError(
                f"model.weights: '{path}' has {source.own_name(name)} in the shape "
                f"{list(shapes[name])}; its dimensions ask for {list(shape)}."
            )


def _check_duplicate_head(path: Path, source: WeightSource) -> None:
    if not torch.equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight")):
        raise ConfigError(
            f"model.weights: '{path}' says that the head is tied to the embedding, but holds a "
            "lm_head.weight that differs; set tie_word_embeddings to false in its config.json."
        )
