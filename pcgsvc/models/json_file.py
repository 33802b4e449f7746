"""JSON files beside a checkpoint.

In: a path. Out: what the file holds, or an error that names it. Knows nothing of models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pcgsvc.errors import ConfigError


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the content of a JSON file whose outermost value is of `kind`.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"model.weights: '{path}' does not exist; it has the dimensions of the checkpoint "
            "and must lie beside it."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.weights: '{path}' cannot be read: {error}.") from error
    if not isinstance(content, kind):
        word = "object" if kind is dict else kind.__name__
        raise ConfigError(f"model.weights: '{path}' holds no JSON {word}.")
    return content
