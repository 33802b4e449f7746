"""Which model `model=hf` names: its transformers config, and where its weights lie.

In: `model.path` or `model.config`. Out: a `Source`, or a `ConfigError` for what can be judged by
the config alone. Builds no model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError, near
from pcgsvc.forward.plain import words_of
from pcgsvc.models.files import read_json, require

_SHIPPED = Path(__file__).with_name("configs")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ALIBI = ("bloom", "mpt")
"""Types whose config does not state the bias that all of them have."""
OWN_ATTENTION = (
    "its forward never calls transformers' attention interface; it has attention code of its own, "
    "or none."
)
_NO_FACT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class Source:
    """One model of transformers, not built yet."""

    setting: str
    """`model.path` or `model.config`, for messages."""
    label: str
    """What the setting says."""
    config: Any
    """`transformers.PreTrainedConfig` of a causal language model; not to be changed."""
    path: Path | None = None
    """Directory or GGUF file with the weights; None: random weights."""

    @property
    def gguf(self) -> str | None:
        """Name of the GGUF file, or None."""
        return self.path.name if self.path is not None and self.path.suffix == ".gguf" else None

    @property
    def folder(self) -> Path | None:
        """Directory that transformers loads from."""
        return self.path.parent if self.gguf is not None and self.path is not None else self.path

    def refuse(self, reason: str) -> ConfigError:
        """Return the error that this model cannot be run, and why."""
        kind = getattr(self.config, "model_type", "?")
        return ConfigError(f"{self.setting}: '{self.label}' ({kind}) cannot be run: {reason}")

    def max_position(self) -> int:
        """Return the longest sequence that positions cover as they are traced, in tokens.

        Scaled rotary embeddings that look at the longest sequence of a step are served up to where
        their scaling would set in: beyond it, a request's result would depend on its neighbours.
        """
        text = self.config.get_text_config(decoder=True)
        longest = _stated_positions(text)
        if not longest:
            raise self.refuse("its config states no max_position_embeddings.")
        lengths = [
            rope.get("original_max_position_embeddings", longest)
            for rope in ropes(text)
            if looks_at_length(str(rope.get("rope_type")))
        ]
        return min([longest, *(int(length) for length in lengths)])

    def facts(self) -> dict[str, Any]:
        """Return what decides the program besides code and tensors, for its key."""
        config = json.loads(self.config.to_json_string(use_diff=False))
        return {
            "transformers": require("transformers", "hf").__version__,
            "model.transformers_config": {k: v for k, v in config.items() if k not in _NO_FACT},
        }


def shipped() -> list[str]:
    """Return the names of the configs that come with pcgsvc."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def looks_at_length(rope_type: str) -> bool:
    """Whether a rotary scaling's frequencies depend on the longest sequence of the step."""
    return "dynamic" in rope_type or rope_type == "longrope"


def ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters of a config: one dict, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield rope
    else:
        yield from (r for r in rope.values() if isinstance(r, dict))


def _stated_positions(text: Any) -> int:
    """Return a text config's max_position_embeddings, or 0."""
    longest = getattr(text, "max_position_embeddings", None)
    return max(longest, 0) if isinstance(longest, int) else 0


def open_source(model: ModelConfig) -> Source:
    """Read the config that `model.path` or `model.config` names, and refuse what it rules out.

    Raises:
        ConfigError: naming the setting, what was got, and what to do.
    """
    if (model.path is None) == (model.config is None):
        got = "neither is set" if model.path is None else "both are set"
        raise ConfigError(
            f"model.path, model.config: {got}; model=hf needs one of them: a directory or a .gguf "
            f"file with weights, or a config for random ones ({', '.join(shipped())}, or the path "
            "of a config.json)."
        )
    version = require("transformers", "hf").__version__
    if not version.startswith("5."):
        raise ConfigError(
            f"model: got 'hf' with transformers {version}; 5.x is needed. Run: "
            "pip install 'pcgsvc[hf]'"
        )
    source = _of_path(model.path) if model.path is not None else _of_config(str(model.config))
    _refuse_by_config(source)
    if source.path and not source.gguf and not any(source.path.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: '{source.label}' holds no .safetensors file; other formats can run code "
            "when they are read and are not."
        )
    return source


def _of_path(given: str) -> Source:
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise ConfigError(
            f"model.path: '{given}' does not exist; a local directory with config.json and "
            "safetensors is needed, or a .gguf file. Nothing is fetched."
        )
    gguf = path.suffix == ".gguf" and path.is_file()
    if not gguf and not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path: '{given}' is neither a .gguf file nor a directory with a config.json."
        )
    if gguf:
        for package in ("gguf", "accelerate"):  # accelerate: transformers loads no GGUF without it
            require(package, "hf")
    try:
        if gguf:
            found = _gguf_config(path, path.stat().st_mtime_ns)
        else:
            _read_config("model.path", path / "config.json")
            transformers = require("transformers", "hf")
            found = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
    except ConfigError:
        raise
    except Exception as error:  # what readers of a damaged file raise has no common base
        advice = "; it is damaged or no GGUF file, fetch it again." if gguf else ""
        raise ConfigError(
            f"model.path: '{given}' cannot be read: {words_of(error)}{advice}"
        ) from error
    return Source("model.path", given, found, path)


@functools.lru_cache(maxsize=2)
def _gguf_config(path: Path, mtime_ns: int) -> Any:
    """Return a GGUF file's config; kept, since transformers reads the whole vocabulary for it."""
    transformers = require("transformers", "hf")
    return transformers.AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )


def _of_config(given: str) -> Source:
    path = _SHIPPED / f"{given}.json"
    if given not in shipped():
        path = Path(given).expanduser().absolute()
        if not path.is_file():
            names = shipped()
            raise ConfigError(
                f"model.config: got {given!r}{near(given, names)} Choices: {', '.join(names)}, or "
                "the path of a config.json."
            )
    values = _read_config("model.config", path)
    kind = values.pop("model_type", None)
    transformers = require("transformers", "hf")
    if not isinstance(kind, str):
        raise ConfigError(f"model.config: '{given}' states no model_type.")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.config: '{given}' is of the type {kind!r}, which transformers "
            f"{transformers.__version__} does not have{near(kind, transformers.CONFIG_MAPPING)}"
        )
    try:
        found = transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:
        raise ConfigError(
            f"model.config: '{given}' is no config of {kind!r}: {words_of(error)}"
        ) from error
    return Source("model.config", given, found)


def _read_config(setting: str, path: Path) -> dict[str, Any]:
    """Return a config.json; one that names code of its own is taken for its `model_type` alone."""
    values: dict[str, Any] = read_json(path, setting=setting)
    kind = values.get("model_type")
    if "auto_map" in values and kind not in require("transformers", "hf").CONFIG_MAPPING:
        raise ConfigError(
            f"{setting}: '{path}' asks for code of its own (auto_map), which is not run, and "
            f"transformers has no model of the type {kind!r}. Use pcgsvc.build_runner with a "
            "module that you have imported yourself."
        )
    return values


def _refuse_by_config(source: Source) -> None:
    """Refuse, by name, what the config rules out."""
    config, transformers = source.config, require("transformers", "hf")
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    strange = sorted({str(kind) for kind in kinds} - set(_LAYER_TYPES))
    named = f"layers of the kind {', '.join(strange)}" if strange else "all layers"
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for wrong, reason in (
        (
            getattr(config, "is_encoder_decoder", False),
            "it is an encoder with a decoder, and cross attention is not supported.",
        ),
        (
            model is None,
            "transformers has no causal language model of this type.",
        ),
        (
            getattr(model, "_is_stateful", False) or "linear_attention" in strange,
            f"it is recurrent: a state is kept from token to token ({named}), which is not "
            "supported.",
        ),
        (
            bool(strange),
            f"it has {named}; those supported are {' and '.join(_LAYER_TYPES)}.",
        ),
        (
            getattr(text, "attn_temperature_tuning", False)
            and 0 in getattr(text, "no_rope_layers", ()),
            "its layers without rotary positions scale queries by the row of a step and not by "
            "positions, as transformers' Llama 4 does (attn_temperature_tuning).",
        ),
        (
            config.model_type in _ALIBI or any(getattr(text, k, 0) for k in ("alibi", "use_alibi")),
            "its attention has an ALiBi bias, which is not supported.",
        ),
        (
            not (_stated_positions(text) or getattr(model, "_supports_attention_backend", 0)),
            OWN_ATTENTION,
        ),
        (
            getattr(text, "add_cross_attention", False),
            "it has cross attention, which is not supported.",
        ),
        (
            getattr(config, "quantization_config", None) is not None,
            "its weights are quantised; use an unquantised checkpoint, or a .gguf file, which is "
            "dequantised as it is loaded.",
        ),
    ):
        if wrong:
            raise source.refuse(reason)
