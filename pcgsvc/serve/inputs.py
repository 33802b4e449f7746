"""A call's arguments -> its input tensors by name, and its row count.

In: the forward's arguments and the input buffers. Out: tensors that fit them, or a `BatchError`;
nothing is copied. Knows nothing of batches and graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pcgsvc.errors import BatchError
from pcgsvc.forward.arguments import Arguments
from pcgsvc.forward.specs import InputSpec
from pcgsvc.forward.workspace import Workspace


class InputBinder:
    """Matches arguments with input buffers; remembers the shapes that fitted."""

    def __init__(self, arguments: Arguments, memory: Workspace) -> None:
        self._arguments, self._memory = arguments, memory
        self._in_order = arguments.by_position
        self._specs, self._dtypes = memory.inputs, [s.example.dtype for s in memory.inputs]
        self._names = {spec.name for spec in memory.inputs}
        self._shapes: list[dict[torch.Size, int]] = [{} for _ in memory.inputs]
        """Shapes that each input was found to fit with, and the row count that they mean."""

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[torch.Tensor], int]:
        """Return a call's input tensors in order, as they were passed, and its row count.

        Raises:
            BatchError: an argument does not fit its buffer, or another argument.
        """
        if kwargs or not self._in_order or len(args) != len(self._specs):
            by_name = not args and kwargs.keys() == self._names
            given = kwargs if by_name else self._arguments.bind(args, kwargs)
            args = [given[spec.name] for spec in self._specs]
        num_tokens = -1
        for at, value in enumerate(args):
            if (
                type(value) is torch.Tensor
                and value.dtype is self._dtypes[at]
                and value.layout is torch.strided
                and not (value.is_meta or value.is_nested)
            ):
                rows = self._shapes[at].get(value.shape)
                if rows is not None and (num_tokens == rows or num_tokens == -1):
                    num_tokens = rows
                    continue
            spec = self._specs[at]
            num_tokens = _check_input(spec, self._memory.buffers[spec.name], value, num_tokens)
            if spec.dims and num_tokens <= self._memory.max_tokens:
                self._shapes[at][value.shape] = num_tokens
        return args, num_tokens

    def apart(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return inputs with clones of those that lie in the runner's buffers.

        Other rows of a buffer than those that they are copied to would be written meanwhile.
        """
        own = {b.untyped_storage().data_ptr() for b in self._memory.buffers.values()}
        return [v.clone() if v.untyped_storage().data_ptr() in own else v for v in values]


def _check_input(spec: InputSpec, buffer: torch.Tensor, value: Any, num_tokens: int) -> int:
    """Return the row count after checking one input against its buffer."""
    dims = spec.dims
    if not isinstance(value, torch.Tensor) or value.dtype != buffer.dtype:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise BatchError(f"{spec.name}: got {got}, a tensor of {buffer.dtype} is needed.")
    if value.is_meta:
        raise BatchError(f"{spec.name}: got a tensor on the meta device, which has no values.")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        way = "to_padded_tensor(0)" if value.is_nested else "to_dense()"
        raise BatchError(f"{spec.name}: got a {kind} tensor, a dense one is needed: tensor.{way}.")
    shape, wanted = list(value.shape), list(buffer.shape)
    rows = num_tokens
    if dims and dims[0] < len(shape):
        rows = shape[dims[0]]
        for dim in dims:
            wanted[dim] = rows
    if shape != wanted:
        words = ["rows" if d in dims else str(n) for d, n in enumerate(buffer.shape)]
        raise BatchError(f"{spec.name}: got shape {tuple(shape)}, [{', '.join(words)}] is needed.")
    if not dims:
        return num_tokens
    if rows < 1 or num_tokens not in (-1, rows):
        before = f", the inputs before it have {num_tokens}" if num_tokens != -1 else ""
        raise BatchError(
            f"{spec.name}: got {rows} rows{before}; all inputs need the same number, at least 1."
        )
    return rows
