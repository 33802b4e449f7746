"""A call's copies inside an entry's graphs, where they cost no launches of their own.

In: a captured entry, the buffers that calls fill, and a composer. Out: steps of which the first
copies metadata and inputs in before its segment, and the last copies results out behind its own.
Knows nothing of calls: they set where each copy reads and writes, and call the steps.

A copy by itself takes the host 9 µs and the device a gap; as a node of the graph it is 2 µs to set
where its addresses changed, and nothing where they did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pcgsvc.capture.sources import Composer, Step
from pcgsvc.cuda_driver import Copy

_MOST = 4
"""Copies before or behind an entry; more of them are made by one kernel sooner."""


@dataclass(frozen=True)
class CallCopies:
    """The steps of an entry with a call's copies in them."""

    steps: tuple[Step, ...]
    inputs: Sequence[Copy]
    """In the order of the program's inputs."""
    metadata: Sequence[Copy]
    """One, from page-locked memory of the host; none for programs that read no metadata."""
    results: Sequence[Copy]
    """In the order of the entry's results; none where calls do not copy them."""


def with_copies(
    steps: Sequence[tuple[Step, bool]],
    composer: Composer,
    inputs: Sequence[torch.Tensor],
    metadata: Sequence[tuple[torch.Tensor, torch.Tensor]],
    results: Sequence[torch.Tensor],
) -> CallCopies | None:
    """Return an entry's steps with copies in them; None where some copy cannot be a node.

    Args:
        steps: of an entry that is not stitched, and whether each is a segment.
        composer: joins segments and copies.
        inputs: the buffers' views of the entry's rows.
        metadata: a device tensor to whose start metadata is copied, and the host's, if any.
        results: of the entry, those that calls copy.

    Raises:
        DriverError: the device refuses to join them.
    """
    device = inputs[0].device if inputs else None
    if max(len(inputs), len(results)) > _MOST or not all(
        t.is_contiguous() and t.numel() and t.device == device and not t.is_complex()
        for t in [*inputs, *results]
    ):
        return None
    pairs = [*metadata, *((t, t) for t in [*inputs, *results])]
    copies = [copy for copy in (composer.copy(*pair) for pair in pairs) if copy is not None]
    if not pairs or len(copies) < len(pairs):
        return None
    behind = len(metadata) + len(inputs)
    middle = list(steps)
    first: list[Step | Copy] = [*copies[:behind]]
    last: list[Step | Copy] = [*copies[behind:]]
    if middle and middle[0][1]:
        first.append(middle.pop(0)[0])
    if middle and middle[-1][1]:
        last.insert(0, middle.pop()[0])
    ends = [first, last] if middle else [[*first, *last]]
    begin, *end = [
        partial(composer.compose(parts).replay, patched=False) for parts in ends if parts
    ]
    return CallCopies(
        steps=(begin, *(step for step, _ in middle), *end),
        metadata=copies[: len(metadata)],
        inputs=copies[len(metadata) : behind],
        results=copies[behind:],
    )
