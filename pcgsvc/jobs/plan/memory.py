"""What a build would hold in memory, estimated from shapes.

In: a partitioned graph, or an untraced forward, with a workspace without memory. Out: a
`MemoryEstimate` in bytes, with how each figure was found.

Weights, static buffers and the KV cache are sums over the very tensors that a build would make. The
graph pool is simulated (`pool`), entry by entry in the order of capture: what the regions allocate
comes from the trace (`lifetimes`) or from a run on fake tensors (`tracked`), and what attention
allocates inside a full graph always from the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pcgsvc import torch_private
from pcgsvc.capture.plan import EntryKey
from pcgsvc.config import Config, Graphs, Mode
from pcgsvc.config.devices import dtype_of
from pcgsvc.forward.plain import words_of
from pcgsvc.forward.workspace import Workspace
from pcgsvc.jobs.plan.lifetimes import Lifetimes
from pcgsvc.jobs.plan.pool import Event, Pool
from pcgsvc.jobs.plan.request import CacheOnly
from pcgsvc.jobs.plan.tracked import attention_events, shape_context
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.context import ForwardContext

_ATTENTION = "pcgsvc::attention"

EventsOf = Callable[[int, bool], Iterable[Event]]
"""(rows, full) -> what one run allocates and frees."""


class Item(NamedTuple):
    """One line of an estimate."""

    name: str
    num_bytes: int
    method: str
    """How the figure was found, for people."""


@dataclass(kw_only=True)
class MemoryEstimate:
    """What a build would hold; without lines until they are added."""

    config: Config
    """Resolved."""
    workspace: Workspace
    """Without memory."""
    entries: Sequence[EntryKey]
    """What would be captured, in order."""
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the figures leave out."""

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(item.num_bytes for item in self.items)

    def _add(self, name: str, num_bytes: int, method: str) -> None:
        self.items.append(Item(name, num_bytes, method))

    def _note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def add_static(self) -> None:
        """Add what is allocated once: weights, input and metadata buffers, KV cache."""
        workspace = self.workspace
        weights = _storage_bytes(workspace.tensors.values())
        self._add("weights", weights, "parameters and buffers, shared storage once")
        buffers = _storage_bytes(workspace.buffers.values()) + workspace.step.num_bytes
        self._add(
            "static buffers",
            buffers,
            f"inputs and step metadata for {workspace.max_tokens} rows and "
            f"{workspace.max_reqs} requests",
        )
        backend, geometry = workspace.attention, workspace.geometry
        if backend is None or geometry is None:
            return
        self._add(
            "KV cache",
            _storage_bytes(backend.kv_cache),
            f"{geometry.num_blocks} blocks of {geometry.block_size} tokens in "
            f"{backend.spec.num_layers} layers, {geometry.scratch_blocks} of them scratch",
        )
        own = [t for t in vars(backend).values() if isinstance(t, torch.Tensor)]
        scratch = _storage_bytes([*backend.kv_cache, *own]) - _storage_bytes(backend.kv_cache)
        if scratch:
            self._add("attention scratch", scratch, "static tensors of the backend")

    def add_bridges(self, lifetimes: Lifetimes) -> None:
        """Add the copies that piecewise entries keep of what splitting ops return."""
        sizes = [d.num_tokens for mode, d in self.entries if mode is Mode.PIECEWISE]
        total = sum(lifetimes.bridge_bytes(rows) for rows in sizes)
        if total:
            self._add("bridges", total, "one copy per entry of what splitting ops return")

    def add_pool(self, events_of: EventsOf, *, fused: bool) -> None:
        """Add the graph pool; `fused`: the events leave out what Inductor would fuse."""
        config, workspace = self.config, self.workspace
        if config.capture.graphs is Graphs.OFF or not self.entries:
            return
        pool, taken = Pool(), 0
        like = torch.empty(0, dtype=dtype_of(config), device=workspace.device)
        for mode, descriptor in self.entries:
            events = list(events_of(descriptor.num_tokens, mode is Mode.FULL))
            if mode is Mode.FULL:
                query_len = config.capture.uniform_query_len if descriptor.uniform else None
                context = shape_context(workspace, descriptor.num_tokens, query_len)
                events = self._with_attention(events, context, like)
            pool.play(events)
            taken += sum(e.num_bytes for e in events if e.kind == "alloc")
        source = (
            "values that only generated kernels use taken as fused"
            if fused
            else "each op's result in memory until its last use"
        )
        if config.capture.graphs is Graphs.CUDA:
            taken = pool.num_bytes
            method = (
                f"torch's allocator played through for all entries, largest first, {source}; "
                f"{pool.peak / 2**20:.1f} MiB of it in use at most"
            )
            self._note(
                "CUDA's own memory comes on top: on an H200 0.4 MiB (eager) to 1 MiB (inductor) "
                "per graph of about 8 kernels"
            )
        else:
            method = f"recordings share nothing: every result of every entry, {source}"
        self._add("graph pool", taken, method)
        budget = config.capture.memory_budget
        if budget is not None and taken > budget:
            self._note(
                f"the graph pool passes capture.memory_budget={budget} bytes: a run would skip "
                "sizes"
            )

    def _with_attention(
        self, events: list[Event], context: ForwardContext, like: torch.Tensor
    ) -> list[Event]:
        """Return the events of a full graph with those of attention put in where it runs.

        One layer stands for all: each frees what it took before the next one runs. Recordings keep
        everything, so that there every layer counts. What other splitting ops allocate is only
        noted.
        """
        names = {str(e.key) for e in events if e.kind == "boundary"}
        missing = "allocates inside a full graph is not counted"
        for name in sorted(names - {_ATTENTION}):
            self._note(f"what {name} {missing}")
        backend = context.attention
        if not isinstance(backend, AttentionBackend) or isinstance(backend, CacheOnly):
            return events
        if _ATTENTION not in names:
            return events
        try:
            own = attention_events(backend, context, like)
        except Exception as error:  # noqa: BLE001 - a kernel may do anything
            name, why = type(backend).__name__, words_of(error)[:140]
            self._note(f"what {name} {missing}: it cannot run without memory ({why})")
            return events
        out: list[Event] = []
        for at, event in enumerate(events):
            out.append(event)
            if event.kind == "boundary" and event.key == _ATTENTION:
                out += [Event(e.kind, (at, e.key), e.num_bytes) for e in own]
        return out


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind tensors, each once."""
    sizes = {torch_private.storage_id(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())
