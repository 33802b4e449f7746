"""The one door from Hydra to plain dataclasses.

In: overrides as on the command line. Out: a `Config`, or one per job of a sweep. Works in a process
that uses Hydra itself, and in threads: Hydra's process-wide state is left as it was.
Besides `tree`, `app` and what Hydra calls in `sweeps`, the only module that sees a DictConfig.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from pcgsvc.config.parse import to_dict
from pcgsvc.config.schema import Config
from pcgsvc.config.tree import from_tree, plain, readable
from pcgsvc.errors import ConfigError

CONFIG_MODULE = "pkg://pcgsvc.conf"
SCHEMA = "pcgsvc_schema"

_STORE_LOCK = threading.Lock()
"""Hydra's config store is process-wide; our entry is in it only while this lock is held. The host
process does not take it: a dict that it may be iterating over is replaced, never changed."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command line asks for."""

    jobs: list[Config]
    """In Hydra's order. Under a sweeper other than Hydra's basic one: the one job that stands for
    what is the same in all of them."""
    multirun: bool
    """Whether it is a sweep, be it of one job."""
    overrides: list[list[str]] | None
    """The overrides of each job, without Hydra's own; None: only the sweeper knows its jobs."""
    sweeper: dict[str, Any] = field(default_factory=dict)
    """`hydra.sweeper` of a sweep."""
    launcher: str | None = None
    """The class of `hydra.launcher` of a sweep."""


def schema_node() -> DictConfig:
    """Return all settings with their defaults; a name that is not in it is refused."""
    node = OmegaConf.create(to_dict(Config()))
    model, options = node.model, node.compiler.options
    for free in (options, model.kwargs, model.inputs, node.capture.null_rows, node.user):
        OmegaConf.set_struct(free, False)  # any name is allowed there
    return node


def register_schema() -> None:
    """Put the defaults where Hydra's own entry finds them; for a process of our own."""
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
    with open_loader(config_dir) as loader:
        return from_tree(load_tree(loader, config_name, overrides))


def compose_command(
    overrides: Sequence[str],
    *,
    multirun: bool,
    config_dir: str | None = None,
    config_name: str = "config",
) -> Command:
    """Compose every job that Hydra would run for a command line, in its order.

    Jobs of a sweeper other than Hydra's basic one cannot be known beforehand: what is the same in
    all of them is composed as one job.

    Args:
        overrides: as on the command line, Hydra's own settings (`hydra.…`) included.
        multirun: whether `-m` was given; `hydra.mode=MULTIRUN` says the same.
        config_dir: folder with more YAML files, searched before ours.
        config_name: primary config.

    Raises:
        ConfigError: as `compose`, for any one job.
    """
    with open_loader(config_dir) as loader:
        if not multirun:
            single = _single_job(loader, config_name, overrides)
            if single is not None:
                return Command(jobs=[from_tree(single)], multirun=False, overrides=None)
        whole = load_tree(loader, config_name, overrides, RunMode.MULTIRUN)
        jobs, known = _sweep(loader, whole.hydra.sweeper, overrides)
        return Command(
            jobs=[from_tree(load_tree(loader, config_name, job)) for job in jobs],
            multirun=True,
            overrides=[[o for o in job if not _is_hydra(o)] for job in jobs] if known else None,
            sweeper=plain(whole.hydra.sweeper),
            launcher=whole.hydra.launcher._target_,
        )


# ---- Hydra's loader ------------------------------------------------------------------------------


@contextlib.contextmanager
def open_loader(config_dir: str | None) -> Iterator[ConfigLoaderImpl]:
    """Yield a loader over the packaged and the user's YAML; Hydra's globals are put back after."""
    if config_dir is not None and not (
        isinstance(config_dir, str | Path) and str(config_dir) and Path(config_dir).is_dir()
    ):
        raise ConfigError(f"config_dir: {str(config_dir)!r} is no folder.")
    search_path = create_config_search_path(CONFIG_MODULE)
    if config_dir is not None:
        search_path.prepend("user", f"file://{Path(config_dir).resolve()}")
    with _STORE_LOCK:
        store, version = ConfigStore.instance(), VersionBase.instance()
        known = f"{SCHEMA}.yaml" in store.repo
        base = version.version_base  # composing sets it where the process has not
        store.repo = dict(store.repo)
        register_schema()
        try:
            yield ConfigLoaderImpl(config_search_path=search_path)
        finally:
            version.version_base = base
            if not known:
                store.repo = {k: v for k, v in store.repo.items() if k != f"{SCHEMA}.yaml"}


def load_tree(
    loader: ConfigLoaderImpl,
    config_name: str,
    overrides: Sequence[str],
    run_mode: RunMode = RunMode.RUN,
    *,
    check_sweep: bool = True,
) -> DictConfig:
    """Compose with Hydra; a primary config of the user's may name no job, so one is named first."""
    _refuse_removals(overrides)
    with readable(), _plus_shown(loader, overrides):
        return loader.load_configuration(
            config_name=config_name,
            overrides=["hydra.job.name=pcgsvc", *overrides],
            run_mode=run_mode,
            validate_sweep_overrides=check_sweep,
        )


def _single_job(
    loader: ConfigLoaderImpl, config_name: str, overrides: Sequence[str]
) -> DictConfig | None:
    """Compose a command without `-m`; None: `hydra.mode` makes it a sweep all the same."""
    try:
        tree = load_tree(loader, config_name, overrides)
    except ConfigError:  # perhaps at what only a sweep may have, such as mode=none,full
        tree = load_tree(loader, config_name, overrides, RunMode.MULTIRUN, check_sweep=False)
        if tree.hydra.mode is not RunMode.MULTIRUN:
            raise
    return None if tree.hydra.mode is RunMode.MULTIRUN else tree


def _refuse_removals(overrides: Sequence[str]) -> None:
    """Refuse `~name` of a setting or a group of ours: a config has all of them."""
    for override in overrides:
        if override.startswith("~"):
            tree: Any = to_dict(Config())
            path = override[1:].partition("=")[0].partition("@")[0]
            *groups, last = path.split(".")
            for name in groups:
                tree = tree.get(name) if isinstance(tree, dict) else None
            if isinstance(tree, dict) and last in tree:
                raise ConfigError(
                    f"{override}: a setting cannot be removed; {path}=… gives it another value."
                )


@contextlib.contextmanager
def _plus_shown(loader: ConfigLoaderImpl, overrides: Sequence[str]) -> Iterator[None]:
    """Answer `group=option` of a group that no defaults list names with `+group=option`."""
    try:
        yield
    except Exception as error:
        for override in overrides:
            group, _, option = override.partition("=")
            options = loader.get_group_options(group) if _is_group(group) else []
            if options and str(error).startswith(f"Could not override '{group}'"):
                raise ConfigError(
                    f"{group}: no defaults list names this group, so its option is added with a "
                    f"plus: +{group}={option if option in options else options[0]}. Options: "
                    f"{', '.join(options)}."
                ) from error
        raise


def _sweep(
    loader: ConfigLoaderImpl, sweeper: DictConfig, overrides: Sequence[str]
) -> tuple[list[list[str]], bool]:
    """Return the overrides of each job of a multirun, and whether these are all its jobs."""
    with readable():
        own = [o for o in overrides if _is_hydra(o)]
        parser = OverridesParser.create(config_loader=loader)
        params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        swept = parser.parse_overrides(params + [o for o in overrides if not _is_hydra(o)])
        if not sweeper._target_.endswith(f".{BasicSweeper.__name__}"):
            fixed = [o.input_line for o in swept if not o.is_sweep_override()]
            return [own + [line for line in fixed if line is not None]], False
        (batch,) = BasicSweeper.split_arguments(swept, max_batch_size=None)
        return [own + job for job in batch], True


def _is_group(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("/"))


def _is_hydra(override: str) -> bool:
    """Whether an override sets something of Hydra's own."""
    key = override.lstrip("+~").partition("=")[0]
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))
