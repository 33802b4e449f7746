"""What a step costs by size: measured by a report's bench rows, modelled, or its rows.

In: a report, or two numbers. Out: `StepCost`: microseconds and bytes by size. Knows nothing of
traffic.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pcgsvc.config import Mode
from pcgsvc.errors import ConfigError
from pcgsvc.sizing.optimum import Floats


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Microseconds by row count: straight lines between points, never falling."""

    sizes: Sequence[int]
    """Ascending, two or more."""
    times: Sequence[float]
    """One per size, not descending."""

    def at(self, rows: npt.ArrayLike) -> Floats:
        """Return the time of each row count.

        Beyond the last point it rises like the last stretch or like the whole curve, whichever is
        steeper; before the first one, the time is the first one's.
        """
        x = np.asarray(rows, dtype=np.float64)
        size, time = self.sizes[-1], self.times[-1]
        slope = max((time - self.times[at]) / (size - self.sizes[at]) for at in (0, -2))
        out: Floats = np.interp(x, self.sizes, self.times) + np.maximum(x - size, 0.0) * slope
        return out


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that captured graphs take, scaled from one report."""

    backend: str
    """`cuda` or `recorded`."""
    sizes: Sequence[int]
    """That were captured."""
    pool_bytes: int
    device_bytes: int
    """0 where there is no device."""
    num_graphs: int

    def at(self, sizes: Sequence[int]) -> int:
        """Return an estimate for other sizes of the same model and mode.

        One CUDA pool serves all sizes, captured largest first, so it is as large as the largest
        needs; the driver's memory grows with the number of graphs. Recordings share nothing.
        """
        if self.backend != "cuda":
            return round(self.pool_bytes * sum(sizes) / sum(self.sizes))
        driver = max(0, self.device_bytes - self.pool_bytes)
        pool = self.pool_bytes * max(sizes) / max(self.sizes)
        return round(pool + driver * len(sizes) / len(self.sizes))

    def graphs(self, sizes: Sequence[int]) -> int:
        """Return how many graphs other sizes make."""
        return round(self.num_graphs * len(sizes) / len(self.sizes))


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Microseconds of a step, by what runs it and at which size."""

    words: str
    """Where the figures come from."""
    graphs: Mapping[Mode, Curve]
    """Of a replay, by `Mode.FULL` and `Mode.PIECEWISE`."""
    plain: Curve
    """Of a call that no graph serves."""
    unit: str = "us"
    """Of all figures: `us`, or `rows` while no time is known."""
    memory: Memory | None = None
    measured: tuple[int, int] | None = None
    """Smallest and largest measured size; None: modelled."""
    noise: float = 0.0
    """How far measured times were moved, at most, so that none falls with the size; a share."""


def modelled(fixed_us: float, row_us: float) -> StepCost:
    """Return a cost of `fixed_us` per step and `row_us` per row, whatever runs it."""
    line = Curve(sizes=[0, 1], times=[fixed_us, fixed_us + row_us])
    return StepCost(
        words=f"modelled: {fixed_us:g} us per step and {row_us:g} us per row",
        graphs={Mode.FULL: line, Mode.PIECEWISE: line},
        plain=line,
    )


def rows_only() -> StepCost:
    """Return a cost of one per row, where no time is known."""
    words = "rows, no times; sizing.cost=report.json, the report of a run, measures them"
    return dataclasses.replace(modelled(0.0, 1.0), words=words, unit="rows")


def measured(path: str | Path, modes: Iterable[Mode]) -> StepCost:
    """Return the cost that a report's bench rows give.

    Args:
        path: of a report of `job=run` with timings.
        modes: what serves the traffic, of `Mode.FULL` and `Mode.PIECEWISE`.

    Raises:
        ConfigError: it is no such report, or has fewer than two sizes of a mode that is needed.
    """
    report = read_report(path)
    bench = report.get("bench") or []
    if not bench:
        raise ConfigError(
            f"sizing.cost: '{path}' has no bench rows; a report of job=run with bench.enabled=true "
            "and at least two capture sizes is needed."
        )
    by_mode: dict[str, dict[int, float]] = {}
    plain: dict[int, list[float]] = {}
    for at, row in enumerate(bench):
        size, step = _figure(path, at, row, "size"), _figure(path, at, row, "step_us")
        by_mode.setdefault(str(row.get("mode")), {})[int(size)] = step
        plain.setdefault(int(size), []).append(_figure(path, at, row, "plain_us"))
    graphs, noise = {}, 0.0
    for mode in modes:
        found = by_mode.get(mode.value, {})
        if len(found) < 2:
            there = ", ".join(f"{len(v)} of {k}" for k, v in sorted(by_mode.items()))
            raise ConfigError(
                f"sizing.cost: '{path}' has bench rows of {there}; two sizes or more of "
                f"{mode.value} are needed, since mode={mode.value} serves some of the traffic."
            )
        graphs[mode] = _rising(found)
        curve = graphs[mode]
        moved = [abs(t / found[s] - 1) for s, t in zip(curve.sizes, curve.times, strict=True)]
        noise = max([noise, *moved])
    return StepCost(
        words=f"measured by {path} ({report.get('device', 'unknown device')}), sizes "
        f"{min(plain)} to {max(plain)}",
        graphs=graphs,
        plain=_rising({size: sum(times) / len(times) for size, times in plain.items()}),
        memory=_memory(path, report.get("graphs")),
        measured=(min(plain), max(plain)),
        noise=noise,
    )


def read_report(path: str | Path) -> dict[str, Any]:
    """Read a report of schema 1.

    Raises:
        ConfigError: the file cannot be read, or is of another form.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"sizing.cost: '{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sizing.cost: '{path}' is no JSON: {error}.") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if not isinstance(report, dict) or schema != 1:
        raise ConfigError(
            f"sizing.cost: '{path}' has schema {schema!r}; a report.json of schema 1 is needed."
        )
    return report


def _figure(path: str | Path, at: int, row: Any, name: str) -> float:
    value: Any = row.get(name) if isinstance(row, dict) else None
    if type(value) in (int, float) and math.isfinite(value) and value > 0:
        return float(value)
    raise ConfigError(
        f"sizing.cost: '{path}', bench[{at}].{name}: got {value!r}, a number above 0 is needed."
    )


def _rising(times: Mapping[int, float]) -> Curve:
    """Return the nearest curve (least squares) that never falls.

    More rows never take less work, so a fall is noise of the measurement; and the optimiser's proof
    needs a cost that does not fall. Neighbours that fall are pooled at their mean.
    """
    sizes = sorted(times)
    pools: list[tuple[float, int]] = []
    for size in sizes:
        mean, count = times[size], 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean = (before * many + mean * count) / (many + count)
            count += many
        pools.append((mean, count))
    flat = [mean for mean, count in pools for _ in range(count)]
    if len(sizes) == 1:  # a plain time of one size only: taken as constant
        sizes, flat = [0, *sizes], [flat[0], *flat]
    return Curve(sizes=sizes, times=flat)


def _memory(path: str | Path, graphs: Any) -> Memory | None:
    if not isinstance(graphs, dict) or not graphs.get("sizes"):
        return None
    try:
        return Memory(
            backend=str(graphs["backend"]),
            sizes=[int(size) for size in graphs["sizes"]],
            pool_bytes=int(graphs["pool_bytes"]),
            device_bytes=int(graphs["device_bytes"]),
            num_graphs=int(graphs["num_graphs"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise broken(path, "graphs", error) from error


def broken(path: str | Path, part: str, error: Exception) -> ConfigError:
    """Return what to say of a report that lacks what its schema promises."""
    return ConfigError(
        f"sizing.cost: '{path}', {part}: {type(error).__name__}: {error}; the report is incomplete."
    )
