"""Mixture of experts and encoders on a GPU: every strategy, and experts over nccl."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from core_helpers import verified
from torch import distributed

import pcgsvc

pytestmark = pytest.mark.gpu

SIZES = ["capture.sizes=[1,8,64]", "capture.max_size=64", "cache.mode=off"]
VARIANTS = [("fx", "eager"), ("fx", "inductor"), ("inductor", "inductor"), ("breakable", "eager")]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def check(runner: pcgsvc.Runner, names: tuple[str, ...]) -> None:
    """Verify every entry; piecewise ones have one segment more than boundaries."""
    for (mode, _), entry in runner.table.entries.items():
        assert entry.boundaries == names
        assert entry.num_graphs == (len(names) + 1 if mode.value == "piecewise" else 1)
    rows = verified(runner)
    assert rows
    assert all(row["ok"] for row in rows), [r for r in rows if not r["ok"]]


@pytest.mark.parametrize(("strategy", "compiler"), VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_boundaries_under_every_strategy(
    strategy: str, compiler: str, dtype: str
) -> None:
    words = ["model=llama_moe", "mode=piecewise", f"dtype={dtype}", *SIZES]
    words += [f"partition.strategy={strategy}", f"compiler={compiler}"]
    with pcgsvc.load_runner(words) as runner:
        check(runner, ("pcgsvc::attention", "pcgsvc::moe_experts") * 4)


def test_experts_over_nccl_equal_local_ones(group: None) -> None:
    words = ["model=llama_moe", "mode=piecewise", "dtype=float32", "compiler=eager", *SIZES]
    ids = torch.arange(7, device="cuda")
    with pcgsvc.load_runner(words) as runner:
        wanted = runner(ids, ids)
    with pcgsvc.load_runner([*words, "model.moe.backend=all_to_all"]) as runner:
        check(runner, ("pcgsvc::attention", "pcgsvc::moe_all_to_all") * 4)
        got = runner(ids, ids)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("strategy", "compiler"), VARIANTS)
@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoders_give_the_same_vectors_in_every_mode_and_strategy(
    strategy: str, compiler: str, mode: str, dtype: str
) -> None:
    words = ["model=encoder", f"dtype={dtype}", *SIZES]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(512, (n,), generator=generator).tolist() for n in (5, 1, 30, 64, 2)]
    with pcgsvc.load_runner([*words, "mode=none", "compiler=eager"]) as runner:
        wanted = runner.embed(ids)
    words += [f"mode={mode}", f"partition.strategy={strategy}", f"compiler={compiler}"]
    with pcgsvc.load_runner(words) as runner:
        check(runner, ("pcgsvc::encoder_attention",) * 4)
        got = runner.embed(ids)
        assert runner.stats()["fallbacks"] == []
    assert (got * wanted).sum(-1).min() > (0.9999 if dtype == "float32" else 0.999)
