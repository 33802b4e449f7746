"""Traffic: how many calls of which row count there are.

In: counts per (row count, uniform or not). Out: `Traffic`, checked. Knows nothing of files, graphs
or costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcgsvc.config import SchedulerConfig, to_dict
from pcgsvc.errors import ConfigError

MAX_TOKENS = 2**31 - 1
"""Rows of one call: the step metadata is int32."""
MAX_ROWS = 2**53
"""Rows of all calls together: up to here a float64 holds every sum exactly."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The requests of a trace, and the steps that the simulated scheduler made of them."""

    form: str
    """Whose trace it is."""
    num_requests: int
    left_out: int
    """Requests without output tokens, which failed."""
    prompt_tokens: int
    output_tokens: int
    scheduler: SchedulerConfig
    """As simulated: `arrivals` is decided."""
    kinds: Mapping[str, Mapping[int, int]]
    """Steps by row count, ascending, of `decode`, `prefill` and `mixed` steps."""
    max_requests: int
    """Most requests of a step."""
    notes: list[str]
    """What was not simulated."""

    def as_json(self) -> dict[str, Any]:
        """Return JSON types; of each kind of steps their number and row counts."""
        return {
            "form": self.form,
            "requests": self.num_requests,
            "left_out": self.left_out,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "scheduler": to_dict(self.scheduler),
            "steps": {
                kind: {
                    "count": sum(calls.values()),
                    "rows": sum(rows * count for rows, count in calls.items()),
                    "smallest": min(calls, default=0),
                    "largest": max(calls, default=0),
                }
                for kind, calls in self.kinds.items()
            },
            "max_requests": self.max_requests,
        }


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Calls by row count. Both mappings are ascending in it."""

    source: str
    """The file it comes from, for messages."""
    general: Mapping[int, int]
    """Calls by row count, of batches that are no uniform decode batches."""
    uniform: Mapping[int, int]
    """Calls by row count, of batches whose requests have `capture.uniform_query_len` rows each."""
    simulation: Simulation | None = None
    """What the calls come from; None: a file of calls."""

    @property
    def num_calls(self) -> int:
        """Calls in all."""
        return sum(self.general.values()) + sum(self.uniform.values())

    @property
    def num_rows(self) -> int:
        """True rows of all calls together."""
        return sum(n * c for part in (self.general, self.uniform) for n, c in part.items())

    @property
    def distinct(self) -> list[int]:
        """The row counts there are, ascending."""
        return sorted({*self.general, *self.uniform})

    def as_dispatched(self, query_len: int) -> Traffic:
        """Return the traffic with each call counted as what dispatch takes it for.

        A call of one row is one request of one token: with `query_len` 1 it is a uniform batch,
        whatever the file says.

        Raises:
            ConfigError: uniform calls whose row count is no multiple of `query_len`.
        """
        for rows in self.uniform:
            if rows % query_len:
                raise ConfigError(
                    f"traffic: '{self.source}' has uniform calls of {rows} rows, which is no "
                    f"multiple of capture.uniform_query_len={query_len}; correct the file, or set "
                    "capture.uniform_query_len to the tokens per request of its uniform batches."
                )
        if query_len != 1 or 1 not in self.general:
            return self
        general, uniform = dict(self.general), dict(self.uniform)
        uniform[1] = uniform.get(1, 0) + general.pop(1)
        return dataclasses.replace(self, general=general, uniform=dict(sorted(uniform.items())))


def make_traffic(source: str, calls: Mapping[tuple[int, bool], int]) -> Traffic:
    """Return the traffic of counts by (row count, uniform).

    Raises:
        ConfigError: there are no calls, or more rows than can be counted.
    """
    if not calls:
        raise ConfigError(f"traffic: '{source}' holds no calls; one row per call is needed.")
    parts: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for (rows, uniform), count in sorted(calls.items()):
        parts[uniform][rows] = count
    traffic = Traffic(source=source, general=parts[False], uniform=parts[True])
    if traffic.num_rows > MAX_ROWS:
        raise ConfigError(
            f"traffic: '{source}' holds {traffic.num_rows} rows in all, at most {MAX_ROWS} can be "
            "counted; divide its counts by a common factor."
        )
    return traffic
