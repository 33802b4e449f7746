"""Model -> one canonical graph.

In: a module and how its inputs look. Out: `TracedGraph`: torch-level FX nodes with one symbol for
the row count, parameters lifted and bound to their names, the assumptions that tracing made. Knows
nothing of splitting, compilers or graphs to replay.

Dynamo does the tracing and is then out of the loop, so its guards protect nothing any more. What
replaces them: `SizePredicate` for everything assumed of the row count, and `Guard` records for
everything else that was read.

Tracing executes nothing: the backend hook hands Dynamo's bytecode sentinels in place of results.
The bytecode puts them where the results would go, which shows the output structure and side
effects; module attributes are put back afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.errors import PcgError, TraceError
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.specs import InputSpec
from pcgsvc.forward.state import Attributes
from pcgsvc.ops import breaks, context
from pcgsvc.trace.backend import DynamoCapture
from pcgsvc.trace.canonical import Canonical
from pcgsvc.trace.graph import TracedGraph
from pcgsvc.trace.nodes import frames_of

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101)
_SMALL_PRIMES = (7, 5, 3, 2)
"""For a model that a larger row count does not fit: a table in it has fewer rows."""


def trace(
    module: Callable[..., Any],
    inputs: Sequence[InputSpec],
    constants: Mapping[str, Any],
) -> TracedGraph:
    """Trace `module(**inputs, **constants)` into one canonical graph; runs no kernel.

    Args:
        module: a module in eval mode, or any callable of keyword arguments.
        inputs: tensor inputs; at least one has a row dimension.
        constants: arguments that are no tensors; frozen into the graph.

    Raises:
        TraceError: Dynamo cannot trace the forward whole, a row dimension came out fixed, the
            forward has a side effect on Python state, or a size depends on data. The message
            names the user's line where there is one.
    """
    largest, *smaller = _sizes(module, inputs)
    try:
        return _trace_at(largest, module, inputs, constants)
    except TraceError as error:
        if not torch_private.is_op_failure(error.__cause__):
            raise
        for size in smaller:
            with contextlib.suppress(TraceError):
                return _trace_at(size, module, inputs, constants)
        raise


def _trace_at(
    size: int,
    module: Callable[..., Any],
    inputs: Sequence[InputSpec],
    constants: Mapping[str, Any],
) -> TracedGraph:
    examples = [_example(spec, size) for spec in inputs]
    capture = DynamoCapture(examples)
    function = _fresh_function(module, inputs, constants)
    before = Attributes(module)
    hook = [capture]  # Dynamo's caches keep the backend for ever; they must not keep the model
    try:
        with torch.no_grad():
            result = torch_private.dynamo_trace(
                function,
                examples,
                lambda graph, inputs: hook[0].backend(graph, inputs),
                lambda guards: hook[0].guard_sink(guards),
            )
    except Exception as error:
        if isinstance(error, PcgError) or not torch_private.is_dynamo_error(error):
            raise
        names = [spec.name for spec in inputs]
        raise TraceError(capture.refusal or _explain(error, names)) from error
    finally:
        hook.clear()
        changed = before.restore()
    return Canonical(module, inputs, capture, result, changed, size).build()


def _sizes(module: Callable[..., Any], inputs: Sequence[InputSpec]) -> list[int]:
    """Return primes that are no dimension of any tensor involved, so that no size is special.

    The first is meant; the others, in this order, are for a model that it is too large for. None
    depends on what is captured: another choice of capture sizes finds the stored program.
    """
    if not any(spec.dims for spec in inputs):
        raise TraceError(
            "dynamic_dims: no input has a row dimension, so there is no size to capture for. Name "
            "one, e.g. dynamic_dims={'x': 0}."
        )
    taken: set[int] = set()
    for tensor in tensors_of(module).values():
        taken |= set(tensor.shape)
    for spec in inputs:
        taken |= {n for d, n in enumerate(spec.example.shape) if d not in spec.dims}
    candidates: Iterator[int] = itertools.chain(_PRIMES, itertools.count(103, 2))
    first = next(p for p in candidates if p not in taken)
    return [first, *(p for p in _SMALL_PRIMES if p not in taken)]


def _example(spec: InputSpec, size: int) -> torch.Tensor:
    example = spec.empty(size, spec.example.device).zero_()
    for dim in spec.dims:
        torch_private.mark_dynamic(example, dim)
    return example


def _fresh_function(
    module: Callable[..., Any], inputs: Sequence[InputSpec], constants: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function with a code object of its own.

    Dynamo counts recompilations per code object, and a class has one `forward`: without this the
    ninth runner of a class in one process would hit the recompile limit.

    It compares the row dimensions with each other, which makes one symbol of them: inputs that
    never meet in the forward would have independent ones.
    """
    names = [spec.name for spec in inputs]
    places = [(at, dim) for at, spec in enumerate(inputs) for dim in spec.dims]

    def traced(*tensors: torch.Tensor) -> Any:
        at, dim = places[0]
        rows = tensors[at].shape[dim]
        for at, dim in places[1:]:
            if tensors[at].shape[dim] != rows:
                raise ValueError("inputs of other row counts")
        return module(**dict(zip(names, tensors, strict=True)), **constants)

    traced.__code__ = traced.__code__.replace(co_name=f"traced_{uuid.uuid4().hex}")
    return traced


def _explain(error: Exception, names: Sequence[str]) -> str:
    """Return Dynamo's reason with the user's line first, and the ways out."""
    text = str(error).strip()
    lines = frames_of(text)
    inner = (breaks.__file__, context.__file__)  # frames between the user's line and Dynamo
    where = next(
        (
            f"{f}:{n} in {fn}"
            for f, n, fn in reversed(lines)
            if not torch_private.is_torch_file(f) and f not in inner
        ),
        "the forward",
    )
    reason = re.split(r"\n\n(?:from user code| *Developer debug context)", text)[0].strip()
    reason = re.split(r"\n *Hint: ", reason)[0].rstrip()  # of torch.compile, not of a runner
    fixed = re.search(r"Constraints violated \(L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]", reason)
    guarded = re.search(r"Could not guard on data-dependent expression (\S.*?) \(unhinted", reason)
    if fixed is not None:  # the rest is torch's advice for its own marks and symbols
        name, dim = names[int(fixed.group(1))], fixed.group(2)
        reason = (
            f"dynamic_dims: dimension {dim} of {name!r} came out fixed: the forward compares it "
            "with a constant, runs Python for each of its rows (for row in x, unbind, split), or "
            "gives it to an op that torch traces for one size alone, such as torch.take_along_dim "
            "(torch.gather is traced for all). Compute all rows at once, or take the dimension out "
            "of dynamic_dims."
        )
    elif guarded is not None:
        reason = f"it branches on a value of the device ({guarded.group(1)}: .item(), bool(), if)."
    elif any(f == breaks.__file__ for f, _, _ in lines):
        reason = (
            "it calls a function marked pcgsvc.eager_break, which is for "
            "partition.strategy=breakable. Set that, or make it a splitting op, as follows."
        )
    elif "builtin operator `print`" in reason:
        reason = "it prints. Remove the print, or have it run at every step, as follows."
    return f"the model cannot be traced whole, because of {where}:\n{reason}\n{breaks.WAYS_OUT}"
