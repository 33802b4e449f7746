"""What generation and embedding need of a runner.

In: nothing. Out: the protocol that `Runner` satisfies, and what both ask of it and of their token
ids; what drives a runner need not import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from pcgsvc.capture.capture import GraphTable
from pcgsvc.errors import BatchError
from pcgsvc.forward.batch import Batch, CheckedBatch
from pcgsvc.forward.request import Request
from pcgsvc.forward.workspace import Workspace
from pcgsvc.serve.blocks import BlockAllocator
from pcgsvc.serve.prepared import PreparedCall


class StepRunner(Protocol):
    """Runs steps of a model."""

    request: Request
    memory: Workspace
    table: GraphTable
    blocks: BlockAllocator | None
    """KV blocks that callers may use; None for models without attention."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held during calls."""

    def ensure_open(self) -> None:
        """Raise PcgError if the runner is closed."""

    def __call__(
        self, *args: torch.Tensor, batch: Batch | CheckedBatch | None = None
    ) -> torch.Tensor:
        """Run one step; see `Runner.__call__`."""

    def prepare(self, num_tokens: int, batch: Batch | CheckedBatch | None = None) -> PreparedCall:
        """Return a call over the runner's own buffers; see `Runner.prepare`."""


def largest_step(runner: StepRunner) -> int:
    """Return the most rows that a captured graph serves; without graphs, that memory holds."""
    return max(runner.table.sizes, default=runner.memory.max_tokens)


def checked_text(text: str, said: str) -> str:
    """Return a text that a caller passed.

    Args:
        text: of whole characters; JSON and undecodable bytes may make halves, which no tokenizer
            takes.
        said: how the message begins.

    Raises:
        BatchError: naming the first half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BatchError(
            f"{said} {text[error.start]!r} at {error.start}, which is half of a surrogate pair and "
            "no character; pass text that UTF-8 can hold."
        ) from None
    return text


def checked_ids(given: Iterable[Any], vocab_size: float, said: str) -> list[int]:
    """Return a copy of token ids that a caller passed.

    Args:
        given: whole numbers below `vocab_size`, which is infinite where it is not known.
        vocab_size: one above the largest token id.
        said: how the message begins, up to the word "token".

    Raises:
        BatchError: naming the first that the model lacks.
    """
    ids: list[int] = []
    for token in given:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BatchError(
                f"{said} token {token!r}; the model's tokens are the whole numbers from 0 to "
                f"{vocab_size - 1:.0f}."
            )
        ids.append(token)
    return ids
