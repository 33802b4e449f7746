"""What generation and embedding need of a runner.

In: nothing. Out: the protocol that `Runner` satisfies; what drives a runner need not import it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from pcgsvc.capture.capture import GraphTable
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
