"""What a model family hands to the pipeline.

In: nothing. Out: `ModelBundle`, the one type that the pipeline knows of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pcgsvc.forward.arguments import Arguments, DynamicDims, MakeInputs
from pcgsvc.forward.sampling import Sampling
from pcgsvc.ops.attention import AttentionSpec


class Tokenizer(Protocol):
    """Text to token ids and back, for models that generate."""

    eos_token_ids: frozenset[int]
    """Ids that end a generation."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain `text`, special tokens included where the model wants them."""

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of one user message under the model's chat template."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens."""


POOLINGS = ("mean", "cls", "lasttoken")
"""What a text's hidden rows become: their mean, the first of them, or the last."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """How texts become an encoder's tokens and its rows vectors; see `pcgsvc.serve.embed`."""

    max_length: int
    """Longest text in tokens, special ones included."""
    vocab_size: int
    """One above the largest token id."""
    encode: Callable[[str, int | None], list[int]] | None = None
    """`encode(text, most)`: ids with special tokens, of no more than `most` unless that is None;
    None: there is no tokenizer."""
    pooling: str = "mean"
    """One of `POOLINGS`."""
    normalize: bool = True
    """Whether vectors are scaled to length 1."""


@dataclass(kw_only=True)
class ModelBundle:
    """A built model and what must be known to trace, verify and run it."""

    module: Callable[..., Any]
    """Called with inputs by name; an nn.Module in eval mode, on its device, without grad."""
    make_inputs: MakeInputs
    """`make_inputs(rows, generator)`: fresh valid inputs by the forward's argument names."""
    dynamic_dims: DynamicDims
    """Which dimension, or dimensions, of which input carry the rows (tokens)."""
    attention: AttentionSpec | None = None
    """Set for models whose boundaries are `pcgsvc::attention`."""
    tokenizer: Tokenizer | None = None
    is_language_model: bool = False
    """Takes (input_ids [T], positions [T]) and returns logits [T, vocab]."""
    vocab_size: int | None = None
    """One above the largest token id, where that is known."""
    sampling: Sampling | None = None
    """How the checkpoint itself would have its text continued; None: it does not say."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What decides the forward besides its code and tensors, in JSON types, for its key."""
    embedding: EmbeddingSpec | None = None
    """Set for encoders: takes (input_ids [T], positions [T], token_types [T]) and returns hidden
    rows [T, E]."""
    stored_dtype: str | None = None
    """What the checkpoint's weights are stored in, as it says; None: it does not, or is none."""
    plan_notes: list[str] = field(default_factory=list)
    """In which a plan of it differs from a run."""
    parallel: dict[str, str] = field(default_factory=dict)
    """Of a model that is shared out among ranks: what is split and what replicated, for the
    report."""
    samples_from: str | None = None
    """Set for a user's own module, whose forward is run plainly before it is traced: where
    `make_inputs` has its inputs from, in a sentence for messages."""
    arguments: Arguments | None = None
    """The forward's arguments; None: its inputs, and no others."""
