"""The attention backends by name.

In: the name that `attention=` takes. Out: the backend's class. Knows nothing of their insides.
"""

from __future__ import annotations

from pcgsvc.errors import ConfigError, near
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.paged import PagedAttention
from pcgsvc.ops.triton_attention import TritonAttention
from pcgsvc.ops.varlen import VarlenAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    "paged": PagedAttention,
    "varlen": VarlenAttention,
    "triton": TritonAttention,
}


def find_backend(name: str) -> type[AttentionBackend]:
    """Return the backend called `name`; ConfigError lists the choices."""
    found = BACKENDS.get(name)
    if found is None:
        raise ConfigError(
            f"attention: got {name!r}{near(name, BACKENDS)} Choices: {', '.join(BACKENDS)}."
        )
    return found
