"""What is to be built: a config with its model, or a caller's own module.

In: a config, or a module with example arguments. Out: a `Request`, and the static memory that it
asks for. Knows nothing of tracing, compilers or graphs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pcgsvc.arguments import (
    Arguments,
    DynamicDims,
    MakeInputs,
    check_module,
    checked,
    input_specs,
    read_arguments,
    resampler,
)
from pcgsvc.config import Config, resolve, validate
from pcgsvc.devices import device_of, dtype_of, module_dtype
from pcgsvc.models.base import ModelBundle
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.backends import find_backend
from pcgsvc.process import BUILD_LOCK
from pcgsvc.progress import Progress, Silent
from pcgsvc.samples import Samples
from pcgsvc.sizing.auto import with_sizes
from pcgsvc.sizing.choice import SizePlan
from pcgsvc.traced import Binding, InputSpec
from pcgsvc.workspace import ShapeWorkspace, Workspace, cache_geometry, usable_sizes

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Planned:
    """What is special about a request of which nothing is built."""

    target: torch.device
    """The device that is planned for. Where this machine lacks it, `Request.device` is the CPU."""
    fake: contextlib.AbstractContextManager[Any]
    """A block in which tensors have no memory; does nothing if the model needs real ones."""
    notes: list[str]
    """What a reader of the plan must know."""
    warnings: list[str]
    """What the plan could not do as it should."""
    backend: type[AttentionBackend] | None = None
    """Holds the KV cache in place of a backend that cannot be made on this machine."""


@dataclass(kw_only=True)
class Request:
    """What is to be built."""

    config: Config
    """Resolved and validated."""
    device: torch.device
    bundle: ModelBundle
    inputs: list[InputSpec]
    arguments: Arguments
    """Which arguments of the forward are inputs, and what the others are fixed at."""
    weights_s: float = 0.0
    """How long the model took to build, in seconds."""
    planned: Planned | None = None
    """Set for `job=plan`: the model's tensors have shapes and no memory."""
    sizes: SizePlan | None = None
    """How the capture sizes were chosen; None: they were named, or are the default schedule."""

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments that are no tensors; frozen."""
        return dict(self.arguments.constants)


def request_for(
    module: Callable[..., Any],
    example_inputs: Any,
    dynamic_dims: DynamicDims,
    config: Config,
    *,
    make_inputs: MakeInputs | None = None,
    attention: AttentionSpec | None = None,
) -> Request:
    """Return the request for a caller's own module; see `pipeline.build_runner`."""
    arguments, tensors = read_arguments(module, example_inputs)
    specs = input_specs(tensors, dynamic_dims)
    device = specs[0].example.device
    config, sizes = with_sizes(config, own_module=True)
    given = resolve(config, device_type=device.type)
    if config.dtype is None and module_dtype(module) is not None:
        given.dtype = _dtype_name(module)
    validate(given, device_type=device.type)
    check_module(module, device)
    bundle = ModelBundle(
        module=module,
        make_inputs=resampler(specs) if make_inputs is None else checked(make_inputs, specs),
        dynamic_dims=dict(dynamic_dims),
        attention=attention,
    )
    if attention is not None:
        find_backend(given.attention.name).check(device)
    return Request(
        config=given, device=device, bundle=bundle, inputs=specs, arguments=arguments, sizes=sizes
    )


def request_of(config: Config, progress: Progress | None = None) -> Request:
    """Resolve and validate a config and build its model; `progress` hears of it."""
    progress = progress or Silent()
    started = time.perf_counter()
    device = device_of(config)
    config, sizes = with_sizes(config)
    config = resolve(config, device_type=device.type)
    validate(config, device_type=device.type)
    validate_model(config)
    progress.start("model", 1)
    try:
        bundle, inputs = make_bundle(config, device)
    finally:
        progress.stop()
    check_module(bundle.module, device)
    seconds = time.perf_counter() - started
    logger.info("model: %.3f s", seconds)
    return Request(
        config=config,
        device=device,
        bundle=bundle,
        inputs=inputs,
        arguments=arguments_of(bundle, inputs),
        weights_s=seconds,
        sizes=sizes,
    )


def make_bundle(config: Config, device: torch.device) -> tuple[ModelBundle, list[InputSpec]]:
    """Build a resolved config's model, and see what its inputs look like.

    A module that chose its own dtype (`model=module`) has it written into `config.dtype`.
    """
    asked = None if config.dtype is None else dtype_of(config)
    bundle = build_model(config, device=device, dtype=asked)
    if config.dtype is None:
        config.dtype = _dtype_name(bundle.module)
    example = bundle.make_inputs(2, torch.Generator().manual_seed(0))
    return bundle, input_specs(example, bundle.dynamic_dims)


def arguments_of(bundle: ModelBundle, inputs: Sequence[InputSpec]) -> Arguments:
    """Return the arguments of a bundle's forward: its inputs, unless it says more."""
    names = [spec.name for spec in inputs]
    return bundle.arguments or Arguments(inputs=names, order=names)


def _dtype_name(module: Callable[..., Any]) -> str:
    """Return what `dtype` is for a module that chose its own; float32 for one without floats."""
    return str(module_dtype(module) or torch.float32).removeprefix("torch.")


def attention_of(request: Request) -> type[AttentionBackend] | None:
    """Return the attention backend's class, or None for a model without attention."""
    if request.bundle.attention is None:
        return None
    return find_backend(request.config.attention.name)


def make_workspace(
    request: Request, bindings: Sequence[Binding], tensors: Mapping[str, torch.Tensor]
) -> Workspace:
    """Allocate the static memory of a runner."""
    config, spec = request.config, request.bundle.attention
    sizes, _ = usable_sizes(config)
    max_tokens = max(sizes)
    max_reqs = config.attention.max_num_reqs or max_tokens
    geometry, attention, backend = None, None, attention_of(request)
    planned = request.planned
    if planned is not None and planned.backend is not None:
        backend = planned.backend
    if spec is not None and backend is not None:
        geometry = cache_geometry(config, spec, max_tokens=max_tokens, max_reqs=max_reqs)
        attention = backend(
            spec,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            device=request.device,
            dtype=dtype_of(config),
        )
    kind = Workspace if planned is None else ShapeWorkspace
    return kind(
        inputs=request.inputs,
        bindings=bindings,
        tensors=tensors,
        max_tokens=max_tokens,
        max_reqs=max_reqs,
        attention=attention,
        geometry=geometry,
        device=request.device,
        stream=BUILD_LOCK.take_stream(request.device) if planned is None else None,
    )


def make_samples(request: Request, workspace: Workspace, *, seed: int | None = None) -> Samples:
    """Return the source of the steps that a build makes up itself; `seed`: None: the config's."""
    return Samples(
        workspace,
        request.bundle.make_inputs,
        seed=request.config.seed if seed is None else seed,
        query_len=request.config.capture.uniform_query_len,
    )
