"""Many processes on one store, some of them killed: one builder, right bytes, no damage."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_helpers import key

from pcgsvc.config import CacheMode
from pcgsvc.store import Store

WORKER = Path(__file__).with_name("store_worker.py")
PACKAGE = Path(__file__).parent.parent.parent


class Worker:
    """One process, started and waiting."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(PACKAGE)},
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", self.process.stderr and self.process.stderr.read()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        out, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        result = json.loads(out)
        assert not errors, errors  # warnings: nothing may be damaged, lost or locked out
        assert result.pop("torch") is False
        return dict(result)


Starter = Callable[[list[list[str]]], list[Worker]]


@pytest.fixture
def start_workers() -> Iterator[Starter]:
    """Start processes that begin their work at once, and let none outlive the test."""
    all_workers: list[Worker] = []

    def start(argument_lists: list[list[str]]) -> list[Worker]:
        workers = [Worker(*arguments) for arguments in argument_lists]
        all_workers.extend(workers)
        for worker in workers:
            worker.wait_ready()
        for worker in workers:
            worker.go()
        return workers

    yield start
    for worker in all_workers:
        if worker.process.poll() is None:
            worker.process.kill()
        with contextlib.suppress(ValueError):  # read and closed already
            worker.process.communicate()


def wait_for_a_builder(log: Path) -> int:
    """Return the pid of the first process that builds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if log.exists() and (text := log.read_text()).endswith("\n"):
            return int(text.split()[1])
        time.sleep(0.001)
    raise AssertionError("nobody builds")


def expect_one_builder_at_a_time(log: Path, killed: int) -> None:
    building = None
    for line in log.read_text().splitlines():
        word, pid = line.split()
        if word == "begin":
            assert building in (None, killed), f"{pid} builds while {building} does"
            building = int(pid)
        else:
            assert building == int(pid)
            building = None


def test_one_of_eight_processes_builds_and_all_load_it_though_one_is_killed(
    tmp_path: Path, start_workers: Starter
) -> None:
    rng = random.Random(0)
    root, num_built = tmp_path / "root", []
    for turn in range(10):
        name, log = key(f"round {turn}"), tmp_path / f"log {turn}"
        workers = start_workers([["build", str(root), name, str(log)]] * 8)
        if turn % 2:  # any of them, at any time
            time.sleep(rng.uniform(0.0, 0.2))
            victim = rng.choice(workers)
        else:  # the builder: while it builds, writes, or just after
            pid = wait_for_a_builder(log)
            victim = next(w for w in workers if w.process.pid == pid)
            time.sleep(rng.uniform(0.0, 0.08))
        victim.process.kill()
        victim.process.communicate()
        results = [worker.result() for worker in workers if worker is not victim]
        assert all(result["right"] and result["stored"] for result in results)
        expect_one_builder_at_a_time(log, victim.process.pid)
        built = sum(result["built"] for result in results)
        if built == 0:  # then the killed one had built and stored it
            assert f"end {victim.process.pid}\n" in log.read_text()
        assert built <= 1
        num_built.append(built)
        with Store.open(str(root), mode=CacheMode.READ) as store:
            report = store.check()
            assert (report.problems, report.quarantined) == ([], [])
            assert report.num_pieces == turn + 1
    assert 1 in num_built


def test_twelve_processes_that_open_an_empty_root_at_once_all_store(
    tmp_path: Path, start_workers: Starter
) -> None:
    for turn in range(3):
        root = tmp_path / f"root {turn}"
        workers = start_workers([["open", str(root), key(f"process {n}")] for n in range(12)])
        assert [worker.result() for worker in workers] == [{"stored": True, "right": True}] * 12
        with Store.open(str(root)) as store:
            report = store.check()
            assert (report.problems, report.orphans, report.strays) == ([], [], [])
            assert (report.num_programs, report.num_pieces) == (12, 12)


@pytest.mark.parametrize("seed", range(3))
def test_writers_killed_while_they_overwrite_leave_no_damage(
    tmp_path: Path, start_workers: Starter, seed: int
) -> None:
    rng = random.Random(seed)
    root, names = tmp_path / "root", [key(f"piece {n}") for n in range(4)]
    for worker in start_workers([["overwrite", str(root), ",".join(names)]] * 4):
        time.sleep(rng.uniform(0.1, 0.4))
        worker.process.kill()
        _, errors = worker.process.communicate()
        assert not errors
    with Store.open(str(root)) as store:
        report = store.check(fix=True)
        assert (report.problems, report.quarantined) == ([], [])
        assert report.num_pieces == len(names)
        assert all(store.get_piece(name).hit for name in names)
        assert store.put_piece(names[0], b"x", facts={})
        assert not store.check().strays
