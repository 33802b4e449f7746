"""Reports of earlier jobs, for a comparison.

In: paths. Out: rows, or a `ConfigError` that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pcgsvc.errors import ConfigError
from pcgsvc.report.rows import Facts, Row, differing_settings, facts_of

SETTING = "compare.reports"


def read_reports(paths: Sequence[str]) -> list[Row]:
    """Read reports; a folder stands for every `report.json` below it, by natural order.

    Of a folder, reports of `job=doctor` and `job=verify` are left out: they are of no one build.

    Returns:
        A row per report, numbered in their order.

    Raises:
        ConfigError: a path is missing, is listed twice, or is no whole report of schema 1.
    """
    if not paths:
        raise ConfigError(
            f"{SETTING}: got [], paths of reports are needed, such as "
            f"{SETTING}='[a.json,multirun/2026-01-31]'."
        )
    found: list[Path] = []
    for word in paths:
        for path in _files(word):
            if any(path.samefile(other) for other in found):
                raise ConfigError(f"{SETTING}: '{path}' is listed twice; name it once.")
            found.append(path)
    facts = [_read(path) for path in found]
    differs = differing_settings([one.report for one in facts])
    rows = []
    for at, (path, one) in enumerate(zip(found, facts, strict=True)):
        wrong = one.verified is not None and one.verified[0] < one.verified[1]
        row = Row(
            name=str(at),
            differs=differs[at],
            status="failed" if wrong else "done",
            reason="its replay differs from plain execution" if wrong else None,
            place=str(path),
            host=one.report.get("host", {}).get("name"),
            facts=one,
        )
        rows.append(row)
    return rows


def _files(word: str) -> list[Path]:
    path = Path(word)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{SETTING}: '{word}' does not exist.")
    files = [p for p in path.rglob("report.json") if p.is_file() and not _is_of_no_build(p)]
    if not files:
        raise ConfigError(f"{SETTING}: there is no report.json in '{word}' or below it.")
    return sorted(files, key=_natural)


def _is_of_no_build(path: Path) -> bool:
    """Whether a report is of no build or of many, so that a folder of all kinds is compared."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # refused by name when it is read
    return isinstance(report, dict) and not report.keys().isdisjoint(("doctor", "tries"))


def _natural(path: Path) -> list[Any]:
    """Sort 10 behind 2."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def _read(path: Path) -> Facts:
    try:
        report = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise ConfigError(f"{SETTING}: '{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{SETTING}: '{path}' is no JSON, or is cut off ({error}); name reports that pcgsvc "
            "wrote."
        ) from error
    try:
        return facts_of(report)
    except ConfigError as error:
        raise ConfigError(f"{SETTING}: '{path}' is no report to compare: {error}") from error


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no JSON")
