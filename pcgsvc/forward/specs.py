"""What a forward's tensors look like, and which row counts a graph of it is right for.

In: nothing. Out: types that all later rooms read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

import torch


def holds_nan(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are drawn from a normal distribution, and may be NaN."""
    return dtype.is_floating_point or dtype.is_complex


def comparable(integers: torch.Tensor) -> torch.Tensor:
    """Return integers in a dtype for which torch can compare them; it cannot all unsigned ones."""
    return integers if integers.dtype in _COMPARED else integers.to(torch.int64)


_COMPARED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """How one tensor input of the forward looks."""

    name: str
    """Argument name."""
    example: torch.Tensor
    """Any valid value; only dtype, device, the order of its strides and the shape outside `dims`
    count."""
    dims: tuple[int, ...]
    """Dimensions that carry the rows, ascending; empty for an input of fixed shape."""

    def shape(self, rows: int) -> list[int]:
        """Return the input's shape for a row count."""
        return [rows if d in self.dims else n for d, n in enumerate(self.example.shape)]

    def fits(self, value: Any, rows: int) -> bool:
        """Whether a value is a tensor of the input's dtype and of its shape for a row count."""
        of_kind = isinstance(value, torch.Tensor) and value.dtype == self.example.dtype
        return of_kind and list(value.shape) == self.shape(rows)

    @cached_property
    def order(self) -> list[int]:
        """The dimensions from the outermost in memory to the innermost, as in the example."""
        dims = range(self.example.dim())
        if self.example.is_contiguous():
            return list(dims)
        strides = torch.empty_like(self.example, device="meta").stride()  # without gaps
        return sorted(dims, key=lambda dim: -strides[dim])

    def empty(self, rows: int, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory for `rows` rows, laid out as the example is."""
        shape, dtype = self.shape(rows), self.example.dtype
        return torch.empty_permuted(shape, self.order, dtype=dtype, device=device)

    def view(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a view of `rows` rows over the start of a larger buffer, laid out as it is."""
        if not self.dims:
            return buffer
        like = self.empty(rows, torch.device("meta"))
        return buffer.as_strided(like.shape, like.stride())

    def is_laid_out(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no gaps, and the example's order of dimensions in memory."""
        return tensor.permute(self.order).is_contiguous()

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor laid out as the example is, in memory that is as it reads.

        Itself, or a copy: generated code and kernels know nothing of a view that negates.
        """
        tensor = tensor.resolve_conj().resolve_neg()
        if self.is_laid_out(tensor):
            return tensor
        dtype, device = tensor.dtype, tensor.device
        made = torch.empty_permuted(tensor.shape, self.order, dtype=dtype, device=device)
        return made.copy_(tensor)

    def cut(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the first rows of an input, as a view."""
        return cut_rows(tensor, self.dims, rows)


def cut_rows(tensor: torch.Tensor, dims: Sequence[int], rows: int) -> torch.Tensor:
    """Return the first `rows` rows in each of `dims`, as a view."""
    for dim in dims:
        tensor = tensor.narrow(dim, 0, rows)
    return tensor


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and kind of a tensor; symbolic sizes are Python source in the row count `s`."""

    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    offset: int | str
    device: str
    layout: str = "torch.strided"

    def row_dims(self) -> tuple[int, ...]:
        """Return the dimensions whose size is exactly the row count."""
        return tuple(d for d, size in enumerate(self.shape) if size == "s")

    def as_json(self) -> list[Any]:
        """Return JSON types, for documents and hashes."""
        shape, stride = list(self.shape), list(self.stride)
        return ["tensor", self.dtype, shape, stride, self.offset, self.device, self.layout]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What a graph input is bound to at run time."""

    kind: str
    """`size` (the row count), `input` (an argument), `param` (parameter or buffer), `constant`,
    `literal` (numbers of the source)."""
    name: str
    """Argument name, fully qualified tensor name, Dynamo's source of a captured tensor, or the
    numbers (`pcgsvc.trace.literals`)."""
    spec: TensorSpec | None
    """None for the size."""


def value_at(source: int | str | CodeType, size: int) -> int:
    """Return what a number, or Python source over the row count `s`, gives for `size` rows."""
    if isinstance(source, int):
        return source
    return int(eval(source, {"s": size, **_NAMES}))


_NAMES: dict[str, Any] = {
    **{f.__name__: f for f in (abs, float, max, min, round)},
    "math": math,
    "__builtins__": {},
}
"""What the sources are written with."""


@dataclass(frozen=True)
class SizePredicate:
    """What the graph assumes of the row count `s`; replaces Dynamo's shape guards."""

    conditions: tuple[str, ...]
    """Python source over `s`; the graph is right for sizes that satisfy all."""
    origins: tuple[str, ...] = ()
    """The user's line behind each condition, or an empty string."""

    def requiring(self, conditions: Iterable[str], origin: str) -> SizePredicate:
        """Return a predicate of more conditions, all of one origin."""
        added = tuple(conditions)
        origins = (*self.origins, *[origin] * len(added))
        return SizePredicate((*self.conditions, *added), origins)

    @cached_property
    def _codes(self) -> list[CodeType]:
        return [compile(condition, "<condition>", "eval") for condition in self.conditions]

    def broken_by(self, size: int) -> str | None:
        """Return the first condition on `rows` that `size` breaks, with its origin, or None."""
        for at, condition in enumerate(self.conditions):
            try:
                holds = value_at(self._codes[at], size)
            except (ArithmeticError, ValueError):  # a remainder by zero, a root of a negative
                holds = False
            if not holds:
                origin = self.origins[at] if at < len(self.origins) else ""
                words = re.sub(r"\bs\b", "rows", condition)
                return f"{words}{f' (from {origin})' if origin else ''}"
        return None
