"""`report.json`, schema 1: what was built, from what, and how long it took.

In: the stages' results. Out: plain dicts of JSON types. Knows nothing of tables or plots.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pcgsvc.build.environment import BuildEnvironment
from pcgsvc.build.load import ProgramLookup
from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.plan import CapturePlan, plan_capture
from pcgsvc.capture.stitch import Joined
from pcgsvc.config import Config, Mode, to_dict
from pcgsvc.forward.request import Request
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.modes import Resolution
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.pieces import Kind
from pcgsvc.report.files import write_json
from pcgsvc.sizing.choice import SizePlan
from pcgsvc.version import __version__

SCHEMA = 1


def program_report(
    request: Request, image: ProgramImage, plan: CapturePlan, warnings: list[str]
) -> dict[str, Any]:
    """Return what a build's report begins with: mode, partition, guards, warnings."""
    ranks, parallel = request.config.parallel.tensor, request.bundle.parallel
    return {
        **report_head(request.config, request.device, _device(request)),
        "mode": _mode_section(plan.resolution),
        "partition": _partition_section(request.config.partition.strategy.value, image),
        "guards": {
            "size_conditions": list(image.general.conditions),
            "num_recorded": image.num_guards,
            "num_reread": len(image.guards),
        },
        "warnings": list(warnings),
        **({} if request.sizes is None else {"chosen_sizes": chosen(request.sizes)}),
        **({"parallel": {"ranks": ranks, **parallel}} if parallel else {}),
    }


def report_head(config: Config, device: torch.device, words: str | None = None) -> dict[str, Any]:
    """Return what every report begins with: versions, machine and device, the config.

    `words`: what people call the device; None: its name.
    """
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    uuid = torch.cuda.get_device_properties(device).uuid if has_gpu else None
    return {
        "schema": SCHEMA,
        "pcgsvc": __version__,
        "torch": torch.__version__,
        "host": {"name": socket.gethostname(), "gpu": f"GPU-{uuid}" if has_gpu else None},
        "device": words or str(device),
        "config": to_dict(config),
    }


def compile_report(
    request: Request, model: CompiledModel, found: ProgramLookup, env: BuildEnvironment
) -> dict[str, Any]:
    """Return the report of what there is before anything is captured: `job=compile`'s."""
    plan = plan_capture(request, model.image)
    return {
        **program_report(request, model.image, plan, [*plan.warnings, *model.warnings]),
        "compile": compile_section(request, model, GraphTable(), env.phases.since_start()),
        "cache": env.cache_section(model, found.key),
    }


def _mode_section(resolution: Resolution) -> dict[str, Any]:
    return {
        "requested": resolution.requested.value,
        "resolved": resolution.resolved.value,
        "decode": resolution.decode.value,
        "mixed": resolution.mixed.value,
        "reasons": list(resolution.reasons),
    }


def _partition_section(strategy: str, image: ProgramImage) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "splitting_ops": [
            {"name": name, "count": count}
            | ({"reason": image.reasons[name]} if name in image.reasons else {})
            for name, count in image.matched.items()
        ],
        "num_boundaries": image.count(Kind.BOUNDARY),
        "num_regions": image.count(Kind.REGION),
        "num_unique_pieces": image.unique_regions,
        "pieces": [asdict(p) for p in image.pieces],
    }


def compile_section(
    request: Request, model: CompiledModel, table: GraphTable, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return the report's `compile`.

    Args:
        request: what was built.
        model: how its pieces came about.
        table: its seconds of warm-up and capture are given apart; empty where nothing was captured.
        seconds: of the phases.
    """
    times = {"warmup": table.warmup_seconds, "capture": table.capture_seconds}
    exact = model.program.exact_sizes
    return {
        "compiler": compiler_of(request),
        "start": model.start,
        "num_traces": int(model.start == "cold" and bool(model.image.documents)),
        "num_compiled": model.counts.compiled,
        "num_loaded": model.counts.loaded,
        "num_kernels": model.program.num_kernels(),
        "exact_sizes": exact,
        "exact_reasons": [
            {"size": size, "reason": f"code for all sizes needs {broken}"}
            for size in exact
            if (broken := model.image.general.broken_by(size)) is not None
        ],
        "uncompiled": list(model.image.uncompiled.values()),
        "seconds": {**seconds, **times},
    }


def captured_sections(plan: CapturePlan, table: GraphTable, memory: Workspace) -> dict[str, Any]:
    """Return the report's `graphs` and `kv_cache`: what is there to serve calls."""
    by_mode = {"piecewise": 0, "full": 0}
    for (mode, _), entry in table.entries.items():
        by_mode[mode.value] += entry.num_graphs
    is_off = plan.resolution.resolved is Mode.NONE or not table.entries
    graphs = {
        "backend": "off" if is_off else plan.config.capture.graphs.value,
        "num_graphs": table.num_graphs,
        "by_mode": {k: v for k, v in by_mode.items() if v},
        "sizes": table.sizes,
        "skipped": [{"size": s, "reason": r} for s, r in sorted(table.skipped.items())],
        "pool_bytes": table.pool_bytes,
        "device_bytes": table.device_bytes,
        "device_parts": table.device_parts,
        "returned_bytes": table.returned_bytes,
        "replay": [
            {"size": key[1].num_tokens, **_replay_row(entry.joined)}
            for key, entry in table.entries.items()
            if entry.joined is not None
        ],
    }
    if memory.geometry is None:
        return {"graphs": graphs}
    return {"graphs": graphs, "kv_cache": asdict(memory.geometry)}


def _replay_row(joined: Joined) -> dict[str, Any]:
    """Return how a piecewise entry is replayed, and why."""
    compared = joined.comparison
    return {
        "replay": "stitched" if joined.stitched else "pieces",
        **({"launches": len(joined.steps)} if joined.stitched else {}),
        **({} if joined.missing is None else {"reason": joined.missing}),
        **({} if compared is None else {k: round(v, 1) for k, v in asdict(compared).items()}),
    }


def compiler_of(request: Request) -> str:
    """Return the compiler's word."""
    name = request.config.compiler.name
    return "eager" if name is None else name.value


def _device(request: Request) -> str:
    """Return the device as people name it."""
    planned = request.planned
    if planned is not None and planned.target != request.device:
        return f"{planned.target} (planned for; not on this machine)"
    if request.device.type == "cuda":
        return f"{request.device} ({torch.cuda.get_device_name(request.device)})"
    return str(request.device)


def chosen(plan: SizePlan) -> dict[str, Any]:
    """Return how capture sizes were chosen, without the curve that `job=sizes` writes."""
    tree = plan.as_json()
    return {k: v for k, v in tree.items() if k not in ("curve", "others")}


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report in one step: the file is whole or as it was."""
    write_json(path, report)
