"""`model=hf`: what cannot be run is refused by name before it is built, or caught when it is."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from hf_helpers import (
    bundle_of,
    shipped_config,
    toy_config,
    write_config,
)

import pcgsvc
from pcgsvc.config import Config, ModelConfig
from pcgsvc.errors import CaptureError, ConfigError, TraceError, VerifyError
from pcgsvc.jobs.app import main
from pcgsvc.models.catalog import validate_model

pytestmark = pytest.mark.slow


def validate(**model: Any) -> None:
    validate_model(Config(model=ModelConfig(name="hf", **model)))


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": (
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "GptOssAttention of layer 0 asks for attention sinks",
    ),
    "llama4_text": (
        {"head_dim": 8, "num_local_experts": 2},
        "layers of the kind chunked_attention",
    ),
    "mamba": ({}, r"recurrent: .* \(layers of the kind linear_attention\)"),
    "qwen3_next": ({"num_experts": 2}, r"recurrent: .* \(layers of the kind linear_attention\)"),
    "rwkv": ({"max_position_embeddings": None}, r"recurrent: .* \(all layers\)"),
    "xlstm": ({"max_position_embeddings": None, "head_dim": 8}, r"recurrent: .* \(all layers\)"),
    "bart": ({}, "encoder with a decoder, and cross attention"),
    "bert": ({"is_decoder": True, "add_cross_attention": True}, "it has cross attention"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "gpt_neo": (
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
        "attention functions of its own",
    ),
    "bloom": ({"n_layer": 2, "n_head": 2, "max_position_embeddings": None}, "ALiBi"),
    "mpt": ({"n_layers": 2, "n_heads": 2, "max_position_embeddings": None}, "ALiBi"),
    "cpmant": ({"max_position_embeddings": None}, "attention code of its own"),
    # Their forwards fail on the meta device, for other reasons than their attention.
    "megatron-bert": ({"is_decoder": True}, "attention code of its own"),
    "xlm": ({"n_layers": 2, "n_heads": 2, "emb_dim": 16}, "attention code of its own"),
    "doge": ({}, "DogeAttention of layer 0 gets a mask that is not"),
    "gemma4_text": ({"head_dim": 8}, "attention layers differ in head_dim"),
    "diffllama": ({}, "layers that attend twice"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_families_that_need_more_than_we_have_are_refused_by_name(
    kind: str, tmp_path: Path
) -> None:
    changes, message = REFUSED[kind]
    path = write_config(tmp_path, {"model_type": kind, **SMALL, **changes})
    with pytest.raises(ConfigError, match=message) as caught:
        validate(config=str(path))
    assert f"({kind}) cannot be run" in str(caught.value)


LLAMA4 = {
    "model_type": "llama4_text",
    **SMALL,
    "intermediate_size_mlp": 16,
    "head_dim": 8,
    "num_local_experts": 2,
    "attention_chunk_size": None,
    "no_rope_layers": [1, 0],
}


def test_llama4_runs_where_no_query_is_scaled_by_its_row(tmp_path: Path) -> None:
    path = write_config(tmp_path, {**LLAMA4, "floor_scale": 8192})  # no sequence here is as long
    with pytest.raises(ConfigError, match=r"by the row of a step .*attn_temperature_tuning"):
        validate(config=str(path))
    for change in ({"attn_temperature_tuning": False}, {"no_rope_layers": [1, 1]}):
        bundle_of(write_config(tmp_path, {**LLAMA4, "floor_scale": 4, **change}))


def test_queries_scaled_by_positions_are_compared_beyond_the_floor_of_their_scale(
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.5,
    }
    bundle_of(
        write_config(tmp_path, {"model_type": "ministral3", **SMALL, "rope_parameters": rope})
    )


TOY: dict[str, str] = {
    "sinks": "asks for attention sinks",
    "unknown": "'temperature_of_the_day', which pcgsvc does not know",
    "bias": "a mask that is not as transformers' mask functions made it",
    "prefix": "the mask of ToyAttention of layer 0 is neither causal nor a sliding window",
    "bidirectional": "is not causal",
    "scales": r"differ in scale \(0\.1, 0\.2\)",
    "no_attention": "never calls transformers' attention interface",
}


@pytest.mark.parametrize("fault", TOY)
def test_whatever_a_model_asks_of_attention_is_seen_without_weights(
    fault: str, tmp_path: Path
) -> None:
    path = toy_config(tmp_path, fault)
    with pytest.raises(ConfigError, match=TOY[fault]):
        validate(config=str(path))


def test_a_mask_that_no_layer_gets_is_not_looked_at(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    # use_sliding_window is false by default: transformers makes a mask of a window of none
    path = write_config(tmp_path, {"model_type": "qwen2_moe", **SMALL, **experts})
    spec = bundle_of(path).attention
    assert spec is not None
    assert spec.sliding_windows is None


def test_the_toy_without_faults_and_with_narrow_values_runs(tmp_path: Path) -> None:
    assert bundle_of(toy_config(tmp_path, "none")).attention is not None
    assert bundle_of(toy_config(tmp_path, "latent")).attention is not None


@pytest.mark.parametrize("fault", ["positions", "rows"])
def test_faults_outside_attention_are_caught_by_comparing_with_transformers(
    fault: str, tmp_path: Path
) -> None:
    path = toy_config(tmp_path, fault)
    validate(config=str(path))
    with pytest.raises(VerifyError, match=r"model\.config: .*logits differ by .*reference_check"):
        bundle_of(path)
    bundle_of(path, reference_check=False)


def test_a_forward_on_which_transformers_itself_fails_is_refused(tmp_path: Path) -> None:
    path = toy_config(tmp_path, "eager")
    validate(config=str(path))
    with pytest.raises(ConfigError) as caught:
        bundle_of(path)
    message = str(caught.value)
    assert message.startswith(f"model.config: '{path}' (pcgsvc_toy) cannot be run: transformers' ")
    assert "eager attention, fails" in message
    assert "RuntimeError: no attention today" in message
    assert "model.reference_check=false" in message
    bundle_of(path, reference_check=False)


def test_a_forward_that_branches_on_data_is_refused_with_its_line_and_the_ways_out(
    tmp_path: Path,
) -> None:
    path = toy_config(tmp_path, "branch")  # on the meta device it cannot be watched: later, then
    words = ["model=hf", f"model.config={path}", "compiler=eager", "capture.sizes=[4]"]
    with pytest.raises(TraceError) as caught:
        pcgsvc.load_runner(words)
    message = str(caught.value)
    assert "hf_helpers.py:" in message
    assert "in forward" in message
    assert "ata-dependent" in message
    assert "splitting_op" in message
    assert "partition.strategy=breakable" in message
    with pytest.raises(CaptureError, match=r"aptur"):
        pcgsvc.load_runner([*words, "partition.strategy=breakable"])


def test_a_refusal_is_exit_code_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    path = toy_config(tmp_path, "sinks")
    assert main(["model=hf", f"model.config={path}", f"hydra.run.dir={out}"]) == 2
    assert "attention sinks" in capsys.readouterr().err
    assert not out.exists()


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, r"neither is set.*tiny-qwen3"),
        ({"path": "/nowhere", "config": "tiny-llama"}, "both are set"),
        ({"config": "tiny-lama"}, r"got 'tiny-lama'; did you mean 'tiny-llama'\? Choices: tiny-"),
        ({"path": "/nowhere"}, r"^model\.path: '/nowhere' does not exist.*Nothing is fetched"),
        ({"path": "/nowhere.gguf"}, r"does not exist"),
        ({"config": "tiny-llama", "hidden_size": 8}, r"model\.hidden_size.*does not read it"),
    ],
)
def test_wrong_settings_say_what_there_is(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(**model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config_0\.json' cannot be read: JSONDecodeError"),
        ("[]", "is no JSON object"),
        ("{}", "states no model_type"),
        ('{"model_type": "qwen33"}', r"'qwen33', which transformers 5.* did you mean 'qwen3"),
        (
            '{"model_type": "llama33", "auto_map": {}}',
            r"asks for code of its own \(auto_map\), which is not run, and .* type 'llama33'",
        ),
        ('{"model_type": "llama", "hidden_size": "wide"}', "is no config of 'llama'"),
        ('{"model_type": "vit"}', "states no max_position|no causal language model"),
        (
            json.dumps({**shipped_config("tiny-llama"), "quantization_config": {"bits": 4}}),
            "its weights are quantised",
        ),
    ],
)
def test_broken_configs_say_what_is_wrong(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config_0.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        validate(config=str(path))


def test_a_directory_without_a_config_or_with_pickles_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a \.gguf file nor a directory"):
        validate(path=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(shipped_config("tiny-llama")))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        validate(path=str(tmp_path))


def test_a_directory_whose_config_asks_for_code_says_so_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    with pytest.raises(ConfigError, match=r"^model\.path: '.*json' asks for code of its own"):
        validate(path=str(tmp_path))


def test_what_a_model_is_comes_before_how_its_files_are_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="ALiBi"):
        validate(path=str(tmp_path))


def test_every_loader_of_transformers_is_called_without_trust_in_code() -> None:
    paths = Path(pcgsvc.__file__).parent.rglob("*.py")
    texts = {path.name: path.read_text() for path in paths}
    calls = [
        (name, node)
        for name, text in texts.items()
        if "from_pretrained" in text or "from_config" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func) != "nn.Embedding.from_pretrained"
    ]
    given = [
        (name, {k.arg: ast.unparse(k.value) for k in node.keywords}.get("trust_remote_code"))
        for name, node in calls
    ]
    assert len(given) >= 5
    assert {trust for _, trust in given} == {"False"}, given


@pytest.mark.parametrize("content", [b"not a model", b"GGUFxxxx", b"GGUF\3\0\0\0", b""])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.path: '.*m\.gguf' cannot be read.*fetch it"):
        validate(path=str(path))


def test_a_prompt_needs_a_tokenizer_beside_the_model() -> None:
    model = ModelConfig(name="hf", config="tiny-llama")
    with pytest.raises(ConfigError, match="prompt is set, but there is no tokenizer"):
        validate_model(Config(model=model, prompt="hello"))


def test_another_major_version_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")  # it replaces itself in sys.modules
    with pytest.raises(ConfigError, match=r"transformers 4\.57\.1; 5\.x is needed"):
        validate(config="tiny-llama")
