"""Tracing: one symbol, bound parameters, known outputs, nothing executed, nothing left behind."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from core_helpers import WIDTH, Toy, attended, build, rows, toy, trace_of
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pcgsvc import torch_private
from pcgsvc.errors import TraceError
from pcgsvc.forward.results import flatten
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import user_line


def line_of(function: Callable[..., Any], text: str) -> str:
    """Return `test_trace.py:N` of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_trace.py:{first + at}"


def sizes(traced: TracedGraph) -> list[Any]:
    """Return the placeholders that are symbolic ints."""
    return [
        n
        for n in traced.graph.nodes
        if n.op == "placeholder" and isinstance(n.meta["example_value"], torch.SymInt)
    ]


# ---- symbols -------------------------------------------------------------------------------------


def test_two_dynamic_inputs_that_meet_are_one_symbol_and_it_comes_first() -> None:
    traced = trace_of(lambda x, y: x * 2 + y, (rows(3), rows(3)), {"x": 0, "y": 0})
    assert len(sizes(traced)) == 1
    assert [b.kind for b in traced.bindings] == ["size", "input", "input"]
    assert traced.output_specs[0].shape == ("s", WIDTH)
    assert traced.predicate.conditions == ()


def test_the_row_dimension_need_not_be_the_first() -> None:
    traced = trace_of(lambda x: x.relu(), torch.zeros(WIDTH, 3), {"x": -1})
    assert traced.output_specs[0].row_dims() == (1,)


def test_inputs_that_never_meet_have_one_row_count_by_declaration() -> None:
    traced = trace_of(lambda x, y: (x * 2, y + 1), (rows(3), rows(3)), {"x": 0, "y": 0})
    assert len(sizes(traced)) == 1
    assert [spec.shape for spec in traced.output_specs] == [("s", WIDTH), ("s", WIDTH)]
    assert traced.predicate.conditions == ()


def test_one_input_may_have_rows_in_several_dims() -> None:
    traced = trace_of(
        lambda x, mask: (mask @ x, mask.T * 2),
        (rows(3), torch.ones(3, 3)),
        {"x": 0, "mask": [0, -1]},
    )
    assert [spec.shape for spec in traced.output_specs] == [("s", WIDTH), ("s", "s")]
    assert traced.output_specs[1].row_dims() == (0, 1)


SIZES = list(range(200))


def test_a_declared_dim_that_comes_out_static_is_refused_by_name() -> None:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view(int(hidden.shape[0]), WIDTH) * SIZES[hidden.shape[0]]

    with pytest.raises(TraceError, match=r"dynamic_dims.*hidden"):
        trace_of(forward, rows(3), {"hidden": 0})


def test_an_op_that_torch_traces_for_one_size_is_no_comparison_with_a_constant() -> None:
    def forward(hidden: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.take_along_dim(hidden, k[:, None], 0)

    def gathered(hidden: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.gather(hidden, 0, k[:, None].expand_as(hidden))

    given, dims = {"hidden": rows(3), "k": torch.arange(3)}, {"hidden": 0, "k": 0}
    with pytest.raises(
        TraceError, match=r"'hidden' came out fixed.*or gives it to an op"
    ) as caught:
        trace_of(forward, given, dims)
    assert "test_trace.py" in str(caught.value)
    assert "mark_dynamic" not in str(caught.value)
    trace_of(gathered, given, dims)


def test_python_for_each_row_is_called_so() -> None:
    with pytest.raises(TraceError, match=r"runs Python for each of its rows"):
        trace_of(lambda x: torch.stack([row * 2 for row in x]))


def test_the_traced_size_is_no_dimension_in_sight() -> None:
    class Primes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(11, 13))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    traced = trace_of(Primes(), torch.zeros(3, 11))
    assert traced.size not in (0, 1, 11, 13)


@pytest.mark.parametrize("taken", [25, 110])
def test_the_traced_size_is_free_even_when_many_dimensions_are_taken(taken: int) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList([torch.ones(n) for n in range(2, taken)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w[0][0]

    traced = trace_of(Wide())
    assert traced.size not in range(2, taken)


def test_a_branch_on_the_shape_is_recorded_with_its_line() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:  # the branch
            return x * 2
        return x

    traced = trace_of(forward)
    assert traced.predicate.broken_by(5) is None
    broken = traced.predicate.broken_by(4)
    assert broken is not None
    assert line_of(forward, "# the branch") in broken


def test_a_range_check_is_part_of_the_predicate() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= 50)
        return x + 1

    traced = trace_of(forward)
    assert traced.predicate.broken_by(50) is None
    assert traced.predicate.broken_by(51) is not None


def test_a_divisibility_assumption_is_part_of_the_predicate() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 else x

    traced = trace_of(forward)
    assert traced.predicate.broken_by(7) is None
    assert traced.predicate.broken_by(8) is not None


def test_what_torch_does_not_expect_of_a_forward_is_named_by_its_line() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x, x * 2)[x.shape[0] > 15]  # by a truth

    with pytest.raises(TraceError, match=r"index must be int .*") as caught:
        trace_of(forward)
    assert line_of(forward, "# by a truth") in str(caught.value)


BRANCHES: dict[str, Callable[[Any], Any]] = {
    "a root": lambda n: math.sqrt(n) > 4,
    "a power": lambda n: n**0.5 > 3,
    "a part": lambda n: int(n * 0.5) == 6,
    "rounded": lambda n: round(n / 4) == 3,
    "rounded to digits": lambda n: round(n / 3, 1) == 3.7,
    "rounded up": lambda n: math.ceil(n / 8) > 1,
    "a logarithm": lambda n: math.log2(n) > 3.3,
    "the larger of floats": lambda n: max(n / 2, 4.5) > 6,
    "a remainder by zero": lambda n: n % (n // 3) == 2,
    "a negative root": lambda n: (n - 5) ** 0.5 > 2 if n > 4 else n,
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_on_what_is_computed_of_the_rows_holds_where_it_is_taken(branch: str) -> None:
    taken = BRANCHES[branch]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if taken(x.shape[0]) else x + 1

    traced = trace_of(forward)
    assert traced.predicate.conditions
    for n in range(2, 40):
        try:
            same = bool(taken(n)) is bool(taken(traced.size))
        except ZeroDivisionError:
            same = False
        assert (traced.predicate.broken_by(n) is None) <= same, (n, traced.predicate)
    assert traced.predicate.broken_by(traced.size) is None


def test_size_is_decomposed_so_that_no_torch_size_is_left() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x.size()
        z = x.view(y.shape) + x.new_zeros(x.size())
        return z.reshape(*x.shape[:1], 2, -1).reshape(a, b) + x.size(1) + x.size(dim=-1)

    traced = trace_of(forward, (rows(3), rows(3)), {"x": 0, "y": 0})
    values = [n.meta.get("example_value") for n in traced.graph.nodes]
    assert not any(isinstance(v, torch.Size) for v in values)
    assert not any(n.target == "size" for n in traced.graph.nodes)


def test_sizes_that_are_computed_are_python_source_over_s() -> None:
    traced = trace_of(lambda x: x.new_zeros(x.shape[0] * 2 + 1), rows(3))
    (size,) = traced.output_specs[0].shape
    assert eval(str(size), {"s": 7}) == 15


def test_empty_like_stays_in_the_graph_as_an_allocation() -> None:
    traced = trace_of(attended)
    assert next(n.target for n in traced.graph.nodes if n.op == "call_function") is torch.empty_like
    assert traced.ops["toy::attend"] == 1


# ---- parameters, buffers, constants --------------------------------------------------------------


def test_parameters_and_buffers_are_bound_by_their_names() -> None:
    traced = trace_of(toy(2))
    names = {b.name for b in traced.bindings if b.kind == "param"}
    assert names == set(dict(toy(2).named_parameters()))


def test_tied_weights_are_one_input() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH, bias=False)
            self.b = nn.Linear(WIDTH, WIDTH, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    module = Tied()
    traced = trace_of(module)
    assert [b.name for b in traced.bindings if b.kind == "param"] == ["a.weight"]
    assert traced.tensors["a.weight"] is module.a.weight


def test_a_tensor_captured_from_a_global_is_a_bound_constant() -> None:
    table = torch.arange(4.0)
    traced = trace_of(lambda x: x + table)
    (binding,) = [b for b in traced.bindings if b.kind == "constant"]
    assert traced.tensors[binding.name] is table


def test_two_captured_tensors_do_not_share_a_binding_name() -> None:
    a, b = torch.ones(4), torch.full((4,), 2.0)
    traced = trace_of(lambda x: x * a + b)
    assert len({x.name for x in traced.bindings if x.kind == "constant"}) == 2


def test_an_in_place_write_to_a_buffer_is_known_and_the_buffer_unchanged() -> None:
    class Counts(nn.Module):
        n: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return x + self.n

    module = Counts()
    before = module.n
    traced = trace_of(module)
    assert traced.mutated == ["n"]
    assert module.n is before
    assert module.n.item() == 0
    assert len(traced.outputs) == 1


STATISTICS = ["embedding", "embedding_bag", "batch_norm", "instance_norm", "torch.batch_norm"]


@pytest.mark.parametrize(
    "how", ["view", "splitting op", "setitem", "out=", "inplace by position", *STATISTICS]
)
def test_every_way_to_write_a_buffer_is_seen(how: str) -> None:
    class Writes(nn.Module):
        state: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "view":
                self.state.view(-1)[1:].add_(1)
            elif how == "splitting op":
                torch.ops.toy.bump(self.state, x)
            elif how == "setitem":
                self.state[0] = 3
            elif how == "inplace by position":
                F.leaky_relu(self.state, 0.1, True)
            elif how in STATISTICS:
                keep_statistics(how, x, self.state)
            else:
                torch.add(self.state, 1, out=self.state)
            return x + self.state.sum()

    assert trace_of(Writes()).mutated == ["state"]


def keep_statistics(how: str, x: torch.Tensor, state: torch.Tensor) -> None:
    mean = state.view(-1)[: x.shape[1]]
    if how == "embedding":
        F.embedding((x[:, 0] > 0).long(), state, max_norm=0.5)
    elif how == "embedding_bag":
        F.embedding_bag((x > 0).long(), state, max_norm=0.5, mode="sum")
    elif how == "batch_norm":
        F.batch_norm(x, mean, torch.ones_like(mean), training=True)
    elif how == "instance_norm":
        F.instance_norm(x[:, :, None].expand(-1, -1, 3), mean, torch.ones_like(mean))
    else:
        torch.batch_norm(x, None, None, mean, torch.ones_like(mean), True, 0.1, 1e-5, False)


def test_statistics_that_are_only_read_and_operators_with_an_underscore_write_nothing() -> None:
    mask, mean, table = torch.tensor([True]), torch.ones(WIDTH), torch.ones(2, WIDTH)

    def forward(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        kept = (seen & (x > 0)) | (mask & seen)  # `operator.and_`, `operator.or_`
        h = F.batch_norm(F.relu(x, False), mean, mean) + F.embedding(seen[:, 0].long(), table)
        return torch.where(kept, h, 0)

    traced = trace_of(forward, (rows(3), rows(3) > 0), {"x": 0, "seen": 0})
    assert traced.mutated == []


# ---- results -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: Any = None


pytree.register_dataclass(Result)


@dataclasses.dataclass
class Unregistered:
    logits: torch.Tensor


class Pair(NamedTuple):
    a: torch.Tensor
    b: Any


TREES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x * 2,
    "tuple": lambda x: (x * 2, x + 1),
    "list": lambda x: [x * 2, [x + 1]],
    "dict": lambda x: {"b": x * 2, "a": {"c": x + 1}},
    "dataclass": lambda x: Result(logits=x * 2, extra="word"),
    "unregistered dataclass": lambda x: Unregistered(x * 2),
    "named tuple": lambda x: Pair(x * 2, {"b": Unregistered(x + 1)}),
    "return type": lambda x: x.max(1),
    "None inside": lambda x: (None, x * 2, None),
    "one tensor twice": lambda x: (lambda y: {"a": y, "b": y})(x * 2),
    "identity": lambda x: x,
    "input beside": lambda x: (x, x * 2, True),
    "None": lambda x: None,
    "nothing": lambda x: (),
}


@pytest.mark.parametrize("name", list(TREES))
def test_the_result_s_structure_is_known(name: str) -> None:
    function = TREES[name]
    traced = trace_of(function)
    wanted, tree = flatten(function(rows(3)))
    assert traced.out_tree == tree
    tensors = [leaf for leaf in wanted if isinstance(leaf, torch.Tensor)]
    assert len(traced.outputs) == len(tensors)
    assert len(traced.constants) == len(wanted) - len(tensors)
    assert [type(traced.constants[at]) for at in traced.constants] == [
        type(leaf) for leaf in wanted if not isinstance(leaf, torch.Tensor)
    ]


def test_a_number_as_result_is_refused() -> None:
    with pytest.raises(TraceError, match="frozen"):
        trace_of(lambda x: (x * 2, x.shape[0]))


@dataclasses.dataclass
class HoldsMore:
    logits: torch.Tensor

    def __post_init__(self) -> None:
        self.more = 1


def test_a_dataclass_that_holds_more_than_its_fields_is_refused_with_the_way_out() -> None:
    with pytest.raises(TraceError, match=r"HoldsMore(.|\n)*its fields and nothing else"):
        trace_of(lambda x: HoldsMore(x * 2))


def test_an_object_of_another_kind_as_result_is_refused_by_name() -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    with pytest.raises(TraceError, match="got Box"):
        trace_of(lambda x: Box(x * 2))


# ---- side effects --------------------------------------------------------------------------------


class Stores(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.seen = how, 0, []
        self.nested: dict[str, list[Any]] = {"seen": []}
        self.last: Any = None
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "attribute":
            self.last = x * 3  # attribute
        elif self.how == "new attribute":
            self.fresh = x * 3  # new attribute
        elif self.how == "list":
            self.seen.append(x * 3)  # list
        elif self.how == "nested":
            self.nested["seen"].append(x * 3)  # nested
        elif self.how == "counter":
            self.calls += 1
        elif self.how == "remove":
            del self.n  # remove
        elif self.how == "rebind":
            self.n = self.n + 1  # rebind
        return x * 2


@pytest.mark.parametrize(
    "how",
    ["attribute", "new attribute", "list", "nested", "remove", "rebind"],
)
def test_a_stored_tensor_is_refused_with_its_line_and_the_module_as_before(how: str) -> None:
    module = Stores(how)
    before = {k: v for k, v in vars(module).items()}
    buffer = module.n
    with pytest.raises(TraceError, match="side effect") as caught:
        trace_of(module)
    assert line_of(Stores, f"# {how}") in str(caught.value)
    assert {k: v for k, v in vars(module).items()} == before
    assert module.seen == []
    assert module.n is buffer
    assert module.nested == {"seen": []}


def test_a_python_counter_is_refused_by_name() -> None:
    module = Stores("counter")
    with pytest.raises(TraceError, match="sets 'calls'") as caught:
        trace_of(module)
    assert line_of(Stores, "self.calls += 1") in str(caught.value)
    assert module.calls == 0


COUNT = 0
LOG: list[int] = []


def test_a_change_of_a_global_is_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return x * 2

    with pytest.raises(TraceError, match="side effect"):
        trace_of(forward)
    assert COUNT == 0


def test_a_change_of_a_global_container_is_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        LOG.append(1)
        return x * 2

    with pytest.raises(TraceError, match="side effect"):
        trace_of(forward)
    assert LOG == []


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: F.relu(x, True)])
def test_an_in_place_write_to_an_input_is_refused(write: Callable[..., Any]) -> None:
    # The runner copies inputs into its own buffers: the caller's tensor would stay as it was.
    def forward(x: torch.Tensor) -> torch.Tensor:
        write(x)
        return x * 2

    with pytest.raises(TraceError, match=r"writes .*'x'"):
        trace_of(forward)


@pytest.mark.parametrize("view", ["T", "mT", "H", "mH"])
def test_a_transposed_input_as_result_is_refused_with_the_way_out(view: str) -> None:
    with pytest.raises(TraceError, match=rf"returns \.{view} of input 1(.|\n)*clone"):
        trace_of(lambda x: (x * 2, getattr(x, view)))
    assert trace_of(lambda x: getattr(x, view).clone()).output_specs[0].row_dims() == (1,)
    assert trace_of(lambda x: getattr(x * 2, view)).output_specs[0].row_dims() == (1,)


def test_a_failed_trace_leaves_the_module_as_it_was() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if x.sum() > 0:
                return x
            return x * 2

    module = Fails()
    with pytest.raises(TraceError):
        trace_of(module)
    assert module.calls == 0


# ---- what cannot be traced -----------------------------------------------------------------------


def test_a_branch_on_data_names_the_line_and_the_ways_out() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the branch
            return x
        return x * 2

    with pytest.raises(TraceError, match="splitting_op") as caught:
        trace_of(forward)
    assert line_of(forward, "# the branch") in str(caught.value)


def test_a_print_names_its_line() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        print("hello")  # noqa: T201 - the print
        return x * 2

    with pytest.raises(TraceError) as caught:
        trace_of(forward)
    assert line_of(forward, "the print") in str(caught.value)


@functools.lru_cache
def has_extension() -> bool:
    try:
        import not_installed_here  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return False
    return True


def test_a_lazy_import_behind_a_cache_names_its_line() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if has_extension() else x * 3  # the helper

    assert not has_extension()  # the tracer looks behind what was cached
    with pytest.raises(TraceError) as caught:
        trace_of(forward)
    assert line_of(forward, "the helper") in str(caught.value)


def test_a_size_that_depends_on_data_names_its_line() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        index = (x.sum(-1) > 0).nonzero()  # the size
        return x[index[:, 0]]

    with pytest.raises(TraceError) as caught:
        trace_of(forward)
    assert line_of(forward, "# the size") in str(caught.value)


@pytest.mark.parametrize("kind", ["cond", "checkpoint", "flex_attention"])
def test_a_higher_order_operator_names_its_line_and_the_ways_out(kind: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if kind == "checkpoint":
            return checkpoint(torch.sin, x, use_reentrant=False)  # the checkpoint
        if kind == "flex_attention":
            q = x[None, None]
            return flex_attention(q, q, q)[0, 0]  # the flex_attention
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # the cond

    with pytest.raises(TraceError, match=r"(?s)splitting_op.*breakable") as caught:
        trace_of(forward)
    message = str(caught.value)
    called, way_out = {
        "cond": ("torch.cond", "torch.where"),
        "checkpoint": ("torch.utils.checkpoint", "call the function itself"),
        "flex_attention": ("torch.nn.attention.flex_attention", "F.scaled_dot_product_attention"),
    }[kind]
    assert message.startswith(f"{called} at /")
    assert f"{line_of(forward, f'# the {kind}')} in forward: " in message
    assert way_out in message


def test_the_line_of_a_model_in_a_folder_named_torch_is_named(tmp_path: Path) -> None:
    file = tmp_path / "torch" / "model.py"
    file.parent.mkdir()
    file.write_text("def forward(x):\n    return x if x.sum() > 0 else -x\n")
    with pytest.raises(TraceError) as caught:
        trace_of(runpy.run_path(str(file))["forward"])
    assert f"because of {file}:2 in forward" in str(caught.value)


def test_a_lambda_s_line_is_named_and_the_tracer_s_never() -> None:
    with pytest.raises(TraceError, match=r"test_trace\.py:\d+ in <lambda>"):
        trace_of(lambda x: x if x.sum() > 0 else -x)
    graph = trace_of(nn.Linear(WIDTH, 2), dims={"input": 0}).graph
    (node,) = (n for n in graph.nodes if n.op == "call_function")
    assert "pcgsvc/trace/dynamo.py" in str(node.stack_trace)
    assert user_line(node) == f"graph node {node.name}"


def test_no_row_dimension_is_refused() -> None:
    from pcgsvc.forward.arguments import input_specs
    from pcgsvc.trace.dynamo import trace

    with pytest.raises(TraceError, match="dynamic_dims"):
        trace(lambda x: x, input_specs({"x": rows(3)}, {}), {})


# ---- nothing runs, nothing stays -----------------------------------------------------------------


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def test_tracing_runs_no_kernel_of_the_model() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((WIDTH, WIDTH), float("nan")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.w
            torch.ops.toy.attend(y, y)  # its kernel would raise: no context, NaN input
            return y.sin()

    traced = trace_of(Counted())
    assert traced.ops["toy::attend"] == 1


def test_twelve_traces_of_one_class_in_one_process() -> None:
    for seed in range(12):
        assert trace_of(toy(1, seed)).ops["toy::attend"] == 1


def test_traces_of_one_class_with_other_constants_are_not_mixed_up() -> None:
    class Scales(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    for scale in (2.0, 3.0):
        (node,) = [n for n in trace_of(Scales(scale)).graph.nodes if n.op == "call_function"]
        assert scale in node.args


def test_a_guard_names_each_attribute_that_was_read() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 3.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    guards = trace_of(Reads()).guards
    assert any("scale" in g.source and g.value == 3.5 for g in guards)


def test_gradients_are_off_though_parameters_want_them_and_inputs_too() -> None:
    module = Toy(1)
    x = rows(3).requires_grad_()
    traced = trace_of(module, x)
    assert next(module.parameters()).requires_grad
    assert not any(
        n.meta["example_value"].requires_grad
        for n in traced.graph.nodes
        if n.op in ("call_function", "call_method")
        and isinstance(n.meta.get("example_value"), torch.Tensor)
    )


def test_storages_in_the_graph_show_what_aliases_what() -> None:
    traced = trace_of(lambda x: (x * 2).view(-1)[1:])
    spec = traced.output_specs[0]
    assert spec.offset == 1
    nodes = [n for n in traced.graph.nodes if n.op in ("call_function", "call_method")]
    ids = {torch_private.storage_id(n.meta["example_value"]) for n in nodes}
    assert len(ids) == 1


@pytest.mark.parametrize("table_rows", [12, 8, 4, 3])
@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, x: x + table[: x.shape[0]],
        lambda table, x: torch.cat([x, table.narrow(0, 0, x.shape[0])], -1),
    ],
    ids=["slice", "narrow"],
)
def test_a_table_of_fewer_rows_than_the_usual_trace_is_traced_at_fewer(
    look_up: Callable[..., torch.Tensor], table_rows: int
) -> None:
    class Model(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(table_rows, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return look_up(self.table, x)

    module = Model().eval()
    traced = trace_of(module)
    assert 1 < traced.size < table_rows
    fits = [s for s in range(2, 20) if traced.predicate.broken_by(s) is None]
    assert fits == list(range(2, table_rows + 1))
    with build(module, sizes=[2, 16]) as runner:
        for num in range(1, table_rows + 1):
            x = rows(num)
            assert torch.equal(runner(x), look_up(module.table, x))
        assert runner.table.skipped.keys() == {16}


def test_a_model_that_fits_no_row_count_is_refused_with_the_first_misfit() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(WIDTH + 1, 2)

    with pytest.raises(TraceError, match=r"test_trace\.py:\d+ in forward"):
        trace_of(forward)
