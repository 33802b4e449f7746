"""A captured entry as calls use it.

In: an entry and the model that it was captured of. Out: its steps, and views of its results. Knows
nothing of inputs.
"""

from __future__ import annotations

import torch

from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.plan import EntryKey
from pcgsvc.capture.session import Entry
from pcgsvc.config import Mode
from pcgsvc.forward.workspace import Workspace
from pcgsvc.program.model import CompiledModel


class Replay:
    """What a call needs of one entry, looked up once."""

    def __init__(self, key: EntryKey, entry: Entry, model: CompiledModel) -> None:
        mode, descriptor = key
        self.entry, self.steps, self.size = entry, entry.calls, descriptor.num_tokens
        self.name = f"{mode.value}:{descriptor.num_tokens}"
        """Under which the entry is counted."""
        self.is_full, self.uniform = mode is Mode.FULL, descriptor.uniform
        self.reads_metadata = model.reads_metadata
        self._outputs = model.outputs
        self._cut: dict[int, list[torch.Tensor]] = {}

    def results(self, rows: int) -> list[torch.Tensor]:
        """Return views of the true rows of the entry's results, in a list of the caller's."""
        found = self._cut.get(rows)
        if found is None:
            whole = self.entry.outputs
            found = whole if rows == self.size else self._outputs.cut(whole, rows)
            self._cut[rows] = found
        return list(found)


def input_views(table: GraphTable, memory: Workspace) -> list[int]:
    """Return the graph results that are views of the runner's input buffers, by index.

    `outputs=view` clones these: passed to the next call, one would be copied onto itself.
    """
    buffers = {b.untyped_storage().data_ptr() for b in memory.buffers.values()} - {0}
    return sorted(
        {
            at
            for entry in table.entries.values()
            for at, result in enumerate(entry.outputs)
            if result.untyped_storage().data_ptr() in buffers
        }
    )


def poison_others(table: GraphTable, entry: Entry) -> None:
    """Fill what every other entry's segments allocated with NaN, as pool sharing may."""
    for other in table.entries.values():
        for tensor in other.owned if other is not entry else ():
            tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(0)
