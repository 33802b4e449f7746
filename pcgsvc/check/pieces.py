"""Compiled regions against their FX graphs, one by one, on the inputs that a step gives them.

In: a program that differs from its module, a step, and the regions as FX graphs. Out: the regions
that the compiler got wrong, each with the op at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.check.tolerance import error_of, tolerance_of
from pcgsvc.check.trial import Step, Trial
from pcgsvc.config import CompilerConfig
from pcgsvc.errors import CompileError
from pcgsvc.partition.fx import ALLOCATIONS
from pcgsvc.program.pieces import Partition, Piece, graph_module
from pcgsvc.program.program import CompiledPiece, Direct
from pcgsvc.trace.nodes import mutated_args, op_names, user_line

Function = Callable[..., Sequence[Any]]


def wrong_regions(trial: Trial, step: Step, partition: Partition) -> dict[str, str]:
    """Run a step with every region both compiled and as its FX graph.

    Returns:
        The regions that differ, by hash: piece, op and line, and how far the results are off. The
        run goes on with what the FX graph gives, so a wrong region makes no later one wrong.
    """
    comparison = _Comparison(trial, partition)
    trial.program(step, comparison)
    return comparison.wrong


class _Comparison(Direct):
    """The executor of such a run."""

    def __init__(self, trial: Trial, partition: Partition) -> None:
        self._compiler = trial.config.compiler
        self._regions = {piece.name: piece for piece in partition.pieces}
        own, state = trial.memory.tensors, trial.state
        self._constant = {id(t) for name, t in own.items() if name not in state}
        self.wrong: dict[str, str] = {}

    def region(self, name: str, piece: CompiledPiece, args: list[Any]) -> Sequence[Any]:
        """See `Executor.region`."""
        region = self._regions[name]
        assert region.hash is not None
        tensors = (a for a in args if isinstance(a, torch.Tensor))
        call = _Call(args, [t for t in tensors if id(t) not in self._constant])
        found = call.differs(piece, region)
        if found is not None and region.hash not in self.wrong:
            node = _op_at_fault(region, call, self._compiler)
            where = f"{op_names(node)[0]} at {user_line(node)}"
            gap = "{:.3g} (tolerance {:.3g})".format(*found)
            self.wrong[region.hash] = f"{name}: {where}: off by {gap}"
        return call.run(graph_module(region))


class _Call:
    """A region's arguments, put back before each run of it."""

    def __init__(self, args: Sequence[Any], written: Sequence[torch.Tensor]) -> None:
        self._args = args
        self._written = [(tensor, tensor.clone()) for tensor in written]

    def run(self, function: Function) -> Sequence[Any]:
        """Run a function on the arguments as they were."""
        for tensor, before in self._written:
            tensor.copy_(before)
        return function(*self._args)

    def differs(self, compiled: Function, region: Piece) -> tuple[float, float] | None:
        """Return error and tolerance if a function does not compute what a region does."""
        compared, ops = _compared(region), graph_module(region)

        def outcome(function: Function) -> list[torch.Tensor]:
            """Return copies of the results, and of the arguments that may be written to."""
            results = self.run(function)
            kept = [results[at].clone() for at in compared]
            return [*kept, *(tensor.clone() for tensor, _ in self._written)]

        got, wanted = outcome(compiled), outcome(ops)
        if not wanted:
            return None
        error = error_of(got, wanted)
        tolerance = tolerance_of(wanted, error, lambda: outcome(ops))
        return (error, tolerance) if error > tolerance else None


def _compared(region: Piece) -> list[int]:
    """Return the places of a region's results that are tensors it has written."""
    made = [n for n in region.nodes if op_names(n)[0].split("::")[-1] in ALLOCATIONS]
    empty = {_storage(n) for n in made}
    empty -= {_storage(a) for n in region.nodes for a in mutated_args(n)}
    return [
        at
        for at, node in enumerate(region.outputs)
        if isinstance(node.meta["example_value"], torch.Tensor) and _storage(node) not in empty
    ]


def _storage(node: torch.fx.Node) -> int:
    return torch_private.storage_id(node.meta["example_value"])


def _op_at_fault(region: Piece, call: _Call, compiler: CompilerConfig) -> torch.fx.Node:
    """Return the last op of the shortest beginning of a region that is wrong when compiled.

    A beginning that cannot be compiled by itself counts as right.
    """
    right, wrong = 0, len(region.nodes)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if _is_wrong(_beginning(region, middle), call, compiler):
            wrong = middle
        else:
            right = middle
    return region.nodes[wrong - 1]


def _beginning(region: Piece, count: int) -> Piece:
    """Return the first ops of a region, with everything in them that is read later as a result."""
    nodes = region.nodes[:count]
    inside, results = set(nodes), set(region.outputs)
    outputs = [
        node
        for node in nodes
        if isinstance(node.meta.get("example_value"), torch.Tensor)
        and (node in results or any(user not in inside for user in node.users))
    ]
    return replace(region, nodes=nodes, outputs=outputs, document=None)


def _is_wrong(beginning: Piece, call: _Call, compiler: CompilerConfig) -> bool:
    from pcgsvc.compilers.inductor import compile_piece

    try:
        return call.differs(compile_piece(beginning, compiler), beginning) is not None
    except CompileError:
        return False
