"""Llama weights in a GGUF file, under transformers' names and in transformers' layout.

In: a path. Out: `GgufLlama`, a weight source for `checkpoint`. Knows nothing of modules or devices.

Source: llama.cpp's convert_hf_to_gguf.py and gguf-py's constants, which name entries and tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pcgsvc.errors import ConfigError
from pcgsvc.models.dims import stated_dims
from pcgsvc.models.gguf_file import GgufFile
from pcgsvc.models.llama_dims import LlamaDims

_ROTARY = "rope_freqs.weight"  # how llama.cpp stores Llama 3's rotary scaling

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufLlama:
    """The Llama weights of a GGUF file, by transformers' names and in transformers' layout.

    Raises:
        ConfigError: as `GgufFile`; or another architecture, or a Llama that ours is not.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.stored_dtype: str | None = None  # each tensor has a quantisation of its own
        self.metadata = self._file.metadata
        """The file's metadata, tokenizer included."""
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ConfigError(
                f"model.weights: '{path}' has the architecture {architecture!r}; 'llama' is needed."
            )
        self.dims = self._dims()
        """What the metadata and the rotary factors say."""
        names = _names(self.dims.num_layers)
        self._own = {standard: own for own, standard in names.items()}
        own_shapes = {n: t.shape for n, t in self._file.tensors.items() if n != _ROTARY}
        self.shapes = {names.get(own, own): shape for own, shape in own_shapes.items()}
        """Shape of each weight tensor."""

    def _dims(self) -> LlamaDims:
        data = _Metadata(self._file.path, self.metadata)
        heads = data.need("attention.head_count")
        hidden = data.need("embedding_length")
        head_dim = data.get("attention.key_length", hidden // max(heads, 1))
        data.only("attention.value_length", head_dim)
        data.only("rope.dimension_count", head_dim)
        data.only("rope.scaling.type", "none")
        data.only("expert_count", 0)
        rows = self._file.tensors.get("token_embd.weight")
        rotary = self._file.read(_ROTARY) if _ROTARY in self._file.tensors else None
        return stated_dims(
            LlamaDims,
            self._file.path,
            vocab_size=rows.shape[0] if rows else data.need("vocab_size"),
            hidden_size=hidden,
            intermediate_size=data.need("feed_forward_length"),
            num_layers=data.need("block_count"),
            num_heads=heads,
            num_kv_heads=data.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position=data.need("context_length"),
            rope_theta=data.get("rope.freq_base", 10000.0),
            norm_eps=data.need("attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in self._file.tensors,
            rope_factors=None if rotary is None else tuple(rotary.tolist()),
        )

    def own_name(self, name: str) -> str:
        """Return what the file calls, or would call, a tensor."""
        return self._own.get(name, name)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in fp32 on the CPU."""
        tensor = self._file.read(self.own_name(name))
        if name.endswith("q_proj.weight"):
            return _unpermute(tensor, self.dims.num_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(tensor, self.dims.num_kv_heads)
        return tensor


class _Metadata:
    """The `llama.*` entries of a file, with errors that name file and entry."""

    def __init__(self, path: Path, entries: dict[str, Any]) -> None:
        self.path = path
        self.entries = entries

    def get(self, key: str, default: Any) -> Any:
        value = self.entries.get(f"llama.{key}", default)
        if isinstance(value, list):  # per layer, as OpenELM and DeciLM have it
            raise ConfigError(
                f"model.weights: '{self.path}' has llama.{key}={value[:4]}…, one per layer; "
                "layers of one structure are needed."
            )
        return value

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise ConfigError(f"model.weights: '{self.path}' lacks the metadata entry llama.{key}.")
        if type(value) not in (int, float):
            raise ConfigError(
                f"model.weights: '{self.path}' has llama.{key}={value!r}; a number is needed."
            )
        return value

    def only(self, key: str, wanted: Any) -> None:
        value = self.get(key, wanted)
        if value != wanted:
            raise ConfigError(
                f"model.weights: '{self.path}' has llama.{key}={value!r}; "
                f"this Llama has {wanted!r} alone."
            )


def _names(num_layers: int) -> dict[str, str]:
    """Return transformers' name of each GGUF tensor."""
    names = {f"{own}.weight": f"{standard}.weight" for own, standard in _NAMES.items()}
    for layer in range(num_layers):
        for own, standard in _LAYER_NAMES.items():
            names[f"blk.{layer}.{own}.weight"] = f"model.layers.{layer}.{standard}.weight"
    return names


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of q and k rows [heads * D, E].

    llama.cpp pairs rotary features (2i, 2i + 1), transformers (i, i + D / 2).
    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
