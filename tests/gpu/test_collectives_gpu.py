"""Collectives of NCCL in graphs, on two GPUs. Run with `-m multigpu --require-gpus 2`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from ranks_helpers import launch, outcomes

pytestmark = pytest.mark.multigpu

WORKER = str(Path(__file__).parents[1] / "collectives_worker.py")


def test_every_form_is_right_in_boundaries_and_captured_and_compiled_once(tmp_path: Path) -> None:
    forms = ["functional:inductor", "in_place", "parallelize"]
    outs = launch([WORKER, "builds", str(tmp_path), *forms])
    for rows in zip(*(json.loads(out.splitlines()[-1]) for out in outs), strict=True):
        for row in rows:
            assert max(row["errors"]) < 1e-4, row
            assert sum(row["hits"].values()) == 12, row
            assert not row["not_stored"], row
        cold = "capture.self_check=true" in rows[0]["words"]
        assert {row["start"] for row in rows} == {"cold" if cold else "warm"}
        assert sum(row["compiled"] for row in rows) == (rows[0]["regions"] if cold else 0)


def test_a_group_that_is_destroyed_first_closes_the_runner_and_ends(tmp_path: Path) -> None:
    for out in launch([WORKER, "destroys", str(tmp_path)]):
        found = json.loads(out.splitlines()[-1])
        assert found["seconds"] < 20
        assert "the runner is closed" in found["told"]


@pytest.mark.parametrize("when", ["capture", "call"])
def test_a_rank_that_is_killed_ends_the_other_with_a_message(when: str) -> None:
    first, last = outcomes([WORKER, "ends", "-", when], timeout_s=90)
    assert last.code == -signal.SIGKILL
    assert first.code == 1, first.err
    assert "rank 1 is gone: no sign of life" in first.err, first.err
