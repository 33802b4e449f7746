"""What a checkpoint's generation_config.json asks for, and what of it greedy decoding leaves out.

In: a `Source`. Out: the file's content, and a warning. Knows nothing of tokenizers or weights.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from pcgsvc.models.files import read_json
from pcgsvc.models.hf.source import Source

logger = logging.getLogger(__name__)

_HARMLESS = re.compile(
    r"(bos|eos|pad|decoder_start)_token_id|max_(length|new_tokens)|(output|return|cache)_\w+|use_cache"
    r"|disable_compile|early_stopping|renormalize_logits|_from_model_config|transformers_version"
)
"""End tokens are honoured, lengths are the caller's; the others change no token."""
_SAMPLING = re.compile(r"temperature|(top|min|typical)_[hkp]|(epsilon|eta)_cutoff")
"""What changes no token unless do_sample is set."""


def generation_config(source: Source) -> dict[str, Any]:
    """Return the content of generation_config.json; empty if there is none beside the weights."""
    file = (source.folder or Path()) / "generation_config.json"
    if source.folder is None or source.gguf is not None or not file.is_file():
        return {}
    content: dict[str, Any] = read_json(file, setting=source.setting)
    return content


def warn_of_generation(source: Source) -> None:
    """Warn of whatever in generation_config.json gives other tokens than greedy decoding."""
    stated = generation_config(source)
    left_out = [
        f"{name}={value!r}"
        for name, value in stated.items()
        if not _HARMLESS.fullmatch(name)
        and not _is_neutral(name, value)
        and (stated.get("do_sample") or not _SAMPLING.fullmatch(name))
    ]
    if left_out:
        logger.warning(
            "%s: the generation_config.json of '%s' asks for %s; generate is greedy and applies "
            "none of it",
            source.setting,
            source.label,
            ", ".join(left_out),
        )


def _is_neutral(name: str, value: Any) -> bool:
    if name.endswith("_token_id"):
        return value is None
    factor = _SAMPLING.fullmatch(name) or "penalty" in name or name.startswith("num_")
    return not value or (factor and value == 1)
