"""Where the checkpoints are that `scripts/fetch-…` fetches: of `model=smollm2` and `model=minilm`.

In: `model.weights`, or the environment. Out: a path. Knows nothing of what is in it.
"""

from __future__ import annotations

import os
from pathlib import Path

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError

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
