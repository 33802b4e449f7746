"""Who set each setting: the defaults, a YAML file, the command line, the environment, or pcgsvc.

In: overrides as on the command line. Out: a `Config`, and one `Origin` per setting. Asks Hydra for
the list of files that it lays over each other, and looks each setting up in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from pcgsvc.cache.root import ENVIRONMENT_NAME, find_root
from pcgsvc.config import Config, ModelConfig, to_dict
from pcgsvc.config.compose import SCHEMA, from_tree, load_tree, open_loader, readable
from pcgsvc.config.devices import device_of
from pcgsvc.config.settings import walk
from pcgsvc.models import encoder, llama_moe
from pcgsvc.models.dims import explicit_dims
from pcgsvc.models.fetched import FETCHED, find_weights
from pcgsvc.models.llama_dims import preset_dims
from pcgsvc.sizing.resolve import resolve_config


@dataclass(frozen=True)
class Origin:
    """Where the value of one setting comes from."""

    value: Any
    """What is used: a word, a number, a list; None: worked out while building."""
    set_by: str
    """Who set it, for people."""


@dataclass(frozen=True)
class _Layer:
    """One YAML file that is laid over those before it."""

    words: str
    content: Mapping[str, Any]


def compose_with_origins(
    overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = "config"
) -> tuple[Config, dict[str, Origin]]:
    """Compose one config and say who set each of its settings.

    Raises:
        ConfigError: as `compose.compose`; or the device does not exist.
    """
    with open_loader(config_dir) as loader:
        config = from_tree(load_tree(loader, config_name, overrides))
        with readable():
            words = ["hydra.job.name=pcgsvc", *overrides]
            listed = loader.compute_defaults_list(config_name, words, RunMode.RUN)
            layers = _layers(loader, listed.defaults, overrides)
        on_line = [o for o in listed.config_overrides if not _is_hydra(o)]
    composed, resolved = _flat(to_dict(config)), _flat(to_dict(resolve_config(config).config))
    origins = {}
    for setting in walk():
        path = setting.path
        by = _set_by(path, layers, on_line)
        value = resolved[path]
        if value != composed[path]:
            by = f"pcgsvc, for device={device_of(config).type} ({by}: {_word(composed[path])})"
        elif value is None or value == "auto":
            value, found = _outside(path, config)
            by = found or by
        origins[path] = Origin(value, by)
    return config, origins


def _is_hydra(override: Override) -> bool:
    return override.key_or_group.split(".")[0].split("/")[0] == "hydra"


# ---- files ---------------------------------------------------------------------------------------


def _layers(
    loader: ConfigLoaderImpl, defaults: Sequence[ResultDefault], overrides: Sequence[str]
) -> list[_Layer]:
    """Return the files that Hydra composes, in order, each with what it sets by dotted name."""
    found = []
    for default in defaults:
        path = default.config_path
        if path is None or path.startswith("hydra/") or path == SCHEMA:
            continue
        loaded = loader.repository.load_config(path)
        if loaded is None or not OmegaConf.is_dict(loaded.config):
            continue
        tree = OmegaConf.to_container(loaded.config, resolve=False)
        assert isinstance(tree, dict)
        content = _flat({str(k): v for k, v in tree.items() if k not in ("defaults", "hydra")})
        package = f"{default.package}." if default.package else ""
        words = f"{_file(loaded.provider, path)}{_choice(path, overrides)}"
        found.append(_Layer(words, {f"{package}{k}": v for k, v in content.items()}))
    return found


def _file(provider: str | None, path: str) -> str:
    name = f"{path}.yaml"
    return f"conf/{name}" if provider in ("main", "pcgsvc") else f"{name} of {provider}"


def _choice(path: str, overrides: Sequence[str]) -> str:
    """Return by which word on the command line a group's file was chosen."""
    group, _, option = path.rpartition("/")
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if group and key.partition("@")[0] == group and value == option:
            return f", chosen by {override} on the command line"
    return ""


def _set_by(path: str, layers: Sequence[_Layer], overrides: Sequence[Override]) -> str:
    """Return who had the last word on a setting."""
    for override in reversed(overrides):
        key = override.key_or_group
        if path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."):
            return f"command line ({override.input_line})"
    for layer in reversed(layers):
        names = [n for n in layer.content if n == path or n.startswith(f"{path}.")]
        if names:
            return layer.words + _environment(layer.content[names[0]])
    return "default"


def _environment(value: Any) -> str:
    """Return which environment variables a value in a YAML file reads."""
    names = re.findall(r"\$\{oc\.env:\s*([A-Za-z_]\w*)", value) if isinstance(value, str) else []
    return f", from the environment ({', '.join(names)})" if names else ""


# ---- what no file says ---------------------------------------------------------------------------

_PRESETS: dict[str, Callable[[ModelConfig], Any]] = {
    "llama": preset_dims,
    "llama_moe": lambda model: preset_dims(model, llama_moe.PRESETS),
    "encoder": encoder.preset_dims,
}
"""Families whose dimensions a preset gives."""


def _outside(path: str, config: Config) -> tuple[Any, str | None]:
    """Return what stands in for a setting that is left open, and who chooses it."""
    if path == "device":
        return str(device_of(config)), "pcgsvc: what this machine has"
    if path == "cache.dir":
        root, source = find_root()
        known = f"environment ({source})" if source == ENVIRONMENT_NAME else f"pcgsvc: {source}"
        return str(root), known
    if path == "model.weights" and config.model.name in FETCHED:
        return str(find_weights(config.model)), "environment or user's data folder"
    group, _, name = path.partition(".")
    if group == "model" and config.model.name in _PRESETS and config.model.weights is None:
        dims = _PRESETS[config.model.name](config.model)
        if hasattr(dims, name) and name not in explicit_dims(config.model, type(dims)):
            return getattr(dims, name), f"model.preset={config.model.preset}"
    return None, None


_FREE = ("compiler.options", "model.kwargs", "model.inputs")
"""Settings that are mappings of names which are no settings."""


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and dotted not in _FREE:
            found |= _flat(value, f"{dotted}.")
        else:
            found[dotted] = value
    return found


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
