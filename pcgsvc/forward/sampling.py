"""How generation chooses the next token, as callers describe it.

In: numbers and texts. Out: a checked `Sampling`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pcgsvc.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one continuation is chosen and where it ends; as it is, greedy.

    Applied in transformers' order: repetition penalty, temperature, top-k, top-p. A draw takes one
    random number per token from the continuation's own generator, so a seeded continuation does
    not depend on what shares its steps (but for roundings, which other batches may change).

    Raises:
        BatchError: a value is out of range.
    """

    temperature: float = 0.0
    """0: the most likely token, always; else the logits' divisor, 0.01 to 100."""
    top_k: int = 0
    """Draw from this many most likely tokens, ties included; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens with at least this probability; above 0, at most
    1."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens that the prompt or
    the continuation has; 0.01 to 100. Counts in greedy choice as well."""
    seed: int | None = None
    """Of the continuation's generator, at least 0; None: another one each time."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation and are not part of it; needs a tokenizer."""
    end_ids: frozenset[int] | None = None
    """Tokens that end a continuation and are not part of it; None: the checkpoint's."""

    def __post_init__(self) -> None:
        if self.temperature != 0 or isinstance(self.temperature, bool):
            _refuse_unless(0.01, "temperature", self.temperature, 100, "0, or a number {}")
        _refuse_unless(0, "top_p", self.top_p, 1, "a number above 0 and at most 1")
        if self.top_p == 0:
            raise BatchError("top_p: got 0, which leaves no token; top_k=1 leaves one.")
        _refuse_unless(0.01, "repetition_penalty", self.repetition_penalty, 100, "a number {}")
        _refuse_unless(0, "top_k", self.top_k, 1 << 31, "a whole number {}", int)
        if self.seed is not None:
            _refuse_unless(0, "seed", self.seed, 1 << 63, "a whole number {}", int)
        stop = _listed("stop", self.stop, str, "a list of texts")
        if not all(stop):
            raise BatchError("stop: got an empty text, which would end everything at once.")
        object.__setattr__(self, "stop", tuple(stop))
        if self.end_ids is not None:
            ends = _listed("end_ids", self.end_ids, int, "a list of token ids")
            object.__setattr__(self, "end_ids", frozenset(ends))

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


def _refuse_unless(
    least: float, name: str, got: Any, most: float, needed: str, kind: Any = (int, float)
) -> None:
    if not isinstance(got, kind) or isinstance(got, bool) or not least <= got <= most:  # NaN too
        span = f"from {least} to {most}"
        raise BatchError(f"{name}: got {got!r}; {needed.format(span)} is needed.")


def _listed(name: str, got: Any, kind: type, needed: str) -> list[Any]:
    values = [None] if isinstance(got, str) or not isinstance(got, Iterable) else list(got)
    if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
        raise BatchError(f"{name}: got {got!r}; {needed} is needed.")
    return values
