"""Which batches may be captured with a splitting op inside.

Source: the levels that vLLM calls AttentionCGSupport.
"""

from __future__ import annotations

import enum

from pcgsvc.errors import ConfigError


class Support(enum.IntEnum):
    """Which batches may be captured with an op inside; a program has the least of its ops'."""

    NEVER = 0
    """None: the op reads host values, allocates by data, or synchronises."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches in which every request has one new token."""
    UNIFORM_BATCH = 2
    """Batches in which every request has the same number of new tokens."""
    ALWAYS = 3
    """Any batch: mixed, prefill and decode."""

    @classmethod
    def parse(cls, word: str | Support) -> Support:
        """Return the level called `word` (any case); ConfigError lists the levels."""
        if isinstance(word, Support):
            return word
        found = cls.__members__.get(str(word).upper())
        if found is None:
            levels = ", ".join(level.name.lower() for level in cls)
            raise ConfigError(f"support: got {word!r}. Choices: {levels}.")
        return found
