"""The `plan` of `report.json`.

In: a `Plan`. Out: plain dicts of JSON types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pcgsvc import torch_private
from pcgsvc.forward.specs import value_at
from pcgsvc.jobs.plan.lifetimes import num_bytes
from pcgsvc.jobs.plan.planner import Plan
from pcgsvc.ops.collectives import COLLECTIVES
from pcgsvc.program.pieces import Kind, Piece
from pcgsvc.report.report import compiler_of, program_report
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import op_names, user_line

_MEANING = {
    "NEVER": "never inside a graph",
    "UNIFORM_SINGLE_TOKEN_DECODE": "inside graphs for batches of one new token per request",
    "UNIFORM_BATCH": "inside graphs for batches with equally many new tokens per request",
    "ALWAYS": "inside graphs for any batch",
}


def plan_report(plan: Plan) -> dict[str, Any]:
    """Return the report of `job=plan`: as of a build that has compiled and loaded nothing yet."""
    return {
        **program_report(plan.request, plan.image, plan.capture, plan.warnings),
        "compile": {
            "compiler": compiler_of(plan.request),
            "start": "cold",
            "num_traces": int(bool(plan.image.documents)),
            "num_compiled": 0,
            "num_loaded": 0,
            "seconds": dict(plan.seconds),
        },
        "cache": {
            "mode": plan.request.config.cache.mode.value,
            "dir": None,
            "program_key": None,
            "hits": 0,
            "misses": 0,
            "miss_reasons": [],
            "bytes": 0,
        },
        "plan": plan_section(plan),
        "ready": plan.ready,
    }


def plan_section(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON types."""
    kinds, sequence = _kinds(plan)
    graphs, memory, tensors = plan.graphs(), plan.memory, plan.workspace.tensors
    sizes = plan.request.config.capture.final_sizes
    return {
        "device": str(plan.planned.target),
        "traced_on": str(plan.request.device),
        "weights_in_memory": any(map(torch_private.has_memory, tensors.values())),
        "graphs": {
            "num_graphs": sum(g["graphs"] for g in graphs.values()),
            "by_mode": graphs,
            "sizes": sorted({d.num_tokens for _, d in plan.capture.entries}),
            "skipped": [{"size": s, "reason": r} for s, r in sorted(plan.skipped.items())],
        },
        "support": [{**row, "meaning": _MEANING[row["support"]]} for row in plan.support()],
        "mode": _mode_words(plan),
        "modes": {
            asked: {"resolved": r.resolved.value, "reasons": list(r.reasons)}
            for asked, r in plan.modes().items()
        },
        "kinds": kinds,
        "sequence": sequence,
        "num_artifacts": plan.num_artifacts(),
        "compile_modules": list(plan.compile_modules),
        "collectives": [] if plan.traced is None else _collectives(plan.traced, sizes),
        "memory": {
            "total_bytes": memory.total,
            "items": [
                {"name": i.name, "bytes": i.num_bytes, "method": i.method} for i in memory.items
            ],
            "notes": list(memory.notes),
        },
        "notes": list(plan.planned.notes),
    }


def _mode_words(plan: Plan) -> str:
    """Return what becomes of the mode and why, also where it stays as it is."""
    resolution = plan.capture.resolution
    if resolution.reasons:
        return "; ".join(resolution.reasons)
    asked = resolution.requested.value
    rows = plan.support()
    if not rows:
        return f"{asked} stays as asked: there is no splitting op in the graph"
    least = min(rows, key=lambda row: list(_MEANING).index(row["support"]))
    return (
        f"{asked} stays as asked: {least['op']} may be {_MEANING[least['support']]} "
        f"({least['support']}, by {least['said_by']})"
    )


def _collectives(traced: TracedGraph, sizes: list[int]) -> list[dict[str, Any]]:
    """Return the collectives of one step, equal ones together, with their bytes at each size.

    The bytes of one are those of the tensor that all ranks have afterwards, or of the larger one
    that they had before.
    """
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for node in traced.graph.nodes:
        for name in set(op_names(node)) & COLLECTIVES:
            given = [a for a in node.args if isinstance(a, torch.fx.Node)]
            values = [n.meta.get("example_value") for n in (node, *given)]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            at = [max(value_at(num_bytes(traced, t), rows) for t in tensors) for rows in sizes]
            found[name, tuple(at)] += 1
    return [
        {"op": name, "count": count, "bytes": dict(zip(map(str, sizes), at, strict=True))}
        for (name, at), count in found.items()
    ]


# ---- kinds of pieces -----------------------------------------------------------------------------


class _Shown(NamedTuple):
    """A piece as it is shown; equal ones are shown once."""

    name: str
    kind: str
    hash: str | None
    reason: str
    ops: list[str]
    """In order."""
    splitting: Iterable[str] = ()
    code: list[str] | None = None
    """One line per op with shape and the user's line; None for a forward that is not traced."""
    inputs: list[str] | None = None
    outputs: list[str] | None = None


def _kinds(plan: Plan) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the kinds of pieces in order of first appearance, and the order of the pieces, folded.

    `kinds` of a stretch are places in the list of kinds.
    """
    alike: dict[tuple[Any, ...], list[_Shown]] = {}
    order: list[int] = []
    for piece in _pieces(plan):
        key = (piece.kind, piece.hash, piece.reason, *piece.ops)
        alike.setdefault(key, []).append(piece)
        order.append(list(alike).index(key))
    kinds = [
        {
            "kind": same[0].kind,
            "hash": same[0].hash,
            "count": len(same),
            "pieces": [piece.name for piece in same],
            "reason": same[0].reason,
            "num_ops": len(same[0].ops),
            "ops": _counted(Counter(same[0].ops).most_common()),
            "splitting": _counted(Counter(same[0].splitting).items()),
            "inputs": same[0].inputs or [],
            "outputs": same[0].outputs or [],
            "code": same[0].code or [],
        }
        for same in alike.values()
    ]
    folded = [
        {"repeat": s.repeat, "kinds": order[s.first : s.first + s.length]} for s in fold(order)
    ]
    return kinds, folded


def _counted(ops: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"op": op, "count": count} for op, count in ops]


def _pieces(plan: Plan) -> Iterator[_Shown]:
    if plan.partition is not None and plan.traced is not None:
        for piece in plan.partition.pieces:
            yield _traced_piece(piece, plan.traced)
        return
    assert plan.probe is not None
    kernels = iter(plan.probe.largest.kernels)
    for info in plan.image.pieces:
        if info.kind == Kind.REGION.value:
            ops = [next(kernels) for _ in range(info.ops)]
            yield _Shown(info.name, info.kind, info.hash, info.reason, ops)
        else:
            ops = _breaks(info.reason)
            yield _Shown(info.name, info.kind, info.hash, info.reason, ops, splitting=ops)


def _breaks(reason: str) -> list[str]:
    """Return the names of the breaks of a boundary, from its reason `name: …; name: …`."""
    return [part.rpartition(": ")[0] for part in reason.split("; ")]


def _traced_piece(piece: Piece, traced: TracedGraph) -> _Shown:
    return _Shown(
        name=piece.name,
        kind=piece.kind.value,
        hash=piece.hash,
        reason=piece.reason,
        ops=[_op(node) for node in piece.nodes],
        splitting=piece.splitting.values(),
        code=[_line(node, traced) for node in piece.nodes],
        inputs=[_shape(node, traced) for node in piece.inputs],
        outputs=[_shape(node, traced) for node in piece.outputs],
    )


def _op(node: torch.fx.Node) -> str:
    return (op_names(node) or [str(node.target)])[0]


def _line(node: torch.fx.Node, traced: TracedGraph) -> str:
    """Return `op -> shape  file:line in function`."""
    path, _, rest = user_line(node).rpartition(":")
    where = f"{Path(path).name}:{rest}" if path else ""
    shape = _shape(node, traced)
    return f"{_op(node)}{f' -> {shape}' if shape else ''}  # {where}"


def _shape(node: torch.fx.Node, traced: TracedGraph) -> str:
    """Return dtype and shape of a value; empty where it is neither tensor nor integer."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        spec = traced.spec_of(node)
        shape = ", ".join(map(str, spec.shape))
        return f"{spec.dtype.removeprefix('torch.')}[{shape}]"
    if isinstance(value, (int, torch.SymInt)):
        return f"int {traced.size_of(value)}"
    return ""


_LONGEST = 16
"""Length of the longest pattern that is looked for: models may alternate between kinds of layer."""


@dataclass(frozen=True)
class Stretch:
    """`length` items from `first` on, `repeat` times in a row."""

    first: int
    length: int
    repeat: int


def fold(keys: Sequence[Hashable]) -> list[Stretch]:
    """Return stretches that cover `keys` in order; what does not repeat is a stretch of its own.

    At each place the pattern is taken that covers most, of equals the shortest.
    """
    found: list[Stretch] = []
    at = 0
    while at < len(keys):
        patterns = [(n, _repeats(keys, at, n)) for n in range(1, _LONGEST + 1)]
        length, repeat = max(patterns, key=lambda p: (p[0] * p[1] if p[1] > 1 else 1, -p[0]))
        if repeat == 1 and found and found[-1].repeat == 1:
            found[-1] = replace(found[-1], length=found[-1].length + 1)
        else:
            found.append(Stretch(at, length, repeat))
        at += length * repeat
    return found


def _repeats(keys: Sequence[Hashable], at: int, length: int) -> int:
    pattern, count = keys[at : at + length], 1
    while keys[at + count * length :][:length] == pattern:
        count += 1
    return count
