"""Mixture of experts: the model against references.

Its boundaries and settings: test_moe_boundaries.py; the process group: test_moe_group.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_helpers import make_backend, make_context
from moe_helpers import CPU, build, layer_tensors, reference

from pcgsvc.config import Config, ModelConfig, MoeBackend
from pcgsvc.models.llama_dims import preset_dims
from pcgsvc.models.llama_moe import LlamaMoe, MoeDims, dims_of, initialize
from pcgsvc.ops import expert_choice
from pcgsvc.ops.context import use_context
from pcgsvc.ops.expert_choice import choose, following, recorded_choices
from pcgsvc.ops.expert_group import Place
from pcgsvc.ops.experts import moe_all_to_all, moe_experts

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
        initialize(module, 0, Place())
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
