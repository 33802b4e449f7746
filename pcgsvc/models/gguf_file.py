"""A GGUF file: its metadata, its tensor table, and Llama weights in it under transformers' names.

In: a path. Out: `GgufLlama`, a weight source for `checkpoint`. Knows nothing of modules or devices.

The header is parsed here and not by `gguf.GGUFReader`, which wraps every vocabulary entry in numpy
arrays (2.9 s for SmolLM2's 49152 tokens; 0.1 s here) and reads past the end of a truncated file
without a word. Block formats are the `gguf` package's business: it dequantises.

Source: the GGUF specification, versions 2 and 3; checked against gguf 0.19.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pcgsvc.errors import ConfigError
from pcgsvc.models.extras import require
from pcgsvc.models.llama import LlamaDims

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Cursor:
    """Reads little-endian values one after another; EOFError at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise EOFError(f"{size} bytes are announced at offset {self.at}, beyond the file's end")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        item, count = self.number("I"), self.number("Q")
        if item not in _SCALARS:
            return [self.value(item) for _ in range(count)]
        raw = self.take(count * struct.calcsize("<" + _SCALARS[item]))
        return [value for (value,) in struct.iter_unpack("<" + _SCALARS[item], raw)]


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table."""

    shape: tuple[int, ...]
    """Slowest dimension first, as torch has it; the file has it reversed."""
    kind: Any
    """`gguf.GGMLQuantizationType`."""
    offset: int
    """First byte in the file."""
    row_bytes: int
    """Bytes of one row of the last dimension."""


class GgufFile:
    """Metadata and tensor table of one file; tensor data stays mapped until it is read.

    Raises:
        ConfigError: not a GGUF file of version 2 or 3, or truncated, or damaged in its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = require("gguf", "smollm2")
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ConfigError(
                    f"model.weights: '{path}' is no GGUF file: it begins with {magic!r}, "
                    "b'GGUF' is needed. Fetch or convert it again."
                )
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._parse(_Cursor(self._data))
        except (EOFError, KeyError, ValueError, OverflowError, struct.error) as error:
            raise ConfigError(
                f"model.weights: '{path}' ({len(self._data)} bytes) is truncated or damaged: "
                f"{error}. Fetch it again."
            ) from error

    def _parse(self, cursor: _Cursor) -> None:
        cursor.take(4)
        version, num_tensors, num_entries = (cursor.number(code) for code in "IQQ")
        if version not in (2, 3):
            raise ConfigError(
                f"model.weights: '{self.path}' has GGUF version {version}, 2 or 3 in little-endian "
                "byte order is needed."
            )
        for _ in range(num_entries):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.number("I"))
        table = [self._entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        for name, shape, kind, offset in table:
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ValueError(f"tensor {name!r} {list(shape)} is not in blocks of {block}")
            info = TensorInfo(shape, kind, start + offset, shape[-1] // block * block_bytes)
            end = info.offset + prod(shape[:-1]) * info.row_bytes
            if end > len(self._data):
                raise EOFError(f"tensor {name!r} ends at byte {end}")
            self.tensors[name] = info

    def _entry(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], Any, int]:
        name = cursor.string()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        kind = self._gguf.GGMLQuantizationType(cursor.number("I"))
        return name, shape, kind, cursor.number("Q")

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, dequantised to fp32 on the CPU, in memory of its own."""
        info = self.tensors[name]
        rows = prod(info.shape[:-1])
        raw = np.frombuffer(self._data, np.uint8, rows * info.row_bytes, info.offset)
        try:
            values = self._gguf.quants.dequantize(raw.reshape(rows, info.row_bytes), info.kind)
        except NotImplementedError as error:
            raise ConfigError(
                f"model.weights: '{self.path}' holds {name!r} as {info.kind.name}, which gguf "
                "cannot dequantise; use a file of another quantisation."
            ) from error
        return torch.from_numpy(np.array(values, dtype=np.float32).reshape(info.shape))


class GgufLlama:
    """The Llama weights of a GGUF file, by transformers' names and in transformers' layout.

    Raises:
        ConfigError: as `GgufFile`; or another architecture, or a Llama that ours is not.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.metadata = self._file.metadata
        """The file's metadata, tokenizer included."""
        self._own = {_standard_name(name): name for name in self._file.tensors}
        own_rotary = self._own.pop("rope_freqs.weight", None)
        self.shapes = {name: self._file.tensors[own].shape for name, own in self._own.items()}
        """Shape of each weight tensor."""
        self.dims = _dims(path, self.metadata, self.shapes)
        """What the metadata says."""
        if own_rotary is not None:
            factors = tuple(self._file.read(own_rotary).tolist())
            self.dims = _replace_factors(self.dims, factors)

    def own_name(self, name: str) -> str:
        """Return what the file calls (or would call) a tensor."""
        head, _, tail = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
        layer_names = {standard: own for own, standard in _LAYER_NAMES.items()}
        if head.isdigit() and tail in layer_names:
            return f"blk.{head}.{layer_names[tail]}.weight"
        names = {standard: own for own, standard in _NAMES.items()}
        return f"{names[name.removesuffix('.weight')]}.weight" if name in self._plain() else name

    def _plain(self) -> set[str]:
        return {f"{standard}.weight" for standard in _NAMES.values()}

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in fp32 on the CPU."""
        tensor = self._file.read(self._own[name])
        if name.endswith("q_proj.weight"):
            return _unpermute(tensor, self.dims.num_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(tensor, self.dims.num_kv_heads)
        return tensor
