"""What Inductor may be asked for, on a GPU: exact sizes, worker processes, a custom pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from core_helpers import verified

import pcgsvc
from pcgsvc.events import Silent
from pcgsvc.models.request import request_of
from pcgsvc.ops.attention_quant import quantize
from pcgsvc.pipeline import build

pytestmark = pytest.mark.gpu

BASE = ["model=llama", "compiler=inductor", "capture.sizes=[1,4,16]", "capture.max_size=16"]


def check(runner: pcgsvc.Runner) -> None:
    rows = verified(runner)
    assert rows
    assert all(row["ok"] for row in rows), [r for r in rows if not r["ok"]]


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("strategy", ["fx", "inductor"])
def test_exact_sizes_start_warm_and_leave_no_worker(strategy: str, tmp_path: Path) -> None:
    wanted = [*BASE, f"partition.strategy={strategy}", f"cache.dir={tmp_path / 'cache'}"]
    wanted += ["compiler.specialize_sizes=[1,4]", "compiler.threads=2"]
    before = children()
    with pcgsvc.load_runner(wanted) as cold:
        check(cold)
        general = cold.model.program
        assert cold.report["compile"]["num_compiled"] == 3 * len(general.pieces)
        assert general.for_size(4) is not general
        assert general.for_size(16) is general
    assert set(children()) <= set(before)
    with pcgsvc.load_runner(wanted) as warm:
        check(warm)
        assert (warm.report["compile"]["start"], warm.report["compile"]["num_compiled"]) == (
            "warm",
            0,
        )


class Quantised(torch.nn.Module):
    """A projection of what attention gave, by way of int8."""

    def __init__(self, projection: torch.nn.Module, scale: float) -> None:
        super().__init__()
        self.projection, self.scale = projection, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = quantize(x, self.scale)
        y: torch.Tensor = self.projection(small.to(x.dtype) * self.scale)
        return y


@pytest.mark.parametrize("strategy", ["fx", "inductor"])
def test_attention_and_quantisation_become_one_op_across_the_boundary(strategy: str) -> None:
    wanted = [*BASE, f"partition.strategy={strategy}", "compiler.passes=[attention_quant]"]
    request = request_of(pcgsvc.load_config([*wanted, "mode=piecewise", "cache.mode=off"]))
    assert isinstance(request.bundle.module, torch.nn.Module)
    for block in list(request.bundle.module.modules()):
        projection = getattr(block, "o_proj", None)
        if isinstance(projection, torch.nn.Module):
            block.o_proj = Quantised(projection, 0.02)
    with build(request, Silent()) as runner:
        name = {"fx": "pcgsvc::attention", "inductor": "pcgsvc::attention_quant"}[strategy]
        for entry in runner.table.entries.values():
            assert entry.boundaries == (name,) * 4
            assert entry.num_graphs == 5
        check(runner)
