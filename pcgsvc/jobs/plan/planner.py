"""The plan: trace, cut, and count, with nothing compiled, captured or allocated.

In: a config. Out: a `Plan`. Knows nothing of how a plan is shown.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.build.probe import probe_forward
from pcgsvc.build.stages import split, trace_forward
from pcgsvc.capture.plan import CapturePlan, plan_capture, support_of
from pcgsvc.config import Compiler, Config, Graphs, Mode, Strategy
from pcgsvc.config.devices import is_here
from pcgsvc.errors import PcgError
from pcgsvc.events import Phases, Progress
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.plain import words_of
from pcgsvc.forward.process import build_modes
from pcgsvc.forward.request import Planned, Request, attention_of, make_workspace
from pcgsvc.forward.workspace import Workspace
from pcgsvc.jobs.plan.lifetimes import Lifetimes
from pcgsvc.jobs.plan.memory import MemoryEstimate
from pcgsvc.jobs.plan.pool import Event
from pcgsvc.jobs.plan.request import plan_request
from pcgsvc.jobs.plan.tracked import forward_events, shape_context
from pcgsvc.ops.modes import Resolution, resolve_mode
from pcgsvc.ops.registry import find_spec
from pcgsvc.partition.probe import ForwardProbe
from pcgsvc.partition.submodules import chosen
from pcgsvc.pipeline import warn_or_raise
from pcgsvc.program.image import ProgramImage, image_of
from pcgsvc.program.pieces import Kind, Partition
from pcgsvc.report import words
from pcgsvc.trace.graph import TracedGraph

logger = logging.getLogger(__name__)

_LARGEST_GPU_BYTES = 288 << 30
"""Memory of the largest GPUs there are, where a plan's GPU is not on this machine."""


@dataclass(kw_only=True)
class Plan:
    """What a build would do."""

    request: Request
    planned: Planned
    image: ProgramImage
    capture: CapturePlan
    """What would be captured."""
    workspace: Workspace
    memory: MemoryEstimate
    seconds: dict[str, float]
    warnings: list[str]
    ready: dict[str, Any] = field(default_factory=dict)
    """How long it took, in parts; see `events.Phases.ready`."""
    partition: Partition | None = None
    """The cut graph; None for a forward that is not traced."""
    traced: TracedGraph | None = None
    probe: ForwardProbe | None = None
    """What the forward's run showed, where it is not traced."""
    compile_modules: list[str] = field(default_factory=list)
    """`strategy=breakable` with Inductor: the submodules that would be compiled."""

    @property
    def skipped(self) -> dict[int, str]:
        """Sizes that the graph is not valid for, with the reason."""
        return {key[1].num_tokens: reason for key, reason in self.capture.invalid}

    def graphs(self) -> dict[str, dict[str, int]]:
        """Return entries, graphs per entry and graphs by mode."""
        regions = self.image.count(Kind.REGION)
        found: dict[str, dict[str, int]] = {}
        for mode, each in ((Mode.PIECEWISE, regions), (Mode.FULL, 1)):
            count = sum(m is mode for m, _ in self.capture.entries)
            if count:
                found[mode.value] = {"entries": count, "per_entry": each, "graphs": count * each}
        return found

    def num_artifacts(self) -> int:
        """Return how many pieces a cold start would compile."""
        config, image = self.request.config, self.image
        if config.partition.strategy is Strategy.BREAKABLE:
            return len(self.compile_modules)
        return len(image.documents) * (1 + len(config.compiler.specialize_sizes))

    def support(self) -> list[dict[str, str]]:
        """Return how far each splitting op may go into a graph, and who says so."""
        config, rows = self.request.config, []
        for name in self.image.matched:
            level = support_of(name, config, attention_of(self.request))
            rows.append({"op": name, "support": level.name, "said_by": _said_by(name, config)})
        return rows

    def modes(self) -> dict[str, Resolution]:
        """Return what each mode would become, had it been asked for."""
        level, asked = self.capture.support, self.capture.resolution
        found = {
            mode.value: resolve_mode(
                mode,
                level,
                num_boundaries=self.image.count(Kind.BOUNDARY),
                uniform_query_len=self.request.config.capture.uniform_query_len,
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
    phases = Phases(progress, request.weights_s)
    planned = request.planned
    assert planned is not None
    with build_modes(request.device):
        if request.config.partition.strategy is Strategy.BREAKABLE:
            done = _untraced(request, planned, phases)
        else:
            with planned.fake:
                done = _traced(request, planned, phases)
    if (excess := _beyond(done.memory.total, planned.target)) is not None:
        logger.warning("%s", excess)
        done.warnings.append(excess)
    done.ready = phases.ready("plan")
    return done


def _beyond(total: int, device: torch.device) -> str | None:
    """Return that no machine, or not this one, has that many bytes; None: there is one."""
    if device.type != "cuda":
        limit, whose = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has"
    elif is_here(device):
        limit, whose = torch.cuda.get_device_properties(device).total_memory, f"{device} has"
    else:
        limit, whose = _LARGEST_GPU_BYTES, "the largest GPUs have"
    if total <= limit:
        return None
    return (
        f"memory: about {words.memory(total)} are needed, and {whose} {words.memory(limit)}; plan "
        "a smaller model, dtype=bfloat16, fewer capture.sizes, or fewer attention.num_blocks"
    )


# ---- traced --------------------------------------------------------------------------------------


def _traced(request: Request, planned: Planned, phases: Phases) -> Plan:
    config = request.config
    with phases.phase("import"):
        torch_private.import_compilers(inductor=False)
    traced = trace_forward(request, phases)
    parts = split(traced, config, phases)
    image = image_of(traced, parts.compiled, parts.shown, guards=[], files={})
    tensors = {**tensors_of(request.bundle.module), **traced.tensors}
    workspace = make_workspace(request, image.spec.bindings, tensors)
    done = _plan(request, planned, image, workspace, phases)
    done.partition, done.traced = parts.shown, traced
    with phases.phase("count"):
        fused = config.compiler.name is Compiler.INDUCTOR
        recorded = config.capture.graphs is Graphs.RECORDED
        lifetimes = Lifetimes(
            traced,
            parts.shown,
            fused=fused,
            whole=config.partition.strategy is Strategy.INDUCTOR,
            results_only=fused and recorded,
            opaque_ops=recorded,
        )
        done.memory.add_static()
        done.memory.add_bridges(lifetimes)
        done.memory.add_pool(lifetimes.events, fused=fused)
    return done


def _plan(
    request: Request,
    planned: Planned,
    image: ProgramImage,
    workspace: Workspace,
    phases: Phases,
    *warnings: str,
) -> Plan:
    capture = plan_capture(request, image)
    return Plan(
        request=request,
        planned=planned,
        image=image,
        capture=capture,
        workspace=workspace,
        memory=MemoryEstimate(config=request.config, workspace=workspace, entries=capture.entries),
        seconds=phases.seconds,
        warnings=warn_or_raise(
            request.config, [*capture.warnings, *planned.warnings, *warnings], capture.notes
        ),
    )


# ---- not traced ----------------------------------------------------------------------------------


def _untraced(request: Request, planned: Planned, phases: Phases) -> Plan:
    """Plan `strategy=breakable`: the forward is run on tensors without memory, as it is."""
    try:
        with planned.fake:
            return _probed(request, planned, phases)
    except PcgError:
        raise
    except Exception as error:  # noqa: BLE001 - a forward may do anything
        why = f"its forward reads values: {words_of(error)}"
    again = plan_request(request.config, phases.progress, real=why)  # resolved already
    request = replace(again, sizes=request.sizes, warnings=request.warnings)
    assert request.planned is not None
    return _probed(request, request.planned, phases)


def _probed(request: Request, planned: Planned, phases: Phases) -> Plan:
    config, module = request.config, request.bundle.module
    probed = probe_forward(request, phases)
    warnings = probed.probe.warnings
    memory, names = probed.memory, probed.boundaries.names
    done = _plan(request, planned, probed.image, memory, phases, *warnings)
    done.probe = probed.probe
    planned.notes.append(
        "partition.strategy=breakable: nothing is traced. The forward was run once per size on "
        "tensors without memory; what is shown is where that run met its breaks"
    )
    if config.compiler.name is Compiler.INDUCTOR and isinstance(module, torch.nn.Module):
        calls = probed.probe.largest.calls
        done.compile_modules = chosen(module, calls, config.partition.compile_modules)
        done.memory.notes.append("fusion inside compiled submodules is not counted")

    @functools.cache  # of piecewise and full graphs of a size alike
    def events_at(rows: int) -> list[Event]:
        context = shape_context(memory, rows, None)
        events = forward_events(module, memory, request.constants, context, names)
        phases.progress.advance()
        return events

    with phases.phase("count", len(done.capture.sizes)):
        done.memory.add_static()
        done.memory.add_pool(lambda rows, full: events_at(rows), fused=False)
    return done
