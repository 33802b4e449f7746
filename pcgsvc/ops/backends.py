"""The attention backends by name: ours, and those that others register.

In: the name that `attention.name` takes. Out: the backend's class. Knows nothing of their insides.

The registry is process-wide, as the splitting ops' is: a backend is code, and code is global.
"""

from __future__ import annotations

import inspect
from importlib import metadata

from pcgsvc.errors import ConfigError, near
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.paged import PagedAttention
from pcgsvc.ops.registry import where_defined
from pcgsvc.ops.support import Support
from pcgsvc.ops.triton_attention import TritonAttention
from pcgsvc.ops.varlen import VarlenAttention

ENTRY_POINTS = "pcgsvc.attention_backends"
"""Entry-point group in which an installed package names its backends."""

BACKENDS: dict[str, type[AttentionBackend]] = {
    "paged": PagedAttention,
    "varlen": VarlenAttention,
    "triton": TritonAttention,
}


def register_attention_backend(name: str, backend: type[AttentionBackend]) -> None:
    """Make a backend known as `attention.name=<name>`, for every runner that is built after.

    Call it when your module is imported. A package that is installed may name its backend in the
    entry-point group `pcgsvc.attention_backends` instead; it is imported when it is asked for.

    Args:
        name: letters, digits and `_`; not the name of another backend.
        backend: a subclass of `AttentionBackend` with its `cudagraph_support`.

    Raises:
        ConfigError: the name is no such word or is taken, or the class is not a whole backend.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(
            f"attention backend: got the name {name!r}; letters, digits and '_' are needed."
        )
    _check_class(name, backend)
    known = BACKENDS.get(name)
    # One definition may come twice: from a module that is imported twice, or reloaded.
    if known is not None and where_defined(known) != where_defined(backend):
        raise ConfigError(
            f"attention backend {name!r}: the name is taken by {where_defined(known)}; "
            f"{where_defined(backend)} needs another one."
        )
    BACKENDS[name] = backend


def find_backend(name: str) -> type[AttentionBackend]:
    """Return the backend called `name`, importing it if a package's entry point names it.

    Raises:
        ConfigError: there is none, with the choices; or its package cannot be imported.
    """
    found = BACKENDS.get(name)
    if found is not None:
        return found
    installed = {e.name: e for e in metadata.entry_points(group=ENTRY_POINTS)}
    entry = installed.get(name)
    if entry is None:
        choices = [*BACKENDS, *sorted(set(installed) - set(BACKENDS))]
        raise ConfigError(
            f"attention: got {name!r}{near(name, choices)} Choices: {', '.join(choices)}. Your own "
            "is made known by pcgsvc.register_attention_backend."
        )
    try:
        backend = entry.load()
    except Exception as error:  # the package may raise whatever it likes
        raise ConfigError(
            f"attention: the backend {name!r} ({entry.value}) cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if BACKENDS.get(name) is not backend:  # the package may have registered it itself
        register_attention_backend(name, backend)
    return BACKENDS[name]


def _check_class(name: str, backend: type[AttentionBackend]) -> None:
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ConfigError(
            f"attention backend {name!r}: got {backend!r}; a subclass of pcgsvc.AttentionBackend "
            "is needed."
        )
    if inspect.isabstract(backend):
        missing = ", ".join(sorted(backend.__abstractmethods__))
        raise ConfigError(f"attention backend {name!r}: {where_defined(backend)} lacks {missing}.")
    support = getattr(backend, "cudagraph_support", None)
    if not isinstance(support, Support):
        levels = ", ".join(f"Support.{level.name}" for level in Support)
        raise ConfigError(
            f"attention backend {name!r}: {where_defined(backend)}.cudagraph_support is "
            f"{support!r}; one of {levels} is needed."
        )
