"""What a checkpoint's generation_config.json asks for, and what of it greedy decoding leaves out.

In: a `Source`. Out: the file's content, and a warning. Knows nothing of tokenizers or weights.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pcgsvc.models.files import read_json
from pcgsvc.models.hf.source import Source

logger = logging.getLogger(__name__)

_HARMLESS = frozenset(
    "_from_model_config bos_token_id cache_config cache_implementation decoder_start_token_id "
    "disable_compile early_stopping eos_token_id generation_kwargs max_length max_new_tokens "
    "output_attentions output_hidden_states output_logits output_scores pad_token_id "
    "renormalize_logits return_dict_in_generate transformers_version use_cache".split()
)
"""End tokens are honoured, lengths are the caller's; the others change no token."""
_SAMPLING = frozenset("temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff".split())
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
        if name not in _HARMLESS
        and not _is_neutral(name, value)
        and (name not in _SAMPLING or stated.get("do_sample"))
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
    factor = name in _SAMPLING or "penalty" in name or name.startswith("num_")
    return not value or (factor and value == 1)
