"""The compiled program against the module, before anything is captured.

In: a program that was made or loaded. Out: the model, with regions that the compiler got wrong run
uncompiled where that is asked for. Padding, graphs and replays are `verify`'s. What plain execution
packs by a mask is refused (the nested tensors of `nn.TransformerEncoder`), as far as one run shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.build.environment import BuildEnvironment
from pcgsvc.build.stages import MadeProgram
from pcgsvc.capture.plan import plan_capture
from pcgsvc.check.causes import (
    BAKED_IN,
    RefusedRowsError,
    aliasing,
    draws,
    draws_random,
    program_differs,
    random_ops,
    unsteady,
)
from pcgsvc.check.pieces import wrong_regions
from pcgsvc.check.trial import Step, Trial
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.config import Compiler, Config, OnMismatch, Strategy
from pcgsvc.errors import TraceError, VerifyError
from pcgsvc.forward.request import Request
from pcgsvc.forward.workspace import Workspace
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.pieces import Partition

Drop = Callable[[Collection[str]], None]


def check_program(
    made: MadeProgram, memory: Workspace, request: Request, env: BuildEnvironment
) -> CompiledModel:
    """Compare a program with its module, and find out what is wrong where they differ.

    Both run on the same rows, at the smallest and the largest size above one row, and at every
    size that has regions of its own. A difference at other sizes alone is not seen, nor one below
    `TOLERANCE`.

    Args:
        made: compiled or loaded, not captured. What was loaded has no FX graphs, so that nothing is
            found out about it but that it differs.
        memory: what it runs in.
        request: what is built.
        env: `check` is timed; regions that are wrong are dropped from the store.

    Returns:
        The model; under `compiler.on_mismatch=eager` its image names the regions that are wrong,
        which run uncompiled, here and wherever the image is loaded. Its warnings name what was not
        compared.

    Raises:
        TraceError: see `refuse_packed_rows`.
        VerifyError: program and module differ. The message names region, op and line if the
            compiler is wrong, else the cause.
    """
    if env.fast_paths:
        refuse_packed_rows(Trial.of(made.model, memory, request))
    if request.config.partition.strategy is Strategy.BREAKABLE:  # it is the module
        return made.model
    drop = partial(env.artifacts.drop, made.model.image)
    with torch.no_grad(), env.phases.phase("check"):
        model, refused = _checked(Trial.of(made.model, memory, request), made.regions, drop)
    captured = {key[1].num_tokens for key in plan_capture(request, model.image).entries}
    warnings = [  # capture names what it skips
        f"the program was not compared with the module at {rows} rows: the forward raises {error}"
        for rows, error in refused.items()
        if rows not in captured
    ]
    return replace(model, warnings=[*model.warnings, *warnings])


def _checked(
    trial: Trial, regions: Partition | None, drop: Drop
) -> tuple[CompiledModel, dict[int, str]]:
    """Return the model, mended, and the row counts that the module itself refuses."""
    refused: dict[int, str] = {}
    for rows in _sizes(trial.config, trial.model):
        step = trial.step(rows)
        try:
            while (found := program_differs(trial, step)) is not None:
                model = trial.model
                inductor = trial.config.compiler.name is Compiler.INDUCTOR
                if inductor and random_ops(model.image) and draws(trial, step):
                    why = draws_random(model.image)
                    warning = f"the compiled program was not compared with the module: {why}"
                    return replace(model, warnings=[*model.warnings, warning]), refused
                error, tolerance = found
                differs = (
                    f"the program differs from plain execution at {rows} rows, without graphs: "
                    f"{error:.3g} (tolerance {tolerance:.3g})"
                )
                trial = replace(trial, model=_mended(trial, step, regions, drop, differs))
        except RefusedRowsError as error:
            refused[rows] = str(error)
    return trial.model, refused


def _sizes(config: Config, model: CompiledModel) -> list[int]:
    """Return the row counts at which a program is compared.

    One row is `verify`'s, since Dynamo takes a symbolic size for at least 2.
    """
    captured = [size for size in config.capture.final_sizes if size > 1] or [2]
    sizes = sorted({captured[0], captured[-1], *model.program.exact_sizes} - {1})
    return [size for size in sizes if model.refuses(size) is None]


def _mended(
    trial: Trial, step: Step, regions: Partition | None, drop: Drop, differs: str
) -> CompiledModel:
    """Return the model with the regions that are wrong uncompiled; VerifyError if it cannot be."""
    model, compiler = trial.model, trial.config.compiler
    # Other processes take no part in experiments.
    if regions is None or trial.model.ranks.many:
        raise VerifyError(f"{differs}.")
    if (cause := unsteady(trial, step)) is not None:
        raise VerifyError(f"{differs}: {cause}")
    inductor = compiler.name is Compiler.INDUCTOR
    wrong = wrong_regions(trial, step, regions) if inductor else {}
    if not wrong:
        raise VerifyError(f"{differs}: {BAKED_IN}")
    drop(wrong)
    found = f"the compiler gets {len(wrong)} region(s) wrong: {'; '.join(wrong.values())}"
    found += aliasing(trial, step)
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


def refuse_packed_rows(trial: Trial) -> None:
    """Raise TraceError if torch's fast path drops masked positions, which no trace does.

    Plain execution then gives zeros at those positions where every mask ends in them, and what
    attention gives where one does not: a branch on values, which a build's self-check would meet
    by chance only.
    """
    module: Any = trial.model.module
    names = [
        name
        for name, sub in (module.named_modules() if isinstance(module, torch.nn.Module) else ())
        if isinstance(sub, torch.nn.TransformerEncoder) and sub.use_nested_tensor
    ]
    if not names:
        return
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with _Packing():
            trial.plain(trial.step(next((n for n in trial.config.capture.final_sizes if n > 1), 1)))
    except _PackedError:
        raise TraceError(
            f"nn.TransformerEncoder {names}: plain execution packs rows by src_key_padding_mask "
            "(torch's fast path) and leaves zeros at masked positions, if the values of the mask "
            "allow it; a graph cannot. Make it with enable_nested_tensor=False, which gives the "
            "same results at all other positions."
        ) from None
    except Exception:  # noqa: BLE001 - the forward's own: told where it is compared
        pass
    finally:
        torch.backends.mha.set_fastpath_enabled(False)


class _PackedError(Exception):
    """A forward packs rows."""


class _Packing(torch_private.RecordingMode):
    """Ends a forward that packs rows, or would for another mask."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = torch_private.op_name(func)
        if name == "aten::_nested_tensor_from_mask_left_aligned":
            return True
        if name == "aten::_nested_tensor_from_mask":
            raise _PackedError
        return func(*args, **(kwargs or {}))
