"""What a checkpoint's generation_config.json asks for, and what of it is not done.

In: a `Source`. Out: the file's content; a `Sampling`, and a warning. Knows nothing of tokenizers or
weights.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from pcgsvc.errors import BatchError
from pcgsvc.forward.sampling import Sampling
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
_HONOURED = ("do_sample", "repetition_penalty", "temperature", "top_k", "top_p")


def generation_config(source: Source) -> dict[str, Any]:
    """Return the content of generation_config.json; empty if there is none beside the weights."""
    file = (source.folder or Path()) / "generation_config.json"
    if source.folder is None or source.gguf is not None or not file.is_file():
        return {}
    content: dict[str, Any] = read_json(file, setting=source.setting)
    return content


def sampling_of(source: Source) -> Sampling | None:
    """Return how generation_config.json has tokens chosen, with transformers' defaults.

    What of it gives other tokens and is not done is a warning; None: it says nothing.
    """
    stated = generation_config(source)
    told = {k: v for k, v in stated.items() if k in _HONOURED and v is not None}
    sampling = None
    if told.get("do_sample") or "repetition_penalty" in told:
        drawn = {"temperature": 1.0, "top_k": 50, **told} if told.get("do_sample") else told
        names = _HONOURED[1:] if told.get("do_sample") else _HONOURED[1:2]
        try:
            sampling = Sampling(**{k: v for k, v in drawn.items() if k in names})
        except BatchError as error:
            _warn(source, f"{told}, which is out of range ({error})")
    left_out = [
        f"{name}={value!r}"
        for name, value in stated.items()
        if not _HARMLESS.fullmatch(name)
        and name not in _HONOURED
        and not _is_neutral(name, value)
        and (stated.get("do_sample") or not _SAMPLING.fullmatch(name))
    ]
    if left_out:
        _warn(source, ", ".join(left_out))
    return sampling


def _warn(source: Source, what: str) -> None:
    words = "%s: the generation_config.json of '%s' asks for %s; generate does nothing of that"
    logger.warning(words, source.setting, source.label, what)


def _is_neutral(name: str, value: Any) -> bool:
    if name.endswith("_token_id"):
        return value is None
    factor = _SAMPLING.fullmatch(name) or "penalty" in name or name.startswith("num_")
    return not value or (factor and value == 1)
