"""What the files of sentence-transformers beside an encoder's weights say of its sentence vectors.

In: a checkpoint's folder. Out: `SentenceModules`, or a `ConfigError` that names the file and what
we do not do. Knows nothing of tensors; no module that a file names is imported.

Source: sentence-transformers 5, `base/model.py`, `base/modules/transformer.py` and
`sentence_transformer/modules/pooling.py`, whose readers take the files of earlier releases too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import POOLINGS
from pcgsvc.models.files import check_stated, read_json

_MODULES = ("Transformer", "Pooling", "Normalize")
_TRANSFORMER = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    "processing_kwargs": {},
    "query_expansion": None,
}
"""What the settings of the module Transformer must say, or leave out."""
_NORMALIZE = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


@dataclass(frozen=True, kw_only=True)
class SentenceModules:
    """How texts become sentence vectors, around the encoder; the defaults are of a bare BERT."""

    folder: Path
    """Where config.json, the weights and the tokenizer are."""
    pooling: str = "mean"
    """One of `POOLINGS`."""
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    max_length: int | None = None
    """Longest text in tokens."""
    lower_case: bool = False
    """Whether texts are made lower case, whatever the tokenizer does."""
    tokenizer_lower_case: bool | None = None
    """Whether the tokenizer itself does; None: as tokenizer.json says."""
    prompt: str = ""
    """What stands in front of every text."""


def read_sentence_modules(root: Path) -> SentenceModules:
    """Read modules.json and what it names; without one there is a mean, scaled to length 1.

    Raises:
        ConfigError: a file is damaged, or asks for what would give other vectors than ours.
    """
    kinds, paths, listed = list(_MODULES), ["", "1_Pooling"], root / "modules.json"
    if listed.is_file():
        kinds, paths = _listed(listed)
    folder, pooling = root / paths[0], root / paths[1] / "config.json"
    for file in (root / path / "config.json" for path in paths[2:] if path):
        if file.is_file():
            check_stated(file, read_json(file, dict), _NORMALIZE, "this Normalize")
    prompt = _default_prompt(root / "config_sentence_transformers.json")
    settings = _first(folder, "sentence_*_config.json")
    tokenizer = _first(folder, "tokenizer_config.json")
    return SentenceModules(
        folder=folder,
        pooling=_pooling(pooling, prompt) if listed.is_file() or pooling.is_file() else "mean",
        normalize="Normalize" in kinds,
        max_length=settings.get("max_seq_length") or tokenizer.get("model_max_length"),
        lower_case=bool(settings.get("do_lower_case")),
        tokenizer_lower_case=tokenizer.get("do_lower_case"),
        prompt=prompt,
    )


def _listed(file: Path) -> tuple[list[str], list[str]]:
    """Return the kinds and the folders of the modules: Transformer, Pooling, and Normalize."""
    modules: list[dict[str, Any]] = read_json(file, list)
    types = [str(module.get("type", "")) for module in modules]
    kinds = [t.rpartition(".")[2] if t.startswith("sentence_transformers.") else t for t in types]
    other = [kind for kind in kinds if kind not in _MODULES]
    if other:
        raise ConfigError(
            f"model.weights: '{file}' has the modules {other} behind the encoder; sentence "
            f"vectors here are made by {', '.join(_MODULES)} alone."
        )
    if tuple(kinds[:2]) != _MODULES[:2] or not set(kinds[2:]) <= {"Normalize"}:
        raise ConfigError(
            f"model.weights: '{file}' has the modules {kinds} in this order; {', '.join(_MODULES)} "
            "is served, or the first two."
        )
    return kinds, [str(module.get("path", "")) for module in modules]


def _pooling(file: Path, prompt: str) -> str:
    """Return which rows of a text are pooled; sentence-transformers has named them in two ways."""
    data = read_json(file, dict)
    old = [
        key.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
        for key, value in data.items()
        if key.startswith("pooling_mode_") and value
    ]
    modes = data.get("pooling_mode", old or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ConfigError(
            f"model.weights: '{file}' asks for the pooling {modes}; one of {', '.join(POOLINGS)} "
            "is served."
        )
    if prompt and not data.get("include_prompt", True):
        raise ConfigError(
            f"model.weights: '{file}' has include_prompt=false, and there is a default prompt "
            f"({prompt!r}); the rows of a prompt are pooled here with those of its text."
        )
    return str(modes[0])


def _default_prompt(file: Path) -> str:
    data = read_json(file, dict) if file.is_file() else {}
    name, prompts = data.get("default_prompt_name"), data.get("prompts") or {}
    if name is not None and name not in prompts:
        raise ConfigError(
            f"model.weights: '{file}' has default_prompt_name={name!r}; its prompts are "
            f"{sorted(prompts)}."
        )
    return str(prompts[name]) if name is not None else ""


def _first(folder: Path, pattern: str) -> dict[str, Any]:
    """Return the settings of a module or tokenizer; empty if there is no such file."""
    for file in sorted(folder.glob(pattern)):
        settings: dict[str, Any] = read_json(file, dict)
        if file.name.startswith("sentence_"):
            check_stated(file, settings, _TRANSFORMER, "this encoder")
        return settings
    return {}
