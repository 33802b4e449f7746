"""What of its inputs besides their values a forward's results depend on.

In: a call of the module and inputs. Out: `LAYOUT`, `IDENTITY`, both or neither. A trace takes both
as its examples had them, and nothing that it records tells whether the forward asked. Not tried:
inputs that share a part of their memory, and layouts beyond those of `_layouts`. Of a program also
whether it computes with its row count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from pcgsvc.forward.specs import holds_nan
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.model import IDENTITY, LAYOUT, CompiledModel
from pcgsvc.trace.rows import Row, refs

Inputs = Mapping[str, torch.Tensor]
Results = Sequence[torch.Tensor]


def input_dependence(
    run: Callable[[Inputs], Results], inputs: Inputs, differ: Callable[[Results, Results], bool]
) -> frozenset[str]:
    """Run the module on inputs of other layouts, and on one tensor for several inputs.

    Args:
        run: calls the module; its state is put back.
        inputs: valid ones, laid out as the example inputs.
        differ: whether two results are not of the same computation.
    """
    found = set()
    wanted = run(inputs)
    if any(_changed(run, other, wanted, differ) for other in _other_layouts(inputs)):
        found.add(LAYOUT)
    shared = _shared(inputs)
    if len({id(tensor) for tensor in shared.values()}) < len(shared):
        apart = run({name: tensor.clone() for name, tensor in shared.items()})
        if _changed(run, shared, apart, differ):
            found.add(IDENTITY)
    return frozenset(found)


def _changed(
    run: Callable[[Inputs], Results],
    inputs: Inputs,
    wanted: Results,
    differ: Callable[[Results, Results], bool],
) -> bool:
    try:
        return differ(run(inputs), wanted)
    except RuntimeError:  # an op refuses the layout, such as `view`: a copy in another is right
        return False
    except Exception:  # noqa: BLE001 - the forward refuses it, or its result is another structure
        return True


def _other_layouts(inputs: Inputs) -> Iterator[Inputs]:
    """Yield the inputs in each layout that is another for at least one of them."""
    for layout in _LAYOUTS:
        others = {name: layout(tensor) for name, tensor in inputs.items()}
        if any(_strides(others[name]) != _strides(inputs[name]) for name in inputs):
            yield others


def _strides(tensor: torch.Tensor) -> list[int]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    dims = list(range(tensor.dim()))[::-1]
    return tensor.permute(dims).contiguous().permute(dims)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    kind = formats.get(tensor.dim())
    return tensor if kind is None else tensor.contiguous(memory_format=kind)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


_LAYOUTS = (torch.Tensor.contiguous, _reversed, _channels_last, _with_gaps)


def _shared(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return one tensor for all inputs of one kind; of integers zeros, with which calls pad."""
    first: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
    for tensor in inputs.values():
        like = tensor if holds_nan(tensor.dtype) else torch.zeros_like(tensor)
        first.setdefault((tensor.shape, tensor.dtype), like)
    return {name: first[tensor.shape, tensor.dtype] for name, tensor in inputs.items()}


# ---- the row count -------------------------------------------------------------------------------

_NAMES = "view reshape expand repeat tile narrow select chunk split unfold unflatten arange empty"
_SHAPES = {*_NAMES.split(), "new_empty", "new_zeros", "new_ones", "zeros", "ones"}
"""Ops whose numbers are shapes, by the last part of their name."""


_MORE, _MORE_UNTRACED = 8, 4


def more_row_counts(model: CompiledModel) -> int:
    """Return at how many row counts more an entry is tried, besides two.

    All that an entry of up to nine rows serves, where the program computes with its row count; some
    where nothing is known, since the forward was not traced.
    """
    if model.untraced is not None:
        return _MORE_UNTRACED
    return _MORE if computes_with_row_count(model.image) else 0


def computes_with_row_count(image: ProgramImage) -> bool:
    """Whether an op takes the row count, or what was computed of it, for more than a shape.

    A padded call gives it another number than the module would. That is right where it is a bound
    (the longest length), and may otherwise be wrong for some row counts only.
    """
    sizes = {at for at, binding in enumerate(image.spec.bindings) if binding.kind == "size"}
    for step in image.spec.steps:
        document = image.documents.get(step.piece or "")
        if document is None:
            if _computes(((call.out, call.row) for call in step.calls), sizes):
                return True
            continue
        inside = {at for at, spec in enumerate(document["inputs"]) if spec[0] == "int"}
        if _computes(enumerate(document["rows"], len(document["inputs"])), inside):
            return True
        results = zip(step.outputs, document["outputs"], strict=True)
        sizes |= {number for number, at in results if at in inside}
    return False


def _computes(rows: Iterable[tuple[int, Row]], sizes: set[int]) -> bool:
    """Whether one of some rows does; adds what they compute of sizes alone to `sizes`."""
    for number, (op, target, args, kwargs) in rows:
        used = refs(args) | refs(kwargs)
        of_sizes = used <= sizes and target.startswith(("operator.", "math.", "builtins."))
        if of_sizes or (op, target) == ("call_method", "size"):
            sizes.add(number)
            continue
        given = [*args[1], *(value for _, value in kwargs[1])]
        taken = any(item[0] == "v" and item[1] in sizes for item in given)
        name = target.removeprefix("torch.ops.aten.").partition(".")[0]
        if name == "torch":
            name = target.rpartition(".")[2]
        if taken and name not in _SHAPES and not target.startswith("torch.ops.pcgsvc."):
            return True
    return False
