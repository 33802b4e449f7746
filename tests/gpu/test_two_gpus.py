"""Two GPUs: what gloo on a CPU cannot show. Run with `-m multigpu --require-gpus 2`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks_helpers import launch

pytestmark = pytest.mark.multigpu

WORKER = str(Path(__file__).parents[1] / "parallel_worker.py")
REGION, BOUNDARY = "parallel.collectives=region", "parallel.collectives=boundary"
LLAMA = ["model=llama", "model.preset=8b", "attention=triton", "attention.max_model_len=1024"]
CALLS = 1000


def ranks(
    words: list[str], cases: list[list[str]], calls: list[int], folder: Path
) -> list[dict[str, Any]]:
    """Return what two ranks found of each case, all right, and leave it where `-rA` shows it."""
    words = [*words, "capture.sizes=[1,4,8,24]", f"cache.dir={folder}"]
    outs = launch([WORKER, json.dumps({"words": words, "cases": cases, "calls": calls})])
    found = [json.loads(out.splitlines()[-1]) for out in outs]
    print(json.dumps(found))  # noqa: T201 - figures for docs/results
    for of_rank in found:
        assert of_rank["end_s"] < 10
        for case in of_rank["cases"]:
            assert case["error"] <= 5e-2, case
            assert case["wrong_tokens"] == 0, case
            assert case["clear_tokens"] > 0, case
            assert case["repeats"], case
    return found


def test_8b_on_two_gpus_gives_the_logits_of_one_and_ends_cleanly(tmp_path: Path) -> None:
    words = [*LLAMA, "compiler=eager", "capture.self_check=false"]
    for of_rank in ranks(words, [["mode=full", REGION]], [], tmp_path):
        (case,) = of_rank["cases"]
        assert (case["mode"], case["boundaries"]) == ("full", 32)


def test_every_mode_with_captured_collectives_through_a_thousand_calls(tmp_path: Path) -> None:
    cases = [[f"mode={mode}", REGION] for mode in ("piecewise", "full", "full_and_piecewise")]
    for of_rank in ranks([*LLAMA, "model.num_layers=4"], cases, [0, 0, CALLS], tmp_path):
        assert [case["mode"] for case in of_rank["cases"]] == [c[0][5:] for c in cases]
        assert [case["start"] for case in of_rank["cases"]] == ["cold", "warm", "warm"]
        assert sum(of_rank["cases"][-1]["hits"].values()) == CALLS + 8


def test_collectives_between_graphs(tmp_path: Path) -> None:
    words = [*LLAMA, "model.num_layers=4", "compiler=eager"]
    for of_rank in ranks(words, [["mode=piecewise", BOUNDARY]], [100], tmp_path):
        (case,) = of_rank["cases"]
        assert (case["mode"], case["boundaries"]) == ("piecewise", 3 * 4 + 1)


def test_experts_over_two_gpus_equal_local_ones(tmp_path: Path) -> None:
    words = ["model=llama_moe", "model.num_layers=2", "dtype=float32", "attention=triton"]
    words += ["compiler=eager", "mode=piecewise"]
    for of_rank in ranks(words, [["model.moe.backend=all_to_all"], []], [], tmp_path):
        assert all(case["error"] < 1e-3 for case in of_rank["cases"])
