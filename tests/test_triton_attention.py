"""`attention=triton`: what needs no triton here; the kernels in a process with the interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import make_step, run, spec

from pcgsvc.errors import ConfigError
from pcgsvc.ops import triton_attention
from pcgsvc.ops.triton_attention import TritonAttention
from pcgsvc.ops.triton_tuning import Shape, Tuning, plan_launch

HERE = Path(__file__).parent
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed here (CPU builds of torch bring none); pip install triton",
)
LLAMA_8B = Shape(
    num_kv_heads=8, group=4, head_pad=128, itemsize=2, slots=264, shared_bytes=227 << 10
)


def build(device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> None:
    heads, kv_heads, dim = options.pop("heads", (4, 2, 16))
    TritonAttention(
        spec(heads, kv_heads, dim, layers=2),
        num_blocks=2,
        block_size=16,
        device=torch.device(device),
        dtype=dtype,
        **options,
    )


def interpreter_is_broken() -> bool:
    """Whether triton turns one-element arrays into numbers in a way that numpy 2.4 refuses."""
    triton, numpy = (
        tuple(int(part) for part in metadata.version(name).split(".")[:2])
        for name in ("triton", "numpy")
    )
    return triton < (3, 7) and numpy >= (2, 4)


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_triton
def test_the_kernels_pass_their_cases_in_the_interpreter() -> None:
    if interpreter_is_broken():
        pytest.skip("triton below 3.7 interprets with numpy below 2.4 only")
    # Triton 3.6 makes numbers of one-element arrays, of which numpy below 2.4 only warns.
    arguments = ["-q", "-x", "-W", "ignore:Conversion of an array:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(HERE / "triton_interpreter_cases.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


COMPILED = {
    "decode": ([1] * 8, 1, torch.bfloat16, 128),
    "mixed": ([5, 1, 2], None, torch.float16, 128),
    "prefill": ([600, 500], None, torch.bfloat16, 96),
    "float32": ([70, 1], None, torch.float32, 64),
}


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
@pytest.mark.parametrize("batch", list(COMPILED))
def test_the_kernels_compile_for_hopper_without_a_gpu(
    batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pcgsvc.ops import triton_kernels

    compiled = []

    def compile_only(
        kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: int
    ) -> None:
        signature, constants, attributes = {}, {}, {}
        for index, (parameter, arg) in enumerate(zip(kernel.params, args, strict=True)):
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = arg
            elif isinstance(arg, torch.Tensor):
                signature[parameter.name] = POINTERS[arg.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32"
        source = ASTSource(kernel, signature, constants, attributes)
        compiled.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))

    query_lens, uniform, dtype, dim = COMPILED[batch]
    monkeypatch.setattr(triton_attention, "_load_kernels", lambda _: (triton_kernels, False))
    monkeypatch.setattr(triton_attention, "_launch", compile_only)
    attention = TritonAttention(
        spec(8, 2, dim), num_blocks=99, block_size=16, device=torch.device("cpu"), dtype=dtype
    )
    run(attention, make_step(attention, query_lens, query_lens, uniform_query_len=uniform))
    assert len(compiled) == (
        1 if uniform == 1 else 2
    )  # the cache is written in a launch of its own
    assert all(kernel.metadata.shared <= 227 << 10 for kernel in compiled)


def test_importing_the_backend_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    found = importlib.util.spec_from_file_location(
        "fresh_triton_attention", Path(triton_attention.__file__)
    )
    assert found is not None
    assert found.loader is not None
    found.loader.exec_module(importlib.util.module_from_spec(found))


def test_missing_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "pcgsvc.ops.triton_kernels", raising=False)
    with pytest.raises(ConfigError, match=r"pip install triton.*attention=paged"):
        build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "float32, float16 or bfloat16"),
        ({"heads": (4, 2, 257)}, "head_dim 257; 1 to 256"),
        ({"heads": (256, 1, 16)}, "at most 128 query heads per KV head"),
    ],
)
def test_what_the_kernels_lack_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)


def plan(rows: int, *, single: bool = True, max_keys: int = 4096, **tuning: Any) -> Any:
    return plan_launch(
        LLAMA_8B,
        Tuning(**tuning),
        rows=rows,
        num_reqs=256,
        max_keys=max_keys,
        single=single,
        share_in_step=False,
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 24, 40, 64, 100, 256, 2048])
@pytest.mark.parametrize("single", [True, False])
def test_splits_fit_the_scratch_and_fill_the_device(rows: int, single: bool) -> None:
    made = plan(rows, single=single)
    programs = made.tiles * LLAMA_8B.num_kv_heads
    assert made.splits == 1 or programs * made.splits <= LLAMA_8B.scratch_programs
    assert (
        programs * made.splits >= 0.8 * LLAMA_8B.slots
        or made.splits == 4096 // 128
        or made.splits == 64
    )


def test_short_sequences_are_not_split() -> None:
    assert plan(1, max_keys=32).splits == 1
    assert plan(1, max_keys=33).splits == 2
    assert plan(1, max_keys=128, single=False).splits == 1
    assert plan(1, max_keys=129, single=False).splits == 2
    assert plan(1, max_keys=129, split_keys=129).splits == 1


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 512])
def test_tiles_hold_every_mix_of_requests(rows: int) -> None:
    made = plan(rows, single=False)
    block_q = made.tiling.block_m // LLAMA_8B.group
    for query_lens in ([1] * min(rows, 256), [rows], [1, *[rows - 1] * (rows > 1)]):
        end, start = 0, 0
        for request, query_len in enumerate(query_lens):
            first = start // block_q + request
            assert first >= end, "tiles of two requests overlap"
            end, start = first + -(-query_len // block_q), start + query_len
        assert end <= made.tiles


def test_large_mixed_launches_leave_the_cache_write_to_a_launch_of_its_own() -> None:
    assert plan(128, single=False).fused_write
    assert not plan(129, single=False).fused_write
    assert plan(1024, single=True).fused_write
