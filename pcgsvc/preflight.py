"""Everything about a config that can be judged without building, before any output is written.

In: a composed config. Out: nothing, or a `ConfigError`. Knows nothing of Hydra.
"""

from __future__ import annotations

from pcgsvc.config import Config, resolve, validate
from pcgsvc.devices import device_of, dtype_of
from pcgsvc.dispatch import resolve_mode
from pcgsvc.errors import ConfigError, near
from pcgsvc.models.catalog import validate_model
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.registry import registered_names
from pcgsvc.partition.fx import canonical_op_name
from pcgsvc.torch_private import op_exists


def check(config: Config) -> None:
    """Raise `ConfigError` for a config that cannot be built."""
    device = device_of(config)
    resolved = resolve(config, device_type=device.type)
    validate(resolved, device_type=device.type)
    dtype_of(resolved)
    validate_model(resolved)
    backend = find_backend(resolved.attention.name)
    _check_op_names(resolved)
    if resolved.strict and resolved.model.name != "two_regions":
        # With an attention model the boundaries are known before anything is traced.
        resolution = resolve_mode(
            resolved.mode,
            backend.cudagraph_support,
            num_boundaries=1,
            uniform_query_len=resolved.capture.uniform_query_len,
            why=f"attention={resolved.attention.name}",
        )
        if resolution.reasons:
            raise ConfigError(f"strict=true, and {'; '.join(resolution.reasons)}")


def _check_op_names(config: Config) -> None:
    partition = config.partition
    for name in [*(partition.splitting_ops or []), *partition.extra_splitting_ops]:
        canonical = canonical_op_name(name)
        if "::" in canonical and not op_exists(canonical):
            known = registered_names()
            raise ConfigError(
                f"partition.splitting_ops: {name!r} is no operator that torch knows"
                f"{near(canonical, known)} Registered splitting ops: {', '.join(known)}; the "
                "operators in the model's graph are listed by job=plan when a name matches none."
            )
