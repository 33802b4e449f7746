"""Everything that can go wrong, as one tree.

    PcgError
    ├── ConfigError        a setting is wrong; nothing was built           (exit code 2)
    ├── TraceError         the model cannot be traced whole
    │   └── ForwardError   the model's own forward failed; its exception is the `__cause__`
    ├── SplitError         the traced graph cannot be cut as asked
    ├── CompileError       a piece cannot be compiled or written down
    ├── CaptureError       a capture failed, or something forbidden happened inside one
    │   └── HostReadError  host-side step metadata was read inside a captured segment
    ├── BatchError         a call's inputs do not fit the runner
    ├── UncoveredError     a call that no captured graph serves, where that was asked to be an error
    ├── StaleAddressError  memory that a graph was captured on has been replaced
    ├── StateError         a state dict does not fit the runner's module; nothing was written
    ├── PeerError          another process that runs the model failed, is gone, or does otherwise
    ├── CacheError         the disk cache was asked for something that it cannot do
    └── VerifyError        a replay differs from plain execution

A message says what is wrong with which setting or operator, what was got, what there is, and what
to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PcgError(Exception):
    """Base of all errors that pcgsvc raises on purpose."""


class ConfigError(PcgError):
    """A setting is wrong: it is unknown, of the wrong kind, out of range, or cannot be served."""


class TraceError(PcgError):
    """The model cannot be traced into one graph."""


class ForwardError(TraceError):
    """The forward failed when it was run plainly, before anything was traced or compiled.

    `__cause__`: the exception that it raised.
    """


class SplitError(PcgError):
    """The traced graph cannot be cut at the splitting ops that were asked for."""


class CompileError(PcgError):
    """A piece cannot be compiled, or has no form that can be written down."""


class CaptureError(PcgError):
    """A capture failed, or an operation was met that a captured segment must not hold."""


class HostReadError(CaptureError):
    """Host-side step metadata was read while a segment is captured; it would be frozen."""


class BatchError(PcgError, ValueError):
    """The inputs of a call do not fit the runner; its buffers were left untouched."""


class UncoveredError(PcgError):
    """No captured graph serves the call and `on_uncovered=error` or `strict=true` is set."""


class StaleAddressError(PcgError):
    """Memory that a graph was captured on has been replaced; replaying would read old data."""


class StateError(PcgError):
    """A state dict does not fit the module; nothing was written."""


class PeerError(PcgError):
    """Another of the processes that run one model failed, is gone, or does something else."""


class CacheError(PcgError):
    """The disk cache cannot do what was asked, or is not safe to use."""


class VerifyError(PcgError):
    """A replay does not give what plain execution gives.

    `report`: the report of the build that it ended, with the rows of `verify`.
    """

    def __init__(self, message: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.report = report


def near(name: str, choices: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest of `choices`, or a full stop."""
    found = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean {found[0]!r}?" if found else "."
