"""Verification: every captured entry against plain execution of the module.

In: the parts of a runner and a source of inputs. Out: one row per (mode, size) in the report's
form. Leaves model state and the caller's KV blocks as they were. Knows nothing of how entries were
captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pcgsvc.capture.plan import BatchDescriptor
from pcgsvc.check.rounding import HALF, redrawn
from pcgsvc.config import Compiler, Mode
from pcgsvc.errors import BatchError
from pcgsvc.forward.batch import CheckedBatch
from pcgsvc.forward.results import tensors_in
from pcgsvc.forward.samples import Samples, fill_junk
from pcgsvc.forward.workspace import preserved
from pcgsvc.ops.context import ForwardContext, use_context
from pcgsvc.ops.expert_choice import following, recorded_choices
from pcgsvc.ops.expert_group import uses_group
from pcgsvc.program.program import Direct
from pcgsvc.serve.runner import RunnerParts

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""max|a-b| / max|b| up to which results that were computed in another order are equal."""

NOISE_FACTOR = 2
"""Of a module's own noise."""

NOISE_LIMIT = 0.25
"""Whatever the noise is; a stale or mixed-up tensor gives an error near 1."""


def verify(
    parts: RunnerParts,
    samples: Samples,
    *,
    seed: int,
    on_entry: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Check every captured entry against the module, and take out what cannot be served.

    Each entry is replayed in shuffled order with junk in its padding rows, and compared twice: with
    the module on the same padded inputs (exact when the pieces are eager), and with the module on
    the true rows alone. Before that the program is tried at one row, since Dynamo takes a symbolic
    size for at least 2 without recording it: where it differs there, `parts.predicate` says so and
    the entries that it excludes go to `table.skipped`.

    Returns:
        One row per entry that is left, in the order of the report's schema.
    """
    with torch.no_grad():
        _check_one_row(parts, samples)
        _drop_invalid(parts)
        keys = list(parts.table.entries)
        order = list(enumerate(keys))
        random.Random(seed).shuffle(order)
        rows = {}
        for at, key in order:
            rows[key] = _verify_entry(parts, samples, key, random.Random(seed), at % 2 == 0)
            on_entry()
    return [rows[key] for key in keys]


def refusal(parts: RunnerParts, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what is wrong with entries that were verified, or None."""
    wrong = [row for row in rows if not row["ok"]]
    if not wrong:
        return None
    each = "; ".join(
        f"{r['mode']} size {r['size']}: {r['max_rel_err']:.3g} (tolerance {r['tolerance']:.3g}), "
        f"true rows {r['max_rel_err_true']:.3g} (tolerance {r['tolerance_true']:.3g})"
        + (f", padding rows in the state {s}" if (s := r.get("spoilt_state")) else "")
        for r in wrong
    )
    return f"replay differs from plain execution: {each}.\n{_cause(wrong[0], parts)}"


def _verify_entry(
    parts: RunnerParts,
    samples: Samples,
    key: tuple[Mode, BatchDescriptor],
    rng: random.Random,
    most_padding: bool,
) -> dict[str, Any]:
    """Check one entry; `most_padding`: with the fewest true rows, and integers padded by zeros.

    Both kinds are needed: a forward that counts its rows, or looks for a zero, is found with the
    former, one that takes some row for another with the latter.
    """
    mode, descriptor = key
    size = descriptor.num_tokens
    true = _true_rows(parts, descriptor, None if most_padding else rng)
    batch = samples.batch(true, uniform=descriptor.uniform)
    padded = samples.inputs(size)
    fill_junk(parts.workspace.inputs, padded, true, zeros=most_padding)
    alone = {s.name: s.cut(padded[s.name], true) for s in parts.workspace.inputs}
    state = {n: parts.workspace.tensors[n] for n in parts.mutated}
    with preserved(state), recorded_choices() as choices:
        got = replay_padded(parts, key, padded, batch)
        after = {n: t.clone() for n, t in state.items()}
    near = _near_ties(got)
    with preserved(state), following(choices, near):
        same = plain(parts, padded, batch, size, key)
        state_error = error_of(list(after.values()), list(state.values()))

    states: list[dict[str, torch.Tensor]] = []

    def run_alone() -> list[torch.Tensor]:
        with preserved(state), following(choices, near):
            results = plain(parts, {k: v.contiguous() for k, v in alone.items()}, batch, true)
            states.append({n: t.clone() for n, t in state.items()})
            return results

    pure = run_alone()
    got_true = parts.outputs.cut(got, true)
    error = max(error_of(got_true, parts.outputs.cut(same, true)), state_error)
    error_true = error_of(got_true, pure)
    exact = parts.config.compiler.name is Compiler.EAGER
    worst = error_true if exact else max(error, error_true)
    tolerance_true = tolerance_of(pure, worst, run_alone, always=uses_group(parts.config))
    tolerance = 0.0 if exact else tolerance_true
    spoilt = [
        n
        for n, wanted in states[0].items()
        if error_of([after[n]], [wanted]) > (tolerance_true if wanted.dtype in TOLERANCE else 0.0)
    ]
    return {
        "mode": mode.value,
        "size": size,
        "num_tokens": true,
        "uniform": descriptor.uniform,
        "max_rel_err": error,
        "tolerance": tolerance,
        "max_rel_err_true": error_true,
        "tolerance_true": tolerance_true,
        "spoilt_state": spoilt,
        "ok": error <= tolerance and error_true <= tolerance_true and not spoilt,
    }


def _near_ties(results: Sequence[torch.Tensor]) -> float:
    """Return how far apart a router may hold two experts that count as equal."""
    dtype = next((t.dtype for t in results if t.is_floating_point()), torch.float32)
    return TOLERANCE.get(dtype, 0.0)


def tolerance_of(
    wanted: Sequence[torch.Tensor],
    error: float,
    again: Callable[[], list[torch.Tensor]],
    *,
    always: bool = False,
) -> float:
    """Return up to which error results count as equal that were computed in another order.

    That is `TOLERANCE`, or, where `error` is above it and the results are of half precision, twice
    what the module's own results move when its roundings fall otherwise: in a random 32-layer
    model in bfloat16 that is more than 5e-2.

    Args:
        wanted: what the module gave.
        error: of what is compared with it.
        again: computes `wanted` once more.
        always: call `again` even if nothing depends on it, since other processes call it too.
    """
    dtype = next((t.dtype for t in wanted if t.is_floating_point()), torch.float32)
    tolerance = TOLERANCE.get(dtype, 0.0)
    if dtype not in HALF or (error <= tolerance and not always):
        return tolerance
    noise = error_of(redrawn(again, wanted[0].device), wanted)
    if error <= tolerance:
        return tolerance
    return max(tolerance, min(NOISE_FACTOR * noise, NOISE_LIMIT))


def _true_rows(parts: RunnerParts, descriptor: BatchDescriptor, rng: random.Random | None) -> int:
    """Return a row count that this entry serves, with padding where there can be any; or the least.

    `rng`: None for the least.
    """
    smaller = [
        k[1].num_tokens
        for k in parts.table.entries
        if k[1].num_tokens < descriptor.num_tokens and k[1].uniform == descriptor.uniform
    ]
    step = parts.config.capture.uniform_query_len if descriptor.uniform else 1
    low = max(smaller, default=0) // step + 1
    counts: Sequence[int] = range(low, max(low, descriptor.num_tokens // step - 1) + 1)
    if parts.predicate.conditions:  # the module runs other row counts itself
        counts = [n for n in counts if parts.predicate.broken_by(n * step) is None]
        counts = counts or [descriptor.num_tokens // step]
    return (counts[0] if rng is None else rng.choice(counts)) * step


def replay_padded(
    parts: RunnerParts,
    key: tuple[Mode, BatchDescriptor],
    padded: Mapping[str, torch.Tensor],
    batch: CheckedBatch,
) -> list[torch.Tensor]:
    """Replay an entry on inputs whose padding rows the caller chose; return copies, all rows."""
    size = key[1].num_tokens
    with parts.workspace.on_stream():
        parts.workspace.load(padded, size, size)
        with use_context(_context(parts, batch, size, key)):
            for step in parts.table.entries[key].steps:
                step()
        return [t.clone() for t in parts.table.entries[key].outputs]


def plain(
    parts: RunnerParts,
    inputs: Mapping[str, torch.Tensor],
    batch: CheckedBatch,
    rows: int,
    key: tuple[Mode, BatchDescriptor] | None = None,
) -> list[torch.Tensor]:
    """Call the module itself on `rows` rows of which the batch's are true; return copies.

    `key`: the entry whose context the boundaries see, since they may choose their kernels by it;
    None: that of any batch.
    """
    with parts.workspace.on_stream(), use_context(_context(parts, batch, rows, key)):
        return [t.clone() for t in module_results(parts, inputs)]


def module_results(parts: RunnerParts, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Call the module under the current context; results in the order of the graph's."""
    leaves = tensors_in(parts.module(**inputs, **parts.arguments.constants))
    flat: dict[int, torch.Tensor] = {}
    for (kind, index), leaf in zip(parts.outputs.leaves, leaves, strict=True):
        if kind == "graph":
            flat[index] = leaf
    return [flat[i] for i in range(len(flat))]


def _context(
    parts: RunnerParts,
    batch: CheckedBatch,
    rows: int,
    key: tuple[Mode, BatchDescriptor] | None,
) -> ForwardContext:
    uniform = key is not None and key[1].uniform
    query_len = parts.config.capture.uniform_query_len if uniform else None
    full = key is not None and key[0] is Mode.FULL
    return parts.workspace.context(batch, rows, query_len, in_full_graph=full)


def error_of(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return max|a-b| / max|b| over all tensors; NaN in one place only counts as infinite."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape:
            raise BatchError(f"results differ in shape: {tuple(a.shape)} and {tuple(b.shape)}")
        if not a.numel():
            continue
        x, y = a.double(), b.double()
        gap = (x - y).abs()
        gap = torch.where((x == y) | (x.isnan() & y.isnan()), torch.zeros_like(gap), gap)
        scale = y.abs().nan_to_num(0.0, posinf=0.0).max().clamp_min(1e-30)
        error = gap.max() / scale
        worst = max(worst, float(error) if bool(error.isfinite()) else 1e30)
    return worst


def _drop_invalid(parts: RunnerParts) -> None:
    """Take out the entries whose size the predicate excludes."""
    table = parts.table
    for mode, descriptor in list(table.entries):
        broken = parts.predicate.broken_by(descriptor.num_tokens)
        if broken is not None:
            del table.entries[mode, descriptor]
            owned = table.owned.pop((mode, descriptor), [])
            table.pool_bytes -= sum(t.untyped_storage().nbytes() for t in owned)
            reason = f"{mode.value}: the graph is not valid for it: {broken}"
            table.skipped[descriptor.num_tokens] = reason


def _cause(row: Mapping[str, Any], parts: RunnerParts) -> str:
    """Say what makes an entry wrong, and what to do."""
    where = f"{row['mode']} size {row['size']}"
    if row["spoilt_state"] and row["num_tokens"] < row["size"]:
        return (
            f"{where} with {row['num_tokens']} true rows: padding rows reach the model's state "
            f"{row['spoilt_state']}. Mask what goes into it with pcgsvc.true_rows, or write it in "
            "a splitting op, which knows the true row count."
        )
    if row["max_rel_err"] <= row["tolerance"] and row["max_rel_err_true"] > row["tolerance_true"]:
        return _mixes(row, parts, full=row["mode"] == Mode.FULL.value)
    return (
        f"{where}: the replay differs from the module on the same inputs by "
        f"{row['max_rel_err']:.3g} (tolerance {row['tolerance']:.3g}). An op reads host state or "
        "memory that the graph does not rewrite; mark it as a splitting op, or set "
        "capture.self_check=false to look into it."
    )


def _mixes(row: Mapping[str, Any], parts: RunnerParts, *, full: bool) -> str:
    """Say what makes an entry right on padded inputs and wrong on the true rows."""
    where = f"{row['mode']} size {row['size']} with {row['num_tokens']} true rows"
    gap = f"{row['max_rel_err_true']:.3g} (tolerance {row['tolerance_true']:.3g})"
    text = (
        f"{where}: padding rows change the true ones by {gap}: outside its splitting ops, the "
        "forward mixes rows or computes with their number. Move that into a splitting op, or set "
        "capture.self_check=false."
    )
    attention = parts.workspace.attention
    if full and attention is not None:
        text += (
            f" Or attention={parts.config.attention.name} computes something else in full graphs "
            f"than outside them: it claims support {attention.cudagraph_support.name}; "
            "mode=piecewise keeps it outside."
        )
    return text


def _check_one_row(parts: RunnerParts, samples: Samples) -> None:
    """Compare the program with the module for a single row; the predicate does not cover it."""
    if parts.predicate.broken_by(1) is not None:
        return
    inputs = samples.inputs(1)
    batch = samples.batch(1, uniform=False)
    state = {n: parts.workspace.tensors[n] for n in parts.mutated}
    context = parts.workspace.context(batch, 1)
    with (
        preserved(state),
        parts.workspace.on_stream(),
        use_context(context),
        recorded_choices() as choices,
    ):
        got = parts.program.run(parts.workspace.values(inputs, 1), Direct())
        got = [t.clone() for t in got]

    def run_plain() -> list[torch.Tensor]:
        with preserved(state), following(choices, _near_ties(got)):
            return plain(parts, inputs, batch, 1)

    wanted = run_plain()
    error = error_of(got, wanted)
    if error > tolerance_of(wanted, error, run_plain, always=uses_group(parts.config)):
        parts.predicate = parts.predicate.and_also("s > 1", "differs from the module at one row")
