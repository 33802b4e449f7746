"""The request of a plan: the configured model with shapes and without memory.

In: a config. Out: a `Request` whose tensors are fake. Knows nothing of tracing or graphs.

Where torch has no CUDA device, a plan for one is made on the CPU's tensors: a torch without CUDA
cannot index a fake CUDA tensor. A model that asks for the device's type then takes the CPU's way.
"""

from __future__ import annotations

import contextlib
import logging
import time

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.config.devices import is_here
from pcgsvc.errors import ConfigError, PcgError
from pcgsvc.events import Progress
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.forward.request import Planned, Request, arguments_of
from pcgsvc.forward.specs import InputSpec
from pcgsvc.models.catalog import validate_model
from pcgsvc.models.request import make_bundle
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.context import ForwardContext
from pcgsvc.ops.support import Support
from pcgsvc.sizing.resolve import resolve_config

logger = logging.getLogger(__name__)


class CacheOnly(AttentionBackend):
    """The KV cache of a backend that cannot be made on this machine."""

    cudagraph_support = Support.NEVER

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> None:
        """See `AttentionBackend.forward`; there is nothing to run."""
        raise NotImplementedError("its kernels cannot be loaded on this machine")


def plan_request(config: Config, progress: Progress, *, real: str | None = None) -> Request:
    """Resolve and validate a config and build its model without memory.

    A model whose constructor reads values of tensors is built for real, and the plan says so.

    Args:
        config: as composed or resolved.
        progress: hears of the phase.
        real: why the model is built for real from the start; None: it is not.
    """
    started = time.perf_counter()
    resolved = resolve_config(config)
    config, target = resolved.config, resolved.device
    validate_model(config)
    planned = Planned(target=target, fake=torch_private.fake_tensors(), notes=[], warnings=[])
    if real is not None:
        need_values(planned, real)
    elif config.model.name == "module":
        planned.fake = contextlib.nullcontext()  # a constructor of the user's may need values
        planned.notes.append("model=module is made as it is, with its weights in memory")
    home = target if is_here(target) else torch.device("cpu")
    if home != target:
        planned.notes.append(
            f"planned for {target}, which this machine lacks: traced with tensors of the CPU, so "
            "hashes differ from those of a run, and a model that asks for its device takes the "
            "CPU's way"
        )
    progress.start("model", 1)
    try:
        bundle, inputs = _build(config, home, planned)
    finally:
        progress.stop()
    if bundle.attention is not None:
        _choose_backend(config, home, planned)
    request = Request(
        config=config,
        device=home,
        bundle=bundle,
        inputs=inputs,
        arguments=arguments_of(bundle, inputs),
        weights_s=time.perf_counter() - started,
        planned=planned,
        sizes=resolved.sizes,
        warnings=resolved.warnings,
    )
    logger.info("model: %.3f s, %s", request.weights_s, _how(planned))
    return request


def _how(planned: Planned) -> str:
    real = isinstance(planned.fake, contextlib.nullcontext)
    return "with its weights in memory" if real else "shapes only, no weights in memory"


def _build(
    config: Config, home: torch.device, planned: Planned
) -> tuple[ModelBundle, list[InputSpec]]:
    try:
        with planned.fake, _swappable(planned):
            return _made(config, home)
    except PcgError:
        raise
    except Exception as error:
        if planned.warnings:
            raise  # real tensors did not help
        lines = str(error).strip().splitlines() or [""]
        need_values(planned, f"its constructor needs them: {type(error).__name__}: {lines[0]}")
    return _made(config, home)


def _swappable(planned: Planned) -> contextlib.AbstractContextManager[None]:
    if isinstance(planned.fake, contextlib.nullcontext):
        return contextlib.nullcontext()
    return torch_private.swappable(planned.fake)


def _made(config: Config, home: torch.device) -> tuple[ModelBundle, list[InputSpec]]:
    return make_bundle(config, home)


def need_values(planned: Planned, why: str) -> None:
    """Go on with real tensors, and say so."""
    words = f"the model was planned with its weights in memory, since {why}"
    planned.warnings.append(words)
    planned.fake = contextlib.nullcontext()


def _choose_backend(config: Config, home: torch.device, planned: Planned) -> None:
    try:
        find_backend(config.attention.name).check(home)
    except ConfigError as error:
        if home == planned.target:
            raise
        logger.debug("attention=%s: %s", config.attention.name, error)
        planned.backend = CacheOnly
        planned.notes.append(
            f"attention={config.attention.name} cannot be loaded on this machine: its KV cache is "
            "counted, what else it allocates is not"
        )
