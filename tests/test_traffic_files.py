"""Traffic files: forms that are read, and what is said of those that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core_helpers import build, rows, toy

import pcgsvc
from pcgsvc.errors import ConfigError
from pcgsvc.sizing import files
from pcgsvc.sizing.files import read_traffic


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


GOOD = {
    "plain": ("t.csv", "num_tokens\n5\n7\n5\n", {5: 2, 7: 1}, {}),
    "counts": ("t.csv", "num_tokens,count\n5,3\n7,1\n5,2", {5: 5, 7: 1}, {}),
    "kinds": ("t.csv", "num_tokens,count,uniform\n5,3,true\n5,2,false\n", {5: 2}, {5: 3}),
    "other order": ("t.csv", "uniform,num_tokens\n1,5\n0,6\nTRUE,7\n", {6: 1}, {5: 1, 7: 1}),
    "spaces, quotes, CRLF, BOM": (
        "T.CSV",
        b'\xef\xbb\xbfnum_tokens , "count"\r\n "5", 3\r\n',
        {5: 3},
        {},
    ),
    "json lines": (
        "t.jsonl",
        '{"num_tokens": 5}\n{"num_tokens": 5, "count": 2, "uniform": true}\n',
        {5: 1},
        {5: 2},
    ),
    "stats": ("s.json", '{"calls": [{"num_tokens": 5, "uniform": true, "count": 2}]}', {}, {5: 2}),
    "report": ("r.json", '{"dispatch": {"calls": [{"num_tokens": 5, "count": 2}]}}', {5: 2}, {}),
}


@pytest.mark.parametrize("case", GOOD)
def test_a_traffic_file_is_read_as_calls_by_row_count(case: str, tmp_path: Path) -> None:
    name, text, general, uniform = GOOD[case]
    traffic = read_traffic(written(tmp_path, name, text))
    assert (dict(traffic.general), dict(traffic.uniform)) == (general, uniform)
    assert traffic.num_calls == sum(general.values()) + sum(uniform.values())
    assert traffic.num_rows == sum(n * c for d in (general, uniform) for n, c in d.items())


HEAD = "num_tokens,count,uniform\n1,1,true\n"
BAD = {
    # a row: its line, what was got, and why
    "negative": ("t.csv", HEAD + "-3,1,true\n", "line 3: got '-3,1,true': num_tokens is -3, 1 to"),
    "zero": ("t.csv", HEAD + "0,1,true\n", "line 3: got '0,1,true': num_tokens is 0, 1 to"),
    "zero count": ("t.csv", HEAD + "4,0,true\n", "line 3: got '4,0,true': count is 0"),
    "word": ("t.csv", HEAD + "many,1,true\n", "line 3: got 'many,1,true': num_tokens is 'many', a"),
    "fraction": ("t.csv", HEAD + "4.5,1,true\n", "num_tokens is '4.5', a whole number is needed"),
    "python's digits": ("t.csv", HEAD + "1_0,1,true\n", "num_tokens is '1_0'"),
    "other digits": ("t.csv", HEAD + "٣,1,true\n", "num_tokens is '٣'"),
    "too many": ("t.csv", HEAD + "99999999999,1,true\n", "num_tokens is 99999999999, 1 to 214"),
    "blank row": ("t.csv", HEAD + "\n2,1,true\n", "line 3: got '': the row is empty"),
    "blank last row": ("t.csv", HEAD + "\n", "line 3: got '': the row is empty"),
    "empty cell": ("t.csv", HEAD + ",1,true\n", "line 3: got ',1,true': num_tokens is ''"),
    "short row": ("t.csv", HEAD + "4,1\n", "line 3: got '4,1': 2 values for the 3 columns num_to"),
    "long row": ("t.csv", HEAD + "4,1,true,9\n", "4 values for the 3 columns"),
    "not a flag": ("t.csv", HEAD + "4,1,maybe\n", "uniform is 'maybe', true or false is needed"),
    "the first bad one": ("t.csv", HEAD + "4,1,1\nx,1,1\n-1,1,1\n", "line 4: got 'x,1,1'"),
    # a header
    "no header": (
        "t.csv",
        "5,3\n",
        "line 1: got '5,3', the header num_tokens[,count][,uniform] is",
    ),
    "typo": ("t.csv", "num_token\n5\n", "did you mean 'num_tokens'?"),
    "no num_tokens": ("t.csv", "count\n5\n", "line 1: got 'count', the header num_tokens"),
    "twice": ("t.csv", "num_tokens,num_tokens\n5,5\n", "line 1: got 'num_tokens,num_tokens'"),
    # a file
    "no rows": ("t.csv", "num_tokens\n", "has a header and no rows"),
    "empty": ("t.csv", "", "is empty; num_tokens[,count][,uniform] is needed"),
    "no text": ("t.csv", b"num_tokens\n\xff\xfe\n", "is no text"),
    "other ending": ("t.txt", "num_tokens\n5\n", ".csv or .jsonl"),
    "more than can be counted": (
        "t.csv",
        "num_tokens,count\n2000000000,1000000000000000\n",
        "rows in all, at most 9007199254740992",
    ),
    # JSON lines
    "no JSON": (
        "t.jsonl",
        '{"num_tokens": 1}\n{num: 5}\n',
        "line 2: got '{num: 5}': it is no JSON",
    ),
    "no object": ("t.jsonl", "5\n", "line 1: got '5': an object is needed"),
    "no key": ("t.jsonl", '{"count": 5}\n', "num_tokens is missing; there is count"),
    "other key": ("t.jsonl", '{"num_tokens": 5, "counts": 2}\n', "did you mean 'count'?"),
    "key twice": ("t.jsonl", '{"num_tokens": 5, "num_tokens": 2}\n', "a key appears twice"),
    "text": ("t.jsonl", '{"num_tokens": "x"}\n', "num_tokens is 'x', a whole number"),
    "true": ("t.jsonl", '{"num_tokens": true}\n', "num_tokens is True, a whole number"),
    "not a number": ("t.jsonl", '{"num_tokens": NaN}\n', "num_tokens is nan, a whole number"),
    "flag of 2": ("t.jsonl", '{"num_tokens": 5, "uniform": 2}\n', "uniform is 2, true or false"),
    "blank line": ("t.jsonl", '{"num_tokens": 5}\n\n', "line 2: got '': the row is empty"),
    # what a runner recorded
    "a plan's report": (
        "r.json",
        '{"schema": 1, "mode": {}}',
        "holds schema, mode; runner.stats()",
    ),
    "a list": ("r.json", "[1]", "holds list; runner.stats()"),
    "old stats": ("r.json", '{"hits": {}}', "holds hits; runner.stats()"),
    "no calls yet": ("r.json", '{"calls": []}', "a runner that had no calls yet"),
    "bad call": ("r.json", '{"calls": [{"num_tokens": -1}]}', "calls[0]: got {'num_tokens': -1}"),
    "half a file": ("r.json", '{"calls": [', "is no JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_line_and_what_was_got(case: str, tmp_path: Path) -> None:
    name, text, message = BAD[case]
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as raised:
        read_traffic(path)
    assert str(raised.value).startswith(f"traffic: '{path}'")
    assert message in str(raised.value)


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv' does not exist"):
        read_traffic(tmp_path / "nowhere.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.csv' cannot be read"):
        read_traffic(tmp_path / "folder.csv")


def test_a_line_keeps_its_number_in_a_file_of_many_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 10)
    lines = [f"{1 + n % 7}" for n in range(95)]
    good = read_traffic(written(tmp_path, "t.csv", "\n".join(["num_tokens", *lines, ""])))
    assert good.num_calls == 95
    assert good.general[1] == 14
    lines[83] = "x"
    with pytest.raises(ConfigError, match="line 85: got 'x'"):
        read_traffic(written(tmp_path, "t.csv", "\n".join(["num_tokens", *lines, ""])))


def test_what_a_runner_recorded_is_a_traffic_file(tmp_path: Path) -> None:
    with build(toy(1), sizes=[4]) as runner:
        for query_lens in ([3], [1, 1], [1, 1], [9]):
            runner(rows(sum(query_lens)), batch=pcgsvc.Batch(query_lens=query_lens))
        stats = runner.stats()
    traffic = read_traffic(written(tmp_path, "stats.json", json.dumps(stats)))
    assert dict(traffic.general) == {3: 1, 9: 1}
    assert dict(traffic.uniform) == {2: 2}
    assert traffic.source.endswith("stats.json")


def test_calls_are_counted_as_dispatch_takes_them() -> None:
    traffic = files.make_traffic("x", {(1, False): 2, (1, True): 1, (4, True): 1, (3, False): 5})
    dispatched = traffic.as_dispatched(1)
    assert dict(dispatched.uniform) == {1: 3, 4: 1}
    assert dict(dispatched.general) == {3: 5}
    with pytest.raises(ConfigError, match=r"uniform calls of 1 rows.*uniform_query_len=2"):
        traffic.as_dispatched(2)
