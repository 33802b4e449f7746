"""Regions of an untraced model: submodules that hit no break, compiled on their own.

In: a module and how its submodules were called. Out: compiled forwards, in place only while the
runner itself calls the module. Knows nothing of capture.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc.errors import CompileError, ConfigError, PcgError, near
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.specs import InputSpec
from pcgsvc.partition.fx import partition_fx
from pcgsvc.program.model import OutputPlan
from pcgsvc.program.pieces import Piece
from pcgsvc.program.program import CompiledPiece, Direct, Program, program_of
from pcgsvc.trace.dynamo import trace
from pcgsvc.trace.graph import TracedGraph

logger = logging.getLogger(__name__)

Arguments = dict[str, Any]


@dataclass
class Calls:
    """How the submodules of one forward were called."""

    arguments: dict[str, Arguments] = field(default_factory=dict)
    """Arguments of the first call, by the submodule's name."""
    repeated: set[str] = field(default_factory=set)
    """Submodules called more than once."""
    broken: set[str] = field(default_factory=set)
    """Submodules inside which a break was met."""
    stack: list[str] = field(default_factory=list)

    def broke(self) -> None:
        """Note that a break was met here."""
        self.broken.update(self.stack)

    def enter(self, name: str, sub: torch.nn.Module, args: Any, kwargs: Arguments) -> None:
        """A forward pre-hook: note what the submodule `name` is called with."""
        self.stack.append(name)
        if name in self.arguments:
            self.repeated.add(name)
            return
        with contextlib.suppress(TypeError):  # it does not take them, and will say so
            bound = inspect.signature(sub.forward).bind(*args, **kwargs)
            self.arguments[name] = dict(bound.arguments)

    def leave(self, sub: torch.nn.Module, args: Any, result: Any) -> None:
        """A forward hook: the submodule has returned."""
        self.stack.pop()


@contextlib.contextmanager
def watched(module: Callable[..., Any], calls: Calls) -> Iterator[None]:
    """Note calls of submodules for a block, by forward hooks that are removed at its end."""
    handles: list[Any] = []
    if isinstance(module, torch.nn.Module):
        for name, sub in module.named_modules():
            if name:
                enter = functools.partial(calls.enter, name)
                handles.append(sub.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(sub.register_forward_hook(calls.leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def chosen(module: torch.nn.Module, calls: Calls, names: Sequence[str] | None) -> list[str]:
    """Return the submodules to compile.

    Args:
        module: the model.
        calls: of one forward.
        names: as configured; None: the largest ones that hit no break, single layers of torch's
            own left out, since there is nothing in them to fuse.

    Raises:
        ConfigError: a name that there is not, or that hits a break.
    """
    if names is not None:
        known = [n for n, _ in module.named_modules() if n]
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"partition.compile_modules: {name!r} is no submodule{near(name, known)}"
                )
            if name in calls.broken:
                raise ConfigError(
                    f"partition.compile_modules: {name!r} holds a break; name its parts instead."
                )
        return list(names)
    found: list[str] = []
    for name, sub in module.named_modules():
        inside = any(name.startswith(f"{f}.") for f in found)
        single = type(sub).__module__.startswith("torch.nn.")
        if name in calls.arguments and name not in calls.broken and not inside and not single:
            found.append(name)
    return found


def compile_submodules(
    module: torch.nn.Module,
    names: Sequence[str],
    one: Calls,
    other: Calls,
    compile_piece: Callable[[Piece], CompiledPiece],
) -> tuple[dict[str, Callable[..., Any]], list[str]]:
    """Trace and compile submodules.

    Args:
        module: the model.
        names: which.
        one: calls of a forward.
        other: calls of a forward with another row count.
        compile_piece: makes a piece's kernels; equal pieces are made once.

    Returns:
        Compiled forwards by name, and warnings on submodules that stay as they are.
    """
    forwards: dict[str, Callable[..., Any]] = {}
    warnings: list[str] = []
    made: dict[str, CompiledPiece] = {}
    for name in names:
        try:
            specs, constants = _specs(name, one.arguments[name], other.arguments[name])
            traced = trace(module.get_submodule(name), specs, constants)
            forwards[name] = _forward(
                module.get_submodule(name), traced, specs, constants, made, compile_piece
            )
        except (PcgError, KeyError) as error:
            text = str(error).split("\n")[0]
            warnings.append(f"partition.compile_modules: {name} runs uncompiled: {text}")
    return forwards, warnings


def _specs(
    name: str, one: Arguments, other: Arguments
) -> tuple[list[InputSpec], Mapping[str, Any]]:
    specs: list[InputSpec] = []
    constants: dict[str, Any] = {}
    for key, value in one.items():
        if not isinstance(value, torch.Tensor):
            nested = pytree.tree_leaves(value)
            if any(isinstance(leaf, torch.Tensor) for leaf in nested) or value != other.get(key):
                raise CompileError(f"argument {key!r} is no tensor and no constant")
            constants[key] = value
            continue
        pairs = zip(value.shape, other[key].shape, strict=True)
        dims = tuple(d for d, (a, b) in enumerate(pairs) if a != b)
        specs.append(InputSpec(name=key, example=value, dims=dims))
    return specs, constants


def _forward(
    sub: torch.nn.Module,
    traced: TracedGraph,
    specs: Sequence[InputSpec],
    constants: Mapping[str, Any],
    made: dict[str, CompiledPiece],
    compile_piece: Callable[[Piece], CompiledPiece],
) -> Callable[..., Any]:
    """Return a submodule's compiled forward, which runs its own where the trace is not valid."""
    plan = partition_fx(traced, [])
    for key, piece in plan.unique().items():
        if key not in made:
            made[key] = compile_piece(piece)
    program = Program(program_of(traced, plan), made)
    signature = inspect.signature(sub.forward)
    tensors = traced.tensors | {n: t for n, t in tensors_of(sub).items() if n in traced.tensors}
    outputs = OutputPlan(
        leaves=traced.outputs,
        constants=traced.constants,
        tree=traced.out_tree,
        specs=traced.output_specs,
    )
    rows = [(spec.name, dim) for spec in specs for dim in spec.dims]
    named = {spec.name: spec for spec in specs}
    assumed = (condition for key in plan.unique() for condition in made[key].assumes)
    predicate = traced.predicate.requiring(assumed, "the compiler")
    fixed, plain = {name: (type(v), v) for name, v in constants.items()}, sub.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        size = next((given[name].shape[dim] for name, dim in rows if name in given), 0)
        fits = all(spec.fits(given.get(name), size) for name, spec in named.items())
        others = {name: (type(v), v) for name, v in given.items() if name not in named}
        if not fits or others != fixed or predicate.broken_by(size) is not None:
            return plain(*args, **kwargs)
        laid_out = {name: spec.laid_out(given[name]) for name, spec in named.items()}
        values = [
            size if b.kind == "size" else (laid_out if b.kind == "input" else tensors)[b.name]
            for b in program.spec.bindings
        ]
        inputs = [given[spec.name] for spec in specs]
        return outputs.build(program.run(values, Direct()), inputs)

    return forward


@contextlib.contextmanager
def in_place(
    module: Callable[..., Any], forwards: Mapping[str, Callable[..., Any]]
) -> Iterator[None]:
    """Let submodules run their compiled forwards for a block, and only in it."""
    if not forwards or not isinstance(module, torch.nn.Module):
        yield
        return
    subs = [(module.get_submodule(name), forward) for name, forward in forwards.items()]
    for sub, forward in subs:
        sub.__dict__["forward"] = forward
    try:
        yield
    finally:
        for sub, _ in subs:
            sub.__dict__.pop("forward", None)
