"""Loading by config from other programs: what the command line builds, as Python objects.

In: overrides, a config folder, or a config. Out: a `Config` or a `Runner`. Knows nothing of the
command line; safe in a process, and in threads, that use Hydra themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcgsvc.config import Config, copy
from pcgsvc.config.compose import compose, from_tree
from pcgsvc.errors import ConfigError
from pcgsvc.pipeline import build_from_config
from pcgsvc.serve.runner import Runner


def load_config(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config: Any = None
) -> Config:
    """Return plain settings: names and kinds are checked here, ranges when a runner is built.

    Args:
        overrides: as on the command line, e.g. `["mode=piecewise"]`.
        config_dir: folder with more YAML files, searched before the packaged ones.
        config: instead of composing: a `Config`, a nested dict, or an OmegaConf node; overrides
            are then not allowed.

    Raises:
        ConfigError: naming the setting, what was got and what there is.
    """
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise ConfigError(
            f"overrides: got {overrides!r}; a list of them is needed, e.g. ['mode=piecewise']. A "
            "Config or a dict goes into config=."
        )
    wrong = [o for o in overrides if not isinstance(o, str)]
    if wrong:
        raise ConfigError(f"overrides: got {wrong[0]!r} among them; text is needed, 'name=value'.")
    if config is None:
        return compose(overrides, config_dir=config_dir)
    if overrides or config_dir is not None:
        raise ConfigError("load_config: got config= with overrides= or config_dir=; pass one.")
    if isinstance(config, Config):
        return copy(config)
    return from_tree(config)


def load_runner(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config: Any = None
) -> Runner:
    """Build, or start warm, the runner that the command line would build; see `load_config`."""
    return build_from_config(load_config(overrides, config_dir=config_dir, config=config))
