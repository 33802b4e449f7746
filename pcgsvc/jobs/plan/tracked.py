"""When code that is not traced allocates and frees memory: it is run on tensors without memory.

In: a forward, or an attention backend, inside a block of fake tensors. Out: `Event`s, one per
storage that an op makes and one when the last tensor over it is gone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.forward.workspace import Workspace
from pcgsvc.jobs.plan.pool import Event
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.breaks import handle_breaks
from pcgsvc.ops.context import ForwardContext, use_context


class Tracked(torch_private.RecordingMode):
    """Notes what ops allocate. Splitting ops are noted and go to their shape functions.

    As a `BreakHandler` it runs marked Python functions where they are met.
    """

    def __init__(self, boundaries: Collection[str] = ()) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._boundaries = boundaries
        self._live = Counter[int]()
        """How many tensors use each storage that was made here."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name)
        if name in self._boundaries:
            self.events.append(Event("boundary", name))
            return func(*args, **kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {torch_private.storage_id(t) for t in given}
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not any(tensor is t for t in given):
                self._note(tensor, known)
        return result

    def _note(self, tensor: torch.Tensor, known: set[int]) -> None:
        sid = torch_private.storage_id(tensor)
        if not self._live[sid]:
            if sid in known:
                return  # a view of an older storage
            self.events.append(Event("alloc", sid, tensor.untyped_storage().nbytes()))
        self._live[sid] += 1
        weakref.finalize(tensor, self._gone, sid)

    def _gone(self, sid: int) -> None:
        self._live[sid] -= 1
        if not self._live[sid]:
            self.events.append(Event("free", sid))

    def at_function(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """See `BreakHandler.at_function`."""
        self.events.append(Event("boundary", name))
        return function(*args, **kwargs)

    def close(self) -> list[Event]:
        """Return all events; what is still alive is freed at the end."""
        return [*self.events, *(Event("free", sid) for sid in +self._live)]


def forward_events(
    module: Callable[..., Any],
    workspace: Workspace,
    constants: Mapping[str, Any],
    context: ForwardContext,
    boundaries: Collection[str],
) -> list[Event]:
    """Return what one run of an untraced forward allocates and frees.

    Args:
        module: run on views of the workspace.
        workspace: without memory.
        constants: arguments that are no tensors.
        context: of the step; its padded rows are the run's.
        boundaries: names of the splitting ops.
    """
    views = workspace.views(context.padded_tokens)
    tracked = Tracked(boundaries)
    with use_context(context), handle_breaks(tracked), tracked:
        result = module(**views, **constants)
    events = tracked.close()
    del result  # not before: a run's results live until its end
    return events


def attention_events(
    backend: AttentionBackend, context: ForwardContext, like: torch.Tensor
) -> list[Event]:
    """Return what one layer of attention allocates and frees inside a full graph.

    Args:
        backend: without memory.
        context: of the step, on the backend's device; its padded rows are the step's.
        like: any tensor of the device and dtype of q, k and v.
    """
    spec, rows = backend.spec, context.padded_tokens
    q = like.new_empty(rows, spec.num_heads, spec.head_dim)
    k, v = (like.new_empty(rows, spec.num_kv_heads, spec.head_dim) for _ in range(2))
    output = torch.empty_like(q)
    tracked = Tracked()
    context.in_segment = True
    with use_context(context), tracked:
        backend.forward(q, k, v, output, 0, context)
    return tracked.close()


def shape_context(workspace: Workspace, rows: int, uniform_query_len: int | None) -> ForwardContext:
    """Return the context of a step of which nothing but shapes is known."""
    reqs, geometry = workspace.max_reqs, workspace.geometry
    width = geometry.blocks_per_request if geometry is not None else 0

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=workspace.device)

    return ForwardContext(
        padded_tokens=rows,
        num_tokens=rows,
        query_lens=[rows],
        seq_lens_host=[rows],
        slot_mapping=ints(rows),
        token_to_req=ints(rows),
        kv_lens=ints(rows),
        block_tables=ints(reqs + 1, width),
        query_start_loc=ints(reqs + 1),
        seq_lens=ints(reqs),
        num_tokens_tensor=ints(1),
        attention=workspace.attention,
        uniform_query_len=uniform_query_len,
    )
