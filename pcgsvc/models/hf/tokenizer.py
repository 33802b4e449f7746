"""The tokenizer beside a checkpoint, behind pcgsvc's protocol.

In: a `Source`. Out: a `base.Tokenizer`, or None. Knows nothing of models.
"""

from __future__ import annotations

import logging
from typing import Any

from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import Tokenizer
from pcgsvc.models.files import require
from pcgsvc.models.gguf_file import GgufFile
from pcgsvc.models.hf.generation import generation_config
from pcgsvc.models.hf.source import Source
from pcgsvc.models.tokenizer import GgufTokenizer, unsupported

logger = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def has_tokenizer(source: Source) -> bool:
    """Whether there is a tokenizer beside the weights; only the directory is read."""
    folder = source.folder
    return source.gguf is not None or (
        folder is not None and any((folder / name).is_file() for name in _FILES)
    )


def load_tokenizer(source: Source) -> Tokenizer | None:
    """Return the checkpoint's tokenizer; None where there is none.

    Raises:
        ConfigError: its files cannot be read.
    """
    if source.path is None or not has_tokenizer(source):
        return None
    if source.gguf is not None:
        metadata = GgufFile(source.path).metadata
        if unsupported(metadata) is None:
            # transformers cuts the text of some of them otherwise; see models/tokenizer.py.
            return GgufTokenizer(metadata)
    return HfTokenizer(source)


class HfTokenizer:
    """`transformers.AutoTokenizer` of a directory or GGUF file; implements `base.Tokenizer`."""

    eos_token_ids: frozenset[int]

    def __init__(self, source: Source) -> None:
        options = {"gguf_file": source.gguf} if source.gguf else {}
        try:
            self._tokenizer: Any = require("transformers", "hf").AutoTokenizer.from_pretrained(
                source.folder, local_files_only=True, trust_remote_code=False, **options
            )
        except Exception as error:
            own = "it asks for code of its own (auto_map), which is not run."
            raise ConfigError(
                f"{source.setting}: the tokenizer of '{source.label}' cannot be read: "
                f"{own if 'trust_remote_code' in str(error) else error}"
            ) from error
        ends = {self._tokenizer.eos_token_id, *_ends(source)}
        self.eos_token_ids = frozenset(end for end in ends if isinstance(end, int))
        """Ends that the tokenizer, the config and generation_config.json name."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain `text`, special tokens included where the model wants them."""
        return list(self._tokenizer.encode(text))

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of one user message, up to where the assistant's answer begins.

        A checkpoint without a chat template has its text continued as it is, and says so.
        """
        if self._tokenizer.chat_template is None:
            logger.warning("prompt: the checkpoint has no chat template; the text is continued")
            return self.encode(text)
        message = [{"role": "user", "content": text}]
        chat = self._tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(chat, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _ends(source: Source) -> list[Any]:
    """Return the end tokens of the config and of generation_config.json."""
    config, generation = source.config, generation_config(source)
    found = [getattr(config, "eos_token_id", None), generation.get("eos_token_id")]
    return [end for ends in found for end in (ends if isinstance(ends, list) else [ends])]
