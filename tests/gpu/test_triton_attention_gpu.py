"""The Triton backend on a GPU: compiled kernels, remembered launches, capture and replay."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pcgsvc.errors import ConfigError
from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.ops.triton_attention import TritonAttention
from pcgsvc.ops.triton_tuning import Tuning

pytestmark = pytest.mark.gpu


def _load_cases() -> ModuleType:
    # By path: which folders of tests/ are importable from here depends on pytest's import mode.
    path = Path(__file__).parents[1] / "attention_cases.py"
    found = importlib.util.spec_from_file_location("attention_cases", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules.setdefault("attention_cases", module)  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


cases = _load_cases()
# float32 must use no TF32: its error would be near 3e-4.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BATCHES = {
    "prefill": ([300, 64], [300, 64]),
    "chunk": ([65, 130], [700, 333]),
    "mixed": ([1, 1, 37, 1, 200], [1000, 1, 37, 129, 777]),
    "decode": ([1] * 6, [1, 16, 17, 127, 1025, 2047]),
}


@pytest.fixture(autouse=True)
def compiled() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.fail("TRITON_INTERPRET is set: nothing would be compiled")


def backend(
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 1,
    num_blocks: int = 900,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> TritonAttention:
    options.setdefault("share_in_step", False)  # the fused cache write where it is used
    shape: AttentionSpec = cases.spec(
        heads, kv_heads, dim, layers=layers, windows=[window] * layers, softcap=softcap
    )
    return TritonAttention(
        shape,
        num_blocks=num_blocks,
        block_size=block_size,
        device=torch.device("cuda"),
        dtype=dtype,
        **options,
    )


def check(attention: TritonAttention, step: Any, layer: int = 0, **options: Any) -> torch.Tensor:
    """Run a step twice: through Triton's dispatch, then as remembered; compare with float64."""
    want, cache = cases.expected(attention, step, layer, **options)
    got = cases.run(attention, step, layer)
    assert cases.error(got, want) < TOLERANCE[got.dtype]
    assert not got[step.num_tokens :].any()
    assert cases.same_cache(attention.kv_cache[layer], cache)
    assert not attention.kv_cache[layer][:, 0].any(), "the null block was written"
    again = torch.full_like(got, float("nan"))
    before = len(attention._ready)
    for _ in range(2):
        again.fill_(float("nan"))
        attention.forward(step.q, step.k, step.v, again, layer, step.context)
    assert len(attention._ready) == before + 1, "the second call did not find its launch"
    assert torch.equal(got, again)
    assert not attention._counters.any(), "a split was never combined"
    return got


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("batch", list(BATCHES))
def test_batches_in_every_dtype(batch: str, dtype: torch.dtype) -> None:
    attention = backend(dtype=dtype)
    query_lens, seq_lens = BATCHES[batch]
    check(attention, cases.make_step(attention, query_lens, seq_lens, rows=sum(query_lens) + 9))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 192, 256])
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    attention = backend(8, 2, dim, dtype=dtype)
    check(attention, cases.make_step(attention, *BATCHES["chunk"]))
    check(attention, cases.make_step(attention, *BATCHES["decode"], rows=8, uniform_query_len=1))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (12, 12), (28, 4), (40, 8), (16, 1), (71, 1)], ids=str
)
def test_query_heads_per_kv_head(heads: int, kv_heads: int) -> None:
    attention = backend(heads, kv_heads, 64)
    check(attention, cases.make_step(attention, *BATCHES["mixed"]))
    check(attention, cases.make_step(attention, *BATCHES["decode"], uniform_query_len=1))


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 128])
def test_block_sizes(block_size: int) -> None:
    attention = backend(block_size=block_size)
    check(attention, cases.make_step(attention, *BATCHES["mixed"]))
    check(attention, cases.make_step(attention, *BATCHES["decode"], uniform_query_len=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 100, 512])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_window_and_softcap(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    attention = backend(8, 2, 64, window=window, softcap=softcap, dtype=dtype)
    options = {"window": window, "softcap": softcap}
    check(attention, cases.make_step(attention, *BATCHES["mixed"]), **options)
    decode = cases.make_step(attention, *BATCHES["decode"], uniform_query_len=1)
    check(attention, decode, **options)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16])
def test_splits_around_their_boundaries(splits: int) -> None:
    attention = backend(8, 2, 64, tuning=Tuning(num_splits=splits), dtype=torch.float32)
    for first in (1, 60, 124, 250, 380, 1020):
        seq_lens = list(range(first, first + 8))
        check(attention, cases.make_step(attention, [1] * 8, seq_lens, uniform_query_len=1))
        check(attention, cases.make_step(attention, [1] * 8, seq_lens))


def test_many_rows_use_large_tiles() -> None:
    attention = backend(num_blocks=700)
    check(attention, cases.make_step(attention, [1100, 1, 500], [1100, 900, 620], rows=2048))
    check(attention, cases.make_step(attention, [1] * 300, [20] * 300, uniform_query_len=1))
    check(attention, cases.make_step(attention, [1] * 300, [20] * 300))


def test_share_in_step_lets_a_request_read_what_another_one_writes() -> None:
    attention = backend(share_in_step=True)
    step = cases.make_step(attention, [16, 1], [16, 17], seed=3)
    step.context.block_tables[1, 0] = step.context.block_tables[0, 0]
    check(attention, step)


@pytest.mark.parametrize("share_in_step", [False, True])
def test_a_bound_call_sees_what_is_in_its_buffers_now(share_in_step: bool) -> None:
    attention = backend(share_in_step=share_in_step)
    step = cases.make_step(attention, *BATCHES["mixed"])
    out = torch.full_like(step.q, float("nan"))
    args = (step.q, step.k, step.v, out, 0, step.context)
    with torch.cuda.stream(torch.cuda.Stream()):
        attention.forward(*args)
        again = attention.bind(*args)
        assert again is not None
        for tensor in (step.q, step.k, step.v):
            tensor.normal_()
        step.context.kv_lens[0] -= 100
        out.fill_(float("nan"))
        again()
        got = out.clone()
        out.fill_(float("nan"))
        attention.forward(*args)
        torch.cuda.synchronize()
    assert not got.isnan().any()
    assert torch.equal(got, out)


def test_a_cache_beyond_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    attention = backend(num_blocks=140_000)
    step = cases.make_step(attention, [1, 40], [500, 300])
    assert int(step.context.slot_mapping.max()) * 8 * 128 > 1 << 30
    step.context.block_tables[0, :32] = torch.arange(139_000, 139_032)
    step.context.slot_mapping[0] = 139_000 * 16 + 499
    attention.kv_cache[0][:, 139_000:139_032] = torch.randn_like(
        attention.kv_cache[0][:, 139_000:139_032]
    )
    want, _ = cases.expected(attention, step)
    assert cases.error(cases.run(attention, step), want) < TOLERANCE[torch.bfloat16]


def test_splits_give_the_same_bits_every_time() -> None:
    # A program that combines before another one's partial result has arrived shows up here.
    attention = backend()
    step = cases.make_step(attention, *BATCHES["decode"], rows=8, uniform_query_len=1)
    first = cases.run(attention, step)
    output = torch.empty_like(first)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(500):
        output.fill_(float("nan"))
        attention.forward(step.q, step.k, step.v, output, 0, step.context)
        wrong += (output != first).sum()
    assert int(wrong) == 0


def capture(attention: TritonAttention, step: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    output = torch.full_like(step.q, float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention.forward(step.q, step.k, step.v, output, 0, step.context)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        attention.forward(step.q, step.k, step.v, output, 0, step.context)
    return graph, output


def replay_other_lengths(
    attention: TritonAttention, rows: int, uniform: int | None, draw: Any, count: int
) -> None:
    limits = {"rows": rows, "max_reqs": 8, "max_blocks": 140, "uniform_query_len": uniform}
    static = cases.make_step(attention, [uniform or 1], [uniform or 1], **limits)
    graph, output = capture(attention, static)
    for seed in range(count):
        query_lens, seq_lens = draw(random.Random(seed))
        step = cases.make_step(attention, query_lens, seq_lens, seed=seed, **limits)
        want, cache = cases.expected(attention, step)
        cases.copy_metadata(step.context, static.context)
        for name in ("q", "k", "v"):
            getattr(static, name).copy_(getattr(step, name))
        output.fill_(float("nan"))
        graph.replay()
        assert cases.error(output, want) < TOLERANCE[output.dtype], (query_lens, seq_lens)
        assert not output[step.num_tokens :].any()
        assert cases.same_cache(attention.kv_cache[0], cache)
        assert not attention.kv_cache[0][:, 0].any()


@pytest.mark.parametrize("uniform", [1, 3])
def test_a_captured_uniform_step_serves_every_length(uniform: int) -> None:
    def draw(rng: random.Random) -> tuple[list[int], list[int]]:
        count = rng.randint(1, 8)
        return [uniform] * count, [rng.choice([uniform, rng.randint(3, 700)]) for _ in range(count)]

    replay_other_lengths(backend(), 8 * uniform, uniform, draw, 25)


@pytest.mark.parametrize("rows", [8, 64, 200])
def test_a_captured_mixed_step_serves_every_batch(rows: int) -> None:
    def draw(rng: random.Random) -> tuple[list[int], list[int]]:
        query_lens, left = [], rng.randint(1, rows)
        while left and len(query_lens) < 8:
            query_lens.append(rng.choice([1, 1, rng.randint(1, left)]))
            left -= query_lens[-1]
        return query_lens, [n + rng.choice([0, rng.randint(0, 500)]) for n in query_lens]

    replay_other_lengths(backend(), rows, None, draw, 25)


def test_forward_waits_for_nothing_and_allocates_nothing() -> None:
    attention = backend()
    step = cases.make_step(attention, *BATCHES["mixed"])
    output = cases.run(attention, step)
    attention.forward(step.q, step.k, step.v, output, 0, step.context)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        attention.forward(step.q, step.k, step.v, output, 0, step.context)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_cpu_is_refused_without_the_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"device='cpu'.*attention=paged"):
        TritonAttention(
            cases.spec(1, 1, 16),
            num_blocks=2,
            block_size=16,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
