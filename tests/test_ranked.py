"""Output under torchrun: each line begins with its rank."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from pcgsvc.jobs.app import RankedStream, rank_among_many


def test_each_line_has_its_rank_however_it_is_written() -> None:
    out = io.StringIO()
    stream = RankedStream(out, 3)
    for text in ("one\ntw", "o\n", "", "\n", "three"):
        assert stream.write(text) == len(text)
    handler = logging.StreamHandler(stream)
    stream.write("\n")
    handler.emit(logging.LogRecord("x", logging.INFO, "f", 1, "a\nb", None, None))
    Console(file=stream, force_terminal=False).print("table")
    assert out.getvalue() == (
        "[rank 3] one\n[rank 3] two\n[rank 3] \n[rank 3] three\n[rank 3] a\n[rank 3] b\n"
        "[rank 3] table\n"
    )
    assert not stream.isatty()


@pytest.mark.parametrize(
    ("rank", "world", "expected"),
    [("1", "2", 1), ("0", "1", None), ("", "2", None), ("0", "", None)],
)
def test_a_process_alone_has_no_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str, world: str, expected: int | None
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    assert rank_among_many() == expected
