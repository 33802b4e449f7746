"""Which device and dtype a config means on this machine.

In: a config. Out: torch's device and dtype. Knows nothing of models or graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pcgsvc.config.choices import Job
from pcgsvc.config.schema import Config
from pcgsvc.errors import ConfigError, near

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""What a model may be built in."""


def device_of(config: Config) -> torch.device:
    """Return the device that `config.device` means; ConfigError if there is none.

    What runs no model needs no device: `device=cuda` with `job=plan` or `job=sizes` is accepted on
    any machine. So it is with `job=doctor`, which tells of it.
    """
    word = config.device
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(word)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ConfigError(f"device: got {config.device!r}. Choices: auto, cpu, cuda, cuda:N.")
    if device.type == "cuda":
        if config.job in (Job.PLAN, Job.SIZES, Job.DOCTOR) and not is_here(device):
            return torch.device("cuda", device.index or 0)
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device: got {config.device!r}, but this machine has no CUDA device that torch "
                f"{torch.__version__} can use. Use device=cpu."
            )
        index: int | None = device.index  # torch annotates it as never None
        if index is None:
            # Asked before CUDA has started, torch would start it: a command line that only checks
            # its settings would hold a context, beside those of the jobs that it starts.
            index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device: got {config.device!r}; CUDA devices there are: "
                f"{torch.cuda.device_count()}."
            )
        device = torch.device("cuda", index)
    return device


def is_here(device: torch.device) -> bool:
    """Whether this machine has a device that torch can use."""
    if device.type != "cuda":
        return True
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def module_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype of a module's first parameter or buffer of floats; None if it has none."""
    if not isinstance(module, torch.nn.Module):
        return None
    tensors = [*module.parameters(), *module.buffers()]
    return next((t.dtype for t in tensors if t.dtype in _DTYPES.values()), None)


def dtype_of(config: Config) -> torch.dtype:
    """Return the dtype that a resolved config names; ConfigError lists the choices."""
    found = _DTYPES.get(str(config.dtype))
    if found is None:
        raise ConfigError(
            f"dtype: got {config.dtype!r}{near(str(config.dtype), _DTYPES)} "
            f"Choices: {', '.join(_DTYPES)}."
        )
    return found


def dtype_name(module: Callable[..., Any]) -> str:
    """Return what `dtype` is for a module that chose its own; float32 for one without floats."""
    return str(module_dtype(module) or torch.float32).removeprefix("torch.")
