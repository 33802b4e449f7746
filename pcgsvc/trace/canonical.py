"""Dynamo's graph -> `TracedGraph`: one symbol for the row count, bound inputs, a known result.

In: a `DynamoCapture`. Out: the canonical graph.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import TraceError
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.results import flatten, refused_leaf
from pcgsvc.forward.specs import Binding, InputSpec, SizePredicate, TensorSpec
from pcgsvc.ops.breaks import WAYS_OUT
from pcgsvc.trace.backend import DynamoCapture, refuse_unsupported, view_refusal
from pcgsvc.trace.collectives import unite_collectives
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.literals import LITERAL, lift_literals
from pcgsvc.trace.nodes import mutated_args, name_once, op_names, user_line
from pcgsvc.trace.sources import line_that_sets, made_permanent

_VIEW_OPS = {"aten::numpy_T": "T", "aten::mT": "mT", "aten::matrix_H": "H", "aten::mH": "mH"}
"""What torch 2.14 puts into the graph for attributes that are views; see `backend`."""


class Canonical:
    """Turns what Dynamo gave into a `TracedGraph`."""

    def __init__(
        self,
        module: Callable[..., Any],
        inputs: Sequence[InputSpec],
        capture: DynamoCapture,
        result: Any,
        changed: dict[str, Any],
        size: int,
    ) -> None:
        self.module = module
        self.inputs, self.capture, self.changed = inputs, capture, changed
        self.size = size
        self.graph = torch.fx.Graph() if capture.graph is None else capture.graph.graph
        if capture.graph is None:
            self.graph.output(())
        self.tensors = tensors_of(module)
        self.names = {id(t): name for name, t in self.tensors.items()}
        self.symbol: Any = None
        self.leaves, self.out_tree = flatten(result)

    def build(self) -> TracedGraph:
        """Return the canonical graph."""
        refuse_unsupported(self.graph)
        bindings = self._bind()
        self._drop_noise()
        self._check_static()
        self._decompose_sizes()
        unite_collectives(self.graph)
        self._lift_literals(bindings)
        self._refuse_input_writes(bindings)
        output = self.graph.output_node()
        self._refuse_input_views(output)
        results: Any = output.args[0]
        sentinels = map(id, self.capture.sentinels)
        outputs, constants, kept = self._match_outputs(dict(zip(sentinels, results, strict=True)))
        output.args = (kept,)
        name_once(output)
        kept = output.args[0]
        used = {n: bindings[n] for n in self._placeholders() if n in bindings}
        self.graph.lint()
        return TracedGraph(
            graph=self.graph,
            bindings=list(used.values()),
            tensors=self._bound,
            outputs=outputs,
            output_specs=[self._spec_of(n) for n in kept],
            out_tree=self.out_tree,
            constants=constants,
            predicate=self._predicate(),
            guards=self.capture.guards,
            mutated=sorted({name for _, name in self._writes(used, "param", "constant")}),
            size=self.size,
            spec_of=self._spec_of,
            size_of=self._dim,
            ops=Counter(name for n in self.graph.nodes for name in op_names(n)[:1]),
        )

    def _refuse_input_writes(self, bindings: dict[torch.fx.Node, Binding]) -> None:
        """Refuse writes to inputs: a runner has its own, and the caller's would stay as it was."""
        for node, name in self._writes(bindings, "input"):
            raise TraceError(
                f"the forward writes to its input {name!r} at {user_line(node)}; a runner copies "
                "inputs, so the caller's tensor would not change. Write to a clone."
            )

    def _writes(
        self, bindings: dict[torch.fx.Node, Binding], *kinds: str
    ) -> Iterator[tuple[torch.fx.Node, str]]:
        """Yield each node that writes to the storage of a tensor so bound, with its name."""
        storages = {
            torch_private.storage_id(n.meta["example_value"]): b.name
            for n, b in bindings.items()
            if b.kind in kinds
        }
        for node in self.graph.nodes:
            for written in mutated_args(node):
                name = storages.get(torch_private.storage_id(written.meta["example_value"]))
                if name is not None:
                    yield node, name

    def _refuse_input_views(self, output: torch.fx.Node) -> None:
        """Refuse `.T` and the like of an input as a result on every torch, as Dynamo 2.13 does."""
        places = {id(t): at for at, t in enumerate(self.capture.examples, 1)}
        for node in output.all_input_nodes:
            view = _VIEW_OPS.get(torch_private.op_name(node.target) or "")
            at = view and places.get(id(self._lifted.get(node.all_input_nodes[0])))
            if view and at:
                raise TraceError(view_refusal(view, at))

    # -- placeholders --

    def _placeholders(self) -> list[torch.fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def _bind(self) -> dict[torch.fx.Node, Binding]:
        self._bound: dict[str, torch.Tensor] = {}
        by_example = {
            id(t): s.name for t, s in zip(self.capture.examples, self.inputs, strict=True)
        }
        bindings: dict[torch.fx.Node, Binding] = {}
        self._lifted = dict(zip(self._placeholders(), self.capture.graph_inputs, strict=True))
        for node, value in self._lifted.items():
            if isinstance(value, (torch.SymInt, int)):
                bindings[node] = Binding(kind="size", name="num_tokens", spec=None)
                continue
            if not isinstance(value, torch.Tensor):
                raise TraceError(
                    f"graph input {node.name}: a {type(value).__name__} was lifted out of the "
                    "forward; only tensors and the row count can be inputs of a piece. Use it in "
                    "a splitting op, or before the forward."
                )
            kind, name = self._name_of(node, value, by_example)
            if kind != "input":
                self._bound[name] = value
            bindings[node] = Binding(kind=kind, name=name, spec=None)
        self._merge_sizes(bindings)
        for node, binding in bindings.items():
            if binding.kind != "size":
                bindings[node] = replace(binding, spec=self._spec_of(node))
        return bindings

    def _name_of(
        self, node: torch.fx.Node, value: torch.Tensor, by_example: dict[int, str]
    ) -> tuple[str, str]:
        if id(value) in by_example:
            return "input", by_example[id(value)]
        if id(value) in self.names:
            return "param", self.names[id(value)]
        return "constant", str(node.target)

    def _merge_sizes(self, bindings: dict[torch.fx.Node, Binding]) -> None:
        """Keep one placeholder for the row count; others with an equal value are replaced by it."""
        sizes = [n for n, b in bindings.items() if b.kind == "size"]
        for node in sizes:
            expression = self._expression(node.meta["example_value"])
            if not expression.is_Symbol:
                raise TraceError(f"graph input {node.name}: size {expression} is no plain symbol.")
            if self.symbol is None:
                self.symbol = expression
            elif expression != self.symbol:
                raise TraceError(
                    "dynamic_dims: the inputs' dynamic dimensions are independent of each other "
                    f"({self.symbol} and {expression}); all of them must be the row count."
                )
        for node in sizes[1:]:
            node.replace_all_uses_with(sizes[0])
            self.graph.erase_node(node)
            del bindings[node]
        if sizes and (first := self._placeholders()[0]) is not sizes[0]:
            first.prepend(sizes[0])

    def _lift_literals(self, bindings: dict[torch.fx.Node, Binding]) -> None:
        """Bind numbers of the source that would be copied to the inputs' device at each call."""
        devices = {t.device for t in self.capture.examples}
        fakes = [v for n in bindings if isinstance(v := _example(n), torch.Tensor)]
        if len(devices) != 1 or not fakes:
            return
        nodes: dict[str, torch.fx.Node] = {}

        def place(name: str, value: torch.Tensor) -> torch.fx.Node:
            if name not in nodes:
                with self.graph.inserting_after(self._placeholders()[-1]):
                    node = nodes[name] = self.graph.placeholder(f"literal_{len(nodes)}")
                node.meta["example_value"] = torch_private.fake_call(
                    torch.Tensor.new_empty,
                    (fakes[0], tuple(value.shape)),
                    {"dtype": value.dtype, "device": value.device},
                )
                bindings[node] = Binding(kind=LITERAL, name=name, spec=self._spec_of(node))
                self._bound[name] = value
            return nodes[name]

        lift_literals(self.graph, devices.pop(), place)

    def _check_static(self) -> None:
        """Refuse a declared row dimension that Dynamo took for a constant."""
        if self.capture.graph is None:
            return
        for spec, example in zip(self.inputs, self.capture.examples, strict=True):
            nodes = [n for n, v in self._lifted.items() if v is example]
            for dim in spec.dims if nodes else ():
                got = nodes[0].meta["example_value"].shape[dim]
                if not isinstance(got, torch.SymInt) or not self._expression(got).free_symbols:
                    raise TraceError(
                        f"dynamic_dims: dimension {dim} of {spec.name!r} came out fixed at "
                        f"{int(got)}: the forward compares it with a constant, or runs Python for "
                        "each of its rows. Compute all rows at once, or take the dimension out of "
                        "dynamic_dims."
                    )

    # -- nodes --

    def _expression(self, value: Any) -> Any:
        """Return the sympy expression of a SymInt with all known equalities applied."""
        return self.capture.shape_env.replace(torch_private.symbolic_expr(value))

    def _dim(self, value: Any) -> int | str:
        """Return an int, or Python source over `s`."""
        if not isinstance(value, torch.SymInt):
            return int(value)
        expression = self._expression(value)
        free = expression.free_symbols
        if not free:
            return int(expression)
        if self.symbol is None or free != {self.symbol}:
            raise TraceError(
                f"a size depends on data or on a second symbol: {expression}. Only the row count "
                f"may be symbolic.{self._line_of_unbacked()}\n{WAYS_OUT}"
            )
        return re.sub(rf"\b{self.symbol}\b", "s", torch_private.python_source(expression))

    def _line_of_unbacked(self) -> str:
        for node in self.graph.nodes:
            value = _example(node)
            for item in pytree.tree_leaves(value):
                shape = item.shape if isinstance(item, torch.Tensor) else (item,)
                for size in shape:
                    if isinstance(size, torch.SymInt) and (
                        self._expression(size).free_symbols - {self.symbol}
                    ):
                        return f" First met at: {user_line(node)}."
        return ""

    def _spec_of(self, node: torch.fx.Node) -> TensorSpec:
        value = node.meta["example_value"]
        return TensorSpec(
            dtype=str(value.dtype),
            shape=tuple(self._dim(d) for d in value.shape),
            stride=tuple(self._dim(d) for d in value.stride()),
            offset=self._dim(value.storage_offset()),
            device=str(value.device),
            layout=str(value.layout),
        )

    def _drop_noise(self) -> None:
        for node in list(self.graph.nodes):
            ignored = node.op == "call_function" and torch_private.ignored_call(node.target)
            if ignored and not node.users:
                self.graph.erase_node(node)

    def _decompose_sizes(self) -> None:
        """Replace `x.size()` by one value per dimension, so that no torch.Size crosses a border."""
        symbols = (n for n in self._placeholders() if isinstance(_example(n), (torch.SymInt, int)))
        size_node = next(symbols, None)
        for node in list(self.graph.nodes):
            if node.op == "call_method" and node.target == "size":
                self._replace_size(node, size_node)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and _is_shape_only(node):
                self.graph.erase_node(node)

    def _replace_size(self, node: torch.fx.Node, size_node: torch.fx.Node | None) -> None:
        value, args = node.meta["example_value"], node.args
        source = args[0]
        assert isinstance(source, torch.fx.Node)
        with self.graph.inserting_before(node):
            if len(args) > 1 or node.kwargs:
                dim = args[1] if len(args) > 1 else node.kwargs["dim"]
                node.replace_all_uses_with(self._one_size(source, dim, value, size_node))
            else:
                each = [self._one_size(source, d, v, size_node) for d, v in enumerate(value)]
                _spread(node, each)
        self.graph.erase_node(node)

    def _one_size(
        self, source: torch.fx.Node, dim: Any, value: Any, size_node: torch.fx.Node | None
    ) -> Any:
        known = self._dim(value)
        if isinstance(known, int):
            return known
        if known == "s" and size_node is not None:
            return size_node
        new = self.graph.call_method("size", (source, dim))
        new.meta["example_value"] = value
        return new

    # -- results --

    def _match_outputs(
        self, made: dict[int, torch.fx.Node]
    ) -> tuple[list[tuple[str, int]], dict[int, Any], tuple[torch.fx.Node, ...]]:
        """Match the leaves of the forward's result with graph outputs and inputs, by identity.

        `made`: the graph's outputs by the identities of the sentinels that stand for them.
        """
        inputs = {id(t): i for i, t in enumerate(self.capture.examples)}
        outputs: list[tuple[str, int]] = []
        constants: dict[int, Any] = {}
        kept: dict[torch.fx.Node, int] = {}
        for at, leaf in enumerate(self.leaves):
            node = made.get(id(leaf))
            if node is not None and isinstance(_example(node), torch.Tensor):
                outputs.append(("graph", kept.setdefault(node, len(kept))))
            elif id(leaf) in inputs:
                outputs.append(("input", inputs[id(leaf)]))
            elif leaf is None or isinstance(leaf, (bool, str)):
                constants[at] = leaf
            elif isinstance(leaf, torch.Tensor) and node is None:
                name = self.names.get(id(leaf))
                what = f"the module's own {name!r}" if name else "a tensor that it holds"
                raise TraceError(
                    f"result leaf {at}: the forward returns {what} as it is, and a runner's "
                    "results are copies or memory of its graphs. Return a copy: .clone()."
                )
            else:
                stands_for = leaf if node is None else _example(node)
                raise TraceError(refused_leaf(at, stands_for))
        self._refuse_side_effects(made, [n for n in made.values() if n not in kept])
        return outputs, constants, tuple(kept)

    def _refuse_side_effects(
        self, made: dict[int, torch.fx.Node], unclaimed: list[torch.fx.Node]
    ) -> None:
        """Allow `self.buffer += 1`, which puts a buffer back where it was; refuse all else."""
        for name, value in self.changed.items():
            node = made.get(id(value))
            if node is None or self.tensors.get(name) is None or self._root(node) != name:
                place = user_line(node) if node is not None and node.stack_trace else None
                place = place or line_that_sets(self.module, name)
                line = f" at {place}" if place is not None else ""
                way = made_permanent(self.module, self.changed) or (
                    "write into a registered buffer in place (self.buffer.copy_(…)), or return "
                    "the value"
                )
                raise TraceError(
                    f"the forward sets {name!r}{line}: a Python side effect, which would happen "
                    f"once, at tracing, and never again. Way out: {way}."
                )
            unclaimed = [n for n in unclaimed if n is not node]
        for node in unclaimed:
            raise TraceError(
                f"the forward stores a tensor outside its result at {user_line(node)}: a Python "
                "side effect, which would happen once, at tracing. Return the tensor instead."
            )

    def _root(self, node: torch.fx.Node) -> str | None:
        """Return the name of the buffer that `node` is after in-place operators, or None."""
        while node.op != "placeholder":
            written = mutated_args(node)
            if not written or written[0] is not node.args[0]:
                return None
            node = written[0]
        return self.names.get(id(self._lifted[node]))

    def _predicate(self) -> SizePredicate:
        if self.symbol is None:
            return SizePredicate(())
        found = torch_private.size_conditions(self.capture.shape_env, self.symbol)
        return SizePredicate(tuple(found), tuple(found.values()))


def _example(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def _spread(node: torch.fx.Node, each: list[Any]) -> None:
    """Replace the uses of a whole torch.Size by its elements."""

    def swap(arg: Any) -> Any:
        return tuple(each) if arg is node else arg

    for user in list(node.users):
        if user.op == "call_function" and user.target is operator.getitem:
            user.replace_all_uses_with(each[user.args[1]])  # type: ignore[index]
            user.graph.erase_node(user)
        else:
            user.args = tuple(torch.fx.node.map_aggregate(user.args, swap))
            user.kwargs = dict(torch.fx.node.map_aggregate(user.kwargs, swap))


def _is_shape_only(node: torch.fx.Node) -> bool:
    """Whether a node computes only sizes, so that it may go once unused."""
    value = _example(node)
    return node.op in ("call_function", "call_method") and isinstance(
        value, (int, torch.SymInt, torch.Size)
    )


def refuse_outputs(traced: TracedGraph) -> None:
    """Refuse results that cannot be cut back to the true rows.

    Raises:
        TraceError: naming the result and its shape.
    """
    for at, spec in enumerate(traced.output_specs):
        odd = [s for s in spec.shape if isinstance(s, str) and s != "s"]
        if odd:
            raise TraceError(
                f"result {at}: its shape {spec.shape} depends on the row count s other than by "
                "being it, so padding rows cannot be cut off. Return one row per input row."
            )
