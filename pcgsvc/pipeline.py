"""The pipeline: a config or a module -> a runner, the stages in order.

In: a request. Out: a `Runner` with its report. Each stage is a function of an earlier room; here
results are handed from one to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pcgsvc.build.environment import BuildEnvironment, build_environment, log_start, working_memory
from pcgsvc.build.heal import healed, wrong_program_dropped
from pcgsvc.build.load import ProgramLookup, load_program
from pcgsvc.build.make import make_program
from pcgsvc.build.stages import MadeProgram, store_program
from pcgsvc.capture.capture import GraphTable, capture
from pcgsvc.capture.plan import plan_capture
from pcgsvc.check.program import check_program
from pcgsvc.check.verify import Verified, verify
from pcgsvc.config import Config
from pcgsvc.errors import ConfigError, VerifyError
from pcgsvc.events import Phases, Progress
from pcgsvc.forward.request import Request, make_samples
from pcgsvc.forward.workspace import Workspace
from pcgsvc.models.request import request_of
from pcgsvc.report.report import captured_sections, compile_report, compile_section
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
    """Build a runner; cold, if a stored program turns out wrong.

    Args:
        request: what to build.
        progress: listens to long phases.
        check: whether program and entries are compared with the module; None: as
            `capture.self_check` says.
    """
    check = request.config.capture.self_check if check is None else check
    return healed(partial(_build, request, Phases(progress, request.weights_s), check))


def _build(request: Request, phases: Phases, check: bool, wrong: str | None) -> Runner:
    """Load or make the program, capture, verify; report and runner are made of what is left."""
    with build_environment(request, phases, wrong) as env:
        found = load_program(request, env)
        made = make_program(request, found, env)
        with (
            wrong_program_dropped(made.model, request, env),
            working_memory(request, made.model) as memory,
        ):
            if check:
                made = checked(made, memory, request, found, env)
            model = store_program(made, found, env)
            log_start(model)
            plan = plan_capture(request, model.image)
            warn_or_raise(request.config, [*plan.warnings, *model.warnings], plan.notes)
            table = capture(model, memory, plan, make_samples(request, memory), phases)
            env.store_tuned_kernels(model)
            seconds = phases.since_start()
            if check:
                verified = verify(model, memory, table, request, plan, phases)
            else:
                verified = Verified(model, table)
            model, table = verified.model, verified.table
            report = {
                **compile_report(request, model, found, env),
                "compile": compile_section(request, model, table, seconds),
                **captured_sections(plan, table, memory),
                **verified.section(),
            }
            refuse(request.config, table, verified, report)
            report["ready"] = phases.ready(model.start)
    return Runner(request, model, memory, table, plan.resolution, report, env.close)


def checked(
    made: MadeProgram,
    memory: Workspace,
    request: Request,
    found: ProgramLookup,
    env: BuildEnvironment,
) -> MadeProgram:
    """Compare a program with its module; a VerifyError has the report of what was made."""
    try:
        return replace(made, model=check_program(made, memory, request, env))
    except VerifyError as error:
        error.report = compile_report(request, made.model, found, env)
        raise


def compile_only(request: Request, progress: Progress | None = None) -> dict[str, Any]:
    """Run the stages before capture, which fill the cache; return the report of `job=compile`."""
    return healed(partial(_compile, request, Phases(progress, request.weights_s)))


def _compile(request: Request, phases: Phases, wrong: str | None) -> dict[str, Any]:
    with build_environment(request, phases, wrong) as env:
        found = load_program(request, env)
        made = make_program(request, found, env)
        if request.config.capture.self_check:
            with (
                wrong_program_dropped(made.model, request, env),
                working_memory(request, made.model) as memory,
            ):
                made = checked(made, memory, request, found, env)
            memory.close()
        model = store_program(made, found, env)
        log_start(model)
        plan = plan_capture(request, model.image)
        warn_or_raise(request.config, [*plan.warnings, *model.warnings], plan.notes)
        env.store_tuned_kernels(model)
        env.close()
        report = compile_report(request, model, found, env)
        return {**report, "ready": phases.ready(model.start)}


def warn_or_raise(config: Config, warnings: list[str], notes: Sequence[str] = ()) -> list[str]:
    """Log notes, and what is not done as asked; return that, ConfigError under `strict=true`."""
    for note in notes:
        logger.info("%s", note)
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
