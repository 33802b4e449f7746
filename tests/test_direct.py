"""Inductor's pieces without Inductor: what is taken out of generated code, and what is refused.

The kernels themselves need a GPU; see tests/gpu/test_compiler_gpu.py.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pcgsvc import torch_private
from pcgsvc.compilers import direct
from pcgsvc.compilers.direct import DirectArtifact, extract
from pcgsvc.torch_private import Generated, NotDirectError

HEAD = """
import math
import torch
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
inductor_ops = torch.ops.inductor
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
unused = AsyncCompile
scale = 2 * math.pi
"""

BODY = """
def partition_0(args):
    x, w = args
    args.clear()
    assert_size_stride(x, (4, 3), (3, 1))
    out = torch.empty(4, 3, dtype=x.dtype)
    extern_kernels.mm(x, w, out=out)
    return (aten.mul.Tensor(out, scale), )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        return self.partitions[0](args)

runner = Runner(partitions=[partition_0])
call = runner.call
"""


def generated(monkeypatch: pytest.MonkeyPatch, source: str, aligned: tuple[int, ...] = ()) -> Any:
    """Return an artifact for whose generated module `source` stands."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    found = Generated(source=source, namespace=namespace, aligned=list(aligned))
    artifact = object()
    monkeypatch.setattr(torch_private, "inductor_generated", {artifact: found}.__getitem__)
    return artifact


def refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> str:
    with pytest.raises(NotDirectError) as caught:
        extract(generated(monkeypatch, source), tmp_path, 1)
    return str(caught.value)


@pytest.mark.slow
def test_the_form_computes_what_the_module_did_and_holds_nothing_of_inductor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    artifact = generated(monkeypatch, HEAD + BODY)
    form, files = extract(artifact, tmp_path, 5)
    assert not files
    assert "inductor" not in form["source"]
    assert "unused" not in form["source"]
    assert form["extern"] == ["mm"]
    x, w = torch.randn(4, 3), torch.randn(3, 3)
    made = DirectArtifact(form, tmp_path, 0)
    assert torch.equal(made(x, w)[0], torch.mm(x, w) * (2 * torch.pi))
    assert made.num_kernels == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("inductor_ops.seeds(3)", "torch.ops.inductor"),
        ("AsyncCompile()", "torch._inductor.async_compile.AsyncCompile"),
        ("extern_kernels.bias_addmm(x, x, w)", "extern_kernels.bias_addmm"),
        ("print(extern_kernels)", "passes extern_kernels on"),
        ("torch._inductor.config", "torch._inductor.config"),
        ("elsewhere(x)", "elsewhere"),
    ],
)
def test_code_that_needs_inductor_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, named: str
) -> None:
    source = HEAD + BODY.replace("    args.clear()\n", f"    args.clear()\n    {line}\n", 1)
    assert named in refuse(monkeypatch, tmp_path, source)


@pytest.mark.slow
def test_misaligned_inputs_are_copied_with_their_strides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = "def call(args):\n    return tuple(args)\n"
    form, _ = extract(generated(monkeypatch, source, aligned=(0,)), tmp_path, 1)
    x = torch.arange(64.0)[1:33].view(4, 8).t()
    assert x.data_ptr() % 16
    (got,) = DirectArtifact(form, tmp_path, 0)(x)
    assert got.data_ptr() % 16 == 0
    assert got.stride() == x.stride()
    assert torch.equal(got, x)


def test_a_launcher_works_the_grid_out_and_leaves_constants_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched: list[Any] = []

    def load(path: Path, **words: Any) -> Any:
        assert path == tmp_path / "triton/abc/k.cubin"
        assert words == {
            "name": "k",
            "shared": 16,
            "num_warps": 4,
            "types": "OOi",
            "num_scratch": 1,
            "device": 3,
        }
        return lambda *args: launched.append(args)

    monkeypatch.setattr(torch_private, "load_static_kernel", load)
    kernel: Mapping[str, Any] = {
        "file": "triton/abc/k.cubin",
        "name": "k",
        "shared": 16,
        "num_warps": 4,
        "types": "OOi",
        "num_scratch": 1,
        "params": ["in_ptr0", "out_ptr0", "xnumel", "XBLOCK"],
        "args": ["in_ptr0", "out_ptr0", "xnumel"],
        "prefix": ["blocks = -(xnumel // -8)"],
        "grid": ["blocks", "1", "1"],
    }
    direct._launcher(kernel, tmp_path, 3)("a", "b", 20, 8, stream=7)
    assert launched == [(3, 1, 1, 7, "a", "b", 20)]


def test_a_kernel_whose_binary_is_gone_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = types.SimpleNamespace()
    monkeypatch.setattr(torch_private, "is_inductor_kernel", lambda value: value is kernel)
    monkeypatch.setattr(
        torch_private, "static_kernel", lambda value: {"name": "k", "cache_hash": "abc"}
    )
    found = Generated(
        source="def call(args):\n    return k.run(args, stream=0)\n",
        namespace={"k": kernel},
        aligned=[],
    )
    monkeypatch.setattr(torch_private, "inductor_generated", lambda artifact: found)
    with pytest.raises(NotDirectError, match=r"its binary is not in .*abc/k\.cubin"):
        extract(object(), tmp_path, 1)
