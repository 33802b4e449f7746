"""How far a splitting op can go into a CUDA graph.

Source: the levels that vLLM calls AttentionCGSupport.
"""

from __future__ import annotations

import enum


class Support(enum.IntEnum):
    """What batches an op may be captured for; a program's support is the least of its ops'."""

    NEVER = 0
    """Never inside a graph: it reads host values, allocates by data, or synchronises."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches in which every request has one new token."""
    UNIFORM_BATCH = 2
    """Batches in which every request has the same number of new tokens."""
    ALWAYS = 3
    """Any batch: mixed, prefill and decode."""

    @classmethod
    def parse(cls, word: str | Support) -> Support:
        """Return the level called `word` (any case); ValueError lists the levels."""
        if isinstance(word, Support):
            return word
        try:
            return cls[word.upper()]
        except KeyError:
            levels = ", ".join(level.name.lower() for level in cls)
            raise ValueError(f"support: got {word!r}. Choices: {levels}.") from None
