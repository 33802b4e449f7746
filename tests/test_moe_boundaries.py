"""Mixture of experts: boundaries in every mode and strategy, warm starts, and wrong settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run_job
from core_helpers import rows, verified
from generate_helpers import generate_ids
from moe_helpers import TINY, moe_config
from torch import nn

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.config import Config, Mode, ModelConfig, MoeConfig, PartitionConfig
from pcgsvc.errors import ConfigError, PcgError
from pcgsvc.jobs.app import main
from pcgsvc.models.catalog import validate_model
from pcgsvc.ops.expert_choice import choose

# ---- boundaries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [m.value for m in Mode])
@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_every_mode_and_strategy_verifies_with_two_boundaries_per_layer(
    strategy: str,
    mode: str,
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    validate_report: Callable[[Any], None],
) -> None:
    report = run_job(
        [*TINY, f"mode={mode}", f"partition.strategy={strategy}", f"cache.dir={programs}"],
        tmp_path,
        monkeypatch,
    )
    validate_report(report)
    assert report["partition"]["splitting_ops"] == [
        {"name": "pcgsvc::attention", "count": 2},
        {
            "name": "pcgsvc::moe_experts",
            "count": 2,
            "reason": "which rows go to which expert depends on the data",
        },
    ]
    assert report["partition"]["num_boundaries"] == 4
    assert report["partition"]["num_regions"] == 5
    if strategy == "fx":
        assert report["partition"]["num_unique_pieces"] == 4
    resolved = {"none": "none"}.get(mode, "piecewise")
    assert report["mode"]["resolved"] == resolved
    assert bool(report["mode"]["reasons"]) == (mode not in ("none", "piecewise"))
    assert all("pcgsvc::moe_experts" in reason for reason in report["mode"]["reasons"])
    assert len(report["verify"]) == (0 if mode == "none" else 2)
    assert all(row["ok"] and row["max_rel_err"] == 0 for row in report["verify"])


@pytest.mark.slow
def test_inductor_regions_verify_piecewise_and_in_full_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, compiled in (("piecewise", 3), ("full", 0)):  # compiled once, captured twice
        words = [*TINY, f"mode={mode}", "compiler=inductor", f"cache.dir={tmp_path / 'cache'}"]
        words += ["model.num_layers=1"]
        report = run_job(words, tmp_path, monkeypatch)
        assert [row["ok"] for row in report["verify"]] == [True, True], mode
        assert report["compile"]["num_compiled"] == compiled, mode


def test_verification_compares_arithmetic_where_routers_tie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(logits: torch.Tensor, top_k: int) -> torch.Tensor:
        """Choose by logits that differ in their last bits from run to run."""
        return choose(logits + 1e-6 * torch.randn(logits.shape, generator=generator), top_k)

    words = [*TINY, "mode=piecewise", "cache.mode=off", "model.moe.top_k=1"]
    with pcgsvc.load_runner(words) as runner:
        for layer in runner.model.module.layers:  # type: ignore[attr-defined]
            layer.router.weight[1::2] = layer.router.weight[::2]  # experts in pairs of equal logits
        monkeypatch.setattr("pcgsvc.ops.experts.choose", noisy)

        def errors() -> list[float]:
            return [row["max_rel_err"] for row in verified(runner)]

        assert max(errors()) == 0
        monkeypatch.setattr("pcgsvc.check.verify.following", lambda *_: contextlib.nullcontext())
        assert max(errors()) > 0.01


@pytest.mark.slow
def test_a_new_start_is_warm_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, "mode=piecewise", f"cache.dir={tmp_path / 'cache'}"]
    ids = torch.arange(5)
    with pcgsvc.load_runner(words) as runner:
        assert runner.report["compile"]["start"] == "cold"
        first, partition = runner(ids, ids), runner.report["partition"]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a warm start traces or compiles")

    for name in ("dynamo_trace", "inductor_compile", "import_compilers"):
        monkeypatch.setattr(torch_private, name, refuse)
    with pcgsvc.load_runner(words) as runner:
        compiled = runner.report["compile"]
        assert (compiled["start"], compiled["num_traces"], compiled["num_compiled"]) == (
            "warm",
            0,
            0,
        )
        assert runner.report["partition"] == partition
        assert torch.equal(runner(ids, ids), first)


@pytest.mark.slow
def test_other_experts_are_another_program(tmp_path: Path) -> None:
    cache = f"cache.dir={tmp_path / 'cache'}"
    words = [*TINY, "mode=none", cache]
    starts = []
    for extra in ([], ["model.moe.num_experts=4"], ["model.moe.top_k=1"], []):
        with pcgsvc.load_runner([*words, *extra]) as runner:
            starts.append(runner.report["compile"]["start"])
    assert starts == ["cold", "cold", "cold", "warm"]


@pytest.mark.slow
def test_generation_goes_through_both_boundaries_step_by_step() -> None:
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    with pcgsvc.load_runner([*TINY, "mode=piecewise", "cache.mode=off"]) as runner:
        together = generate_ids(runner, prompts, 4)
        for prompt, new in zip(prompts, together, strict=True):
            text = list(prompt)
            for token in new:  # recomputed from the start, one request at a time
                ids = torch.tensor(text)
                assert int(runner(ids, torch.arange(len(text)))[-1].argmax()) == token
                text.append(token)


def test_a_list_of_boundaries_without_the_experts_captures_nothing_and_says_so() -> None:
    words = [*TINY, "mode=piecewise", "cache.mode=off"]
    words += ["partition.splitting_ops=[pcgsvc::attention]"]
    with pcgsvc.load_runner(words) as runner:
        mode = runner.report["mode"]
    assert mode["resolved"] == "none"
    assert "['pcgsvc::moe_experts'] would lie inside the graphs" in mode["reasons"][0]


# ---- a user's own op -----------------------------------------------------------------------------


@torch.library.custom_op("moe_user::dispatch", mutates_args=("out",))
def user_dispatch(x: torch.Tensor, scores: torch.Tensor, out: torch.Tensor) -> None:
    """Send each true row to one of two experts, by data; registered with torch alone."""
    out.zero_()
    true = pcgsvc.current_context().num_tokens
    left = scores[:true].argmax(-1).nonzero().flatten()  # a size that depends on data
    out[:true] = x[:true] * 2
    out[left] = x[left] * 3


class UserMoe(nn.Module):
    """Region, the user's own dispatch, region."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        out = torch.empty_like(h)
        torch.ops.moe_user.dispatch(h, self.router(h), out)
        return out + 1


def test_a_users_own_dispatch_is_a_boundary_once_it_is_named() -> None:
    from core_helpers import build as build_runner
    from core_helpers import make_config

    torch.manual_seed(0)
    module = UserMoe().eval()
    config = make_config()
    config.partition = PartitionConfig(extra_splitting_ops=["moe_user::dispatch"])
    x = rows(6)
    with pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        partition = runner.report["partition"]
        assert [p["kind"] for p in partition["pieces"]] == ["region", "boundary", "region"]
        assert partition["splitting_ops"] == [
            {
                "name": "moe_user::dispatch",
                "count": 1,
                "reason": "named in partition.extra_splitting_ops",
            }
        ]
        got = runner(x)
        assert runner.stats()["hits"] == {"piecewise:8": 1}
    h = torch.tanh(x)
    left = module.router(h).argmax(-1, keepdim=True).bool()
    torch.testing.assert_close(got, torch.where(left, h * 3, h * 2) + 1)
    assert left.any()
    assert not left.all()
    with pytest.raises(PcgError):  # not named, it would lie inside a graph
        build_runner(module)


@pytest.mark.slow
def test_an_extra_op_joins_the_default_boundaries_of_the_model() -> None:
    words = [*TINY, "cache.mode=off", "mode=piecewise"]
    words += ["partition.extra_splitting_ops=[aten::silu]"]
    with pytest.raises(ConfigError, match=r"not in the traced graph: \['aten::silu'\]"):
        pcgsvc.load_runner(words)  # it is inside the experts' op
    words[-1] = "partition.extra_splitting_ops=[aten::embedding]"
    with pcgsvc.load_runner(words) as runner:
        counts = {o["name"]: o["count"] for o in runner.report["partition"]["splitting_ops"]}
    assert counts == {"aten::embedding": 1, "pcgsvc::attention": 2, "pcgsvc::moe_experts": 2}


# ---- wrong settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"top_k": 9}, r"model\.moe\.top_k: got 9, but there are model\.moe\.num_experts=8"),
        ({"top_k": 0}, r"model\.moe\.top_k: got 0, at least 1"),
        ({"num_experts": 0}, r"model\.moe\.num_experts: got 0, at least 1"),
        ({"num_experts": 1}, r"model\.moe\.top_k: got 2"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(moe: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_model(moe_config(**moe))


def test_an_unknown_backend_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"model\.moe\.backend: got 'al'.*local, all_to_all"):
        pcgsvc.load_config(["model=llama_moe", "model.moe.backend=al"])


def test_other_families_refuse_the_mixture_s_settings_and_it_refuses_weights() -> None:
    model = ModelConfig(moe=MoeConfig(top_k=1))
    with pytest.raises(ConfigError, match=r"model\.moe\.top_k: got 1, but model=llama does not"):
        validate_model(Config(model=model))
    model = ModelConfig(name="llama_moe", weights="/w.safetensors")
    with pytest.raises(ConfigError, match=r"model\.weights: .* model=llama_moe does not read it"):
        validate_model(Config(model=model))


def test_strict_refuses_full_graphs_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "mode=full", "strict=true"]) == 2
    assert "model.moe.backend=local supports no full graphs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prompt_is_refused_since_there_is_no_tokenizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "prompt=hello"]) == 2
    assert (
        "model=llama_moe without a checkpoint of text has no tokenizer" in capsys.readouterr().err
    )
