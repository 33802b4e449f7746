"""The process group of `model.moe.backend=all_to_all`, torch.distributed's default one.

In: a config and the environment. Out: this process's place among the processes. In Python, you
create and destroy the process group: `init_process_group` before the build, `destroy_process_group`
after `runner.close()`. The command line does both for each job, with the processes that torchrun
has started or with itself alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import distributed

from pcgsvc.config import Config, MoeBackend
from pcgsvc.config.devices import device_of
from pcgsvc.errors import ConfigError

_SETTING = "model.moe.backend=all_to_all"


@dataclass(frozen=True)
class Place:
    """One process among those that share the experts."""

    rank: int = 0
    world: int = 1


def uses_group(config: Config) -> bool:
    """Whether a job's boundaries wait for other processes."""
    return config.model.name == "llama_moe" and config.model.moe.backend is MoeBackend.ALL_TO_ALL


def place_of(config: Config) -> Place:
    """Return this process's place in the group, or in the one that the command line will create."""
    if not uses_group(config):
        return Place()
    if _initialised():
        return Place(distributed.get_rank(), distributed.get_world_size())
    return _launched() or Place(0, config.parallel.tensor)


def tensor_place(config: Config) -> Place:
    """Return this process's place among the ranks of `parallel.tensor`; the first of a plan's."""
    here = Place(distributed.get_rank()) if _initialised() else _launched() or Place()
    return Place(here.rank, config.parallel.tensor) if config.parallel.tensor > 1 else Place()


def require_group(device: torch.device) -> None:
    """Raise `ConfigError` unless there is a group that can exchange tensors of `device`."""
    if not _initialised():
        raise ConfigError(
            f"{_SETTING}: there is no process group. Call torch.distributed.init_process_group() "
            "before the runner is built (and destroy_process_group() after it is closed), start "
            "the command line, which makes one, or use model.moe.backend=local."
        )
    backend = distributed.get_backend()
    wrong = {"gloo": "cuda", "nccl": "cpu"}.get(backend)
    if wrong == device.type:
        need = "nccl" if device.type == "cuda" else "gloo"
        raise ConfigError(
            f"{_SETTING}: the process group has the backend {backend!r}, which cannot exchange "
            f"rows on {device}; initialise it with {need!r}, or set device="
            f"{'cpu' if device.type == 'cuda' else 'cuda'}."
        )


@contextlib.contextmanager
def command_line_group(config: Config) -> Iterator[None]:
    """Create the group that a job needs, for a block; an existing group is left alone."""
    if not uses_group(config) or _initialised():
        yield
        return
    if not distributed.is_available():
        raise ConfigError(f"{_SETTING}: this torch was built without torch.distributed; use local.")
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
    finally:
        distributed.destroy_process_group()


def refuse_sweep(config: Config) -> None:
    """Raise `ConfigError` for a job of a sweep that several processes would have to share.

    Each job of a sweep has a process of its own, and torchrun's processes meet once.
    """
    world = place_of(config).world
    if world > 1:
        raise ConfigError(
            f"{_SETTING}: a sweep cannot be spread over {world} processes; start torchrun once for "
            "each job, without -m."
        )


def rank_of_process() -> int:
    """Return this process's rank, or 0 where there is no group."""
    return distributed.get_rank() if _initialised() else 0


def _initialised() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _launched() -> Place | None:
    """Return the place that torchrun gave to this process, or None."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
