"""In what jobs differ that are compared.

In: the overrides of each, or its report. Out: per job, settings and their values as text. Knows
nothing of tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pcgsvc.cache.reports import flatten


def differing_overrides(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Return, of each job's overrides, those that not all jobs have, as setting and value."""
    common = set(jobs[0]).intersection(*jobs) if jobs else set()
    parted = [[word.partition("=") for word in job if word not in common] for job in jobs]
    return [{key: value for key, _, value in words} for words in parted]


def differing_settings(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return, of each report, the resolved settings and the circumstances that not all share."""
    flat = []
    for report in reports:
        settings = flatten(report["config"])
        facts = {name: report[name] for name in ("pcgsvc", "torch", "device")}
        flat.append(
            {k: v for k, v in settings.items() if k.partition(".")[0] not in _NO_DIFFERENCE} | facts
        )
    names = sorted({name for one in flat for name in one})
    differing = [n for n in names if len({_word(one.get(n)) for one in flat}) > 1]
    return [{name: _word(one.get(name)) for name in differing} for one in flat]


_NO_DIFFERENCE = ("report", "sweep", "compare")
"""Settings, or whole groups, that say nothing of what was run."""


def _word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
