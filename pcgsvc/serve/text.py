"""Tokens to text while they come.

In: token ids, one by one. Out: text that will not change any more. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """The text of one continuation, up to the first of its stop texts.

    What is handed out never changes: half of a character waits for the other half, and what may be
    the beginning of a stop text waits until that is decided.

    Args:
        decode: ids to text without special tokens.
        stop: texts that end it and are not part of it.
        live: hand text out token by token; otherwise, and without stop texts, all at the end.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), *, live: bool = True
    ) -> None:
        self._decode, self._stop, self._live = decode, stop, live or bool(stop)
        self._ids: list[int] = []
        self._read = self._before = 0
        """Tokens whose text is in `_text`, and those of them that no longer matter to what follows
        (a token's text may depend on the one before)."""
        self._text, self._given = "", 0
        self.stopped = False
        """Whether a stop text was met."""

    @property
    def text(self) -> str:
        """What was handed out, in one."""
        return self._text[: self._given]

    def push(self, token: int) -> str:
        """Take one token and return what text is settled by it."""
        self._ids.append(token)
        if not self._live:
            return ""
        old = self._decode(self._ids[self._before : self._read])
        new = self._decode(self._ids[self._before :])
        if len(new) <= len(old) or new.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._before, self._read = self._read, len(self._ids)
        self._text += new[len(old) :]
        return self._settle(len(self._text) - self._held())

    def finish(self) -> str:
        """Return what was held back; the continuation is over."""
        whole = self._decode(self._ids)
        if not self.stopped and whole.startswith(self._text):
            self._text = whole
        return self._settle(len(self._text))

    def _settle(self, end: int) -> str:
        """Hand out up to `end`, or up to the first stop text."""
        found = [at for stop in self._stop if (at := self._text.find(stop, self._given)) >= 0]
        if found:
            self.stopped, end = True, min(found)
            self._text = self._text[:end]
        given, self._given = self._given, max(end, self._given)
        return self._text[given : self._given]

    def _held(self) -> int:
        """Return the length of the longest end of the text that may begin a stop text."""
        lengths = (
            length
            for stop in self._stop
            for length in range(min(len(stop) - 1, len(self._text)), 0, -1)
            if self._text.endswith(stop[:length])
        )
        return max(lengths, default=0)
