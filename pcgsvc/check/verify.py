"""Verification: every captured entry against plain execution of the module.

In: a compiled model with its captured entries, and a source of inputs. Out: what of them may serve,
with one row per entry in the report's form. Model state and the caller's KV blocks are left as they
were. Knows nothing of how entries were captured.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.plan import BatchDescriptor, CapturePlan, EntryKey
from pcgsvc.check.causes import (
    RefusedRowsError,
    does_not_raise,
    failed_replay,
    of_entry,
    program_differs,
)
from pcgsvc.check.dependence import input_dependence, more_row_counts
from pcgsvc.check.null_rows import NullRows
from pcgsvc.check.tolerance import (
    differ,
    error_of,
    in_words,
    near_ties,
    spoilt_state,
    tolerance_of,
)
from pcgsvc.check.trial import Trial
from pcgsvc.config import Compiler, Mode
from pcgsvc.cuda_driver import DriverError
from pcgsvc.errors import ForwardError, PcgError, VerifyError
from pcgsvc.events import Phases
from pcgsvc.forward.batch import CheckedBatch
from pcgsvc.forward.plain import place_of, words_of
from pcgsvc.forward.request import Request, make_samples
from pcgsvc.forward.samples import Padding, padded
from pcgsvc.forward.specs import SizePredicate
from pcgsvc.forward.workspace import Workspace, preserved
from pcgsvc.ops.context import ForwardContext, use_context
from pcgsvc.ops.expert_choice import Choices, following, recorded_choices
from pcgsvc.ops.modes import fewest_rows
from pcgsvc.program.model import CompiledModel


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

    Each entry is replayed in shuffled order with zeros, NaN and large values in its padding rows,
    and compared with the module on the same padded inputs (exact when the pieces are eager), and
    with the module on the true rows alone. Before that the program is tried at one row, since
    Dynamo takes a symbolic size for at least 2 without recording it, and the module on inputs of
    other layouts and on one tensor for several inputs.

    Args:
        model: what was captured; its module is what an entry must give.
        memory: the workspace that it was captured on; inputs are overwritten, state is put back.
        table: the captured entries.
        request: gives inputs and batches that capture has not seen, drawn from `seed`.
        plan: what was captured, and from which config.
        phases: `verify` is timed; one unit per entry.

    Raises:
        ForwardError: the forward fails with inputs that were drawn for it.
        VerifyError: the module returns another kind of result than the program.
    """
    samples = make_samples(request, memory, seed=plan.config.seed + 1)
    timed = phases.phase("verify", len(table.entries))
    with _failures_named(request), torch.no_grad(), timed:
        trial = Trial.of(model, memory, request)
        if _differs_at_one_row(trial):
            model = model.requiring("s > 1", "differs from the module at one row")
        table = table.without(_invalid(table, model.predicate))
        null_rows = NullRows(plan.config.capture.null_rows, trial.state)
        check = _Check(model, memory, samples, plan.config, table, null_rows)
        model = replace(model, depends_on=check.input_dependence())
        seed = random.Random(plan.config.seed).getrandbits(32)
        order = list(table.entries)
        random.Random(seed).shuffle(order)
        found = {}
        more = more_row_counts(model)
        for key in order:
            found[key] = check.entry(key, random.Random(seed), more)
            phases.progress.advance()
        rows = [found[key] for key in table.entries]
        trial = replace(trial, model=model)
        wrong = model.ranks.first(refusal(rows, plan, memory, trial))
    return Verified(model, table, rows, wrong)


@contextlib.contextmanager
def _failures_named(request: Request) -> Iterator[None]:
    """Say of an exception from a line of the user's that inputs which were drawn led to it."""
    try:
        yield
    except (PcgError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not (place := place_of(error)):
            raise
        source = request.bundle.samples_from or ""
        raise ForwardError(
            f"the forward fails in the self-check: {words_of(error)}{place}. {source}"
        ) from error


def verify_padding(
    model: CompiledModel, memory: Workspace, table: GraphTable, request: Request, kind: Padding
) -> list[dict[str, Any]]:
    """Return a row per entry, each replayed with one kind of padding at several row counts.

    The rows are those of `verify`, with what was worst, on inputs that it has not seen: the fewest
    true rows that an entry serves, and two random numbers of them. Call it under `torch.no_grad`.
    """
    config, found = request.config, []
    samples, rng = make_samples(request, memory, seed=config.seed + 3), random.Random(config.seed)
    null_rows = NullRows(config.capture.null_rows, memory.bound(model.mutated))
    check = _Check(model, memory, samples, config, table, null_rows)
    same = kind is Padding.ZEROS
    for key in table.entries:
        served = check.served(key[1])
        counts = {served[0], rng.choice(served), rng.choice(served)}
        tries = [check.tried(key, n, [kind], compare_padded=same) for n in sorted(counts)]
        found.append(max((check._row(key, [one]) for one in tries), key=_row_badness))
    return found


def _row_badness(row: Mapping[str, Any]) -> tuple[bool, float]:
    return not row["ok"], max(row["max_rel_err"], row["max_rel_err_true"])


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
    if trial is not None and trial.model.ranks.many:  # the others take no part in experiments
        trial = None
    each = "; ".join(
        f"{r['mode']} size {r['size']}: "
        f"{in_words(r['max_rel_err'])} (tolerance {r['tolerance']:.3g}), "
        f"true rows {in_words(r['max_rel_err_true'])} (tolerance {r['tolerance_true']:.3g})"
        + (f", padding rows in the state {s}" if (s := r.get("spoilt_state")) else "")
        for r in wrong
    )
    cause = of_entry(wrong[0], plan, memory, trial)
    return f"replay differs from plain execution: {each}.\n{cause}"


def _differs_at_one_row(trial: Trial) -> bool:
    """Whether the module must run a single row itself, of which the predicate is silent."""
    if trial.model.refuses(1) is not None:
        return False
    try:
        return program_differs(trial, trial.step(1)) is not None
    except (RefusedRowsError, VerifyError):
        return True


def _invalid(table: GraphTable, predicate: SizePredicate) -> dict[EntryKey, str]:
    """Return why entries cannot serve the size that they were captured for."""
    broken = {key: predicate.broken_by(key[1].num_tokens) for key in table.entries}
    return {key: f"the graph is not valid for it: {why}" for key, why in broken.items() if why}


class _Replay(NamedTuple):
    """What one replay left; copies, all rows."""

    results: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    choices: Choices


class _Trial(NamedTuple):
    """One entry at one row count."""

    num_tokens: int
    error: float
    """Against the module on the same padded inputs."""
    tolerance: float
    tries: list[tuple[Padding, float, list[str]]]
    """Per kind of padding: the error against the true rows alone, and the spoilt state."""


def _badness(tried: tuple[_Trial, tuple[Padding, float, list[str]]]) -> tuple[bool, float]:
    """Order tries; of several wrong ones the first counts, since calls pad with zeros."""
    trial, (_, error, spoilt) = tried
    wrong = bool(spoilt) or error > trial.tolerance
    return wrong, 0.0 if wrong else error


@dataclass(frozen=True)
class _Check(Trial):
    """Compares captured entries with the module."""

    table: GraphTable
    null_rows: NullRows

    def entry(self, key: EntryKey, rng: random.Random, more: int) -> dict[str, Any]:
        """Check one entry with each kind of padding; return what was worst.

        Two row counts are needed: a forward that counts its rows is found with the fewest, one that
        takes some row for another with a random one. So are all kinds of padding: zeros are what
        calls pad with, comparisons hide NaN, and nan-aware functions hide all but large values.
        One that computes with its row count may be wrong for few, and is tried at `more` of them.
        """
        served = self.served(key[1])
        fewest, other = served[0], rng.choice(served)
        junk = [Padding.NAN_AND_LARGE]
        if key[1].num_tokens - other == 1:  # one row is one of them
            junk = [Padding.NAN, Padding.LARGE]
        if fewest == other:
            kinds = [Padding.ZEROS, *junk] if fewest < key[1].num_tokens else [Padding.ZEROS]
            trials = [self.tried(key, fewest, kinds)]
        else:
            first = self.tried(key, fewest, [Padding.ZEROS])
            trials = [first, self.tried(key, other, junk, compare_padded=False)]
        for count in sorted({*rng.sample(served, min(more, len(served)))} - {fewest, other}):
            trials.append(self.tried(key, count, [Padding.ZEROS], compare_padded=False))
        return self._row(key, trials)

    def tried(
        self, key: EntryKey, true: int, kinds: Sequence[Padding], *, compare_padded: bool = True
    ) -> _Trial:
        """Replay an entry on `true` rows with each kind of padding, and compare with the module.

        `compare_padded`: also with the module on the first of the padded inputs.
        """
        size, outputs = key[1].num_tokens, self.model.outputs
        batch = self.samples.batch(true, uniform=key[1].uniform)
        alone = self.samples.inputs(true)
        whole = self.null_rows.padding_of(self.samples.inputs(size))
        tries = [self._padded_replay(key, alone, whole, kind, batch) for kind in kinds]
        kinds, given, replays = zip(*tries, strict=True)
        first = replays[0]
        choices, near, error = first.choices, near_ties(first.results), 0.0
        if compare_padded:
            with preserved(self.state), following(choices, near):
                same = self.module(given[0], batch, size, key)
                after = self.null_rows.without(self.state)
                state_error = error_of(list(first.state.values()), list(after.values()))
            cut = outputs.cut(first.results, true), outputs.cut(same, true)
            error = max(error_of(*cut), state_error)
        states: list[dict[str, torch.Tensor]] = []

        def run_alone() -> list[torch.Tensor]:
            with preserved(self.state), following(choices, near):
                results = self.module(alone, batch, true)
                states.append(self._copied_state())
                return results

        pure = run_alone()
        errors = [error_of(outputs.cut(replay.results, true), pure) for replay in replays]
        worst = max(errors) if self.is_exact else max(error, *errors)
        tolerance = tolerance_of(pure, worst, run_alone, always=self.model.ranks.many)
        before = self.null_rows.without(self.state)  # put back after each run
        spoilt = [spoilt_state(replay.state, states[0], before, tolerance) for replay in replays]
        return _Trial(true, error, tolerance, list(zip(kinds, errors, spoilt, strict=True)))

    def _padded_replay(
        self,
        key: EntryKey,
        alone: Mapping[str, torch.Tensor],
        whole: Mapping[str, torch.Tensor],
        kind: Padding,
        batch: CheckedBatch,
    ) -> tuple[Padding, dict[str, torch.Tensor], _Replay]:
        """Replay an entry on true rows with a kind of padding; without NaN if an op refuses that.

        Returns:
            The kind of padding that it was, the inputs, and what the replay left.

        Raises:
            VerifyError: an op refuses the padding that calls have, or every other kind.
        """
        inputs = padded(self.memory.inputs, alone, whole, kind)
        try:
            return kind, inputs, self.replay(key, inputs, batch)
        except (PcgError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if kind in (Padding.NAN, Padding.NAN_AND_LARGE):
                return self._padded_replay(key, alone, whole, Padding.LARGE, batch)
            with preserved(self.state):
                takes = does_not_raise(lambda: self.module(inputs, batch, key[1].num_tokens, key))
            where = f"{key[0].value} size {key[1].num_tokens} with {batch.num_tokens} true rows"
            words = f"{where}: {failed_replay(kind, takes=takes)}: {words_of(error)}."
            raise VerifyError(words) from error

    @property
    def is_exact(self) -> bool:
        """Whether a replay gives what the module gives on the same inputs, to the last bit."""
        return self.config.compiler.name is Compiler.EAGER

    def _row(self, key: EntryKey, trials: Sequence[_Trial]) -> dict[str, Any]:
        """Return the report's row of one entry: the first try that is wrong, or the worst."""
        first = trials[0]
        trial, (kind, error_true, spoilt) = max(
            ((trial, one) for trial in trials for one in trial.tries), key=_badness
        )
        tolerance = 0.0 if self.is_exact else first.tolerance
        right = first.error <= tolerance and error_true <= trial.tolerance and not spoilt
        return {
            "mode": key[0].value,
            "size": key[1].num_tokens,
            "num_tokens": trial.num_tokens,
            "uniform": key[1].uniform,
            "max_rel_err": first.error,
            "tolerance": tolerance,
            "max_rel_err_true": error_true,
            "tolerance_true": trial.tolerance,
            "spoilt_state": spoilt,
            "padding": kind.value if trial.num_tokens < key[1].num_tokens else None,
            "ok": right,
        }

    def input_dependence(self) -> frozenset[str]:
        """Return on what of its inputs besides their values the module depends; see there."""
        if not self.table.entries:
            return frozenset()
        sizes = sorted((k.num_tokens, k.uniform) for _, k in self.table.entries)
        rows, uniform = next((s for s in sizes if s[0] > 1), sizes[-1])
        batch = self.samples.batch(rows, uniform=uniform)

        def run(inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            with preserved(self.state):
                return self.module(inputs, batch, rows)

        def differs(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
            return self.model.ranks.any(differ(got, wanted))

        return input_dependence(run, self.samples.inputs(rows), differs)

    def replay(
        self, key: EntryKey, inputs: Mapping[str, torch.Tensor], batch: CheckedBatch
    ) -> _Replay:
        """Replay an entry on inputs whose padding rows are given; the state is put back."""
        with preserved(self.state), recorded_choices() as choices:
            with self.memory.on_stream():
                self.null_rows.spoil(self.state)
                results = self._replayed(key, inputs, batch)
            return _Replay(results, self._copied_state(), choices)

    def _replayed(
        self, key: EntryKey, inputs: Mapping[str, torch.Tensor], batch: CheckedBatch
    ) -> list[torch.Tensor]:
        """Replay an entry as calls do: with the copies in its graphs where it has them."""
        size, entry, memory = key[1].num_tokens, self.table.entries[key], self.memory
        load, values = memory.plan_load(size, size), [inputs[s.name] for s in memory.inputs]
        copies, context = None, None
        steps, results = entry.calls, list[torch.Tensor]()
        if entry.copies is not None:
            copies = entry.copies.of_rows(load.targets, entry.outputs)
        if copies is not None and copies.take(values):
            memory.pad(load)
            context = self._context(batch, size, key, stage=copies.has_metadata)
            try:
                steps, results = copies.steps, copies.set(values, memory.staged)
            except DriverError:  # calls make the copies outside of it then
                context = None
        if context is None:
            memory.copy_in(values, load)
            context = self._context(batch, size, key)
        with use_context(context):
            for step in steps:
                step()
        memory.sent()
        return results or [tensor.clone() for tensor in entry.outputs]

    def _copied_state(self) -> dict[str, torch.Tensor]:
        kept = self.null_rows.without(self.state)
        return {name: tensor.clone() for name, tensor in kept.items()}

    def module(
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

    def _context(
        self, batch: CheckedBatch, rows: int, key: EntryKey | None, *, stage: bool = False
    ) -> ForwardContext:
        uniform = key is not None and key[1].uniform
        query_len = self.config.capture.uniform_query_len if uniform else None
        full = key is not None and key[0] is Mode.FULL
        return self.memory.context(batch, rows, query_len, in_full_graph=full, stage=stage)

    def served(self, descriptor: BatchDescriptor) -> Sequence[int]:
        """Return the row counts that an entry serves, with padding where there can be any."""
        smaller = [
            other.num_tokens
            for _, other in self.table.entries
            if other.num_tokens < descriptor.num_tokens and other.uniform == descriptor.uniform
        ]
        step = self.config.capture.uniform_query_len if descriptor.uniform else 1
        fewest = fewest_rows(descriptor.num_tokens, self.config.capture.max_padding)
        low = max(max(smaller, default=0) // step + 1, -(-fewest // step))
        most = max(low, descriptor.num_tokens // step - 1)
        counts: Sequence[int] = range(low * step, most * step + 1, step)
        predicate = self.model.predicate
        if predicate.conditions:  # the module runs other row counts itself
            counts = [n for n in counts if predicate.broken_by(n) is None]
        return counts or [descriptor.num_tokens // step * step]
