"""Whole numbers of the host, as callers give them: lists, arrays and tensors of all kinds.

In: a field of a `Batch`. Out: a list or an array of numpy, or a `BatchError` that names the field.
Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pcgsvc.errors import BatchError

Ints = npt.NDArray[np.int64]


def host_lengths(name: str, given: Any) -> list[int]:
    """Return a copy of lengths, at least one of them, each at least 1.

    Raises:
        BatchError: they are something else.
    """
    if isinstance(given, torch.Tensor) and given.is_meta:
        raise BatchError(f"batch.{name}: got a tensor on the meta device, which has no values.")
    values = given
    if isinstance(given, (torch.Tensor, np.ndarray)):
        try:
            values = given.tolist()
        except RuntimeError:  # sparse, nested, quantized
            raise BatchError(
                f"batch.{name}: got {_words(given)}; a list of lengths is needed."
            ) from None
    if type(values) is list and set(map(type, values)) == {int} and min(values) > 0:
        return values.copy()
    if not isinstance(values, Iterable) or isinstance(values, (Set, Mapping)):
        raise BatchError(f"batch.{name}: got {given!r}, a list of lengths is needed.")
    values = list(values)
    if not values:
        raise BatchError(f"batch.{name}: got an empty list; at least one request is needed.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise BatchError(
                f"batch.{name}: got {value!r} among {values}; a length is a whole number, at "
                "least 1."
            )
    return [int(v) for v in values]


def host_ints(name: str, given: Any, dims: int) -> Ints:
    """Return whole numbers of `dims` dimensions that a field of a batch was given as.

    Raises:
        BatchError: they are something else, or on a device.
    """
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        raise BatchError(
            f"batch.{name}: got a tensor on {given.device}; pass host values, which the runner "
            "copies without making the host wait."
        )
    try:
        values = _as_array(given)
    except (ValueError, TypeError, RuntimeError):  # no array of host memory
        raise BatchError(
            f"batch.{name}: got {_words(given)}; "
            f"{'one list per request is' if dims == 2 else 'a list is'} needed."
        ) from None
    if values.ndim != dims or values.dtype.kind not in "iu" or not values.size:
        raise BatchError(
            f"batch.{name}: got shape {values.shape} of {values.dtype}; {dims} dimension(s) of "
            "whole numbers are needed."
        )
    return values.astype(np.int64, copy=False)


def _as_array(given: Any) -> npt.NDArray[Any]:
    """Return what was given as an array, ragged rows filled up."""
    try:
        return np.asarray(given)
    except ValueError:
        if not all(isinstance(row, Sequence) for row in given):
            raise
        width = max(len(row) for row in given)
        return np.asarray([[*row, *([0] * (width - len(row)))] for row in given])


def _words(given: Any) -> str:
    """Return what to call a value that is no array."""
    if isinstance(given, torch.Tensor):
        return f"a tensor of {given.dtype}, {given.layout}"
    return repr(given)
