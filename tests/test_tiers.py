"""The tiers of tests: each runs its own, and counts those of the others as deselected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = """
import pytest

def test_default(): pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2))
def test_exhaustive(seed): pass

@pytest.mark.soak
def test_soak(): pass
"""


@pytest.mark.parametrize(
    ("words", "summary"),
    [
        ([], "1 passed, 3 deselected"),
        (["--exhaustive"], "2 passed, 2 deselected"),
        (["--soak", "-n", "1"], "1 passed, 3 deselected"),
        (["--exhaustive", "--soak"], "3 passed, 1 deselected"),
    ],
    ids=["default", "exhaustive", "soak, with workers", "two tiers"],
)
def test_a_tier_runs_its_own_tests_and_counts_the_others(
    tmp_path: Path, words: list[str], summary: str
) -> None:
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    settings = ["-c", str(HERE.parent / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", *words, "."]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary in done.stdout
