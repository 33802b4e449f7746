"""Traffic files: CSV, JSON lines, what a runner recorded, or a trace of requests.

In: a path. Out: `Traffic`, or the `Trace` that it is simulated from, or a `ConfigError` with the
line and what was got there. Knows nothing of graphs or costs.

Real traffic repeats itself, so lines are counted first and each different one is read once: memory
is that of the different lines of one chunk, and a file of any length may come.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pcgsvc.errors import ConfigError, near
from pcgsvc.sizing.traces import (
    CSV_FORMS,
    MOONCAKE,
    BadRowError,
    Trace,
    Values,
    bad_row,
    read_benchmark,
    read_requests,
    whole,
)
from pcgsvc.sizing.traffic import MAX_TOKENS, Traffic, make_traffic

COLUMNS = ("num_tokens", "count", "uniform")
_FORM = "num_tokens[,count][,uniform]"
_CHUNK = 1 << 20
"""Lines that are counted before they are read."""
_BOOLS = {"true": True, "1": True, "false": False, "0": False}

Row = tuple[int, bool, int]
"""Row count, uniform, calls."""


def read_traffic(path: str | Path) -> Traffic | Trace:
    """Read a traffic file, by its suffix and its columns.

    Of calls, `.csv`: a header with `num_tokens` and any of `count` and `uniform`, in any order.
    `.jsonl`: an object with these keys per line. `.json`: `runner.stats()`, or a report. `count` is
    1 and `uniform` false where they are left out.

    Of requests, `.csv`: Azure's or BurstGPT's trace. `.jsonl`: Mooncake's trace, or one result of
    SGLang's benchmark. `.json`: a result of vLLM's benchmark.

    Raises:
        ConfigError: the file is missing, empty or of another form; of a bad row, its line number
            (the header is line 1) and what was got.
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], Counter[tuple[int, bool]] | Trace]] = {
        ".csv": _read_csv,
        ".jsonl": _read_json_lines,
        ".json": _read_json,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"traffic: '{path}': the suffix decides how a traffic file is read: .csv or .jsonl "
            f"({_FORM}, or a trace of requests), or .json (a runner's stats(), a report, or a "
            "benchmark's result)."
        )
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"traffic: '{path}' is empty; {_FORM} is needed.")
        found = reader(path)
    except FileNotFoundError:
        raise ConfigError(f"traffic: '{path}' does not exist; name a file of {_FORM}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"traffic: '{path}' is no text: {error.reason} at byte {error.start}."
        ) from error
    except OSError as error:
        raise ConfigError(f"traffic: '{path}' cannot be read: {error.strerror}.") from error
    return found if isinstance(found, Trace) else make_traffic(str(path), found)


# ---- rows ----------------------------------------------------------------------------------------


def _flag(value: Any) -> bool:
    found = _BOOLS.get(value.lower()) if isinstance(value, str) else value
    if type(found) is not bool:
        raise BadRowError(f"uniform is {value!r}, true or false is needed")
    return found


def _row(values: Values) -> Row:
    """Check the values of one row by column."""
    if "num_tokens" not in values:
        raise BadRowError(f"num_tokens is missing; there is {', '.join(values) or 'nothing'}")
    unknown = [name for name in values if name not in COLUMNS]
    if unknown:
        raise BadRowError(f"{unknown[0]!r} is not known{near(unknown[0], COLUMNS)}")
    return (
        whole("num_tokens", values["num_tokens"], 1, MAX_TOKENS),
        _flag(values.get("uniform", False)),
        whole("count", values.get("count", 1), 1, 10**15),
    )


def _count_lines(
    path: Path, lines: Iterator[str], first: int, parse: Callable[[str], Values]
) -> Counter[tuple[int, bool]]:
    """Add up lines of which the first one has the number `first`."""
    calls: Counter[tuple[int, bool]] = Counter()
    while chunk := list(itertools.islice(lines, _CHUNK)):
        for line, times in Counter(chunk).items():
            try:
                rows, uniform, count = _row(parse(line))
            except BadRowError as error:
                where = f"line {first + chunk.index(line)}"
                raise bad_row(path, where, line.strip(), error, _FORM) from error
            calls[rows, uniform] += count * times
        first += len(chunk)
    return calls


# ---- CSV -----------------------------------------------------------------------------------------


def _cells(line: str) -> list[str]:
    """Cut a line at its commas; cells are numbers and words, so quotes can hold no comma."""
    cells = [cell.strip() for cell in line.split(",")]
    return [c[1:-1] if len(c) > 1 and c[0] == c[-1] == '"' else c for c in cells]


def _read_csv(path: Path) -> Counter[tuple[int, bool]] | Trace:
    with path.open(encoding="utf-8-sig") as file:
        header = file.readline()
        columns = _cells(header)

        def parse(line: str) -> Values:
            cells = _cells(line)
            if cells == [""]:
                raise BadRowError("the row is empty")
            if len(cells) != len(columns):
                raise BadRowError(
                    f"{len(cells)} values for the {len(columns)} columns {','.join(columns)}"
                )
            return dict(zip(columns, cells, strict=True))

        for form in CSV_FORMS:
            if all(columns.count(name) == 1 for name in form.columns):
                return read_requests(path, form, enumerate(file, 2), parse)
        _check_header(path, header, columns)
        calls = _count_lines(path, file, 2, parse)
    if not calls:
        raise ConfigError(f"traffic: '{path}' has a header and no rows.")
    return calls


def _check_header(path: Path, line: str, columns: Sequence[str]) -> None:
    wrong = [c for c in columns if c not in COLUMNS]
    if wrong or "num_tokens" not in columns or len(set(columns)) != len(columns):
        traces = [name for form in CSV_FORMS for name in form.columns]
        hint = near(wrong[0], [*COLUMNS, *traces]) if wrong else "."
        known = " or ".join(f"{form.name}'s ({','.join(form.columns)})" for form in CSV_FORMS)
        raise ConfigError(
            f"traffic: '{path}', line 1: got {line.strip()!r}, the header {_FORM} is needed, or "
            f"{known}{hint}"
        )


# ---- JSON ----------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadRowError("a key appears twice")
    return found


def _json_values(line: str) -> Values:
    if not line.strip():
        raise BadRowError("the row is empty")
    try:
        values = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"it is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise BadRowError("an object is needed")
    return values


def _read_json_lines(path: Path) -> Counter[tuple[int, bool]] | Trace:
    with path.open(encoding="utf-8-sig") as file:
        first = file.readline()
        lines = itertools.chain([first], file)
        try:
            values = _json_values(first)
        except BadRowError:
            values = {}  # the reader of calls says what is wrong
        if MOONCAKE.prompt in values or MOONCAKE.output in values:
            return read_requests(path, MOONCAKE, enumerate(lines, 1), _json_values)
        if "input_lens" in values:
            if more := sum(1 for line in file if line.strip()):
                raise ConfigError(
                    f"traffic: '{path}' holds the results of {more + 1} benchmarks, one a line; "
                    "keep one."
                )
            return read_benchmark(path, values)
        return _count_lines(path, lines, 1, _json_values)


def _read_json(path: Path) -> Counter[tuple[int, bool]] | Trace:
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise ConfigError(f"traffic: '{path}' is no JSON: {error}.") from error
    if isinstance(tree, dict) and "input_lens" in tree:
        return read_benchmark(path, tree)
    return _recorded(path, tree)


def _recorded(path: Path, tree: Any) -> Counter[tuple[int, bool]]:
    """Read the calls that a runner counted, from its stats or from a report's `dispatch`."""
    stats = tree.get("dispatch", tree) if isinstance(tree, dict) else tree
    if not isinstance(stats, dict) or not isinstance(stats.get("calls"), list):
        what = type(tree).__name__ if not isinstance(tree, dict) else ", ".join(tree) or "nothing"
        raise ConfigError(
            f"traffic: '{path}' holds {what}; runner.stats(), or a report with dispatch.calls, is "
            "needed (job=plan and job=compile write none), or a benchmark's result with input_lens "
            "(vLLM: --save-detailed, SGLang: --output-details). Rows are read from .csv or .jsonl."
        )
    calls: Counter[tuple[int, bool]] = Counter()
    for at, values in enumerate(stats["calls"]):
        try:
            if not isinstance(values, dict):
                raise BadRowError("an object is needed")
            rows, uniform, count = _row(values)
        except BadRowError as error:
            raise ConfigError(
                f"traffic: '{path}', calls[{at}]: got {values!r}: {error}. A row is {_FORM}."
            ) from error
        calls[rows, uniform] += count
    if not calls:
        raise ConfigError(f"traffic: '{path}' was recorded by a runner that had no calls yet.")
    return calls
