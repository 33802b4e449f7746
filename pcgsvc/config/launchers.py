"""What Hydra's launchers are told unless a command says otherwise.

In: the packages that are there. Out: entries of Hydra's config store, `hydra/launcher=joblib`,
`ray`, `submitit_local` and `submitit_slurm`. They are no YAML files: Hydra warns of a file with a
name that a launcher's package has put into the store.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from pcgsvc.errors import ConfigError

_GROUP = "hydra/launcher"
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
_LAUNCHERS: dict[str, dict[str, Any]] = {
    "joblib": {
        "_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
        "batch_size": "1",  # else short jobs would wait for each other in one worker
    },
    "ray": {
        "_target_": "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher",
        # A job whose node is lost has failed; with max_retries above 0 another node runs it again.
        "ray": {
            "init": {"address": None},  # RAY_ADDRESS, else Ray is started on this machine
            "remote": {"num_cpus": 1, "num_gpus": 1, "max_retries": 0},
        },
    },
    "submitit_local": {"_target_": f"{_SUBMITIT}.LocalLauncher", "gpus_per_node": 1},
    "submitit_slurm": {"_target_": f"{_SUBMITIT}.SlurmLauncher", "gpus_per_node": 1},
}
"""Where they differ from the package's own."""
_EXTRAS = {"joblib": "joblib", "ray": "ray", "submitit_local": "slurm", "submitit_slurm": "slurm"}
"""The extra of pcgsvc that brings a launcher's package."""


def register_launchers() -> None:
    """Put them into Hydra's store; for a process of our own."""
    Plugins.instance()  # else the packages would put theirs there later
    store = ConfigStore.instance()
    packages = store.repo["hydra"]["launcher"]
    for name, settings in _LAUNCHERS.items():
        own = packages.get(f"{name}.yaml")
        node = OmegaConf.create(settings) if own is None else OmegaConf.merge(own.node, settings)
        store.store(group=_GROUP, name=name, node=node, provider="pcgsvc")


def check_launcher(target: str) -> None:
    """Refuse a launcher of ours (`hydra.launcher._target_`) whose package is not installed.

    Raises:
        ConfigError: naming the extra.
    """
    for name, settings in _LAUNCHERS.items():
        if settings["_target_"] == target and not _is_installed(target):
            raise ConfigError(
                f"{_GROUP}: {name} needs {target.split('.')[1].replace('_', '-')}, which is not "
                f"installed (pip install 'pcgsvc[{_EXTRAS[name]}]')."
            )


def _is_installed(target: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # there is no plugin of Hydra at all
        return find_spec(target.rpartition(".")[0].rpartition(".")[0]) is not None
    return False
