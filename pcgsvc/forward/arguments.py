"""Example arguments -> a runner's tensor inputs and its constants.

In: a module and example arguments. Out: `Arguments`, `InputSpec`s, and a source of like inputs.
Non-tensor values are constants. Knows nothing of tracing.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc.errors import BatchError, ConfigError
from pcgsvc.forward.constants import Constants
from pcgsvc.forward.plain import place_of, words_of
from pcgsvc.forward.specs import InputSpec, comparable, holds_nan

DynamicDims = Mapping[str, int | Sequence[int]]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
MakeInputs = Callable[[int, torch.Generator], dict[str, torch.Tensor]]
"""`make_inputs(rows, generator)`: fresh valid tensor inputs by name."""


@dataclass(kw_only=True)
class Arguments:
    """The arguments of a forward: tensor inputs by name, and constants."""

    inputs: Sequence[str]
    """Tensor arguments, in the forward's order."""
    order: Sequence[str]
    """All arguments that may be passed by position, in the forward's order."""
    constants: Constants = field(default_factory=lambda: Constants({}))
    """Non-tensor arguments among the examples; frozen into the graph."""
    defaults: Constants = field(default_factory=lambda: Constants({}))
    """Defaults of arguments that were not given."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's inputs by name.

        Positional arguments are the inputs in order, or, if one of them is no tensor, the forward's
        arguments in order. Constants may be left out; a tensor in the place of one that was None
        may be meant for it, so that inputs behind it go by name.

        Raises:
            BatchError: naming the argument that is missing, unknown, given twice, or a constant
                with another value.
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
        for name in given.keys() & kwargs.keys():
            raise BatchError(f"{name}: given by position and by name; {self._needed()}.")
        given.update(kwargs)
        for name, value in given.items():
            if name not in self.inputs:
                self._check_constant(name, value)
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise BatchError(f"inputs: {missing} are missing; {self._needed()}.")
        return {name: given[name] for name in self.inputs}

    def _optional_before(self, count: int) -> str | None:
        """Return a constant None that the forward has before its `count`th input, if any."""
        if not count:
            return None
        last = self.inputs[count - 1]
        before = itertools.takewhile(lambda name: name != last, self.order)
        return next((name for name in before if self._constants.get(name, self) is None), None)

    @property
    def by_position(self) -> bool:
        """Whether a call may pass all inputs, and them alone, by position."""
        return self._optional_before(len(self.inputs)) is None

    @property
    def _constants(self) -> dict[str, Any]:
        return {**self.defaults, **self.constants}

    def _check_constant(self, name: str, value: Any) -> None:
        known = self.constants if name in self.constants else self.defaults
        if name not in known:
            raise BatchError(f"{name}: the forward has no such argument; {self._needed()}.")
        if not known.is_same(name, value):
            raise BatchError(
                f"{name}: got {_text(value)}, but the runner was built with {_text(known[name])} "
                f"(as it was then); {self._needed()}. Leave {name} out, or build another runner "
                f"with {name} among the example inputs."
            )

    def _needed(self) -> str:
        texts = ", ".join(f"{name}={_text(value)}" for name, value in self._constants.items())
        fixed = f", with {texts} fixed when built" if texts else ""
        return f"needed are {list(self.inputs)}{fixed}"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_arguments(
    module: Callable[..., Any], example_inputs: Any
) -> tuple[Arguments, dict[str, torch.Tensor]]:
    """Split example arguments into tensors by name and constants.

    Raises:
        ConfigError: they do not fit the forward, or are of a kind that a runner cannot pass.
    """
    if isinstance(module, type) or not callable(module):
        raise ConfigError(
            f"model: got {_text(module)}; a module (an instance, in eval mode) or a function is "
            "needed."
        )
    if not isinstance(example_inputs, (tuple, list, Mapping, torch.Tensor)):
        raise ConfigError(
            f"example_inputs: got {_text(example_inputs)}; a tuple of arguments with a tensor "
            "among them is needed, or a dict by argument name."
        )
    function = module.forward if isinstance(module, torch.nn.Module) else module
    try:
        signature = inspect.signature(function)
        if isinstance(example_inputs, Mapping):
            given = signature.bind(**example_inputs).arguments
        else:
            many = isinstance(example_inputs, (tuple, list))
            given = signature.bind(*(example_inputs if many else (example_inputs,))).arguments
    except (TypeError, ValueError) as error:
        hint = "" if isinstance(error, TypeError) else "; wrap it: lambda x: function(x)"
        raise ConfigError(f"example_inputs: do not fit the forward: {error}{hint}.") from None
    parameters = signature.parameters.values()
    for name in (p.name for p in parameters if p.kind not in _NAMED and p.name in given):
        raise ConfigError(
            f"example_inputs: {name!r} is taken by position or by star; a runner calls the "
            "forward by name. Wrap the model in a function of named arguments; in place of what "
            "torch.compile returned, pass what it was given."
        )
    if isinstance(module, torch.nn.Module) and "self" in given:
        raise ConfigError(
            "example_inputs: 'self' is an argument of nn.Module's own call, so the forward's could "
            "not be passed by name. Wrap the model in a function that names it otherwise."
        )
    for name, value in given.items():
        _check_example(name, value)
    tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
    defaults = {
        p.name: p.default
        for p in parameters
        if p.name not in given and p.kind in (*_NAMED, p.POSITIONAL_ONLY)
    }
    arguments = Arguments(
        inputs=list(tensors),
        order=[p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD],
        constants=Constants({k: v for k, v in given.items() if k not in tensors}),
        defaults=Constants(defaults),
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
        fault = ""
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            fault = f"a {type(value).__name__}; a plain torch.Tensor is needed"
        elif value.device.type == "meta":
            fault = "on the meta device; a dense tensor with memory is needed"
        elif value.layout is not torch.strided:
            fault = f"{value.layout}; a dense tensor with memory is needed"
        if fault:
            raise ConfigError(f"example_inputs: {name!r} is {fault}.")
    elif any(isinstance(t, torch.Tensor) for t in pytree.tree_leaves(value)):
        raise ConfigError(
            f"example_inputs: {name!r} holds tensors inside containers; pass them as arguments of "
            "their own. Wrap the model in a function that puts them together."
        )


def one_device(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device of all tensor arguments; ConfigError if there are several, or no tensor."""
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        raise ConfigError(f"example_inputs: on several devices: {sorted(map(str, devices))}.")
    if not devices:
        raise ConfigError("example_inputs: there is no tensor among them.")
    return devices.pop()


def input_specs(tensors: Mapping[str, torch.Tensor], dynamic_dims: DynamicDims) -> list[InputSpec]:
    """Return the specs of tensor arguments; ConfigError if `dynamic_dims` does not fit them."""
    if not isinstance(dynamic_dims, Mapping):
        raise ConfigError(
            f"dynamic_dims: got {dynamic_dims!r}; the row dimensions by argument name are needed, "
            "such as {'x': 0}."
        )
    unknown = sorted(set(dynamic_dims) - set(tensors))
    if unknown or not tensors:
        raise ConfigError(
            f"dynamic_dims: got {unknown or dict(dynamic_dims)}; tensor inputs are {list(tensors)}."
        )
    one_device(tensors)
    specs = [
        InputSpec(name=name, example=tensor.detach(), dims=_dims(name, tensor, dynamic_dims))
        for name, tensor in tensors.items()
    ]
    sizes = {(s.name, dim): s.example.shape[dim] for s in specs for dim in s.dims}
    if len(set(sizes.values())) > 1:
        texts = [f"dimension {dim} of {name!r} is {size}" for (name, dim), size in sizes.items()]
        raise ConfigError(
            f"dynamic_dims: {', '.join(texts)}; every dynamic dimension must have the same length "
            "in a call, its rows, so the examples must agree. Independent dynamic dimensions are "
            "not supported: build one runner per value of the other, or fold both into the rows."
        )
    return specs


def _dims(name: str, tensor: torch.Tensor, dynamic_dims: DynamicDims) -> tuple[int, ...]:
    """Return the row dimensions of one input, counted from the front."""
    given = dynamic_dims.get(name, ())
    dims = [given] if isinstance(given, int) else given
    if isinstance(dims, (str, Mapping)) or not isinstance(dims, Sequence):
        raise ConfigError(
            f"dynamic_dims: got {given!r} for {name!r}; the index of a dimension, or a list of "
            "them, is needed. Every dynamic dimension must have the same length in a call; "
            "independent ones are not supported."
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
        ConfigError: it or a submodule is in training mode, or a tensor of it is on another device.
    """
    if not isinstance(module, torch.nn.Module):
        return
    for name, sub in module.named_modules():
        if isinstance(sub, torch.jit.ScriptModule):
            raise ConfigError(
                f"module: {name or 'it'} is TorchScript, which has no Python that could be traced; "
                "pass the module that it was made of."
            )
    if module.training:
        raise ConfigError("module: it is in training mode; call module.eval() first.")
    training = [name for name, sub in module.named_modules() if sub.training]
    if training:
        more = " …" if len(training) > 4 else ""
        raise ConfigError(
            f"module: {', '.join(map(repr, training[:4]))}{more} in it are in training mode, "
            "though the module itself is not; call .eval() on the model."
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
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
        ConfigError: it is no function; when called, naming the input that is missing or of another
            kind.
    """
    if not callable(make_inputs):
        raise ConfigError(
            f"make_inputs: got {make_inputs!r}; a function make_inputs(rows, generator) that "
            "returns tensors by name is needed."
        )

    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        try:
            made = make_inputs(rows, generator)
        except Exception as error:
            raise ConfigError(
                f"make_inputs: failed for {rows} rows{place_of(error)}: {words_of(error)}"
            ) from error
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"make_inputs: got a {type(made).__name__}; a dict of tensors by name is needed."
            )
        found = {}
        for spec in specs:
            value, shape = made.get(spec.name), spec.shape(rows)
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"make_inputs: {spec.name!r} is {value!r}, no tensor.")
            if not spec.fits(value, rows):
                raise ConfigError(
                    f"make_inputs: {spec.name!r} for {rows} rows is {value.dtype} of shape "
                    f"{list(value.shape)}; {spec.example.dtype} of shape {shape} is needed."
                )
            found[spec.name] = value
        return found

    return make


def resampler(specs: Sequence[InputSpec]) -> MakeInputs:
    """Return a source of inputs like the examples: normal floats, integers drawn from theirs.

    Integers that ascend, such as offsets or sorted indices, still do, from the same first one.
    Those that may be indices of the examples' rows are so of fewer rows. Of masks whole rows are
    drawn.

    Raises:
        ConfigError: an example of integers is empty, so that there is nothing to draw from.
    """
    for spec in specs:
        if not spec.example.numel() and not holds_nan(spec.example.dtype):
            raise ConfigError(
                f"example_inputs: {spec.name!r} is empty, and inputs that verify the runner are "
                "drawn from it; give an example with valid values."
            )

    of_rows = next((s.example.shape[s.dims[0]] for s in specs if s.dims), 0)

    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = {}
        for spec in specs:
            shape = spec.shape(rows)
            if spec.example.dtype is torch.bool and spec.dims:
                made[spec.name] = _rows_of(spec, rows, generator)
            elif holds_nan(spec.example.dtype):
                drawn_as = torch.complex64 if spec.example.is_complex() else torch.float32
                drawn = torch.randn(shape, generator=generator, dtype=drawn_as)
                made[spec.name] = drawn.to(spec.example.dtype)
            else:
                values = _integers(spec.example, of_rows, rows)
                count = torch.Size(shape).numel()
                pick = torch.randint(len(values), (count,), generator=generator)
                drawn = values[pick]
                if _ascends(spec.example):
                    drawn = drawn.sort().values
                    drawn[:1] = values[0]
                made[spec.name] = drawn.view(shape)
        return made

    return make


def _integers(example: torch.Tensor, of_rows: int, rows: int) -> torch.Tensor:
    """Return the values to draw from: if all may be indices of rows, those that are of `rows`."""
    values = example.flatten().cpu()
    numbers = comparable(values)
    if rows < of_rows and bool(((numbers >= -of_rows) & (numbers < of_rows)).all()):
        fewer = values[(numbers >= -rows) & (numbers < rows)]
        return fewer if len(fewer) else values
    return values


def _rows_of(spec: InputSpec, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return rows of the example in its order, the same ones in each row dimension."""
    value = spec.example.cpu()
    pick = torch.randint(value.shape[spec.dims[0]], (rows,), generator=generator).sort().values
    for dim in spec.dims:
        value = value.index_select(dim, pick)
    return value


def _ascends(example: torch.Tensor) -> bool:
    if example.dim() != 1 or example.dtype is torch.bool:
        return False
    numbers = comparable(example)
    before, after = numbers[:-1], numbers[1:]
    return bool((after >= before).all() and (after > before).any())
