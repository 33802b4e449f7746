"""Llama weights in safetensors, with transformers' config.json beside them.

In: a `.safetensors` file, or a directory with `model.safetensors` or its sharded index. Out:
`SafetensorsLlama`, a weight source for `checkpoint`. Knows nothing of modules or devices.

Source: `LlamaConfig` and `_compute_llama3_parameters` of transformers 5.24; `rope_theta` and
`rope_scaling` of version 4 are read as well.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pcgsvc.errors import ConfigError
from pcgsvc.models.dims import stated_dims
from pcgsvc.models.files import Shape, check_stated, open_safetensors, read_json
from pcgsvc.models.llama_dims import LlamaDims

_INDEX = "model.safetensors.index.json"
_STATED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
"""What config.json must say, or leave out."""
_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


class SafetensorsLlama:
    """The Llama weights of one file or of the shards in a directory.

    Raises:
        ConfigError: config.json, the index or a shard is missing or damaged; another architecture,
            or a Llama that ours is not.
    """

    def __init__(self, path: Path) -> None:
        self.metadata: dict[str, Any] = {}
        """Empty: safetensors files carry no tokenizer."""
        folder = path if path.is_dir() else path.parent
        stated = read_json(folder / "config.json")
        self.dims = _dims(folder / "config.json", stated)
        """What config.json says."""
        self.stored_dtype: str | None = stated.get("dtype") or stated.get("torch_dtype")
        """What config.json says of the weights."""
        self._handles: dict[str, Any] = {}
        self.shapes: dict[str, Shape] = {}
        """Shape of each weight tensor."""
        for file in _shards(path):
            handle = open_safetensors(file, "smollm2")
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if not name.endswith("rotary_emb.inv_freq"):  # derived; old checkpoints store it
                    self._handles[name] = handle
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def own_name(self, name: str) -> str:
        """Return what the file calls, or would call, a tensor."""
        return name

    def read(self, name: str) -> Any:
        """Return what reads a tensor, or a part of it, when it is indexed; in the file's dtype."""
        return self._handles[name].get_slice(name)


def _shards(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    single, index = path / "model.safetensors", path / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(
            f"model.weights: '{path}' holds neither model.safetensors nor {_INDEX}; "
            "name a .safetensors file, or a directory with one of these."
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"model.weights: '{index}' has no weight_map.")
    shards = sorted({path / name for name in weight_map.values()})
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ConfigError(f"model.weights: '{index}' names files that do not exist: {missing}.")
    return shards


def _dims(path: Path, data: dict[str, Any]) -> LlamaDims:
    if data.get("model_type") != "llama":
        raise ConfigError(
            f"model.weights: '{path}' has the architecture {data.get('model_type')!r}; "
            "'llama' is needed."
        )
    check_stated(path, data, _STATED, "this Llama")
    try:
        heads, hidden = data["num_attention_heads"], data["hidden_size"]
        head_dim = data.get("head_dim") or hidden // max(heads, 1)
        theta, factors = _rope(path, data, head_dim)
        return stated_dims(
            LlamaDims,
            path,
            vocab_size=data["vocab_size"],
            hidden_size=hidden,
            intermediate_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_position=data["max_position_embeddings"],
            rope_theta=theta,
            norm_eps=data["rms_norm_eps"],
            tie_embeddings=bool(data.get("tie_word_embeddings")),
            rope_factors=factors,
        )
    except KeyError as error:
        raise ConfigError(f"model.weights: '{path}' lacks the entry {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.weights: '{path}' has an entry of the wrong kind: {error}."
        ) from error


def _rope(
    path: Path, data: dict[str, Any], head_dim: int
) -> tuple[float, tuple[float, ...] | None]:
    """Return the rotary base and the frequencies' factors."""
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", data.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or partial != 1.0:
        raise ConfigError(
            f"model.weights: '{path}' has rotary scaling {kind!r} of {partial:.0%} of the "
            "features. Choices: 'default' or 'llama3', of all."
        )
    if kind == "default":
        return theta, None
    lacking = [key for key in _LLAMA3_KEYS if key not in rope]
    if lacking:
        raise ConfigError(f"model.weights: '{path}' has llama3 rotary scaling without {lacking}.")
    return theta, llama3_factors(theta, head_dim, *(float(rope[key]) for key in _LLAMA3_KEYS))


def llama3_factors(
    theta: float,
    head_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: float,
) -> tuple[float, ...]:
    """Return what Llama 3's scaling divides each of the `head_dim / 2` rotary frequencies by.

    Wavelengths below original / high stay, those above original / low are stretched by `factor`,
    and between them the frequency is mixed linearly in original / wavelength.
    """
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        share = (original_max_position / wavelength - low_freq_factor) / (
            high_freq_factor - low_freq_factor
        )
        share = min(max(share, 0.0), 1.0)
        factors.append(1.0 / ((1 - share) / factor + share))
    return tuple(factors)
