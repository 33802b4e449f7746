"""Verification: every captured entry against plain execution of the module.

In: a compiled model with its captured entries, and a source of inputs. Out: what of them may serve,
with one row per entry in the report's form. Model state and the caller's KV blocks are left as they
were. Knows nothing of how entries were captured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.plan import BatchDescriptor, CapturePlan, EntryKey
from pcgsvc.check.causes import of_entry
from pcgsvc.check.tolerance import TOLERANCE, error_of, near_ties, tolerance_of
from pcgsvc.check.trial import Trial
from pcgsvc.config import Compiler, Config, Mode
from pcgsvc.events import Phases
from pcgsvc.forward.batch import CheckedBatch
from pcgsvc.forward.request import Request, make_samples
from pcgsvc.forward.samples import Samples, fill_junk
from pcgsvc.forward.specs import SizePredicate
from pcgsvc.forward.workspace import Workspace, preserved
from pcgsvc.ops.context import ForwardContext, use_context
from pcgsvc.ops.expert_choice import following, recorded_choices
from pcgsvc.ops.expert_group import uses_group
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.program import Direct


class Verified(NamedTuple):
    """What verification leaves."""

    model: CompiledModel
    """With what it turned out to require of the row count."""
    table: GraphTable
    """Without the entries that the model is not valid for."""
    rows: list[dict[str, Any]] | None = None
    """One per entry that is left, in the order of the report's schema; None: not verified."""
    refusal: str | None = None
    """What is wrong with the entries."""

    def section(self) -> dict[str, Any]:
        """Return the report's `verify`, if there is one."""
        return {} if self.rows is None else {"verify": self.rows}


def verify(
    model: CompiledModel,
    memory: Workspace,
    table: GraphTable,
    request: Request,
    plan: CapturePlan,
    phases: Phases,
) -> Verified:
    """Check every captured entry against the module, and leave out what cannot be served.

    Each entry is replayed in shuffled order with junk in its padding rows, and compared twice: with
    the module on the same padded inputs (exact when the pieces are eager), and with the module on
    the true rows alone. Before that the program is tried at one row, since Dynamo takes a symbolic
    size for at least 2 without recording it.

    Args:
        model: what was captured; its module is what an entry must give.
        memory: the workspace that it was captured on; inputs are overwritten, state is put back.
        table: the captured entries.
        request: gives inputs and batches that capture has not seen, drawn from `seed`.
        plan: what was captured, and from which config.
        phases: `verify` is timed; one unit per entry.
    """
    samples = make_samples(request, memory, seed=plan.config.seed + 1)
    with torch.no_grad(), phases.phase("verify", len(table.entries)):
        if _Check(model, memory, table, samples, plan.config).differs_at_one_row():
            model = model.requiring("s > 1", "differs from the module at one row")
        table = table.without(_invalid(table, model.predicate))
        check = _Check(model, memory, table, samples, plan.config)
        seed = random.Random(plan.config.seed).getrandbits(32)
        order = list(enumerate(table.entries))
        random.Random(seed).shuffle(order)
        found = {}
        for at, key in order:
            found[key] = check.entry(key, random.Random(seed), most_padding=at % 2 == 0)
            phases.progress.advance()
        rows = [found[key] for key in table.entries]
        trial = None if uses_group(plan.config) else Trial.of(model, memory, request)
        wrong = refusal(rows, plan, memory, trial)
    return Verified(model, table, rows, wrong)


def refusal(
    rows: Sequence[Mapping[str, Any]],
    plan: CapturePlan,
    memory: Workspace,
    trial: Trial | None = None,
) -> str | None:
    """Return what is wrong with entries, or None; `trial`: for experiments that find the cause."""
    wrong = [row for row in rows if not row["ok"]]
    if not wrong:
        return None
    each = "; ".join(
        f"{r['mode']} size {r['size']}: {r['max_rel_err']:.3g} (tolerance {r['tolerance']:.3g}), "
        f"true rows {r['max_rel_err_true']:.3g} (tolerance {r['tolerance_true']:.3g})"
        + (f", padding rows in the state {s}" if (s := r.get("spoilt_state")) else "")
        for r in wrong
    )
    return (
        f"replay differs from plain execution: {each}.\n{of_entry(wrong[0], plan, memory, trial)}"
    )


def _invalid(table: GraphTable, predicate: SizePredicate) -> dict[EntryKey, str]:
    """Return why entries cannot serve the size that they were captured for."""
    broken = {key: predicate.broken_by(key[1].num_tokens) for key in table.entries}
    return {key: f"the graph is not valid for it: {why}" for key, why in broken.items() if why}


@dataclass(frozen=True)
class _Check:
    """Compares captured entries, and the program itself, with the module."""

    model: CompiledModel
    memory: Workspace
    table: GraphTable
    samples: Samples
    config: Config

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the forward writes to."""
        return {name: self.memory.tensors[name] for name in self.model.mutated}

    def entry(self, key: EntryKey, rng: random.Random, *, most_padding: bool) -> dict[str, Any]:
        """Check one entry; `most_padding`: with the fewest true rows, and zeros in integer padding.

        Both kinds are needed: a forward that counts its rows, or looks for a zero, is found with
        the former, one that takes some row for another with the latter.
        """
        mode, descriptor = key
        size, model = descriptor.num_tokens, self.model
        true = self._true_rows(descriptor, None if most_padding else rng)
        batch = self.samples.batch(true, uniform=descriptor.uniform)
        padded = self.samples.inputs(size)
        fill_junk(self.memory.inputs, padded, true, zeros=most_padding)
        alone = {s.name: s.cut(padded[s.name], true) for s in self.memory.inputs}
        with preserved(self.state), recorded_choices() as choices:
            got = self.replay(key, padded, batch)
            after = {name: tensor.clone() for name, tensor in self.state.items()}
        near = near_ties(got)
        with preserved(self.state), following(choices, near):
            same = self.plain(padded, batch, size, key)
            state_error = error_of(list(after.values()), list(self.state.values()))

        states: list[dict[str, torch.Tensor]] = []

        def run_alone() -> list[torch.Tensor]:
            with preserved(self.state), following(choices, near):
                results = self.plain({k: v.contiguous() for k, v in alone.items()}, batch, true)
                states.append({name: tensor.clone() for name, tensor in self.state.items()})
                return results

        pure = run_alone()
        got, same = model.outputs.cut(got, true), model.outputs.cut(same, true)
        error, error_true = max(error_of(got, same), state_error), error_of(got, pure)
        exact = self.config.compiler.name is Compiler.EAGER
        worst = error_true if exact else max(error, error_true)
        tolerance_true = tolerance_of(pure, worst, run_alone, always=uses_group(self.config))
        tolerance = 0.0 if exact else tolerance_true
        spoilt = _spoilt(after, states[0], tolerance_true)
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

    def differs_at_one_row(self) -> bool:
        """Whether program and module differ for a single row, of which the predicate is silent."""
        if self.model.predicate.broken_by(1) is not None:
            return False
        inputs, batch = self.samples.inputs(1), self.samples.batch(1, uniform=False)
        with (
            preserved(self.state),
            self.memory.on_stream(),
            use_context(self.memory.context(batch, 1)),
            recorded_choices() as choices,
        ):
            results = self.model.program.run(self.memory.values(inputs, 1), Direct())
            got = [tensor.clone() for tensor in results]

        def run_plain() -> list[torch.Tensor]:
            with preserved(self.state), following(choices, near_ties(got)):
                return self.plain(inputs, batch, 1)

        wanted = run_plain()
        error = error_of(got, wanted)
        return error > tolerance_of(wanted, error, run_plain, always=uses_group(self.config))

    def replay(
        self, key: EntryKey, padded: Mapping[str, torch.Tensor], batch: CheckedBatch
    ) -> list[torch.Tensor]:
        """Replay an entry on inputs whose padding rows are given; return copies, all rows."""
        size, entry = key[1].num_tokens, self.table.entries[key]
        with self.memory.on_stream():
            self.memory.load(padded, size, size)
            with use_context(self._context(batch, size, key)):
                for step in entry.steps:
                    step()
            return [tensor.clone() for tensor in entry.outputs]

    def plain(
        self,
        inputs: Mapping[str, torch.Tensor],
        batch: CheckedBatch,
        rows: int,
        key: EntryKey | None = None,
    ) -> list[torch.Tensor]:
        """Call the module on `rows` rows of which the batch's are true; return copies.

        `key`: the entry whose context the boundaries see, since they may choose their kernels by
        it; None: that of any batch.
        """
        with self.memory.on_stream(), use_context(self._context(batch, rows, key)):
            return [tensor.clone() for tensor in self.model.run_module(inputs)]

    def _context(self, batch: CheckedBatch, rows: int, key: EntryKey | None) -> ForwardContext:
        uniform = key is not None and key[1].uniform
        query_len = self.config.capture.uniform_query_len if uniform else None
        full = key is not None and key[0] is Mode.FULL
        return self.memory.context(batch, rows, query_len, in_full_graph=full)

    def _true_rows(self, descriptor: BatchDescriptor, rng: random.Random | None) -> int:
        """Return a row count that an entry serves, with padding where there can be any.

        `rng`: None for the least such count.
        """
        smaller = [
            other.num_tokens
            for _, other in self.table.entries
            if other.num_tokens < descriptor.num_tokens and other.uniform == descriptor.uniform
        ]
        step = self.config.capture.uniform_query_len if descriptor.uniform else 1
        low = max(smaller, default=0) // step + 1
        counts: Sequence[int] = range(low, max(low, descriptor.num_tokens // step - 1) + 1)
        predicate = self.model.predicate
        if predicate.conditions:  # the module runs other row counts itself
            counts = [n for n in counts if predicate.broken_by(n * step) is None]
            counts = counts or [descriptor.num_tokens // step]
        return (counts[0] if rng is None else rng.choice(counts)) * step


def _spoilt(
    after: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float
) -> list[str]:
    """Return the state that padding rows reached: that differs from a run of the true rows."""
    return [
        name
        for name, tensor in wanted.items()
        if error_of([after[name]], [tensor]) > (tolerance if tensor.dtype in TOLERANCE else 0.0)
    ]
