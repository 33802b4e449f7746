"""Mixture of experts: the model against references, its boundaries, and who owns the group."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import rows
from model_helpers import make_backend, make_context
from torch import distributed, nn
from torch.nn import functional

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.check.timing import time_calls
from pcgsvc.check.verify import tolerance_of, verify
from pcgsvc.config import Config, Mode, ModelConfig, MoeBackend, MoeConfig, PartitionConfig
from pcgsvc.errors import ConfigError, PcgError
from pcgsvc.forward.samples import Samples
from pcgsvc.jobs.app import main
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.models.llama_dims import preset_dims
from pcgsvc.models.llama_moe import LlamaMoe, MoeDims, dims_of, initialize
from pcgsvc.ops import expert_choice
from pcgsvc.ops.context import use_context
from pcgsvc.ops.expert_choice import choose, following, recorded_choices
from pcgsvc.ops.expert_group import Place, command_line_group
from pcgsvc.ops.experts import moe_all_to_all, moe_experts
from pcgsvc.serve.generate import generate_ids

CPU = torch.device("cpu")
WORKER = Path(__file__).with_name("moe_worker.py")
TINY = [
    "model=llama_moe",
    "model.num_layers=2",
    "compiler=eager",
    "capture.sizes=[4,8]",
    "bench.enabled=false",
    "device=cpu",
]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def moe_config(**moe: Any) -> Config:
    return Config(model=ModelConfig(name="llama_moe", num_layers=2, moe=MoeConfig(**moe)))


def build(**moe: Any) -> Any:
    return build_model(moe_config(**moe), device=CPU, dtype=torch.float32)


def reference(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Compute the mixture row by row, in float64, from its description."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(len(x)):
        probabilities = logits[row].double().softmax(0)
        best = sorted(range(len(probabilities)), key=lambda e: -float(probabilities[e]))[:top_k]
        total = sum(float(probabilities[e]) for e in best)
        for expert in best:
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            made = down[expert].double() @ (functional.silu(gate) * up)
            out[row] += float(probabilities[expert]) / total * made
    return out.float()


def layer_tensors(experts: int = 6, seed: int = 0) -> list[torch.Tensor]:
    """Return x, router logits, gate_up and down of one layer, 9 rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(9, 8), (9, experts), (experts, 20, 8), (experts, 8, 10)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


# ---- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("op", [moe_experts, moe_all_to_all])
def test_the_op_equals_the_plain_mixture(group: None, op: Callable[..., None], top_k: int) -> None:
    x, logits, gate_up, down = layer_tensors()
    out = torch.full_like(x, float("nan"))
    with use_context(make_context(None, [4, 5])):
        op(x, logits, gate_up, down, out, top_k)
    torch.testing.assert_close(out, reference(x, logits, gate_up, down, top_k))


@pytest.mark.parametrize("op", [moe_experts, moe_all_to_all])
def test_padding_rows_are_not_routed_and_come_out_as_zero(
    group: None, op: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    routed: list[int] = []

    def counting(logits: torch.Tensor, top_k: int) -> torch.Tensor:
        routed.append(len(logits))
        return choose(logits, top_k)

    monkeypatch.setattr("pcgsvc.ops.experts.choose", counting)
    x, logits, gate_up, down = layer_tensors()
    wanted = reference(x[:5], logits[:5], gate_up, down, 2)
    x[5:], logits[5:] = float("nan"), float("inf")
    out = torch.full_like(x, float("nan"))
    with use_context(make_context(None, [5], padding=4)):
        op(x, logits, gate_up, down, out, 2)
    torch.testing.assert_close(out[:5], wanted)
    assert (out[5:] == 0).all()
    assert routed == [5]


def transformers_twin(module: LlamaMoe) -> Any:
    """Return transformers' Mixtral with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    d = module.dims
    config = transformers.MixtralConfig(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        intermediate_size=d.intermediate_size,
        num_hidden_layers=d.num_layers,
        num_attention_heads=d.num_heads,
        num_key_value_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        max_position_embeddings=d.max_position,
        rms_norm_eps=d.norm_eps,
        num_local_experts=module.moe.num_experts,
        num_experts_per_tok=module.moe.top_k,
        rope_parameters={"rope_type": "default", "rope_theta": d.rope_theta},
        sliding_window=None,
        attn_implementation="eager",
    )
    q, kv = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    ours = module.state_dict()
    state = {"model.embed_tokens.weight": ours["embed_tokens.weight"]}
    state |= {"model.norm.weight": ours["norm.weight"], "lm_head.weight": ours["lm_head.weight"]}
    for i in range(d.num_layers):
        own = {n.removeprefix(f"layers.{i}."): w for n, w in ours.items() if f"layers.{i}." in n}
        parts = dict(zip("qkv", own["qkv_proj.weight"].split([q, kv, kv]), strict=True))
        layer = {f"self_attn.{n}_proj.weight": w for n, w in parts.items()}
        layer |= {
            "self_attn.o_proj.weight": own["o_proj.weight"],
            "input_layernorm.weight": own["input_norm.weight"],
            "post_attention_layernorm.weight": own["post_norm.weight"],
            "mlp.gate.weight": own["router.weight"],
            "mlp.experts.gate_up_proj": own["experts.gate_up"],
            "mlp.experts.down_proj": own["experts.down"],
        }
        state |= {f"model.layers.{i}.{n}": w for n, w in layer.items()}
    twin = transformers.MixtralForCausalLM(config)
    twin.load_state_dict(state)
    return twin.eval()


@pytest.mark.slow
@torch.no_grad()
def test_logits_equal_mixtral_of_transformers_for_several_requests_in_one_step() -> None:
    bundle = build()
    twin = transformers_twin(bundle.module)
    ids = torch.randint(512, (24,), generator=torch.Generator().manual_seed(1))
    lengths = [5, 1, 18]
    positions = torch.cat([torch.arange(n) for n in lengths])
    with use_context(make_context(make_backend(bundle.attention), lengths)):
        logits = bundle.module(ids, positions)
    for ours, one in zip(logits.split(lengths), ids.split(lengths), strict=True):
        theirs = twin(one[None]).logits[0]
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@torch.no_grad()
def test_every_expert_counts_and_each_layer_has_its_own() -> None:
    module = build(top_k=8).module
    ids = torch.arange(6)
    backend = make_backend(module.dims.attention_spec())

    def logits() -> torch.Tensor:
        with use_context(make_context(backend, [6])):
            result: torch.Tensor = module(ids, ids)
        return result

    before = logits()
    for layer in module.layers:
        for expert in range(8):
            saved = layer.experts.down[expert].clone()
            layer.experts.down[expert] = 0
            assert (logits() - before).abs().max() > 1e-3
            layer.experts.down[expert] = saved
    assert torch.equal(logits(), before)


def test_the_model_is_the_same_however_many_processes_share_it() -> None:
    dims = preset_dims(ModelConfig(num_layers=1))
    whole = build().module.layers[0].experts
    parts = []
    for rank in range(2):
        moe = MoeDims(
            num_experts=8, top_k=2, backend=MoeBackend.ALL_TO_ALL, place=Place(rank=rank, world=2)
        )
        module = LlamaMoe(dims, moe, device=CPU, dtype=torch.float32)
        initialize(module, 0)
        parts.append(module)
    for name in ("gate_up", "down"):
        shares = [getattr(p.layers[0].experts, name) for p in parts]
        assert [len(s) for s in shares] == [4, 4]
        assert torch.equal(torch.cat(shares), getattr(whole, name))
    assert torch.equal(parts[0].lm_head.weight, parts[1].lm_head.weight)  # type: ignore[union-attr]


def test_the_large_preset_has_the_size_of_mixtral() -> None:
    config = Config(model=ModelConfig(name="llama_moe", preset="8x7b"))
    dims, moe = dims_of(config)
    module = LlamaMoe(dims, moe, device=torch.device("meta"), dtype=torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) == 46_702_792_704


# ---- boundaries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [m.value for m in Mode])
@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_every_mode_and_strategy_verifies_with_two_boundaries_per_layer(
    strategy: str,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    validate_report: Callable[[Any], None],
) -> None:
    report = run_job(
        [*TINY, f"mode={mode}", f"partition.strategy={strategy}", "cache.mode=off"],
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
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_inductor_regions_verify(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, f"mode={mode}", "compiler=inductor", "cache.mode=off"]
    report = run_job(words, tmp_path, monkeypatch)
    assert len(report["verify"]) == 2
    assert all(row["ok"] for row in report["verify"])
    assert report["compile"]["num_compiled"] == 4


def run_job(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the job of a command line, without Hydra's folders; return its report."""
    from pcgsvc.jobs.run import run_job as run

    patch.chdir(folder)
    return run(pcgsvc.load_config(words), folder / "report.json")


def test_verification_compares_arithmetic_where_routers_tie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(logits: torch.Tensor, top_k: int) -> torch.Tensor:
        """Choose by logits that differ in their last bits from run to run."""
        return choose(logits + 1e-6 * torch.randn(logits.shape, generator=generator), top_k)

    words = [*TINY, "mode=piecewise", "cache.mode=off", "model.moe.top_k=1"]
    with pcgsvc.load_runner(words) as runner:
        parts = runner.parts
        for layer in parts.module.layers:  # type: ignore[attr-defined]
            layer.router.weight[1::2] = layer.router.weight[::2]  # experts in pairs of equal logits
        monkeypatch.setattr("pcgsvc.ops.experts.choose", noisy)

        def errors() -> list[float]:
            samples = Samples(parts.workspace, parts.make_inputs, seed=1, query_len=1)
            return [row["max_rel_err"] for row in verify(runner.parts, samples, seed=0)]

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


# ---- the process group ---------------------------------------------------------------------------

ALL_TO_ALL = [*TINY, "model.moe.backend=all_to_all", "mode=piecewise"]


def test_without_a_group_a_library_build_says_who_makes_it() -> None:
    with pytest.raises(ConfigError, match=r"no process group\. Call torch\.distributed\.init_pro"):
        pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"])


@pytest.mark.slow
def test_experts_over_a_group_of_one_equal_local_ones_and_closing_leaves_the_group(
    group: None, validate_report: Callable[[Any], None]
) -> None:
    ids = torch.arange(7)
    with pcgsvc.load_runner([*TINY, "cache.mode=off", "mode=piecewise"]) as runner:
        wanted = runner(ids, ids)
    with pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"]) as runner:
        got, report = runner(ids, ids), runner.report
    torch.testing.assert_close(got, wanted)
    validate_report(report)
    assert report["partition"]["splitting_ops"][1] == {
        "name": "pcgsvc::moe_all_to_all",
        "count": 2,
        "reason": "model.moe.backend=all_to_all exchanges rows between processes, as the data "
        "asks for",
    }
    reasons = {p["reason"] for p in report["partition"]["pieces"] if p["kind"] == "boundary"}
    assert any(r.startswith("pcgsvc::moe_all_to_all: model.moe.backend=all_to_") for r in reasons)
    assert distributed.is_initialized()


def test_a_group_that_cannot_reach_the_device_or_share_the_experts_is_refused(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_backend", lambda: "nccl")
    with pytest.raises(ConfigError, match=r"backend 'nccl', which cannot exchange rows on cpu"):
        pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"])
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match=r"num_experts: got 8, which the 3 processes"):
        pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"])


def test_a_group_that_has_changed_since_the_build_is_noticed(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    x, logits, gate_up, down = layer_tensors()
    with (
        use_context(make_context(None, [9])),
        pytest.raises(PcgError, match=r"6 of 6 experts are here, but the group has 2 processes"),
    ):
        moe_all_to_all(x, logits, gate_up, down, torch.empty_like(x), 2)


def test_the_command_line_makes_a_group_for_its_jobs_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = moe_config(backend=MoeBackend.ALL_TO_ALL)
    config.device = "cpu"
    with command_line_group(config):
        assert distributed.get_world_size() == 1
        with command_line_group(config):  # one that exists is not ours
            pass
        report = run_job([*ALL_TO_ALL, "cache.mode=off"], tmp_path, monkeypatch)
        assert [row["ok"] for row in report["verify"]] == [True, True]
    assert not distributed.is_initialized()
    with command_line_group(moe_config()):
        assert not distributed.is_initialized()


def test_a_sweep_is_refused_where_several_processes_would_have_to_share_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *ALL_TO_ALL, "seed=0,1"]) == 2
    assert "a sweep cannot be spread over 2 processes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_each_job_of_a_sweep_has_a_group_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "pcgsvc", "-m", *ALL_TO_ALL, "capture.sizes=[4],[8]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(path.read_text()) for path in tmp_path.rglob("report.json")]
    assert [[row["ok"] for row in report["verify"]] for report in reports] == [[True], [True]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(arguments: list[str], count: int = 2) -> list[str]:
    """Run one process per rank, as torchrun would; return their standard outputs."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ
            | place
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * count, "\n".join(err for _, err in done)
    return [out for out, _ in done]


@pytest.mark.slow
def test_two_processes_with_different_batches_each_get_what_one_process_gets() -> None:
    first, second = (json.loads(out.splitlines()[-1]) for out in launch([str(WORKER)]))
    assert (first["rank"], second["rank"]) == (0, 1)
    for found in (first, second):
        assert found["experts"] == 4
        assert found["hits"] == {"piecewise:8": 1, "piecewise:4": 1}
        assert max(found["errors"]) < 1e-5


@pytest.mark.slow
def test_the_command_line_under_torchrun_writes_one_report_per_process(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    words = [*ALL_TO_ALL, f"report={path}", f"hydra.run.dir={tmp_path / 'out'}"]
    words[words.index("bench.enabled=false")] = "bench.repeats=3"
    first, second = launch(["-m", "pcgsvc", *words])
    assert "entries equal plain execution" in first
    assert "entries equal plain execution" not in second
    for name in ("r.json", "r.rank1.json"):
        report = json.loads((tmp_path / name).read_text())
        assert [row["ok"] for row in report["verify"]] == [True, True]


def test_timing_in_lockstep_makes_as_many_calls_as_asked_for_however_slow() -> None:
    made: list[int] = []
    for limit, wanted in ((0.0, 1 + 3 + 3), (float("inf"), 1 + 6 + 6)):
        made.clear()
        time_calls([lambda: made.append(1)], lambda: None, 6, limit)
        assert len(made) == wanted


def test_the_noise_run_of_half_precision_is_made_by_every_process_or_none() -> None:
    wanted = [torch.ones(3, dtype=torch.bfloat16)]
    made: list[int] = []

    def again() -> list[torch.Tensor]:
        made.append(1)
        return wanted

    for error in (0.0, 1.0):
        made.clear()
        tolerance_of(wanted, error, again, always=True)
        assert len(made) == 1
    made.clear()
    limit = tolerance_of(wanted, 0.0, again, always=False)
    assert not made
    assert tolerance_of(wanted, 0.0, again, always=True) == limit


# ---- near ties -----------------------------------------------------------------------------------


def test_a_second_run_follows_near_ties_of_the_first_and_nothing_else() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.9001], [1.0, 0.5, 0.2]])
    other = torch.tensor([[1.0, 0.9001, 0.9], [1.0, 0.2, 0.5]])
    with recorded_choices() as choices:
        first = choose(logits, 2)
    assert choose(other, 2).tolist() == [[0, 1], [0, 2]]
    with following(choices, 1e-3):
        again = choose(other, 2)
    assert again[0].tolist() == first[0].tolist() == [0, 2]
    assert again[1].tolist() == [0, 2]
    assert expert_choice.choose(other, 2).tolist() == [[0, 1], [0, 2]]
