"""The `plan` of `report.json`.

In: a `Plan`. Out: plain dicts of JSON types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.jobs.plan.collectives import collectives_of
from pcgsvc.jobs.plan.memory import as_json
from pcgsvc.jobs.plan.planner import Plan
from pcgsvc.program.pieces import Kind, Piece
from pcgsvc.report.fold import fold
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
    kinds = list(_kinds(plan))
    graphs = plan.graphs()
    return {
        "device": str(plan.planned.target),
        "traced_on": str(plan.request.device),
        "weights_in_memory": _has_weights(plan),
        "graphs": {
            "num_graphs": sum(g["graphs"] for g in graphs.values()),
            "by_mode": graphs,
            "sizes": sorted({d.num_tokens for _, d in plan.entries}),
            "skipped": [{"size": s, "reason": r} for s, r in sorted(plan.skipped.items())],
        },
        "support": [{**row, "meaning": _MEANING[row["support"]]} for row in plan.support()],
        "mode": _mode_words(plan),
        "modes": {
            asked: {"resolved": r.resolved.value, "reasons": list(r.reasons)}
            for asked, r in plan.modes().items()
        },
        "kinds": [kind.as_json() for kind in _gathered(kinds)],
        "sequence": _sequence(kinds),
        "num_artifacts": plan.num_artifacts(),
        "compile_modules": list(plan.compile_modules),
        "collectives": _collectives(plan),
        "memory": as_json(plan.memory),
        "notes": list(plan.planned.notes),
    }


def _collectives(plan: Plan) -> list[dict[str, Any]]:
    sizes = plan.request.config.capture.final_sizes
    return [] if plan.traced is None else collectives_of(plan.traced, sizes)


def _has_weights(plan: Plan) -> bool:
    return any(map(torch_private.has_memory, plan.workspace.tensors.values()))


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


# ---- kinds of pieces -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Kind:
    """A piece; equal ones are shown once."""

    kind: str
    hash: str | None
    reason: str
    ops: list[str]
    """In order."""
    splitting: dict[str, int]
    names: list[str]
    """Of all pieces like it."""
    code: list[str] = field(default_factory=list)
    """One line per op with shape and the user's line; empty for a forward that is not traced."""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.hash, self.reason, tuple(self.ops))

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "hash": self.hash,
            "count": len(self.names),
            "pieces": self.names,
            "reason": self.reason,
            "num_ops": len(self.ops),
            "ops": _counted(dict(Counter(self.ops).most_common())),
            "splitting": _counted(self.splitting),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "code": self.code,
        }


def _counted(ops: dict[str, int]) -> list[dict[str, Any]]:
    return [{"op": op, "count": count} for op, count in ops.items()]


def _gathered(kinds: list[_Kind]) -> list[_Kind]:
    """Return one of each kind in order of first appearance, with the names of all like it."""
    found: dict[tuple[Any, ...], _Kind] = {}
    for kind in kinds:
        first = found.setdefault(kind.key, kind)
        if first is not kind:
            first.names += kind.names
    return list(found.values())


def _sequence(kinds: list[_Kind]) -> list[dict[str, Any]]:
    """Return the order of the pieces, folded: `kinds` are places in the list of kinds."""
    places: dict[tuple[Any, ...], int] = {}
    numbers = [places.setdefault(kind.key, len(places)) for kind in kinds]
    return [
        {"repeat": s.repeat, "kinds": numbers[s.first : s.first + s.length]} for s in fold(numbers)
    ]


def _kinds(plan: Plan) -> Iterator[_Kind]:
    if plan.partition is not None and plan.traced is not None:
        for piece in plan.partition.pieces:
            yield _traced_kind(piece, plan.traced)
        return
    assert plan.probe is not None
    kernels = iter(plan.probe.largest.kernels)
    for info in plan.image.pieces:
        region = info.kind == Kind.REGION.value
        ops = [next(kernels) for _ in range(info.ops)] if region else _breaks(info.reason)
        yield _Kind(
            kind=info.kind,
            hash=info.hash,
            reason=info.reason,
            ops=ops,
            splitting={} if region else dict(Counter(ops)),
            names=[info.name],
        )


def _breaks(reason: str) -> list[str]:
    """Return the names of the breaks of a boundary, from its reason `name: …; name: …`."""
    return [part.rpartition(": ")[0] for part in reason.split("; ")]


def _traced_kind(piece: Piece, traced: TracedGraph) -> _Kind:
    return _Kind(
        kind=piece.kind.value,
        hash=piece.hash,
        reason=piece.reason,
        ops=[_op(node) for node in piece.nodes],
        splitting=dict(Counter(piece.splitting.values())),
        names=[piece.name],
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
