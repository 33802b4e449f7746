"""`model.inputs`: example inputs described in a config.

In: a mapping such as `{x: {shape: [tokens, 32]}, flip: true}`. Out: a source of inputs, and the
arguments that are no tensors. Knows nothing of modules.

    x: [tokens, 32]                              the model's dtype, normally distributed
    x: {shape: [tokens, 32], dtype: float16}     fill: normal, uniform, zeros or ones
    ids: {shape: [tokens], dtype: int64, high: 1000}      whole numbers from `low` (0) to high - 1
    positions: {shape: [tokens], dtype: int64, fill: arange}      0, 1, … along the rows
    offsets: {shape: [tokens], kind: offsets, high: 64}     ascending from 0 to at most `high`
    owners: {shape: [tokens], kind: sorted, high: 8}        ascending whole numbers below `high`
    keep: {shape: [tokens, 16], kind: mask}                 true or false, something true per row
    scale: 2.0                                   no tensor: a fixed argument
    sizes: {value: [1, 2]}                       the same, for lists and mappings
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pcgsvc.errors import ConfigError, near

_FILLS = ("normal", "uniform", "arange", "zeros", "ones")
_FIELDS = ("shape", "dtype", "fill", "low", "high", "kind")
_KINDS = {"offsets": torch.int64, "sorted": torch.int64, "mask": torch.bool}
"""What values that are no independent draws may be, with the dtype where none is named."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """One tensor input."""

    shape: tuple[int | str, ...]
    """Sizes; a word stands for the rows."""
    dtype: torch.dtype | None
    """None: the model's."""
    fill: str
    """One of `_FILLS` or `_KINDS`, or `integers`."""
    low: float
    high: float | None

    def make(self, rows: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Return an input; `dtype` is the model's."""
        shape = [rows if isinstance(n, str) else n for n in self.shape]
        at = next((d for d, n in enumerate(self.shape) if isinstance(n, str)), 0)
        dtype = self.dtype or dtype
        if self.fill == "integers":
            limit = 2 if dtype is torch.bool else int(self.high or 0)
            return torch.randint(int(self.low), limit, shape, generator=generator).to(dtype)
        if self.fill == "mask":  # a row with nothing in it would be NaN after a softmax
            kept = torch.randint(2, shape, generator=generator).to(dtype)
            kept[..., :1] = 1
            return kept
        if self.fill in ("offsets", "sorted"):
            limit = int(self.high or 0) + (self.fill == "offsets")
            drawn = torch.randint(int(self.low), limit, shape, generator=generator)
            drawn = drawn.sort(dim=at).values
            if self.fill == "offsets" and drawn.numel():
                drawn.select(at, 0).fill_(int(self.low))
            return drawn.to(dtype)
        if self.fill == "arange":
            count = torch.arange(shape[at]) % int(self.high or shape[at])
            return (
                count.view([-1 if d == at else 1 for d in range(len(shape))])
                .expand(shape)
                .to(dtype)
            )
        if self.fill in ("zeros", "ones"):
            return torch.full(shape, float(self.fill == "ones")).to(dtype)
        if self.fill == "uniform":
            high = 1.0 if self.high is None else self.high
            return (torch.rand(shape, generator=generator) * (high - self.low) + self.low).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)


def read_inputs(tree: Mapping[str, Any]) -> tuple[dict[str, Described], dict[str, Any]]:
    """Read `model.inputs`: the tensors, and the arguments that are none.

    Raises:
        ConfigError: naming the input and what is wrong with it.
    """
    tensors: dict[str, Described] = {}
    constants: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"model.inputs.{name}"
        if isinstance(value, (list, tuple)):
            value = {"shape": value}
        if not isinstance(value, Mapping):
            constants[name] = value
        elif "value" in value:
            if len(value) > 1:
                raise ConfigError(f"{path}: got {dict(value)}; 'value' stands alone.")
            constants[name] = value["value"]
        else:
            tensors[name] = _described(path, value)
    words = sorted({n for t in tensors.values() for n in t.shape if isinstance(n, str)})
    if not words:
        raise ConfigError(
            f"model.inputs: got {dict(tree)}; no shape has a word for the rows, such as "
            "'{x: [tokens, 32]}'."
        )
    if len(words) > 1:
        raise ConfigError(
            f"model.inputs: the shapes have {len(words)} words, {words}; there is one dynamic "
            "size, the rows of a call. Give the others a number, and run once for each value."
        )
    return tensors, constants


def _described(path: str, value: Mapping[str, Any]) -> Described:
    for name in value:
        if name not in _FIELDS:
            raise ConfigError(
                f"{path}: there is no {name!r}{near(str(name), _FIELDS)} Choices: "
                f"{', '.join(_FIELDS)}, or value for an argument that is no tensor."
            )
    shape = value.get("shape")
    if not isinstance(shape, (list, tuple)) or not all(map(_is_size, shape)):
        raise ConfigError(
            f"{path}.shape: got {shape!r}; a list of sizes is needed, with a word for the rows, "
            "such as [tokens, 32]."
        )
    dtype = _dtype(f"{path}.dtype", value.get("dtype"))
    kind = value.get("kind")
    if kind is not None:
        return _of_kind(path, value, tuple(shape), dtype)
    whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    fill = value.get("fill", "integers" if whole else "normal")
    fills = [f for f in _FILLS if not whole or f not in ("normal", "uniform")]
    if fill != "integers" and fill not in fills:
        raise ConfigError(
            f"{path}.fill: got {fill!r}{near(str(fill), fills)} Choices: {', '.join(fills)}."
        )
    low, high = _limits(path, value)
    if fill == "integers" and dtype is not torch.bool and (high is None or not low < high):
        raise ConfigError(
            f"{path}.high: got {high!r}; valid whole numbers go from low={low} to high - 1, so a "
            "larger one is needed (an embedding's rows, for token ids), or fill: arange, zeros or "
            "ones."
        )
    return Described(shape=tuple(shape), dtype=dtype, fill=str(fill), low=low, high=high)


def _of_kind(
    path: str, value: Mapping[str, Any], shape: tuple[int | str, ...], dtype: torch.dtype | None
) -> Described:
    """Return an input whose values depend on each other."""
    kind, (low, high) = value["kind"], _limits(path, value)
    if kind not in _KINDS:
        raise ConfigError(f"{path}.kind: got {kind!r}{near(str(kind), _KINDS)} {_CHOICES}")
    if "fill" in value:
        raise ConfigError(f"{path}: got kind={kind} with fill={value['fill']!r}; pass one.")
    dtype = dtype or _KINDS[kind]
    if kind != "mask" and (dtype.is_floating_point or dtype is torch.bool):
        raise ConfigError(f"{path}.dtype: got {dtype} with kind={kind}; whole numbers are needed.")
    if kind != "mask" and (high is None or not low < high):
        raise ConfigError(
            f"{path}.high: got {high!r}; kind={kind} needs how far the numbers go, above low={low}."
        )
    return Described(shape=shape, dtype=dtype, fill=kind, low=low, high=high)


_CHOICES = f"Choices: {', '.join(_KINDS)}."


def _limits(path: str, value: Mapping[str, Any]) -> tuple[float, float | None]:
    low, high = value.get("low", 0), value.get("high")
    for field, limit in (("low", low), ("high", high)):
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
            raise ConfigError(f"{path}.{field}: got {limit!r}, a number is needed.")
    return low, high


def _is_size(size: Any) -> bool:
    if isinstance(size, str):
        return size.isidentifier()
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


def _dtype(path: str, word: Any) -> torch.dtype | None:
    if word is None:
        return None
    found = getattr(torch, word, None) if isinstance(word, str) else None
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"{path}: got {word!r}; a torch dtype such as float32 or int64 is needed."
        )
    return found
