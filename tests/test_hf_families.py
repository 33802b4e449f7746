"""`model=hf`: every shipped family against transformers itself, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from cli_helpers import command_line
from hf_helpers import (
    CONFIGS,
    bundle_of,
    forced_logits,
    shipped_config,
    their_logits,
    theirs,
    write_config,
)

import pcgsvc
from pcgsvc.config import (
    BenchConfig,
    CacheConfig,
    CacheMode,
    CaptureConfig,
    Compiler,
    CompilerConfig,
    Config,
    Job,
    Mode,
    ModelConfig,
    Strategy,
)
from pcgsvc.jobs.run import run_job
from pcgsvc.models.hf import reference
from pcgsvc.ops.paged import PagedAttention

pytestmark = pytest.mark.slow

FAMILIES = sorted(path.stem for path in CONFIGS.glob("*.json"))
DEFAULT = ("tiny-gemma3", "tiny-gpt2")
"""In the default tier: windows, rotations and shared heads, and a family that has none of them."""
BY_TIER = [
    pytest.param(family, marks=() if family in DEFAULT else pytest.mark.exhaustive)
    for family in FAMILIES
]
MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
TOLERANCE = 1e-4
STEPS = 32
PROMPTS = (3, 9, 17)
"""Lengths; 29 rows together, so the prefill is padded to 32 rows and windows of 4 are felt."""


def config_of(family: str, programs: Path, sizes: list[int], mode: str) -> Config:
    """Return what the command line composes, without the time that Hydra takes for it."""
    return Config(
        model=ModelConfig(name="hf", config=family, reference_check=False),
        mode=Mode(mode),
        compiler=CompilerConfig(name=Compiler.EAGER),
        capture=CaptureConfig(sizes=sizes, warmup_calls=1, self_check=False),
        bench=BenchConfig(enabled=False),
        cache=CacheConfig(dir=str(programs)),
        device="cpu",
    )


@pytest.mark.parametrize("family", BY_TIER)
def test_every_mode_verifies_and_only_the_first_start_traces(
    family: str,
    programs: Path,
    tmp_path: Path,
    validate_report: Callable[[Any], None],
) -> None:
    layers = shipped_config(family).get("num_hidden_layers", 2)
    for number, mode in enumerate(MODES):
        # job=run: raises unless every entry verifies
        report = run_job(config_of(family, programs, [4], mode), tmp_path / "report.json")
        validate_report(report)
        assert report["mode"]["resolved"] == mode
        kinds: dict[str, set[str]] = {
            "none": set(),
            "full_decode_only": {"full"},
            "full_and_piecewise": {"full", "piecewise"},
        }
        assert {row["mode"] for row in report["verify"]} == kinds.get(mode, {mode})
        assert all(row["ok"] for row in report["verify"])
        assert report["partition"]["splitting_ops"] == [
            {"name": "pcgsvc::attention", "count": layers}
        ]
        assert report["compile"]["num_traces"] == (1 if number == 0 else 0), report["cache"]


def test_the_command_line_runs_a_shipped_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=hf", "model.config=tiny-qwen3", "compiler=eager", "device=cpu"]
    words += ["capture.sizes=[4]", "bench.enabled=false", f"hydra.run.dir={tmp_path}"]
    with command_line(tmp_path, monkeypatch, capsys) as cli:
        done = cli(*words)
    assert done.code == 0
    assert "model     hf tiny-qwen3, attention paged" in done.out
    assert "all 2 entries equal plain execution" in done.out


@pytest.fixture
def runner(family: str, programs: Path) -> Iterator[pcgsvc.Runner]:
    """A runner of the family, from the stored program of the test above where it has run."""
    config = config_of(family, programs, [4, 32], "full_and_piecewise")
    with pcgsvc.load_runner(config=config) as made:
        yield made


@pytest.mark.parametrize("family", BY_TIER)
def test_teacher_forced_logits_and_greedy_tokens_equal_transformers(
    family: str, runner: pcgsvc.Runner
) -> None:
    values = shipped_config(family)
    generator = torch.Generator().manual_seed(7)
    texts = [
        torch.randint(3, values["vocab_size"], (length + STEPS - 1,), generator=generator).tolist()
        for length in PROMPTS
    ]
    ours = forced_logits(runner, texts, PROMPTS)
    assert set(runner.stats()["hits"]) == {"piecewise:32", "full:4"}
    model = theirs(values, runner.model.module)
    for text, length, got in zip(texts, PROMPTS, ours, strict=True):
        want = their_logits(model, text)[length - 1 :]
        assert got.shape == want.shape == (STEPS, values["vocab_size"])
        assert float((got - want).abs().max()) < TOLERANCE
        top, second = want.topk(2).values.unbind(-1)
        clear = (top - second) > 2 * TOLERANCE
        assert clear.sum() > STEPS // 2
        assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral's window": ("tiny-mistral", {"sliding_window": None}),
    "mixtral's window": ("tiny-mixtral", {"sliding_window": None}),
    "phi3's window": ("tiny-phi3", {"sliding_window": None}),
    "qwen2's window": ("tiny-qwen2", {"use_sliding_window": False}),
    "gemma2's windows": ("tiny-gemma2", {"layer_types": ["full_attention"] * 2}),
    "gemma2's softcap": ("tiny-gemma2", {"attn_logit_softcapping": None}),
    "gemma3's windows": ("tiny-gemma3", {"layer_types": ["full_attention"] * 3}),
    "gemma3's scale": ("tiny-gemma3", {"query_pre_attn_scalar": 48}),
    "llama's rope scaling": ("tiny-llama", {"rope_parameters": {"rope_theta": 10000.0}}),
    "gpt-neox's partial rotation": ("tiny-gpt-neox", {"rotary_pct": 1.0}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_switching_a_feature_off_moves_the_logits(feature: str, tmp_path: Path) -> None:
    family, changes = FEATURES[feature]
    values = shipped_config(family)
    logits = []
    for content in (values, {**values, **changes}):
        bundle = bundle_of(write_config(tmp_path, content))  # equal to transformers: checked there
        assert bundle.attention is not None
        ids = torch.arange(3, 27) * 7 % values["vocab_size"]
        (found,) = reference.flat_logits(
            [ids], bundle.module, bundle.attention, PagedAttention, torch.float32
        )
        logits.append(found)
    assert float((logits[0] - logits[1]).abs().max()) > 1e-2


def test_layers_of_one_kind_are_one_unique_piece(tmp_path: Path, programs: Path) -> None:
    path = write_config(tmp_path, {**shipped_config("tiny-qwen3"), "num_hidden_layers": 4})
    config = config_of(str(path), programs, [4], "piecewise")
    config.job = Job.PLAN
    partition = run_job(config, tmp_path / "report.json")["partition"]
    assert (partition["num_regions"], partition["num_unique_pieces"]) == (5, 3)


@pytest.mark.parametrize("family", ["tiny-gemma2", "tiny-mixtral"])
def test_breakable_runs_what_fx_runs(family: str, programs: Path) -> None:
    config = config_of(family, programs, [1, 4], "full_and_piecewise")
    config.partition.strategy = Strategy.BREAKABLE
    text = list(range(5, 13))
    with pcgsvc.load_runner(config=config) as runner:
        (got,) = forced_logits(runner, [text], [4])
        assert set(runner.stats()["hits"]) == {"piecewise:4", "full:1"}
        want = their_logits(theirs(shipped_config(family), runner.model.module), text)[3:]
    assert float((got - want).abs().max()) < TOLERANCE


@pytest.mark.exhaustive
def test_inductor_compiles_a_family(programs: Path, tmp_path: Path) -> None:
    values = {**shipped_config("tiny-gemma2"), "num_hidden_layers": 1, "layer_types": None}
    config = config_of(str(write_config(tmp_path, values)), programs, [4], "piecewise")
    config.compiler = CompilerConfig(name=Compiler.INDUCTOR)
    config.cache.mode = CacheMode.OFF
    text = list(range(5, 13))
    with pcgsvc.load_runner(config=config) as runner:
        (got,) = forced_logits(runner, [text], [4])
        want = their_logits(theirs(values, runner.model.module), text)[3:]
    assert float((got - want).abs().max()) < TOLERANCE
