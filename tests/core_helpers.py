"""Toy splitting ops, and builders that keep a test to the one thing that it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_helpers import make_context
from torch import nn

import pcgsvc
from pcgsvc.capture.plan import plan_capture
from pcgsvc.check.verify import verify
from pcgsvc.config import (
    AttentionConfig,
    BenchConfig,
    CacheConfig,
    CacheMode,
    CaptureConfig,
    Compiler,
    CompilerConfig,
    Config,
    DebugConfig,
    Mode,
    OnUncovered,
    Outputs,
    PartitionConfig,
)
from pcgsvc.events import Phases
from pcgsvc.forward.arguments import input_specs, read_arguments
from pcgsvc.ops.context import use_context
from pcgsvc.partition.fx import partition_fx
from pcgsvc.program.pieces import Kind, Partition
from pcgsvc.trace.dynamo import trace
from pcgsvc.trace.graph import TracedGraph

WIDTH = 4
"""Features per row of the toy models."""


def fault(reason: str) -> pytest.MarkDecorator:
    """Mark a test that shows a fault of ours: it must fail until the fault is mended."""
    return pytest.mark.xfail(strict=True, reason=reason)


def faulty(values: Iterable[Any], broken: Iterable[Any], reason: str) -> list[Any]:
    """Return parameters of which some show a fault."""
    known = list(broken)
    return [pytest.param(v, marks=fault(reason)) if v in known else v for v in values]


# ---- splitting ops -------------------------------------------------------------------------------


@pcgsvc.splitting_op("toy::attend", mutates_args=("out",), support="never")
def attend(x: torch.Tensor, out: torch.Tensor) -> None:
    """Double x into out; refuses uncomputed memory, which it would turn into a wrong result."""
    rows = pcgsvc.current_context().num_tokens
    assert torch.isfinite(x[:rows]).all(), "a boundary saw memory that nothing has computed"
    out.copy_(x * 2)


def _fresh_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pcgsvc.splitting_op("toy::fresh", fake=_fresh_fake, support="never")
def fresh(x: torch.Tensor) -> torch.Tensor:
    """Return new memory at each call; `keep` makes sure that the old is not handed out again."""
    KEEP.append(torch.full_like(x, float("nan")))
    return x * 2 + 1


KEEP: list[torch.Tensor] = []


def _two_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@pcgsvc.splitting_op("toy::two", fake=_two_fake, support="never")
def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two results."""
    return x + 1, x - 1


@pcgsvc.splitting_op("toy::bump", mutates_args=("state",), support="never")
def bump(state: torch.Tensor, x: torch.Tensor) -> None:
    """Add the sum of the true rows of x to a state that is no rows."""
    rows = pcgsvc.current_context().num_tokens
    state.add_(x[:rows].sum())


@pcgsvc.splitting_op("toy::device_only", mutates_args=("out",), support="always")
def device_only(x: torch.Tensor, out: torch.Tensor) -> None:
    """Scale by the true row count, read from the device."""
    out.copy_(x * pcgsvc.current_context().num_tokens_tensor)


@pcgsvc.splitting_op("toy::host_reader", mutates_args=("out",), support="always")
def host_reader(x: torch.Tensor, out: torch.Tensor) -> None:
    """Scale by the host's row count, though it claims that it can be captured."""
    out.copy_(x * pcgsvc.current_context().num_tokens)


# ---- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    """norm - linear - attend - linear - residual."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        out = torch.empty_like(h)
        torch.ops.toy.attend(h, out)
        return x + self.down(out)


class Toy(nn.Module):
    """The toy of the field notes: blocks of `Block`, three by default."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def toy(blocks: int = 3, seed: int = 0) -> Toy:
    """Return a seeded toy in eval mode; the global generator is left alone."""
    module = Toy(blocks).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(0.1, 0.5, generator=generator)
    return module


def attended(x: torch.Tensor) -> torch.Tensor:
    """Call toy::attend on a buffer of its own."""
    out = torch.empty_like(x)
    torch.ops.toy.attend(x, out)
    return out


def device_forward(x: torch.Tensor) -> torch.Tensor:
    """Hold a boundary that any graph may hold."""
    out = torch.empty_like(x)
    torch.ops.toy.device_only(x * 2, out)
    return out + x


def plain(module: Callable[..., Any], *args: Any) -> Any:
    """Call a module as itself, all rows of its first argument being one request."""
    with torch.no_grad(), use_context(make_context(None, [len(args[0])])):
        return module(*args)


def rows(count: int, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    """Return seeded normal rows."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


# ---- builders ------------------------------------------------------------------------------------


def make_config(
    mode: str = "piecewise",
    sizes: Sequence[int] = (4, 8),
    *,
    compiler: str = "eager",
    splitting_ops: list[str] | None = None,
    on_uncovered: str = "run",
    outputs: str = "clone",
    strict: bool = False,
    poison: bool = False,
    check_addresses: bool = False,
    max_num_reqs: int | None = None,
    **capture: Any,
) -> Config:
    """Return a small config; `capture` goes to `CaptureConfig`."""
    return Config(
        mode=Mode(mode),
        capture=CaptureConfig(sizes=list(sizes), **capture),
        compiler=CompilerConfig(name=Compiler(compiler)),
        partition=PartitionConfig(splitting_ops=splitting_ops),
        attention=AttentionConfig(max_num_reqs=max_num_reqs),
        debug=DebugConfig(poison=poison, check_addresses=check_addresses),
        bench=BenchConfig(enabled=False),
        cache=CacheConfig(mode=CacheMode.OFF),
        on_uncovered=OnUncovered(on_uncovered),
        outputs=Outputs(outputs),
        strict=strict,
    )


def build(
    module: Callable[..., Any],
    example: Any = None,
    dims: Mapping[str, Any] | None = None,
    **settings: Any,
) -> pcgsvc.Runner:
    """Build a runner; by default of a model of one input x [rows, WIDTH]."""
    return pcgsvc.build_runner(
        module,
        rows(3) if example is None else example,
        dynamic_dims=dims or {"x": 0},
        config=make_config(**settings),
    )


def verified(runner: pcgsvc.Runner, seed: int = 7) -> list[dict[str, Any]]:
    """Verify a built runner once more, on other inputs."""
    request = replace(runner.request, config=replace(runner.request.config, seed=seed))
    plan = plan_capture(request, runner.model.image)
    with runner.lock:
        found = verify(runner.model, runner.memory, runner.table, request, plan, Phases())
    assert found.rows is not None
    return found.rows


def trace_of(
    module: Callable[..., Any], example: Any = None, dims: Mapping[str, Any] | None = None
) -> TracedGraph:
    """Trace as the pipeline does."""
    arguments, tensors = read_arguments(module, rows(3) if example is None else example)
    return trace(module, input_specs(tensors, dims or {"x": 0}), dict(arguments.constants))


def partition_of(
    module: Callable[..., Any],
    splitting_ops: list[str] | None = None,
    extra: Sequence[str] = (),
    example: Any = None,
) -> Partition:
    """Trace and cut."""
    return partition_fx(trace_of(module, example), splitting_ops, extra)


def kinds(partition: Partition) -> str:
    """Return the kinds of the pieces as letters, e.g. `RBR`."""
    letter = {Kind.REGION: "R", Kind.BOUNDARY: "B", Kind.INLINE: "I"}
    return "".join(letter[p.kind] for p in partition.pieces)
