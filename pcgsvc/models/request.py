"""The request of a configured model: its config resolved, its module built.

In: a config. Out: a `Request`. Knows nothing of tracing, compilers or graphs.
"""

from __future__ import annotations

import logging
import time

import torch

from pcgsvc.config import Config
from pcgsvc.config.devices import dtype_name, dtype_of
from pcgsvc.events import Progress, Silent
from pcgsvc.forward.arguments import check_module, input_specs
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.forward.process import collector_eased
from pcgsvc.forward.request import Request, arguments_of
from pcgsvc.forward.specs import InputSpec
from pcgsvc.models.catalog import build_model, validate_model
from pcgsvc.sizing.resolve import resolve_config

logger = logging.getLogger(__name__)


@collector_eased()  # some models import for seconds
def request_of(config: Config, progress: Progress | None = None) -> Request:
    """Resolve and validate a config and build its model, which `progress` shows as a phase."""
    progress = progress or Silent()
    started = time.perf_counter()
    resolved = resolve_config(config)
    config, device = resolved.config, resolved.device
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
        sizes=resolved.sizes,
        warnings=resolved.warnings,
    )


def make_bundle(config: Config, device: torch.device) -> tuple[ModelBundle, list[InputSpec]]:
    """Build a resolved config's model, and see what its inputs look like.

    A module that chose its own dtype (`model=module`) has it written into `config.dtype`.
    """
    asked = None if config.dtype is None else dtype_of(config)
    bundle = build_model(config, device=device, dtype=asked)
    if config.dtype is None:
        config.dtype = dtype_name(bundle.module)
    example = bundle.make_inputs(2, torch.Generator().manual_seed(0))
    return bundle, input_specs(example, bundle.dynamic_dims)
