"""What callers pass as examples -> the runner's inputs and constants.

In: a module and example arguments. Out: `InputSpec`s, constants, and a source of like inputs. Knows
nothing of tracing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc.errors import ConfigError
from pcgsvc.models.base import ModelBundle
from pcgsvc.traced import InputSpec


def split_arguments(
    module: Callable[..., Any], example_inputs: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split arguments by name into tensors and constants."""
    function = module.forward if isinstance(module, torch.nn.Module) else module
    try:
        signature = inspect.signature(function)
        if isinstance(example_inputs, Mapping):
            bound = signature.bind(**example_inputs)
        else:
            many = isinstance(example_inputs, (tuple, list))
            bound = signature.bind(*(example_inputs if many else (example_inputs,)))
    except TypeError as error:
        raise ConfigError(f"example_inputs: do not fit the forward: {error}") from None
    for name, parameter in signature.parameters.items():
        if name in bound.arguments and parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise ConfigError(
                f"example_inputs: {name!r} is taken by position or by star; a runner calls the "
                "forward by name. Wrap the model in a function of named arguments."
            )
    tensors = {k: v for k, v in bound.arguments.items() if isinstance(v, torch.Tensor)}
    constants = {k: v for k, v in bound.arguments.items() if k not in tensors}
    nested = [
        k
        for k, v in constants.items()
        if any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(v))
    ]
    if nested:
        raise ConfigError(
            f"example_inputs: {nested} hold tensors inside containers; pass them as arguments."
        )
    return tensors, constants


def input_specs(
    tensors: Mapping[str, torch.Tensor], dynamic_dims: Mapping[str, int]
) -> list[InputSpec]:
    """Return the specs of tensor arguments; ConfigError if `dynamic_dims` does not fit them."""
    unknown = sorted(set(dynamic_dims) - set(tensors))
    if unknown or not tensors:
        raise ConfigError(
            f"dynamic_dims: got {unknown or dict(dynamic_dims)}; tensor inputs are {list(tensors)}."
        )
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        raise ConfigError(f"example_inputs: on several devices: {sorted(map(str, devices))}.")
    specs = []
    for name, tensor in tensors.items():
        dim = dynamic_dims.get(name)
        if dim is not None and not -tensor.dim() <= dim < tensor.dim():
            raise ConfigError(f"dynamic_dims: {name!r} has {tensor.dim()} dimensions, got {dim}.")
        place = None if dim is None else dim % tensor.dim()
        specs.append(InputSpec(name=name, example=tensor.detach(), dim=place))
    return specs


def bundle_specs(bundle: ModelBundle) -> list[InputSpec]:
    """Return the specs of a bundled model's inputs."""
    example = bundle.make_inputs(2, torch.Generator().manual_seed(0))
    return [
        InputSpec(name=name, example=tensor, dim=bundle.dynamic_dims.get(name))
        for name, tensor in example.items()
    ]


def resampler(
    specs: list[InputSpec],
) -> Callable[[int, torch.Generator], dict[str, torch.Tensor]]:
    """Return a source of inputs like the examples: normal floats, integers drawn from theirs."""

    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = {}
        for spec in specs:
            shape = list(spec.example.shape)
            if spec.dim is not None:
                shape[spec.dim] = rows
            if spec.example.is_floating_point():
                made[spec.name] = torch.randn(shape, generator=generator).to(spec.example.dtype)
            else:
                values = spec.example.flatten().cpu()
                count = torch.Size(shape).numel()
                pick = torch.randint(len(values), (count,), generator=generator)
                made[spec.name] = values[pick].view(shape)
        return made

    return make
