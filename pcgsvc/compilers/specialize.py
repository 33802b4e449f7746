"""A piece for one exact row count, every shape a plain number.

In: a region and a size. Out: its graph with the row count put in; and which regions of a program
want such a twin, by `compiler.specialize_sizes`, or since a captured size breaks what their code
for all sizes assumes. Knows nothing of how a graph is compiled or stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config, captures
from pcgsvc.forward.specs import SizePredicate, value_at
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.pieces import Piece, graph_module
from pcgsvc.trace.rows import Document


def specialized(image: ProgramImage, config: Config) -> list[tuple[int, str]]:
    """Return (size, hash) of every region that is compiled for an exact size as well.

    That is every region at the sizes that are configured, and at other captured ones those whose
    code for all sizes is not valid for them. A size for which the trace is not has none.
    """
    asked = config.compiler.specialize_sizes
    captured = config.capture.final_sizes if captures(config) else []
    assumed = {h: SizePredicate(conditions) for h, conditions in image.assumes.items()}
    return [
        (size, h)
        for size in sorted({*asked, *captured})
        if image.predicate.broken_by(size) is None
        for h, document in image.compiled.items()
        if size in asked or (h in assumed and assumed[h].broken_by(size) is not None)
        if _depends(document)
    ]


def baked_inputs(document: Document) -> tuple[int, ...]:
    """Return the places of the arguments that are plain numbers once the size is known."""
    return tuple(at for at, spec in enumerate(document["inputs"]) if spec[0] == "int")


def graph_for(piece: Piece, size: int) -> torch.fx.GraphModule:
    """Return a region's graph for one row count: no int inputs, and fake values of plain shapes."""
    assert piece.document is not None
    module = graph_module(piece)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    pairs = list(zip(placeholders, piece.document["inputs"], strict=True))
    tensors = [(node, spec) for node, spec in pairs if spec[0] != "int"]
    for node, spec in pairs:
        if spec[0] == "int":
            node.replace_all_uses_with(value_at(spec[1], size))
            module.graph.erase_node(node)
    module.recompile()
    with torch_private.fake_mode():
        inputs = _inputs([(n.meta["example_value"], spec) for n, spec in tensors], size)
        _Propagation(module).run(*inputs)
    return module


class _Propagation(torch.fx.Interpreter):
    """Gives every node its fake value."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["example_value"] = result = super().run_node(n)
        return result


def _depends(document: Document) -> bool:
    """Whether any input's shape is made of the row count."""

    def symbolic(item: Any) -> bool:
        return isinstance(item, str) or (isinstance(item, list) and any(map(symbolic, item)))

    inputs = document["inputs"]
    return any(symbolic(i[2:5] if i[0] == "tensor" else i[1]) for i in inputs)


def _inputs(pairs: Sequence[tuple[torch.Tensor, list[Any]]], size: int) -> list[torch.Tensor]:
    """Return a tensor per input; those that shared memory in the trace share it here too."""
    layouts = [
        (
            [value_at(n, size) for n in shape],
            [value_at(n, size) for n in stride],
            value_at(offset, size),
        )
        for _, (_, _, shape, stride, offset, *_) in pairs
    ]
    needed: dict[int, int] = {}
    for (traced, _), (shape, stride, offset) in zip(pairs, layouts, strict=True):
        last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        memory = torch_private.storage_id(traced)
        end = (offset + last + 1) * traced.element_size() if 0 not in shape else 0
        needed[memory] = max(needed.get(memory, 0), end)
    memories: dict[int, torch.UntypedStorage] = {}
    made = []
    for (traced, _), (shape, stride, offset) in zip(pairs, layouts, strict=True):
        key = torch_private.storage_id(traced)
        if key not in memories:
            whole = torch.empty(needed[key], dtype=torch.uint8, device=traced.device)
            memories[key] = whole.untyped_storage()
        empty = torch.empty(0, dtype=traced.dtype, device=traced.device)
        made.append(empty.set_(memories[key], offset, shape, stride))
    return made
