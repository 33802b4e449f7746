"""The tiers of tests: each runs its own, and counts those of the others as deselected."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

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
    ("words", "passed", "deselected"),
    [
        ([], 1, 3),
        (["--exhaustive"], 2, 2),
        (["--soak", "-n", "1"], 1, 3),
        (["--exhaustive", "--soak"], 3, 1),
    ],
    ids=["default", "exhaustive", "soak, with workers", "two tiers"],
)
def test_a_tier_runs_its_own_tests_and_counts_the_others(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    passed: int,
    deselected: int,
) -> None:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest((HERE / "conftest.py").read_text())
    pytester.makepyfile(test_some=TESTS)
    settings = ["-c", str(HERE.parent / "pyproject.toml"), f"--rootdir={pytester.path}"]
    settings += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # slow to import
    done = pytester.runpytest_inprocess(*settings, *words, ".")
    assert done.ret == 0
    done.assert_outcomes(passed=passed, deselected=deselected)
