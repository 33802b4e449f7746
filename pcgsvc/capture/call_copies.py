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
from pcgsvc.capture.sources import Composer, Node, Step
from pcgsvc.cuda_driver import Launch


class Copying:
    """A kernel of a graph that copies pieces of memory; see `Composer.copy_launch`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._words: tuple[int, ...] | None = None

    def set(self, words: tuple[int, ...]) -> None:
        """Have the next replay copy pieces of memory: target, source and bytes of each.

        They are as many at each call; those of no bytes are left out.

        Raises:
            DriverError: the driver refuses; it is set anew next time.
        """
        if words != self._words:
            self._words = None
            self._node.change(None, self._node.pack_words(words))
            self._words = words


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
        steps: of an entry that is not stitched, and whether each is a segment.
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
    launches = [
        composer.copy_launch(sum(t.nbytes for t in copied))
        for copied in (before, results)
        if copied
    ]
    middle = list(steps)
    first: list[Step | Launch] = [launch for launch in launches[:1] if launch is not None]
    last: list[Step | Launch] = [launch for launch in launches[1:] if launch is not None]
    if not first:
        return None
    if middle and middle[0][1]:
        first.append(middle.pop(0)[0])
    if middle and middle[-1][1]:
        last.insert(0, middle.pop()[0])
    ends = [first, last] if middle else [[*first, *last]]
    made = [composer.compose(parts) for parts in ends if parts]
    begin, *end = [partial(composed.replay, patched=False) for composed in made]
    nodes = [Copying(node) for composed in made for node in composed.nodes]
    return CallCopies(
        steps=(begin, *(step for step, _ in middle), *end),
        before=nodes[0],
        has_metadata=bool(metadata),
        behind=nodes[1] if results else None,
    )
