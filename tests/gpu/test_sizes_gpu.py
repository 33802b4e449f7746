"""Chosen sizes and replayed traffic with real CUDA graphs. Run with `-m gpu --require-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

import pcgsvc
from pcgsvc.events import Silent
from pcgsvc.jobs.sizes import replay
from pcgsvc.pipeline import build_from_config

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("attention", ["paged", "triton", "varlen"])
def test_chosen_sizes_give_the_predicted_padding_on_cuda(tmp_path: Path, attention: str) -> None:
    path = tmp_path / "t.csv"
    lines = ["3,6,true", "6,9,true", "9,2,true", "20,2,false", "37,3,false", "90,1,false"]
    path.write_text("\n".join(["num_tokens,count,uniform", *lines, ""]))
    overrides = [f"device={DEVICE}", f"attention={attention}", "compiler=eager", "sizing.count=3"]
    overrides += [f"capture.sizes=auto:{path}", f"traffic={path}", "model.num_layers=1"]
    config = pcgsvc.load_config(overrides)
    with build_from_config(config) as runner:
        used = replay(runner, config, Silent())
        chosen = runner.report["chosen_sizes"]["recommended"]
    assert used["padding_share"] == used["expected_padding_share"] == chosen["padding_share"]
    assert sum(used["hits"].values()) == used["num_calls"] == 23
    assert used["fallbacks"] == used["refused"] == []
