"""`compiler.passes=[gemv]` on a GPU: results against float64, the choice of a plan, warm starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import verified

import pcgsvc
from pcgsvc.ops import gemv as gemv_module
from pcgsvc.ops import gemv_tuning
from pcgsvc.ops.gemv import gemv
from pcgsvc.ops.gemv_tuning import Choice, Plan, choose_plan

pytestmark = pytest.mark.gpu

KINDS = {"plain": "", "norm": "n", "residual": "r", "gated": "g", "all": "nrg"}


def arguments(rows: int, columns: int, features: int, kind: str) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(rows)

    def made(*shape: int) -> torch.Tensor:
        noise = torch.randn(*shape, device="cuda", generator=generator)
        return noise.div(features**0.5).to(torch.bfloat16)

    gated = "g" in kind
    weight = made(columns * (2 if gated else 1), features)
    norm = made(features) if "n" in kind else None
    residual = made(rows, columns) if "r" in kind else None
    return [made(rows, features) * 9, weight, norm, residual, gated, 1e-5]


@pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
@pytest.mark.parametrize("rows", [1, 2, 8, 13, 16])
def test_results_are_those_of_the_ops_in_float64(rows: int, kind: str) -> None:
    if rows > 1 and "n" in kind:
        pytest.skip("the pass fuses a norm for one row only")
    plans = gemv_tuning._PLANS[rows == 1, "g" in kind]
    for columns, features, plan in [(1000, 2048, plans[0]), (1024, 1024, plans[-1])]:
        args = arguments(rows, columns, features, kind)
        wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        wanted = gemv._init_fn(*wide, [])  # type: ignore[attr-defined] - the ops, on the GPU too
        got = gemv(*args, list(plan)).double()
        assert float((got - wanted).norm() / wanted.norm()) < 6e-3
        assert torch.equal(got, gemv(*args, list(plan)).double())


def test_a_plan_is_chosen_and_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for gated in (False, True):
        choice = choose_plan(1, 8192, 4096, gated, device)
        assert choice.problem is None
        assert choice.plan is None or choice.plan in gemv_tuning._PLANS[True, gated]
    monkeypatch.setattr(gemv_tuning, "_MAX_ERROR", 0.0)
    choice = choose_plan(8, 4096, 2048, False, device)
    assert choice.plan is None
    assert choice.problem is not None
    assert "products of 8 rows by [4096, 2048]: off by" in choice.problem


@pytest.mark.parametrize("strategy", ["fx", "inductor"])
def test_small_sizes_use_it_and_start_warm(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(rows: int, *_: Any) -> Choice:
        return Choice(Plan(8, 256, 5, 2) if rows == 1 else Plan(32, 128, 3, 2))

    monkeypatch.setattr(gemv_module, "choose_plan", first)
    wanted = ["model=llama", "compiler=inductor", "dtype=bfloat16", "model.hidden_size=1024"]
    wanted += ["model.num_heads=8", "model.num_layers=2", "model.intermediate_size=2048"]
    wanted += ["attention=triton", "capture.sizes=[1,4,16,32]", "capture.max_size=32"]
    wanted += ["compiler.passes=[gemv,residual_add]", f"partition.strategy={strategy}"]
    wanted += [f"cache.dir={tmp_path / 'cache'}"]
    for start in ("cold", "warm"):
        with pcgsvc.load_runner(wanted) as runner:
            report = runner.report
            assert report["compile"]["start"] == start
            assert report["compile"]["exact_sizes"] == [1, 4, 16]
            assert not [w for w in report["warnings"] if "gemv" in w]
            rows = verified(runner)
            assert rows
            assert all(row["ok"] for row in rows), [r for r in rows if not r["ok"]]
            for size in (1, 4, 16, 32):
                pieces = runner.model.program.for_size(size).pieces.values()
                source = "".join(p.generated() for p in pieces)  # type: ignore[attr-defined]
                assert ("pcgsvc.gemv" in source) is (size <= 16)
    assert report["compile"]["num_compiled"] == 0
