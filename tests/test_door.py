"""`pcgsvc.compile` and `pcgsvc.load`: a model in, a runner out, and what a wrong call is told."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import rows
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import pcgsvc
from pcgsvc.config import CacheMode, CaptureConfig, Compiler, Config, Mode

QUICK: dict[str, Any] = {"cache": "off", "sizes": [1, 4]}


# ---- models of the tests' own --------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """conv - norm - relu - conv - norm, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(x + self.norms[1](self.two(y)))


class ResNet(nn.Sequential):
    """Images [B, 3, 16, 16] -> logits [B, 5]."""

    def __init__(self) -> None:
        stem = (nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        blocks = (ResidualBlock(8), ResidualBlock(8))
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class ViT(nn.Module):
    """Images [B, 3, 16, 16] in patches of 4 -> logits [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 17, 16))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x)[:, 0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "resnet": (ResNet, [3, 16, 16]),
    "vit": (ViT, [3, 16, 16]),
    "mlp": (mlp, [8]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_an_example_are_all_that_is_needed(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(3, *shape)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pcgsvc.compile(model, (x,)) as runner:
        for count in (1, 3, 7):
            call = torch.randn(count, *shape)
            with torch.no_grad():
                torch.testing.assert_close(runner(call), model(call))
        assert set(runner.stats()["hits"]) == {"full:1", "full:4", "full:8"}
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


# ---- which dimensions carry the rows -------------------------------------------------------------


def test_dimension_0_of_all_tensors_as_long_as_the_first_carries_the_rows() -> None:
    def forward(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x @ weight).masked_fill(mask[:, None], 0.0)

    example = {"x": rows(5), "weight": torch.randn(4, 2), "mask": torch.arange(5) > 3}
    with pcgsvc.compile(forward, example, **QUICK) as runner:
        for count in (1, 3):
            call = {"x": rows(count), "weight": torch.randn(4, 2), "mask": torch.arange(count) > 1}
            torch.testing.assert_close(runner(**call), forward(**call))
            assert torch.equal(runner(*call.values()), runner(**call))


class Counting(nn.Module):
    """Changes all the state that a forward can: buffer, attribute, list, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.calls, self.log = 0, ["new"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        self.calls += 1
        self.log.append("called")
        x.add_(torch.rand(1))
        raise RuntimeError("refused")


def test_the_models_state_and_the_examples_are_as_before() -> None:
    model, x = Counting().eval(), torch.zeros(3, 2)
    torch.manual_seed(1)
    with pytest.raises(pcgsvc.ForwardError, match=r"RuntimeError: refused at .*test_door.py:"):
        pcgsvc.compile(model, (x,))
    assert (model.seen.item(), model.calls, model.log) == (0, 0, ["new"])
    assert not x.any()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))


def fixed_table(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x @ table.reshape(4, 2)


UNCLEAR: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "no rows": (F.relu, (torch.tensor(1.0),), "the first tensor has no rows"),
    "empty": (F.relu, (torch.zeros(0, 2),), "the first tensor has no rows"),
    "a table as long": (fixed_table, (rows(8), torch.randn(8)), "shape '.4, 2.' is invalid"),
    "a tensor at times": (
        lambda x: (x, x if len(x) > 2 else None),
        (rows(3),),
        "result leaf 1 is a tensor and None",
    ),
    "rows reduced": (lambda x: x.sum(0), (rows(3),), r"shapes \[\[4\]\] and \[\[4\]\]"),
    "two per row": (lambda x: torch.cat([x, x]), (rows(3),), r"\[\[6, 4\]\] and \[\[4, 4\]\]"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_rows_that_cannot_be_told_are_refused_with_the_candidates(case: str) -> None:
    model, example, words = UNCLEAR[case]
    with pytest.raises(pcgsvc.ConfigError, match=words) as caught:
        pcgsvc.compile(model, example, **QUICK)
    assert "Candidates: " in str(caught.value)
    assert "such as dynamic_dims={" in str(caught.value)


def test_named_dynamic_dims_are_taken_as_they_are() -> None:
    example = {"x": rows(8), "table": torch.randn(8)}
    with pcgsvc.compile(fixed_table, example, dynamic_dims={"x": 0}, **QUICK) as runner:
        call = {**example, "x": rows(3)}
        torch.testing.assert_close(runner(**call), fixed_table(**call))


# ---- settings by name ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settings_of() -> Callable[..., Config]:
    """Return the config that a call of `compile` builds with."""

    def read(**settings: Any) -> Config:
        with pytest.MonkeyPatch.context() as patch:
            seen: list[Config] = []

            def build(request: Any) -> Any:
                seen.append(request.config)

            patch.setattr("pcgsvc.api.build", build)
            pcgsvc.compile(mlp(), (rows(3, width=8),), **settings)
        return seen[0]

    return read


def test_settings_go_by_name_and_groups_as_dicts(settings_of: Callable[..., Config]) -> None:
    config = settings_of()
    assert (config.mode, config.cache.mode) == (Mode.FULL_AND_PIECEWISE, CacheMode.READWRITE)
    config = settings_of(
        mode=Mode.PIECEWISE,
        compiler="inductor",
        sizes="1,2",
        cache={"mode": "read", "max_bytes": "1GiB"},
        capture={"warmup_calls": 3},
        partition=OmegaConf.create({"extra_splitting_ops": ["aten::relu"]}),
        strict=True,
    )
    assert (config.mode, config.compiler.name) == (Mode.PIECEWISE, Compiler.INDUCTOR)
    assert (config.capture.sizes, config.capture.warmup_calls) == ([1, 2], 3)
    assert (config.cache.mode, config.cache.max_bytes) == (CacheMode.READ, 2**30)
    assert config.partition.extra_splitting_ops == ["aten::relu"]
    assert config.strict
    config = settings_of(
        compiler={"name": "inductor", "threads": 2}, capture=CaptureConfig(sizes=[3])
    )
    assert (config.compiler.threads, config.capture.sizes) == (2, [3])


def test_a_dotted_name_is_answered_with_the_dict(settings_of: Callable[..., Config]) -> None:
    with pytest.raises(
        pcgsvc.ConfigError, match=r"a group is a dict here: capture=\{'max_size': …"
    ):
        settings_of(**{"capture.max_size": 3})


def test_a_config_of_any_kind_is_taken_by_every_door(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"mode": "piecewise", "capture": {"sizes": [1, 2]}, "cache": {"mode": "off"}}
    config = pcgsvc.load_config(config=tree)
    monkeypatch.setattr("pcgsvc.api.build", lambda request, progress: request.config)
    monkeypatch.setattr("pcgsvc.api.build_from_config", lambda config: config)
    for given in (tree, OmegaConf.create(tree), config):
        built: Any = pcgsvc.build_runner(
            mlp(), (rows(3, width=8),), dynamic_dims=None, config=given
        )
        loaded = [pcgsvc.load(given), pcgsvc.load_runner(config=given)]
        for got in (built, *loaded, pcgsvc.load_config(config=given)):
            assert (got.mode, got.capture.sizes) == (Mode.PIECEWISE, [1, 2])
    got = pcgsvc.load(config, mode="full", sizes=[4])
    assert (got.mode, got.capture.sizes, config.mode) == (Mode.FULL, [4], Mode.PIECEWISE)
    got = pcgsvc.load("encoder", model={"num_layers": 1}, compiler="eager")
    assert (got.model.name, got.model.num_layers, got.compiler.name.value) == (
        "encoder",
        1,
        "eager",
    )
    assert pcgsvc.load(["model=encoder", "seed=3"], seed=4).seed == 4
    assert pcgsvc.load("model.num_layers=3").model.num_layers == 3


def test_load_gives_a_runner_of_a_named_model() -> None:
    small = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
    with pcgsvc.load("llama", model=small, sizes=[2], cache="off", device="cpu") as runner:
        assert runner(torch.tensor([1, 2]), torch.tensor([0, 1])).shape == (2, 32)


# ---- what one reads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way"),
    [("size", "sizes="), ("preset", "pcgsvc.load"), ("kwargs", "example_inputs={")],
)
def test_a_name_that_is_elsewhere_is_answered_with_where(name: str, way: str) -> None:
    with pytest.raises(pcgsvc.ConfigError, match=f"^{name}: not read .*{way}"):
        pcgsvc.compile(mlp(), (rows(3, width=8),), **{name: "safe"})


def test_a_runner_prints_as_five_lines(tmp_path: Any) -> None:
    call = {"sizes": [1, 4], "cache": {"dir": str(tmp_path)}}
    for start in ("cold, 1 region compiled, 0 loaded", "warm, 0 regions compiled, 1 loaded"):
        with pcgsvc.compile(mlp(), (rows(3, width=8),), **call) as runner:
            lines = repr(runner).split("\n")
        assert lines[0] == "pcgsvc.Runner of Sequential on cpu, float32"
        assert lines[1] == "  modes: full (full_and_piecewise asked for), for all batches"
        assert lines[2] == "  sizes: 1, 4"
        assert re.fullmatch(r"  graphs: 2 recorded, [\d.]+ K?i?B", lines[3])
        assert lines[4].startswith(f"  start: {start}, ")
        assert len(lines) == 5
    assert repr(runner).split("\n")[0].endswith(", closed")


def test_help_reads_as_a_page_of_the_public_names() -> None:
    page = pydoc.plain(pydoc.render_doc(pcgsvc))
    head = page.split("PACKAGE CONTENTS")[0]
    assert len(head.split("\n")) < 45
    for name in ("pcgsvc.compile(model, (x,))", "pcgsvc.load(", "splitting_op", "eager_break"):
        assert name in head
    errors = [n for n in pcgsvc.__all__ if n.endswith("Error")]
    assert [n for n in errors if n not in head and n != "HostReadError"] == []
    assert all(
        f"    {name}(" in page or f"class {name}" in page or name == "__version__"
        for name in pcgsvc.__all__
    )


def test_every_error_is_exported() -> None:
    from pcgsvc import errors

    found = {n for n, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)}
    assert found <= set(pcgsvc.__all__)
    assert all(getattr(pcgsvc, name) is getattr(errors, name) for name in found)


IMPORT = """
import time, torch
start = time.perf_counter()
import pcgsvc
print(time.perf_counter() - start)
"""


def test_import_costs_at_most_a_tenth_of_a_second_over_torch() -> None:
    took = [float(subprocess.check_output([sys.executable, "-c", IMPORT])) for _ in range(2)]
    assert min(took) < 0.1
