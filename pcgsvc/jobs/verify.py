"""`job=verify`: every mode and every strategy against plain execution, tried as callers would.

In: a config. Out: a `Try` per mode, strategy and thing that was tried. The model is made once, and
a program is compiled once per strategy: the other modes load it from the cache, or from one of the
job's own where the cache is off. What cannot be stored is compiled for each mode.

Not tried: calls above the largest size, calls from several threads, KV blocks of the caller's own.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from pcgsvc.capture.plan import plan_capture
from pcgsvc.check.tolerance import differ, error_of, tolerance_of
from pcgsvc.check.trial import Step, Trial
from pcgsvc.check.verify import verify_padding
from pcgsvc.config import CacheMode, Config, Graphs, Mode, Strategy, copy, validate
from pcgsvc.errors import (
    CompileError,
    ConfigError,
    ForwardError,
    PcgError,
    SplitError,
    StateError,
    TraceError,
    VerifyError,
)
from pcgsvc.events import Progress
from pcgsvc.forward.plain import place_of, words_of
from pcgsvc.forward.request import Request
from pcgsvc.forward.samples import Padding
from pcgsvc.forward.specs import holds_nan
from pcgsvc.models.request import request_of
from pcgsvc.pipeline import build
from pcgsvc.report import words
from pcgsvc.serve.runner import Runner

OK, WRONG, FAILED, REFUSED, NOT_TRIED = "ok", "wrong", "failed", "refused", "not tried"
Result = tuple[str, float | None, str]
"""The last three fields of a `Try`."""


class Try(NamedTuple):
    """One row of the table."""

    strategy: str
    mode: str | None
    """None: whatever the mode."""
    tried: str
    verdict: str
    """`ok`, `wrong` (results differ), `failed` (the forward's own exception), `refused` by name, or
    `not tried`."""
    max_rel_err: float | None
    """The largest difference from plain execution; None: nothing was compared."""
    found: str


@dataclass
class Verification:
    """The job: builds the model in every mode with every strategy, those of the settings first.

    Args:
        request: of the configured model, as the settings ask for it.
        progress: shows the phases of each build.
    """

    request: Request
    progress: Progress
    tries: list[Try] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    """Of the build that the settings ask for; empty where that was refused."""

    def run(self) -> None:
        """Fill the rows; no exception of a build or of the forward gets out."""
        config = self.request.config
        for strategy in sorted(Strategy, key=lambda s: s is not config.partition.strategy):
            try:
                self._try_strategy(strategy, _request(self.request, strategy, config.mode))
            except (ConfigError, TraceError, SplitError, CompileError) as error:
                self._add(strategy, None, "build", _of_error(error))  # as it is in any mode

    def problem(self) -> str | None:
        """Return why the job fails, or None; a refusal fails it if the settings asked for it."""
        strategy, mode = self.request.config.partition.strategy, self.request.config.mode
        bad = [
            one
            for one in self.tries
            if one.verdict in (WRONG, FAILED)
            or (
                (one.verdict == REFUSED and one.strategy == strategy.value)
                and one.mode in (None, mode.value)
            )
        ]
        if not bad:
            return None
        first = bad[0]
        where = f"{first.strategy}, {first.mode or 'any mode'}, {first.tried}"
        return f"{len(bad)} rows of {len(self.tries)}; {where}: {first.verdict}: {first.found}"

    def _add(self, strategy: Strategy, mode: Mode | None, tried: str, result: Result) -> None:
        self.tries.append(Try(strategy.value, mode.value if mode else None, tried, *result))

    def _try_strategy(self, strategy: Strategy, request: Request) -> None:
        """Try each mode; raises what would be refused in any."""
        asked, known = request.config.mode, dict[Any, str]()
        image = None
        for mode in sorted(Mode, key=lambda m: m is not asked):
            is_asked = (strategy, mode) == (self.request.config.partition.strategy, asked)
            try:
                one = _request(request, strategy, mode)
                captured = None if image is None else tuple(plan_capture(one, image).entries)
                if captured in known:
                    found = f"captures what mode={known[captured]} does"
                    self._add(strategy, mode, "build", (NOT_TRIED, None, found))
                    continue
                runner = build(one, self.progress, check=True)
            except (TraceError, SplitError, CompileError):
                raise
            except Exception as error:  # noqa: BLE001 - the forward is the user's code
                self._add(strategy, mode, "build", _of_error(error))
                self.report = (is_asked and getattr(error, "report", None)) or self.report
                continue
            with runner:
                image = runner.model.image
                known[tuple(plan_capture(one, image).entries)] = mode.value
                self.report = runner.report if is_asked else self.report
                self._add(strategy, mode, "build", _built(runner))
                for tried, work in _TRIES.items():
                    if runner.table.entries or not tried.startswith("padding"):
                        self._add(strategy, mode, tried, _result_of(work, runner))


def verify_all(config: Config, progress: Progress) -> Verification:
    """Do the job for a config as composed; ConfigError if its settings are no valid ones."""
    with contextlib.ExitStack() as stack:
        if config.cache.mode is CacheMode.OFF:
            config = copy(config)
            config.cache.mode, config.cache.remote = CacheMode.READWRITE, None
            config.cache.dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="pcgsvc-"))
        done = Verification(request_of(config, progress), progress)
        done.run()
        return done


def _request(request: Request, strategy: Strategy, mode: Mode) -> Request:
    """Return the request for one combination; ConfigError if the settings do not go with it."""
    config = copy(request.config)
    config.partition.strategy, config.mode = strategy, mode
    config.debug.poison = config.capture.graphs is Graphs.RECORDED
    validate(config, device_type=request.device.type)
    return replace(request, config=config)


def _result_of(work: Callable[[Runner], Result], runner: Runner) -> Result:
    try:
        with torch.no_grad():
            return work(runner)
    except Exception as error:  # noqa: BLE001 - the forward is the user's code
        return _of_error(error)


def _of_error(error: Exception) -> Result:
    """Say whether an exception is a difference, a refusal, or the forward's own."""
    if isinstance(error, VerifyError):
        return WRONG, _worst((error.report or {}).get("verify") or []), str(error)
    if isinstance(error, ForwardError):
        return FAILED, None, str(error)
    if isinstance(error, PcgError):
        return NOT_TRIED if isinstance(error, StateError) else REFUSED, None, str(error)
    return FAILED, None, f"{words_of(error)}{place_of(error)}"


def _worst(rows: Sequence[Mapping[str, Any]]) -> float | None:
    return max((max(r["max_rel_err"], r["max_rel_err_true"]) for r in rows), default=None)


# ---- what is tried -------------------------------------------------------------------------------


def _built(runner: Runner) -> Result:
    """Say what was captured, and how far off it is; what is wrong has been raised."""
    entries = words.count(len(runner.table.entries), "entry", "entries")
    found = f"{entries}, mode {runner.report['mode']['resolved']}, {runner.model.start} start"
    skipped = [f"size {size}: {why}" for size, why in sorted(runner.table.skipped.items())]
    return OK, _worst(runner.report["verify"]), "; ".join([found, *skipped])


def _padding(kind: Padding, runner: Runner) -> Result:
    """Replay every entry with one kind of padding."""
    rows = verify_padding(runner.model, runner.memory, runner.table, runner.request, kind)
    wrong = [
        f"{r['mode']} size {r['size']} with {r['num_tokens']} true rows"
        + (f", which reaches {r['spoilt_state']}" if r["spoilt_state"] else "")
        for r in rows
        if not r["ok"]
    ]
    found = "; ".join(wrong) or words.count(len(rows), "entry", "entries")
    return WRONG if wrong else OK, _worst(rows), found


def _shuffled(runner: Runner) -> Result:
    """Call with every size's row counts in random order, each twice."""
    trial = Trial.of(runner.model, runner.memory, runner.request)
    return _compared(runner, trial, _steps(runner, trial))


def _updated(runner: Runner) -> Result:
    """Call before the weights have other values, while they have, and once they are put back."""
    module: Any = runner.model.module
    state = module.state_dict(keep_vars=True)
    floats = (n for n in state if isinstance(state[n], torch.nn.Parameter) and state[n].dim())
    names = {id(state[n]): n for n in floats if holds_nan(state[n].dtype)}
    trial = Trial.of(runner.model, runner.memory, runner.request)
    steps = _steps(runner, trial)[:_FEW]
    before, results = [trial.plain(step) for step in steps], [_compared(runner, trial, steps)]
    for turn in range(2):  # negated with rows reversed, and once more: as they were
        for name in names.values():
            value = -state[name].detach().flip(0)
            runner.load_state_dict({name: value}, strict=False)
        if turn == 0:
            moved = any(map(differ, map(trial.plain, steps), before))
        results.append(_compared(runner, trial, steps))
    if not moved:
        return NOT_TRIED, None, "no result depends on a parameter of floats"
    verdict, error, found = max(results, key=lambda r: (r[0] == WRONG, r[1]))
    return verdict, error, f"{words.count(len(names), 'parameter')}: {found}"


_FEW = 8
"""Calls around each change of weights."""
_TRIES: dict[str, Callable[[Runner], Result]] = {
    "padding: zeros": partial(_padding, Padding.ZEROS),
    "padding: NaN": partial(_padding, Padding.NAN),
    "padding: large values": partial(_padding, Padding.LARGE),
    "calls of shuffled sizes": _shuffled,
    "weights updated between calls": _updated,
}


# ---- calls ---------------------------------------------------------------------------------------


def _steps(runner: Runner, trial: Trial) -> list[Step]:
    """Return steps in random order: of every size the fewest rows, its own, and some between.

    Each is there twice, and also as a uniform batch where there can be one.
    """
    rng, samples = random.Random(trial.config.seed), trial.samples
    sizes = sorted(set(runner.table.sizes)) or trial.config.capture.final_sizes
    between = ((low + 1, rng.randint(low + 1, size), size) for low, size in pairwise([0, *sizes]))
    broken_by = runner.model.predicate.broken_by
    counts = sorted({n for three in between for n in three if broken_by(n) is None})
    query_len, steps = trial.config.capture.uniform_query_len, list[Step]()
    for rows in counts * 2:
        steps.append(trial.step(rows))
        if rows % query_len == 0 and rows // query_len <= runner.memory.max_reqs:
            steps.append(Step(rows, samples.inputs(rows), samples.batch(rows, uniform=True)))
    rng.shuffle(steps)
    return steps


def _compared(runner: Runner, trial: Trial, steps: Sequence[Step]) -> Result:
    """Call the runner with each step, and compare with the module on the true rows."""
    worst, wrong = 0.0, []
    for step in steps:
        got, plain = trial.both(step, partial(runner, **step.inputs, batch=step.batch))
        wanted = plain()
        error = error_of(got, wanted)
        tolerance = tolerance_of(wanted, error, plain, always=trial.model.ranks.many)
        worst = max(worst, error)
        if error > tolerance:
            wrong.append(f"{step.rows} rows: {error:.3g} (tolerance {tolerance:.3g})")
    rows = sorted(step.rows for step in steps)
    found = (
        f"{len(rows)} calls of {rows[0]} to {rows[-1]} rows" if rows else "no row count is valid"
    )
    return WRONG if wrong else OK, worst, "; ".join(dict.fromkeys(wrong)) or found
