"""Which mode serves what: the requested mode, resolved against what the boundaries support.

In: a mode and a support level. Out: a `Resolution` with its reasons. Knows nothing of programs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from pcgsvc.config import Mode
from pcgsvc.ops.support import Support

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL


_HALVES: dict[Mode, tuple[Mode, Mode]] = {
    Mode.NONE: (NONE, NONE),
    Mode.PIECEWISE: (PIECEWISE, PIECEWISE),
    Mode.FULL: (FULL, FULL),
    Mode.FULL_DECODE_ONLY: (FULL, NONE),
    Mode.FULL_AND_PIECEWISE: (FULL, PIECEWISE),
}


@dataclass(kw_only=True)
class Resolution:
    """What became of the requested mode."""

    requested: Mode
    resolved: Mode
    reasons: list[str] = field(default_factory=list)

    @property
    def decode(self) -> Mode:
        """What serves uniform decode batches."""
        return _HALVES[self.resolved][0]

    @property
    def mixed(self) -> Mode:
        """What serves all other batches."""
        return _HALVES[self.resolved][1]

    @property
    def own_uniform(self) -> bool:
        """Whether uniform batches have entries of their own; see `has_own_uniform`."""
        return has_own_uniform(self.decode, self.mixed)


def has_own_uniform(decode: Mode, mixed: Mode) -> bool:
    """Whether uniform batches have entries of their own, at sizes that divide into requests.

    They do where only they run in full graphs; else the entries for any batch serve them as well.
    """
    return decode is FULL and mixed is not FULL


NEAR_ROWS = 256
"""Padding rows that a call may always have, whatever share of them is its own."""


def fewest_rows(size: int, max_padding: int) -> int:
    """Return the fewest rows of a call that a size serves.

    `max_padding` is `capture.max_padding`: a call of fewer rows than these would be padded to more
    than so many times its rows, and by more than `NEAR_ROWS`.
    """
    return max(1, min(-(-size // max_padding), size - NEAR_ROWS))


def gaps(sizes: Iterable[int], max_padding: int) -> list[tuple[int, int, int]]:
    """Return the calls that no size serves since the next is too far: from, to, and that size."""
    stretches = itertools.pairwise([0, *sorted(sizes)])
    found = [(below + 1, fewest_rows(size, max_padding) - 1, size) for below, size in stretches]
    return [gap for gap in found if gap[0] <= gap[1]]


def resolve_mode(
    requested: Mode, support: Support, *, num_boundaries: int, uniform_query_len: int, why: str
) -> Resolution:
    """Turn the requested mode into one that the boundaries can serve.

    Args:
        requested: as configured.
        support: the least support of the program's splitting ops.
        num_boundaries: boundaries found in the graph.
        uniform_query_len: tokens per request in a uniform batch.
        why: which op or backend `support` comes from, for the reasons.
    """
    out = Resolution(requested=requested, resolved=requested)
    if num_boundaries == 0:
        if requested in (PIECEWISE, Mode.FULL_AND_PIECEWISE):
            out.resolved = FULL
            out.reasons.append(
                f"{requested.value} was asked for, but no splitting op was found in the graph: "
                "everything in it can be captured, so it runs as full"
            )
        return out
    if requested in (NONE, PIECEWISE) or support is Support.ALWAYS:
        return out
    level = support
    if support is Support.UNIFORM_SINGLE_TOKEN_DECODE and uniform_query_len > 1:
        level = Support.NEVER
        why += f" and capture.uniform_query_len is {uniform_query_len}, not 1"
    if level is Support.NEVER:
        out.resolved = PIECEWISE
        out.reasons.append(
            f"{requested.value} was asked for, but {why} supports no full graphs (support "
            f"{support.name}): piecewise serves every batch"
        )
    elif requested is FULL:
        out.resolved = Mode.FULL_AND_PIECEWISE
        out.reasons.append(
            f"full was asked for, but {why} supports full graphs for uniform batches only (support "
            f"{support.name}): full serves uniform decode, piecewise the rest"
        )
    return out
