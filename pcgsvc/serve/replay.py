"""A captured entry as calls use it.

In: an entry and the model that it was captured of. Out: its steps, and where inputs and results of
a row count are. Knows nothing of batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.plan import EntryKey
from pcgsvc.capture.session import Entry
from pcgsvc.config import Mode
from pcgsvc.forward.results import flatten
from pcgsvc.forward.specs import holds_nan
from pcgsvc.forward.workspace import Workspace
from pcgsvc.program.model import CompiledModel


class Replay:
    """What a call needs of one entry, looked up once."""

    def __init__(self, key: EntryKey, entry: Entry, query_len: int) -> None:
        mode, descriptor = key
        self.entry, self.steps, self.size = entry, entry.calls, descriptor.num_tokens
        self.name = f"{mode.value}:{descriptor.num_tokens}"
        """Under which the entry is counted."""
        self.is_full = mode is Mode.FULL
        self.query_len = query_len if descriptor.uniform else None
        """New tokens of each request, in an entry for uniform batches."""


class Route:
    """How calls of one row count and kind are served: looked up once, and counted here."""

    __slots__ = (
        "calls",
        "copies",
        "hits",
        "load",
        "name",
        "replay",
        "results",
        "rows",
        "size",
        "uniform",
    )

    def __init__(
        self, replay: Replay, model: CompiledModel, memory: Workspace, rows: int, uniform: bool
    ) -> None:
        whole = replay.entry.outputs
        self.replay, self.name, self.size = replay, replay.name, replay.size
        self.rows, self.uniform = rows, uniform
        self.load = memory.plan_load(rows, replay.size)
        self.results = whole if rows == replay.size else model.outputs.cut(whole, rows)
        """Views of the true rows of the entry's results."""
        made = replay.entry.copies
        self.copies = None if made is None else made.of_rows(self.load.targets, self.results)
        """The call's copies inside the entry's graphs; None: they are made around them."""
        self.calls = self.hits = 0
        """Calls that took it, and those whose replay came to its end."""


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


def result_memory(table: GraphTable) -> set[int]:
    """Return the addresses of the storages that the results of the graphs lie in."""
    results = (result for entry in table.entries.values() for result in entry.outputs)
    return {result.untyped_storage().data_ptr() for result in results}


def poison_others(table: GraphTable, entry: Entry) -> None:
    """Fill what every other entry's segments allocated with NaN, as pool sharing may."""
    for other in table.entries.values():
        for tensor in other.owned if other is not entry else ():
            tensor.fill_(float("nan") if holds_nan(tensor.dtype) else 0)


def clone_all(results: list[torch.Tensor], indices: Sequence[int]) -> None:
    """Replace several tensors of a list by clones, which one kernel fills where it can."""
    old = [results[at] for at in indices]
    if torch_private.can_copy_all(old):
        new = [torch.empty_like(tensor) for tensor in old]
        torch_private.copy_all(new, old)
    else:
        new = [tensor.clone() for tensor in old]
    for at, tensor in zip(indices, new, strict=True):
        results[at] = tensor


def cloned(result: Any, given: Sequence[torch.Tensor]) -> Any:
    """Return a forward's result with clones of its tensors, but for those that it was given."""
    leaves, tree = flatten(result)
    kept = set(map(id, given))
    return tree.build(
        leaf.clone() if isinstance(leaf, torch.Tensor) and id(leaf) not in kept else leaf
        for leaf in leaves
    )
