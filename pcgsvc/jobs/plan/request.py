"""The request of a plan: the configured model with shapes and without memory.

In: a config. Out: a `Request` whose tensors are fake.

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
from pcgsvc.forward.plain import words_of
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

    A model whose constructor reads values of tensors is built for real, with a warning in the plan.

    Args:
        config: as composed or resolved.
        progress: shows the phase.
        real: why the model is built for real from the start; None: it is not.
    """
    started = time.perf_counter()
    resolved = resolve_config(config)
    config, target = resolved.config, resolved.device
    validate_model(config)
    planned = Planned(target=target, fake=torch_private.fake_tensors(), notes=[], warnings=[])
    if real is not None:
        _use_real_tensors(planned, real)
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
    planned.notes += [*bundle.plan_notes, *_dtype_note(config, bundle)]
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
    how = "shapes only, no weights in memory" if _is_fake(planned) else "with its weights in memory"
    logger.info("model: %.3f s, %s", request.weights_s, how)
    return request


def _is_fake(planned: Planned) -> bool:
    return not isinstance(planned.fake, contextlib.nullcontext)


def _build(
    config: Config, home: torch.device, planned: Planned
) -> tuple[ModelBundle, list[InputSpec]]:
    if not _is_fake(planned):
        return make_bundle(config, home)
    try:
        with planned.fake, torch_private.swappable(planned.fake):
            return make_bundle(config, home)
    except PcgError:
        raise
    except Exception as error:  # noqa: BLE001 - a constructor may do anything
        why = f"its constructor needs them: {words_of(error)}"
    _use_real_tensors(planned, why)
    return make_bundle(config, home)


def _use_real_tensors(planned: Planned, why: str) -> None:
    planned.warnings.append(f"the model was planned with its weights in memory, since {why}")
    planned.fake = contextlib.nullcontext()


def _dtype_note(config: Config, bundle: ModelBundle) -> list[str]:
    stored = bundle.stored_dtype
    if config.dtype != "float32" or stored not in ("bfloat16", "float16"):
        return []
    return [
        f"weights are float32, and the checkpoint says {stored}: dtype={stored} takes half the "
        "memory"
    ]


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
