"""Prompts that are continued.

In: a prompt, how its tokens are chosen, and the tokens one by one. Out: its text, and why it is
over. Knows nothing of steps.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from pcgsvc.forward.sampling import Sampling
from pcgsvc.serve.text import TextStream


class Continuation:
    """One prompt and what has become of it. Made by `Slots.prepare`; read, never written."""

    def __init__(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        end_ids: frozenset[int],
        stream: TextStream | None,
    ) -> None:
        self.prompt, self.max_new_tokens, self.sampling = prompt, max_new_tokens, sampling
        self.max_length = len(prompt) + max_new_tokens
        """Tokens of prompt and continuation, at most."""
        self.tokens = list(prompt)
        """Prompt and continuation, without an end token."""
        self.finished: str | None = None
        """Why it is over: `end` (an end token), `stop` (a stop text), `length` or `cancelled`."""
        self.random = random.Random(sampling.seed)
        self._end_ids, self._stream = end_ids, stream
        self.done = 0
        """Tokens whose keys are in the cache."""
        self.slot, self.blocks = -1, list[int]()
        """What it holds; no slot: -1."""

    def __repr__(self) -> str:
        """Return its lengths and how it stands; its tokens may be thousands."""
        state = self.finished or ("running" if self.slot >= 0 else "waiting")
        return f"Continuation({len(self.prompt)} + {len(self.new)} tokens, {state})"

    @property
    def new(self) -> list[int]:
        """The continuation's tokens, without an end token."""
        return self.tokens[len(self.prompt) :]

    @property
    def text(self) -> str:
        """The text of it that is settled; empty without a tokenizer."""
        return "" if self._stream is None else self._stream.text

    def accept(self, token: int) -> str:
        """Take the next token; return the text that it settles."""
        stream, text = self._stream, ""
        if token in self._end_ids:
            self.finished = "end"
        else:
            self.tokens.append(token)
            text = "" if stream is None else stream.push(token)
            if stream is not None and stream.stopped:
                self.finished = "stop"
            elif len(self.tokens) == self.max_length:
                self.finished = "length"
        if stream is not None and self.finished is not None:
            text += stream.finish()
        return text


class NewToken(NamedTuple):
    """What a step gave one continuation."""

    continuation: Continuation
    token: int
    """Its next token; an end token is given here, and is not part of the continuation."""
    text: str
    """Text that became settled, in the order of the continuation; often empty, never split within
    a character."""
