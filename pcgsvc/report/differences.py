"""Settings in which compared jobs differ.

In: the overrides of each, or its report. Out: per job, settings and their values as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pcgsvc.program.keys import flatten


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
