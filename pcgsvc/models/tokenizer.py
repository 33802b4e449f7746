"""A tokenizer built from a GGUF file's metadata: byte-level BPE, and the model's chat template.

In: the metadata of a GGUF file. Out: `GgufTokenizer`. Knows nothing of models.

How text is cut before the merges is not in the file, only its name (`tokenizer.ggml.pre`). The
table below follows llama.cpp. transformers 5.24 has no entry for `smollm` and cuts as GPT-2 does,
which joins the whitespace before a number with it: "a  1" has other ids there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcgsvc.errors import ConfigError
from pcgsvc.models.files import require

_EXTRA = "smollm2"
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")
"""Values of `tokenizer.ggml.pre` that are served."""


def unsupported(metadata: Mapping[str, Any]) -> str | None:
    """Return why no tokenizer can be built from `metadata`, or None if one can."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model is None:
        return "the checkpoint carries no tokenizer"
    if model != "gpt2":
        return f"the checkpoint's tokenizer is of the kind {model!r}; byte-level BPE is served"
    if pre not in PRE_TOKENIZERS:
        return f"the pre-tokenizer {pre!r} is not known. Choices: {', '.join(PRE_TOKENIZERS)}"
    needed = ["tokens", "merges", *["bos_token_id"] * _adds_bos(_own_entries(metadata))]
    lacking = [k for k in needed if f"tokenizer.ggml.{k}" not in metadata]
    return f"the checkpoint lacks tokenizer.ggml.{lacking[0]}" if lacking else None


def _own_entries(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    return {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}


def _adds_bos(data: Mapping[str, Any]) -> bool:
    """Whether a text begins with BOS: as the file says, else as llama.cpp does for its cut."""
    return bool(data.get("add_bos_token", data.get("pre") == "llama-bpe"))


class GgufTokenizer:
    """See the module docstring; implements `base.Tokenizer`.

    Special tokens written out in a text are read as such, as in transformers.

    Raises:
        ConfigError: `unsupported` has a reason, or a package is missing.
    """

    eos_token_ids: frozenset[int]

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        reason = unsupported(metadata)
        if reason is not None:
            raise ConfigError(f"model.weights: {reason}.")
        data = _own_entries(metadata)
        self._tokens: list[str] = data["tokens"]
        self._ids = {key: value for key, value in data.items() if key.endswith("_token_id")}
        self._tokenizer = _byte_level_bpe(data)
        self._chat_template: str | None = metadata.get("tokenizer.chat_template")
        self._adds_bos = _adds_bos(data)
        ends = (self._ids.get(f"{end}_token_id") for end in ("eos", "eot", "eom"))
        self.eos_token_ids = frozenset(end for end in ends if end is not None)
        """The checkpoint's end of sequence, turn and message."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain `text`, with BOS in front if the checkpoint says so."""
        bos = [self._ids["bos_token_id"]] if self._adds_bos else []
        return [*bos, *self._tokenizer.encode(text, add_special_tokens=False).ids]

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of one user message, up to where the assistant's answer begins.

        Raises:
            ConfigError: the checkpoint has no chat template.
        """
        chat = self.render_chat([{"role": "user", "content": text}])
        return list(self._tokenizer.encode(chat, add_special_tokens=False).ids)

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """Return the chat template's text of `messages`, up to where the answer begins."""
        if self._chat_template is None:
            raise ConfigError(
                "prompt: the checkpoint has no chat template (tokenizer.chat_template); "
                "encode the text as it is."
            )
        sandbox = require("jinja2.sandbox", _EXTRA)  # templates come with files, so: no Python
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        names = {f"{name}_token": self._special(name) for name in ("bos", "eos")}
        template = environment.from_string(self._chat_template)
        text: str = template.render(messages=messages, add_generation_prompt=True, **names)
        return text

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _special(self, name: str) -> str:
        number = self._ids.get(f"{name}_token_id")
        return "" if number is None else self._tokens[number]


def _raise_exception(message: str) -> None:
    raise ConfigError(f"prompt: the checkpoint's chat template refuses the message: {message}")


def _byte_level_bpe(data: Mapping[str, Any]) -> Any:
    """Return a `tokenizers.Tokenizer` of the vocabulary, its merges and its special tokens."""
    tokenizers = require("tokenizers", _EXTRA)
    tokens: list[str] = data["tokens"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in data["merges"]],
            # Llama 3 takes a word that is in the vocabulary whole, merges or not.
            ignore_merges=data["pre"] == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(tokenizers, data["pre"])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, data.get("token_type", ()), strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(tokenizers: Any, name: str) -> Any:
    pre = tokenizers.pre_tokenizers
    if name == "llama-bpe":
        split = pre.Split(tokenizers.Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre.Sequence([pre.Digits(individual_digits=True), gpt2])
    return gpt2
