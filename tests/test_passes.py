"""`compiler.passes`: custom passes by name, and the shipped one that sees across a boundary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_helpers import make_config, rows, trace_of
from model_helpers import make_context
from torch import nn

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.capture.capture import _check_boundaries
from pcgsvc.capture.plan import BatchDescriptor
from pcgsvc.compilers import passes
from pcgsvc.compilers.environment import environment_facts
from pcgsvc.compilers.inductor import InductorPiece, compile_piece
from pcgsvc.compilers.passes import GraphPass, find_passes, pass_options
from pcgsvc.compilers.residual_add import split_residual_adds
from pcgsvc.config import Compiler, CompilerConfig, Config, Mode, resolve, validate
from pcgsvc.errors import CaptureError, ConfigError
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.attention_quant import attention_quant, quantize
from pcgsvc.ops.context import use_context
from pcgsvc.ops.registry import stand_ins, traced_name
from pcgsvc.partition.fx import partition_fx
from pcgsvc.partition.inductor import partition_inductor
from pcgsvc.program.keys import key_of
from pcgsvc.program.pieces import Piece
from pcgsvc.program.program import Direct, Program, program_of

HEADS, WIDTH, SCALE = 2, 4, 0.05


class Attention(AttentionBackend):
    """A stand-in for a backend: no cache, and as many rows as there are."""

    def __init__(self) -> None:
        pass

    def forward(self, q: Any, k: Any, v: Any, output: Any, layer: int, context: Any) -> None:
        output.copy_(torch.softmax(q * k, -1) * v + layer)


class Quantised(nn.Module):
    """Attention, quantised, and read back; `keep` reads what attention gave as well."""

    def __init__(self, *, keep: bool = False, part: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.keep, self.part = keep, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).unflatten(-1, (HEADS, -1))
        if self.part:  # a part of a larger buffer
            whole = torch.zeros(x.shape[0], 2 * HEADS, WIDTH // HEADS)
            out = whole[:, :HEADS]
        else:
            whole = out = torch.empty_like(h)
        torch.ops.pcgsvc.attention(h, h, h, out, 1)
        small = torch.ops.pcgsvc.quantize(whole.flatten(1), SCALE)
        y: torch.Tensor = x + small[:, :WIDTH].to(x.dtype) * SCALE
        return y + out.flatten(1) if self.keep else y


def with_pass(**settings: Any) -> CompilerConfig:
    return CompilerConfig(name=Compiler.INDUCTOR, passes=["attention_quant"], **settings)


def compiled(piece: Piece, config: CompilerConfig) -> tuple[InductorPiece, str]:
    made = compile_piece(piece, config)
    return made, torch_private.inductor_source(made._artifact)


def program_and_sources(module: nn.Module, config: CompilerConfig, *, whole: bool) -> Any:
    """Compile as the pipeline does; return (a function of x, the sources of all pieces)."""
    traced = trace_of(module.eval())
    plan = partition_fx(traced, None)
    partition = partition_inductor(traced, plan) if whole else plan
    made = {h: compiled(p, config) for h, p in partition.unique().items()}
    program = Program(program_of(traced, partition), {h: piece for h, (piece, _) in made.items()})

    def run(x: torch.Tensor) -> torch.Tensor:
        own = {"size": x.shape[0], "input": x}
        values = [own[b.kind] if b.kind in own else traced.tensors[b.name] for b in traced.bindings]
        with torch.no_grad(), use_context(make_context(Attention(), [x.shape[0]])):
            result: torch.Tensor = program.run(values, Direct())[0]
        return result

    return run, "\n".join(source for _, source in made.values())


def plain(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), use_context(make_context(Attention(), [x.shape[0]])):
        result: torch.Tensor = module(x)
    return result


# ---- residual_add ----


def with_addmm(device: str, bias: tuple[int, ...], **scale: float) -> torch.fx.Graph:
    """Return a graph of one addmm as Inductor's decompositions leave it."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "xab"]
    nodes.append(graph.call_function(torch.ops.aten.addmm.default, tuple(nodes), scale))
    for node, shape in zip(nodes, (bias, (4, 8), (8, 6), (4, 6)), strict=True):
        where = torch.device(device)  # no tensor: there may be no such device here
        node.meta["val"] = SimpleNamespace(shape=shape, dtype=torch.float32, device=where)
    graph.output((nodes[-1], nodes[-1]))
    return graph


def ops_of(graph: torch.fx.Graph) -> list[str]:
    return [str(n.target).split("::")[-1] for n in graph.nodes if n.op == "call_function"]


def test_a_residual_is_added_outside_the_product() -> None:
    graph = with_addmm("cuda", (4, 6))
    split_residual_adds(graph)
    assert ops_of(graph) == ["aten.mm.default", "aten.add.Tensor"]
    x, a, b = torch.randn(4, 6), torch.randn(4, 8), torch.randn(8, 6)
    first, second = torch.fx.GraphModule(torch.nn.Module(), graph)(x, a, b)
    assert first is second
    assert torch.equal(first, x + a @ b)


@pytest.mark.parametrize(
    ("device", "bias", "scale"),
    [("cpu", (4, 6), {}), ("cuda", (6,), {}), ("cuda", (1, 6), {}), ("cuda", (4, 6), {"beta": 2})],
)
def test_a_bias_and_a_scaled_sum_stay_in_the_product(
    device: str, bias: tuple[int, ...], scale: dict[str, float]
) -> None:
    graph = with_addmm(device, bias, **scale)
    split_residual_adds(graph)
    assert ops_of(graph) == ["aten.addmm.default"]


def test_the_default_passes_are_by_device_and_compiler() -> None:
    def passes_of(device_type: str, name: Compiler, chosen: list[str] | None = None) -> Any:
        config = Config(compiler=CompilerConfig(name=name, passes=chosen))
        return resolve(config, device_type=device_type).compiler.passes

    assert passes_of("cuda", Compiler.INDUCTOR) == ["residual_add"]
    assert passes_of("cuda", Compiler.INDUCTOR, []) == []
    assert passes_of("cpu", Compiler.INDUCTOR) is None
    assert passes_of("cuda", Compiler.EAGER) is None


# ---- names and keys ------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(
        ConfigError, match=r"compiler\.passes: got 'attention_quan'.*attention_quant"
    ):
        find_passes(["attention_quan"])
    with pytest.raises(ConfigError, match="stands twice"):
        find_passes(["attention_quant", "attention_quant"])


def test_a_build_refuses_an_unknown_name_before_it_traces() -> None:
    config = make_config(compiler="inductor")
    config.compiler.passes = ["nothing"]
    with pytest.raises(ConfigError, match=r"compiler\.passes: got 'nothing'"):
        pcgsvc.build_runner(Quantised().eval(), rows(3), dynamic_dims={"x": 0}, config=config)


def test_eager_refuses_passes() -> None:
    config = resolve(Config(), device_type="cpu")
    config.compiler.passes = ["attention_quant"]
    with pytest.raises(ConfigError, match=r"compiler\.passes: .*use compiler=inductor"):
        validate(config, device_type="cpu")


def test_a_pass_s_source_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(names: list[str]) -> str:
        config = resolve(Config(), device_type="cpu")
        config.compiler = CompilerConfig(name=Compiler.INDUCTOR, passes=names)
        return key_of(environment_facts(config, torch.device("cpu")))

    before = key(["attention_quant"])
    assert key([]) != before == key(["attention_quant"])
    other = GraphPass(run=lambda graph: None)  # of another file
    monkeypatch.setitem(passes.PASSES, "attention_quant", other)
    assert key(["attention_quant"]) != before


def test_passes_are_installed_before_or_after_inductor_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pass_options([]) == {}
    ran: list[str] = []
    for name, late in (("a", False), ("b", True), ("c", False)):
        run = lambda graph, name=name: ran.append(name)  # noqa: E731
        monkeypatch.setitem(passes.PASSES, name, GraphPass(run=run, late=late))
    options = pass_options(["c", "b", "a"])
    options["post_grad_custom_pre_pass"](torch.fx.Graph())
    assert ran == ["c", "a"]
    options["post_grad_custom_post_pass"](torch.fx.Graph())
    assert ran == ["c", "a", "b"]


# ---- the ops -------------------------------------------------------------------------------------


def test_the_one_op_computes_what_the_two_do() -> None:
    x = rows(5).unflatten(-1, (HEADS, -1))
    exact, small = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8)
    with use_context(make_context(Attention(), [5])):
        torch.ops.pcgsvc.attention(x, x, x, exact, 1)
        attention_quant(x, x, x, small, 1, SCALE)
    assert torch.equal(small, quantize(exact, SCALE))
    assert torch.equal(quantize(torch.tensor([-9.0, 0.3, 9.0]), 0.05), torch.tensor([-128, 6, 127]))


def test_the_one_op_stands_for_attention() -> None:
    assert stand_ins(["pcgsvc::attention"]) == {"pcgsvc::attention_quant"}
    assert traced_name("pcgsvc::attention_quant") == "pcgsvc::attention"
    assert traced_name("pcgsvc::attention") == "pcgsvc::attention"


def test_capture_takes_the_one_op_for_the_boundary_that_was_traced() -> None:
    def check(*hit: str) -> None:
        program: Any = SimpleNamespace(boundaries=("pcgsvc::attention", "toy::attend"))
        entry: Any = SimpleNamespace(boundaries=hit)
        key = (Mode.PIECEWISE, BatchDescriptor(4, 4, uniform=False))
        _check_boundaries(program, entry, key)

    check("pcgsvc::attention", "toy::attend")
    check("pcgsvc::attention_quant", "toy::attend")
    with pytest.raises(CaptureError, match=r"changed the order of calls .*strategy=fx keeps it"):
        check("toy::attend", "pcgsvc::attention_quant")
    with pytest.raises(CaptureError, match=r"Nothing reads what \['toy::attend'\] return or write"):
        check("pcgsvc::attention")
    with pytest.raises(CaptureError, match=r"those traced were .*\]\.$"):
        check("pcgsvc::attention", "toy::other")


# ---- the pass ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_fires_on_the_whole_graph_and_cannot_on_its_pieces() -> None:
    module = Quantised()
    whole, source = program_and_sources(module, with_pass(), whole=True)
    assert "pcgsvc.attention_quant" in source
    assert "pcgsvc.quantize" not in source
    pieces, source = program_and_sources(module, with_pass(), whole=False)
    assert "pcgsvc.attention_quant" not in source
    assert "pcgsvc.quantize" in source
    for count in (3, 8):
        x = rows(count)
        torch.testing.assert_close(whole(x), plain(module, x))
        torch.testing.assert_close(pieces(x), plain(module, x))


@pytest.mark.slow
def test_without_its_name_nothing_changes() -> None:
    config = CompilerConfig(name=Compiler.INDUCTOR)
    _, source = program_and_sources(Quantised(), config, whole=True)
    assert "pcgsvc.attention_quant" not in source


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keep", "part"])
def test_it_does_not_fire_where_the_exact_values_are_needed(kind: str) -> None:
    module = Quantised(keep=kind == "keep", part=kind == "part")
    whole, source = program_and_sources(module, with_pass(), whole=True)
    assert "pcgsvc.attention_quant" not in source
    torch.testing.assert_close(whole(rows(3)), plain(module, rows(3)))


@pytest.mark.slow
def test_a_stored_artifact_calls_the_one_op_again() -> None:
    traced = trace_of(Quantised().eval())
    partition = partition_inductor(traced, partition_fx(traced, None))
    made, _ = compiled(partition.pieces[0], with_pass())
    again = InductorPiece.from_bytes(made.to_bytes(), 1, made.boundaries)
    assert again.boundaries is not None
    assert "pcgsvc::attention_quant" in again.boundaries.names
