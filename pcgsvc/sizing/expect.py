"""What given sizes will do with given traffic: padding and time, before anything is captured.

In: sizes, traffic, which modes serve it, and the cost of a step. Out: expected padding and time.
Follows `dispatch.DispatchTable` in array form; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pcgsvc.config import Config, Mode
from pcgsvc.ops.modes import fewest_rows, has_own_uniform, resolve_mode
from pcgsvc.ops.support import Support
from pcgsvc.sizing.cost import StepCost
from pcgsvc.sizing.optimum import Floats, Ints
from pcgsvc.sizing.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Service:
    """Which graphs serve which calls."""

    decode: Mode
    """Of uniform batches: `full`, `piecewise` or `none`."""
    mixed: Mode
    """Of all others."""
    query_len: int
    """Rows per request of a uniform batch."""
    max_reqs: int | None = None
    """Most requests of a captured batch; None: as many as the largest size has rows."""
    max_padding: int | None = None
    """How far calls are padded, as `capture.max_padding` has it; None: to any size."""

    @property
    def modes(self) -> list[Mode]:
        """The modes that are captured."""
        return [m for m in (Mode.FULL, Mode.PIECEWISE) if m in (self.decode, self.mixed)]

    @property
    def own_uniform(self) -> bool:
        """Whether uniform batches have entries of their own, at multiples of `query_len`."""
        return has_own_uniform(self.decode, self.mixed)

    def serves(self, uniform: bool, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which calls some size could serve."""
        mode = self.decode if uniform else self.mixed
        served = np.full(len(rows), mode is not Mode.NONE)
        if uniform and self.max_reqs is not None:
            served &= rows // self.query_len <= self.max_reqs
        return served


def service_of(config: Config, support: Support | None) -> Service:
    """Return what a config's mode captures.

    Args:
        config: its mode and `capture.uniform_query_len` count.
        support: of the boundaries; None: unknown before the model is traced, so the mode is taken
            as asked for.
    """
    resolution = resolve_mode(
        config.mode,
        Support.ALWAYS if support is None else support,  # NEVER is 0, so no `or`
        num_boundaries=1,
        uniform_query_len=config.capture.uniform_query_len,
        why=f"attention={config.attention.name}",
    )
    return Service(
        decode=resolution.decode,
        mixed=resolution.mixed,
        query_len=config.capture.uniform_query_len,
        max_reqs=config.attention.max_num_reqs,
        max_padding=config.capture.max_padding,
    )


def arrays(calls: Mapping[int, int]) -> tuple[Ints, Floats]:
    """Return row counts and their calls."""
    rows = np.fromiter(calls.keys(), dtype=np.int64, count=len(calls))
    return rows, np.fromiter(calls.values(), dtype=np.float64, count=len(calls))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What sizes do with traffic. All sums are over every call."""

    padding_share: float
    """Padding rows by all rows that run, as `runner.stats()` has it."""
    step_us: float
    """Mean time of a call."""
    uncovered: float
    """Calls that no graph serves."""


class Forecast:
    """Judges sizes for one traffic."""

    def __init__(self, traffic: Traffic, service: Service, cost: StepCost) -> None:
        self._service, self._cost = service, cost
        self._num_calls, self._num_rows = traffic.num_calls, traffic.num_rows
        self._parts = [
            (uniform, *arrays(calls))
            for uniform, calls in ((False, traffic.general), (True, traffic.uniform))
            if calls
        ]

    def of(self, sizes: Sequence[int]) -> Expected:
        """Return what `sizes` do. None at all: every call runs without a graph."""
        padded = time = uncovered = 0.0
        for uniform, rows, calls in self._parts:
            size, mode_full = self._sizes_of(uniform, rows, np.array(sorted(sizes), np.int64))
            served = size > 0
            uncovered += float(calls[~served].sum())
            padded += float((calls * (size - rows))[served].sum())
            time += float((calls * self._cost.plain.at(rows))[~served].sum())
            for mode, mask in ((Mode.FULL, mode_full), (Mode.PIECEWISE, served & ~mode_full)):
                if mask.any():
                    time += float((calls[mask] * self._cost.graphs[mode].at(size[mask])).sum())
        return Expected(
            padding_share=padded / (self._num_rows + padded),
            step_us=time / self._num_calls,
            uncovered=uncovered,
        )

    def _sizes_of(
        self, uniform: bool, rows: Ints, sizes: Ints
    ) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the size of the entry that serves each call (0: none), and whether it is full."""
        service = self._service
        found = np.zeros(len(rows), dtype=np.int64)
        if service.mixed is not Mode.NONE:
            found = self._next_size(rows, sizes)
        full = (found > 0) & (service.mixed is Mode.FULL)
        if uniform and service.own_uniform:
            own = self._next_size(rows, sizes[sizes % service.query_len == 0])
            found, full = np.where(own > 0, own, found), full | (own > 0)
        served = service.serves(uniform, rows)
        return np.where(served, found, 0), full & served

    def _next_size(self, rows: Ints, sizes: Ints) -> Ints:
        """Return the smallest size that holds each row count, or 0: there is none, or too far."""
        limit, at = self._service.max_padding, np.searchsorted(sizes, rows)
        fewest = [0 if limit is None else fewest_rows(size, limit) for size in sizes.tolist()]
        return np.where(rows >= np.append(fewest, 0)[at], np.append(sizes, 0)[at], 0)
