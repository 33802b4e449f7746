"""docs/faults.md: no kind of fault without a test, and no test that does not exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| [A-Z]\d+ \|", line)
]
PUBLIC = {
    "S": (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 18, 19),
    "T": (1, 2, 3, 5, 7, 8),
    "D": (1, 3, 4, 5, 7, 8, 9),
    "C": (1, 2, 3, 4, 5, 8, 9, 10),
    "M": (1, 2, 3, 4),
    "A": (1, 2, 3, 4, 5, 6, 9, 10),
    "K": (1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 15, 16, 17),
    "W": (1, 2, 4),
    "H": (1, 2, 3, 5, 7, 9, 10, 11, 12),
    "P": (1, 2, 3, 4, 5, 6, 7),
}
"""Kinds of fault that were public when the page was written; the numbering has gaps."""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the test functions of a file, which is read, not imported."""
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_kind_has_a_test_and_every_test_exists(row: list[str]) -> None:
    kind, wrong, done, tests = row
    assert wrong
    assert done
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
    assert len(named) == len(tests.split(", ")), f"{kind}: {tests!r} is no list of tests"
    for file, name in named:
        assert name in names_in(TESTS / file), f"{kind}: tests/{file} has no {name}"


def test_every_public_kind_is_on_the_page_once() -> None:
    kinds = [row[0] for row in ROWS]
    assert len(kinds) == len(set(kinds))
    assert {f"{letter}{n}" for letter, numbers in PUBLIC.items() for n in numbers} <= set(kinds)
