"""The forward context: what a splitting op may know about the step that it runs in.

In: what the runner publishes before a step. Out: `current_context()`. Knows nothing of models,
graphs or batches as users write them.

Device tensors of the context are static buffers: a captured segment may read them, since the
runner rewrites them before every replay. Host fields are ordinary Python values of *this* step:
reading one while a segment is captured would freeze it, so that raises.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from pcgsvc.errors import HostReadError, PcgError


class StepAttention(Protocol):
    """What the attention op asks of a backend; see `pcgsvc.AttentionBackend`."""

    @property
    def forward(self) -> Callable[..., None]:
        """Attend, with q, k, v, output, layer and context."""

    @property
    def bind(self) -> Callable[..., Callable[[], None] | None]:
        """Return a call that repeats a `forward` of these arguments, or None."""

    @property
    def plan_launches(self) -> Callable[..., Any]:
        """Return the launches of a `forward` of these arguments as plain values, or None."""


class ForwardContext:
    """One step's metadata. T = rows with padding, R = most requests, B = blocks per request.

    Device fields (static buffers of the runner; int32):
        slot_mapping [T]: KV slot that each row writes; 0 (in the null block) for padding rows.
        token_to_req [T]: request of each row; R for padding rows.
        kv_lens [T]: keys that each row attends to, itself included; 0 for padding rows.
        block_tables [R + 1, B]: KV blocks of each request; row R is all zero.
        query_start_loc [R + 1]: first row of each request; the tail repeats the true row count.
        seq_lens [R]: length of each request after this step; 0 beyond the last request.
        num_tokens_tensor [1]: the true row count.

    Host fields (raise `HostReadError` while a segment is captured):
        num_tokens: true rows. query_lens, seq_lens_host, block_tables_host: per request. extras:
        the caller's own.
    """

    __slots__ = (
        "_block_tables",
        "_extras",
        "_num_tokens",
        "_query_lens",
        "_seq_lens",
        "attention",
        "block_tables",
        "in_full_graph",
        "in_segment",
        "kv_lens",
        "num_tokens_tensor",
        "padded_tokens",
        "query_start_loc",
        "seq_lens",
        "slot_mapping",
        "token_to_req",
        "uniform_query_len",
    )

    def __init__(
        self,
        *,
        padded_tokens: int,
        num_tokens: int,
        query_lens: Sequence[int],
        seq_lens_host: Sequence[int],
        slot_mapping: torch.Tensor,
        token_to_req: torch.Tensor,
        kv_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        num_tokens_tensor: torch.Tensor,
        attention: StepAttention | None = None,
        extras: Mapping[str, Any] | None = None,
        uniform_query_len: int | None = None,
        in_full_graph: bool = False,
        block_tables_host: Any = None,
    ) -> None:
        self.in_segment = False
        """Set by the capture session while a segment is being captured or recorded."""
        self.padded_tokens = padded_tokens
        """Rows of every row-wise tensor of this step; constant for a captured entry."""
        self.uniform_query_len = uniform_query_len
        """Rows per request if an entry is captured for uniform batches only, else None."""
        self.in_full_graph = in_full_graph
        """Whether this step is, or will be, replayed from one full graph: every launch and every
        address of the boundaries was fixed at capture, and only the content of memory may change.
        Else the boundaries run eagerly."""
        self.attention = attention
        """The runner's attention backend, which owns the KV cache; None for other models."""
        self._num_tokens = num_tokens
        self._query_lens = query_lens
        self._seq_lens = seq_lens_host
        self._block_tables = block_tables_host
        self._extras = {} if extras is None else extras  # the object, empty or not: it may change
        self.slot_mapping = slot_mapping
        self.token_to_req = token_to_req
        self.kv_lens = kv_lens
        self.block_tables = block_tables
        self.query_start_loc = query_start_loc
        self.seq_lens = seq_lens
        self.num_tokens_tensor = num_tokens_tensor

    def of_step(
        self,
        *,
        padded_tokens: int,
        num_tokens: int,
        query_lens: Sequence[int],
        seq_lens_host: Sequence[int],
        block_tables_host: Any,
        extras: Mapping[str, Any] | None,
        attention: StepAttention | None,
        uniform_query_len: int | None,
        in_full_graph: bool,
    ) -> ForwardContext:
        """Return the context of another step over the same device tensors; this one stays.

        In half of the constructor's time: each call of a runner with metadata makes one.
        """
        new = ForwardContext.__new__(ForwardContext)
        new.in_segment = False
        new.padded_tokens = padded_tokens
        new.uniform_query_len = uniform_query_len
        new.in_full_graph = in_full_graph
        new.attention = attention
        new._num_tokens = num_tokens
        new._query_lens = query_lens
        new._seq_lens = seq_lens_host
        new._block_tables = block_tables_host
        new._extras = {} if extras is None else extras
        new.slot_mapping = self.slot_mapping
        new.token_to_req = self.token_to_req
        new.kv_lens = self.kv_lens
        new.block_tables = self.block_tables
        new.query_start_loc = self.query_start_loc
        new.seq_lens = self.seq_lens
        new.num_tokens_tensor = self.num_tokens_tensor
        return new

    def _host(self, name: str) -> None:
        if self.in_segment:
            raise HostReadError(
                f"context.{name} was read while a segment is captured: it is a host value of this "
                "one step and would be frozen into the graph. Read the device tensors instead "
                "(num_tokens_tensor, query_start_loc, kv_lens, …), or keep the op outside graphs "
                "with support='never'."
            )

    @property
    def num_tokens(self) -> int:
        """True rows of this step; rows at and above it are padding."""
        self._host("num_tokens")
        return self._num_tokens

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request, in row order; a copy, like the next two."""
        self._host("query_lens")
        return list(self._query_lens)

    @property
    def seq_lens_host(self) -> list[int]:
        """Length of each request after this step."""
        self._host("seq_lens_host")
        return list(self._seq_lens)

    @property
    def block_tables_host(self) -> Any:
        """KV blocks of each request as a numpy array [requests, blocks]; None without a cache."""
        self._host("block_tables_host")
        return None if self._block_tables is None else self._block_tables.copy()

    @property
    def extras(self) -> Mapping[str, Any]:
        """What the caller put into `Batch.extras`."""
        self._host("extras")
        return self._extras


_CONTEXT: contextvars.ContextVar[ForwardContext | None] = contextvars.ContextVar(
    "pcgsvc_context", default=None
)


def current_context() -> ForwardContext:
    """Return the context of the step that is running in this thread.

    Raises:
        PcgError: no step is running (a splitting op was called outside a runner).
    """
    context = _CONTEXT.get()
    if context is None:
        raise PcgError(
            "there is no forward context: a splitting op that reads per-step metadata was called "
            "outside a runner. Call the model through one; with mode='none' it captures nothing."
        )
    return context


find_context = _CONTEXT.get
"""Returns the context of the step that is running in this thread, or None."""

set_context = _CONTEXT.set
"""Makes a context, or None, the current one of this thread. In a `finally` no interrupt comes
before it, as one may where a function of Python's begins."""


@contextlib.contextmanager
def use_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one of this thread for a block."""
    before = find_context()
    try:
        set_context(context)
        yield context
    finally:
        set_context(before)
