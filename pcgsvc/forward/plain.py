"""The forward run plainly: whether it works, and which dimensions carry its rows.

In: a module and inputs. Out: its result, or its own exception with the line that it came from. The
module's state is put back. Knows nothing of tracing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.errors import ConfigError, ForwardError, TraceError
from pcgsvc.forward.batch import StepBuffers, check_batch
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.process import build_modes
from pcgsvc.forward.results import flatten, kind_of
from pcgsvc.forward.state import state_kept
from pcgsvc.ops.context import use_context

_UNTOLD = "not given, and cannot be told from the examples: "
_OWN_FOLDER = str(Path(__file__).parents[1])


def run_plainly(
    module: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    rows: int,
) -> Any:
    """Call the forward once, on copies of the inputs; return its result.

    Args:
        module: what is called; its state is as before when this returns.
        inputs: tensors by name, on one device.
        constants: its other arguments.
        rows: of the inputs, for ops that read the step's metadata.

    Raises:
        ForwardError: the forward raised; `__cause__` is its exception.
        TraceError: it returns a tensor that is not dense.
    """
    try:
        return _run_plainly(module, inputs, constants, rows)
    except ForwardError as error:
        if not torch_private.is_compile_error(error.__cause__):
            raise
    # That run imported Dynamo; where it is there, the modes have nothing compiled under them.
    return _run_plainly(module, inputs, constants, rows)


def _run_plainly(
    module: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    rows: int,
) -> Any:
    device = next(iter(inputs.values())).device
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    with torch_private.real_tensors():  # metadata is filled through numpy
        step = StepBuffers(max_tokens=rows, max_reqs=1, blocks_per_request=0, device=device)
        batch = check_batch(None, rows, None)
        step.fill(batch, rows)
    context = use_context(step.context(batch, rows, None))
    with build_modes(device), state_kept(module, device), context:
        try:
            result = module(**copies, **constants)
        except Exception as error:
            shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in inputs.items())
            raise ForwardError(
                f"the forward fails by itself, called plainly with {shapes}: "
                f"{words_of(error)}{place_of(error)}.{_made_in_inference_mode(module, error)}"
            ) from error
    for at, leaf in enumerate(flatten(result)[0]):
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else str(leaf.layout)
            raise TraceError(
                f"result leaf {at}: got a {kind} tensor; a runner's results are dense. Return "
                "what it is made of: .to_dense(), or .values() and its indices or offsets."
            )
    return result


# ---- dynamic dimensions that were not named ------------------------------------------------------


def _made_in_inference_mode(module: Callable[..., Any], error: Exception) -> str:
    """Say what to do where a forward writes to a tensor of inference mode, outside of that."""
    frozen = [name for name, tensor in tensors_of(module).items() if tensor.is_inference()]
    if not frozen or "inference tensor" not in str(error):
        return ""
    return (
        f" {frozen} were made under torch.inference_mode(), and a runner works outside of it: make "
        "them outside, or clone them."
    )


def infer_dynamic_dims(
    module: Callable[..., Any], tensors: Mapping[str, torch.Tensor], constants: Mapping[str, Any]
) -> dict[str, int]:
    """Return dimension 0 of every tensor that is as long there as the first one.

    That is proved by two calls: with the examples, and with another number of their rows. The
    results must differ by that number and in nothing else.

    Raises:
        ConfigError: it cannot be proved; the message lists the dimensions that there are.
        ForwardError: the forward fails with the examples themselves.
    """
    first = next(iter(tensors.values()))
    if not first.dim() or not len(first):
        raise no_rows(f"{_UNTOLD}the first tensor has no rows in dimension 0", tensors)
    rows = len(first)
    dims = {name: 0 for name, t in tensors.items() if t.dim() and len(t) == rows}
    other = rows - 1 if rows > 2 else rows + 1
    take = torch.arange(other, device=first.device) % rows
    fewer = {name: t[take] if name in dims else t for name, t in tensors.items()}
    result = run_plainly(module, tensors, constants, rows)
    guess = f"dimension 0 of {', '.join(dims)} was tried with {other} rows in place of {rows}"
    try:
        twin = run_plainly(module, fewer, constants, other)
    except ForwardError as error:
        raise no_rows(f"{_UNTOLD}{guess}, and {error}", tensors) from error.__cause__
    if fault := _unlike(result, twin, (rows, other)):
        raise no_rows(f"{_UNTOLD}{guess}, and {fault}", tensors)
    return dims


def _unlike(result: Any, twin: Any, rows: tuple[int, int]) -> str:
    """Say in what two results differ besides their rows; nothing if they do not."""
    (leaves, tree), (twins, other_tree) = flatten(result), flatten(twin)
    if tree != other_tree or len(leaves) != len(twins):
        return "the results are nested in two ways"
    both = list(zip(leaves, twins, strict=True))
    for at, (a, b) in enumerate(both):
        if isinstance(a, torch.Tensor) is not isinstance(b, torch.Tensor):
            return f"result leaf {at} is {kind_of(a, 'a tensor')} and {kind_of(b, 'a tensor')}"
    pairs = [(a, b) for a, b in both if isinstance(a, torch.Tensor)]
    shapes = [(list(a.shape), list(b.shape)) for a, b in pairs]
    sizes = [p for a, b in shapes for p in zip(a, b, strict=False) if p[0] != p[1]]
    if any(len(a) != len(b) for a, b in shapes) or any(pair != rows for pair in sizes) or not sizes:
        return f"the results have the shapes {[a for a, _ in shapes]} and {[b for _, b in shapes]}"
    return ""


def no_rows(reason: str, tensors: Mapping[str, torch.Tensor]) -> ConfigError:
    """Return the error for dynamic dimensions that are missing, with those that there are."""
    candidates = [
        f"{name!r}: {dim} (of length {size})"
        for name, t in tensors.items()
        for dim, size in enumerate(t.shape)
    ]
    return ConfigError(
        f"dynamic_dims: {reason.rstrip('.')}. Candidates: {', '.join(candidates) or 'none'}. Name "
        f"the dimensions that carry the rows, such as dynamic_dims={{{next(iter(tensors))!r}: 0}}."
    )


# ---- where an exception came from ----------------------------------------------------------------


def words_of(error: BaseException) -> str:
    """Return an error's type and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def place_of(error: BaseException) -> str:
    """Return ` at file:line` of the innermost line of the user's that an error came from."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    line = line_of(traceback.extract_tb(error.__traceback__))
    return f" at {line}" if line else ""


def line_of(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return `file:line in function` of the innermost frame of the user's; nothing if none is."""
    for frame in reversed(list(frames)):
        path = frame.filename
        if not torch_private.is_torch_file(path) and not path.startswith((_OWN_FOLDER, "<")):
            return f"{path}:{frame.lineno} in {frame.name}"
    return ""
