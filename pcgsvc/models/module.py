"""`model=module`: a module of the user's own, `model.target`, made with `model.kwargs`.

In: a `Config`. Out: a `ModelBundle`. Knows nothing of tracing or graphs.

Example inputs come from `model.inputs` (see `described`), or from a method of the module,
`example_inputs(rows, generator)`, that returns them as a tuple or by name: it is called with two
row counts, and the dimensions that differ are the rows'. A module that calls `pcgsvc::attention`
says what its layers need in `attention_spec`, an `AttentionSpec` or a method that returns one.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pcgsvc.config import Config, ModelConfig
from pcgsvc.config.devices import module_dtype
from pcgsvc.errors import ConfigError
from pcgsvc.forward.arguments import read_arguments
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.forward.plain import place_of, words_of
from pcgsvc.models.described import Described, read_inputs
from pcgsvc.models.files import require
from pcgsvc.models.targets import load_target
from pcgsvc.ops.attention import AttentionSpec

_DESCRIBED = (
    "The inputs were drawn as model.inputs describes: where they are what is wrong, describe there "
    "what the model takes (shape, dtype, fill, low and high, kind)."
)
_TWO_SIZES = (3, 5)
"""Row counts that `example_inputs` is asked for, to see which dimensions follow them."""


def validate(config: Config) -> None:
    """Import the target and check its arguments and the described inputs; makes nothing.

    Raises:
        ConfigError: naming the setting.
    """
    model = config.model
    for name, tree in (("kwargs", model.kwargs), ("inputs", model.inputs)):
        try:
            json.dumps(tree, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"model.{name}: got {tree}, which holds more than finite numbers, text, true, "
                f"false, null, lists and mappings ({error}). In Python, make the module yourself "
                "and call pcgsvc.build_runner."
            ) from error
    target = _target(model)
    if not isinstance(target, type):
        forward = None
    elif issubclass(target, torch.nn.Module):
        forward = target.forward
    else:
        raise ConfigError(
            f"model.target: {model.target} is a class that is no torch.nn.Module; a class of "
            "modules, or a function that returns one, is needed."
        )
    try:
        inspect.signature(target).bind(**model.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"model.kwargs: got {model.kwargs}, which {model.target}{inspect.signature(target)} "
            f"does not take: {error}."
        ) from error
    except ValueError:  # a callable without a signature
        pass
    if model.weights is not None and not Path(model.weights).is_file():
        raise ConfigError(f"model.weights: there is no file '{model.weights}'.")
    if model.inputs:
        tensors, constants = read_inputs(model.inputs)
        if forward is not None:
            _check_names(forward, [*tensors, *constants])
    elif forward is not None and not hasattr(target, "example_inputs"):
        raise ConfigError(_no_inputs(model))


def build(config: Config, device: torch.device, dtype: torch.dtype | None) -> ModelBundle:
    """Make the module on `device`, and a source of its inputs.

    `dtype`: what the module, and inputs of floats, are cast to; None: they are as they are made.

    Raises:
        ConfigError: the target fails, or its inputs do not fit it.
    """
    model = config.model
    module = _make(model, config.seed)
    if model.weights is not None:
        _load(module, model.weights)
    module = module.eval().requires_grad_(False)
    try:
        module.to(device=device, dtype=dtype)
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"model.target: cannot be moved to {device}: {error}") from error
    floats = dtype or module_dtype(module) or torch.get_default_dtype()
    example: Callable[[int, torch.Generator], Any]
    if model.inputs:
        tensors, constants = read_inputs(model.inputs)
        _check_names(module.forward, [*tensors, *constants])
        example = _from_description(tensors, constants, floats)
        source = _DESCRIBED
    else:
        example = _from_method(module, model)
        source = "The inputs are those of its own example_inputs."
    return _bundle(module, example, device, dtype, source)


def _bundle(
    module: torch.nn.Module,
    example: Callable[[int, torch.Generator], Any],
    device: torch.device,
    cast: torch.dtype | None,
    source: str,
) -> ModelBundle:
    generator = torch.Generator().manual_seed(0)
    first, second = (read_arguments(module, example(n, generator)) for n in _TWO_SIZES)
    arguments, tensors = first
    others = second[1]
    changed = [
        name
        for name, value in second[0].constants.items()
        if name not in arguments.constants or not arguments.constants.is_same(name, value)
    ]
    if changed or list(tensors) != list(others):
        raise ConfigError(
            f"example_inputs: {changed or sorted(set(tensors) ^ set(others))} differ between "
            f"{_TWO_SIZES[0]} and {_TWO_SIZES[1]} rows; only tensors may."
        )
    dims = {name: _row_dims(name, tensors[name], others[name]) for name in tensors}
    if not any(dims.values()):
        raise ConfigError(
            "example_inputs: no dimension of any input follows the number of rows, so there is no "
            "size to capture for."
        )

    def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        _, made = read_arguments(module, example(rows, generator))
        return {
            name: t.to(device, cast if t.is_floating_point() else None) for name, t in made.items()
        }

    return ModelBundle(
        module=module,
        make_inputs=make,
        dynamic_dims=dims,
        samples_from=source,
        arguments=arguments,
        attention=_attention(module),
    )


def _row_dims(name: str, one: torch.Tensor, other: torch.Tensor) -> list[int]:
    dims = []
    if one.dim() != other.dim() or one.dtype != other.dtype:
        raise ConfigError(f"example_inputs: {name!r} differs in kind between two row counts.")
    for dim, sizes in enumerate(zip(one.shape, other.shape, strict=True)):
        if sizes[0] == sizes[1]:
            continue
        if sizes != _TWO_SIZES:
            raise ConfigError(
                f"example_inputs: dimension {dim} of {name!r} is {sizes[0]} for {_TWO_SIZES[0]} "
                f"rows and {sizes[1]} for {_TWO_SIZES[1]}; it must be the number of rows, or fixed."
            )
        dims.append(dim)
    return dims


# ---- the module ----------------------------------------------------------------------------------


def _target(model: ModelConfig) -> Callable[..., Any]:
    if model.target is None:
        raise ConfigError(
            "model.target: got null; model=module needs the class of your module, such as "
            "model.target=my_pkg.my_mod:MyModel."
        )
    return load_target(model.target)


def _make(model: ModelConfig, seed: int) -> torch.nn.Module:
    """Call the target; random weights come from `seed`, the process's generator is left alone."""
    target = _target(model)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            module = target(**model.kwargs)
        except Exception as error:
            raise ConfigError(
                f"model.target: {model.target} failed{place_of(error)}: {words_of(error)}"
            ) from error
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"model.target: {model.target} gave a {type(module).__name__}; a torch.nn.Module is "
            "needed. A function can be run by pcgsvc.build_runner."
        )
    return module


def _load(module: torch.nn.Module, path: str) -> None:
    """Load a state dict: .safetensors, or what torch.save wrote (read without running code)."""
    try:
        if path.endswith(".safetensors"):
            state = require("safetensors.torch", "smollm2").load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(state)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model.weights: '{path}' cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _attention(module: torch.nn.Module) -> AttentionSpec | None:
    spec = getattr(module, "attention_spec", None)
    spec = spec() if callable(spec) else spec
    if spec is not None and not isinstance(spec, AttentionSpec):
        raise ConfigError(
            f"model.target: attention_spec is a {type(spec).__name__}; a pcgsvc.AttentionSpec is "
            "needed."
        )
    return spec


# ---- its inputs ----------------------------------------------------------------------------------


def _check_names(forward: Callable[..., Any], names: list[str]) -> None:
    parameters = [p for p in inspect.signature(forward).parameters if p != "self"]
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ConfigError(
            f"model.inputs: got {unknown}, which the forward does not take. It takes: "
            f"{', '.join(parameters)}."
        )


def _from_description(
    tensors: Mapping[str, Described], constants: Mapping[str, Any], dtype: torch.dtype
) -> Callable[[int, torch.Generator], dict[str, Any]]:
    def example(rows: int, generator: torch.Generator) -> dict[str, Any]:
        made = {name: t.make(rows, dtype, generator) for name, t in tensors.items()}
        return {**made, **constants}

    return example


def _from_method(
    module: torch.nn.Module, model: ModelConfig
) -> Callable[[int, torch.Generator], Any]:
    method = getattr(module, "example_inputs", None)
    if not callable(method):
        raise ConfigError(_no_inputs(model))
    takes = len(inspect.signature(method).parameters)

    def example(rows: int, generator: torch.Generator) -> Any:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                return method(rows, generator) if takes > 1 else method(rows)
            except Exception as error:
                raise ConfigError(
                    f"example_inputs of {model.target} failed{place_of(error)}: {words_of(error)}"
                ) from error

    return example


def _no_inputs(model: ModelConfig) -> str:
    return (
        f"model.inputs: got nothing, and {model.target} has no method example_inputs(rows, "
        "generator). Describe the inputs, such as model.inputs='{x: [tokens, 32]}', or give the "
        "class that method."
    )
