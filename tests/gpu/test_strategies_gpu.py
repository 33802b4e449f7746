"""The three partition strategies on a GPU: one session, the same boundaries, equal results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from core_helpers import verified

import pcgsvc

pytestmark = pytest.mark.gpu

VARIANTS = [("fx", "eager"), ("fx", "inductor"), ("inductor", "inductor"), ("breakable", "eager")]
VARIANTS += [("breakable", "inductor")]


@pytest.mark.parametrize(("strategy", "compiler"), VARIANTS)
@pytest.mark.parametrize("mode", ["piecewise", "full", "full_and_piecewise"])
def test_every_strategy_gives_one_segment_more_than_layers(
    strategy: str, compiler: str, mode: str
) -> None:
    overrides = [f"partition.strategy={strategy}", f"compiler={compiler}", f"mode={mode}"]
    sizes = ["capture.sizes=[1,4,16]", "capture.max_size=16"]
    with pcgsvc.load_runner(["model=llama", *overrides, *sizes]) as runner:
        report = runner.report
        assert report["partition"]["num_boundaries"] == 4
        assert report["partition"]["num_regions"] == 5
        for (entry_mode, _), entry in runner.table.entries.items():
            assert entry.boundaries == ("pcgsvc::attention",) * 4
            assert entry.num_graphs == (5 if entry_mode.value == "piecewise" else 1)
        rows = verified(runner)
        assert rows
        assert all(row["ok"] for row in rows), [r for r in rows if not r["ok"]]


library = torch.library.Library("strategytest", "DEF")
library.define("tagged(Tensor q, Tensor(a!) out) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


def tagged(q: torch.Tensor, out: torch.Tensor) -> None:
    """Double q into out."""
    out.copy_(q * 2)


library.impl("tagged", tagged, "CompositeExplicitAutograd")
torch.library.register_fake("strategytest::tagged", lambda q, out: None, lib=library)


class Tagged(torch.nn.Module):
    """Calls an op that nobody registered with pcgsvc."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.second = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q = self.first(x)
            out = torch.empty_like(q)
            torch.ops.strategytest.tagged(q, out)
            x = self.second(out)
        return x


@pytest.mark.parametrize("strategy", ["fx", "inductor"])
def test_an_op_tagged_cudagraph_unsafe_is_a_boundary_without_being_named(strategy: str) -> None:
    module = Tagged().cuda().eval().requires_grad_(False)
    overrides = [f"partition.strategy={strategy}", "compiler=inductor", "mode=piecewise"]
    config = pcgsvc.load_config([*overrides, "capture.sizes=[4,8]", "dtype=float32"])
    example = {"x": torch.randn(4, 32, device="cuda")}
    with pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=config) as runner:
        partition = runner.report["partition"]
        assert partition["num_boundaries"] == 2
        reasons = {p["reason"] for p in partition["pieces"] if p["kind"] == "boundary"}
        assert reasons == {"strategytest::tagged: tag cudagraph_unsafe"}
        for rows in (3, 8, 4):
            x = torch.randn(rows, 32, device="cuda")
            torch.testing.assert_close(runner(x), module(x), atol=1e-4, rtol=1e-4)


@pcgsvc.splitting_op("strategytest::double", mutates_args=("out",), support="never")
def double(x: torch.Tensor, out: torch.Tensor) -> None:
    """Double."""
    out.copy_(x * 2)


@pcgsvc.eager_break
def clip(x: torch.Tensor, out: torch.Tensor) -> None:
    """Branch on a device value of the true rows, which only a break may do."""
    true = x[: pcgsvc.current_context().num_tokens]
    out.copy_(x.clamp(-1, 1) if bool((true.abs() > 1).any()) else x)


class Untraceable(torch.nn.Module):
    """Branches on data outside what Dynamo can follow, inside a break."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        out = torch.empty_like(y)
        clip(y, out)
        return self.first(out) + x


def test_a_model_that_cannot_be_traced_whole_runs_under_breakable() -> None:
    module = Untraceable().cuda().eval().requires_grad_(False)
    example = {"x": torch.randn(4, 32, device="cuda")}
    overrides = ["compiler=eager", "mode=piecewise", "capture.sizes=[4,8]", "dtype=float32"]
    config = pcgsvc.load_config([*overrides, "partition.strategy=breakable"])
    with pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=config) as runner:
        assert runner.report["partition"]["num_regions"] == 2
        for scale in (0.01, 10.0, 0.01):
            x = torch.randn(8, 32, device="cuda") * scale
            y = module.first(x).clamp(-1, 1)
            torch.testing.assert_close(runner(x), module.first(y) + x, atol=1e-5, rtol=1e-5)
    fx = pcgsvc.load_config([*overrides, "partition.strategy=fx"])
    with pytest.raises(pcgsvc.PcgError, match=r"test_strategies_gpu\.py:\d+") as caught:
        pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=fx)
    assert "breakable" in str(caught.value)


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
@pytest.mark.parametrize("computes", [True, False])
def test_a_first_segment_that_only_allocates_is_no_segment(strategy: str, computes: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.strategytest.double(x, out)
        return out + 1 if computes else out

    example = {"x": torch.randn(4, 32, device="cuda")}
    overrides = ["compiler=eager", "mode=piecewise", "capture.sizes=[4,8]", "dtype=float32"]
    config = pcgsvc.load_config([*overrides, f"partition.strategy={strategy}"])
    with pcgsvc.build_runner(forward, example, dynamic_dims={"x": 0}, config=config) as runner:
        torch.cuda.empty_cache()
        other = torch.zeros(1 << 20, device="cuda")  # would take memory that nothing keeps
        for count in (3, 8):
            x = torch.randn(count, 32, device="cuda")
            assert torch.equal(runner(x), x * 2 + 1 if computes else x * 2)
        assert not other.any()
        assert runner.stats()["hits"] == {"piecewise:4": 1, "piecewise:8": 1}


def test_the_inductor_strategy_starts_warm(tmp_path: Path) -> None:
    overrides = ["model=llama", "partition.strategy=inductor", "compiler=inductor"]
    overrides += ["capture.sizes=[4]", f"cache.dir={tmp_path}"]
    starts = []
    for _ in range(2):
        with pcgsvc.load_runner(overrides) as runner:
            starts.append(runner.report["compile"])
    assert [s["start"] for s in starts] == ["cold", "warm"]
    assert starts[1]["num_traces"] == 0
    assert starts[1]["num_compiled"] == 0


@pcgsvc.splitting_op("strategytest::returns", fake=lambda q: torch.empty_like(q))
def returns(q: torch.Tensor) -> torch.Tensor:
    """Give a fresh tensor, which a break must not."""
    return q * 2


class Returning(torch.nn.Module):
    """Uses what a break returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.strategytest.returns(x + 1) + 1


def test_a_break_that_returns_a_fresh_tensor_is_refused_under_breakable() -> None:
    example = {"x": torch.randn(4, 32, device="cuda")}
    overrides = ["compiler=eager", "mode=piecewise", "capture.sizes=[4]", "dtype=float32"]
    config = pcgsvc.load_config([*overrides, "partition.strategy=breakable"])
    with pytest.raises(pcgsvc.PcgError, match="write into a buffer"):
        pcgsvc.build_runner(Returning().eval(), example, dynamic_dims={"x": 0}, config=config)
