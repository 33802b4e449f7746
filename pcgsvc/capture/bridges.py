"""The results of a splitting op at fixed addresses.

In: what the op returned in the capture run. Out: what later pieces are captured on, and a step that
gives it the values of each later run. Knows nothing of segments.

A result that is new memory has a bridge: a tensor that stays where it is, into which each run is
copied. So has a row-wise result that is an argument or a view of one, unless later pieces write to
that memory: then all must see one memory, and a run in which that is otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from pcgsvc.errors import CaptureError
from pcgsvc.program.program import Memory, tensors_in, zero_padding

Step = Callable[[], Any]


class BoundResults:
    """What one splitting op returned at capture.

    Args:
        name: of the op.
        result: what it returned.
        memory: of its arguments.
        row_wise: whether its results have the step's rows.
        written_later: whether memory of its arguments or results is written to after it.

    Raises:
        CaptureError: two results share new memory, and it is written to later.
    """

    def __init__(
        self, name: str, result: Any, memory: Memory, *, row_wise: bool, written_later: bool
    ) -> None:
        self._name, self._memory, self._written_later = name, memory, written_later
        leaves, self._tree = pytree.tree_flatten(result)
        as_it_is = [
            not isinstance(v, torch.Tensor) or (memory.holds(v) and (written_later or not row_wise))
            for v in leaves
        ]
        self._leaves = [
            value if same else _like(value) for value, same in zip(leaves, as_it_is, strict=True)
        ]
        self._bridged = [not same for same in as_it_is]
        self.value = pytree.tree_unflatten(self._leaves, self._tree)
        """The result as later pieces see it."""
        # Later pieces may turn a tensor itself round (`result.t_()`): not what is compared here.
        self._leaves = [t.detach() if isinstance(t, torch.Tensor) else t for t in self._leaves]
        self.bridges = [t for t, new in zip(self._leaves, self._bridged, strict=True) if new]
        """The tensors that each run is copied into."""
        if written_later:
            self._refuse_shared([v for v, new in zip(leaves, self._bridged, strict=True) if new])

    def step(self, run: Step, rows: list[torch.Tensor]) -> Step:
        """Return the step: run the op, put its results where they belong, zero padding rows."""
        if not tensors_in(self._leaves):
            return self._without_results(run, rows)

        def step() -> None:
            self._take(run())
            zero_padding(rows)

        return step

    def _without_results(self, run: Step, rows: list[torch.Tensor]) -> Step:
        def step() -> None:
            if (result := run()) is not None and tensors_in(result):
                self._refuse(f"returned {_words(result)}", "no tensor")
            if rows:
                zero_padding(rows)

        return step

    def _take(self, result: Any) -> None:
        leaves, tree = pytree.tree_flatten(result)
        if tree != self._tree:
            self._refuse(f"returned {_words(result)}", _words(self.value))
        for known, new, value in zip(self._leaves, self._bridged, leaves, strict=True):
            if not isinstance(known, torch.Tensor) or not isinstance(value, torch.Tensor):
                if type(value) is not type(known) or value != known:
                    self._refuse(f"returned {_words(value)}", _words(known))
            elif value.shape != known.shape or value.dtype != known.dtype or _is_odd(value):
                self._refuse(f"gave {_words(value)}", _words(known))
            elif not new:
                if value.data_ptr() != known.data_ptr() or value.stride() != known.stride():
                    self._refuse("returned other memory", "an argument, or a view of one")
            elif self._written_later and self._memory.holds(value):
                self._refuse("returned an argument, or a view of one", "new memory")
            else:
                known.copy_(value)

    def _refuse(self, got: str, wanted: str) -> NoReturn:
        raise CaptureError(
            f"{self._name}: {got}, at capture it gave {wanted}. The graphs behind a splitting op "
            "read what it gave at capture, so it must keep its shape, dtype and structure, and "
            "whether a result is new memory where that memory is written to later: return a "
            "clone."
        )

    def _refuse_shared(self, fresh: list[torch.Tensor]) -> None:
        addresses = [t.untyped_storage().data_ptr() for t in fresh if t.numel()]
        if len(set(addresses)) < len(addresses):
            raise CaptureError(
                f"{self._name}: two of its results share memory, which is written to later; the "
                "graphs cannot keep that. Return a clone."
            )


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of its own that lies there as the tensor does."""
    return torch.empty_strided(
        tensor.shape, _strides(tensor), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, or, where elements share memory, those of its clone."""
    sizes = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    end = 0
    for stride, size in sizes:
        if stride <= end:
            return tensor.clone().stride()
        end += (size - 1) * stride
    return tensor.stride()


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no elements in memory that could be copied into a bridge."""
    return tensor.is_meta or tensor.layout is not torch.strided


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = f", {value.device.type}, {value.layout}" if _is_odd(value) else ""
        return f"shape {tuple(value.shape)} of {value.dtype}{kind}"
    found = [_words(t) for t in tensors_in(value)]
    return f"{len(found)} tensors ({', '.join(found)})" if found else repr(value)[:80]
