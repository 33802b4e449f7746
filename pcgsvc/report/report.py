"""`report.json`, schema 1: what was built, from what, and how long it took.

In: the stages' results. Out: plain dicts of JSON types. Knows nothing of tables or plots.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pcgsvc.config import Mode, to_dict
from pcgsvc.program.pieces import Kind
from pcgsvc.report.files import write_json
from pcgsvc.version import __version__

if TYPE_CHECKING:
    from pcgsvc.capture.capture import GraphTable
    from pcgsvc.forward.workspace import Workspace
    from pcgsvc.pipeline import Built
    from pcgsvc.program.program import Program
    from pcgsvc.sizing.choice import SizePlan

SCHEMA = 1


def _program(program: Program) -> dict[str, Any]:
    return {"num_kernels": program.num_kernels(), "exact_sizes": program.exact_sizes}


def plan_report(built: Built) -> dict[str, Any]:
    """Return the report of the stages before capture."""
    config, image = built.request.config, built.image
    return {
        "schema": SCHEMA,
        "pcgsvc": __version__,
        "torch": torch.__version__,
        "device": _device(built),
        "config": to_dict(config),
        "mode": {
            "requested": built.resolution.requested.value,
            "resolved": built.resolution.resolved.value,
            "decode": built.resolution.decode.value,
            "mixed": built.resolution.mixed.value,
            "reasons": list(built.resolution.reasons),
        },
        "partition": {
            "strategy": config.partition.strategy.value,
            "splitting_ops": [
                {"name": name, "count": count}
                | ({"reason": image.reasons[name]} if name in image.reasons else {})
                for name, count in image.matched.items()
            ],
            "num_boundaries": image.count(Kind.BOUNDARY),
            "num_regions": image.count(Kind.REGION),
            "num_unique_pieces": image.unique_regions,
            "pieces": [asdict(p) for p in image.pieces],
        },
        "compile": {
            "compiler": config.compiler.name.value if config.compiler.name else "eager",
            "start": built.start,
            "num_traces": int(built.start == "cold" and bool(image.documents)),
            "num_compiled": built.tally.compiled,
            "num_loaded": built.tally.loaded,
            **({} if built.program is None else _program(built.program)),
            "seconds": dict(built.seconds),
        },
        "cache": dict(built.cache),
        "guards": {
            "size_conditions": list(image.predicate.conditions),
            "num_recorded": image.num_guards,
            "num_reread": len(image.guards),
        },
        "warnings": list(built.warnings),
        **({} if built.request.sizes is None else {"chosen_sizes": chosen(built.request.sizes)}),
    }


def _device(built: Built) -> str:
    planned = built.request.planned
    if planned is not None and planned.target != built.request.device:
        return f"{planned.target} (planned for; not on this machine)"
    return device_words(built.request.device)


def chosen(plan: SizePlan) -> dict[str, Any]:
    """Return how capture sizes were chosen, without the curve that `job=sizes` writes."""
    tree = plan.as_json()
    return {k: v for k, v in tree.items() if k not in ("curve", "others")}


def build_report(built: Built, table: GraphTable, workspace: Workspace) -> dict[str, Any]:
    """Return the report of a built runner, without verification, timings and dispatch."""
    report = plan_report(built)
    by_mode = {"piecewise": 0, "full": 0}
    for (mode, _), entry in table.entries.items():
        by_mode[mode.value] += entry.num_graphs
    if built.resolution.resolved is Mode.NONE or not table.entries:
        backend = "off"
    else:
        backend = built.request.config.capture.graphs.value
    report["graphs"] = {
        "backend": backend,
        "num_graphs": sum(by_mode.values()),
        "by_mode": {k: v for k, v in by_mode.items() if v},
        "sizes": sorted({k[1].num_tokens for k in table.entries}),
        "skipped": [{"size": s, "reason": r} for s, r in sorted(table.skipped.items())],
        "pool_bytes": table.pool_bytes,
        "device_bytes": table.device_bytes,
    }
    if workspace.geometry is not None:
        cache = workspace.geometry
        report["kv_cache"] = {
            "block_size": cache.block_size,
            "num_blocks": cache.num_blocks,
            "scratch_blocks": cache.scratch_blocks,
            "max_model_len": cache.max_model_len,
        }
    return report


def device_words(device: torch.device) -> str:
    """Return the device as people name it."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report in one step: the file is whole or as it was."""
    write_json(path, report)
