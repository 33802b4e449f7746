"""The one door from Hydra to plain dataclasses.

In: overrides as on the command line. Out: a validated `Config` per job of a sweep. Works in a
process that uses Hydra itself, and in threads: Hydra's process-wide state is not touched. The only
module besides `app` that sees a DictConfig.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pcgsvc.config import Config, from_dict, to_dict
from pcgsvc.errors import ConfigError

CONFIG_MODULE = "pkg://pcgsvc.conf"
SCHEMA = "pcgsvc_schema"

_STORE_LOCK = threading.Lock()
"""Hydra's config store is process-wide; our entry is in it only while this lock is held."""


def schema_node() -> DictConfig:
    """Return all settings with their defaults; a name that is not in it is refused."""
    node = OmegaConf.create(to_dict(Config()))
    OmegaConf.set_struct(node.compiler.options, False)  # any Inductor option may stand there
    return node


def register_schema() -> None:
    """Put the defaults where Hydra's own entry finds them; for a process that is ours."""
    ConfigStore.instance().store(name=SCHEMA, node=schema_node())


def compose(
    overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = "config"
) -> Config:
    """Compose and convert one config; nothing is validated beyond kinds and names.

    Args:
        overrides: as on the command line.
        config_dir: folder with more YAML files, searched before ours.
        config_name: primary config.

    Raises:
        ConfigError: Hydra cannot compose it, or a setting is unknown or of the wrong kind.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"config_dir: {config_dir!r} is no folder.")
    search_path = create_config_search_path(CONFIG_MODULE)
    if config_dir is not None:
        search_path.prepend("config-dir", f"file://{Path(config_dir).resolve()}")
    with _STORE_LOCK:
        known = ConfigStore.instance().repo.get(f"{SCHEMA}.yaml")
        register_schema()
        try:
            loader = ConfigLoaderImpl(config_search_path=search_path)
            composed = loader.load_configuration(
                config_name=config_name, overrides=list(overrides), run_mode=RunMode.RUN
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_words(error)) from error
        finally:
            if known is None:
                ConfigStore.instance().repo.pop(f"{SCHEMA}.yaml", None)
    return from_hydra(composed)


def from_hydra(composed: DictConfig) -> Config:
    """Convert what Hydra composed (its own node left out) into plain dataclasses."""
    with open_dict(composed):
        composed.pop("hydra", None)  # its resolvers work only while Hydra itself runs
    try:
        tree: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_words(error)) from error
    return from_dict(tree)


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a multirun, in the order of Hydra's basic sweeper."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(_words(error)) from error
    choices: list[list[str]] = []
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or ""])
    return [list(job) for job in itertools.product(*choices)]


def _words(error: BaseException) -> str:
    """Return Hydra's message, with the quoting that most often was meant."""
    text = str(error).strip()
    if "mismatched input" in text or "extraneous input" in text or "token recognition" in text:
        text += "\nQuote lists and special characters for the shell: capture.sizes='[1,2,4]'."
    if "Ambiguous value" in text or "ChoiceSweep" in text:
        text += "\nA bare comma list means a sweep: write capture.sizes='[1,2,4]', or add -m."
    return text
