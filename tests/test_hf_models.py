"""`model=hf`: weights, tokenizers, rotary scalings, and what is in the key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from generate_helpers import generate_ids
from hf_helpers import (
    bundle_of,
    forced_logits,
    shipped_config,
    their_logits,
    theirs,
    toy_config,
    write_config,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import pcgsvc
from pcgsvc import Sampling
from pcgsvc.config import CacheConfig, CacheMode, Config, ModelConfig, resolve
from pcgsvc.errors import ConfigError
from pcgsvc.forward.arguments import input_specs
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.models.hf import attention, probe
from pcgsvc.models.hf.source import open_source
from pcgsvc.models.hf.weights import freeze_frequencies, make
from pcgsvc.program.facts import program_facts

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
ROBERTA = {
    "model_type": "roberta",
    "is_decoder": True,
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}[end]"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `save_pretrained` makes it: a Qwen3 of two layers and a word tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    values = shipped_config("tiny-qwen3")
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = [2, 9]
    model.save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", "[", "]", "user", "end", "what", "is", "new"]
    vocabulary = {word: number for number, word in enumerate([*words, "?", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="?"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelBundle:
    config = Config(model=ModelConfig(name="hf", path=str(path)))
    validate_model(config)
    return build_model(config, device=CPU, dtype=dtype)


@pytest.mark.parametrize("prompts", [[[5, 6, 7], [8, 9, 10, 11, 12]]])
def test_a_directory_generates_what_transformers_generates(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    words = ["model=hf", f"model.path={checkpoint}", "compiler=eager", "capture.sizes=[2,8]"]
    with pcgsvc.load_runner([*words, "cache.mode=off", "device=cpu"]) as runner:
        ours = generate_ids(runner, prompts, 12)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    for prompt, got in zip(prompts, ours, strict=True):
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert got == want[0, len(prompt) :].tolist()


def test_the_tokenizer_is_the_checkpoints(checkpoint: Path) -> None:
    tokenizer = load(checkpoint).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("what is new") == [7, 8, 9]
    assert tokenizer.decode([7, 8, 2]) == "what is"
    assert tokenizer.encode_chat("what") == [3, 5, 4, 7, 3, 6, 4]  # [user] what [end]
    assert tokenizer.eos_token_ids == {2, 9}


EVIL = "import pathlib\npathlib.Path({!r}).touch()\nclass Evil: ...\ndef generate(*a, **k): ...\n"


def change(file: Path, **entries: Any) -> None:
    """Set entries of a JSON object."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_a_checkpoint_s_code_is_not_run_and_nothing_is_asked(
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, mark = shutil.copytree(checkpoint, tmp_path / "m"), tmp_path / "was_run"
    (folder / "custom_generate").mkdir()
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).write_text(EVIL.format(str(mark)))
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    change(folder / "config.json", auto_map=dict.fromkeys(names, "evil.Evil"))
    tokens = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    change(folder / "tokenizer_config.json", auto_map=tokens, tokenizer_class="Evil")
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail(f"asked: {words}"))
    bundle = load(folder)
    assert type(bundle.module.model).__module__ == "transformers.models.qwen3.modeling_qwen3"
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.encode("what is new") == [7, 8, 9]
    assert "asks for code of its own (auto_map), which is not run; transformers' own" in caplog.text
    assert not mark.exists()


def test_a_tokenizer_that_needs_code_is_refused_before_weights_are_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    toy_config(folder, "none").rename(folder / "config.json")
    (folder / "model.safetensors").write_bytes(b"no weights")
    tokens = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match=r"tokenizer of .* code of its own \(auto_map\), which"):
        load(folder)


def test_a_build_inside_autocast_is_refused_before_weights_are_read(checkpoint: Path) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ConfigError, match=r"torch\.autocast\('cpu'\) is on around the build"),
    ):
        load(checkpoint)


def test_a_generation_config_is_honoured_and_what_is_not_is_said(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(checkpoint).sampling is None
    assert "generation_config.json" not in caplog.text  # its own says nothing but ends
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    file = folder / "generation_config.json"
    change(file, temperature=0.6, repetition_penalty=1.0, num_beams=1, max_length=20, min_length=0)
    assert load(folder).sampling == Sampling()
    assert "generation_config.json" not in caplog.text  # a temperature of no sampling
    change(file, repetition_penalty=1.1, forced_bos_token_id=0, suppress_tokens=[3])
    assert load(folder).sampling == Sampling(repetition_penalty=1.1)
    assert "asks for forced_bos_token_id=0, suppress_tokens=[3]; generate does" in caplog.text
    change(file, do_sample=True, top_p=0.9, min_p=0.1)
    want = Sampling(temperature=0.6, top_k=50, top_p=0.9, repetition_penalty=1.1)
    assert load(folder).sampling == want
    assert "asks for forced_bos_token_id=0, suppress_tokens=[3], min_p=0.1; gen" in caplog.text
    change(file, temperature=-0.5)
    assert load(folder).sampling is None
    assert "out of range (temperature: got -0.5" in caplog.text
    change(file, temperature=0.0)
    assert load(folder).sampling == Sampling(top_k=50, top_p=0.9, repetition_penalty=1.1)


def test_greedy_with_the_checkpoints_repetition_penalty_equals_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    change(folder / "generation_config.json", repetition_penalty=1.5)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    words = ["model=hf", f"model.path={folder}", "compiler=eager", "capture.sizes=[2,8]"]
    with pcgsvc.load_runner([*words, "cache.mode=off", "device=cpu"]) as runner:
        ours = runner.generate(prompts, 12, return_ids=True)
        plain = runner.generate(prompts, 12, sampling=Sampling(), return_ids=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, got in zip(prompts, ours, strict=True):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=12)[0, len(prompt) :].tolist()
        assert got == [token for token in want if token not in (2, 9)]
    assert ours != plain


def test_without_a_chat_template_the_text_is_continued_and_said_so(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    tokenizer = load(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode_chat("what is") == [7, 8]
    assert "no chat template" in caplog.text


def test_a_directory_without_a_tokenizer_runs_without_prompts(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    for path in [*folder.glob("*token*"), folder / "chat_template.jinja"]:
        path.unlink()
    assert load(folder).tokenizer is None
    config = Config(model=ModelConfig(name="hf", path=str(folder)), prompt="what")
    with pytest.raises(ConfigError, match="no tokenizer beside it"):
        validate_model(config)


@pytest.mark.parametrize("damage", ["lost", "reshaped"])
def test_a_checkpoint_that_does_not_fill_the_model_is_refused(
    checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    lost = tensors.pop(name)
    if damage == "reshaped":
        tensors[name] = lost[:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"model\.path: .*{name}|mismatch"):
        load(folder)


def test_bfloat16_passes_the_comparison_in_its_own_tolerance(checkpoint: Path) -> None:
    module: Any = load(checkpoint, torch.bfloat16).module
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()

    def weights(seed: int) -> torch.Tensor:
        config = Config(model=ModelConfig(name="hf", config="tiny-llama"), seed=seed)
        module: Any = build_model(config, device=CPU, dtype=torch.float32).module
        return torch.cat([p.flatten() for p in module.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- rotary scalings that look at the length -----------------------------------------------------

SCALED: dict[str, tuple[str, dict[str, Any], int]] = {
    "dynamic": (
        "tiny-llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        128,
    ),
    "longrope": (
        "tiny-phi3",
        {
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [4.0, 5.0, 6.0, 7.0],
                "original_max_position_embeddings": 48,
            },
        },
        48,
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_scalings_by_length_are_served_up_to_where_they_set_in(kind: str, tmp_path: Path) -> None:
    family, changes, longest = SCALED[kind]
    path = write_config(tmp_path, {**shipped_config(family), **changes})
    words = ["model=hf", f"model.config={path}", "compiler=eager", "capture.sizes=[1,4]"]
    text = list(range(3, longest + 3))
    with pcgsvc.load_runner([*words, "cache.mode=off", "device=cpu"]) as runner:
        geometry = runner.memory.geometry
        assert geometry is not None
        assert geometry.max_model_len == longest
        (got,) = forced_logits(runner, [text], [4])
        module: Any = runner.model.module
    source = open_source(ModelConfig(name="hf", config=str(path)))
    model = transformers.AutoModelForCausalLM.from_config(source.config).eval()
    model.load_state_dict(module.model.state_dict())
    assert float((got - their_logits(model, text)[3:]).abs().max()) < 1e-4


@pytest.mark.parametrize(("family", "experts"), [("tiny-llama", False), ("tiny-mixtral", True)])
def test_how_experts_run_is_said_to_models_with_experts_alone(family: str, experts: bool) -> None:
    # On CUDA in bfloat16 it is "grouped_mm", which transformers refuses for models without any.
    source, cpu = open_source(ModelConfig(name="hf", config=family)), torch.device("cpu")
    model = make(source, "eager", "grouped_mm", device=cpu, dtype=torch.bfloat16)
    assert (model.config._experts_implementation == "grouped_mm") or not experts


def test_freezing_keeps_scalings_that_look_at_no_length() -> None:
    rope = torch.nn.Module()
    rope.rope_type = {"full_attention": "yarn", "sliding_attention": "dynamic"}  # type: ignore[assignment]
    freeze_frequencies(torch.nn.Sequential(rope))
    assert rope.rope_type == {"full_attention": "yarn", "sliding_attention": "default"}


# ---- keys and the probe --------------------------------------------------------------------------


def facts(path: Path) -> dict[str, Any]:
    bundle = bundle_of(path, reference_check=False)
    config = Config(model=ModelConfig(name="hf", config=str(path)))
    resolved = resolve(config, device_type="cpu")
    return program_facts(
        resolved,
        bundle.module,
        input_specs(bundle.make_inputs(2, torch.Generator()), bundle.dynamic_dims),
        {},
        {},
        bundle.facts,
    )


def test_versions_sources_and_the_whole_config_are_in_the_key(tmp_path: Path) -> None:
    values = shipped_config("tiny-qwen3")
    one = facts(write_config(tmp_path, values))
    assert one == facts(write_config(tmp_path, values))
    assert one["transformers"] == transformers.__version__
    assert "transformers/models/qwen3/modeling_qwen3.py" in one["source"]
    assert "pcgsvc/models/hf/attention.py" in one["source"] or one["pcgsvc"]
    other = facts(write_config(tmp_path, {**values, "rms_norm_eps": 1e-5}))
    differing = {name for name in one if one[name] != other[name]}
    assert differing == {"model.transformers_config"}


def test_another_config_with_equal_tensors_is_a_miss_that_says_so(tmp_path: Path) -> None:
    def start(values: dict[str, Any]) -> dict[str, Any]:
        config = Config(
            model=ModelConfig(name="hf", config=str(write_config(tmp_path, values))),
            cache=CacheConfig(dir=str(tmp_path / "cache"), mode=CacheMode.READWRITE),
            device="cpu",
        )
        config.capture.sizes = [1]
        with pcgsvc.load_runner(config=config) as runner:
            return dict(runner.report["compile"])

    values = shipped_config("tiny-olmo2")
    assert start(values)["num_traces"] == 1
    assert start(values)["num_traces"] == 0
    assert start({**values, "rms_norm_eps": 1e-3})["num_traces"] == 1


@pytest.mark.parametrize(
    "kind",
    [
        "roberta",
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in (
                "roberta-prelayernorm",
                "xlm-roberta",
                "xlm-roberta-xl",
                "camembert",
                "data2vec-text",
            )
        ),
    ],
)
def test_positions_begin_where_transformers_begins_them(kind: str, tmp_path: Path) -> None:
    values = {**ROBERTA, "model_type": kind}
    bundle = bundle_of(write_config(tmp_path, values))  # equal to transformers: checked there
    assert bundle.attention is not None
    assert bundle.attention.max_position == 64 - 2
    words = ["model=hf", f"model.config={write_config(tmp_path, values)}", "cache.mode=off"]
    words += ["compiler=eager", "device=cpu", "model.reference_check=false", "capture.sizes=[4]"]
    with pcgsvc.load_runner(words) as runner:
        (got,) = forced_logits(runner, [list(range(3, 11))], [4])
        want = their_logits(theirs(values, runner.model.module), range(3, 11))[3:]
    assert float((got - want).abs().max()) < 1e-4


def test_a_model_whose_first_position_is_its_last_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, {**ROBERTA, "max_position_embeddings": 2})
    with pytest.raises(ConfigError, match=r"positions begin at 2, and max_position_embeddings"):
        bundle_of(path)


def test_the_probe_on_a_built_model_finds_what_it_finds_on_the_meta_device() -> None:
    source = open_source(ModelConfig(name="hf", config="tiny-gemma3"))
    bundle = bundle_of("tiny-gemma3", reference_check=False)
    module: Any = bundle.module
    assert probe.spec_of_model(source, module.model) == bundle.attention
    assert module.model.config._attn_implementation == attention.IMPLEMENTATION
    assert bundle.attention is not None
    assert bundle.attention.sliding_windows == (4, None, 4)
