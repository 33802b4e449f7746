"""The one door from a config as composed to a config that can be built.

In: a config. Out: a `Resolved`: its device, the config with every open setting decided, and what it
asks for and does not get. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pcgsvc.config import Config, dropped_sizes, resolve, validate
from pcgsvc.config.devices import device_of
from pcgsvc.sizing.auto import with_sizes
from pcgsvc.sizing.choice import SizePlan


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config that can be built on a device."""

    config: Config
    """Validated; nothing device-dependent is open, and `capture.sizes` are final."""
    device: torch.device
    sizes: SizePlan | None
    """How the capture sizes were chosen; None: they were named, or are the default schedule."""
    warnings: list[str]
    """What the config asks for and is not done."""


def resolve_config(config: Config, *, module_device: torch.device | None = None) -> Resolved:
    """Choose sizes for `capture.sizes=auto:FILE`, decide what is open, and validate.

    Args:
        config: as composed, or resolved already.
        module_device: of a caller's own module, for which `device` and `attention` are not read;
            None: the config names device and model.

    Raises:
        ConfigError: no such device, a traffic file that cannot be used, or a setting out of range.
    """
    device = device_of(config) if module_device is None else module_device
    config, sizes = with_sizes(config, own_module=module_device is not None)
    resolved = resolve(config, device_type=device.type)
    validate(resolved, device_type=device.type)
    warnings = []
    if dropped := dropped_sizes(config.capture):
        limit = config.capture.max_size
        warnings.append(
            f"capture.sizes: {dropped} are above capture.max_size={limit} and are dropped"
        )
    return Resolved(config=resolved, device=device, sizes=sizes, warnings=warnings)
