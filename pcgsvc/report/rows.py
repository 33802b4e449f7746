"""One job of a comparison, and the report that it wrote.

In: a report as JSON types. Out: `Facts`, or a `ConfigError` that says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcgsvc.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Step:
    """One captured entry. Times are microseconds per step; None where the job took none."""

    mode: str
    size: int
    """Rows that it holds, in tokens."""
    step_us: float | None = None
    """Per step of a run back to back."""
    host_us: float | None = None
    """Until everything is enqueued."""
    plain_us: float | None = None
    """The module itself, without graphs, on the same inputs."""

    @property
    def speedup(self) -> float | None:
        """How many times faster than the module; None where either was not timed."""
        return self.plain_us / self.step_us if self.plain_us and self.step_us else None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a report says of the job that wrote it."""

    report: Mapping[str, Any]
    """All of it, schema 1."""
    steps: list[Step]
    """Every captured entry, by mode and size."""

    @property
    def graphs(self) -> Mapping[str, Any] | None:
        """The report's `graphs`; None: the job was not meant to capture any."""
        return self.report.get("graphs")

    @property
    def recorded(self) -> bool:
        """Whether its graphs are the CPU's recordings."""
        return self.graphs is not None and self.graphs["backend"] == "recorded"

    @property
    def memory_bytes(self) -> int | None:
        """What the graphs hold: the larger of their pool and the device memory they took."""
        graphs = self.graphs
        return None if graphs is None else max(graphs["pool_bytes"], graphs["device_bytes"])

    @property
    def verified(self) -> tuple[int, int] | None:
        """How many entries were found right, of how many; None: none was compared."""
        rows = self.report.get("verify")
        return None if rows is None else (sum(row["ok"] for row in rows), len(rows))

    @property
    def query_len(self) -> int:
        """Tokens per request in a uniform batch."""
        return int(self.report["config"].get("capture", {}).get("uniform_query_len", 1))

    @property
    def subject(self) -> str:
        """What was run, on what: only jobs in which this is the same can be compared by time."""
        report, config = self.report, self.report["config"]
        model, attention = config.get("model"), config.get("attention")
        return json.dumps(
            [report["device"], config.get("dtype"), model, attention and attention.get("name")],
            sort_keys=True,
        )


@dataclass(kw_only=True)
class Row:
    """One job among those that are compared."""

    name: str
    """Its number in a sweep, or its report's path."""
    differs: dict[str, str]
    """Settings in which it differs from the others."""
    status: str
    """`done`, `failed`, `interrupted` or `not run`."""
    reason: str | None = None
    """What went wrong."""
    overrides: list[str] = field(default_factory=list)
    place: str | None = None
    """Path of its report; None: it wrote none."""
    output: str | None = None
    """Path of what it printed; None: not kept."""
    wall_s: float | None = None
    """Seconds from start to end of its process."""
    peak_host_bytes: int | None = None
    facts: Facts | None = None
    """None: it has no report."""

    @property
    def ok(self) -> bool:
        """Whether its figures can be relied on."""
        return self.status == "done"


_TIMES = ("step_us", "host_us", "plain_us")
_Kinds = type | tuple[type, ...]
_PLACES: dict[_Kinds, tuple[str, ...]] = {
    str: (
        *("pcgsvc", "torch", "device"),
        *("mode.requested", "mode.resolved", "mode.decode", "mode.mixed"),
        *("partition.strategy", "compile.compiler", "compile.start", "graphs.backend"),
    ),
    int: (
        *("partition.num_regions", "partition.num_boundaries", "partition.num_unique_pieces"),
        *("compile.num_traces", "compile.num_compiled", "compile.num_loaded"),
        *("graphs.num_graphs", "graphs.pool_bytes", "graphs.device_bytes"),
    ),
    dict: ("config", "compile.seconds", "graphs.by_mode"),
    list: ("graphs.sizes", "graphs.skipped"),
    (int, float): ("compile.seconds.total",),
}
"""What is read of a report, by type; `graphs` may be missing as a whole."""


def facts_of(report: Any) -> Facts:
    """Read a report.

    Raises:
        ConfigError: it is no whole report of schema 1; the message says what is wrong with it.
    """
    if not isinstance(report, Mapping):
        raise ConfigError(f"it holds {type(report).__name__}, and a report is a JSON object.")
    if report.get("schema") != 1:
        raise ConfigError(
            f"its schema is {report.get('schema')!r}, and this version of pcgsvc reads schema 1."
        )
    for kinds, paths in _PLACES.items():
        for path in paths:
            if "graphs" in report or not path.startswith("graphs."):
                _need(report, path, kinds)
    _check_parts(report)
    steps: dict[tuple[str, int], dict[str, float]] = {}
    for row in _entries(report, "verify", ("mode", "size", "ok", "max_rel_err")):
        steps[row["mode"], row["size"]] = {}
    for row in _entries(report, "bench", ("mode", "size", *_TIMES)):
        steps[row["mode"], row["size"]] = {name: float(row[name]) for name in _TIMES}
    return Facts(
        report=report,
        steps=[Step(mode=mode, size=size, **steps[mode, size]) for mode, size in sorted(steps)],
    )


def _need(report: Mapping[str, Any], path: str, kinds: _Kinds) -> None:
    value: Any = report
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ConfigError(f"it is no whole report: {path} is missing.")
        value = value[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"it is no whole report: {path} is {value!r}.")


def _check_parts(report: Mapping[str, Any]) -> None:
    """Refuse parts whose insides are not what is read of them."""
    capture = report["config"].get("capture", {})
    query_len = capture.get("uniform_query_len", 1) if isinstance(capture, Mapping) else None
    skipped = report.get("graphs", {}).get("skipped", [])
    whole = {
        "config.capture": type(query_len) is int and query_len >= 1,
        "compile.seconds": all(map(_is_number, report["compile"]["seconds"].values())),
        "graphs.skipped": all(
            isinstance(s, Mapping) and {"size", "reason"} <= {*s} for s in skipped
        ),
    }
    for path, fits in whole.items():
        if not fits:
            raise ConfigError(f"it is no whole report: {path} is not as pcgsvc writes it.")


def _entries(report: Mapping[str, Any], name: str, keys: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the entries of a list that may be missing, each with these keys."""
    rows = report.get(name, [])
    whole = isinstance(rows, list) and all(
        isinstance(row, Mapping) and all(_fits(key, row.get(key)) for key in keys) for row in rows
    )
    if not whole:
        raise ConfigError(
            f"it is no whole report: every entry of {name} has {', '.join(keys)}, and not all of "
            "these do."
        )
    return list(rows)


def _fits(key: str, value: Any) -> bool:
    if key == "size":
        return type(value) is int and value >= 1
    kinds = {"mode": str, "ok": bool}
    return isinstance(value, kinds[key]) if key in kinds else _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
