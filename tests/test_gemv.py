"""`compiler.passes=[gemv]`: which products become one op, and at which sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_helpers import trace_of

from pcgsvc.capture.plan import _idle_gemv
from pcgsvc.compilers.inductor import compile_piece
from pcgsvc.config import Compiler, CompilerConfig, Config, from_dict, resolve
from pcgsvc.ops import gemv as gemv_module
from pcgsvc.ops.gemv import fuse_small_products
from pcgsvc.ops.gemv_tuning import Choice, Plan
from pcgsvc.partition.fx import partition_fx

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
WIDTH, INNER = 32, 48


class Builder:
    """A graph after Inductor's decompositions; every node carries the value of one run."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.graph, self.inputs, self.dtype = torch.fx.Graph(), list[torch.Tensor](), dtype
        self.x = self.input(rows, WIDTH)

    def input(self, *shape: int, transposed: bool = False) -> torch.fx.Node:
        value = torch.randn(*shape).div(4).to(self.dtype)
        self.inputs.append(value.t().contiguous().t() if transposed else value)
        node = self.graph.placeholder(f"in{len(self.inputs)}")
        node.meta["val"] = self.inputs[-1]
        return node

    def op(self, target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def product(self, x: torch.fx.Node, columns: int, *, transposed: bool = False) -> torch.fx.Node:
        weight = self.input(columns, x.meta["val"].shape[1], transposed=transposed)
        return self.op(aten.mm.default, x, self.op(aten.permute.default, weight, [1, 0]))

    def norm(self, x: torch.fx.Node, weight: torch.fx.Node) -> torch.fx.Node:
        wide = self.op(convert, x, torch.float32)
        mean = self.op(aten.mean.dim, self.op(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
        scale = self.op(aten.rsqrt.default, self.op(aten.add.Tensor, mean, 1e-5))
        scaled = self.op(convert, self.op(aten.mul.Tensor, wide, scale), torch.bfloat16)
        return self.op(aten.mul.Tensor, weight, scaled)

    def halves(self, x: torch.fx.Node) -> list[torch.fx.Node]:
        split = self.op(aten.split.Tensor, x, x.meta["val"].shape[1] // 2, -1)
        return [self.op(operator.getitem, split, at) for at in (0, 1)]

    def swiglu(self, gate: torch.fx.Node, up: torch.fx.Node) -> torch.fx.Node:
        wide = self.op(convert, gate, torch.float32)
        below = self.op(aten.exp.default, self.op(aten.neg.default, wide))
        below = self.op(aten.add.Tensor, below, 1)
        silu = self.op(convert, self.op(aten.div.Tensor, wide, below), torch.bfloat16)
        return self.op(aten.mul.Tensor, silu, up)

    def fused(self, *outputs: torch.fx.Node) -> list[torch.fx.Node]:
        """Run the pass; return the calls of the one op, whose results are still right."""
        self.graph.output(outputs)
        module = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        before = module(*self.inputs)
        self.problems = fuse_small_products(self.graph)
        self.graph.lint()
        module.recompile()
        for got, wanted in zip(module(*self.inputs), before, strict=True):
            assert torch.equal(got, wanted)
        return [n for n in self.graph.nodes if n.target is torch.ops.pcgsvc.gemv.default]


PLAN = Plan(8, 16, 2, 1)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv_module, "_DEVICE", "cpu")
    monkeypatch.setattr(gemv_module, "_MIN_BYTES", 0)
    choose(monkeypatch, Choice(PLAN))


def choose(monkeypatch: pytest.MonkeyPatch, choice: Choice) -> None:
    monkeypatch.setattr(gemv_module, "choose_plan", lambda *_: choice)


def parts(call: torch.fx.Node) -> tuple[bool, bool, bool]:
    """Whether a call has a norm, a residual and a gate."""
    norm, residual, gated = call.args[2:5]
    return norm is not None, residual is not None, bool(gated)


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_block_becomes_one_op_per_product(rows: int) -> None:
    b, one = Builder(rows), rows == 1  # more rows are normed by a kernel of their own
    x = b.op(aten.add.Tensor, b.x, b.product(b.input(rows, WIDTH), WIDTH))
    gate, up = b.halves(b.product(b.norm(x, b.input(WIDTH)), 2 * INNER))
    x = b.op(aten.add.Tensor, b.product(b.swiglu(gate, up), WIDTH), x)
    calls = b.fused(b.product(b.norm(x, b.input(WIDTH)), 3 * WIDTH), x)
    assert [parts(c) for c in calls] == [
        (False, True, False),
        (one, False, True),
        (False, True, False),
        (one, False, False),
    ]
    assert all(c.args[-1] == list(PLAN) for c in calls)
    assert not [n for n in b.graph.nodes if n.target is aten.mm.default]


@pytest.mark.parametrize(
    "product",
    [
        lambda: (b := Builder(17), b.product(b.x, WIDTH)),
        lambda: (b := Builder(4, torch.float32), b.product(b.x, WIDTH)),
        lambda: (b := Builder(4), b.product(b.x, WIDTH, transposed=True)),
        lambda: (b := Builder(4), b.op(aten.mm.default, b.x, b.input(WIDTH, WIDTH))),
    ],
    ids=["rows", "dtype", "layout", "not a weight"],
)
def test_other_products_are_left_alone(product: Callable[[], Any]) -> None:
    builder, node = product()
    assert builder.fused(node) == []


def test_a_row_count_that_is_no_number_is_left_alone() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    b = Builder(4)
    node = b.product(b.x, WIDTH)
    rows, value = ShapeEnv().create_unbacked_symint(), b.x.meta["val"]
    b.x.meta["val"] = SimpleNamespace(shape=(rows, WIDTH), dtype=value.dtype, device=value.device)
    assert b.fused(node) == []


def test_small_weights_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv_module, "_MIN_BYTES", 2 * WIDTH * WIDTH + 1)
    b = Builder(4)
    assert b.fused(b.product(b.x, WIDTH)) == []


def test_what_torch_does_faster_stays_and_what_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for problem, told in ((None, []), ("it", ["compiler.passes: gemv is off for it"])):
        choose(monkeypatch, Choice(None, problem))
        b = Builder(4)
        assert b.fused(b.product(b.x, WIDTH)) == []
        assert b.problems == told


def test_what_is_read_elsewhere_stays() -> None:
    b = Builder(1)
    normed = b.norm(b.x, b.input(WIDTH))
    gate, up = b.halves(product := b.product(normed, 2 * INNER))
    (call,) = b.fused(b.swiglu(gate, up), product, normed)
    assert parts(call) == (True, False, False)


def test_a_bias_is_no_residual() -> None:
    b = Builder(4)
    (call,) = b.fused(b.op(aten.add.Tensor, b.product(b.x, WIDTH), b.input(WIDTH)))
    assert parts(call) == (False, False, False)


def test_swiglu_the_other_way_round_is_not_taken_for_it() -> None:
    b = Builder(4)
    gate, up = b.halves(b.product(b.x, 2 * INNER))
    (call,) = b.fused(b.swiglu(up, gate))
    assert parts(call) == (False, False, False)


# ---- settings, compiling -------------------------------------------------------------------------


def configured(device: str, **settings: Any) -> Config:
    compiler = {"name": "inductor", "passes": ["gemv"], **settings.pop("compiler", {})}
    tree = {"compiler": compiler, "capture": {"sizes": [1, 8, 16, 32]}, **settings}
    return resolve(from_dict(tree), device_type=device)


def test_it_brings_exact_sizes_on_cuda() -> None:
    assert configured("cuda").compiler.specialize_sizes == [1, 8, 16]
    assert configured("cuda", compiler={"specialize_sizes": [8, 32]}).compiler.specialize_sizes == [
        8,
        32,
    ]
    for none in (
        configured("cpu"),
        configured("cuda", compiler={"passes": ["residual_add"]}),
        configured("cuda", partition={"strategy": "breakable"}),
    ):
        assert none.compiler.specialize_sizes == []


@pytest.mark.parametrize(
    ("device", "settings", "told"),
    [
        ("cuda", {}, False),
        ("cuda", {"compiler": {"specialize_sizes": [32]}}, True),
        ("cuda", {"partition": {"strategy": "breakable"}}, True),
        ("cpu", {}, False),
    ],
)
def test_where_it_can_do_nothing_is_told(device: str, settings: dict[str, Any], told: bool) -> None:
    request: Any = SimpleNamespace(
        config=configured(device, **settings), device=torch.device(device)
    )
    assert any("gemv does nothing" in warning for warning in _idle_gemv(request)) is told


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.randn(3, WIDTH).bfloat16()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


@pytest.mark.slow
def test_a_region_of_an_exact_size_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Product().eval()
    (piece,) = partition_fx(trace_of(module, module.x), None).pieces
    config = CompilerConfig(name=Compiler.INDUCTOR, passes=["gemv"])
    assert "pcgsvc.gemv" not in compile_piece(piece, config).generated()
    exact = compile_piece(piece, config, size=4)
    assert "pcgsvc.gemv" in exact.generated()
    assert exact.problems == []
    x = torch.randn(4, WIDTH).bfloat16()
    values = [node.meta["example_value"] for node in piece.inputs]
    args = [
        (module.weight if v.shape[0] == WIDTH else x) if isinstance(v, torch.Tensor) else len(x)
        for v in values
    ]
    (got,) = exact(*args)
    assert torch.equal(got, module(x))
    choose(monkeypatch, Choice(None, "it"))
    assert compile_piece(piece, config, size=5).problems == ["compiler.passes: gemv is off for it"]
