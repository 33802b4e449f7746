"""One job of a comparison, and the report that it wrote.

In: a report as JSON types. Out: `Facts`, or a `ConfigError` that says what is wrong with it; of
several jobs, the settings in which they differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcgsvc.errors import ConfigError
from pcgsvc.program.keys import flatten


@dataclass(frozen=True, kw_only=True)
class Step:
    """One captured entry. Times are microseconds per step; None where the job took none."""

    mode: str
    size: int
    """Rows that it holds, in tokens."""
    step_us: float | None = None
    """Per step of a run back to back."""
    step_low_us: float | None = None
    """Of the fastest such run; None: the report does not tell."""
    step_high_us: float | None = None
    """Of the slowest."""
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
    host: str | None = None
    """Name of the machine that ran it; None: not known."""
    facts: Facts | None = None
    """None: it has no report."""

    @property
    def ok(self) -> bool:
        """Whether its figures can be relied on."""
        return self.status == "done"


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
    _check(report, _REPORT, "")
    steps: dict[tuple[str, int], dict[str, float]] = {}
    for row in report.get("verify", []):
        steps[row["mode"], row["size"]] = {}
    for row in report.get("bench", []):
        names = (*_TIMES, *(name for name in _SPREAD if name in row))
        steps[row["mode"], row["size"]] = {name: float(row[name]) for name in names}
    return Facts(
        report=report,
        steps=[Step(mode=mode, size=size, **steps[mode, size]) for mode, size in sorted(steps)],
    )


# ---- what is read of a report --------------------------------------------------------------------


def _count(value: Any) -> bool:
    return type(value) is int and value >= 1


_TEXT, _FLAG, _WHOLE, _NUMBER = (str,), (bool,), (int,), (int, float)
_TIMES = ("step_us", "host_us", "plain_us")
_SPREAD = ("step_low_us", "step_high_us")
_ENTRY = {"mode": _TEXT, "size": _count}
_REPORT: dict[str, Any] = {
    **dict.fromkeys(("pcgsvc", "torch", "device"), _TEXT),
    "host?": {"name": _TEXT},
    "config": {"capture?": {"uniform_query_len?": _count}},
    "mode": dict.fromkeys(("requested", "resolved", "decode", "mixed"), _TEXT),
    "partition": {
        "strategy": _TEXT,
        **dict.fromkeys(("num_regions", "num_boundaries", "num_unique_pieces"), _WHOLE),
    },
    "compile": {
        **dict.fromkeys(("compiler", "start"), _TEXT),
        **dict.fromkeys(("num_traces", "num_compiled", "num_loaded"), _WHOLE),
        "seconds": {"total": _NUMBER, "*": _NUMBER},
    },
    "graphs?": {
        "backend": _TEXT,
        **dict.fromkeys(("num_graphs", "pool_bytes", "device_bytes"), _WHOLE),
        **{"by_mode": {}, "sizes": [], "skipped": [{"size": _WHOLE, "reason": _TEXT}]},
    },
    "verify?": [{**_ENTRY, "ok": _FLAG, "max_rel_err": _NUMBER}],
    "bench?": [
        {
            **_ENTRY,
            **dict.fromkeys(_TIMES, _NUMBER),
            **dict.fromkeys((f"{name}?" for name in _SPREAD), _NUMBER),
        }
    ],
}
"""The form of what is read: the kinds that a value may be of, a test of it, a list of such things,
or names with the form of each. A name with `?` may be missing; `*` stands for every name."""


def _check(value: Any, form: Any, place: str) -> None:
    """Refuse a part of a report that does not have its form; `place` is its dotted name."""
    kinds = form if isinstance(form, tuple) else (type(form),)
    if not (form(value) if callable(form) else type(value) in kinds):
        raise ConfigError(f"it is no whole report: {place} is {value!r}.")
    if isinstance(form, list):
        for at, item in enumerate(value):
            for part in form:
                _check(item, part, f"{place}[{at}]")
    elif isinstance(form, dict):
        for name, part in form.items():
            for key in value if name == "*" else [name.removesuffix("?")]:
                inner = f"{place}.{key}".lstrip(".")
                if key in value:
                    _check(value[key], part, inner)
                elif not name.endswith("?"):
                    raise ConfigError(f"it is no whole report: {inner} is missing.")


# ---- settings in which jobs differ ---------------------------------------------------------------


def differing_overrides(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return, of each job's overrides, those that not all jobs have, as setting and value."""
    common = set(jobs[0]).intersection(*jobs) if jobs else set()
    parted = [[word.partition("=") for word in job if word not in common] for job in jobs]
    return [{key: value for key, _, value in job} for job in parted]


def differing_settings(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return, of each report, the resolved settings and the circumstances that not all share."""
    flat = []
    for report in reports:
        settings = {k: v for k, v in report["config"].items() if k not in _NO_DIFFERENCE}
        flat.append(
            flatten(settings) | {name: report[name] for name in ("pcgsvc", "torch", "device")}
        )
    names = sorted({name for one in flat for name in one})
    differing = [n for n in names if len({_written(one.get(n)) for one in flat}) > 1]
    return [{name: _written(one.get(name)) for name in differing} for one in flat]


_NO_DIFFERENCE = ("report", "sweep", "compare")
"""Settings and groups that do not change what is run."""


def _written(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
