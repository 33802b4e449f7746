"""Long sequences with repetitions, folded so that a person can read them.

In: a sequence of keys. Out: stretches, each with how often it repeats. Knows nothing of pieces.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_LONGEST = 16
"""Items of the longest pattern that is looked for: some models alternate between kinds of layer."""


@dataclass(frozen=True)
class Stretch:
    """`length` items from `first` on, `repeat` times in a row."""

    first: int
    length: int
    repeat: int


def fold(keys: Sequence[Hashable]) -> list[Stretch]:
    """Return stretches that cover `keys` in order; what does not repeat is a stretch of its own.

    At each place the pattern is taken that covers most, of equals the shortest.
    """
    found: list[Stretch] = []
    at = single = 0
    while at < len(keys):
        length, repeat = max(
            ((n, _repeats(keys, at, n)) for n in range(1, _LONGEST + 1)),
            key=lambda pair: (pair[0] * pair[1] if pair[1] > 1 else 1, -pair[0]),
        )
        if repeat == 1:
            at += 1
            continue
        if single < at:
            found.append(Stretch(single, at - single, 1))
        found.append(Stretch(at, length, repeat))
        at += length * repeat
        single = at
    if single < at:
        found.append(Stretch(single, at - single, 1))
    return found


def _repeats(keys: Sequence[Hashable], at: int, length: int) -> int:
    pattern, count = keys[at : at + length], 1
    while (
        keys[at + count * length : at + (count + 1) * length] == pattern and len(pattern) == length
    ):
        count += 1
    return count
