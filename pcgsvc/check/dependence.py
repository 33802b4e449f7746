"""What of its inputs besides their values a forward's results depend on.

In: a call of the module and inputs. Out: `LAYOUT`, `IDENTITY`, both or neither. A trace takes both
as its examples had them, and nothing that it records tells whether the forward asked. Not tried:
inputs that share a part of their memory, and layouts beyond those of `_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from pcgsvc.forward.specs import holds_nan
from pcgsvc.program.model import IDENTITY, LAYOUT

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
