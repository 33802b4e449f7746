"""Long sequences with repetitions, folded so that a person can read them.

In: a sequence of keys. Out: stretches, each with how often it repeats.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

_LONGEST = 16
"""Length of the longest pattern that is looked for: models may alternate between kinds of layer."""


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
    at = 0
    while at < len(keys):
        patterns = [(n, _repeats(keys, at, n)) for n in range(1, _LONGEST + 1)]
        length, repeat = max(patterns, key=lambda p: (p[0] * p[1] if p[1] > 1 else 1, -p[0]))
        if repeat == 1 and found and found[-1].repeat == 1:
            found[-1] = replace(found[-1], length=found[-1].length + 1)
        else:
            found.append(Stretch(at, length, repeat))
        at += length * repeat
    return found


def _repeats(keys: Sequence[Hashable], at: int, length: int) -> int:
    pattern, count = keys[at : at + length], 1
    while keys[at + count * length :][:length] == pattern:
        count += 1
    return count
