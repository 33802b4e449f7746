"""Settings that are left open -> the values that are used.

In: a config and the kind of device. Out: a config without device-dependent None. Imports no torch.
"""

from __future__ import annotations

from pcgsvc.config.parse import copy
from pcgsvc.config.schema import CaptureConfig, Compiler, Config, Graphs


def schedule(max_size: int) -> list[int]:
    """Return the default capture sizes up to `max_size` tokens, which is always one of them.

    Powers of two and one and a half times those: at most a third of a replay is padding above 8.
    """
    sizes = {1, 2, 4, 8, max_size}
    power = 16
    while power <= max_size:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted(s for s in sizes if s <= max_size)


def resolve(config: Config, *, device_type: str) -> Config:
    """Return a copy in which every device-dependent None has become the value that is used.

    Args:
        config: as composed.
        device_type: `cpu` or `cuda`.
    """
    cuda = device_type == "cuda"
    out = copy(config)
    if out.compiler.name is None:
        out.compiler.name = Compiler.INDUCTOR if cuda else Compiler.EAGER
    if cuda and out.compiler.name is Compiler.INDUCTOR and out.compiler.passes is None:
        out.compiler.passes = ["residual_add"]
    if out.dtype is None and out.model.name != "module":
        out.dtype = "bfloat16" if cuda else "float32"
    if out.capture.max_size is None:
        out.capture.max_size = 512 if cuda else 64
        out.capture.max_size = max([out.capture.max_size, *listed(out.capture)])
    if out.capture.sizes is None:
        out.capture.sizes = schedule(out.capture.max_size)
    if out.capture.graphs is Graphs.AUTO:
        out.capture.graphs = Graphs.CUDA if cuda else Graphs.RECORDED
    if out.attention.max_model_len is None:
        out.attention.max_model_len = 2048 if cuda else 256
    return out


def listed(capture: CaptureConfig) -> list[int]:
    """Return the capture sizes as they stand; `auto:FILE` must have been replaced by then."""
    assert not isinstance(capture.sizes, str), "capture.sizes=auto: was not replaced by sizes"
    return capture.sizes or []
