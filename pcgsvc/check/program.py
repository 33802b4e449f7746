"""The compiled program against the module, at a cold build and before anything is captured.

In: a compiled model, and its regions as FX graphs. Out: the model, with regions
that the compiler got wrong run uncompiled where that is asked for. Padding, graphs and replays are
`verify`'s; what is loaded from the store was compared when it was stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from pcgsvc.check.causes import (
    BAKED_IN,
    draws_random,
    program_differs,
    random_ops,
    unsteady,
)
from pcgsvc.check.pieces import wrong_regions
from pcgsvc.check.trial import Step, Trial
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.config import Compiler, Config, OnMismatch
from pcgsvc.errors import PcgError, VerifyError
from pcgsvc.events import Phases
from pcgsvc.forward.request import Request
from pcgsvc.ops.expert_group import uses_group
from pcgsvc.program.model import CompiledModel, allocate
from pcgsvc.program.pieces import Partition
from pcgsvc.program.writes import undeclared_writes_refused

logger = logging.getLogger(__name__)

Drop = Callable[[Iterable[str]], None]


def check_program(
    model: CompiledModel, request: Request, partition: Partition, drop: Drop, phases: Phases
) -> CompiledModel:
    """Compare a program with its module, and find out what is wrong where they differ.

    Both run on the same rows, at the smallest and the largest size above one row, and at every
    size that has regions of its own. A difference at other sizes alone is not seen, nor one below
    `TOLERANCE`.

    Args:
        model: compiled, not captured.
        request: what is built.
        partition: the regions that were compiled, with their FX nodes.
        phases: `check` is timed.
        drop: forgets regions by hash where they are stored, since they are wrong.

    Returns:
        The model; under `compiler.on_mismatch=eager` its image names the regions that are wrong,
        which run uncompiled, here and wherever the image is loaded.

    Raises:
        VerifyError: program and module differ. The message names region, op and line if the
            compiler is wrong, else the cause.
    """
    memory = allocate(request, model)
    try:
        with (
            undeclared_writes_refused(model, memory.tensors),
            torch.no_grad(),
            phases.phase("check"),
        ):
            return _checked(model, Trial.of(model, memory, request), partition, drop)
    finally:
        memory.close()


def _checked(model: CompiledModel, trial: Trial, partition: Partition, drop: Drop) -> CompiledModel:
    for rows in _sizes(trial.config, model):
        step = trial.step(rows)
        while (found := _difference(trial, step)) is not None:
            if trial.config.compiler.name is Compiler.INDUCTOR and random_ops(model.image):
                why = draws_random(model.image)
                warning = f"the compiled program was not compared with the module: {why}"
                return replace(trial.model, warnings=[*trial.model.warnings, warning])
            error, tolerance = found
            differs = (
                f"the program differs from plain execution at {rows} rows, without graphs: "
                f"{error:.3g} (tolerance {tolerance:.3g})"
            )
            trial = replace(trial, model=_mended(trial, step, partition, drop, differs))
    return trial.model


def _difference(trial: Trial, step: Step) -> tuple[float, float] | None:
    """Return error and tolerance of a program that differs, or None.

    A row count that the module itself raises for (a table that is too short) is for capture, which
    skips it by name.

    Raises:
        VerifyError: the program raises and the module does not.
    """
    try:
        return program_differs(trial, step)
    except PcgError:
        raise
    except Exception as error:
        try:
            trial.plain(step)
        except Exception as same:  # noqa: BLE001 - the user's code
            logger.debug("check: %d rows are not compared: the forward raises %r", step.rows, same)
            return None
        raise VerifyError(
            f"the program raises at {step.rows} rows, without graphs, and the module does not: "
            f"{type(error).__name__}: {error}"
        ) from error


def _sizes(config: Config, model: CompiledModel) -> list[int]:
    """Return the row counts at which a program is compared.

    One row is `verify`'s, since Dynamo takes a symbolic size for at least 2.
    """
    captured = [size for size in config.capture.final_sizes if size > 1] or [2]
    sizes = sorted({captured[0], captured[-1], *model.program.exact_sizes} - {1})
    return [size for size in sizes if model.predicate.broken_by(size) is None]


def _mended(
    trial: Trial, step: Step, partition: Partition, drop: Drop, differs: str
) -> CompiledModel:
    """Return the model with the regions that are wrong uncompiled; VerifyError if it cannot be."""
    model, compiler = trial.model, trial.config.compiler
    if uses_group(trial.config):  # other processes take no part in experiments
        raise VerifyError(f"{differs}.")
    if (cause := unsteady(trial, step)) is not None:
        raise VerifyError(f"{differs}: {cause}")
    inductor = compiler.name is Compiler.INDUCTOR
    wrong = wrong_regions(trial, step, partition) if inductor else {}
    if not wrong:
        raise VerifyError(f"{differs}: {BAKED_IN}")
    drop(wrong)
    found = f"the compiler gets {len(wrong)} region(s) wrong: {'; '.join(wrong.values())}"
    if compiler.on_mismatch is OnMismatch.ERROR:
        raise VerifyError(
            f"{differs}: {found}. compiler.on_mismatch=eager runs just these uncompiled, "
            "compiler=eager all."
        )
    if any(model.program.pieces[name].boundaries is not None for name in wrong):
        raise VerifyError(
            f"{differs}: {found}. With partition.strategy=inductor there is one region, which "
            "breaks itself and cannot run uncompiled; use partition.strategy=fx."
        )
    image = replace(model.image, uncompiled={**model.image.uncompiled, **wrong})
    eager = {name: EagerPiece(image.documents[name]) for name in wrong}
    return replace(model, image=image, program=model.program.replacing(eager))
