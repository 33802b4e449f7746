"""Hearing of long phases.

In: what the stages report. Out: the protocol, and a listener that is silent. Knows nothing of
terminals.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears of long phases."""

    def start(self, phase: str, total: int) -> None:
        """A phase of `total` units begins."""

    def advance(self) -> None:
        """One unit is done."""

    def stop(self) -> None:
        """The phase is over."""


class Silent:
    """Progress that nobody watches."""

    def start(self, phase: str, total: int) -> None:
        """See `Progress.start`."""

    def advance(self) -> None:
        """See `Progress.advance`."""

    def stop(self) -> None:
        """See `Progress.stop`."""
