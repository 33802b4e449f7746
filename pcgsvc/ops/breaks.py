"""Breaks that are Python functions: `eager_break`, for models that are not traced.

In: a function that works in place on tensors it is given. Out: the function, which ends the segment
that is being captured whenever it is called. Also what no graph can hold, and the words for it.
Knows nothing of how segments are captured.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from pcgsvc.errors import ConfigError, TraceError

F = TypeVar("F", bound=Callable[..., Any])

WAYS_OUT = """\
Ways out, where `step` is what cannot be in a graph, and writes its result into a tensor (rows
that are padding are to be left out of sums: x[pcgsvc.true_rows(x)]):
  an op of its own, at which the graph is split; the model calls torch.ops.mine.step(x, out):
    @pcgsvc.splitting_op("mine::step", mutates_args=("out",))
    def step(x: torch.Tensor, out: torch.Tensor) -> None: ...
  or partition.strategy=breakable, which traces nothing, and the function marked where it is:
    @pcgsvc.eager_break
    def step(x, out): ..."""
"""What to do about code that no graph can hold, for messages."""
HOST_READS = ("aten::_local_scalar_dense", "aten::item")
"""Ops with which the host waits for a value of the device: .item(), bool(), int(), if."""


def host_reads_refused(lines: Iterable[str]) -> str:
    """Return what is wrong with a forward in which the host waits for values, at these lines."""
    return (
        f"the forward waits for a device value at {', '.join(dict.fromkeys(lines))} "
        "(.item(), bool(), int(), float(), if): in a graph it would be frozen at its value of the "
        f"capture run.\n{WAYS_OUT}"
    )


def higher_order_refusal(name: str, where: str) -> TraceError:
    """Return the error for an operator that runs graphs of its own, by torch's name for it."""
    called, instead = _HIGHER_ORDER.get(name, (name, "call its body itself"))
    return TraceError(
        f"{called} at {where}: a higher-order operator, which runs graphs of its own; a piece has "
        f"none. Ways out: {instead}; or as follows. {WAYS_OUT}"
    )


_HIGHER_ORDER = {
    "cond": ("torch.cond", "compute both branches, and choose with torch.where"),
    "flex_attention": (
        "torch.nn.attention.flex_attention",
        "call F.scaled_dot_product_attention with a mask",
    ),
    "tag_activation_checkpoint": (
        "torch.utils.checkpoint",
        "call the function itself, since there are no gradients to save memory for",
    ),
}
"""What users call a higher-order operator, and what does the same without it."""


class BreakHandler(Protocol):
    """What a break is reported to while something is being captured."""

    def at_function(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a break between two segments."""


_HANDLER: contextvars.ContextVar[BreakHandler | None] = contextvars.ContextVar(
    "pcgsvc_break_handler", default=None
)


def eager_break(function: F) -> F:
    """Mark a Python function as a break of `partition.strategy=breakable`.

    While a forward is captured, a call of the function ends the segment, runs eagerly, and is
    called again with the same arguments between the graphs at every replay; anywhere else it is an
    ordinary call. It must write into tensors that it is given (returning a fresh tensor is an
    error), and its other arguments are frozen at capture: what changes from step to step is read
    from `pcgsvc.current_context()`.

        @pcgsvc.eager_break
        def step(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(x * x[pcgsvc.true_rows(x)].sum().item())

        runner = pcgsvc.compile(model, (x,), partition={"strategy": "breakable"})

    Raises:
        ConfigError: it is no function.
    """
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"eager_break: got {function!r}; it stands over a function, without arguments: "
            "@pcgsvc.eager_break."
        )

    @functools.wraps(function)
    def broken(*args: Any, **kwargs: Any) -> Any:
        handler = _HANDLER.get()
        if handler is None:
            return function(*args, **kwargs)
        name = f"{function.__module__}.{function.__qualname__}"
        return handler.at_function(name, function, args, kwargs)

    return broken  # type: ignore[return-value]


@contextlib.contextmanager
def handle_breaks(handler: BreakHandler | None) -> Iterator[None]:
    """Report breaks of this thread to `handler` for a block."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


# ---- values that the CPU alone reads -------------------------------------------------------------

Call = tuple[Callable[..., Any], Any, dict[str, Any]]


def without_reads(func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
    """Return a call that does the same, for one that reads values on the CPU and not on CUDA."""
    if func is torch.nn.functional.one_hot and (classes := _classes(*args, **kwargs)) >= 0:
        return _one_hot, (args[0], classes), {}
    if func is torch.Tensor.__setitem__ and type(args[2]) in (bool, int, float):
        mask = _whole_mask(args[0], args[1])
        if mask is not None:
            return torch.Tensor.masked_fill_, (args[0], mask, args[2]), {}
    return func, args, kwargs


def _classes(_: torch.Tensor, num_classes: int = -1) -> int:
    return num_classes


def _one_hot(x: torch.Tensor, classes: int) -> torch.Tensor:
    return (x[..., None] == torch.arange(classes, device=x.device)).long()


def _whole_mask(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    """Return the mask of an index of one mask and whole dimensions, as one of `x`'s dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    places = [at for at, item in enumerate(items) if isinstance(item, torch.Tensor)]
    if len(places) != 1 or any(i != slice(None) for i in items if not isinstance(i, torch.Tensor)):
        return None
    at, mask = places[0], items[places[0]]
    if mask.dtype is not torch.bool or not mask.dim() or x.shape[at:][: mask.dim()] != mask.shape:
        return None
    after = x.dim() - at - mask.dim()
    shaped: torch.Tensor = mask[(None,) * at + (...,) + (None,) * after]
    return shaped
