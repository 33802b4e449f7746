"""The fx partition: where graphs are cut, what crosses, what is shared, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import (
    WIDTH,
    attended,
    build,
    kinds,
    partition_of,
    rows,
    toy,
    trace_of,
)
from torch import nn

import pcgsvc
from pcgsvc.errors import CompileError, ConfigError, SplitError, TraceError
from pcgsvc.partition.fx import canonical_op_name, partition_fx
from pcgsvc.program.pieces import Kind, Partition, graph_module
from pcgsvc.program.program import program_of

LIBRARY = torch.library.Library("fxtest", "FRAGMENT")
LIBRARY.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("unsafe", lambda x: x * 3, "CompositeExplicitAutograd")
torch.library.register_fake("fxtest::unsafe", lambda x: torch.empty_like(x), lib=LIBRARY)


@torch.library.custom_op("fxtest::count", mutates_args=())
def count(x: torch.Tensor) -> int:
    return int((x > 0).sum())


@count.register_fake
def _(x: torch.Tensor) -> Any:
    return torch.library.get_ctx().new_dynamic_size()


def equal(module: Callable[..., Any], sizes: tuple[int, ...] = (5, 8, 5), **settings: Any) -> None:
    """Check that a runner gives what the module gives; `attend` of ours needs no context there."""
    with build(module, **settings) as runner:
        for at, size in enumerate(sizes):
            x = rows(size, seed=at)
            torch.testing.assert_close(runner(x), plain(module, x))


def plain(module: Callable[..., Any], x: torch.Tensor) -> Any:
    """Call a module under a context without padding."""
    from model_helpers import make_context

    from pcgsvc.ops.context import use_context

    with torch.no_grad(), use_context(make_context(None, [len(x)])):
        return module(x)


# ---- where it is cut -----------------------------------------------------------------------------


def test_toy_of_three_blocks_has_three_boundaries_and_four_regions() -> None:
    partition = partition_of(toy(3))
    assert kinds(partition) == "RBRBRBR"
    assert partition.matched == {"toy::attend": 3}


def test_regions_and_boundaries_say_why_they_are_there() -> None:
    reasons = [p.reason for p in partition_of(toy(2)).pieces]
    assert reasons[0] == "before the first splitting op"
    assert reasons[2] == "between two splitting ops"
    assert reasons[4] == "after the last splitting op"
    assert "registered" in reasons[1]
    assert all(reasons)


def test_names_are_dense_and_in_order() -> None:
    names = [p.name for p in partition_of(toy(3)).pieces]
    assert names == [f"piece_{i:02d}" for i in range(len(names))]


PLACES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "only": (attended, "B"),
    "twice": (lambda x: attended(attended(x)), "B"),
    "first": (lambda x: torch.relu(attended(x)), "BR"),
    "last": (lambda x: attended(torch.relu(x)), "RB"),
    "none": (lambda x: x * 2, "R"),
    "identity": (lambda x: x, ""),
    "view only": (lambda x: x.view(-1, 2, 2), "I"),
    "consecutive": (lambda x: attended(attended(x).sin()) + attended(x), "BRBR"),
}


@pytest.mark.parametrize("name", list(PLACES))
def test_a_splitting_op_may_be_anywhere(name: str) -> None:
    """S5, S4: no piece that holds only allocations is a region."""
    function, wanted = PLACES[name]
    assert kinds(partition_of(function)) == wanted


@pytest.mark.parametrize("name", list(PLACES))
def test_wherever_it_is_a_runner_gives_what_the_model_gives(name: str) -> None:
    equal(PLACES[name][0])


def test_allocations_between_two_ops_are_no_region_of_their_own() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.attend(x, out)
        second = torch.empty_like(x)
        torch.ops.toy.attend(out, second)
        return second

    partition = partition_of(forward)
    assert kinds(partition) == "B"
    equal(forward)


def test_a_reshape_that_copies_is_a_region_and_one_that_does_not_is_none() -> None:
    assert kinds(partition_of(lambda x: attended(attended(x).t().reshape(-1, 2)))) == "BRB"
    assert kinds(partition_of(lambda x: attended(attended(x).reshape(-1, 2)))) == "B"


def test_an_op_tagged_cudagraph_unsafe_is_a_boundary() -> None:
    partition = partition_of(lambda x: torch.ops.fxtest.unsafe(x + 1) * 2)
    assert kinds(partition) == "RBR"
    assert "cudagraph_unsafe" in partition.pieces[1].reason
    equal(lambda x: torch.ops.fxtest.unsafe(x + 1) * 2)


def test_an_explicit_list_cuts_at_nothing_else() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxtest.unsafe(attended(x)) + 1

    assert partition_of(forward, ["fxtest::unsafe"]).matched == {"fxtest::unsafe": 1}
    assert partition_of(forward, None, ["aten::add"]).matched == {
        "aten::add": 1,
        "fxtest::unsafe": 1,
        "toy::attend": 1,
    }


# ---- names ---------------------------------------------------------------------------------------

SPELLINGS = [
    "toy::attend",
    "toy.attend",
    "toy::attend.default",
    "toy.attend.default",
    "torch.ops.toy.attend",
    "torch.ops.toy.attend.default",
]


@pytest.mark.parametrize("overload", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_an_op_cuts_at_packet_and_overload(spelling: str, overload: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        op = torch.ops.toy.attend.default if overload else torch.ops.toy.attend
        op(x * 2, out)
        return out + 1

    partition = partition_of(forward, [spelling])
    assert kinds(partition) == "RBR"
    assert partition.matched == {"toy::attend": 1}


@pytest.mark.parametrize(
    ("spelling", "function"),
    [
        ("aten::softmax", lambda x: torch.softmax(x * 2, -1) + 1),
        ("aten::softmax", lambda x: (x * 2).softmax(-1) + 1),
        ("aten::softmax", lambda x: nn.functional.softmax(x * 2, -1) + 1),
        ("aten.softmax.int", lambda x: torch.softmax(x * 2, -1) + 1),
        ("torch.softmax", lambda x: torch.softmax(x * 2, -1) + 1),
        ("Tensor.softmax", lambda x: (x * 2).softmax(-1) + 1),
        ("torch.nn.functional.softmax", lambda x: nn.functional.softmax(x * 2, -1) + 1),
        ("aten::add", lambda x: (x * 2 + 1) * 2),
        ("aten::matmul", lambda x: ((x * 2) @ torch.ones(WIDTH, WIDTH)) * 2),
    ],
)
def test_torch_s_own_ops_can_be_named_however_they_are_called(
    spelling: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert kinds(partition_of(function, [spelling])) == "RBR"


def test_canonical_names() -> None:
    assert {canonical_op_name(s) for s in SPELLINGS} == {"toy::attend"}


def test_a_name_that_matches_nothing_lists_what_the_graph_has() -> None:
    with pytest.raises(ConfigError) as caught:
        partition_of(toy(1), ["toy::atend"])
    assert "did you mean 'toy::attend'" in str(caught.value)
    assert "aten::layer_norm" in str(caught.value)
    with pytest.raises(ConfigError, match="toy::two"):
        partition_of(toy(1), None, ["toy::two"])


def test_lists_of_names_are_never_appended_to() -> None:
    """S11: a second runner must not inherit the first one's extra ops."""
    ops: list[str] = ["toy::attend"]
    partition_fx(trace_of(toy(1)), ops, ["aten::add"])
    assert ops == ["toy::attend"]
    assert kinds(partition_of(toy(1))) == "RBR"


# ---- what crosses a border -----------------------------------------------------------------------


def borders(partition: Partition) -> set[type]:
    values = [n.meta["example_value"] for p in partition.pieces for n in [*p.inputs, *p.outputs]]
    return {torch.Tensor if isinstance(v, torch.Tensor) else type(v) for v in values}


def test_no_tuple_crosses_when_a_splitting_op_has_two_results() -> None:
    """S1."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.ops.toy.two(x.relu())
        return a * b

    partition = partition_of(forward)
    assert kinds(partition) == "RBR"
    assert borders(partition) <= {torch.Tensor, int, torch.SymInt}
    equal(forward)


def test_a_tuple_made_before_an_op_and_used_behind_it_is_unpacked_before() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = (x * 2).chunk(2, dim=-1)
        y = attended(a.contiguous())
        return y + b

    assert borders(partition_of(forward)) <= {torch.Tensor, int, torch.SymInt}
    equal(forward)


def test_no_size_crosses_and_no_tensor_is_kept_for_its_shape() -> None:
    """S3."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        s = x.shape
        y = (x + 1).view(-1)
        out = torch.empty_like(y)
        torch.ops.toy.attend(y, out)
        return out.reshape(s)

    partition = partition_of(forward)
    assert borders(partition) <= {torch.Tensor, int, torch.SymInt}
    last = partition.pieces[-1]
    assert not any(
        isinstance(n.meta["example_value"], torch.Tensor)
        for n in last.inputs
        if n.op == "placeholder"
    )


def test_a_piece_without_any_symbol_works() -> None:
    """S7: a region over fixed shapes only."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = attended(x)
            return y * (self.w.sin() + 1)

    equal(Fixed().eval())


def test_every_input_of_a_piece_is_made_before_it() -> None:
    partition = partition_of(toy(3))
    made: set[Any] = set()
    for piece in partition.pieces:
        assert all(n in made or n.op == "placeholder" for n in piece.inputs)
        made |= set(piece.nodes)


# ---- writes --------------------------------------------------------------------------------------


class State(nn.Module):
    """S12: a splitting op writes a state that a later region reads."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.ops.toy.bump(self.state, y)
        return y + self.state


def test_a_state_written_by_a_splitting_op_is_the_module_s_own_at_every_step() -> None:
    ours, theirs = State().eval(), State().eval()
    with build(ours) as runner:
        assert ours.state.item() == 0
        for at, size in enumerate((5, 8, 3)):
            x = rows(size, seed=at)
            assert torch.equal(runner(x), plain(theirs, x))
            assert torch.equal(ours.state, theirs.state)


def test_writes_to_views_of_one_buffer_on_both_sides_of_a_split_keep_their_order() -> None:
    """S14."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        base = x * 1
        base[:, :2].mul_(3)
        y = attended(base)
        base[:, 1:].add_(y[:, 1:])
        base.view(-1)[0] = 7
        return base + y

    equal(forward)


def test_a_diagonal_that_is_written_before_a_split_is_read_after_it() -> None:
    """S14, the shape of pytorch 153107."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        m = (x * 2).t() @ x
        m.diagonal().copy_(torch.ones(WIDTH))
        y = attended(x)
        return y @ m

    equal(forward, sizes=(8, 4), self_check=False)  # it mixes rows, so only whole sizes are right


def test_order_of_nodes_is_the_order_of_the_program() -> None:
    traced = trace_of(toy(3))
    partition = partition_fx(traced, None)
    order = {n: i for i, n in enumerate(traced.graph.nodes)}
    nodes = [order[n] for p in partition.pieces for n in p.nodes]
    assert nodes == sorted(nodes)


# ---- what cannot be captured ---------------------------------------------------------------------


def test_a_shape_that_depends_on_data_is_refused_with_the_line() -> None:
    """S13: it would be frozen."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        n = torch.ops.fxtest.count(x)
        return x.narrow(0, 0, n) * 2

    with pytest.raises(TraceError, match=r"depends on data.*test_fx.py"):
        trace_of(forward)


def test_a_number_that_depends_on_data_is_refused_though_it_is_in_no_shape() -> None:
    """S13: a graph would hold the value of its capture for ever."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.ops.fxtest.count(x)

    with pytest.raises((TraceError, SplitError)):
        partition_of(forward)


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_a_call_that_cannot_be_written_down_names_its_line_and_what_to_write(kind: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if kind == "numpy":
            return x * torch.from_numpy(np.tanh(x.numpy()))
        return x / torch.tensor(x.shape[0])

    words = {"numpy": r"write torch's own", "tensor": r"write torch\.full\(\(\), n\)"}
    with pytest.raises(CompileError, match=rf"{words[kind]}.*test_fx\.py:\d+ in forward\.$"):
        partition_of(forward)


@pytest.mark.parametrize("where", ["inside", "whole", "nested"])
def test_a_splitting_op_inside_autocast_is_refused(where: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if where == "nested":
            with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
                return attended(x)
        with torch.autocast("cpu"):
            y = x if where == "whole" else x @ x.t()
            y = attended(y)
            return y + 1 if where == "whole" else y @ y.t()

    with pytest.raises(SplitError, match="autocast"):
        partition_of(forward)


def test_autocast_within_one_region_is_kept() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ torch.ones(WIDTH, WIDTH)
        return attended(y) + 1

    assert kinds(partition_of(forward)) == "RBR"
    equal(forward)


# ---- unique pieces -------------------------------------------------------------------------------


def llama_partition(num_layers: int, **model: Any) -> Partition:
    from pcgsvc.config import Config, ModelConfig
    from pcgsvc.forward.arguments import input_specs
    from pcgsvc.models.catalog import build_model
    from pcgsvc.trace.dynamo import trace

    config = Config(model=ModelConfig(num_layers=num_layers, **model))
    bundle = build_model(config, device=torch.device("cpu"), dtype=torch.float32)
    example = bundle.make_inputs(2, torch.Generator().manual_seed(0))
    return partition_fx(trace(bundle.module, input_specs(example, bundle.dynamic_dims), {}), None)


@pytest.fixture(scope="module")
def four_layers() -> Partition:
    return llama_partition(4)


def test_four_layers_are_nine_pieces_of_three_kinds(four_layers: Partition) -> None:
    assert kinds(four_layers) == "RBRBRBRBR"
    assert len(four_layers.unique()) == 3


def test_twelve_layers_have_the_same_three_pieces(four_layers: Partition) -> None:
    """K16."""
    twelve = llama_partition(12)
    assert twelve.count(Kind.REGION) == 13
    assert set(twelve.unique()) == set(four_layers.unique())


@pytest.mark.parametrize("change", [{"norm_eps": 1e-4}, {"intermediate_size": 96}])
def test_another_constant_or_width_shares_no_middle_piece(
    change: dict[str, Any], four_layers: Partition
) -> None:
    other = llama_partition(2, **change)
    middle = {p.hash for p in other.pieces if p.reason == "between two splitting ops"}
    assert not middle & set(four_layers.unique())


def test_blocks_that_differ_in_one_constant_share_nothing_else() -> None:
    module = toy(4)
    module.blocks[1].norm.eps = 1e-3
    partition = partition_of(module)
    regions = [p for p in partition.pieces if p.kind is Kind.REGION]
    hashes = [p.hash for p in regions]
    assert hashes[1] != hashes[2]  # norm of block 1 is in the piece before its op
    assert len(partition.unique()) == 4
    assert hashes[2] == hashes[3]


def test_pieces_that_differ_in_a_layer_number_alone_are_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """K16: a layer's index in a region makes every piece unique."""

    class Numbered(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in range(6):
                x = attended(x) * (layer + 1)
            return x

    with caplog.at_level(logging.WARNING):
        partition = partition_of(Numbered())
    assert any("differ only in" in w for w in [*partition.warnings, *caplog.messages])


def test_each_unique_piece_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pcgsvc.cache import pieces

    made: list[int] = []

    class Counting(pieces.EagerPiece):
        def __init__(self, document: Any) -> None:
            made.append(1)
            super().__init__(document)

    monkeypatch.setattr(pieces, "EagerPiece", Counting)
    with build(toy(12)) as runner:
        assert len(made) == runner.report["compile"]["num_compiled"] == 3


# ---- program -------------------------------------------------------------------------------------


def test_the_program_drops_every_value_after_its_last_reader() -> None:
    traced = trace_of(toy(3))
    spec = program_of(traced, partition_fx(traced, None))
    dead = [n for s in spec.steps for n in s.dead]
    assert len(dead) == len(set(dead))
    read = {n for s in spec.steps for n in s.inputs}
    assert set(dead) | set(spec.outputs) >= read
    for at, step in enumerate(spec.steps):
        gone = {n for s in spec.steps[:at] for n in s.dead}
        assert not gone & set(step.inputs)


def test_a_region_is_a_graph_of_its_own() -> None:
    partition = partition_of(toy(2))
    piece = [p for p in partition.pieces if p.kind is Kind.REGION][1]
    module = graph_module(piece)
    assert len([n for n in module.graph.nodes if n.op == "placeholder"]) == len(piece.inputs)


def test_a_splitting_op_that_declares_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="dead-code"):

        @pcgsvc.splitting_op("fxtest::silent")
        def silent(x: torch.Tensor) -> None:
            x.add_(1)


# ---- names as users know them --------------------------------------------------------------------


class Attends(nn.Module):
    """Torch's own attention, as a module and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.heads(x[:, None], x[:, None], x[:, None], need_weights=False)[0]
        attended = nn.functional.scaled_dot_product_attention(y, y, y)
        return attended.flatten(1)


@pytest.fixture(scope="module")
def attends() -> Any:
    return trace_of(Attends().eval(), rows(3))


@pytest.mark.parametrize(
    "name",
    [
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention",
        "torch.nn.functional.scaled_dot_product_attention",
        "aten::scaled_dot_product_attention",
        "nn.functional.scaled_dot_product_attention",
    ],
)
def test_a_function_of_torch_s_is_found_under_the_names_that_users_call(
    attends: Any, name: str
) -> None:
    assert list(partition_fx(attends, [name]).matched.values()) == [1]


@pytest.mark.parametrize("name", ["nn.MultiheadAttention", "torch.nn.MultiheadAttention"])
def test_a_module_of_torch_s_is_answered_with_its_operators(attends: Any, name: str) -> None:
    words = r"MultiheadAttention is a module, which .* 'aten::multi_head_attention_forward'"
    with pytest.raises(ConfigError, match=words):
        partition_fx(attends, [name])


def test_an_op_of_another_namespace_is_not_taken_for_torch_s(attends: Any) -> None:
    with pytest.raises(ConfigError, match="not in the traced graph"):
        partition_fx(attends, ["mine::scaled_dot_product_attention"])
