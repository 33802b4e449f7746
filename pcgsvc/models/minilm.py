"""`model=minilm`: where all-MiniLM-L6-v2 lies, and the tokenizer of such checkpoints.

In: `model.weights`, or the environment. Out: the path of a folder that exists, and `WordPiece`. The
model itself is `encoder.Encoder`.
"""

from __future__ import annotations

from pathlib import Path

from pcgsvc.config import ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.models.extras import require
from pcgsvc.models.smollm2 import models_dir

FOLDER_NAME = "all-MiniLM-L6-v2"
"""What `scripts/fetch-minilm` puts into the models directory."""


def find_weights(model: ModelConfig) -> Path:
    """Return the checkpoint's path.

    Raises:
        ConfigError: it does not exist.
    """
    if model.weights is not None:
        return Path(model.weights).expanduser()
    path = models_dir() / FOLDER_NAME
    if not path.is_dir():
        raise ConfigError(
            f"model.weights: model=minilm was looked for as '{path}', which does not exist. Run "
            "scripts/fetch-minilm, set PCGSVC_MODELS_DIR, or name a folder as model.weights."
        )
    return path


class WordPiece:
    """The tokenizer of a `tokenizer.json`; its own padding and truncation are switched off.

    Raises:
        ConfigError: the file cannot be read, or the package `tokenizers` is missing.
    """

    def __init__(self, path: Path) -> None:
        package = require("tokenizers", "encoder")
        try:
            self._whole = package.Tokenizer.from_file(str(path))
            self._cut = package.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ConfigError(f"model.weights: '{path}' cannot be read: {error}.") from error
        for tokenizer in (self._whole, self._cut):
            tokenizer.no_padding()
            tokenizer.no_truncation()

    def encode(self, text: str, max_length: int | None = None) -> list[int]:
        """Return the ids of a text between its special tokens; of no more than `max_length`."""
        if max_length is None:
            return list(self._whole.encode(text).ids)
        self._cut.enable_truncation(max_length)
        return list(self._cut.encode(text).ids)
