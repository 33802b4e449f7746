"""Custom graph passes of Inductor's, by name, for `compiler.passes`.

In: names. Out: functions over a graph, with digests that go into every key, and Inductor options
that install them. Knows nothing of what a pass does.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.compilers.residual_add import split_residual_adds
from pcgsvc.errors import ConfigError, near
from pcgsvc.ops.attention_quant import fuse_attention_quant
from pcgsvc.ops.gemv import fuse_small_products


@dataclass(frozen=True, kw_only=True)
class GraphPass:
    """A change of the graph that Inductor has decomposed and not yet lowered."""

    run: Callable[[torch.fx.Graph], list[str] | None]
    """Changes the graph in place; writes are functionalised in it. It may return what it was to do
    and did not, for the report's warnings."""
    late: bool = False
    """After Inductor's own passes, not before them."""

    @property
    def identity(self) -> str:
        """sha256 of the source file that `run` stands in."""
        source = inspect.getsourcefile(self.run)
        assert source is not None, f"{self.run} has no source file"
        return hashlib.sha256(Path(source).read_bytes()).hexdigest()


PASSES: dict[str, GraphPass] = {
    "attention_quant": GraphPass(run=fuse_attention_quant),
    "gemv": GraphPass(run=fuse_small_products),
    "residual_add": GraphPass(run=split_residual_adds, late=True),
}
"""By name; whoever has another one adds it before building."""


def find_passes(names: Sequence[str]) -> list[GraphPass]:
    """Return passes by name; ConfigError for one that there is not, or that is named twice."""
    for name in names:
        if name not in PASSES:
            raise ConfigError(
                f"compiler.passes: got {name!r}{near(name, list(PASSES))} Choices: "
                f"{', '.join(PASSES)}."
            )
        if list(names).count(name) > 1:
            raise ConfigError(f"compiler.passes: {name!r} stands twice; name each pass once.")
    return [PASSES[name] for name in names]


def identities(names: Sequence[str]) -> list[list[str]]:
    """Return name and digest of every pass, in order, for keys."""
    return [[n, p.identity] for n, p in zip(names, find_passes(names), strict=True)]


def pass_options(names: Sequence[str]) -> dict[str, Any]:
    """Return the Inductor options that install passes."""
    found = find_passes(names)
    options: dict[str, Any] = {}
    for late, option in (
        (False, "post_grad_custom_pre_pass"),
        (True, "post_grad_custom_post_pass"),
    ):
        chosen = [p for p in found if p.late is late]
        if chosen:
            identity = ",".join(p.identity for p in chosen)
            options[option] = torch_private.graph_pass([p.run for p in chosen], identity)
    return options
