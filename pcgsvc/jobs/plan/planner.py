"""The plan: trace, cut, and count, with nothing compiled, captured or allocated.

In: a config. Out: a `Plan`. Knows nothing of how a plan is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.cache.programs import Tally
from pcgsvc.capture.plan import resolve_boundaries, support_of, wanted_entries
from pcgsvc.config import Compiler, Config, Graphs, Mode, Strategy
from pcgsvc.config.devices import dtype_of
from pcgsvc.errors import PcgError
from pcgsvc.events import Progress, phase
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.process import BUILD_LOCK
from pcgsvc.forward.request import Planned, Request, attention_of, make_workspace
from pcgsvc.forward.workspace import Workspace, usable_sizes
from pcgsvc.jobs.plan.lifetimes import Lifetimes
from pcgsvc.jobs.plan.memory import Key, MemoryEstimate, bridge_memory, graph_memory, static_memory
from pcgsvc.jobs.plan.pool import Event
from pcgsvc.jobs.plan.request import plan_request
from pcgsvc.jobs.plan.tracked import forward_events, shape_context
from pcgsvc.ops.modes import Resolution, resolve_mode
from pcgsvc.ops.registry import find_spec
from pcgsvc.partition.breakable import Learned
from pcgsvc.partition.inductor import partition_inductor
from pcgsvc.partition.submodules import chosen
from pcgsvc.pipeline import Built, tell
from pcgsvc.program.image import ProgramImage, image_of
from pcgsvc.program.pieces import Kind, Partition
from pcgsvc.stages import learn_forward, trace_and_split
from pcgsvc.trace.graph import TracedGraph

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Plan:
    """What a build would do."""

    built: Built
    planned: Planned
    memory: MemoryEstimate
    entries: list[Key]
    """What would be captured, in order."""
    skipped: dict[int, str]
    """Sizes that the graph is not valid for, with the reason."""
    partition: Partition | None
    """The cut graph; None for a forward that is not traced."""
    traced: TracedGraph | None
    learned: Learned | None
    """What the forward's run showed, where it is not traced."""
    compile_modules: list[str] = field(default_factory=list)
    """`strategy=breakable` with Inductor: the submodules that would be compiled."""

    def graphs(self) -> dict[str, dict[str, int]]:
        """Return entries, graphs per entry and graphs by mode."""
        regions = self.built.image.count(Kind.REGION)
        found: dict[str, dict[str, int]] = {}
        for mode, each in ((Mode.PIECEWISE, regions), (Mode.FULL, 1)):
            count = sum(m is mode for m, _ in self.entries)
            if count:
                found[mode.value] = {"entries": count, "per_entry": each, "graphs": count * each}
        return found

    def num_artifacts(self) -> int:
        """Return how many pieces a cold start would compile."""
        config, image = self.built.request.config, self.built.image
        if config.partition.strategy is Strategy.BREAKABLE:
            return len(self.compile_modules)
        return len(image.documents) * (1 + len(config.compiler.specialize_sizes))

    def support(self) -> list[dict[str, str]]:
        """Return how far each splitting op may go into a graph, and who says so."""
        config, rows = self.built.request.config, []
        for name in self.built.image.matched:
            level = support_of(name, config, self.built.attention)
            rows.append({"op": name, "support": level.name, "said_by": _said_by(name, config)})
        return rows

    def modes(self) -> dict[str, Resolution]:
        """Return what each mode would become, had it been asked for."""
        level, asked = self.built.support, self.built.resolution
        found = {
            mode.value: resolve_mode(
                mode,
                level,
                num_boundaries=self.built.image.count(Kind.BOUNDARY),
                uniform_query_len=self.built.request.config.capture.uniform_query_len,
                why="the graph",
            )
            for mode in Mode
        }
        return {**found, asked.requested.value: asked}


def _said_by(name: str, config: Config) -> str:
    op = find_spec(name)
    if op is None:
        return "nobody registered it, so it stays outside"
    return "its declaration" if op.support is not None else f"attention={config.attention.name}"


def plan(config: Config, progress: Progress) -> Plan:
    """Trace or run the model without memory, cut it, and count.

    Raises:
        ConfigError, TraceError, SplitError: as a build of this config would.
    """
    request = plan_request(config, progress)
    planned = request.planned
    assert planned is not None
    with (
        BUILD_LOCK,
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(request.device.type, enabled=False),
    ):
        if request.config.partition.strategy is Strategy.BREAKABLE:
            return _untraced(request, planned, progress)
        with planned.fake:
            return _traced(request, planned, progress)


def _seconds(request: Request) -> dict[str, float]:
    names = ("import", "weights", "trace", "split", "compile", "load", "warmup", "capture", "total")
    return {**dict.fromkeys(names, 0.0), "weights": request.weights_s}


# ---- traced --------------------------------------------------------------------------------------


def _traced(request: Request, planned: Planned, progress: Progress) -> Plan:
    config, seconds = request.config, _seconds(request)
    traced, partition = trace_and_split(request, seconds, progress, ready=_ready)
    whole = config.partition.strategy is Strategy.INDUCTOR
    compiled = partition_inductor(traced, partition) if whole else partition
    image = image_of(traced, compiled, partition, guards=[], files={})
    tensors = {**tensors_of(request.bundle.module), **traced.tensors}
    workspace = make_workspace(request, image.spec.bindings, tensors)
    built = _built(request, planned, image, seconds, workspace, [])
    done = Plan(
        built=built,
        planned=planned,
        memory=MemoryEstimate(),
        entries=[],
        skipped={},
        partition=partition,
        traced=traced,
        learned=None,
    )
    with phase("count", {"count": 0.0}, progress):
        _count_entries(done)
        fused = config.compiler.name is Compiler.INDUCTOR
        recorded = config.capture.graphs is Graphs.RECORDED
        lifetimes = Lifetimes(
            traced,
            partition,
            fused=fused,
            whole=whole,
            results_only=fused and recorded,
            opaque_ops=recorded,
        )
        static_memory(done.memory, workspace)
        bridge_memory(done.memory, lifetimes, done.entries)

        def events_of(rows: int, full: bool) -> Iterable[Event]:
            return lifetimes.events(rows, full=full)

        like = _like(config, workspace)
        graph_memory(done.memory, config, workspace, done.entries, events_of, like, fused)
    return done


def _ready() -> None:
    torch_private.import_compilers(inductor=False)


def _like(config: Config, workspace: Workspace) -> torch.Tensor:
    return torch.empty(0, dtype=dtype_of(config), device=workspace.device)


def _count_entries(done: Plan) -> None:
    built, config = done.built, done.built.request.config
    if config.capture.graphs is Graphs.OFF:
        return
    wanted = wanted_entries(
        built.resolution, built.support, built.sizes, config.capture.uniform_query_len
    )
    for key in wanted:
        broken = built.image.predicate.broken_by(key[1].num_tokens)
        if broken is None:
            done.entries.append(key)
        else:
            done.skipped[key[1].num_tokens] = f"the traced graph is not valid for it: {broken}"


def _built(
    request: Request,
    planned: Planned,
    image: ProgramImage,
    seconds: dict[str, float],
    workspace: Workspace,
    warnings: Sequence[str],
) -> Built:
    config = request.config
    sizes, dropped = usable_sizes(config)
    attention = attention_of(request)
    resolution, support = resolve_boundaries(config, image, attention)
    cache: dict[str, Any] = {"mode": config.cache.mode.value, "dir": None, "program_key": None}
    cache |= {"hits": 0, "misses": 0, "miss_reasons": [], "bytes": 0}
    built = Built(
        request=request,
        image=image,
        program=None,
        resolution=resolution,
        support=support,
        attention=attention,
        sizes=sizes,
        start="cold",
        tally=Tally(),
        cache=cache,
        finish=lambda: None,
        seconds=seconds,
        warnings=[*resolution.reasons, *dropped, *planned.warnings, *warnings],
        workspace=workspace,
    )
    tell(built)
    return built


# ---- not traced ----------------------------------------------------------------------------------


def _untraced(request: Request, planned: Planned, progress: Progress) -> Plan:
    """Plan `strategy=breakable`: the forward is run on tensors without memory, as it is."""
    try:
        with planned.fake:
            return _learned(request, planned, progress)
    except PcgError:
        raise
    except Exception as error:  # noqa: BLE001 - a forward may do anything
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"its forward reads values: {type(error).__name__}: {first}"
    request = plan_request(request.config, progress, real=why)
    assert request.planned is not None
    return _learned(request, request.planned, progress)


def _learned(request: Request, planned: Planned, progress: Progress) -> Plan:
    config, seconds = request.config, _seconds(request)
    learned, workspace, boundaries = learn_forward(request, seconds, progress)
    built = _built(request, planned, learned.image, seconds, workspace, learned.warnings)
    done = Plan(
        built=built,
        planned=planned,
        memory=MemoryEstimate(),
        entries=[],
        skipped={},
        partition=None,
        traced=None,
        learned=learned,
    )
    planned.notes.append(
        "partition.strategy=breakable: nothing is traced. The forward was run once per size on "
        "tensors without memory; what is shown is where that run met its breaks"
    )
    module = request.bundle.module
    if config.compiler.name is Compiler.INDUCTOR and isinstance(module, torch.nn.Module):
        done.compile_modules = chosen(module, learned.one, config.partition.compile_modules)
        done.memory.notes.append("fusion inside compiled submodules is not counted")
    with phase("count", {"count": 0.0}, progress, total=len(built.sizes)):
        _count_entries(done)
        static_memory(done.memory, workspace)
        seen: dict[int, list[Event]] = {}

        def events_of(rows: int, full: bool) -> Iterable[Event]:
            if rows not in seen:
                context = shape_context(workspace, rows, None)
                seen[rows] = forward_events(
                    module, workspace, request.constants, context, boundaries.names
                )
                progress.advance()
            return seen[rows]

        like = _like(config, workspace)
        graph_memory(done.memory, config, workspace, done.entries, events_of, like, fused=False)
    return done


__all__ = ["Plan", "plan"]
