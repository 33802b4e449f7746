"""A compiled forward: what runs, what it assumes, and how its results are put together.

In: a module, a program image and compiled pieces. Out: `CompiledModel`, which capture, check and
serve read. Knows nothing of graphs or of where any of it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from pcgsvc.errors import TraceError, VerifyError
from pcgsvc.forward.arguments import Arguments
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.request import Request, make_workspace
from pcgsvc.forward.results import ResultTree, flatten, kind_of, tensors_in
from pcgsvc.forward.specs import SizePredicate, TensorSpec, cut_rows
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.ranks import Ranks
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.pieces import PieceCounts
from pcgsvc.program.program import Program

LAYOUT, IDENTITY = "layout", "identity"
"""What a forward may depend on of its inputs, besides their values; see `check.dependence`."""


@dataclass(kw_only=True)
class OutputPlan:
    """How a forward's result is put together from graph results."""

    leaves: list[tuple[str, int]]
    """Per tensor leaf: ("graph", result index) or ("input", input index)."""
    constants: dict[int, Any]
    """Leaves that are no tensors, by leaf index."""
    tree: ResultTree
    """How the leaves are nested."""
    specs: list[TensorSpec]
    """Per graph result."""

    @cached_property
    def kinds(self) -> list[str]:
        """What each leaf is, as `kind_of` says it."""
        tensors = ("a tensor" if kind == "graph" else "an input" for kind, _ in self.leaves)
        count = len(self.leaves) + len(self.constants)
        return [
            kind_of(self.constants[at], "") if at in self.constants else next(tensors)
            for at in range(count)
        ]

    @cached_property
    def is_one_tensor(self) -> bool:
        """Whether the forward returns the graph's first result, as it is."""
        return self.tree.is_leaf and self.leaves == [("graph", 0)]

    def cut(self, results: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Return the true rows of graph results, as views."""
        pairs = zip(results, self.specs, strict=True)
        return [cut_rows(result, spec.row_dims(), rows) for result, spec in pairs]

    def build(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """Return the forward's result with its own structure; inputs are in the forward's order."""
        if self.is_one_tensor:
            return results[0]
        tensors = iter(results[i] if k == "graph" else inputs[i] for k, i in self.leaves)
        count = len(self.leaves) + len(self.constants)
        leaves = [self.constants[i] if i in self.constants else next(tensors) for i in range(count)]
        return self.tree.build(leaves)


@dataclass(kw_only=True)
class CompiledModel:
    """A forward as a program, loaded or made; nothing of it changes once it is built."""

    module: Callable[..., Any]
    """The forward itself, for comparison and for what the program is not valid for."""
    arguments: Arguments
    image: ProgramImage
    program: Program
    start: str
    """`cold` (traced here) or `warm` (loaded)."""
    counts: PieceCounts
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Captured tensors that are no parameter or buffer, by binding name."""
    facts: Mapping[str, Any] | None = None
    """What it is stored under; None: it is not stored."""
    unstored: list[str] = field(default_factory=list)
    """Why it is not stored; empty: it is."""
    misses: list[str] = field(default_factory=list)
    """Why it was not loaded, or cannot be stored."""
    warnings: list[str] = field(default_factory=list)
    """What was asked for and is not done."""
    memory: Workspace | None = None
    """Set where the forward had to be run to learn what it does."""
    untraced: Callable[[Mapping[str, torch.Tensor]], Any] | None = None
    """Set where the module is the program: runs it, its parts compiled, for its whole result."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that run it together."""
    depends_on: frozenset[str] = frozenset()
    """`LAYOUT`, `IDENTITY`: calls that differ in it from the traced example need the module itself.
    Found by the self-check; empty without."""

    @property
    def predicate(self) -> SizePredicate:
        """Which row counts the trace is valid for."""
        return self.image.predicate

    def refuses(self, rows: int) -> str | None:
        """Return the condition for which the program cannot run so many rows, or None."""
        exact = rows in self.program.exact_sizes
        return (self.predicate if exact else self.image.general).broken_by(rows)

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of parameters and buffers that the program writes to."""
        return self.image.mutated

    @cached_property
    def reads_metadata(self) -> bool:
        """Whether anything in it may read the step's context; torch's own ops do not.

        What a boundary gives is cut to the true rows by it, whosever the op is.
        """
        return bool(self.image.matched) or not all(
            name.startswith(("aten::", "prims::")) for name in self.image.ops
        )

    @cached_property
    def outputs(self) -> OutputPlan:
        """How the forward's result is put together from graph results."""
        return OutputPlan(
            leaves=list(self.image.outputs),
            constants=self.image.constants,
            tree=self.image.tree(),
            specs=list(self.image.output_specs),
        )

    def requiring(self, condition: str, origin: str) -> CompiledModel:
        """Return the same model, valid only for row counts `s` that satisfy one more condition."""
        predicate = self.predicate.requiring([condition], origin)
        return replace(self, image=replace(self.image, predicate=predicate))

    def run_module(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Call the module under the current context; results in the order of the graph's.

        Raises:
            VerifyError: the result differs from the program's in what no graph computes: how it is
                nested, which of its leaves are inputs, and those that are no tensors.
        """
        result = self.module(**inputs, **self.arguments.constants)
        leaves, tree = flatten(result)
        given = {id(tensor) for tensor in inputs.values()}
        kinds = [kind_of(leaf, "an input" if id(leaf) in given else "a tensor") for leaf in leaves]
        pairs = list(zip(kinds, self.outputs.kinds, strict=False))
        same = ("an input", "a tensor")  # `x.contiguous()` may be `x`
        other = [at for at, (got, due) in enumerate(pairs) if got != due and (got, due) != same]
        if tree != self.outputs.tree:
            got, due = f"a result nested as {tree}", f"one nested as {self.outputs.tree}"
        elif other:
            got, due = (f"{kind} as leaf {other[0]}" for kind in pairs[other[0]])
        else:
            return self.results_of(result)
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        raise VerifyError(
            f"plain execution returns {got} for {shapes}, the program {due}: what the forward "
            "returns is decided by host state (a flag, a mode) or by its row count. Return what "
            "depends on these as a tensor, or compute it outside."
        )

    def results_of(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors of a result that a graph gives, in the graph's order."""
        flat: dict[int, torch.Tensor] = {}
        for (kind, index), leaf in zip(self.outputs.leaves, tensors_in(result), strict=True):
            if kind == "graph":
                flat[index] = leaf
        return [flat[i] for i in range(len(flat))]


def allocate(request: Request, model: CompiledModel) -> Workspace:
    """Allocate the static memory of a model: input buffers, step metadata, KV cache, a stream.

    Parameters and buffers are used where they are.

    Raises:
        CompileError: the module lacks a tensor that the program is bound to.
        TraceError: the forward writes to a tensor that was made under `torch.inference_mode`.
        ConfigError: `attention.num_blocks` is too small for one request of the longest length.
    """
    tensors = {**tensors_of(model.module), **model.tensors}
    frozen = [name for name in model.mutated if tensors[name].is_inference()]
    if frozen:
        raise TraceError(
            f"the forward writes to {frozen}, which were made under torch.inference_mode(); torch "
            "allows such writes inside that mode only, and a runner works outside of it. Make the "
            "module under torch.no_grad(), or replace those buffers by clones."
        )
    bound = model.image.bind(tensors, request.device)
    return make_workspace(request, model.image.spec.bindings, bound)
