"""Files of a checkpoint: JSON, safetensors, and whether they hold what a model needs.

In: a path. Out: what the file holds, or a `ConfigError` that names it. Knows nothing of modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pcgsvc.errors import ConfigError
from pcgsvc.models.extras import require

Shape = tuple[int, ...]


def read_json(path: Path, kind: type = dict, *, setting: str = "model.weights") -> Any:
    """Return the content of a JSON file whose outermost value is of `kind`.

    Raises:
        ConfigError: there is no such file, or it holds something else; the message begins with
            `setting`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{setting}: '{path}' does not exist; it has the dimensions of the checkpoint "
            "and must lie beside it."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: '{path}' cannot be read: {type(error).__name__}: {error}."
        ) from error
    if not isinstance(content, kind):
        word = "object" if kind is dict else kind.__name__
        raise ConfigError(f"{setting}: '{path}' is no JSON {word}.")
    return content


def check_stated(
    path: Path, data: Mapping[str, Any], needed: Mapping[str, Any], model: str
) -> None:
    """Raise ConfigError if a config.json states other values; what it leaves out is as needed."""
    for key, wanted in needed.items():
        if data.get(key, wanted) != wanted:
            raise ConfigError(
                f"model.weights: '{path}' has {key}={data[key]!r}; {model} has {wanted!r} alone."
            )


def open_safetensors(file: Path, extra: str) -> Any:
    """Return the package's handle of a file, from which tensors are read by name.

    Args:
        file: a `.safetensors` file.
        extra: of pcgsvc, which brings the package.

    Raises:
        ConfigError: the file is truncated or damaged, or the package is missing.
    """
    package = require("safetensors", extra)
    try:
        return package.safe_open(str(file), framework="pt")
    except (package.SafetensorError, OSError) as error:
        raise ConfigError(
            f"model.weights: '{file}' is truncated or damaged: {error}. Fetch it again."
        ) from error


def check_tensors(
    path: Path,
    needed: Mapping[str, Shape],
    there: Mapping[str, Shape],
    *,
    own_name: Callable[[str], str],
    model: str,
) -> None:
    """Raise ConfigError unless a file has the tensors that are needed, and no others.

    Args:
        path: of the file, for messages.
        needed: shapes by name.
        there: shapes by name, as the file has them.
        own_name: what the file calls, or would call, a tensor.
        model: what needs them, as the start of a sentence.
    """
    for word, names in (
        ("lacks", needed.keys() - there.keys()),
        ("has surplus", there.keys() - needed.keys()),
    ):
        if names:
            found = sorted(map(own_name, names))
            shown = ", ".join(found[:6]) + (", …" if len(found) > 6 else "")
            raise ConfigError(
                f"model.weights: '{path}' {word} {len(found)} tensors: {shown}. {model} has "
                f"{len(needed)}; convert it again."
            )
    for name, shape in needed.items():
        if there[name] != shape:
            raise ConfigError(
                f"model.weights: '{path}' has {own_name(name)} in the shape {list(there[name])}; "
                f"its dimensions ask for {list(shape)}."
            )
