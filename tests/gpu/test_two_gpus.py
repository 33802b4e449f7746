"""Two GPUs: what gloo on a CPU cannot show. Run with `-m multigpu --require-gpus 2`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ranks_helpers import launch, outcomes

pytestmark = pytest.mark.multigpu

WORKER = str(Path(__file__).parents[1] / "parallel_worker.py")
REGION, BOUNDARY = "parallel.collectives=region", "parallel.collectives=boundary"
CALLS = 1000
TIMEOUT_S = 20


def ranks(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what two ranks print, and leave it where `-rA` shows it."""
    found = [json.loads(out.splitlines()[-1]) for out in launch([WORKER, json.dumps(asked)])]
    print(json.dumps(found))  # noqa: T201 - figures for docs/results
    return found


def test_8b_on_two_gpus_gives_the_logits_of_one_in_every_mode_and_ends_cleanly(
    tmp_path: Path,
) -> None:
    words = ["model=llama", "model.preset=8b", "attention=triton", "attention.max_model_len=1024"]
    cache = os.environ.get("GPU2_CACHE", tmp_path)  # for the benchmark, which comes afterwards
    words += ["capture.sizes=[1,4,8,24]", f"cache.dir={cache}"]
    cases = [
        ["mode=piecewise", BOUNDARY, "compiler=eager"],
        ["mode=piecewise", REGION],
        ["mode=full", REGION],
        ["mode=full_and_piecewise", REGION],
    ]
    found = ranks({"words": words, "cases": cases, "calls": [0, 0, 0, CALLS]})
    for of_rank in found:
        for case, asked in zip(of_rank["cases"], cases, strict=True):
            assert case["mode"] == asked[0].partition("=")[2]
            assert case["error"] <= 5e-2, case
            assert case["wrong_tokens"] == 0, case
            assert case["clear_tokens"] > 0, case
            assert case["repeats"], case
        assert sum(of_rank["cases"][-1]["hits"].values()) == CALLS + 8
        assert [case["start"] for case in of_rank["cases"]] == ["cold", "cold", "warm", "warm"]
        assert of_rank["end_s"] < 10


def test_experts_over_two_gpus_equal_local_ones(tmp_path: Path) -> None:
    words = ["model=llama_moe", "model.num_layers=2", "dtype=float32", "attention=triton"]
    words += ["capture.sizes=[1,4,8,24]", f"cache.dir={tmp_path}", "mode=piecewise"]
    for of_rank in ranks({"words": words, "cases": [["model.moe.backend=all_to_all"], []]}):
        for case in of_rank["cases"]:
            assert case["error"] < 1e-3, case
            assert case["wrong_tokens"] == 0, case


def test_a_rank_that_dies_during_capture_ends_the_other(tmp_path: Path) -> None:
    words = ["model=llama", "model.num_layers=2", "mode=full", REGION, f"cache.dir={tmp_path}"]
    words += ["compiler=eager", f"parallel.timeout_s={TIMEOUT_S}", "capture.sizes=[1,4,8,24]"]
    began = time.perf_counter()
    first, last = outcomes([WORKER, json.dumps({"words": words, "cases": [], "dies": True})])
    assert last.code == -9
    assert first.code not in (0, -9), first.err
    assert "rank 1 is gone" in first.err, first.err
    assert time.perf_counter() - began < 60 + TIMEOUT_S
