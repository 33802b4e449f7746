"""Processes that build one program at once, one of them killed: one compiles, all are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pcgsvc.cache.store import Store
from pcgsvc.config import CacheMode

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

WORKER = Path(__file__).with_name("pipeline_worker.py")
PACKAGE = Path(__file__).parent.parent.parent
Process = subprocess.Popen[str]


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """The processes of a test; none outlives it."""
    started: list[Process] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def begin(root: Path, log: Path) -> Process:
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(root), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"},
    )


def go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("kill", [False, True], ids=["all live", "the builder is killed"])
def test_one_of_five_processes_compiles_a_program_and_all_others_load_it(
    tmp_path: Path, processes: list[Process], kill: bool
) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    processes += [begin(root, log) for _ in range(5)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    living = list(processes)
    if kill:
        victim = living.pop(0)
        go(victim)
        deadline = time.monotonic() + 120
        while not log.exists():  # it holds the program's lock and compiles
            assert time.monotonic() < deadline, "nobody compiles"
            time.sleep(0.005)
    for process in living:
        go(process)
    if kill:
        time.sleep(0.05)
        victim.kill()
        victim.communicate()
    results = []
    for process in living:
        out, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        assert not errors, errors
        results.append(json.loads(out))
    assert all(result["right"] for result in results)
    cold = [result for result in results if result["start"] == "cold"]
    assert len(cold) <= 1
    compiled = sum(result["compiled"] for result in results)
    assert compiled == 3 or (kill and compiled < 3)  # the killed one may have stored some
    if not kill:
        assert len(cold) == 1
    with Store.open(str(root), mode=CacheMode.READ) as store:
        report = store.check()
        assert (report.problems, report.quarantined, report.orphans) == ([], [], [])
        assert (report.num_programs, report.num_pieces) == (1, 3)
