"""Files of a checkpoint: where they lie, JSON, safetensors, whether they hold what a model needs.

In: a path. Out: what the file holds, or a `ConfigError` that names it, or the optional package that
would read it. Knows nothing of modules.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError

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
    """Return the package's handle of a `.safetensors` file, from which tensors are read by name.

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


def require(module: str, extra: str) -> Any:
    """Import `module` and return it (as Any: optional packages are not part of our types).

    Raises:
        ConfigError: it cannot be imported; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the Python package {module.partition('.')[0]!r} is needed here and cannot be "
            f"imported ({error}). Run: pip install 'pcgsvc[{extra}]'"
        ) from error


FETCHED = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "minilm": "all-MiniLM-L6-v2"}
"""By family, the file or folder that `scripts/fetch-<family>` puts into the models directory."""


def models_dir() -> Path:
    """Return where checkpoints are kept: PCGSVC_MODELS_DIR, or the user's data directory."""
    own = os.environ.get("PCGSVC_MODELS_DIR")
    if own:
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "pcgsvc" / "models"


def find_weights(model: ModelConfig) -> Path:
    """Return the path that `model.weights` names, or that of the family's fetched checkpoint.

    Raises:
        ConfigError: no weights are named, and nothing has been fetched.
    """
    if model.weights is not None:
        return Path(model.weights).expanduser()
    path = models_dir() / FETCHED[model.name]
    if not path.exists():
        raise ConfigError(
            f"model.weights: model={model.name} was looked for as '{path}', which does not exist. "
            f"Run scripts/fetch-{model.name}, set PCGSVC_MODELS_DIR, or name a checkpoint as "
            "model.weights."
        )
    return path
