"""Traffic files: CSV, JSON lines, or what a runner recorded.

In: a path. Out: `Traffic`, or a `ConfigError` with the line and what was got there. Knows nothing
of graphs or costs.

Real traffic repeats itself, so lines are counted first and each different one is read once: memory
is that of the different lines of one chunk, and a file of any length may come.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pcgsvc.errors import ConfigError, near
from pcgsvc.sizing.traffic import MAX_TOKENS, Traffic, make_traffic

COLUMNS = ("num_tokens", "count", "uniform")
_FORM = "num_tokens[,count][,uniform]"
_CHUNK = 1 << 20
"""Lines that are counted before they are read."""
_BOOLS = {"true": True, "1": True, "false": False, "0": False}

Row = tuple[int, bool, int]
"""Row count, uniform, calls."""


class _BadRowError(Exception):
    """What is wrong with a row; the reader of the file adds the line."""


def read_traffic(path: str | Path) -> Traffic:
    """Read a traffic file, by its suffix.

    `.csv`: a header with `num_tokens` and any of `count` and `uniform`, in any order. `.jsonl`: an
    object with these keys per line. `.json`: `runner.stats()`, or a report. `count` is 1 and
    `uniform` false where they are left out.

    Raises:
        ConfigError: the file is missing, empty or of another form; of a bad row, its line number
            (the header is line 1) and what was got.
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], Counter[tuple[int, bool]]]] = {
        ".csv": _read_csv,
        ".jsonl": _read_json_lines,
        ".json": _read_recorded,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"traffic: '{path}': the suffix decides how a traffic file is read: .csv or .jsonl "
            f"({_FORM}), or .json (a runner's stats(), or a report)."
        )
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"traffic: '{path}' is empty; {_FORM} is needed.")
        return make_traffic(str(path), reader(path))
    except FileNotFoundError:
        raise ConfigError(f"traffic: '{path}' does not exist; name a file of {_FORM}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"traffic: '{path}' is no text: {error.reason} at byte {error.start}."
        ) from error
    except OSError as error:
        raise ConfigError(f"traffic: '{path}' cannot be read: {error.strerror}.") from error


# ---- rows ----------------------------------------------------------------------------------------


def _whole(name: str, value: Any, most: int) -> int:
    """Check a number of a row; text is a CSV's."""
    if isinstance(value, str):
        if re.fullmatch(r"-?[0-9]{1,100}", value) is None:
            raise _BadRowError(f"{name} is {value!r}, a whole number is needed")
        value = int(value)
    if type(value) is not int:
        raise _BadRowError(f"{name} is {value!r}, a whole number is needed")
    if not 1 <= value <= most:
        raise _BadRowError(f"{name} is {value}, 1 to {most} is possible")
    return value


def _flag(value: Any) -> bool:
    found = _BOOLS.get(value.lower()) if isinstance(value, str) else value
    if type(found) is not bool:
        raise _BadRowError(f"uniform is {value!r}, true or false is needed")
    return found


def _row(values: Mapping[str, Any]) -> Row:
    """Check the values of one row by column."""
    if "num_tokens" not in values:
        raise _BadRowError(f"num_tokens is missing; there is {', '.join(values) or 'nothing'}")
    unknown = [name for name in values if name not in COLUMNS]
    if unknown:
        raise _BadRowError(f"{unknown[0]!r} is not known{near(unknown[0], COLUMNS)}")
    return (
        _whole("num_tokens", values["num_tokens"], MAX_TOKENS),
        _flag(values.get("uniform", False)),
        _whole("count", values.get("count", 1), 10**15),
    )


def _count_lines(
    path: Path, lines: Iterator[str], first: int, parse: Callable[[str], Row]
) -> Counter[tuple[int, bool]]:
    """Add up lines of which the first one has the number `first`."""
    calls: Counter[tuple[int, bool]] = Counter()
    while chunk := list(itertools.islice(lines, _CHUNK)):
        for line, times in Counter(chunk).items():
            try:
                rows, uniform, count = parse(line)
            except _BadRowError as error:
                at = first + chunk.index(line)
                got = line.strip()
                shown = f"{got[:57]}..." if len(got) > 60 else got
                raise ConfigError(
                    f"traffic: '{path}', line {at}: got {shown!r}: {error}. A row is {_FORM}."
                ) from error
            calls[rows, uniform] += count * times
        first += len(chunk)
    return calls


# ---- CSV -----------------------------------------------------------------------------------------


def _cells(line: str) -> list[str]:
    """Cut a line at its commas; cells are numbers and words, so quotes can hold no comma."""
    cells = [cell.strip() for cell in line.split(",")]
    return [c[1:-1] if len(c) > 1 and c[0] == c[-1] == '"' else c for c in cells]


def _read_csv(path: Path) -> Counter[tuple[int, bool]]:
    with path.open(encoding="utf-8-sig") as file:
        columns = _header(path, file.readline())

        def parse(line: str) -> Row:
            cells = _cells(line)
            if cells == [""]:
                raise _BadRowError("the row is empty")
            if len(cells) != len(columns):
                raise _BadRowError(
                    f"{len(cells)} values for the {len(columns)} columns {','.join(columns)}"
                )
            return _row(dict(zip(columns, cells, strict=True)))

        calls = _count_lines(path, file, 2, parse)
    if not calls:
        raise ConfigError(f"traffic: '{path}' has a header and no rows.")
    return calls


def _header(path: Path, line: str) -> Sequence[str]:
    columns = _cells(line)
    wrong = [c for c in columns if c not in COLUMNS]
    if wrong or "num_tokens" not in columns or len(set(columns)) != len(columns):
        hint = near(wrong[0], COLUMNS) if wrong else "."
        raise ConfigError(
            f"traffic: '{path}', line 1: got {line.strip()!r}, the header {_FORM} is needed{hint}"
        )
    return columns


# ---- JSON ----------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _BadRowError("a key appears twice")
    return found


def _read_json_lines(path: Path) -> Counter[tuple[int, bool]]:
    def parse(line: str) -> Row:
        if not line.strip():
            raise _BadRowError("the row is empty")
        try:
            values = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise _BadRowError(f"it is no JSON ({error})") from error
        if not isinstance(values, dict):
            raise _BadRowError("an object is needed")
        return _row(values)

    with path.open(encoding="utf-8-sig") as file:
        return _count_lines(path, file, 1, parse)


def _read_recorded(path: Path) -> Counter[tuple[int, bool]]:
    """Read the calls that a runner counted, from its stats or from a report's `dispatch`."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise ConfigError(f"traffic: '{path}' is no JSON: {error}.") from error
    stats = tree.get("dispatch", tree) if isinstance(tree, dict) else tree
    if not isinstance(stats, dict) or not isinstance(stats.get("calls"), list):
        what = type(tree).__name__ if not isinstance(tree, dict) else ", ".join(tree) or "nothing"
        raise ConfigError(
            f"traffic: '{path}' holds {what}; runner.stats(), or a report with dispatch.calls, is "
            "needed (job=plan and job=compile write none). Rows are read from .csv or .jsonl."
        )
    calls: Counter[tuple[int, bool]] = Counter()
    for at, values in enumerate(stats["calls"]):
        try:
            if not isinstance(values, dict):
                raise _BadRowError("an object is needed")
            rows, uniform, count = _row(values)
        except _BadRowError as error:
            raise ConfigError(
                f"traffic: '{path}', calls[{at}]: got {values!r}: {error}. A row is {_FORM}."
            ) from error
        calls[rows, uniform] += count
    if not calls:
        raise ConfigError(f"traffic: '{path}' was recorded by a runner that had no calls yet.")
    return calls
