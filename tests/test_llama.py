"""Our Llama against transformers', and what the catalog refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import make_backend, make_context

from pcgsvc.config import Config, ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.models.catalog import build_model, families, validate_model
from pcgsvc.models.dims import stated_dims
from pcgsvc.models.llama import Llama
from pcgsvc.models.llama_dims import PRESETS, LlamaDims, preset_dims
from pcgsvc.models.two_regions import TwoRegions
from pcgsvc.models.weights import initialize
from pcgsvc.ops.context import use_context
from pcgsvc.ops.paged import PagedAttention

CPU = torch.device("cpu")


def build(**model: Any) -> Any:
    return build_model(Config(model=ModelConfig(**model)), device=CPU, dtype=torch.float32)


def transformers_twin(module: Llama) -> Any:
    """Return transformers' Llama with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    d = module.dims
    config = transformers.LlamaConfig(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        intermediate_size=d.intermediate_size,
        num_hidden_layers=d.num_layers,
        num_attention_heads=d.num_heads,
        num_key_value_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        max_position_embeddings=d.max_position,
        rms_norm_eps=d.norm_eps,
        tie_word_embeddings=d.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": d.rope_theta},
        attn_implementation="eager",
    )
    q, kv = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    ours = module.state_dict()
    state = {"model.embed_tokens.weight": ours["embed_tokens.weight"]}
    state["model.norm.weight"] = ours["norm.weight"]
    head = "embed_tokens.weight" if d.tie_embeddings else "lm_head.weight"
    state["lm_head.weight"] = ours[head]
    for i in range(d.num_layers):
        own = {n.split(".")[2]: w for n, w in ours.items() if n.startswith(f"layers.{i}.")}
        parts = dict(zip("qkv", own["qkv_proj"].split([q, kv, kv]), strict=True))
        gate, up = own["gate_up_proj"].chunk(2)
        layer = {f"self_attn.{n}_proj": w for n, w in parts.items()}
        layer |= {"self_attn.o_proj": own["o_proj"], "mlp.down_proj": own["down_proj"]}
        layer |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "input_layernorm": own["input_norm"]}
        layer |= {"post_attention_layernorm": own["post_norm"]}
        state |= {f"model.layers.{i}.{n}.weight": w for n, w in layer.items()}
    twin = transformers.LlamaForCausalLM(config)
    twin.load_state_dict(state)
    return twin.eval()


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_logits_equal_transformers_for_several_requests_in_one_step(tied: bool) -> None:
    bundle = build(
        num_layers=2, num_heads=6, num_kv_heads=2, hidden_size=48, head_dim=10, tie_embeddings=tied
    )
    twin = transformers_twin(bundle.module)
    ids = torch.randint(512, (24,), generator=torch.Generator().manual_seed(1))
    lengths = [5, 1, 18]
    positions = torch.cat([torch.arange(n) for n in lengths])
    backend = make_backend(bundle.attention)
    with use_context(make_context(backend, lengths)):
        logits = bundle.module(ids, positions)
    for ours, one in zip(logits.split(lengths), ids.split(lengths), strict=True):
        theirs = twin(one[None]).logits[0]
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@torch.no_grad()
def test_decoding_token_by_token_equals_transformers_on_the_whole_text() -> None:
    bundle = build(num_layers=2)
    ids = torch.randint(512, (21,), generator=torch.Generator().manual_seed(2))
    theirs = transformers_twin(bundle.module)(ids[None]).logits[0]
    backend = make_backend(bundle.attention, kind=PagedAttention)
    with use_context(make_context(backend, [14], padding=2)):
        first = bundle.module(
            torch.cat([ids[:14], torch.zeros(2, dtype=torch.int64)]),
            torch.cat([torch.arange(14), torch.zeros(2, dtype=torch.int64)]),
        )
    rows = [first[:14]]
    for position in range(14, 21):
        with use_context(make_context(backend, [1], past=[position])):
            rows.append(bundle.module(ids[position : position + 1], torch.tensor([position])))
    assert (torch.cat(rows) - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@torch.no_grad()
def test_bfloat16_stays_near_transformers_in_bfloat16() -> None:
    config = Config(model=ModelConfig(num_layers=2))
    bundle = build_model(config, device=CPU, dtype=torch.bfloat16)
    twin = transformers_twin(bundle.module).to(torch.bfloat16)
    ids = torch.randint(512, (16,), generator=torch.Generator().manual_seed(3))
    backend = make_backend(bundle.attention, dtype=torch.bfloat16)
    with use_context(make_context(backend, [16])):
        logits = bundle.module(ids, torch.arange(16)).float()
    theirs = twin(ids[None]).logits[0].float()
    assert (logits - theirs).abs().max() <= 0.03 * theirs.abs().max()


@torch.no_grad()
def test_forward_traces_whole_and_all_middle_stretches_are_one_structure() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    bundle = build()
    traced = torch.compile(bundle.module, fullgraph=True, backend=keep)
    for rows in (7, 11):
        inputs = bundle.make_inputs(rows, torch.Generator().manual_seed(0))
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 0)
        with use_context(make_context(make_backend(bundle.attention), [rows])):
            assert torch.equal(traced(**inputs), bundle.module(**inputs))
    (graph,) = graphs  # the second size brought no second trace
    stretches: list[list[str]] = [[]]
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is torch.ops.pcgsvc.attention:
            assert node.args[-1] == len(stretches) - 1  # the layer number
            stretches.append([])
        else:
            constants = [a for a in node.args if not isinstance(a, torch.fx.Node)]
            stretches[-1].append(f"{node.target} {[c for c in constants if type(c) is not tuple]}")
    assert len(stretches) == 5
    assert stretches[1] == stretches[2] == stretches[3]
    assert len(stretches[1]) > 10


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    modules = [build(num_layers=1).module for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second = (dict(m.named_parameters()) for m in modules)
    assert all(torch.equal(first[name], second[name]) for name in first)
    initialize(modules[1], seed=1)
    assert not any(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def test_every_layer_of_a_random_model_changes_the_logits() -> None:
    bundle = build()
    inputs = bundle.make_inputs(9, torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        with use_context(make_context(make_backend(bundle.attention), [9])):
            logits = bundle.module(**inputs)
        assert isinstance(logits, torch.Tensor)
        return logits

    before = run()
    assert 0.5 < before.std() < 2
    for layer in bundle.module.layers:
        for part in (layer.o_proj, layer.down_proj):
            kept = part.weight.clone()
            part.weight.zero_()
            assert (run() - before).abs().max() > 0.1
            part.weight.copy_(kept)


def test_module_is_frozen_in_eval_mode_and_its_rotary_table_is_not_saved() -> None:
    module = build(num_layers=1).module
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    assert not {"cos", "sin"} & module.state_dict().keys()


def test_inputs_are_one_request_from_position_0() -> None:
    inputs = build(num_layers=1).make_inputs(256, torch.Generator().manual_seed(0))
    assert torch.equal(inputs["positions"], torch.arange(256))
    assert inputs["input_ids"].min() >= 0
    assert inputs["input_ids"].max() < 512


def test_explicit_dimensions_override_the_preset() -> None:
    dims = preset_dims(ModelConfig(preset="160m", hidden_size=96, rope_theta=5e5))
    assert (dims.hidden_size, dims.head_dim, dims.rope_theta) == (96, 8, 5e5)
    assert dims.intermediate_size == PRESETS["160m"].intermediate_size
    assert preset_dims(ModelConfig(head_dim=20)).head_dim == 20


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "lama"}, r"model: got 'lama'; did you mean 'llama'\? Choices: llama, smollm2"),
        ({"name": "zzz"}, r"model: got 'zzz'\. Choices: "),
        ({"preset": "1bb"}, r"model\.preset: got '1bb'; did you mean '1b'\? Choices: tiny, 160m"),
        ({"num_kv_heads": 3}, r"model\.num_kv_heads: got 3.*num_heads=4\. Choices: 1, 2, 4\."),
        ({"num_layers": 0}, r"model\.num_layers: got 0, more than 0"),
        ({"norm_eps": -1.0}, r"model\.norm_eps: got -1\.0"),
        ({"head_dim": 15}, r"model\.head_dim: got 15.*even"),
        ({"hidden_size": 65}, r"model\.num_heads: got 4.*model\.hidden_size=65"),
        ({"num_heads": 0}, r"model\.num_heads: got 0"),
        ({"name": "two_regions", "num_layers": 4}, r"num_layers: got 4.*It reads: model\.hidden"),
        ({"name": "two_regions", "preset": "1b"}, r"model\.preset: got '1b'.*does not read"),
        ({"name": "two_regions", "hidden_size": 0}, r"model\.hidden_size: got 0"),
    ],
)
def test_wrong_settings_are_named_with_what_there_is(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_model(Config(model=ModelConfig(**model)))


def test_every_family_builds_a_bundle_or_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PCGSVC_MODELS_DIR", str(tmp_path))
    for name in families():
        config = Config(model=ModelConfig(name=name))
        if name in ("smollm2", "minilm"):
            with pytest.raises(ConfigError, match=rf"Run scripts/fetch-{name}"):
                validate_model(config)
            continue
        if name == "module":
            with pytest.raises(ConfigError, match=r"model\.target: got null"):
                validate_model(config)
            continue
        if name == "hf":
            with pytest.raises(ConfigError, match=r"model\.config: neither is set.*tiny-qwen3"):
                validate_model(config)
            continue
        validate_model(config)
        bundle = build_model(config, device=CPU, dtype=torch.float32)
        assert bundle.make_inputs(3, torch.Generator()).keys() == bundle.dynamic_dims.keys()


def test_dimensions_that_are_no_numbers_are_refused_with_the_checkpoint() -> None:
    values = {f: getattr(PRESETS["tiny"], f) for f in LlamaDims.__dataclass_fields__}
    with pytest.raises(ConfigError, match=r"'a\.gguf' states dimensions that cannot be"):
        stated_dims(LlamaDims, Path("a.gguf"), **values | {"num_layers": "4"})


@torch.no_grad()
def test_two_regions_attends_within_each_request_and_writes_true_rows_only() -> None:
    lengths, width = [3, 1, 4], 32
    x = torch.randn(10, width, generator=torch.Generator().manual_seed(0))
    with use_context(make_context(None, lengths, padding=2)):
        y = TwoRegions()(x)
    h = torch.tanh(x[:8] / 2)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(p[None], p[None], p[None], is_causal=True)
        for p in h.split(lengths)
    ]
    b = torch.cat(parts, dim=1)[0]
    torch.testing.assert_close(y[:8], b + torch.sigmoid(b), rtol=1e-5, atol=1e-6)
    bridge = torch.full((10, width), 7.0)
    with use_context(make_context(None, lengths, padding=2)):
        torch.ops.pcgsvc.two_regions_attend(torch.tanh(x / 2), bridge)
    assert (bridge[8:] == 7).all()
