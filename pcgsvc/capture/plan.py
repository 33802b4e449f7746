"""Which entries are captured: the mode that a program's boundaries allow, for every size.

In: a request and a program image. Out: a `CapturePlan`. Knows nothing of how an entry is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pcgsvc.config import Collectives, Config, Graphs, Mode
from pcgsvc.config.resolve import GEMV_ROWS, wants_gemv
from pcgsvc.forward.request import Request, attention_of
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.collectives import COLLECTIVES
from pcgsvc.ops.modes import FULL, NEAR_ROWS, NONE, PIECEWISE, Resolution, gaps, resolve_mode
from pcgsvc.ops.registry import find_spec
from pcgsvc.ops.support import Support
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.pieces import Kind


@dataclass(frozen=True)
class BatchDescriptor:
    """What a captured entry is for; also the key under which it is found."""

    num_tokens: int
    """Rows of the entry: the padded size."""
    num_reqs: int | None
    """Requests of a uniform entry; None for entries that serve any batch."""
    uniform: bool
    """Captured for batches in which every request has the same number of new tokens."""


EntryKey = tuple[Mode, BatchDescriptor]
"""What an entry is found by: `full` or `piecewise`, and what it is for."""


@dataclass(kw_only=True)
class CapturePlan:
    """What becomes of the requested mode with the ops of a graph."""

    config: Config
    """What it was made from."""
    resolution: Resolution
    support: Support
    """Least support of the graph's boundaries."""
    sizes: list[int]
    """Capture sizes, ascending."""
    entries: list[EntryKey] = field(default_factory=list)
    """What is captured, largest size first."""
    invalid: list[tuple[EntryKey, str]] = field(default_factory=list)
    """Entries that the graph is not valid for, with the reason."""
    warnings: list[str] = field(default_factory=list)
    """What was asked for and is not done."""
    notes: list[str] = field(default_factory=list)
    """What the default mode becomes here; under `strict=true` it is a warning."""


def plan_capture(request: Request, image: ProgramImage) -> CapturePlan:
    """Resolve the mode, and choose the entries to capture."""
    config = request.config
    sizes = config.capture.final_sizes
    resolution, support = resolve_boundaries(config, image, attention_of(request))
    query_len = config.capture.uniform_query_len
    by_default = config.mode is Config().mode and not config.strict
    wanted = wanted_entries(resolution, sizes, query_len, config.attention.max_num_reqs)
    if config.capture.graphs is Graphs.OFF:
        wanted = []
    plan = CapturePlan(
        config=config,
        resolution=resolution,
        support=support,
        sizes=sizes,
        warnings=[
            *(() if by_default else resolution.reasons),
            *request.warnings,
            *no_uniform_size(resolution, sizes, query_len),
            *far_sizes(wanted, config.capture.max_padding),
            *(f"runs uncompiled: {found}" for found in image.uncompiled.values()),
            *_idle_gemv(request),
        ],
        notes=[*resolution.reasons] if by_default else [],
    )
    for key in wanted:
        broken = image.predicate.broken_by(key[1].num_tokens)
        if broken is None:
            plan.entries.append(key)
        else:
            plan.invalid.append((key, f"the traced graph is not valid for it: {broken}"))
    return plan


def _idle_gemv(request: Request) -> list[str]:
    compiler = request.config.compiler
    small = any(size <= GEMV_ROWS for size in compiler.specialize_sizes)
    if request.device.type != "cuda" or small or not wants_gemv(request.config):
        return []
    return [
        "compiler.passes: gemv does nothing, since no exact size in compiler.specialize_sizes is "
        f"up to {GEMV_ROWS}; it needs such a capture size, and partition.strategy=fx or inductor"
    ]


def uniform_descriptor(size: int, query_len: int) -> BatchDescriptor:
    """Return the key of the entry for uniform batches of `size` rows."""
    return BatchDescriptor(size, size // query_len, True)


def general_descriptor(size: int) -> BatchDescriptor:
    """Return the key of the entry for any batch of `size` rows."""
    return BatchDescriptor(size, None, False)


def wanted_entries(
    resolution: Resolution, sizes: Sequence[int], query_len: int, max_reqs: int | None = None
) -> list[EntryKey]:
    """Return the entries to capture, largest size first.

    A full graph of an op that supports any batch serves uniform ones too; otherwise it is captured
    for uniform batches, whose sizes are multiples of `query_len`; none is beyond the first size
    that holds `max_reqs` requests (None: no bound), since no uniform batch is larger.
    """
    uniform = sorted(size for size in sizes if size % query_len == 0)
    if max_reqs is not None:
        below = [size for size in uniform if size < max_reqs * query_len]
        uniform = uniform[: len(below) + 1]
    wanted: list[EntryKey] = []
    general = resolution.mixed
    for size in sorted(sizes, reverse=True):
        if general is not NONE:
            wanted.append((general, general_descriptor(size)))
        if resolution.own_uniform and size in uniform:
            wanted.append((FULL, uniform_descriptor(size, query_len)))
    return wanted


def no_uniform_size(resolution: Resolution, sizes: Sequence[int], query_len: int) -> list[str]:
    """Return what to warn of when uniform batches shall have full graphs and no size is theirs."""
    if not resolution.own_uniform or any(size % query_len == 0 for size in sizes):
        return []
    other = "piecewise serves them" if resolution.mixed is PIECEWISE else "nothing is captured"
    return [
        f"capture.sizes: none of {sorted(sizes)} is a multiple of "
        f"capture.uniform_query_len={query_len}, so no full graph can serve uniform batches: "
        f"{other}. Add sizes such as {query_len} and {2 * query_len}"
    ]


def far_sizes(entries: Sequence[EntryKey], max_padding: int) -> list[str]:
    """Return what to warn of: calls that no entry serves, since the next is too far from them."""
    general, uniform = (
        gaps([key.num_tokens for _, key in entries if key.uniform is kind], max_padding)
        for kind in (False, True)
    )
    what = [("calls", "graph", gap) for gap in general]
    what += [("uniform batches", "full graph", gap) for gap in uniform if gap not in general]
    return [
        f"capture.sizes: {calls} of {low} to {high} rows get no {graph}: the next size, {size}, is "
        f"more than capture.max_padding={max_padding} times their rows and more than "
        f"{NEAR_ROWS} rows away. Add sizes between, or raise capture.max_padding"
        for calls, graph, (low, high, size) in what
    ]


def resolve_boundaries(
    config: Config, image: ProgramImage, attention: type[AttentionBackend] | None
) -> tuple[Resolution, Support]:
    """Turn the requested mode into one that the ops of the graph allow."""
    levels = [(support_of(name, config, attention), name) for name in image.matched]
    support, why = min(levels, default=(Support.ALWAYS, ""))
    op = find_spec(why)
    if op is not None and op.support is None:
        why = f"attention={config.attention.name}"
    uncut = [
        name
        for name in sorted(set(image.ops) - set(image.matched))
        if find_spec(name) is not None and support_of(name, config, attention) is not Support.ALWAYS
    ]
    if uncut and config.mode is not Mode.NONE:
        reason = (
            f"{config.mode.value} was asked for, but {uncut} would lie inside the graphs, since "
            "partition.splitting_ops leaves them out, and they cannot be captured: nothing is"
        )
        return Resolution(requested=config.mode, resolved=Mode.NONE, reasons=[reason]), support
    resolution = resolve_mode(
        config.mode,
        support,
        num_boundaries=image.count(Kind.BOUNDARY),
        uniform_query_len=config.capture.uniform_query_len,
        why=why,
    )
    return resolution, support


def support_of(name: str, config: Config, attention: type[AttentionBackend] | None) -> Support:
    """Return how far an op may go into a graph; ops that nobody registered never do."""
    op = find_spec(name)
    if op is None:
        return Support.NEVER
    if name in COLLECTIVES and config.parallel.collectives is Collectives.REGION:
        return Support.ALWAYS
    if op.support is not None:
        return op.support
    return attention.cudagraph_support if attention is not None else Support.NEVER
