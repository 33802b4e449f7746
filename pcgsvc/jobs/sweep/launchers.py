"""Hydra's launchers, so that a sweep hears of each of its jobs.

In: the launcher that a command names. Out: what each job gives back, also where another job's
machine is lost. Imports a launcher's package only where it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from pcgsvc.jobs.sweep.objective import result_of
from pcgsvc.jobs.sweep.outcome import FAILED
from pcgsvc.jobs.sweep.records import Returned

Take = Callable[[int, list[str], Returned | Exception], None]
"""Told of each job: its number, its overrides, what it gave back or why it gave nothing."""

_CURRENT: ContextVar[tuple[Take, Callable[..., Launcher]]] = ContextVar("_CURRENT")
"""What `_Taking` is made with: Hydra makes it, by its name."""


@contextlib.contextmanager
def taking_from(target: str, take: Take) -> Iterator[None]:
    """Within the block, a launcher of Hydra's tells what each of its jobs gave back.

    Args:
        target: `hydra.launcher._target_`.
        take: is told, in this process.
    """
    known = Plugins.instance().class_name_to_class
    kind: Any = known.get(target)
    if kind is None:  # Hydra says so
        yield
        return
    known[target], token = _Taking, _CURRENT.set((take, kind))
    try:
        yield
    finally:
        known[target] = kind
        _CURRENT.reset(token)


class _Taking(Launcher):
    """The launcher of `taking_from`, whose jobs give back records and files beside a value."""

    def __init__(self, **settings: Any) -> None:
        self._take, kind = _CURRENT.get()
        self._launcher = kind(**settings)
        self._lost_value: int | float | list[float] = FAILED

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See `Launcher`."""
        self._lost_value = result_of(FAILED, None, config.sweep.objective)
        self._launcher.setup(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Run jobs and return their values, as `Launcher` says; a lost job counts as failed."""
        name = type(self._launcher).__name__
        launch = _LAUNCHES.get(name, type(self._launcher).launch)
        ended = launch(self._launcher, job_overrides, initial_job_idx)
        jobs = []
        for number, (overrides, job) in enumerate(zip(job_overrides, ended, strict=False)):
            given = _given(job)
            self._take(initial_job_idx + number, list(overrides), given)
            jobs.append(JobReturn(status=JobStatus.COMPLETED))
            jobs[-1].return_value = given.value if isinstance(given, Returned) else self._lost_value
        return jobs


def _given(job: JobReturn | Exception) -> Returned | Exception:
    """Return what a job gave back, or why it did not."""
    if isinstance(job, Exception):
        return job
    try:
        given: Returned = job.return_value
    except Exception as error:  # noqa: BLE001 - whatever it was: the job is lost, no other one
        return error
    return given


# ---- launchers whose jobs may be lost one by one -------------------------------------------------


def _on_ray(launcher: Any, job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
    """Run jobs as `RayLauncher` does, which gives all of them up at the first that is lost."""
    import ray
    from hydra_plugins.hydra_ray_launcher._launcher_util import launch_job_on_ray, start_ray

    setup_globals()
    configure_log(launcher.config.hydra.hydra_logging, launcher.config.hydra.verbose)
    start_ray(launcher.ray_cfg.init)
    context, references = launcher.hydra_context, []
    for number, overrides in enumerate(job_overrides, first):
        config = context.config_loader.load_sweep_config(launcher.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = f"job_id_for_{number}", number
            # Ray's processes stand in the folder that the node was started in.
            config.hydra.sweep.dir = str(Path(config.hydra.sweep.dir).absolute())
        references.append(
            launch_job_on_ray(
                context,
                launcher.ray_cfg.remote,
                config,
                launcher.task_function,
                Singleton.get_state(),
            )
        )
    return _gathered(references, ray.get, ray.cancel)


def _on_submitit(launcher: Any, job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
    """Run jobs as submitit's launchers do, which give all up at the first that is lost."""
    import submitit
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    cluster, settings = launcher._EXECUTOR, dict(launcher.params)
    shared = OmegaConf.structured(BaseQueueConf).keys()
    named = {k if k in shared else f"{cluster}_{k}": value for k, value in settings.items()}
    timeouts = f"{cluster}_max_num_timeout"
    executor = submitit.AutoExecutor(
        folder=named.pop("submitit_folder"),
        cluster=cluster,
        **({timeouts: named.pop(timeouts)} if timeouts in named else {}),
    )
    executor.update_parameters(**named)
    with executor.batch():  # one array of jobs
        jobs = [
            executor.submit(
                launcher,
                list(overrides),
                "hydra.sweep.dir",
                number,
                f"job_id_for_{number}",
                Singleton.get_state(),
            )
            for number, overrides in enumerate(job_overrides, first)
        ]
    return _gathered(jobs, lambda job: job.result(), lambda job: job.cancel(check=False))


_LAUNCHES: dict[str, Callable[[Any, Sequence[Sequence[str]], int], Sequence[Any]]] = {
    "RayLauncher": _on_ray,
    "LocalLauncher": _on_submitit,
    "SlurmLauncher": _on_submitit,
}
"""How jobs are run by launchers of that name, so that each ends by itself."""


def _gathered(
    jobs: Sequence[Any], wait: Callable[[Any], Any], cancel: Callable[[Any], Any]
) -> list[JobReturn | Exception]:
    """Wait for each job's result; if that is interrupted, cancel all."""
    try:
        return [_ended(wait, job) for job in jobs]
    except BaseException:
        for job in jobs:
            cancel(job)
        raise


def _ended(wait: Callable[[Any], Any], job: Any) -> Any:
    try:
        return wait(job)
    except Exception as error:  # noqa: BLE001 - its machine is gone, it was killed, or never ran
        return error
