"""Rows of the model's state that padding may be written to, since nobody reads them.

In: `capture.null_rows` and the state. Out: the state with such rows spoilt before a replay, so that
a read of them shows in its results, and without them where states are compared. Not seen: a read
whose result does not depend on the value (a mask), and one at a later step of what a call left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pcgsvc.errors import ConfigError
from pcgsvc.forward.specs import holds_nan


class NullRows:
    """The rows of `capture.null_rows`, counted from the start, by the name of the tensor.

    Args:
        wanted: the setting.
        state: what the forward writes to, by name.

    Raises:
        ConfigError: there is no such tensor or row.
    """

    def __init__(self, wanted: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
        self._rows: dict[str, list[int]] = {}
        for name, rows in wanted.items():
            if name not in state:
                raise ConfigError(
                    f"capture.null_rows: the forward writes to no {name!r}; to {sorted(state)}."
                )
            count = state[name].shape[0] if state[name].dim() else 0
            listed = rows if isinstance(rows, (list, tuple)) else [rows]
            if not listed or not all(type(r) is int and -count <= r < count for r in listed):
                raise ConfigError(
                    f"capture.null_rows: got {rows!r} for {name!r}, which has {count} rows; name "
                    f"some of -{count} to {count - 1}."
                    if count
                    else f"capture.null_rows: {name!r} is a single number and has no rows."
                )
            self._rows[name] = [r % count for r in listed]

    def spoil(self, state: Mapping[str, torch.Tensor]) -> None:
        """Fill the rows with NaN, or with the largest number, in place."""
        for name, rows in self._rows.items():
            dtype = state[name].dtype
            if holds_nan(dtype):
                state[name][rows] = torch.nan
            else:
                state[name][rows] = True if dtype is torch.bool else torch.iinfo(dtype).max

    def padding_of(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what padding rows are drawn from: with zeros for integers where there are rows.

        Which row padding is written to may be one of its numbers, and calls pad those with zeros.
        """
        if not self._rows:
            return inputs
        floats = {name for name, tensor in inputs.items() if holds_nan(tensor.dtype)}
        return {n: t if n in floats else torch.zeros_like(t) for n, t in inputs.items()}

    def without(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state with these rows zero: a copy of each tensor that has some."""
        return {name: self._without(name, tensor) for name, tensor in state.items()}

    def _without(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._rows:
            return tensor
        copy = tensor.clone()
        copy[self._rows[name]] = 0
        return copy
