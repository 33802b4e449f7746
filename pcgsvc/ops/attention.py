"""`pcgsvc::attention`, the splitting op of the language models, and the backends behind it.

In: q, k, v of one layer and the forward context. Out: attention written into the output buffer.
Knows nothing of models, tracing or graphs.

Shapes: T = rows of the step with padding, H = query heads, K = KV heads, D = head dim,
N = blocks in the cache, S = tokens per block.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pcgsvc.cuda_driver import Launch
from pcgsvc.errors import ConfigError
from pcgsvc.ops.context import ForwardContext, current_context
from pcgsvc.ops.registry import register_splitting_op
from pcgsvc.ops.support import Support

NULL_BLOCK = 0
"""Block that padding rows write to: never part of a request, always zero."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a model's attention layers need; the same for all its layers but the window.

    Scores are q·k · scale, then capped, then masked: a row at position p sees the keys at
    p - window + 1 to p, and without a window those at 0 to p.

    Raises:
        ConfigError: heads, windows or a softcap that no backend could serve.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on q·k."""
    max_position: int
    """Longest sequence that the model's positions cover, in tokens."""
    sliding_windows: tuple[int | None, ...] | None = None
    """Per layer, how many keys a row sees at most, itself included (None: all); None: no windows.
    The KV cache keeps all keys of a request all the same."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) in all layers; None: they stay."""

    def __post_init__(self) -> None:
        """Check what does not depend on a backend."""
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position"):
            count = getattr(self, name)
            if type(count) is not int or count < 1:
                raise ConfigError(
                    f"AttentionSpec: got {name}={count!r}; a whole number, at least 1, is needed."
                )
        windows = self.sliding_windows
        for name, kinds in (("scale", float | int), ("softcap", float | int | None)):
            if not isinstance(getattr(self, name), kinds):
                raise ConfigError(
                    f"AttentionSpec: got {name}={getattr(self, name)!r}; a number is needed."
                )
        if not isinstance(windows, tuple | list | None) or not all(
            isinstance(w, int | None) for w in windows or ()
        ):
            raise ConfigError(
                f"AttentionSpec: got sliding_windows={windows!r}; None, or a number or None for "
                "each layer, is needed."
            )
        problems = [
            (
                self.num_heads % self.num_kv_heads != 0,
                f"{self.num_heads} query heads over {self.num_kv_heads} KV heads; a whole number "
                "of query heads per KV head is needed",
            ),
            (
                windows is not None
                and (
                    len(windows) != self.num_layers or any(w is not None and w < 1 for w in windows)
                ),
                f"sliding windows {windows}; for each of {self.num_layers} layers None or at least "
                "1 key is needed",
            ),
            (
                self.softcap is not None and not 0 < self.softcap < math.inf,
                f"softcap {self.softcap}; None or a positive number is needed",
            ),
        ]
        for wrong, message in problems:
            if wrong:
                raise ConfigError(f"model: its attention has {message}.")

    def window(self, layer: int) -> int | None:
        """Return how many keys a row of `layer` sees at most, itself included; None: all."""
        return None if self.sliding_windows is None else self.sliding_windows[layer]


class AttentionBackend(abc.ABC):
    """One way to compute paged attention; owns the KV cache. Not safe across threads by itself.

    The cache of a layer is [2, N, S, K, D] (keys, values), zero at the start. Block 0 is the null
    block. A backend writes state for true rows only, and leaves the output's padding rows zero.
    """

    cudagraph_support: Support
    """Which batches may be captured with attention inside."""

    @classmethod
    def check(cls, device: torch.device) -> None:
        """Raise `ConfigError` if this backend cannot run on `device`; builds nothing."""
        return None

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = [
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(spec.num_layers)
        ]
        """Per layer [2, N, S, K, D]."""

    def plan(self, context: ForwardContext) -> None:  # noqa: B027 - optional hook
        """Prepare one step; called once before each, warm-up and capture runs included.

        Always outside captured segments and on the runner's stream: host fields of `context` may be
        read, and copies to the device are ordered before `forward`. Where
        `context.in_full_graph`, `forward` itself was captured: what it reads must lie at the
        address that was planned into when the same `context.padded_tokens` and
        `context.uniform_query_len` were captured. Host memory that a copy is queued from must stay
        as it is until the copy is done.
        """

    @abc.abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> None:
        """Write k and v to the cache, then attention of q [T, H, D] into `output` [T, H, D]."""

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> Callable[[], None] | None:
        """Return a call that repeats what `forward` has just done, with everything looked up.

        Only for a backend that reads nothing of the step on the host: the call is made at each
        replay between graphs, over these buffers and the same static metadata. None: `forward` is
        called each time. `bind` itself is called on the runner's stream, with no capture under way:
        it may capture a graph of its own there.
        """
        return None

    def plan_launches(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> Sequence[Launch] | None:
        """Return the kernels that `forward` would launch now, in order; None: it cannot tell.

        Called after `plan` and a first `forward` of the same arguments; launches nothing.
        """
        return None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, layer: int
) -> None:
    """Attend with the current step's metadata; see `AttentionBackend.forward`."""
    context = current_context()
    backend = context.attention
    if backend is None:
        raise ConfigError(
            "pcgsvc::attention was called for a model that declared no attention; pass "
            "attention=pcgsvc.AttentionSpec(...) to build_runner."
        )
    backend.forward(q, k, v, output, layer, context)


def _bind_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, layer: int
) -> Callable[[], None] | None:
    context = current_context()
    backend = context.attention
    return None if backend is None else backend.bind(q, k, v, output, layer, context)


def _plan_attention(
    context: ForwardContext,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    layer: int,
) -> Sequence[Launch] | None:
    backend = context.attention
    return None if backend is None else backend.plan_launches(q, k, v, output, layer, context)


register_splitting_op(
    "pcgsvc::attention",
    attention,
    mutates_args=("output",),
    support=None,
    zeroes_padding=True,
    bind=_bind_attention,
    plan_launches=_plan_attention,
)
