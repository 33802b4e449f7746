"""Settings that are left open -> the values that are used.

In: a config and the kind of device. Out: a config without device-dependent None, whose capture
sizes are final. Imports no torch.
"""

from __future__ import annotations

from pcgsvc.config.choices import Collectives, Compiler, Graphs, Mode, Strategy
from pcgsvc.config.limits import validate_sizes
from pcgsvc.config.parse import copy
from pcgsvc.config.schema import CaptureConfig, Config

GEMV_ROWS = 16
"""Most rows of a product that the pass `gemv` replaces; with more the arithmetic counts as well."""
_PROMPT_SIZE = 16
"""Largest capture size, in tokens, where a job only continues a prompt."""


def schedule(max_size: int, query_len: int = 1) -> list[int]:
    """Return the default capture sizes up to `max_size` tokens, which is always one of them.

    Powers of two and one and a half times those: at most a third of a replay is padding above 8.
    All but `max_size` are moved up to whole requests of `query_len` tokens.
    """
    sizes = {1, 2, 4, 8}
    power = 16
    while power <= max_size:
        sizes |= {power, power + power // 2}
        power *= 2
    largest = max_size - max_size % query_len
    whole = {-(-size // query_len) * query_len for size in sizes} | {largest}
    return sorted({s for s in whole if 0 < s <= max_size} | {max_size})


def resolve(config: Config, *, device_type: str) -> Config:
    """Return a copy in which every device-dependent None has become the value that is used.

    Its `capture.sizes` ascend and are within `capture.max_size`: what `dropped_sizes` returns of
    `config` is not among them.

    Args:
        config: as composed; `auto:FILE` has been replaced by sizes.
        device_type: `cpu` or `cuda`.

    Raises:
        ConfigError: capture sizes below 1, named twice, or none within `capture.max_size`.
    """
    cuda = device_type == "cuda"
    out = copy(config)
    if out.compiler.name is None:
        out.compiler.name = Compiler.INDUCTOR if cuda else Compiler.EAGER
    if cuda and out.compiler.name is Compiler.INDUCTOR and out.compiler.passes is None:
        out.compiler.passes = ["residual_add"]
    if out.dtype is None and out.model.name != "module":
        out.dtype = "bfloat16" if cuda else "float32"
    _resolve_sizes(out.capture, 512 if cuda else 64, few=out.prompt is not None)
    compiled_whole = out.partition.strategy is not Strategy.BREAKABLE
    if cuda and compiled_whole and wants_gemv(out) and not out.compiler.specialize_sizes:
        sizes = out.capture.final_sizes
        out.compiler.specialize_sizes = [size for size in sizes if size <= GEMV_ROWS]
    if out.bench.enabled is None:
        out.bench.enabled = out.prompt is None
    if out.bench.reduce_overhead is None:
        out.bench.reduce_overhead = cuda
    if out.capture.graphs is Graphs.AUTO:
        out.capture.graphs = Graphs.CUDA if cuda else Graphs.RECORDED
    if out.parallel.collectives is None:
        out.parallel.collectives = Collectives.REGION if cuda else Collectives.BOUNDARY
    if out.attention.max_model_len is None:
        out.attention.max_model_len = 2048 if cuda else 256
    return out


def wants_gemv(config: Config) -> bool:
    """Return whether the pass `gemv` is asked for."""
    return "gemv" in (config.compiler.passes or ())


def captures(config: Config) -> bool:
    """Return whether graphs are captured at all."""
    return config.mode is not Mode.NONE and config.capture.graphs is not Graphs.OFF


def _resolve_sizes(capture: CaptureConfig, default_max: int, *, few: bool) -> None:
    named = _named(capture)
    if capture.max_size is None:
        capture.max_size = max([default_max, *named])
    sizes = named
    if capture.sizes is None:
        sizes = schedule(capture.max_size, capture.uniform_query_len)
        if few:  # one prompt: a step of many tokens, then one token each
            sizes = sorted({1, min(capture.max_size, _PROMPT_SIZE)})
    validate_sizes(sizes, capture.max_size)
    capture.sizes = sorted(s for s in sizes if s <= capture.max_size)


def dropped_sizes(capture: CaptureConfig) -> list[int]:
    """Return the sizes that are named and that `resolve` drops, as above `max_size`; ascending."""
    limit = capture.max_size
    return [] if limit is None else sorted(s for s in _named(capture) if s > limit)


def _named(capture: CaptureConfig) -> list[int]:
    assert not isinstance(capture.sizes, str), "capture.sizes=auto: was not replaced by sizes"
    return capture.sizes or []
