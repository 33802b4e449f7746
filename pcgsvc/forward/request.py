"""What is to be built: a config with its model, or a caller's own module.

In: a config, or a module with example arguments. Out: a `Request`, and the static memory that it
asks for. Knows nothing of tracing, compilers or graphs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.config.devices import dtype_name, dtype_of, module_dtype
from pcgsvc.errors import ConfigError, ForwardError
from pcgsvc.forward.arguments import (
    Arguments,
    DynamicDims,
    MakeInputs,
    check_module,
    checked,
    input_specs,
    one_device,
    read_arguments,
    resampler,
)
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.forward.plain import infer_dynamic_dims, no_rows, run_plainly
from pcgsvc.forward.process import BUILD_LOCK
from pcgsvc.forward.samples import Samples
from pcgsvc.forward.specs import Binding, InputSpec
from pcgsvc.forward.workspace import ShapeWorkspace, Workspace, cache_geometry
from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.backends import find_backend
from pcgsvc.sizing.choice import SizePlan
from pcgsvc.sizing.resolve import resolve_config

logger = logging.getLogger(__name__)

_RESAMPLED = (
    "The inputs were drawn like the examples, with which it works. Give valid ones: "
    "pcgsvc.compile(model, (x,), make_inputs=f), where f(rows, generator) returns tensors by name."
)
_EMPTY = "The examples are empty: pass some with rows, as in pcgsvc.compile(model, (x,))."


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
    """Which arguments of the forward are inputs, and which are constants."""
    weights_s: float = 0.0
    """How long the model took to build, in seconds."""
    planned: Planned | None = None
    """Set for `job=plan`: the model's tensors have shapes and no memory."""
    sizes: SizePlan | None = None
    """How the capture sizes were chosen; None: they were named, or are the default schedule."""
    warnings: list[str] = field(default_factory=list)
    """What the config asks for and is not done, as `resolve_config` found."""

    @property
    def constants(self) -> dict[str, Any]:
        """Non-tensor arguments, as they were when the request was made."""
        return dict(self.arguments.constants)


def request_for(
    module: Callable[..., Any],
    example_inputs: Any,
    dynamic_dims: DynamicDims | None,
    config: Config,
    *,
    make_inputs: MakeInputs | None = None,
    attention: AttentionSpec | None = None,
) -> Request:
    """Return the request for a caller's own module; see `pipeline.build_runner`."""
    arguments, tensors = read_arguments(module, example_inputs)
    if dynamic_dims is None:
        check_module(module, one_device(tensors))
        dynamic_dims = infer_dynamic_dims(module, tensors, arguments.constants)
    specs = input_specs(tensors, dynamic_dims)
    if not any(spec.dims for spec in specs):
        raise no_rows("got none", tensors)
    device = specs[0].example.device
    resolved = resolve_config(config, module_device=device)
    if config.dtype is None and module_dtype(module) is not None:
        resolved.config.dtype = dtype_name(module)
    check_module(module, device)
    bundle = ModelBundle(
        module=module,
        make_inputs=resampler(specs) if make_inputs is None else checked(make_inputs, specs),
        dynamic_dims=dict(dynamic_dims),
        attention=attention,
        samples_from=_RESAMPLED if make_inputs is None else "The inputs are those of make_inputs.",
    )
    if attention is not None:
        if not isinstance(attention, AttentionSpec):
            raise ConfigError(f"attention: got {attention!r}, a pcgsvc.AttentionSpec is needed.")
        find_backend(resolved.config.attention.name).check(device)
    return Request(
        config=resolved.config,
        device=device,
        bundle=bundle,
        inputs=specs,
        arguments=arguments,
        sizes=resolved.sizes,
        warnings=resolved.warnings,
    )


def check_forward(request: Request) -> Any:
    """Run a user's own forward plainly, before anything is traced; its state is put back.

    Returns its result; None where it is not run.

    A model whose attention needs a KV cache is run on tensors without memory. Row counts that a
    model does not take are left to capture: one that works is enough.

    Raises:
        ForwardError: it fails, with the examples or with inputs that were drawn for it.
    """
    bundle, generator = request.bundle, torch.Generator().manual_seed(request.config.seed)
    if bundle.samples_from is None:
        return None
    module, constants = bundle.module, request.constants
    has_memory = bundle.attention is None
    first = next(s for s in request.inputs if s.dims)
    sizes = [first.example.shape[first.dims[0]] or 1, *request.config.capture.final_sizes[::-1]]
    refusals: list[ForwardError] = []
    for rows in dict.fromkeys(sizes):
        made = bundle.make_inputs(rows, generator)
        inputs = {s.name: s.laid_out(made[s.name].to(request.device)) for s in request.inputs}
        try:
            with contextlib.nullcontext() if has_memory else torch_private.fake_tensors():
                return run_plainly(module, inputs, constants, rows)
        except ForwardError as error:
            if not has_memory and torch_private.is_fake_limit(error.__cause__):
                return None  # it needs values, which only a run has
            refusals.append(error)
    if bundle.samples_from == _RESAMPLED and not first.example.numel():
        raise ForwardError(f"{refusals[0]} {_EMPTY}") from refusals[0].__cause__
    if bundle.samples_from == _RESAMPLED and has_memory:
        run_plainly(module, {s.name: s.example for s in request.inputs}, constants, sizes[0])
    raise ForwardError(f"{refusals[0]} {bundle.samples_from}") from refusals[0].__cause__


def arguments_of(bundle: ModelBundle, inputs: Sequence[InputSpec]) -> Arguments:
    """Return the arguments of a bundle's forward: its inputs, unless it says more."""
    names = [spec.name for spec in inputs]
    return bundle.arguments or Arguments(inputs=names, order=names)


def attention_of(request: Request) -> type[AttentionBackend] | None:
    """Return the attention backend's class, or None for a model without attention."""
    if request.bundle.attention is None:
        return None
    return find_backend(request.config.attention.name)


def make_workspace(
    request: Request, bindings: Sequence[Binding], tensors: Mapping[str, torch.Tensor]
) -> Workspace:
    """Allocate the static memory of a runner."""
    config, spec, planned = request.config, request.bundle.attention, request.planned
    max_tokens = max(config.capture.final_sizes)
    max_reqs = config.attention.max_num_reqs or max_tokens
    geometry, attention, backend = None, None, attention_of(request)
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
