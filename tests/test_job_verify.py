"""`job=verify`: every mode and strategy as callers use them, on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Cli, Done
from core_helpers import build, toy

from pcgsvc.build import stages
from pcgsvc.jobs import verify as job
from pcgsvc.serve.runner import Runner
from pcgsvc.serve.weights import Weights

SOURCE = """
import torch
from torch import nn

import pcgsvc


@pcgsvc.splitting_op("verified::double", mutates_args=("out",))
def double(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def example_inputs(self, rows, generator):
        return {"x": torch.randn(rows, 4, generator=generator)}

    def forward(self, x):
        out = torch.empty_like(x)
        torch.ops.verified.double(self.linear(x), out)
        return self.linear(out)


class Mixes(Good):
    def forward(self, x):
        return self.linear(x) + x.mean()


class Prints(Good):
    def forward(self, x):
        print("a forward")
        return super().forward(x)


class Raises(Good):
    def forward(self, x):
        raise ValueError("not today")
"""
WORDS = ["job=verify", "model=module", "compiler=eager", "device=cpu", "capture.sizes=[2,4]"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with SOURCE, which is imported once."""
    made = tmp_path_factory.mktemp("models") / "verified_models.py"
    made.write_text(SOURCE)
    return made


@pytest.fixture
def verify(cli: Cli, file: Path) -> Callable[..., Done]:
    """Return a call of the job for a class of SOURCE."""

    def call(name: str, *words: str) -> Done:
        return cli(*WORDS, f"model.target={file}:{name}", *words)

    return call


def tries(done: Done) -> list[dict[str, Any]]:
    (report,) = done.reports
    rows: list[dict[str, Any]] = report["tries"]
    return rows


def verdicts(done: Done, **wanted: str | None) -> dict[str, str]:
    """Return the verdicts by what was tried, of one strategy and mode."""
    return {
        row["tried"]: row["verdict"]
        for row in tries(done)
        if all(row[name] == value for name, value in wanted.items())
    }


@pytest.mark.slow
def test_every_mode_and_strategy_is_tried_and_each_program_made_once(
    verify: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
    validate_report: Callable[..., None],
) -> None:
    traced = []
    trace = stages.trace
    monkeypatch.setattr(stages, "trace", lambda *a: traced.append(1) or trace(*a))
    done = verify("Good", "cache.mode=off", "mode=piecewise")
    assert done.code == 0, done.err
    assert len(traced) == 1
    everything = dict.fromkeys(["build", *job._TRIES], "ok")
    assert verdicts(done, strategy="fx", mode="piecewise") == everything
    assert verdicts(done, strategy="breakable", mode="piecewise") == everything
    uncaptured = {name: "ok" for name in everything if not name.startswith("padding")}
    assert verdicts(done, strategy="fx", mode="none") == uncaptured
    assert verdicts(done, strategy="fx", mode="full") == {"build": "not tried"}
    assert verdicts(done, strategy="inductor", mode=None) == {"build": "refused"}
    assert not verdicts(done, strategy="inductor", mode="full")
    assert tries(done)[0]["strategy"] == "fx"
    errors = [row["max_rel_err"] for row in tries(done)]
    assert max(error for error in errors if error is not None) < 1e-4
    (report,) = done.reports
    validate_report(report)
    assert report["config"]["job"] == "verify"
    assert report["mode"]["requested"] == "piecewise"
    assert "weights updated between calls" in done.out


@pytest.mark.slow
def test_a_difference_is_a_row_and_exit_code_1(
    verify: Callable[..., Done], validate_report: Callable[..., None]
) -> None:
    done = verify("Mixes")
    assert done.code == 1
    wrong = [row for row in tries(done) if row["verdict"] == "wrong"]
    assert {row["strategy"] for row in wrong} == {"fx", "breakable"}
    assert all("padding rows" in row["found"] for row in wrong)
    assert all(row["max_rel_err"] > 1e-3 for row in wrong)
    assert verdicts(done, strategy="fx", mode="none")["calls of shuffled sizes"] == "ok"
    validate_report(done.reports[0])


@pytest.mark.slow
def test_a_refusal_fails_the_job_only_where_the_settings_ask_for_it(
    verify: Callable[..., Done], validate_report: Callable[..., None]
) -> None:
    done = verify("Prints", "partition.strategy=breakable", "hydra.run.dir=one")
    assert done.code == 0, done.err
    (row,) = [row for row in tries(done) if row["strategy"] == "fx"]
    assert (row["mode"], row["verdict"]) == (None, "refused")
    assert "verified_models.py" in row["found"]


@pytest.mark.slow
def test_the_same_refusal_of_the_settings_own_strategy_is_exit_code_1(
    verify: Callable[..., Done], validate_report: Callable[..., None]
) -> None:
    done = verify("Prints")
    assert done.code == 1
    assert verdicts(done, strategy="breakable")["calls of shuffled sizes"] == "ok"
    validate_report(done.reports[0])


@pytest.mark.slow
def test_an_exception_of_the_forward_is_a_row(verify: Callable[..., Done]) -> None:
    done = verify("Raises")
    assert done.code == 1
    rows = [row for row in tries(done) if row["strategy"] == "breakable"]
    assert {row["verdict"] for row in rows} == {"failed"}
    assert all("ValueError: not today at" in row["found"] for row in rows)


@pytest.mark.slow
def test_bad_settings_are_exit_code_2(verify: Callable[..., Done]) -> None:
    assert verify("Good", "partition.strategy=inductor").code == 2
    assert verify("Missing").code == 2


@pytest.fixture
def runner() -> Any:
    with build(toy(1), sizes=[2, 4]) as made:
        yield made


def test_weights_that_calls_do_not_see_are_found(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job._result_of(job._updated, runner)[0] == "ok"
    before = {name: p.clone() for name, p in toy(1).named_parameters()}
    for name, parameter in runner.model.module.named_parameters():  # type: ignore[attr-defined]
        assert torch.equal(parameter, before[name])
    entry = next(iter(runner.table.entries.values()))
    kept = [tensor.clone() for tensor in entry.outputs]

    def stale(*args: Any, **kwargs: Any) -> torch.Tensor:
        return kept[0][: kwargs["x"].shape[0]].clone()

    monkeypatch.setattr(Runner, "__call__", stale)
    assert job._result_of(job._updated, runner)[0] == "wrong"


def test_weights_that_no_result_depends_on_are_not_tried(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weights, "load", lambda *a, **k: None)
    assert job._result_of(job._updated, runner)[0] == "not tried"


def test_a_replay_that_keeps_its_first_rows_is_found_by_calls_of_shuffled_sizes(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job._result_of(job._shuffled, runner)[0] == "ok"
    call = Runner.__call__

    def swapped(self: Runner, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs).roll(1, 0)

    monkeypatch.setattr(Runner, "__call__", swapped)
    verdict, error, found = job._result_of(job._shuffled, runner)
    assert verdict == "wrong"
    assert error is not None
    assert error > 1e-3
    assert "rows:" in found
