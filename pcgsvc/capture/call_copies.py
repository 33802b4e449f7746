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
from pcgsvc.forward.staging import Copied


@dataclass(frozen=True)
class CallCopies:
    """The steps of an entry with a call's copies in them."""

    steps: tuple[Step, ...]
    before: Copying
    """Inputs in the program's order, then metadata from page-locked memory of the host, if any."""
    has_metadata: bool
    behind: Copying | None
    """Results in the entry's order; None where calls do not copy them."""

    def of_rows(
        self, targets: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> RowCopies | None:
        """Return the copies of calls of one row count; None where some are of no one piece."""
        whole = all(tensor.is_contiguous() for tensor in [*targets, *results])
        return RowCopies(self, targets, results) if whole else None


class RowCopies:
    """The copies of calls of one row count as parts of an entry's graphs; used under the lock.

    Args:
        made: the entry's.
        targets: true rows of the input buffers, in one piece each.
        results: true rows of the entry's results, likewise.
    """

    def __init__(
        self,
        made: CallCopies,
        targets: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        self.steps, self.has_metadata = made.steps, made.has_metadata
        self._made, self._device = made, targets[0].get_device()
        self._inputs = [(t.data_ptr(), t.nbytes) for t in targets]
        self._results = [(t, t.data_ptr(), t.nbytes) for t in results]

    def take(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether inputs are plain memory of the device, in one piece each."""
        for value in values:
            if (
                type(value) is not torch.Tensor
                or not value.is_contiguous()
                or value.get_device() != self._device
                or value.is_neg()
                or not value.data_ptr()
            ):
                return False
        return True

    def set(self, values: Sequence[torch.Tensor], metadata: Copied | None) -> list[torch.Tensor]:
        """Have the next replay copy these inputs, and metadata.

        Args:
            values: that `take` accepts.
            metadata: target, source and bytes of what is staged; None: nothing is.

        Returns:
            Memory that the replay copies its results to, the caller's own; none where it does not.

        Raises:
            DriverError: the driver refuses.
        """
        words: list[int] = []
        for (target, size), value in zip(self._inputs, values, strict=True):
            words += (target, value.data_ptr(), size)
        if self.has_metadata:
            words += metadata or (0, 0, 0)
        self._made.before.set(tuple(words))
        behind = self._made.behind
        if behind is None:
            return []
        words, made = [], []
        for result, source, size in self._results:
            made.append(new := torch.empty_like(result))
            words += (new.data_ptr(), source, size)
        behind.set(tuple(words))
        return made


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
        t.is_contiguous() and t.numel() and t.device == device for t in [*inputs, *results]
    ):
        return None
    if any(t.is_complex() or t.is_neg() for t in [*inputs, *results]):
        return None  # bytes of it may stand for others
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
    for copying, node in Copying.ends(composed, before, behind):
        copying.bind(composed, node)
    return partial(composed.replay, patched=False)
