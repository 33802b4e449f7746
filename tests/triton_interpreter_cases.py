"""The Triton kernels under Triton's interpreter, on the CPU; run by test_triton_attention.py.

In a process of its own: TRITON_INTERPRET must be set before triton is imported, and stays.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import pytest

assert os.environ.get("TRITON_INTERPRET") == "1", "run this file through test_triton_attention.py"

import torch  # noqa: E402 - after the check above, which says what to do
from attention_cases import Step, error, expected, make_step, run, same_cache, spec  # noqa: E402

from pcgsvc.errors import ConfigError  # noqa: E402
from pcgsvc.ops.attention import AttentionBackend  # noqa: E402
from pcgsvc.ops.gemv import gemv  # noqa: E402
from pcgsvc.ops.gemv_tuning import launch  # noqa: E402
from pcgsvc.ops.paged import PagedAttention  # noqa: E402
from pcgsvc.ops.triton_attention import TritonAttention  # noqa: E402
from pcgsvc.ops.triton_tuning import Tiling, Tuning  # noqa: E402
from pcgsvc.ops.varlen import VarlenAttention  # noqa: E402

CPU = torch.device("cpu")
# The interpreter rounds to bfloat16 toward zero, twice as far off as the nearest value.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SMALL = Tiling(block_m=16, block_n=16, num_warps=4, num_stages=1)
SPLIT = Tuning(single=SMALL, mixed=SMALL, num_splits=3, split_keys=16)
# Tiles above 16 rows go through their first keys without a mask.
LARGE = dataclasses.replace(SPLIT, mixed=dataclasses.replace(SMALL, block_m=64), num_splits=2)

DECODE = ([1, 1, 1, 1], [40, 3, 17, 1])
MIXED = ([5, 1, 9, 1], [5, 33, 30, 16])
PREFILL = ([19, 2], [19, 40])
ONE_LONG = ([37], [37])


def backend(
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layers: int = 1,
    windows: list[int | None] | None = None,
    softcap: float | None = None,
    **options: Any,
) -> TritonAttention:
    options.setdefault("share_in_step", False)  # the fused cache write where it is used
    return TritonAttention(
        spec(heads, kv_heads, dim, layers=layers, windows=windows, softcap=softcap),
        num_blocks=40,
        block_size=block_size,
        device=CPU,
        dtype=dtype,
        **options,
    )


def check(
    attention: TritonAttention,
    step: Step,
    layer: int = 0,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Run one layer; compare output and cache with the reference, and the padding with zero."""
    want, cache = expected(attention, step, layer, window=window, softcap=softcap)
    got = run(attention, step, layer)
    assert error(got, want) < TOLERANCE[got.dtype]
    assert torch.equal(got[step.num_tokens :], torch.zeros_like(got[step.num_tokens :]))
    assert same_cache(attention.kv_cache[layer], cache)
    assert not attention.kv_cache[layer][:, 0].any(), "the null block was written"
    assert not attention._counters.any(), "a split was never combined"
    return got


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("lens", [DECODE, MIXED, PREFILL, ONE_LONG], ids=str)
def test_every_kind_of_batch_in_every_dtype(
    lens: tuple[list[int], list[int]], dtype: torch.dtype
) -> None:
    attention = backend(dtype=dtype)
    check(attention, make_step(attention, *lens))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("lens", [MIXED, PREFILL, ([20, 7], [70, 64])], ids=str)
def test_large_tiles(lens: tuple[list[int], list[int]], splits: int) -> None:
    attention = backend(tuning=dataclasses.replace(LARGE, num_splits=splits))
    check(attention, make_step(attention, *lens, rows=70))
    apart = backend(tuning=dataclasses.replace(LARGE, fused_write_rows=4, num_splits=splits))
    check(apart, make_step(apart, *lens, rows=70))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("tuning", [Tuning(), SPLIT], ids=["default", "split"])
def test_single_token_decode(tuning: Tuning, dtype: torch.dtype) -> None:
    attention = backend(dtype=dtype, tuning=tuning)
    check(attention, make_step(attention, *DECODE, rows=6, uniform_query_len=1))


@pytest.mark.parametrize("single", [True, False], ids=["single", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (14, 2), (8, 1), (20, 1)], ids=str
)
def test_query_heads_per_kv_head(heads: int, kv_heads: int, single: bool) -> None:
    attention = backend(heads, kv_heads)
    lens = DECODE if single else MIXED
    check(attention, make_step(attention, *lens, uniform_query_len=1 if single else None))


@pytest.mark.parametrize("dim", [8, 24, 32, 80, 256])
def test_head_dims(dim: int) -> None:
    attention = backend(2, 1, dim)
    check(attention, make_step(attention, [1, 4], [20, 5]))
    check(attention, make_step(attention, [1, 1], [20, 5], uniform_query_len=1))


@pytest.mark.parametrize("single", [True, False], ids=["single", "mixed"])
@pytest.mark.parametrize("block_size", [1, 12, 16, 32])
def test_block_sizes(block_size: int, single: bool) -> None:
    attention = backend(block_size=block_size, tuning=SPLIT)
    if block_size == 1:
        lens = ([1, 1], [9, 17]) if single else ([3, 1], [3, 18])
    else:
        lens = DECODE if single else MIXED
    check(attention, make_step(attention, *lens, uniform_query_len=1 if single else None))


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 49, 79, 80, 81, 96])
def test_splits_around_their_boundaries(length: int, splits: int) -> None:
    tuning = dataclasses.replace(SPLIT, num_splits=splits)
    attention = backend(2, 1, tuning=tuning)
    step = make_step(attention, [1, 1], [length, 7], rows=3, uniform_query_len=1, max_blocks=8)
    check(attention, step)
    query_len = min(length, 5)
    check(attention, make_step(attention, [query_len], [length], rows=7, max_blocks=8))


def test_splits_leave_the_scratch_ready_for_the_next_step() -> None:
    attention = backend(tuning=SPLIT, layers=2)
    for seed in range(3):
        step = make_step(attention, *DECODE, rows=5, uniform_query_len=1, seed=seed)
        check(attention, step, 0)
        check(attention, step, 1)


@pytest.mark.parametrize("tuning", [Tuning(), SPLIT], ids=["default", "split"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 21])
def test_window_and_softcap(window: int | None, softcap: float | None, tuning: Tuning) -> None:
    attention = backend(windows=[window], softcap=softcap, tuning=tuning)
    step = make_step(attention, *MIXED, rows=20)
    check(attention, step, window=window, softcap=softcap)
    step = make_step(attention, *DECODE, rows=6, uniform_query_len=1)
    check(attention, step, window=window, softcap=softcap)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # meant: exp → inf
def test_softcap_stays_finite_for_huge_scores() -> None:
    attention = backend(softcap=5.0)
    step = make_step(attention, *MIXED)
    step.q[: step.num_tokens] *= 1e4
    check(attention, step, softcap=5.0)


def test_windows_are_per_layer() -> None:
    attention = backend(layers=2, windows=[3, None])
    step = make_step(attention, *MIXED)
    windowed, whole = check(attention, step, 0, window=3), check(attention, step, 1)
    assert error(windowed, whole) > 1e-2


@pytest.mark.parametrize("query_len", [2, 3])
def test_uniform_batches_of_several_tokens(query_len: int) -> None:
    attention = backend()
    step = make_step(
        attention, [query_len] * 3, [query_len, 30, 17], rows=12, uniform_query_len=query_len
    )
    check(attention, step)


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_finds_its_tiles(seed: int) -> None:
    rng = random.Random(seed)
    heads, kv_heads = rng.choice([(1, 1), (4, 2), (3, 1), (16, 1)])
    query_lens = [rng.choice([1, 1, 1, 2, 8, 17]) for _ in range(rng.randint(1, 7))]
    seq_lens = [n + rng.choice([0, 0, 1, 15, 16, 40]) for n in query_lens]
    attention = backend(
        heads,
        kv_heads,
        tuning=rng.choice([Tuning(), SPLIT, LARGE]),
        windows=[rng.choice([None, 9])],
    )
    step = make_step(
        attention,
        query_lens,
        seq_lens,
        rows=sum(query_lens) + rng.choice([0, 1, 20]),
        max_reqs=len(query_lens) + rng.choice([0, 1, 30]),
        seed=seed,
    )
    check(attention, step, window=attention.spec.window(0))


def test_a_step_of_nothing_but_padding_writes_zeros_only() -> None:
    attention = backend()
    for uniform in (None, 1):
        got = check(attention, make_step(attention, [1], [1], rows=9, uniform_query_len=uniform))
        assert got[0].any()
        step = make_step(attention, [1], [1], rows=9, uniform_query_len=uniform)
        step.context.kv_lens.zero_()
        step.context.query_start_loc.zero_()
        before = attention.kv_cache[0].clone()
        assert not run(attention, step).any()
        assert same_cache(attention.kv_cache[0], before)


@pytest.mark.parametrize("lens", [MIXED, PREFILL], ids=str)
def test_writing_apart_gives_the_same_bits(lens: tuple[list[int], list[int]]) -> None:
    fused, apart = backend(), backend(share_in_step=True)
    assert torch.equal(
        check(fused, make_step(fused, *lens, rows=24)),
        check(apart, make_step(apart, *lens, rows=24)),
    )


def test_share_in_step_lets_a_request_read_what_another_one_writes() -> None:
    attention = backend(share_in_step=True)
    step = make_step(attention, [16, 1], [16, 17], seed=3)
    step.context.block_tables[1, 0] = step.context.block_tables[0, 0]
    check(attention, step)


def test_strided_inputs_need_no_copy() -> None:
    attention = backend()
    step = make_step(attention, *MIXED)
    whole = check(attention, step)
    fused = torch.cat([step.q, step.k, step.v], 1)
    step.q, step.k, step.v = fused.split([4, 2, 2], 1)
    assert not step.q.is_contiguous()
    out = torch.full((step.q.shape[0], 5, 16), float("nan"))[:, 1:]
    attention.forward(step.q, step.k, step.v, out, 0, step.context)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=str)
def test_agrees_with_the_other_backends(lens: tuple[list[int], list[int]]) -> None:
    got = []
    for kind in (PagedAttention, VarlenAttention, TritonAttention):
        attention: AttentionBackend = kind(
            spec(4, 2, 16), num_blocks=40, block_size=16, device=CPU, dtype=torch.float32
        )
        got.append(run(attention, make_step(attention, *lens, rows=20)))
    assert error(got[2], got[0]) < 1e-6
    assert error(got[2], got[1]) < 1e-6


def test_inputs_of_another_dtype_are_refused() -> None:
    attention = backend()
    step = make_step(attention, *MIXED)
    step.k = step.k.half()
    with pytest.raises(ConfigError, match=r"k is torch\.float16"):
        run(attention, step)


def test_a_gpu_is_refused_while_interpreting() -> None:
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set"):
        TritonAttention(
            spec(1, 1, 16),
            num_blocks=2,
            block_size=16,
            device=torch.device("cuda"),
            dtype=torch.float32,
        )


# ---- products of few rows ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", "g", "r", "n", "ngr"])
@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_a_product_is_that_of_the_ops(rows: int, kind: str) -> None:
    if rows > 1 and "n" in kind:
        pytest.skip("the pass fuses a norm for one row only")
    columns, features, gated = 40, 256, "g" in kind
    torch.manual_seed(rows)
    weight = torch.randn(columns * (2 if gated else 1), features) / 16
    norm = torch.randn(features) if "n" in kind else None
    residual = torch.randn(rows, columns) if "r" in kind else None
    whole = torch.randn(rows, 2 * features)
    args = (whole[:, :features], weight, norm, residual, gated, 1e-5, [16, 64, 2, 1])
    assert error(launch(*args), gemv(*args)) < 1e-6
