"""Sweeps with an objective: Optuna's search, the best job's settings, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Cli, Done
from omegaconf import OmegaConf

from pcgsvc.config import Objective
from pcgsvc.jobs.sweep.objective import value_of
from pcgsvc.report.rows import facts_of

SMALL = ["device=cpu", "model=two_regions", "compiler=eager", "mode=piecewise"]
HERE = [*SMALL, "hydra.sweep.dir=out", "sweep.isolate=false"]
OPTUNA = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=1"]
OPTUNA += ["hydra.sweeper.sampler.seed=1"]
old_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""Of optuna 2.10, which the sweeper needs, with today's SQLAlchemy."""


def values(done: Done, objective: Objective) -> dict[str, float]:
    """Return the figure of each job, by its number."""
    reports = (done.folder / "out").glob("*/report.json")
    return {
        path.parent.name: value_of(facts_of(json.loads(path.read_text())), objective)
        for path in reports
    }


def settings(report: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in report["config"].items() if k not in ("sweep", "report")}


@old_warnings
def test_optuna_ends_in_the_best_of_six_jobs_and_its_yaml_reproduces_it(cli: Cli) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    swept = "capture.sizes=choice([1,2,4],[1,4],[4],[2])"  # the last one serves no batch of 4
    bench = ["sweep.objective=bench.decode_us", "capture.max_size=4", "bench.repeats=1"]
    done = cli(*OPTUNA, *HERE, *bench, swept)
    assert done.code == 0, done.out + done.err
    found = values(done, Objective.DECODE_US)
    assert len(found) == 6
    least = min(found.values())
    assert 0 < least < math.inf
    results = OmegaConf.load(done.folder / "out" / "optimization_results.yaml")
    assert results.best_value == least
    best = done.folder / "out" / "best"
    assert f"--config-dir={best} preset=best" in done.out
    (job,) = [name for name, value in found.items() if value == least][:1]
    report = json.loads((done.folder / "out" / job / "report.json").read_text())
    again = cli(f"--config-dir={best}", "preset=best", "report=again.json")
    assert again.code == 0, again.out + again.err
    repeated = json.loads(Path("again.json").read_text())
    assert settings(repeated) == settings(report)
    assert repeated["graphs"]["sizes"] == report["graphs"]["sizes"]


@old_warnings
def test_optuna_goes_on_after_a_job_that_fails(cli: Cli) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sizes = "capture.sizes=choice([0],[1,2])"  # the first is refused in its job
    words = ["sweep.objective=memory", "bench.enabled=false", sizes]
    done = cli(*OPTUNA, *HERE, *words)
    assert done.code == 1
    table = json.loads((done.folder / "out" / "sweep.json").read_text())
    assert {job["status"] for job in table["jobs"]} == {"done", "failed"}
    assert table["num_jobs"] == 6
    assert "sizes:\n  - 1\n  - 2\n" in (done.folder / "out/best/preset/best.yaml").read_text()


def test_several_objectives_write_each_job_of_the_front(cli: Cli) -> None:
    words = ["sweep.objective=[memory,bench.mixed_us]", "capture.max_size=4", "bench.repeats=1"]
    done = cli("-m", *HERE, *words, "capture.sizes=[1,2,4],[4],[1,2]")
    assert done.code == 0, done.out + done.err
    memory, mixed = values(done, Objective.MEMORY), values(done, Objective.MIXED_US)
    assert mixed["2"] == math.inf
    points = {job: (memory[job], mixed[job]) for job in ("0", "1")}
    front = {
        job
        for job, (a, b) in points.items()
        if not any(c <= a and d <= b and (c, d) != (a, b) for c, d in points.values())
    }
    files = {path.name for path in (done.folder / "out/best/preset").iterdir()}
    assert files == {f"best_{job}.yaml" for job in front}


def test_step_times_are_the_mean_over_token_counts_that_all_have_a_timed_graph(cli: Cli) -> None:
    done = cli(*SMALL, "capture.sizes=[1,4]", "bench.repeats=1")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    report["config"]["capture"]["max_size"] = 4
    one, four = (row["step_us"] for row in sorted(report["bench"], key=lambda row: row["size"]))
    for objective in (Objective.DECODE_US, Objective.MIXED_US):
        mean = value_of(facts_of(report), objective)
        assert mean == pytest.approx((one + 3 * four) / 4)
    report["config"]["capture"]["max_size"] = 5
    assert value_of(facts_of(report), Objective.DECODE_US) == math.inf
    assert value_of(facts_of(report), Objective.START_S) == report["compile"]["seconds"]["total"]
    assert value_of(facts_of(report), Objective.MEMORY) == report["graphs"]["pool_bytes"]


DIRECTIONS = "hydra.sweeper.direction='[minimize,minimize]'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.objective=fast"], "sweep.objective: got 'fast'. Choices: bench.decode_us"),
        (["sweep.objective=[memory,memory]"], "each once"),
        (["sweep.objective=memory,start_s"], "write several as sweep.objective='[memory"),
        (["sweep.objective=bench.decode_us"], "capture.max_size: sweep.objective=bench.decode_us"),
        (
            ["sweep.objective=bench.decode_us", "capture.max_size=4,8"],
            "to the same in all jobs",
        ),
        (["sweep.objective=memory", "job=plan"], "job=plan has no such figures"),
        (
            ["sweep.objective=bench.mixed_us", "capture.max_size=4", "bench.enabled=false"],
            "bench.enabled: got false",
        ),
    ],
)
def test_an_objective_that_no_job_can_have_is_refused(
    cli: Cli, words: list[str], message: str
) -> None:
    done = cli("-m", *HERE, *words, "seed=1,2")
    assert done.code == 2
    assert message in done.err
    assert not done.files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "sweep.objective: hydra/sweeper=optuna needs one of bench.decode_us"),
        (["sweep.objective=[memory,start_s]"], f"set {DIRECTIONS}"),
        (
            ["sweep.objective=memory", "hydra.sweeper.direction=maximize"],
            "got ['maximize'] with 1 in sweep.objective",
        ),
    ],
)
def test_optuna_without_an_objective_to_minimise_is_refused(
    cli: Cli, words: list[str], message: str
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    done = cli(*OPTUNA, *HERE, *words, "capture.max_size=choice(2,4)")
    assert done.code == 2
    assert message in done.err
    assert not done.files
