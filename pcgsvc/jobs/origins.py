"""What set each setting: the defaults, a YAML file, the command line, the environment, or pcgsvc.

In: overrides as on the command line. Out: a `Config`, and one `Origin` per setting. Asks Hydra for
the list of files that it merges, and looks each setting up in them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from pcgsvc.cache.root import ENVIRONMENT_NAME, find_root
from pcgsvc.config import Config, ModelConfig, to_dict
from pcgsvc.config.compose import SCHEMA, load_tree, open_loader
from pcgsvc.config.devices import device_of
from pcgsvc.config.settings import walk
from pcgsvc.config.tree import from_tree, readable
from pcgsvc.models import encoder, llama_moe
from pcgsvc.models.dims import explicit_dims
from pcgsvc.models.files import FETCHED, find_weights
from pcgsvc.models.llama_dims import preset_dims
from pcgsvc.sizing.resolve import resolve_config


@dataclass(frozen=True)
class Origin:
    """Where the value of one setting comes from."""

    value: Any
    """What is used: a word, a number, a list; None: worked out while building."""
    set_by: str
    """What set it, for people."""


def compose_with_origins(
    overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = "config"
) -> tuple[Config, dict[str, Origin]]:
    """Compose one config and find what set each of its settings.

    Raises:
        ConfigError: as `compose.compose`; or the device does not exist.
    """
    with open_loader(config_dir) as loader:
        config = from_tree(load_tree(loader, config_name, overrides))
        with readable():
            words = ["hydra.job.name=pcgsvc", *overrides]
            listed = loader.compute_defaults_list(config_name, words, RunMode.RUN)
            layers = _layers(loader, listed.defaults, overrides)
    composed, resolved = to_dict(config), to_dict(resolve_config(config).config)
    origins = {}
    for path in (setting.path for setting in walk()):
        by = _set_by(path, layers, listed.config_overrides)
        before, value = _at(composed, path), _at(resolved, path)
        if value != before:
            word = "null" if before is None else before
            by = f"pcgsvc, for device={device_of(config).type} ({by}: {word})"
        elif value is None or value == "auto":
            value, found = _outside(path, config)
            by = found or by
        origins[path] = Origin(value, by)
    return config, origins


# ---- files ---------------------------------------------------------------------------------------


def _layers(
    loader: ConfigLoaderImpl, defaults: Sequence[ResultDefault], overrides: Sequence[str]
) -> list[tuple[str, Any]]:
    """Return the files that Hydra composes, in order: in words, and what each sets as a tree."""
    found = []
    for default in defaults:
        path = default.config_path
        if path is None or path.startswith("hydra/") or path == SCHEMA:
            continue
        loaded = loader.repository.load_config(path)
        if loaded is None or not OmegaConf.is_dict(loaded.config):
            continue
        tree: Any = OmegaConf.to_container(loaded.config, resolve=False)
        for group in reversed((default.package or "").split(".")):
            tree = {group: tree} if group else tree
        found.append((f"{_file(loaded.provider, path)}{_choice(path, overrides)}", tree))
    return found


def _at(tree: Any, path: str) -> Any:
    """Return what a tree holds at a dotted path; KeyError or TypeError: nothing."""
    for name in path.split("."):
        tree = tree[name]
    return tree


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


def _set_by(path: str, layers: Sequence[tuple[str, Any]], overrides: Sequence[Override]) -> str:
    """Return what set a setting last."""
    for override in reversed(overrides):
        key = override.key_or_group
        if path == key or path.startswith(f"{key}.") or key.startswith(f"{path}."):
            return f"command line ({override.input_line})"
    for words, tree in reversed(layers):
        with contextlib.suppress(KeyError, TypeError):
            return f"{words}{_environment(_at(tree, path))}"
    return "default"


def _environment(value: Any) -> str:
    """Return which environment variables a value in a YAML file reads."""
    names = re.findall(r"\$\{oc\.env:\s*([A-Za-z_]\w*)", value) if isinstance(value, str) else []
    return f", from the environment ({', '.join(names)})" if names else ""


# ---- what no file sets ---------------------------------------------------------------------------

_PRESETS: dict[str, Callable[[ModelConfig], Any]] = {
    "llama": preset_dims,
    "llama_moe": lambda model: preset_dims(model, llama_moe.PRESETS),
    "encoder": encoder.preset_dims,
}
"""Families whose dimensions a preset gives."""


def _outside(path: str, config: Config) -> tuple[Any, str | None]:
    """Return what is used for a setting that is left open, and what chooses it."""
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
