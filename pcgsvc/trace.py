"""Model -> one canonical graph.

In: a module and how its inputs look. Out: `TracedGraph`: torch-level FX nodes with one symbol for
the row count, parameters lifted and bound to their names, the assumptions that tracing made. Knows
nothing of splitting, compilers or graphs to replay.

Dynamo does the tracing and is then out of the loop, so its guards protect nothing any more. What
replaces them: `SizePredicate` for everything assumed of the row count, and `Guard` records for
everything else that was read.

Tracing executes nothing: the backend hook hands Dynamo's bytecode sentinels in place of results.
The bytecode puts them where the results would go, which tells the output structure and shows side
effects; module attributes are put back afterwards.
"""

from __future__ import annotations

import itertools
import logging
import operator
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import TraceError

logger = logging.getLogger(__name__)

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101)


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """How one tensor input of the forward looks."""

    name: str
    """Argument name."""
    example: torch.Tensor
    """Any valid value; only dtype, device and the shape outside `dim` count."""
    dim: int | None
    """Dimension that carries the rows, or None for an input of fixed shape."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and kind of a tensor; symbolic sizes are Python source in the row count `s`."""

    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    offset: int | str
    device: str
    layout: str = "torch.strided"

    def row_dims(self) -> tuple[int, ...]:
        """Return the dimensions whose size is exactly the row count."""
        return tuple(d for d, size in enumerate(self.shape) if size == "s")

    def as_json(self) -> list[Any]:
        """Return JSON types, for documents and hashes."""
        shape, stride = list(self.shape), list(self.stride)
        return ["tensor", self.dtype, shape, stride, self.offset, self.device, self.layout]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """What a graph input is bound to at run time."""

    kind: str
    """`size` (the row count), `input` (an argument), `param` (parameter or buffer), `constant`."""
    name: str
    """Argument name, fully qualified tensor name, or Dynamo's source of a captured tensor."""
    spec: TensorSpec | None
    """None for the size."""


@dataclass(frozen=True)
class SizePredicate:
    """What the graph assumes of the row count `s`; replaces Dynamo's shape guards."""

    conditions: tuple[str, ...]
    """Python source over `s`; the graph is right for sizes that satisfy all."""
    origins: tuple[str, ...] = ()
    """The user's line behind each condition, or an empty string."""

    def and_also(self, condition: str, origin: str) -> SizePredicate:
        """Return a predicate with one more condition."""
        return SizePredicate((*self.conditions, condition), (*self.origins, origin))

    def broken_by(self, size: int) -> str | None:
        """Return the first condition that `size` does not satisfy, with its origin, or None."""
        space = {"s": size, "max": max, "min": min, "abs": abs, "__builtins__": {}}
        for at, condition in enumerate(self.conditions):
            if not eval(condition, space):  # noqa: S307 - printed from sympy relations
                origin = self.origins[at] if at < len(self.origins) else ""
                return f"{condition}{f' (from {origin})' if origin else ''}"
        return None


@dataclass(frozen=True, kw_only=True)
class Guard:
    """One thing besides shapes that tracing read and took for constant."""

    source: str
    """Where it was read, in Dynamo's notation, e.g. `module.scale`."""
    kind: str
    """Dynamo's guard type."""
    value: Any
    """What was read (not kept beyond the trace unless it is a constant)."""


@dataclass(kw_only=True)
class TracedGraph:
    """The canonical graph and all that is needed to run it without Dynamo."""

    graph: torch.fx.Graph
    """Placeholders, `call_function` and `call_method` nodes, one output of a flat tuple."""
    bindings: list[Binding]
    """One per placeholder, in order; at most one of kind `size`, and it comes first."""
    tensors: dict[str, torch.Tensor]
    """The bound parameters, buffers and captured constants by binding name."""
    outputs: list[tuple[str, int]]
    """Flat results in tree order: ("graph", output index) or ("input", placeholder index)."""
    output_specs: list[TensorSpec]
    """Per graph output."""
    out_tree: Any
    """pytree spec of the forward's result; leaves that are no tensors are `constants`."""
    constants: dict[int, Any]
    """Leaves of the result that are constants (None, bool, str), by leaf index."""
    predicate: SizePredicate
    guards: list[Guard]
    mutated: list[str]
    """Names of parameters and buffers that the graph writes to."""
    size: int
    """Row count that was traced with."""
    spec_of: Callable[[torch.fx.Node], TensorSpec]
    """Shape and kind of a tensor-valued node."""
    size_of: Callable[[Any], int | str]
    """A symbolic int as Python source over `s`."""
    ops: Counter[str] = field(default_factory=Counter)
    """How often each op occurs, by `ns::op`."""


def trace(
    module: Callable[..., Any],
    inputs: Sequence[InputSpec],
    constants: Mapping[str, Any],
    *,
    avoid_sizes: Sequence[int] = (),
) -> TracedGraph:
    """Trace `module(**inputs, **constants)` into one canonical graph; runs no kernel.

    Args:
        module: a module in eval mode, or any callable of keyword arguments.
        inputs: tensor inputs; at least one has a row dimension.
        constants: arguments that are no tensors; frozen into the graph.
        avoid_sizes: row counts that must not be traced with.

    Raises:
        TraceError: Dynamo cannot trace the forward whole, a row dimension came out fixed, the
            forward has a side effect on Python state, or a size depends on data. The message
            names the user's line where there is one.
    """
    size = _pick_size(module, inputs, avoid_sizes)
    examples = [_example(spec, size) for spec in inputs]
    seen = _Seen(examples)
    function = _fresh_function(module, [spec.name for spec in inputs], constants)
    before = _Attributes(module)
    try:
        with torch.no_grad():
            result = torch_private.dynamo_trace(function, examples, seen.backend, seen.guard_sink)
    except torch_private.dynamo_errors() as error:
        raise TraceError(_explain(error)) from error
    finally:
        changed = before.restore()
    return _Canonical(module, inputs, seen, result, changed, size).build()


def _pick_size(
    module: Callable[..., Any], inputs: Sequence[InputSpec], avoid: Sequence[int]
) -> int:
    """Return a prime that is no dimension of any tensor in sight, so that no size is special."""
    if not any(spec.dim is not None for spec in inputs):
        raise TraceError(
            "dynamic_dims: no input has a row dimension, so there is no size to capture for. Name "
            "one, e.g. dynamic_dims={'x': 0}."
        )
    taken = set(avoid)
    for tensor in _tensors_of(module).values():
        taken |= set(tensor.shape)
    for spec in inputs:
        taken |= {n for d, n in enumerate(spec.example.shape) if d != spec.dim}
    return next((p for p in _PRIMES if p not in taken), 103)


def _tensors_of(module: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, tied ones under their first name only."""
    if not isinstance(module, torch.nn.Module):
        return {}
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    return named | dict(module.named_buffers())


def _example(spec: InputSpec, size: int) -> torch.Tensor:
    shape = list(spec.example.shape)
    if spec.dim is None:
        return torch.zeros_like(spec.example, memory_format=torch.contiguous_format)
    shape[spec.dim] = size
    example = torch.zeros(shape, dtype=spec.example.dtype, device=spec.example.device)
    torch_private.mark_dynamic(example, spec.dim)
    return example


def _fresh_function(
    module: Callable[..., Any], names: Sequence[str], constants: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function with a code object of its own.

    Dynamo counts recompilations per code object, and a class has one `forward`: without this the
    ninth runner of a class in one process would hit the recompile limit.
    """

    def traced(*tensors: torch.Tensor) -> Any:
        return module(**dict(zip(names, tensors, strict=True)), **constants)

    traced.__code__ = traced.__code__.replace(co_name=f"traced_{uuid.uuid4().hex}")
    return traced


def _explain(error: Exception) -> str:
    """Return Dynamo's reason with the user's line first, and the ways out."""
    text = str(error).strip()
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    where = next(
        (f"{f}:{n} in {fn}" for f, n, fn in reversed(lines) if "/torch/" not in f), "the forward"
    )
    reason = re.split(r"\n\n(?:from user code| *Developer debug context)", text)[0].strip()
    return (
        f"the model cannot be traced whole, because of {where}:\n{reason}\n"
        "Ways out: compute it in __init__, or wrap it in a @pcgsvc.splitting_op, which runs "
        "outside the graphs."
    )


class _Seen:
    """What the backend hook saw."""

    def __init__(self, examples: list[torch.Tensor]) -> None:
        self.examples = examples
        self.graph: torch.fx.GraphModule | None = None
        self.graph_inputs: list[Any] = []
        self.shape_env: Any = None
        self.guards: list[Guard] = []
        self.sentinels: list[torch.Tensor] = []

    def guard_sink(self, entries: Sequence[Any]) -> None:
        self.guards = [
            Guard(source=e.name, kind=e.guard_type, value=e.value if e.has_value else None)
            for e in entries
        ]

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graph, self.graph_inputs = graph, list(inputs)
        self.shape_env = torch_private.tracing_shape_env()
        (outputs,) = next(n for n in graph.graph.nodes if n.op == "output").args
        self.sentinels = [torch.empty(0) for _ in outputs]
        return lambda *args: tuple(self.sentinels)


class _Attributes:
    """The Python state of a module tree, to put back after tracing."""

    def __init__(self, module: Callable[..., Any]) -> None:
        modules = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {}
        self.saved = [(name, m, self._copy(m)) for name, m in modules.items()]

    @staticmethod
    def _copy(module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
        """Return each attribute with a shallow copy of its content if it is a container."""
        kinds = (dict, list, set)
        return {
            k: (v, v.copy() if isinstance(v, kinds) else None) for k, v in vars(module).items()
        }

    def restore(self) -> dict[str, Any]:
        """Put everything back; return what tracing had changed, by dotted name."""
        changed: dict[str, Any] = {}
        for name, module, saved in self.saved:
            prefix = f"{name}." if name else ""
            now = vars(module)
            for key in [k for k in now if k not in saved]:
                changed[prefix + key] = now.pop(key)
            for key, (value, content) in saved.items():
                if now.get(key, self) is not value:
                    changed[prefix + key] = now.get(key)
                    now[key] = value
                if content is not None and not _same_content(value, content):
                    changed |= self._refill(prefix, key, value, content)
        return changed

    @staticmethod
    def _refill(prefix: str, key: str, value: Any, content: Any) -> dict[str, Any]:
        changed: dict[str, Any] = {prefix + key: value}
        if isinstance(value, dict):
            inner = "" if key in ("_buffers", "_parameters", "_modules") else f"{key}."
            changed = {
                f"{prefix}{inner}{k}": v for k, v in value.items() if content.get(k, key) is not v
            }
        value.clear()
        value.extend(content) if isinstance(value, list) else value.update(content)
        return changed


def _same_content(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return bool(a == b)


class _Canonical:
    """Turns what Dynamo gave into a `TracedGraph`."""

    def __init__(
        self,
        module: Callable[..., Any],
        inputs: Sequence[InputSpec],
        seen: _Seen,
        result: Any,
        changed: dict[str, Any],
        size: int,
    ) -> None:
        self.inputs, self.seen, self.size, self.changed = inputs, seen, size, changed
        self.graph = torch.fx.Graph() if seen.graph is None else seen.graph.graph
        if seen.graph is None:  # no op at all: Dynamo calls no backend for such a forward
            self.graph.output(())
        self.tensors = _tensors_of(module)
        self.names = {id(t): name for name, t in self.tensors.items()}
        self.symbol: Any = None
        self.leaves, self.out_tree = pytree.tree_flatten(result)

    def build(self) -> TracedGraph:
        bindings = self._bind()
        self._merge_sizes(bindings)
        self._drop_noise()
        self._check_static()
        self._decompose_sizes()
        output = next(n for n in self.graph.nodes if n.op == "output")
        outputs, constants, kept = self._match_outputs(output)
        output.args = (tuple(output.args[0][i] for i in kept),)
        ordered = [n for n in self.graph.nodes if n.op == "placeholder"]
        used = {n: bindings[n] for n in ordered if n in bindings}
        self.graph.lint()
        return TracedGraph(
            graph=self.graph,
            bindings=list(used.values()),
            tensors=self._bound,
            outputs=outputs,
            output_specs=[self._spec_of(n) for n in output.args[0]],
            out_tree=self.out_tree,
            constants=constants,
            predicate=self._predicate(),
            guards=self.seen.guards,
            mutated=self._mutated(used),
            size=self.size,
            spec_of=self._spec_of,
            size_of=self._dim,
            ops=Counter(name for n in self.graph.nodes for name in op_names(n)[:1]),
        )

    # -- placeholders --

    def _bind(self) -> dict[torch.fx.Node, Binding]:
        self._bound: dict[str, torch.Tensor] = {}
        by_example = {id(t): s.name for t, s in zip(self.seen.examples, self.inputs, strict=True)}
        bindings: dict[torch.fx.Node, Binding] = {}
        nodes = [n for n in self.graph.nodes if n.op == "placeholder"]
        self._lifted = dict(zip(nodes, self.seen.graph_inputs, strict=True))
        for node, value in self._lifted.items():
            if isinstance(value, (torch.SymInt, int)):
                bindings[node] = Binding(kind="size", name="num_tokens", spec=None)
                continue
            if not isinstance(value, torch.Tensor):
                raise TraceError(
                    f"graph input {node.name}: a {type(value).__name__} was lifted out of the "
                    "forward; only tensors and the row count can be inputs of a piece."
                )
            kind, name = self._name_of(node, value, by_example)
            if kind != "input":
                self._bound[name] = value
            bindings[node] = Binding(kind=kind, name=name, spec=self._spec_of(node))
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
        first_tensor = next((n for n in self.graph.nodes if n.op == "placeholder"), None)
        for node in sizes[1:]:
            node.replace_all_uses_with(sizes[0])
            self.graph.erase_node(node)
            del bindings[node]
        if sizes and first_tensor is not sizes[0] and first_tensor is not None:
            first_tensor.prepend(sizes[0])

    def _check_static(self) -> None:
        """Refuse a declared row dimension that Dynamo took for a constant."""
        if self.seen.graph is None:
            return
        for spec, example in zip(self.inputs, self.seen.examples, strict=True):
            nodes = [n for n, v in self._lifted.items() if v is example]
            if spec.dim is None or not nodes:
                continue
            got = nodes[0].meta["example_value"].shape[spec.dim]
            if not isinstance(got, torch.SymInt) or not self._expression(got).free_symbols:
                raise TraceError(
                    f"dynamic_dims: dimension {spec.dim} of {spec.name!r} came out fixed at "
                    f"{int(got)}: the forward compares it with a constant. Remove the comparison, "
                    "or take the dimension out of dynamic_dims."
                )

    # -- nodes --

    def _expression(self, value: Any) -> Any:
        """Return the sympy expression of a SymInt with all known equalities applied."""
        return self.seen.shape_env.replace(torch_private.symbolic_expr(value))

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
                "may be symbolic; put the op that produced it into a @pcgsvc.splitting_op, "
                f"or mark it with partition.extra_splitting_ops.{self._line_of_unbacked()}"
            )
        return re.sub(rf"\b{self.symbol}\b", "s", torch_private.python_source(expression))

    def _line_of_unbacked(self) -> str:
        for node in self.graph.nodes:
            value = node.meta.get("example_value")
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
        if self.symbol is None:  # placeholders come before their symbol is known
            self._find_symbol()
        return TensorSpec(
            dtype=str(value.dtype),
            shape=tuple(self._dim(d) for d in value.shape),
            stride=tuple(self._dim(d) for d in value.stride()),
            offset=self._dim(value.storage_offset()),
            device=str(value.device),
            layout=str(value.layout),
        )

    def _find_symbol(self) -> None:
        for node in self.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                self.symbol = self._expression(value)
                return

    def _drop_noise(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and torch_private.ignored_call(node.target):
                self.graph.erase_node(node)

    def _decompose_sizes(self) -> None:
        """Replace `x.size()` by one value per dimension, so that no torch.Size crosses a border."""
        placeholders = (n for n in self.graph.nodes if n.op == "placeholder")
        size_node = next((n for n in placeholders if self._is_symbol(n)), None)
        for node in list(self.graph.nodes):
            if node.op == "call_method" and node.target == "size":
                self._replace_size(node, size_node)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and _is_shape_only(node):
                self.graph.erase_node(node)

    def _is_symbol(self, node: torch.fx.Node) -> bool:
        return isinstance(node.meta.get("example_value"), (torch.SymInt, int))

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
        self, output: torch.fx.Node
    ) -> tuple[list[tuple[str, int]], dict[int, Any], list[int]]:
        """Match the leaves of the forward's result with graph outputs and inputs, by identity."""
        places = {id(t): i for i, t in enumerate(self.seen.sentinels)}
        inputs = {id(t): i for i, t in enumerate(self.seen.examples)}
        outputs: list[tuple[str, int]] = []
        constants: dict[int, Any] = {}
        kept: list[int] = []
        for at, leaf in enumerate(self.leaves):
            if id(leaf) in places:
                place = places[id(leaf)]
                if place not in kept:
                    kept.append(place)
                outputs.append(("graph", kept.index(place)))
            elif id(leaf) in inputs:
                outputs.append(("input", inputs[id(leaf)]))
            elif leaf is None or isinstance(leaf, (bool, str)):
                constants[at] = leaf
            else:
                raise TraceError(
                    f"result leaf {at}: got {type(leaf).__name__}; a forward may return tensors "
                    "that it computed or was given, None, bools and strings. A number would be "
                    "frozen at its traced value: return it as a tensor, or compute it outside."
                )
        self._refuse_side_effects(output, {p for p in range(len(places)) if p not in kept})
        return outputs, constants, kept

    def _refuse_side_effects(self, output: torch.fx.Node, unclaimed: set[int]) -> None:
        """Allow `self.buffer += 1`, which puts a buffer back where it was; refuse all else."""
        sentinels = {id(t): i for i, t in enumerate(self.seen.sentinels)}
        for name, value in self.changed.items():
            place = sentinels.get(id(value))
            node = None if place is None else output.args[0][place]
            if node is None or self.tensors.get(name) is None or self._root(node) != name:
                line = f" at {user_line(node)}" if node is not None else ""
                raise TraceError(
                    f"the forward sets {name!r}{line}: a Python side effect, which would happen "
                    "once, at tracing, and never again. Write into a registered buffer in place "
                    "(self.buffer.copy_(…)), or return the value."
                )
            unclaimed.discard(place if place is not None else -1)
        for place in unclaimed:
            node = output.args[0][place]
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

    def _mutated(self, bindings: dict[torch.fx.Node, Binding]) -> list[str]:
        """Names of bound tensors whose storage some node writes to."""
        storages = {
            torch_private.storage_id(n.meta["example_value"]): b.name
            for n, b in bindings.items()
            if b.kind in ("param", "constant")
        }
        found = {
            storages.get(torch_private.storage_id(a.meta["example_value"]))
            for n in self.graph.nodes
            for a in mutated_args(n)
        }
        return sorted(name for name in found if name is not None)

    def _predicate(self) -> SizePredicate:
        if self.symbol is None:
            return SizePredicate(())
        conditions: list[str] = []
        origins: list[str] = []
        for guard in self.seen.shape_env.guards:
            expression = self.seen.shape_env.replace(guard.expr)
            if expression.free_symbols != {self.symbol}:
                continue  # an equality of two sizes that is now built in, or static
            text = re.sub(
                rf"\b{self.symbol}\b", "s", torch_private.python_source(expression)
            )
            if text not in conditions:
                conditions.append(text)
                origins.append(str(guard.sloc.maybe_user_loc or ""))
        return SizePredicate(tuple(conditions), tuple(origins))


def _spread(node: torch.fx.Node, each: list[Any]) -> None:
    """Replace the uses of a whole torch.Size by its elements."""
    for user in list(node.users):
        if user.op == "call_function" and user.target is operator.getitem:
            picked = each[user.args[1]]  # type: ignore[index]
            if not isinstance(picked, (list, tuple)):
                user.replace_all_uses_with(picked)
                user.graph.erase_node(user)
                continue
            user.replace_all_uses_with(picked)  # type: ignore[arg-type]
            user.graph.erase_node(user)
            continue

        def swap(arg: Any) -> Any:
            return tuple(each) if arg is node else arg

        user.args = tuple(torch.fx.node.map_aggregate(user.args, swap))  # type: ignore[arg-type]
        user.kwargs = dict(torch.fx.node.map_aggregate(user.kwargs, swap))  # type: ignore[arg-type,call-overload]


def _is_shape_only(node: torch.fx.Node) -> bool:
    """Whether a node computes only sizes, so that it may go when nobody reads it."""
    value = node.meta.get("example_value")
    return node.op in ("call_function", "call_method") and isinstance(
        value, (int, torch.SymInt, torch.Size)
    )


# ---- what a node is ------------------------------------------------------------------------------


def op_names(node: torch.fx.Node) -> list[str]:
    """Return the names by which a node's op may be asked for: `ns::op` first, then Python names."""
    if node.op == "call_method":
        return [f"aten::{node.target}", f"Tensor.{node.target}"]
    if node.op != "call_function":
        return []
    name = torch_private.op_name(node.target)
    if name is not None:
        return [name]
    short = getattr(node.target, "__name__", str(node.target))
    qualified = torch_private.qualified_name(node.target)  # type: ignore[arg-type]
    return [f"aten::{short}", qualified, qualified.replace("torch._C._nn", "torch.nn.functional")]


_INPLACE_OPERATORS = {
    getattr(operator, f"i{name}")
    for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
} | {operator.setitem}


def mutated_args(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the tensor arguments that a node writes to, by schema or by torch's naming rule."""
    found: list[Any] = []
    schema = torch_private.op_schema(node.target) if node.op == "call_function" else None
    if schema is not None:
        for at, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found.append(
                    node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
                )
    elif node.op in ("call_function", "call_method"):
        name = (
            str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        )
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or node.target in _INPLACE_OPERATORS or node.kwargs.get("inplace") is True:
            found.append(node.args[0] if node.args else node.kwargs.get("input"))
        found.append(node.kwargs.get("out"))
    leaves = itertools.chain.from_iterable(pytree.tree_leaves(f) for f in found)
    return [
        n
        for n in leaves
        if isinstance(n, torch.fx.Node) and isinstance(n.meta.get("example_value"), torch.Tensor)
    ]


def user_line(node: torch.fx.Node) -> str:
    """Return `file:line in function` of the user's code behind a node."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.stack_trace or "")
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return "{}:{} in {}".format(*own[-1]) if own else f"graph node {node.name}"


def iter_calls(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """Yield the nodes that compute something."""
    return (n for n in graph.nodes if n.op in ("call_function", "call_method", "call_module"))
