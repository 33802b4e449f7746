"""`parallel.tensor`: what each rank holds, and that together they compute what one process does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_helpers import launch
from torch import distributed

import pcgsvc
from pcgsvc.config import Config, Job, ModelConfig, ParallelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.events import Silent
from pcgsvc.jobs.plan.planner import plan
from pcgsvc.jobs.plan.section import plan_report
from pcgsvc.models.catalog import validate_model
from pcgsvc.models.checkpoint import open_checkpoint
from pcgsvc.models.llama import Llama
from pcgsvc.models.llama_dims import LlamaDims, preset_dims
from pcgsvc.models.llama_moe import LlamaMoe, MoeDims
from pcgsvc.models.llama_moe import initialize as initialize_moe
from pcgsvc.models.sharding import cuts_of, shard_dims
from pcgsvc.models.weights import initialize, load_weights
from pcgsvc.ops.expert_group import Place, check_launch, require_group

WORKER = str(Path(__file__).with_name("parallel_worker.py"))
CPU = torch.device("cpu")
TINY = ["model=llama", "model.num_layers=2", "compiler=eager", "device=cpu"]
FULL = ["mode=full", "parallel.collectives=region"]


def ranks(
    words: list[str], cases: list[list[str]], calls: Sequence[int] = ()
) -> list[list[dict[str, Any]]]:
    """Return what two ranks found of each case, by rank."""
    asked = {"words": [*words, "capture.sizes=[4,8,24]"], "cases": cases, "calls": list(calls)}
    outs = launch([WORKER, json.dumps(asked)])
    return [json.loads(out.splitlines()[-1])["cases"] for out in outs]


def assert_equal_to_one_process(found: list[list[dict[str, Any]]]) -> None:
    for case in (case for of_rank in found for case in of_rank):
        assert case["error"] < 1e-4, case
        assert case["wrong_tokens"] == 0, case
        assert case["clear_tokens"] > 15, case
        assert case["repeats"], case
        assert set(case["hits"]) == {f"{case['mode']}:{size}" for size in (4, 8, 24)}, case


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does_and_compile_once(tmp_path: Path) -> None:
    words = [*TINY, f"cache.dir={tmp_path}"]
    found = ranks(words, [["mode=piecewise"], FULL, FULL], calls=[0, 10])
    assert_equal_to_one_process(found)
    first, second = found
    assert [(case["mode"], case["boundaries"]) for case in first] == [
        ("piecewise", 2 + 4 + 1),
        ("full", 2),
        ("full", 2),
    ]
    compiled_by = [[case["compiled"] for case in of_rank] for of_rank in found]
    compiled = [sum(cases) for cases in zip(*compiled_by, strict=True)]
    assert compiled == [6, 2, 0]  # of all ranks together: each piece once, then all is warm
    assert [c["start"] for c in first] == [c["start"] for c in second] == ["cold", "cold", "warm"]
    assert first[0]["parallel"] == {
        "ranks": 2,
        "embeddings": "replicated",
        "head": "split",
        "kv_heads": "split",
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "cases"),
    [
        (["model=hf", "model.config=tiny-qwen3"], [["mode=piecewise"], FULL, FULL]),
        (["model=hf", "model.config=tiny-phi3"], [["mode=piecewise"]]),
        (["model=llama_moe", "model.num_layers=2"], [["mode=piecewise"]]),
        (["model=llama", "model.num_layers=2", "model.num_kv_heads=1"], [["mode=piecewise"]]),
        (["model=llama", "model.num_layers=2"], [["partition.strategy=breakable"]]),
        (["model=llama", "model.num_layers=2", "compiler=inductor"], [["mode=piecewise"], FULL]),
    ],
)
def test_other_models_and_ways_on_two_ranks(
    words: list[str], cases: list[list[str]], tmp_path: Path
) -> None:
    base = ["compiler=eager", "device=cpu", f"cache.dir={tmp_path}"]
    assert_equal_to_one_process(ranks([*base, *words], cases))


@pytest.mark.exhaustive
def test_shared_experts_and_shared_heads_go_together(tmp_path: Path) -> None:
    words = ["model=llama_moe", "model.num_layers=2", "compiler=eager", "device=cpu"]
    both = ["model.moe.backend=all_to_all", "mode=piecewise", f"cache.dir={tmp_path}"]
    assert_equal_to_one_process(ranks(words, [both]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [["model=llama"], ["model=hf", "model.config=tiny-qwen3"]])
def test_torchrun_builds_verifies_and_starts_warm(model: list[str], tmp_path: Path) -> None:
    words = [*model, "parallel.tensor=2", "compiler=eager", "capture.sizes=[1,4]"]
    words += [f"report={tmp_path / 'r.json'}", f"cache.dir={tmp_path / 'cache'}"]
    words += ["bench.enabled=false", f"hydra.run.dir={tmp_path / 'out'}", *FULL]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    for start in ("cold", "warm"):
        launch([*torchrun, "-m", "pcgsvc", *words], 1)
        for name in ("r.json", "r.rank1.json"):
            report = json.loads((tmp_path / name).read_text())
            assert all(row["ok"] for row in report["verify"])
            assert report["compile"]["start"] == start


# ---- what a rank holds ---------------------------------------------------------------------------


def test_the_ranks_together_hold_the_model_of_one_process() -> None:
    dims = preset_dims(ModelConfig(num_layers=1, num_kv_heads=2))
    whole = Llama(dims, device=CPU, dtype=torch.float32)
    initialize(whole, 3)
    parts = []
    for rank in range(4):  # twice as many as KV heads
        place = Place(rank, 4)
        part = Llama(dims, device=CPU, dtype=torch.float32, ranks=4)
        initialize(part, 3, cuts_of(dims, place))
        parts.append(part)
    layers = [part.layers[0] for part in parts]
    want = whole.layers[0]
    q, k, v = want.qkv_proj.weight.split([64, 32, 32])
    assert torch.equal(torch.cat([x.qkv_proj.weight[:16] for x in layers]), q)
    for first, wanted in ((16, k), (32, v)):
        held = [x.qkv_proj.weight[first : first + 16] for x in layers]
        assert torch.equal(held[0], held[1])
        assert torch.equal(torch.cat(held[::2]), wanted)
    assert torch.equal(torch.cat([x.o_proj.weight for x in layers], 1), want.o_proj.weight)
    gate, up = want.gate_up_proj.weight.chunk(2)
    assert torch.equal(torch.cat([x.gate_up_proj.weight[:32] for x in layers]), gate)
    assert torch.equal(torch.cat([x.gate_up_proj.weight[32:] for x in layers]), up)
    assert torch.equal(torch.cat([x.down_proj.weight for x in layers], 1), want.down_proj.weight)
    assert torch.equal(torch.cat([p.lm_head.weight for p in parts]), whole.lm_head.weight)
    assert all(torch.equal(p.embed_tokens.weight, whole.embed_tokens.weight) for p in parts)
    assert shard_dims(dims, 4).attention_spec().num_kv_heads == 1


def test_local_experts_are_split_by_features_and_shared_ones_by_number() -> None:
    dims = preset_dims(ModelConfig(num_layers=1))
    held: dict[Place, list[Any]] = {}
    for experts in (Place(), Place(0, 2), Place(1, 2)):
        for tensor in (Place(), Place(0, 2), Place(1, 2)):
            if (experts.rank, experts.world) in ((0, 1), (tensor.rank, tensor.world)):
                moe = MoeDims(num_experts=4, top_k=2, place=experts)
                made = LlamaMoe(dims, moe, device=CPU, dtype=torch.float32, ranks=tensor.world)
                initialize_moe(made, 0, tensor)
                held.setdefault(experts, []).append(made.layers[0].experts)
    whole, left, right = held[Place()]
    assert torch.equal(torch.cat([left.down, right.down], 2), whole.down)
    halves = [x.gate_up.chunk(2, 1) for x in (left, right)]
    for at, wanted in enumerate(whole.gate_up.chunk(2, 1)):
        assert torch.equal(torch.cat([half[at] for half in halves], 1), wanted)


class Stretches:
    """A tensor of a file, which notes how much of it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.read = tensor, 0

    def get_slice(self, name: str) -> Stretches:
        """Return what reads it when indexed, as a safetensors handle does."""
        return self

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a part of it."""
        self.read += self.tensor[index].numel()
        return self.tensor[index]


def test_a_rank_reads_no_more_of_a_checkpoint_than_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = preset_dims(ModelConfig(num_layers=1))
    folder = save_llama(dims, tmp_path)
    checkpoint = open_checkpoint(folder)
    source: Any = checkpoint.read.__self__  # type: ignore[attr-defined]
    tensors = {name: source.read(name)[:] for name in source.shapes}
    files = {name: Stretches(tensor) for name, tensor in tensors.items()}
    monkeypatch.setattr(source, "_handles", files)
    part = Llama(dims, device=CPU, dtype=torch.float32, ranks=2)
    load_weights(part, checkpoint, cuts_of(dims, Place(1, 2)))
    read = {name: file.read for name, file in files.items()}
    shared = [name for name in tensors if "proj" in name or "lm_head" in name]
    assert len(shared) == 8
    assert all(2 * read[name] == tensors[name].numel() for name in shared)
    assert all(read[name] == tensors[name].numel() for name in tensors.keys() - shared)
    q, o = (tensors[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qo")
    assert torch.equal(part.layers[0].qkv_proj.weight[:32], q[32:])
    assert torch.equal(part.layers[0].o_proj.weight, o[:, 32:])


def save_llama(dims: LlamaDims, folder: Path) -> Path:
    """Write a Llama with random weights as transformers would."""
    safetensors = pytest.importorskip("safetensors.torch")
    config = {
        "model_type": "llama",
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "vocab_size": dims.vocab_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "max_position_embeddings": dims.max_position,
        "rms_norm_eps": dims.norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    from pcgsvc.models.checkpoint import _expected_shapes

    tensors = {
        name: torch.randn(shape, generator=generator)
        for name, shape in _expected_shapes(dims).items()
    }
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ({}, 3, r"got 3, which 4 query heads .* cannot be shared out to\. Choices: 1, 2, 4\."),
        ({"intermediate_size": 127}, 2, "does not divide model.intermediate_size=127"),
        ({"name": "llama_moe"}, 3, "cannot be shared out to"),
        ({"name": "encoder"}, 2, "model=encoder does not read it. Models that do: llama, "),
        ({"name": "hf", "config": "tiny-qwen3"}, 3, "num_key_value_heads.* Choices: 1, 2, 4"),
        ({"name": "hf", "config": "tiny-gpt2"}, 2, "gpt2.* declares no tp_plan"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_before_anything_is_built(
    model: dict[str, Any], ranks: int, message: str
) -> None:
    config = Config(model=ModelConfig(**model), parallel=ParallelConfig(tensor=ranks))
    with pytest.raises(ConfigError, match=message):
        validate_model(config)


def test_a_style_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    plan = {**transformers.Qwen3Config.base_model_tp_plan, "layers.*.mlp.up_proj": "ring"}
    monkeypatch.setattr(transformers.Qwen3Config, "base_model_tp_plan", plan)
    model = ModelConfig(name="hf", config="tiny-qwen3")
    with pytest.raises(ConfigError, match=r"says 'ring' of model\.layers\.0\.mlp\.up_proj, a lin"):
        validate_model(Config(model=model, parallel=ParallelConfig(tensor=2)))


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(parallel=ParallelConfig(tensor=2), device="cpu")
    with pytest.raises(ConfigError, match=r"this is one\. Run: torchrun --nproc-per-node 2 -m"):
        check_launch(config)
    place = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun has started 4.*or set parallel\.tensor=4"):
        check_launch(config)
    with pytest.raises(ConfigError, match=r"got 1, .* torchrun has started 4"):
        check_launch(Config(device="cpu"))
    check_launch(Config(parallel=ParallelConfig(tensor=4), device="cpu"))


@pytest.mark.parametrize(("world", "devices"), [(2, 0), (2, 1), (4, 3)])
def test_several_processes_need_a_device_each(
    monkeypatch: pytest.MonkeyPatch, world: int, devices: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    place = {"RANK": "0", "WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}"}
    for name, value in {**place, "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    # Where torch has no CUDA, a job that only looks is as far as the device lets one come.
    config = Config(job=Job.DOCTOR, parallel=ParallelConfig(tensor=world), device="cuda")
    with pytest.raises(ConfigError, match=f"which has {devices} CUDA devices; each process needs"):
        check_launch(config)


def test_whether_one_process_has_its_device_is_said_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_launch(Config(job=Job.DOCTOR, device="cuda"))


def test_a_group_of_another_size_or_none_is_refused(
    request: pytest.FixtureRequest,
) -> None:
    config = Config(parallel=ParallelConfig(tensor=2))
    with pytest.raises(ConfigError, match=r"parallel\.tensor=2: there is no process group"):
        pcgsvc.load_runner(["model=llama", "parallel.tensor=2", "cache.mode=off", "device=cpu"])
    request.getfixturevalue("group")
    assert distributed.get_world_size() == 1
    with pytest.raises(ConfigError, match="the process group has 1 processes; initialise it with"):
        require_group(config, CPU)


# ---- plan ----------------------------------------------------------------------------------------


def plan_of(*words: str) -> dict[str, Any]:
    return plan_report(plan(pcgsvc.load_config(["job=plan", "model=llama", *words]), Silent()))


def test_a_plan_for_many_ranks_says_memory_of_one_and_what_they_send(
    validate_report: Callable[[Any], None],
) -> None:
    words = ["device=cpu", "dtype=bfloat16", "capture.sizes=[1,8]"]
    one, report = plan_of(*words)["plan"], plan_of(*words, "parallel.tensor=2")
    validate_report(report)
    assert report["parallel"]["ranks"] == 2
    two = report["plan"]
    assert two["weights_in_memory"] is False
    assert one["collectives"] == []
    bytes_of = {"1": 64 * 2, "8": 8 * 64 * 2}
    assert two["collectives"] == [
        {"op": "pcgsvc::all_reduce", "count": 8, "bytes": bytes_of},
        {"op": "pcgsvc::all_gather_into", "count": 1, "bytes": {"1": 512 * 2, "8": 8 * 512 * 2}},
    ]
    cache = [
        next(i["bytes"] for i in p["memory"]["items"] if i["name"] == "KV cache")
        for p in (one, two)
    ]
    assert cache[0] == 2 * cache[1]


@pytest.mark.exhaustive
def test_a_70b_model_on_8_ranks_is_planned_within_90_seconds() -> None:
    report = plan_of("model.preset=70b", "parallel.tensor=8", "device=cuda")
    assert report["ready"]["seconds"] < 90
    weights = next(i for i in report["plan"]["memory"]["items"] if i["name"] == "weights")
    whole, table = 70_553_706_496, 128256 * 8192
    assert weights["bytes"] / 2 == pytest.approx((whole - table) / 8 + table, rel=1e-3)
    assert [(c["op"], c["count"]) for c in report["plan"]["collectives"]] == [
        ("pcgsvc::all_reduce", 160),
        ("pcgsvc::all_gather_into", 1),
    ]
