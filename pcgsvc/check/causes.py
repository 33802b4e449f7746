"""Why a program differs from plain execution, in words, with what to do.

In: a comparison that failed, and a `Trial` for experiments. Out: text. Experiments run on failure
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.capture.plan import CapturePlan
from pcgsvc.check.hazards import undeclared_in
from pcgsvc.check.tolerance import error_of, in_words, tolerance_of
from pcgsvc.check.trial import Step, Trial, generators, same_random_numbers
from pcgsvc.config import Compiler, Mode
from pcgsvc.errors import PcgError, VerifyError
from pcgsvc.forward.samples import Padding
from pcgsvc.forward.specs import comparable, holds_nan
from pcgsvc.forward.workspace import Workspace, preserved
from pcgsvc.ops.context import use_context
from pcgsvc.program.image import ProgramImage

BAKED_IN = (
    "its regions compute what the traced ops do, but plain execution does something else: the "
    "forward, or a function of torch that it calls, looks at host state (a flag, a mode, whether "
    "it is being traced). Take that out of the forward, or wrap it in a splitting op."
)

COMPILER = (
    "the compiled program computes something else than the module, without any graph: the "
    "compiler got a region wrong. compiler.on_mismatch=eager runs just that region uncompiled, "
    "compiler=eager all of them."
)


class RefusedRowsError(Exception):
    """The module itself raises for a row count; `str()` is what."""


def unsteady(trial: Trial, step: Step) -> str | None:
    """Return why the module differs from itself on the same inputs and state, or None.

    Inputs that an op writes to and does not declare are not the same: that op is named.
    """
    fresh = trial.step(step.rows)
    for fault in undeclared_in(lambda: trial.plain(fresh), trial.memory.device):
        if fault.is_write:
            return (
                f"{fault.op} writes to its argument {fault.argument!r}, which the schema does not "
                f"say: {fault.schema}. Declare the write (mutates_args, or Tensor(a!)), or write "
                "to a copy."
            )
    once = trial.plain(step)
    error = error_of(trial.plain(step), once)
    if error <= tolerance_of(once, error, lambda: trial.plain(step)):
        return None
    return (
        "the module itself gives other results when it is called again with the same inputs, "
        "state and random seed: it reads host state that changes from call to call (a counter, "
        "the time), or an op writes memory that it does not declare. Move that into a splitting "
        "op, or pass it as an input."
    )


def aliasing(trial: Trial, step: Step) -> str:
    """Say which ops return memory of an argument, which a compiler takes for new; or nothing."""
    faults = undeclared_in(lambda: trial.plain(step), trial.memory.device)
    return "".join(
        f"; {fault.op} returns its argument {fault.argument!r} or a view of it, which the schema "
        f"does not say ({fault.schema}): have it return a copy"
        for fault in faults
        if not fault.is_write
    )


def random_ops(image: ProgramImage) -> list[str]:
    """Return the ops of a program, splitting ops aside, that draw random numbers."""
    return [name for name in image.ops if name not in image.matched and _is_random(name)]


def draws_random(image: ProgramImage) -> str:
    """Say that a forward draws random numbers, and what to do."""
    names = ", ".join(random_ops(image))
    names = f" ({names})" if names else ""
    return (
        f"the forward draws random numbers{names}, so no two runs of it are alike. Switch that "
        "off (module.eval(), p=0), or pass the numbers as an input."
    )


def draws(trial: Trial, step: Step) -> bool:
    """Whether a run of the module moves torch's random generators."""
    device = trial.memory.device
    with preserved(trial.state), same_random_numbers(device):
        before = generators(device)
        with trial.memory.on_stream(), use_context(trial.memory.unpadded_context(step.batch)):
            trial.model.run_module(step.inputs)
        return not all(map(torch.equal, before, generators(device)))


def _is_random(name: str) -> bool:
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return torch.Tag.nondeterministic_seeded in torch_private.op_tags(packet)


def program_differs(trial: Trial, step: Step) -> tuple[float, float] | None:
    """Return error and tolerance if the program, run without graphs, is not as the module.

    So too if it is as the module here, and not at another rank.

    Raises:
        RefusedRowsError: the module cannot run so many rows (a table is too short).
        VerifyError: the program raises and the module does not, or results differ in shape.
    """
    try:
        got, plain = trial.both(step)
        wanted = plain()
    except (PcgError, torch.OutOfMemoryError):
        raise
    except Exception as raised:
        try:
            trial.plain(step)
        except Exception as same:  # the user's code
            raise RefusedRowsError(f"{type(same).__name__}: {same}") from same
        # Other processes take no part in experiments.
        also = "" if trial.model.ranks.many else aliasing(trial, step)
        raise VerifyError(
            f"the program raises at {step.rows} rows, without graphs, and the module does not: "
            f"{type(raised).__name__}: {raised}{also}"
        ) from raised
    error = error_of(got, wanted)
    ranks = trial.model.ranks
    tolerance = tolerance_of(wanted, error, plain, always=ranks.many)
    return (error, tolerance) if ranks.any(error > tolerance) else None


def of_entry(
    row: Mapping[str, Any], plan: CapturePlan, memory: Workspace, trial: Trial | None
) -> str:
    """Say what makes a captured entry wrong, and what to do; `trial`: None: no experiments."""
    where = f"{row['mode']} size {row['size']}"
    if trial is not None and (found := _without_graphs(row, trial)) is not None:
        return f"{where}: {found}"
    if row["spoilt_state"] and row["num_tokens"] < row["size"]:
        return (
            f"{where} with {row['num_tokens']} true rows: padding rows reach the model's state "
            f"{row['spoilt_state']} (padded with {row['padding']}). Mask what goes into it, "
            "torch.where(pcgsvc.true_rows(x)[:, None], h, 0) (not by a product: NaN times 0 is "
            "NaN), or write it in a splitting op, which knows the true row count. Rows that nobody "
            "reads, such as a null block of a KV cache, go into capture.null_rows."
        )
    if row["max_rel_err"] <= row["tolerance"] and row["max_rel_err_true"] > row["tolerance_true"]:
        return _mixes(row, plan, memory)
    if row["max_rel_err"] <= row["tolerance_true"]:
        return (
            f"{where}: the replay differs from the module on the same inputs by "
            f"{row['max_rel_err']:.3g}, as roundings do, and only the replay: an operator takes "
            "another way to the same result while it is recorded or captured, as "
            "torch.linalg.svdvals does. Call one that does not (torch.linalg.svd), or move it into "
            "a splitting op."
        )
    mixes = (
        "the forward mixes rows behind a splitting op, whose padding rows a replay zeroes, or "
        if trial is not None and trial.model.image.matched and row["num_tokens"] < row["size"]
        else ""
    )
    return (
        f"{where}: the replay differs from the module on the same inputs by "
        f"{in_words(row['max_rel_err'])} (tolerance {row['tolerance']:.3g}), and only the replay: "
        f"{mixes}an op reads host state or memory that the graph does not rewrite. Mark it as a "
        "splitting op, or set capture.self_check=false to look into it."
    )


def failed_replay(kind: Padding, *, takes: bool) -> str:
    """Say why a replay raises; `takes`: the module does not, on the same inputs."""
    if takes:
        return "the replay raises on inputs that the module takes"
    return (
        f"an operator does not take the padding rows, filled with {kind.value}. Have the forward "
        "replace such rows, torch.where(pcgsvc.true_rows(x)[:, None], x, 1), or move it into a "
        "splitting op that reads x[pcgsvc.true_rows(x)] alone"
    )


def does_not_raise(call: Callable[[], object]) -> bool:
    """Whether a call returns; what it raises is the user's."""
    try:
        call()
    except Exception:  # noqa: BLE001 - of any class
        return False
    return True


def _without_graphs(row: Mapping[str, Any], trial: Trial) -> str | None:
    """Return what is wrong before anything is captured, or None."""
    step = trial.step(row["num_tokens"])
    if draws(trial, step):  # an op that may draw need not: attention with dropout 0
        return draws_random(trial.model.image)
    if (found := unsteady(trial, step)) is not None:
        return found
    if trial.model.refuses(step.rows) is None and program_differs(trial, step):
        return COMPILER if trial.config.compiler.name is Compiler.INDUCTOR else BAKED_IN
    return None


def _mixes(row: Mapping[str, Any], plan: CapturePlan, memory: Workspace) -> str:
    """Say what makes an entry right on padded inputs and wrong on the true rows."""
    where = f"{row['mode']} size {row['size']} with {row['num_tokens']} true rows"
    gap = f"{in_words(row['max_rel_err_true'])} (tolerance {row['tolerance_true']:.3g})"
    text = (
        f"{where}: padding rows, filled with {row['padding']}, change the true ones by {gap}: "
        "outside its splitting ops, or in one that reads padding rows as well, the forward mixes "
        "rows or computes with their number. Move that into a splitting op that reads "
        "x[pcgsvc.true_rows(x)] alone, or set capture.self_check=false."
    )
    inner = [s.name for s in memory.inputs if s.dims and s.order[0] not in s.dims]
    if inner:
        text += (
            f" Or it computes with the memory layout of {inner}, whose strides depend on the row "
            "count as the example is laid out: pass it contiguous, with the rows outermost."
        )
    below = [
        s.name
        for s in memory.inputs
        if not holds_nan(s.example.dtype) and s.example.numel() and comparable(s.example).min() < 0
    ]
    if below:
        text += (
            f" Or it indexes rows by {below}, in which -1 is the last row of padding: with "
            "k % pcgsvc.true_rows(x).sum() it is the last true one."
        )
    if null_rows := plan.config.capture.null_rows:
        text += f" Or it reads rows of capture.null_rows ({null_rows}), which nothing may read."
    attention = memory.attention
    if row["mode"] == Mode.FULL.value and attention is not None:
        text += (
            f" Or attention={plan.config.attention.name} computes something else in full graphs "
            f"than outside them: it claims support {attention.cudagraph_support.name}; "
            "mode=piecewise keeps it outside."
        )
    return text
