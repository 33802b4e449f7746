"""`model=smollm2`: where SmolLM2-135M-Instruct's checkpoint lies.

In: `model.weights`, or the environment. Out: the path of a GGUF file that exists. The model itself
is `llama.Llama`, its dimensions and tokenizer come from the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""What `scripts/fetch-smollm2` puts into the models directory."""


def models_dir() -> Path:
    """Return where checkpoints are kept: PCGSVC_MODELS_DIR, or the user's data directory."""
    own = os.environ.get("PCGSVC_MODELS_DIR")
    if own:
        return Path(own).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "pcgsvc" / "models"


def find_weights(model: ModelConfig) -> Path:
    """Return the checkpoint's path.

    Raises:
        ConfigError: it does not exist, or `model.weights` names no GGUF file (its tokenizer is
            needed).
    """
    if model.weights is not None:
        path = Path(model.weights).expanduser()
        if path.suffix != ".gguf":
            raise ConfigError(
                f"model.weights: got '{path}'; model=smollm2 needs a .gguf file, which has the "
                "tokenizer in it. Use model=llama for other checkpoints."
            )
        return path
    path = models_dir() / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            f"model.weights: model=smollm2 was looked for as '{path}', which does not exist. "
            "Run scripts/fetch-smollm2, set PCGSVC_MODELS_DIR, or name a file as model.weights."
        )
    return path
