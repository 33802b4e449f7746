"""Request traces: the rows of Azure's, BurstGPT's and Mooncake's files, and benchmarks' results.

In: the rows of a file. Out: a `Trace` of requests, or a `ConfigError` with the row's number and
what was got. Knows nothing of steps; see `scheduler` for those.

A request without output tokens failed and is left out; the trace counts them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pcgsvc.errors import ConfigError
from pcgsvc.sizing.traffic import MAX_TOKENS

Values = Mapping[str, Any]
"""One row of a file, by column; the cells of a CSV are text."""


class BadRowError(Exception):
    """What is wrong with a row; the reader of the file adds where it is."""


class Request(NamedTuple):
    """One request."""

    prompt: int
    """Tokens, at least 1."""
    output: int
    """Tokens, at least 1."""
    arrival_s: float
    """Seconds on the file's own clock; 0 where it has none."""


@dataclass(kw_only=True)
class Trace:
    """Requests in the order in which they arrived."""

    source: str
    """The file they come from, for messages."""
    form: str
    """Whose form the file has."""
    has_times: bool
    """Whether the file says when requests arrived."""
    requests: list[Request] = field(default_factory=list)
    left_out: int = 0
    """Requests without output tokens."""
    notes: list[str] = field(default_factory=list)
    """What the file says and is not simulated."""


def whole(name: str, value: Any, least: int, most: int) -> int:
    """Check a whole number of a row; text is a CSV's.

    Raises:
        BadRowError: it is none, or out of range.
    """
    if isinstance(value, str):
        if re.fullmatch(r"-?[0-9]{1,100}", value) is None:
            raise BadRowError(f"{name} is {value!r}, a whole number is needed")
        value = int(value)
    if type(value) is not int:
        raise BadRowError(f"{name} is {value!r}, a whole number is needed")
    if not least <= value <= most:
        raise BadRowError(f"{name} is {value}, {least} to {most} is possible")
    return value


def _seconds(name: str, value: Any) -> float:
    """Check a point in time that is a number."""
    try:
        number = float(value) if type(value) in (int, float, str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRowError(f"{name} is {value!r}, a number is needed")
    if number < 0:
        raise BadRowError(f"{name} is {value}, at least 0 is needed")
    return number


def _milliseconds(name: str, value: Any) -> float:
    return _seconds(name, value) / 1000


def _clock(name: str, value: Any) -> float:
    """Check a date and time; without a zone it is UTC's."""
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise BadRowError(f"{name} is {value!r}, a date and time is needed") from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, kw_only=True)
class Form:
    """The columns of a kind of trace; others are not read."""

    name: str
    time: str
    prompt: str
    output: str
    seconds: Callable[[str, Any], float] = _seconds
    """Checks a value of the column `time`."""

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.time, self.prompt, self.output]

    def request(self, values: Values) -> Request:
        """Check one row.

        Raises:
            BadRowError: a value is missing or impossible.
        """
        for name in self.columns:
            if name not in values:
                raise BadRowError(f"{name} is missing; there is {', '.join(values) or 'nothing'}")
        output = whole(self.output, values[self.output], 0, MAX_TOKENS)
        prompt = whole(self.prompt, values[self.prompt], min(output, 1), MAX_TOKENS)
        return Request(prompt, output, self.seconds(self.time, values[self.time]))


AZURE = Form(
    name="Azure",
    time="TIMESTAMP",
    prompt="ContextTokens",
    output="GeneratedTokens",
    seconds=_clock,
)
BURSTGPT = Form(
    name="BurstGPT", time="Timestamp", prompt="Request tokens", output="Response tokens"
)
MOONCAKE = Form(
    name="Mooncake",
    time="timestamp",
    prompt="input_length",
    output="output_length",
    seconds=_milliseconds,
)
CSV_FORMS = (AZURE, BURSTGPT)
"""Forms with a header."""
_BENCHMARK = Form(
    name="vLLM or SGLang benchmark", time="start_times", prompt="input_lens", output="output_lens"
)


def bad_row(path: Path, where: str, got: str, error: BadRowError, form: str) -> ConfigError:
    """Return what to say of a row that cannot be read."""
    shown = f"{got[:57]}..." if len(got) > 60 else got
    return ConfigError(f"traffic: '{path}', {where}: got {shown!r}: {error}. A row is {form}.")


def read_requests(
    path: Path, form: Form, lines: Iterable[tuple[int, str]], parse: Callable[[str], Values]
) -> Trace:
    """Return the requests of a file with one in each line, in order of time.

    Args:
        path: for messages.
        form: its columns.
        lines: with their numbers.
        parse: makes the values by column of a line; raises `BadRowError`.

    Raises:
        ConfigError: of a bad row, its line number and what was got; or there are no requests.
    """
    trace = Trace(source=str(path), form=form.name, has_times=True)
    before, before_s = None, -math.inf
    for at, line in lines:
        try:
            values = parse(line)
            request = form.request(values)
            time = values[form.time]
            if request.arrival_s < before_s:
                raise BadRowError(
                    f"{form.time} is {time}, before {before} of the row above; sort by time"
                )
        except BadRowError as error:
            columns = ",".join(form.columns)
            raise bad_row(path, f"line {at}", line.strip(), error, columns) from error
        before, before_s = time, request.arrival_s
        _add(trace, request)
    if form is MOONCAKE:
        trace.notes.append("hash_ids are not read: every prompt is prefilled whole")
    return _checked(trace)


def read_benchmark(path: Path, result: Values) -> Trace:
    """Return the requests of a benchmark's result of vLLM's or SGLang's form.

    It holds a list per column; where it has `start_times`, requests are put in their order.

    Raises:
        ConfigError: of a bad request, its index and what was got; or there are no requests.
    """
    has_times = result.get(_BENCHMARK.time) is not None
    names = _BENCHMARK.columns if has_times else _BENCHMARK.columns[1:]
    lens = [len(v) if isinstance(v, list) else None for v in map(result.get, names)]
    if None in lens or len(set(lens)) > 1:
        raise ConfigError(
            f"traffic: '{path}': {', '.join(names)} are needed, a list each of equal length; got "
            f"lengths {', '.join('none' if n is None else str(n) for n in lens)}."
        )
    trace = Trace(source=str(path), form=_BENCHMARK.name, has_times=has_times)
    for at, row in enumerate(zip(*(result[name] for name in names), strict=True)):
        values = dict(zip(names, row, strict=True))
        try:
            _add(trace, _BENCHMARK.request({_BENCHMARK.time: 0.0, **values}))
        except BadRowError as error:
            raise bad_row(path, f"request {at}", str(values), error, ",".join(names)) from error
    trace.requests.sort(key=lambda request: request.arrival_s)
    return _checked(trace)


def _add(trace: Trace, request: Request) -> None:
    if request.output:
        trace.requests.append(request)
    else:
        trace.left_out += 1


def _checked(trace: Trace) -> Trace:
    if not trace.requests:
        raise ConfigError(
            f"traffic: '{trace.source}' ({trace.form}) holds no requests with output tokens, "
            f"{trace.left_out} without."
        )
    if trace.left_out:
        trace.notes.append(
            f"requests without output tokens, which failed: {trace.left_out} left out"
        )
    return trace
