"""The pipeline: a config or a module -> a runner, the stages in order.

In: a request. Out: a `Runner` with its report. Each stage is a function of an earlier room; here
results are handed from one to the next.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from pcgsvc.build.environment import BuildEnvironment, build_environment, log_start
from pcgsvc.build.load import ProgramLookup, load_program
from pcgsvc.build.probe import probe_program
from pcgsvc.build.stages import (
    assemble,
    compile_pieces,
    split,
    store_program,
    trace_forward,
    write_down,
)
from pcgsvc.capture.capture import GraphTable, capture
from pcgsvc.capture.plan import plan_capture
from pcgsvc.check.program import check_program
from pcgsvc.check.verify import Verified, verify
from pcgsvc.config import Compiler, Config, Strategy
from pcgsvc.errors import ConfigError, VerifyError
from pcgsvc.events import Progress
from pcgsvc.forward.request import Request, make_samples
from pcgsvc.forward.workspace import preserved
from pcgsvc.models.request import request_of
from pcgsvc.program.model import CompiledModel, allocate
from pcgsvc.program.writes import undeclared_writes_refused
from pcgsvc.report.report import captured_sections, compile_section, program_report
from pcgsvc.serve.runner import Runner

logger = logging.getLogger(__name__)


def build_from_config(
    config: Config, progress: Progress | None = None, *, check: bool | None = None
) -> Runner:
    """Build the configured model, and a runner for it; see `build`."""
    return build(request_of(config, progress), progress, check=check)


def build(
    request: Request, progress: Progress | None = None, *, check: bool | None = None
) -> Runner:
    """Load or make the program, capture, verify; report and runner are made of what is left.

    Args:
        request: what to build.
        progress: listens to long phases.
        check: whether program and entries are compared with the module; None: as
            `capture.self_check` says.
    """
    with build_environment(request, progress) as env:
        found = load_program(request, env)
        checked = request.config.capture.self_check if check is None else check
        model = found.model or make_program(request, found, env, check=checked)
        log_start(model)
        plan = plan_capture(request, model.image)
        warnings = warn_or_raise(request.config, [*plan.warnings, *model.warnings])
        memory = model.memory or allocate(request, model)
        with (
            memory.closed_on_error(),
            undeclared_writes_refused(model, memory.tensors),
            preserved(memory.bound(model.mutated)),
        ):
            table = capture(model, memory, plan, make_samples(request, memory), env.phases)
            env.store_tuned_kernels(model)
            seconds = env.phases.since_start()
            if checked:
                verified = verify(model, memory, table, request, plan, env.phases)
            else:
                verified = Verified(model, table)
            model, table = verified.model, verified.table
            report = {
                **program_report(request, model.image, plan, warnings),
                "compile": compile_section(request, model, table, seconds),
                "cache": env.cache_section(model, found.key),
                **captured_sections(plan, table, memory),
                **verified.section(),
            }
            refuse(request.config, table, verified, report)
    return Runner(request, model, memory, table, plan.resolution, report, env.folder.close)


def make_program(
    request: Request, found: ProgramLookup, env: BuildEnvironment, *, check: bool
) -> CompiledModel:
    """Trace, split, compile, check and store the program; or run a forward that is not traced."""
    config, phases = request.config, env.phases
    if config.partition.strategy is Strategy.BREAKABLE:
        return probe_program(request, found, env)
    with phases.phase("import"):
        env.ready_compilers(inductor=config.compiler.name is Compiler.INDUCTOR)
    traced = trace_forward(request, phases)
    parts = split(traced, config, phases)
    written = write_down(request, traced, parts)
    pieces = compile_pieces(parts.compiled, written.image, config, env)
    model = assemble(request, traced, written.image, pieces, env)
    if check:
        drop = partial(env.artifacts.drop, model.image)
        model = check_program(model, request, parts.compiled, drop, phases)
    return store_program(model, written.problems, found, env)


def compile_only(request: Request, progress: Progress | None = None) -> dict[str, Any]:
    """Run the stages before capture, which fill the cache; return the report of `job=compile`."""
    with build_environment(request, progress) as env:
        found = load_program(request, env)
        check = request.config.capture.self_check
        model = found.model or make_program(request, found, env, check=check)
        log_start(model)
        plan = plan_capture(request, model.image)
        warnings = warn_or_raise(request.config, [*plan.warnings, *model.warnings])
        env.store_tuned_kernels(model)
        env.folder.close()
        return {
            **program_report(request, model.image, plan, warnings),
            "compile": compile_section(request, model, GraphTable(), env.phases.since_start()),
            "cache": env.cache_section(model, found.key),
        }


def warn_or_raise(config: Config, warnings: list[str]) -> list[str]:
    """Log what is not done as asked, and return it; ConfigError under `strict=true`."""
    for warning in warnings:
        logger.warning("%s", warning)
    if config.strict and warnings:
        what = "; ".join(warnings)
        raise ConfigError(f"strict=true, and what was asked for is not done: {what}")
    return warnings


def refuse(config: Config, table: GraphTable, verified: Verified, report: dict[str, Any]) -> None:
    """Raise for entries that are wrong and, under `strict=true`, for those that are not there."""
    if verified.refusal is not None:
        raise VerifyError(verified.refusal, report)
    if config.strict and table.skipped:
        raise ConfigError(f"strict=true, and some sizes were not captured: {table.skipped}")
