"""Breaks that are Python functions: `eager_break`, for models that are not traced.

In: a function that works in place on tensors it is given. Out: the function, which ends the segment
that is being captured whenever it is called. Knows nothing of how segments are captured.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


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
    """

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
