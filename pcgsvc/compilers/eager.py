"""`compiler=eager`: a piece's own ops, one after the other, from generated Python source.

In: a piece's document. Out: a function, and bytes that give the function back (JSON, no pickle).
Knows nothing of FX, capture or the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pcgsvc.errors import CompileError
from pcgsvc.program.program import CompiledPiece
from pcgsvc.trace.rows import Document, digest, function_of, python_of


class EagerPiece(CompiledPiece):
    """A piece as plain ops; the results are exactly those of the traced forward."""

    def __init__(self, document: Document) -> None:
        self._function = function_of(document, "piece")
        self._document = document

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the piece."""
        return self._function(*args)

    def num_kernels(self) -> int:
        """See `CompiledPiece.num_kernels`: one per op, views among them."""
        return len(self._document["rows"])

    def to_bytes(self) -> bytes:
        """Return the piece's written form."""
        return json.dumps(self._document, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes, expected_hash: str) -> EagerPiece:
        """Load a piece; CompileError if the bytes are not the piece called `expected_hash`."""
        try:
            document = json.loads(data)
        except ValueError as error:
            raise CompileError(f"stored piece {expected_hash[:12]}: malformed ({error})") from error
        if digest(document) != expected_hash:
            raise CompileError(
                f"stored piece {expected_hash[:12]}: holds another piece's document."
            )
        return cls(document)

    def source(self) -> str:
        """Return the Python source, for `debug.dump_dir`."""
        return python_of(self._document, "piece")
