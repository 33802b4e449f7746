"""Ranges and combinations of settings that can be judged without building anything.

In: a resolved config. Out: nothing, or a `ConfigError`. Imports no torch.
"""

from __future__ import annotations

import typing
from dataclasses import is_dataclass
from typing import Any

from pcgsvc.config.choices import AtLeast, Compiler, Graphs, Mode, OnUncovered, Strategy
from pcgsvc.config.parse import to_dict
from pcgsvc.config.schema import CompilerConfig, Config
from pcgsvc.errors import ConfigError

_MAX_SEED = 2**63 - 2  # torch's generators take 64 bits with a sign, and seed + 1 is used as well


def validate(config: Config, *, device_type: str) -> None:
    """Check every range and every combination that can be judged without building anything.

    Args:
        config: a resolved config; `resolve` has checked its capture sizes.
        device_type: `cpu` or `cuda`.

    Raises:
        ConfigError: naming the setting, what was got and what to do.
    """
    _check_least(config)
    if config.seed > _MAX_SEED:
        raise ConfigError(f"seed: got {config.seed}, at most {_MAX_SEED} is possible.")
    _validate_combinations(config, device_type)
    validate_sizing(config)


def _check_least(group: Any, prefix: str = "") -> None:
    """Check every number of a dataclass, and of those in it, whose field names its least value."""
    for name, hint in typing.get_type_hints(type(group), include_extras=True).items():
        value, path = getattr(group, name), f"{prefix}{name}"
        if is_dataclass(value):
            _check_least(value, f"{path}.")
        for kind in (hint, *typing.get_args(hint)):  # `X | None` has the marks in its X
            for mark in getattr(kind, "__metadata__", ()):
                if isinstance(mark, AtLeast):
                    _at_least(path, value, mark.least)


def _at_least(path: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{path}: got {value}, at least {least} is needed.")


def validate_sizing(config: Config) -> None:
    """Check what choosing capture sizes reads; before `capture.sizes=auto:FILE` is replaced."""
    sizing, scheduler = config.sizing, config.sizing.scheduler
    _check_least(config.capture, "capture.")
    _check_least(sizing, "sizing.")
    if sizing.min_gain > 1:
        raise ConfigError(f"sizing.min_gain: got {sizing.min_gain}, at most 1 is possible.")
    if sizing.row_us <= 0:
        raise ConfigError(f"sizing.row_us: got {sizing.row_us}, a number above 0 is needed.")
    if sizing.cost is not None and sizing.has_modelled_times:
        raise ConfigError(
            "sizing.fixed_us and sizing.row_us: set, but sizing.cost is there, whose report gives "
            "the times; leave one of them out."
        )
    least = scheduler.max_num_seqs * (1 + scheduler.speculative_len)
    if scheduler.max_num_batched_tokens < least:
        raise ConfigError(
            f"sizing.scheduler.max_num_batched_tokens: got {scheduler.max_num_batched_tokens}, at "
            f"least {least} is needed: {scheduler.max_num_seqs} requests (max_num_seqs) of "
            f"{1 + scheduler.speculative_len} tokens (1 + speculative_len)."
        )


def validate_sizes(sizes: list[int], max_size: int) -> None:
    """Check capture sizes as they are named, before those above `max_size` are dropped."""
    _at_least("capture.max_size", max_size, 1)
    if not sizes:
        raise ConfigError("capture.sizes: got [], at least one size is needed; or set mode=none.")
    _check_token_counts("capture.sizes", sizes)
    if min(sizes) > max_size:
        raise ConfigError(
            f"capture.max_size: got {max_size}, which is below every capture size {sizes}; "
            "raise it, or name smaller sizes."
        )


def _check_token_counts(path: str, sizes: list[int]) -> None:
    bad = [s for s in sizes if s < 1]
    if bad:
        raise ConfigError(f"{path}: got {bad} among {sizes}; sizes are token counts, at least 1.")
    twice = sorted({s for s in sizes if sizes.count(s) > 1})
    if twice:
        raise ConfigError(f"{path}: {twice} appear twice in {sizes}; name each size once.")


def _validate_combinations(config: Config, device_type: str) -> None:
    if config.capture.graphs is Graphs.CUDA and device_type != "cuda":
        raise ConfigError(
            f"capture.graphs: got 'cuda' with device={config.device!r}, which is no GPU; "
            "use capture.graphs=recorded or auto, or device=cuda."
        )
    if config.capture.graphs is Graphs.RECORDED and device_type == "cuda":
        raise ConfigError(
            "capture.graphs: got 'recorded' with a CUDA device; recordings are the CPU's stand-in. "
            "Use capture.graphs=cuda, auto or off."
        )
    if config.capture.graphs is Graphs.OFF and config.mode is not Mode.NONE:
        for path, refuses in (
            ("on_uncovered=error", config.on_uncovered is OnUncovered.ERROR),
            ("strict=true", config.strict),
        ):
            if refuses:
                raise ConfigError(
                    f"capture.graphs: got 'off' with {path} and mode={config.mode.value}, so that "
                    "every call would be refused; set mode=none, or capture graphs."
                )
    if config.partition.strategy is Strategy.INDUCTOR:
        if config.compiler.name is not Compiler.INDUCTOR:
            raise ConfigError(
                "partition.strategy: got 'inductor' with compiler=eager; it partitions what "
                "Inductor has fused. Use compiler=inductor, or partition.strategy=fx."
            )
        if device_type != "cuda":
            raise ConfigError(
                f"partition.strategy: got 'inductor' with device={config.device!r}: on the CPU "
                "Inductor makes no partitions and its kernels cannot be recorded. Use "
                "partition.strategy=fx, or device=cuda."
            )
    breakable = config.partition.strategy is Strategy.BREAKABLE
    if breakable and config.compiler.name is Compiler.INDUCTOR and device_type != "cuda":
        raise ConfigError(
            "compiler: got 'inductor' with partition.strategy=breakable on the CPU, whose Inductor "
            "kernels cannot be recorded. Use compiler=eager, or device=cuda."
        )
    if config.partition.compile_modules is not None and not (
        breakable and config.compiler.name is Compiler.INDUCTOR
    ):
        raise ConfigError(
            "partition.compile_modules: set, but it is read with partition.strategy=breakable and "
            "compiler=inductor only."
        )
    _validate_compiler(config.compiler)
    _validate_specialized(config)
    if config.debug.poison and config.capture.graphs is not Graphs.RECORDED:
        raise ConfigError(
            f"debug.poison: needs capture.graphs=recorded, got {config.capture.graphs.value!r}."
        )


def _validate_compiler(compiler: CompilerConfig) -> None:
    """Refuse settings of Inductor's where it is not used."""
    if compiler.options.get("freezing"):
        raise ConfigError(
            "compiler.options.freezing: it folds weights into the code, where "
            "runner.load_state_dict and other updates would not be seen; leave it out."
        )
    unset = to_dict(CompilerConfig(name=compiler.name))
    changed = [name for name, value in to_dict(compiler).items() if value and value != unset[name]]
    if changed and compiler.name is not Compiler.INDUCTOR:
        raise ConfigError(
            f"compiler.{changed[0]}: set, but compiler=eager does not read it; use "
            "compiler=inductor."
        )


def _validate_specialized(config: Config) -> None:
    """Refuse exact sizes that no call could reach."""
    wanted, captured = config.compiler.specialize_sizes, config.capture.final_sizes
    _check_token_counts("compiler.specialize_sizes", wanted)
    unreachable = [s for s in wanted if s not in captured]
    if unreachable:
        raise ConfigError(
            f"compiler.specialize_sizes: {unreachable} are no capture sizes, so calls of that size "
            f"are padded to another one and never get there. Capture sizes: {captured}. Add them "
            "to capture.sizes, or leave them out here."
        )
    if wanted and config.partition.strategy is Strategy.BREAKABLE:
        raise ConfigError(
            "compiler.specialize_sizes: not read with partition.strategy=breakable; use "
            "partition.strategy=fx or inductor."
        )
