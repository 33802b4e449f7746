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

from pcgsvc.arguments import bundle_specs, input_specs, resampler, split_arguments
from pcgsvc.config import Config, resolve, validate
from pcgsvc.devices import device_of, dtype_of
from pcgsvc.errors import ConfigError
from pcgsvc.models.base import ModelBundle
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.ops.attention import AttentionBackend
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
    constants: Mapping[str, Any]
    """Arguments that are no tensors; frozen."""
    weights_s: float = 0.0
    """How long the model took to build, in seconds."""
    planned: Planned | None = None
    """Set for `job=plan`: the model's tensors have shapes and no memory."""
    sizes: SizePlan | None = None
    """How the capture sizes were chosen; None: they were named, or are the default schedule."""


def request_for(
    module: Callable[..., Any],
    example_inputs: Any,
    dynamic_dims: Mapping[str, int],
    config: Config,
) -> Request:
    """Return the request for a caller's own module; see `pipeline.build_runner`."""
    tensors, constants = split_arguments(module, example_inputs)
    specs = input_specs(tensors, dynamic_dims)
    device = specs[0].example.device
    config, sizes = with_sizes(config, own_module=True)
    given = resolve(config, device_type=device.type)
    validate(given, device_type=device.type)
    if isinstance(module, torch.nn.Module) and module.training:
        raise ConfigError("module: it is in training mode; call module.eval() first.")
    bundle = ModelBundle(
        module=module, make_inputs=resampler(specs), dynamic_dims=dict(dynamic_dims)
    )
    return Request(
        config=given, device=device, bundle=bundle, inputs=specs, constants=constants, sizes=sizes
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
        bundle = build_model(config, device=device, dtype=dtype_of(config))
    finally:
        progress.stop()
    seconds = time.perf_counter() - started
    logger.info("model: %.3f s", seconds)
    return Request(
        config=config,
        device=device,
        bundle=bundle,
        inputs=bundle_specs(bundle),
        constants={},
        weights_s=seconds,
        sizes=sizes,
    )


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


def make_samples(request: Request, workspace: Workspace) -> Samples:
    """Return the source of the steps that a build makes up itself."""
    return Samples(
        workspace,
        request.bundle.make_inputs,
        seed=request.config.seed,
        query_len=request.config.capture.uniform_query_len,
    )
