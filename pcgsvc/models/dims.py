"""Dimensions of any family: checked, taken from a preset, the config or a checkpoint.

In: `ModelConfig`, presets, or a checkpoint's statements. Out: a dataclass of dimensions, whose
fields are named as the settings `model.*`. Knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError, near

D = TypeVar("D")


def check_numbers(dims: Any) -> None:
    """Raise ConfigError unless every int and float of a dataclass is one, and above 0."""
    for field in fields(dims):
        if field.type not in ("int", "float"):
            continue
        value, whole = getattr(dims, field.name), field.type == "int"
        if type(value) not in ((int,) if whole else (int, float)):
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"model.{field.name}: got {value!r}, {kind} is needed.")
        if not value > 0:
            raise ConfigError(f"model.{field.name}: got {value}, more than 0 is needed.")


def dim_settings(kind: type) -> list[str]:
    """Return those dimensions of a dataclass that `model.*` can set."""
    settings = {f.name for f in fields(ModelConfig)}
    return [f.name for f in fields(kind) if f.name in settings]


def explicit_dims(model: ModelConfig, kind: type) -> dict[str, Any]:
    """Return those dimensions of a dataclass that the config sets itself, by name."""
    values = {name: getattr(model, name) for name in dim_settings(kind)}
    return {name: value for name, value in values.items() if value is not None}


def find_preset(model: ModelConfig, presets: Mapping[str, D]) -> D:
    """Return the preset that the config names; ConfigError lists the choices."""
    preset = presets.get(model.preset)
    if preset is None:
        raise ConfigError(
            f"model.preset: got {model.preset!r}{near(model.preset, presets)} "
            f"Choices: {', '.join(presets)}."
        )
    return preset


def stated_dims(kind: type[D], path: Path, **values: Any) -> D:
    """Return the dimensions that a checkpoint states; ConfigError names the checkpoint."""
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(
            f"model.weights: '{path}' states dimensions that cannot be: {error}"
        ) from error
