"""pcgsvc: piecewise CUDA graphs for PyTorch, as a library and as a command.

Importing the package is cheap: no compiler is imported, no global state touched, no thread started,
no logging configured. Public names are found when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pcgsvc.version import __version__

if TYPE_CHECKING:
    from pcgsvc.api import build_runner, load_config, load_runner
    from pcgsvc.capture.plan import BatchDescriptor
    from pcgsvc.config import Config
    from pcgsvc.errors import PcgError
    from pcgsvc.forward.batch import Batch
    from pcgsvc.forward.sampling import Sampling
    from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
    from pcgsvc.ops.backends import register_attention_backend
    from pcgsvc.ops.breaks import eager_break
    from pcgsvc.ops.context import ForwardContext, current_context
    from pcgsvc.ops.registry import register_splitting_op, splitting_op
    from pcgsvc.ops.support import Support
    from pcgsvc.ops.true_rows import true_rows
    from pcgsvc.serve.blocks import BlockAllocator
    from pcgsvc.serve.dispatch import Dispatch
    from pcgsvc.serve.runner import Runner
    from pcgsvc.serve.slots import Continuation, NewToken, Slots

_HOMES = {
    "AttentionBackend": "pcgsvc.ops.attention",
    "AttentionSpec": "pcgsvc.ops.attention",
    "Batch": "pcgsvc.forward.batch",
    "BatchDescriptor": "pcgsvc.serve.dispatch",
    "BlockAllocator": "pcgsvc.serve.blocks",
    "Config": "pcgsvc.config",
    "Continuation": "pcgsvc.serve.slots",
    "Dispatch": "pcgsvc.serve.dispatch",
    "ForwardContext": "pcgsvc.ops.context",
    "NewToken": "pcgsvc.serve.slots",
    "PcgError": "pcgsvc.errors",
    "Runner": "pcgsvc.serve.runner",
    "Sampling": "pcgsvc.forward.sampling",
    "Slots": "pcgsvc.serve.slots",
    "Support": "pcgsvc.ops.support",
    "build_runner": "pcgsvc.api",
    "current_context": "pcgsvc.ops.context",
    "eager_break": "pcgsvc.ops.breaks",
    "load_config": "pcgsvc.api",
    "load_runner": "pcgsvc.api",
    "register_attention_backend": "pcgsvc.ops.backends",
    "register_splitting_op": "pcgsvc.ops.registry",
    "splitting_op": "pcgsvc.ops.registry",
    "true_rows": "pcgsvc.ops.true_rows",
}

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "Batch",
    "BatchDescriptor",
    "BlockAllocator",
    "Config",
    "Continuation",
    "Dispatch",
    "ForwardContext",
    "NewToken",
    "PcgError",
    "Runner",
    "Sampling",
    "Slots",
    "Support",
    "__version__",
    "build_runner",
    "current_context",
    "eager_break",
    "load_config",
    "load_runner",
    "register_attention_backend",
    "register_splitting_op",
    "splitting_op",
    "true_rows",
]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pcgsvc' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
