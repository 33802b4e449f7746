"""Plans on a GPU: the pieces of a run, and about the pool that it takes."""

from __future__ import annotations

from typing import Any

import pytest

import pcgsvc
from pcgsvc.config.compose import compose
from pcgsvc.events import Silent
from pcgsvc.jobs.plan.planner import plan
from pcgsvc.jobs.plan.section import plan_report

pytestmark = pytest.mark.gpu

SMALL = ["model.num_layers=4", "capture.sizes=[1,8,64,256]", "cache.mode=off", "device=cuda"]


def both(*overrides: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return a plan's report, a build's, and the pool that the plan expects."""
    words = [*SMALL, "bench.enabled=false", *overrides]
    done = plan(compose(["job=plan", *words]), Silent())
    (pool,) = [i.num_bytes for i in done.memory.items if i.name == "graph pool"]
    with pcgsvc.load_runner(words) as runner:
        return plan_report(done), runner.report, pool


@pytest.mark.parametrize(
    "overrides",
    [
        ["compiler=eager", "mode=piecewise"],
        ["compiler=eager", "mode=full"],
        ["compiler=inductor", "mode=piecewise", "model.preset=160m"],
        ["compiler=eager", "mode=piecewise", "partition.strategy=breakable"],
    ],
    ids=" ".join,
)
def test_a_plan_is_what_a_run_does(overrides: list[str]) -> None:
    planned, real, pool = both(*overrides)
    assert planned["partition"] == real["partition"]
    assert pool == pytest.approx(real["graphs"]["pool_bytes"], rel=0.35)
