"""`model=hf` on the GPU: CUDA graphs over transformers' families, with the Triton backend."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from hf_helpers import forced_logits, shipped_config, their_logits, theirs

import pcgsvc

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TEXT = list(range(5, 45))


@pytest.mark.parametrize("family", ["tiny-gemma2", "tiny-qwen2", "tiny-mixtral", "tiny-gpt2"])
def test_logits_equal_transformers_on_the_same_gpu(family: str) -> None:
    words = ["model=hf", f"model.config={family}", "attention=triton", "compiler=eager"]
    words += ["device=cuda", "dtype=float32", "capture.sizes=[1,16]", "cache.mode=off"]
    with pcgsvc.load_runner(words) as runner:
        (got,) = forced_logits(runner, [TEXT], [9])
        assert set(runner.stats()["hits"]) == {"piecewise:16", "full:1"}
        model = theirs(shipped_config(family), runner.model.module).cuda()
        want = their_logits(model, TEXT)[8:]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


# Inductor tells of a choice of its own while it lowers the gate's softmax.
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled")
def test_experts_in_bfloat16_are_captured_as_one_grouped_product() -> None:
    words = ["model=hf", "model.config=tiny-qwen3-moe", "attention=triton", "compiler=inductor"]
    words += ["device=cuda", "dtype=bfloat16", "capture.sizes=[1,16]", "cache.mode=off"]
    with pcgsvc.load_runner(words) as runner:  # self-check and reference check included
        assert runner.model.module.model.config._experts_implementation == "grouped_mm"
        (got,) = forced_logits(runner, [TEXT], [9])
        assert set(runner.stats()["hits"]) == {"piecewise:16", "full:1"}
    assert torch.isfinite(got).all()


def test_a_model_without_experts_runs_in_bfloat16() -> None:
    words = ["model=hf", "model.config=tiny-llama", "attention=triton", "compiler=eager"]
    words += ["device=cuda", "dtype=bfloat16", "capture.sizes=[1,16]", "cache.mode=off"]
    with pcgsvc.load_runner(words) as runner:  # self-check and reference check included
        (got,) = forced_logits(runner, [TEXT], [9])
    assert torch.isfinite(got).all()
