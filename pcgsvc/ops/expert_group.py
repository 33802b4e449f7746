"""The processes that run one model together, in torch.distributed's default group.

In: a config and the environment. Out: this process's place among the processes. In Python, you
create and destroy the process group: `init_process_group` before the build, `destroy_process_group`
after `runner.close()`. The command line does both for each job, with the processes that torchrun
has started or, for `model.moe.backend=all_to_all`, with itself alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import distributed

from pcgsvc.config import Config, Job, MoeBackend
from pcgsvc.config.devices import device_of
from pcgsvc.errors import ConfigError, PeerError
from pcgsvc.ops.collectives import rank_and_world

_EXPERTS = "model.moe.backend=all_to_all"
_BUILDS = (Job.RUN, Job.COMPILE, Job.VERIFY, Job.DOCTOR)
"""Jobs that run a model; a plan for many ranks is made by one process."""


@dataclass(frozen=True)
class Place:
    """One process among those that share a model."""

    rank: int = 0
    world: int = 1


def shares_experts(config: Config) -> bool:
    """Whether each process holds some of the experts."""
    return config.model.name == "llama_moe" and config.model.moe.backend is MoeBackend.ALL_TO_ALL


def uses_group(config: Config) -> bool:
    """Whether a job's processes wait for each other in each call."""
    return config.parallel.tensor > 1 or shares_experts(config)


def place_of(config: Config) -> Place:
    """Return this process's place among those that share the experts; the first of a plan's."""
    return (_here() or Place(0, config.parallel.tensor)) if shares_experts(config) else Place()


def tensor_place(config: Config) -> Place:
    """Return this process's place among the ranks of `parallel.tensor`; the first of a plan's."""
    world = config.parallel.tensor
    return Place((_here() or Place()).rank, world) if world > 1 else Place()


def check_launch(config: Config) -> None:
    """Raise `ConfigError` unless torchrun has started as many processes as a job needs."""
    world, launched = config.parallel.tensor, _launched() or Place()
    if config.job not in _BUILDS or (world == 1 and _may_be_many(config)) or rank_and_world():
        return
    if launched.world != world:
        started = f"torchrun has started {launched.world}" if launched.world > 1 else "this is one"
        raise ConfigError(
            f"parallel.tensor: got {world}, which takes as many processes, and {started}. Run: "
            + (f"torchrun --nproc-per-node {world} -m pcgsvc …" if world > 1 else "pcgsvc …")
            + (f", or set parallel.tensor={launched.world}." if launched.world > 1 else "")
        )
    here = torch.cuda.device_count() if device_of(config).type == "cuda" else world
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if local > max(1, here):  # whether the one device of one process is there is not asked here
        raise ConfigError(
            f"parallel.tensor: got {world}, with {local} processes on this machine, which has "
            f"{here} CUDA devices; each process needs one of its own."
        )


def _may_be_many(config: Config) -> bool:
    """Whether any number of processes may run a model that is not shared out by its features."""
    return shares_experts(config) or config.model.name == "module"


def require_group(config: Config, device: torch.device) -> None:
    """Raise `ConfigError` unless there is the group that a model's processes need on `device`."""
    world = config.parallel.tensor
    if not uses_group(config):
        return
    setting = f"parallel.tensor={world}" if world > 1 else _EXPERTS
    if rank_and_world() is None:
        raise ConfigError(
            f"{setting}: there is no process group. Call torch.distributed.init_process_group() "
            "before the runner is built (and destroy_process_group() after it is closed), start "
            f"the command line, which makes one, or {_without(world)}."
        )
    backend = distributed.get_backend()
    wrong = {"gloo": "cuda", "nccl": "cpu"}.get(backend)
    if wrong == device.type:
        need = "nccl" if device.type == "cuda" else "gloo"
        raise ConfigError(
            f"{setting}: the process group has the backend {backend!r}, which cannot exchange "
            f"rows on {device}; initialise it with {need!r}, or set device="
            f"{'cpu' if device.type == 'cuda' else 'cuda'}."
        )
    if world not in (1, distributed.get_world_size()):
        raise ConfigError(
            f"{setting}: the process group has {distributed.get_world_size()} processes; "
            f"initialise it with {world}."
        )


def _without(world: int) -> str:
    return "leave it out" if world > 1 else "use model.moe.backend=local"


@contextlib.contextmanager
def command_line_group(config: Config) -> Iterator[None]:
    """Create the group that a job needs, for a block; an existing group is left alone."""
    if not uses_group(config) or config.job not in _BUILDS or rank_and_world():
        yield
        return
    if not distributed.is_available():
        raise ConfigError(
            f"this torch was built without torch.distributed; {_without(config.parallel.tensor)}."
        )
    launched = _launched()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if launched is not None and torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)  # what `device=auto` and `device=cuda` mean from here on
    name = "nccl" if device_of(config).type == "cuda" else "gloo"
    if launched is None or launched.world == 1:
        store = distributed.HashStore()  # type: ignore[attr-defined]  # public, not exported
        distributed.init_process_group(name, store=store, rank=0, world_size=1)
    else:
        distributed.init_process_group(name)
    try:
        yield
    except PeerError:
        raise  # the group would wait for a process that is gone
    except BaseException:
        distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


def refuse_sweep(config: Config) -> None:
    """Raise `ConfigError` for a job of a sweep that several processes would have to share.

    Each job of a sweep has a process of its own, and torchrun's processes meet once.
    """
    world = (_launched() or Place()).world
    if uses_group(config) and world > 1:
        setting = _EXPERTS if config.parallel.tensor == 1 else "parallel.tensor"
        raise ConfigError(
            f"{setting}: a sweep cannot be spread over {world} processes; start torchrun once for "
            "each job, without -m."
        )


def _here() -> Place | None:
    """Return the place of this process in the group, or in the one that the command line makes."""
    place = rank_and_world()
    return _launched() if place is None else Place(*place)


def _launched() -> Place | None:
    """Return the place that torchrun gave to this process, or None."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
