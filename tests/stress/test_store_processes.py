"""Many processes on one store, some of them killed: one builder, right bytes, no damage."""

from __future__ import annotations

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

from pcgsvc.cache.store import Store
from pcgsvc.config import CacheMode

pytestmark = pytest.mark.exhaustive

WORKER = Path(__file__).with_name("store_worker.py")
PACKAGE = Path(__file__).parent.parent.parent


class Worker:
    """One process that waits for jobs; what it logs goes to a file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": str(PACKAGE)},
            )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return line

    def go(self, root: Path, *job: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(root), *job]) + "\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        result = json.loads(self.line())
        # Warnings: nothing may be damaged, lost or locked out.
        assert self.log.read_text() == ""
        assert result.pop("torch") is False
        return dict(result)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        assert self.log.read_text() == ""


Starter = Callable[[int], list[Worker]]


@pytest.fixture
def start_workers(tmp_path: Path) -> Iterator[Starter]:
    """Start processes, and let none outlive the test."""
    all_workers: list[Worker] = []

    def start(count: int) -> list[Worker]:
        number = len(all_workers)
        new = [Worker(tmp_path / f"worker {number + n}") for n in range(count)]
        all_workers.extend(new)
        assert [worker.line() for worker in new] == ["ready\n"] * count
        return new

    yield start
    for worker in all_workers:
        if worker.process.returncode is None:
            worker.process.kill()
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
    root, num_built, workers = tmp_path / "root", [], start_workers(8)
    for turn in range(10):
        name, log = key(f"round {turn}"), tmp_path / f"log {turn}"
        for worker in workers:
            worker.go(root, "build", name, str(log))
        if turn % 2:  # any of them, at any time
            time.sleep(rng.uniform(0.0, 0.2))
            victim = rng.choice(workers)
        else:  # the builder: while it builds, writes, or just after
            pid = wait_for_a_builder(log)
            victim = next(w for w in workers if w.process.pid == pid)
            time.sleep(rng.uniform(0.0, 0.08))
        victim.kill()
        workers.remove(victim)
        results = [worker.result() for worker in workers]
        assert all(result["right"] and result["stored"] for result in results)
        expect_one_builder_at_a_time(log, victim.process.pid)
        built = sum(result["built"] for result in results)
        assert built <= 1
        if built == 0:  # then the killed one had built and stored it
            assert f"end {victim.process.pid}\n" in log.read_text()
        num_built.append(built)
        with Store.open(str(root), mode=CacheMode.READ) as store:
            report = store.check()
            assert (report.problems, report.quarantined) == ([], [])
            assert report.num_pieces == turn + 1
        workers += start_workers(1)
    assert 1 in num_built


def test_one_of_six_machines_builds_and_all_load_it_though_one_is_lost(
    tmp_path: Path, start_workers: Starter
) -> None:
    workers, url = start_workers(6), f"file://{tmp_path}/remote"
    for turn in range(2):
        name, log = key(f"round {turn}"), tmp_path / f"log {turn}"
        for worker in workers:  # each with a folder of its own
            root = tmp_path / f"folder {worker.process.pid}"
            worker.go(root, "build", name, str(log), url)
        killed = wait_for_a_builder(log)
        if turn % 2 == 0:
            victim = next(w for w in workers if w.process.pid == killed)
            victim.kill()
            workers.remove(victim)
        results = [worker.result() for worker in workers]
        assert all(result["right"] for result in results)
        expect_one_builder_at_a_time(log, killed)
        assert sum(result["built"] for result in results) <= 1
        workers += start_workers(6 - len(workers))
    assert not list((tmp_path / "remote" / "claims").iterdir())


def test_twelve_processes_that_open_an_empty_root_at_once_all_store(
    tmp_path: Path, start_workers: Starter
) -> None:
    workers = start_workers(12)
    for turn in range(3):
        root = tmp_path / f"root {turn}"
        for number, worker in enumerate(workers):
            worker.go(root, "open", key(f"process {number}"))
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
    workers = start_workers(4)
    for worker in workers:
        worker.go(root, "overwrite", *names)
    with Store.open(str(root)) as store:
        while not all(store.get_piece(name).hit for name in names):
            time.sleep(0.01)
    for worker in workers:
        time.sleep(rng.uniform(0.05, 0.3))
        worker.kill()
    with Store.open(str(root)) as store:
        report = store.check(fix=True)
        assert (report.problems, report.quarantined) == ([], [])
        assert report.num_pieces == len(names)
        assert all(store.get_piece(name).hit for name in names)
        assert store.put_piece(names[0], b"x", facts={})
        assert not store.check().strays


def test_programs_found_are_whole_while_others_drop_them_for_the_budget(
    tmp_path: Path, start_workers: Starter
) -> None:
    root = tmp_path / "root"
    workers = start_workers(4)
    for worker in workers:
        worker.go(root, "budget", "3")
    assert sum(worker.result()["hits"] for worker in workers) > 0
    with Store.open(str(root)) as store:
        report = store.check()
        assert (report.problems, report.strays) == ([], [])
        assert report.num_bytes < 400_000
