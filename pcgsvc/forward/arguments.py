"""What callers pass as examples -> the runner's inputs and fixed arguments.

In: a module and example arguments. Out: `Arguments`, `InputSpec`s, and a source of like inputs.
Knows nothing of tracing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc.errors import BatchError, ConfigError
from pcgsvc.forward.constants import Constants
from pcgsvc.forward.specs import InputSpec

DynamicDims = Mapping[str, int | Sequence[int]]
MakeInputs = Callable[[int, torch.Generator], dict[str, torch.Tensor]]
"""`make_inputs(rows, generator)`: fresh valid tensor inputs by name."""


@dataclass(kw_only=True)
class Arguments:
    """The arguments of a forward: which are inputs, and what the others are fixed at."""

    inputs: Sequence[str]
    """Tensor arguments, in the forward's order."""
    order: Sequence[str]
    """All arguments that may be passed by position, in the forward's order."""
    constants: Constants = field(default_factory=lambda: Constants({}))
    """Arguments that were given as examples and are no tensors; frozen into the graph."""
    defaults: Constants = field(default_factory=lambda: Constants({}))
    """Defaults of arguments that were not given."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's inputs by name.

        Positional arguments are the inputs in order, or, where one of them is no tensor, the
        forward's arguments in order. Fixed ones may be left out; one that was fixed at None may be
        meant by a tensor in its place, so that inputs behind it go by name.

        Raises:
            BatchError: naming the argument that is missing, unknown, given twice, or no longer what
                it was fixed at.
        """
        tensors = all(isinstance(a, torch.Tensor) for a in args)
        order = self.inputs if tensors and len(args) <= len(self.inputs) else self.order
        if len(args) > len(order):
            raise BatchError(f"inputs: got {len(args)} by position; {self._needed()}.")
        if order is self.inputs and (passed_over := self._optional_before(len(args))):
            raise BatchError(
                f"inputs: got {len(args)} tensors by position, and the forward has "
                f"{passed_over}, which was None when built, before the last of them; pass "
                f"{list(self.inputs[: len(args)])} by name."
            )
        given: dict[str, Any] = dict(zip(order, args, strict=False))
        for name in kwargs:
            if name in given:
                raise BatchError(f"{name}: given by position and by name; {self._needed()}.")
        given.update(kwargs)
        for name, value in given.items():
            if name not in self.inputs:
                self._check_fixed(name, value)
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise BatchError(f"inputs: {missing} are missing; {self._needed()}.")
        return {name: given[name] for name in self.inputs}

    def _optional_before(self, count: int) -> str | None:
        """Return an argument fixed at None that the forward has before its `count`th input."""
        names = iter(self.order)
        for wanted in self.inputs[:count]:
            for name in names:
                if name == wanted:
                    break
                fixed = self._fixed_with(name)
                if name in fixed and fixed[name] is None:
                    return name
        return None

    @property
    def by_position(self) -> bool:
        """Whether a call may pass all inputs, and them alone, by position."""
        return self._optional_before(len(self.inputs)) is None

    def _fixed_with(self, name: str) -> Constants:
        return self.constants if name in self.constants else self.defaults

    def _check_fixed(self, name: str, value: Any) -> None:
        fixed = self._fixed_with(name)
        if name not in fixed:
            raise BatchError(f"{name}: the forward has no such argument; {self._needed()}.")
        if not fixed.is_same(name, value):
            got = _words(value)
            raise BatchError(
                f"{name}: got {got}, but the runner was built with {_words(fixed[name])} (as it "
                f"was then); {self._needed()}. Leave {name} out, or build another runner with "
                f"{name} among the example inputs."
            )

    def _needed(self) -> str:
        fixed = {**self.defaults, **self.constants}
        words = ", ".join(f"{name}={_words(value)}" for name, value in fixed.items())
        return f"needed are {list(self.inputs)}" + (
            f", with {words} fixed when built" * bool(fixed)
        )


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_arguments(
    module: Callable[..., Any], example_inputs: Any
) -> tuple[Arguments, dict[str, torch.Tensor]]:
    """Split example arguments into tensors by name, and fixed ones.

    Raises:
        ConfigError: they do not fit the forward, or are of a kind that a runner cannot pass.
    """
    function = module.forward if isinstance(module, torch.nn.Module) else module
    try:
        signature = inspect.signature(function)
        if isinstance(example_inputs, Mapping):
            bound = signature.bind(**example_inputs)
        else:
            many = isinstance(example_inputs, (tuple, list))
            bound = signature.bind(*(example_inputs if many else (example_inputs,)))
    except (TypeError, ValueError) as error:
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
    for name, value in bound.arguments.items():
        _check_example(name, value)
    named = [
        p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    arguments = Arguments(
        inputs=list(tensors),
        order=[p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD],
        constants=Constants({k: v for k, v in bound.arguments.items() if k not in tensors}),
        defaults=Constants({p.name: p.default for p in named if p.name not in bound.arguments}),
    )
    return arguments, tensors


def _check_example(name: str, value: Any) -> None:
    """Refuse what a call of the runner could not pass."""
    if name == "batch":
        raise ConfigError(
            "example_inputs: 'batch' is the runner's own argument, a pcgsvc.Batch, so a call could "
            "not pass the forward's by name. Wrap the model in a function that names it otherwise."
        )
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise ConfigError(
                f"example_inputs: {name!r} is a {type(value).__name__}; a plain torch.Tensor is "
                "needed."
            )
        if value.layout is not torch.strided or value.device.type == "meta":
            where = "on the meta device" if value.device.type == "meta" else f"{value.layout}"
            raise ConfigError(
                f"example_inputs: {name!r} is {where}; a dense tensor with memory is needed."
            )
    elif any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(value)):
        raise ConfigError(
            f"example_inputs: {name!r} holds tensors inside containers; pass them as arguments of "
            "their own. Wrap the model in a function that puts them together."
        )


def input_specs(tensors: Mapping[str, torch.Tensor], dynamic_dims: DynamicDims) -> list[InputSpec]:
    """Return the specs of tensor arguments; ConfigError if `dynamic_dims` does not fit them."""
    unknown = sorted(set(dynamic_dims) - set(tensors))
    if unknown or not tensors:
        raise ConfigError(
            f"dynamic_dims: got {unknown or dict(dynamic_dims)}; tensor inputs are {list(tensors)}."
        )
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        raise ConfigError(f"example_inputs: on several devices: {sorted(map(str, devices))}.")
    specs = [
        InputSpec(name=name, example=tensor.detach(), dims=_dims(name, tensor, dynamic_dims))
        for name, tensor in tensors.items()
    ]
    sizes = {
        f"dimension {dim} of {s.name!r}": s.example.shape[dim] for s in specs for dim in s.dims
    }
    if len(set(sizes.values())) > 1:
        words = ", ".join(f"{place} is {size}" for place, size in sizes.items())
        raise ConfigError(
            f"dynamic_dims: {words}; all of them are one number, the rows of a call, so the "
            "examples must agree. Independent dynamic dimensions are not supported: build one "
            "runner for each value of the other one, or fold both into the rows."
        )
    return specs


def _dims(name: str, tensor: torch.Tensor, dynamic_dims: DynamicDims) -> tuple[int, ...]:
    """Return the row dimensions of one input, counted from the front."""
    given = dynamic_dims.get(name, ())
    dims = [given] if isinstance(given, int) else given
    if isinstance(dims, (str, Mapping)) or not isinstance(dims, Sequence):
        raise ConfigError(
            f"dynamic_dims: got {given!r} for {name!r}; the number of a dimension, or a list of "
            "them, is needed. All of them are the rows of a call; dimensions that change "
            "independently of those are not supported."
        )
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ConfigError(f"dynamic_dims: got {dim!r} for {name!r}, a whole number is needed.")
        if not -tensor.dim() <= dim < tensor.dim():
            raise ConfigError(f"dynamic_dims: {name!r} has {tensor.dim()} dimensions, got {dim}.")
    found = sorted(dim % tensor.dim() for dim in dims)
    if len(set(found)) < len(found):
        raise ConfigError(f"dynamic_dims: got {given!r} for {name!r}; a dimension stands twice.")
    return tuple(found)


def check_module(module: Callable[..., Any], device: torch.device) -> None:
    """Refuse a module whose state no graph on `device` could read.

    Raises:
        ConfigError: it or a submodule is in training mode, or a parameter or buffer lies elsewhere.
    """
    if not isinstance(module, torch.nn.Module):
        return
    if module.training:
        raise ConfigError("module: it is in training mode; call module.eval() first.")
    training = [name for name, sub in module.named_modules() if sub.training]
    if training:
        more = " …" if len(training) > 4 else ""
        raise ConfigError(
            f"module: {', '.join(map(repr, training[:4]))}{more} in it are in training mode, "
            "though the module itself is not; call .eval() on the model."
        )
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(f"module: {name!r} has no shape yet; call the module once first.")
        if tensor.device != device:
            raise ConfigError(
                f"module: {name!r} is on {tensor.device}, the inputs are on {device}; move the "
                f"module there with module.to({str(device)!r})."
            )


def checked(make_inputs: MakeInputs, specs: Sequence[InputSpec]) -> MakeInputs:
    """Return a caller's source of inputs, with what it gives compared with the specs.

    Raises:
        ConfigError: when called, naming the input that is missing or of another kind.
    """

    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = make_inputs(rows, generator)
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"make_inputs: got a {type(made).__name__}; a dict of tensors by name is needed."
            )
        found = {}
        for spec in specs:
            value, shape = made.get(spec.name), spec.shape(rows)
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"make_inputs: {spec.name!r} is {value!r}, no tensor.")
            if list(value.shape) != shape or value.dtype != spec.example.dtype:
                raise ConfigError(
                    f"make_inputs: {spec.name!r} for {rows} rows is {value.dtype} of shape "
                    f"{list(value.shape)}; {spec.example.dtype} of shape {shape} is needed."
                )
            found[spec.name] = value
        return found

    return make


def resampler(specs: Sequence[InputSpec]) -> MakeInputs:
    """Return a source of inputs like the examples: normal floats, integers drawn from theirs.

    Raises:
        ConfigError: an example of integers is empty, so that there is nothing to draw from.
    """
    for spec in specs:
        if not spec.example.numel() and not spec.example.dtype.is_floating_point:
            raise ConfigError(
                f"example_inputs: {spec.name!r} is empty, and inputs that verify the runner are "
                "drawn from it; give an example with valid values."
            )

    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = {}
        for spec in specs:
            shape = spec.shape(rows)
            if spec.example.is_floating_point():
                made[spec.name] = torch.randn(shape, generator=generator).to(spec.example.dtype)
            else:
                values = spec.example.flatten().cpu()
                count = torch.Size(shape).numel()
                pick = torch.randint(len(values), (count,), generator=generator)
                made[spec.name] = values[pick].view(shape)
        return made

    return make
