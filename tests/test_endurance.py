"""What holds over many calls and builds, and after a process was ended in the middle of one.

A tenth runs with `--exhaustive`, the rest with `--soak`. Writers that are killed with SIGKILL:
`stress/`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import build, make_config, plain, rows, toy
from store_helpers import all_files, open_store

import pcgsvc
from pcgsvc.config import CacheConfig
from pcgsvc.errors import PcgError
from pcgsvc.forward.workspace import Workspace
from pcgsvc.program.model import CompiledModel

WORKER = Path(__file__).with_name("endurance_worker.py")
MIB = 2**20
EXHAUSTIVE, SOAK = pytest.mark.exhaustive, pytest.mark.soak


def amounts(tenth: int) -> list[Any]:
    """Return the parameters of a test: a tenth, and all of it."""
    return [
        pytest.param(tenth, marks=EXHAUSTIVE),
        pytest.param(10 * tenth, marks=[SOAK, pytest.mark.timeout(0)]),
    ]


def resident_bytes() -> int:
    """Return the memory of this process that is resident."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors_and_threads() -> tuple[int, int]:
    """Return how many there are; threads that Python does not know of count too."""
    return tuple(len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))  # type: ignore[return-value]


@pytest.mark.parametrize("calls", amounts(20_000))
def test_calls_keep_memory_flat(calls: int) -> None:
    """Of every size, captured or not, in any order."""
    rng = random.Random(0)
    inputs = [rows(1 + at, seed=at) for at in range(12)]
    module = toy(2)
    wanted = [plain(module, x) for x in inputs]
    with build(module, sizes=[4, 8]) as runner:

        def call(times: int) -> tuple[int, int]:
            for _ in range(times):
                at = rng.randrange(len(inputs))
                got = runner(inputs[at])
            torch.testing.assert_close(got, wanted[at])
            return resident_bytes(), len(gc.get_objects())

        call(calls // 10)
        memory, objects = call(calls // 10)
        later_memory, later_objects = call(calls - 2 * (calls // 10))
        assert later_memory - memory < 2 * MIB
        assert abs(later_objects - objects) < 200
        counted = runner.stats()["hits"].values()
        assert sum(counted) + sum(f["count"] for f in runner.stats()["fallbacks"]) == calls


@pytest.mark.slow
@pytest.mark.parametrize("builds", amounts(20))
def test_builds_and_closes_leave_no_memory_thread_or_descriptor(
    tmp_path: Path, builds: int
) -> None:
    """Each traced anew; tables of Dynamo and fake tensors grow by 260 KiB with each trace."""

    def once(seed: int) -> None:
        config = make_config()
        config.cache = CacheConfig(dir=str(tmp_path / str(seed)))
        module = toy(2, seed)
        x = rows(5)
        with pcgsvc.build_runner(module, x, dynamic_dims={"x": 0}, config=config) as runner:
            torch.testing.assert_close(runner(x), plain(module, x))

    for seed in range(5):
        once(seed)
    memory, others = resident_bytes(), descriptors_and_threads()
    for seed in range(5, 5 + builds):
        once(seed)
    assert descriptors_and_threads() == others
    assert resident_bytes() - memory < 2 * MIB + builds * MIB // 4
    kept = [
        type(o) for o in gc.get_objects() if type(o) in (pcgsvc.Runner, Workspace, CompiledModel)
    ]
    assert not kept


@pytest.mark.parametrize("rounds", amounts(3))
def test_eight_threads_call_while_runners_are_closed_and_built_anew(rounds: int) -> None:
    """A call is right, or says that its runner is closed; the next one finds the new runner."""
    inputs = [rows(1 + at, seed=at) for at in range(12)]
    module = toy(2)
    wanted = [plain(module, x) for x in inputs]
    current = [build(module, sizes=[4, 8])]
    wrong: list[str] = []
    right = [0] * 8
    done = threading.Event()

    def call(number: int) -> None:
        rng = random.Random(number)
        while not done.is_set():
            at = rng.randrange(len(inputs))
            try:
                got = current[0](inputs[at])
            except PcgError as error:
                if "is closed" not in str(error):
                    wrong.append(str(error))
                time.sleep(0.001)
                continue
            except Exception as error:  # noqa: BLE001 - any is a failure
                wrong.append(repr(error))
                continue
            if torch.allclose(got, wanted[at], atol=1e-5):
                right[number] += 1
            else:
                wrong.append(f"{len(inputs[at])} rows")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for at in range(rounds):
        old = current[0]
        if at % 2:  # the new one is there before the old one goes
            current[0] = build(module, sizes=[4, 8])
            old.close()
        else:
            old.close()
            current[0] = build(module, sizes=[4, 8])
    done.wait(0.2)
    done.set()
    for thread in threads:
        thread.join()
    current[0].close()
    assert not wrong, wrong[:3]
    assert min(right) > 0


# ---- processes -----------------------------------------------------------------------------------


def begin(root: Path, where: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(root), where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(WORKER.parents[1]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(root.parent),
        },
    )


def run(root: Path, where: str) -> dict[str, Any]:
    """Return what a process that ends by itself has printed."""
    process = begin(root, where)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.slow
@EXHAUSTIVE
@pytest.mark.parametrize("stage", ["compile", "capture", "write"])
def test_sigterm_in_the_middle_of_a_build_leaves_nothing_half_written(
    tmp_path: Path, root: Path, stage: str
) -> None:
    process = begin(root, stage)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, err
    with open_store(root) as store:
        assert store.check().ok
    # What was captured had been stored before; else the next run builds.
    assert run(root, "run") == {"right": True, "start": "warm" if stage == "capture" else "cold"}
    assert run(root, "run") == {"right": True, "start": "warm"}
    with open_store(root) as store:
        report = store.check()
    assert report.ok
    assert not report.strays
    assert not [path for path in all_files(root) if path.name.startswith(".")]


@pytest.mark.slow
@EXHAUSTIVE
def test_a_process_forked_after_import_builds_and_calls(root: Path) -> None:
    assert run(root, "fork") == {"right": True, "child": 0}
