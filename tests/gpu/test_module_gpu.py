"""Modules, attention backends and weights of one's own, on CUDA graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_helpers import HostPlanned
from core_helpers import attended, make_config, plain, rows
from test_support_levels import HALVES, LEVELS, resolved, runner_of, steps

import pcgsvc
from pcgsvc.config import Mode, Strategy
from pcgsvc.errors import ConfigError, StaleAddressError, VerifyError

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    with runner_of("varlen", device=CUDA) as runner:
        geometry = runner.memory.geometry
        return [runner(ids, at, batch=batch) for ids, at, batch in steps(geometry)]


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["full", "full_decode_only", "full_and_piecewise"])
def test_modes_on_support_levels(
    mode: str, level: str, query_len: int, expected: list[torch.Tensor]
) -> None:
    wanted = resolved(mode, level, query_len)
    decode, mixed = HALVES[wanted]
    with runner_of(LEVELS[level], mode, query_len, device=CUDA) as runner:
        assert runner.report["mode"]["resolved"] == wanted
        geometry = runner.memory.geometry
        for (ids, at, batch), plain in zip(steps(geometry), expected, strict=True):
            uniform = set(batch.query_lens) == {query_len}
            runner.reset_stats()
            torch.testing.assert_close(runner(ids, at, batch=batch), plain, rtol=1e-3, atol=1e-4)
            served = {hit.split(":")[0] for hit in runner.stats()["hits"]} or {"none"}
            assert served == {decode if uniform else mixed}


@pytest.mark.parametrize("mode", ["piecewise", "full", "full_and_piecewise"])
def test_a_backend_that_plans_on_the_host(mode: str, expected: list[torch.Tensor]) -> None:
    with runner_of("toy_host_planned", mode, device=CUDA) as runner:
        backend = runner.memory.attention
        assert isinstance(backend, HostPlanned)
        assert backend.in_segment == 0
        geometry = runner.memory.geometry
        for (ids, at, batch), plain in zip(steps(geometry), expected, strict=True):
            backend.plans.clear()
            torch.testing.assert_close(runner(ids, at, batch=batch), plain, rtol=1e-3, atol=1e-4)
            full = runner.plan(len(ids), list(batch.query_lens)).mode is Mode.FULL
            assert backend.plans == [full]


class Net(nn.Module):
    """A boundary, state, and tied weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)
        self.down.weight = self.up.weight
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).relu()
        self.total.add_(torch.where(pcgsvc.true_rows(y)[:, None], y, 0).sum(0))
        out = torch.empty_like(y)
        torch.ops.toy.device_only(y, out)
        return self.down(out)


def wanted(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = module.up(x).relu() * len(x)  # type: ignore[operator]
    result: torch.Tensor = module.down(y)  # type: ignore[operator]
    return result


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_new_weights_are_read_by_graphs(mode: str, compiler: str) -> None:
    module, other = (Net(seed).to(CUDA).eval().requires_grad_(False) for seed in (0, 1))
    config = make_config(mode, [2, 4], compiler=compiler)
    x = torch.randn(3, 16, device=CUDA)
    with pcgsvc.build_runner(module, x, dynamic_dims={"x": 0}, config=config) as runner:
        assert runner.plan(3).mode.value == mode
        torch.testing.assert_close(runner(x), wanted(module, x), rtol=1e-4, atol=1e-4)
        entries = dict(runner.table.entries)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # values that the caller's stream is still computing
            torch.cuda._sleep(20_000_000)
            state = {k: v * 1 for k, v in other.state_dict().items()}
            runner.load_state_dict(state)
            del state
            got = runner(x)
        side.synchronize()
        torch.testing.assert_close(got, wanted(other, x), rtol=1e-4, atol=1e-4)
        runner.load_state_dict({k: v.cpu() * 2 for k, v in other.state_dict().items()})
        torch.testing.assert_close(runner(x), wanted(module, x), rtol=1e-4, atol=1e-4)
        assert runner.table.entries == entries
        module.up.bias.data = torch.zeros(16, device=CUDA)
        with pytest.raises(StaleAddressError, match=r"up\.bias"):
            runner(x)


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_state_is_right_in_padded_replays(mode: str) -> None:
    module = Net().to(CUDA).eval().requires_grad_(False)
    total = torch.zeros(16, device=CUDA)
    config = make_config(mode, [4, 8])
    with pcgsvc.build_runner(
        module, torch.ones(3, 16, device=CUDA), dynamic_dims={"x": 0}, config=config
    ) as runner:
        assert not module.total.any()
        for rows in (3, 8, 1, 5, 20):
            x = torch.randn(rows, 16, device=CUDA)
            runner(x)
            total += module.up(x).relu().sum(0)
            torch.testing.assert_close(module.total, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_results_that_conjugate_or_negate_on_reading(mode: str, strategy: str) -> None:
    class Lazy(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            spin = torch.complex(x, attended(x))
            return [spin.conj(), spin.conj().imag, spin.conj().t()]

    config = make_config(mode, [4])
    config.device = CUDA
    config.partition.strategy = Strategy(strategy)
    module = Lazy().eval()
    x = rows(4).to(CUDA)
    with pcgsvc.build_runner(module, x, dynamic_dims={"x": 0}, config=config) as runner:
        for seed in range(2):
            x = rows(3, seed=seed).to(CUDA)
            got, wanted = runner(x), plain(module, x)
            assert all(map(torch.equal, got, wanted))


def test_padding_in_state_and_tensors_elsewhere_are_refused() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> Any:
            self.total.add_((x + 1).sum(0))
            return x * 2

    x, config = torch.ones(3, 4, device=CUDA), make_config("full", [4])
    with pytest.raises(VerifyError, match=r"padding rows reach .*'total'"):
        pcgsvc.build_runner(Sums().to(CUDA).eval(), x, dynamic_dims={"x": 0}, config=config)
    with pytest.raises(ConfigError, match="'total' is on cpu, the inputs are on cuda:0"):
        pcgsvc.build_runner(Sums().eval(), x, dynamic_dims={"x": 0}, config=config)
