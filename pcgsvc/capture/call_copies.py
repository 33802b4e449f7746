"""A call's copies inside an entry's graphs, where they cost no launches of their own.

In: a captured entry, the buffers that calls fill, and a composer. Out: steps of which the first
copies metadata and inputs in before its segment, and the last copies results out behind its own.
Knows nothing of calls: they set what is copied, and call the steps.

A copy by itself takes the host 9 µs and the device a gap. One kernel of the graph makes all copies
before the entry, and one all behind it: 2 µs to set where addresses changed, nothing where not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pcgsvc.capture import copy_kernel
from pcgsvc.capture.sources import Composer, Copying, Step
from pcgsvc.capture.stitch import Stitched
from pcgsvc.cuda_driver import Launch


@dataclass(frozen=True)
class CallCopies:
    """The steps of an entry with a call's copies in them."""

    steps: tuple[Step, ...]
    before: Copying
    """Inputs in the program's order, then metadata from page-locked memory of the host, if any."""
    has_metadata: bool
    behind: Copying | None
    """Results in the entry's order; None where calls do not copy them."""


def with_copies(
    steps: Sequence[tuple[Step, bool]],
    composer: Composer,
    inputs: Sequence[torch.Tensor],
    metadata: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> CallCopies | None:
    """Return an entry's steps with copies in them; None where they cannot make some copy.

    Args:
        steps: of an entry, and whether each is a segment; stitched ones make copies from now on.
        composer: joins segments and copies.
        inputs: the buffers' views of the entry's rows.
        metadata: a tensor to whose start metadata is copied, if any is.
        results: of the entry, those that calls copy.

    Raises:
        DriverError: the device refuses to join them.
    """
    device = inputs[0].device if inputs else None
    before = [*inputs, *metadata]
    if max(len(before), len(results)) > copy_kernel.MOST or not all(
        t.is_contiguous() and t.numel() and t.device == device and not t.is_complex()
        for t in [*inputs, *results]
    ):
        return None
    first, last = (_copying(composer, tensors) for tensors in (before, results))
    if first is None or (last is None and results):
        return None
    inner, head, tail = list(steps), None, None
    if inner and _takes_copies(*inner[0]):
        head = inner.pop(0)[0]
    if head is not None and not inner:
        made = [_enclosed(composer, first, head, last)]
    else:
        if last is not None and inner and _takes_copies(*inner[-1]):
            tail = inner.pop()[0]
        made = [_enclosed(composer, first, head, None), *(step for step, _ in inner)]
        made += [] if last is None else [_enclosed(composer, None, tail, last)]
    return CallCopies(tuple(made), before=first, has_metadata=bool(metadata), behind=last)


def _copying(composer: Composer, tensors: Sequence[torch.Tensor]) -> Copying | None:
    launch = composer.copy_launch(sum(t.nbytes for t in tensors)) if tensors else None
    return None if launch is None else Copying(launch)


def _takes_copies(step: Step, is_segment: bool) -> bool:
    return is_segment or isinstance(step, Stitched)


def _enclosed(
    composer: Composer, before: Copying | None, step: Step | None, behind: Copying | None
) -> Step:
    """Return a step with copies before and behind it; they alone, where it is none."""
    if isinstance(step, Stitched):
        step.enclose(before, behind)
        return step.run
    parts: list[Step | Launch] = [] if step is None else [step]
    if before is not None:
        parts.insert(0, before.launch)
    if behind is not None:
        parts.append(behind.launch)
    composed = composer.compose(parts)
    if before is not None:
        before.bind(composed.nodes[0])
    if behind is not None:
        behind.bind(composed.nodes[-1])
    return partial(composed.replay, patched=False)
