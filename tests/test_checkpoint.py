"""Checkpoints written by other libraries and read by ours, and ways in which they can be wrong."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import make_backend, make_context

from pcgsvc.config import Config, ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.models import checkpoint as checkpoint_module
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.models.checkpoint import open_checkpoint
from pcgsvc.models.safetensors_llama import llama3_factors
from pcgsvc.ops.context import use_context

gguf = pytest.importorskip("gguf")
safetensors_torch = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
IDS = torch.randint(96, (40,), generator=torch.Generator().manual_seed(0))


def make_reference(*, tied: bool = False, rope: dict[str, Any] | None = None) -> Any:
    """Return a small transformers model with random weights, norms included."""
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mean, std = (1.0, 0.2) if parameter.ndim == 1 else (0.0, parameter.shape[-1] ** -0.5)
        parameter.normal_(mean, std, generator=generator)
    return model


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {
        name: tensor.contiguous().clone()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def write_safetensors(folder: Path, model: Any, **config: Any) -> Path:
    """Write model.safetensors and config.json as transformers would; `config` replaces entries."""
    path = folder / "model.safetensors"
    safetensors_torch.save_file(tensors_of(model), path)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | config))
    return path


def write_gguf(
    path: Path,
    model: Any,
    *,
    arch: str = "llama",
    kind: Any = None,
    drop: str = "",
    add: dict[str, torch.Tensor] | None = None,
    numbers: dict[str, int] | None = None,
) -> Path:
    """Write a GGUF file with the reference writer, q and k reordered as llama.cpp does."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_array("general.languages", ["en", "de"])
    writer.add_array("test.numbers", [1, 2, 3])
    for key, value in (numbers or {}).items():
        writer.add_uint32(key, value)
    own = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {own.get_name(n, (".weight",)): (n, t) for n, t in tensors_of(model).items()}
    tensors |= {name: (name, tensor) for name, tensor in (add or {}).items()}
    for name, (standard, tensor) in tensors.items():
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", 2)):
            if part in standard:
                tensor = tensor.view(heads, 2, -1, 64).transpose(1, 2).reshape(tensor.shape)
        if name == drop:
            continue
        values = tensor.numpy()
        if kind is not None and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build(weights: Path, **model: Any) -> ModelBundle:
    config = Config(model=ModelConfig(weights=str(weights), **model))
    validate_model(config)
    return build_model(config, device=CPU, dtype=torch.float32)


@torch.no_grad()
def error_against(bundle: ModelBundle, reference: Any) -> float:
    """Return max |ours - theirs| / max |theirs| of the logits of one text."""
    assert bundle.attention is not None
    with use_context(make_context(make_backend(bundle.attention), [len(IDS)])):
        logits = bundle.module(IDS, torch.arange(len(IDS)))
    theirs = reference(IDS[None]).logits[0]
    return float((logits - theirs).abs().max() / theirs.abs().max())


# ---- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", [None, LLAMA3])
def test_safetensors_give_the_logits_of_transformers(
    tmp_path: Path, tied: bool, rope: dict[str, Any] | None
) -> None:
    reference = make_reference(tied=tied, rope=rope)
    path = write_safetensors(tmp_path, reference)
    assert error_against(build(path), reference) <= 1e-5
    assert error_against(build(tmp_path), reference) <= 1e-5  # the directory


def test_llama3_scaling_matters_and_is_read_from_old_config_entries_too(tmp_path: Path) -> None:
    reference = make_reference(rope=LLAMA3)
    old = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": LLAMA3}
    assert error_against(build(write_safetensors(tmp_path, reference, **old)), reference) <= 1e-5
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert error_against(build(write_safetensors(tmp_path, reference, **plain)), reference) > 1e-3


def test_sharded_safetensors_give_the_logits_of_transformers(tmp_path: Path) -> None:
    reference = make_reference()
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert error_against(build(tmp_path), reference) <= 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_gives_the_logits_of_transformers(tmp_path: Path, tied: bool) -> None:
    reference = make_reference(tied=tied)
    bundle = build(write_gguf(tmp_path / "m.gguf", reference))
    assert error_against(bundle, reference) <= 1e-5
    assert bundle.tokenizer is None


def test_gguf_rotary_factors_are_llama3_scaling(tmp_path: Path) -> None:
    reference = make_reference(rope=LLAMA3)
    factors = llama3_factors(10000.0, 32, 8.0, 1.0, 4.0, 64.0)
    assert min(factors) == 1
    assert math.isclose(max(factors), 8)
    path = tmp_path / "m.gguf"
    write_gguf(path, reference, add={"rope_freqs.weight": torch.tensor(factors)})
    assert error_against(build(path), reference) <= 1e-5


@pytest.mark.parametrize(("kind", "bound"), [("F16", 2e-3), ("Q8_0", 5e-2), ("Q4_1", 0.5)])
def test_quantised_gguf_equals_its_dequantised_tensors(
    tmp_path: Path, kind: str, bound: float
) -> None:
    reference = make_reference()
    kind = gguf.GGMLQuantizationType[kind]
    bundle = build(write_gguf(tmp_path / "m.gguf", reference, kind=kind))
    assert 0 < error_against(bundle, reference) <= bound
    for parameter in reference.parameters():
        if parameter.ndim == 2:
            blocks = gguf.quants.quantize(parameter.numpy(), kind)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy()))
    assert error_against(bundle, reference) <= 1e-5


def test_gguf_header_equals_what_the_reference_reader_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_reference())
    theirs = gguf.GGUFReader(path)
    ours = checkpoint_module.open_checkpoint(path).metadata
    fields = {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    assert dict(ours) == fields


# ---- what is refused -----------------------------------------------------------------------------


def refuse(weights: Path, *words: str, **model: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_model(Config(model=ModelConfig(weights=str(weights), **model)))
    message = str(caught.value)
    assert message.startswith("model.")
    for word in (*words, str(weights.parent)):
        assert word in message


def test_missing_file_and_wrong_suffix_are_named(tmp_path: Path) -> None:
    refuse(Path("/nowhere.gguf"), "model.weights: '/nowhere.gguf' does not exist")
    (tmp_path / "m.bin").touch()
    refuse(tmp_path / "m.bin", "'.bin'", ".gguf, .safetensors")
    (tmp_path / "d.gguf").mkdir()
    refuse(tmp_path / "d.gguf", "is a directory")
    refuse(tmp_path / "d.gguf" / "..", "config.json", "does not exist")


def test_other_architectures_are_named(tmp_path: Path) -> None:
    reference = make_reference()
    path = write_gguf(tmp_path / "m.gguf", reference, arch="qwen2")
    refuse(path, "architecture 'qwen2'", "'llama'")
    refuse(write_safetensors(tmp_path, reference, model_type="gemma"), "architecture 'gemma'")


def test_llamas_that_ours_is_not_are_refused(tmp_path: Path) -> None:
    reference = make_reference()
    path = tmp_path / "m.gguf"
    refuse(write_gguf(path, reference, numbers={"llama.expert_count": 8}), "expert_count=8")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    for entry, word in (
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": yarn}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "model.num_kv_heads: got 3"),
        ({"num_hidden_layers": "2"}, "model.num_layers: got '2', a whole number"),
        ({"head_dim": None, "hidden_size": "64"}, "wrong kind"),
    ):
        refuse(write_safetensors(tmp_path, reference, **entry), word)


def test_missing_and_surplus_tensors_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    reference = make_reference()
    path = tmp_path / "m.gguf"
    drop = "blk.1.ffn_down.weight"
    refuse(write_gguf(path, reference, drop=drop), f"lacks 1 tensors: {drop}")
    extra = {"blk.0.attn_q.bias": torch.zeros(64)}
    refuse(write_gguf(path, reference, add=extra), "has surplus 1 tensors: blk.0.attn_q.bias")
    file = write_safetensors(tmp_path, reference, num_hidden_layers=1)
    refuse(file, "has surplus 9 tensors: model.layers.1.")
    refuse(write_safetensors(tmp_path, reference, num_hidden_layers=3), "lacks 9 tensors")


def test_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, make_reference(), intermediate_size=80)
    refuse(path, "mlp.gate_proj.weight in the shape [96, 64]", "[80, 64]")


def test_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, make_reference(), tie_word_embeddings=True)
    refuse(path, "tied", "lm_head.weight that differs")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_truncated_files_are_refused_wherever_they_end(tmp_path: Path, share: float) -> None:
    reference = make_reference()
    for path in (
        write_gguf(tmp_path / "m.gguf", reference),
        write_safetensors(tmp_path, reference),
    ):
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])
        word = "truncated or damaged" if share or path.suffix != ".gguf" else "is no GGUF file"
        refuse(path, word, path.name)


def test_damaged_gguf_header_is_refused_or_still_complete(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_reference())
    content = bytearray(path.read_bytes())
    offsets = range(24, 400, 5)
    refused = 0
    for offset in offsets:
        damaged = bytearray(content)
        damaged[offset : offset + 4] = b"\xff\xff\xff\xff"
        path.write_bytes(damaged)
        with contextlib.suppress(ConfigError):  # and nothing else
            open_checkpoint(path)
            continue
        refused += 1
    assert refused > 0.9 * len(offsets)  # the others change a number, such as the context length
    content[4:8] = (3).to_bytes(4, "big")
    path.write_bytes(content)
    refuse(path, "little-endian")


def test_dimensions_that_contradict_the_checkpoint_name_both(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_reference())
    refuse(path, "model.num_layers: got 3", "has 2", num_layers=3)
    refuse(path, "model.tie_embeddings: got True", "has False", tie_embeddings=True)
    refuse(path, "model.preset: got '1b'", preset="1b")
    build(path, num_layers=2, norm_eps=1e-5, rope_theta=10000.0, head_dim=32)


@pytest.mark.parametrize("package", ["gguf", "safetensors"])
def test_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    reference = make_reference()
    gguf_path = write_gguf(tmp_path / "m.gguf", reference)
    path = gguf_path if package == "gguf" else write_safetensors(tmp_path, reference)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"'{package}'.*pip install 'pcgsvc\[smollm2\]'"):
        open_checkpoint(path)
