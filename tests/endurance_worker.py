"""One process of test_endurance.py: `endurance_worker.py ROOT WHERE`.

WHERE: `fork` builds and calls before and after a fork, in both processes; `run` builds and prints
one line of JSON; else a stage, in which the process prints `ready` and waits to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from core_helpers import make_config, plain, rows, toy

import pcgsvc
from pcgsvc.cache.pieces import Pieces
from pcgsvc.capture.session import Session
from pcgsvc.config import CacheConfig

STAGES = {
    "compile": (Pieces, "_compile"),
    "capture": (Session, "region"),
    "write": (os, "fsync"),
}


def wait_at(stage: str) -> None:
    """Have the stage print `ready` as it begins, and wait."""
    owner, name = STAGES[stage]

    def waits(*_: Any, **__: Any) -> None:
        print("ready", flush=True)  # noqa: T201 - the parent reads it
        time.sleep(60)

    setattr(owner, name, waits)


def build_and_call(root: str) -> dict[str, Any]:
    """Build a tiny runner against a cache, call it, close it."""
    config = make_config(sizes=(1, 2))
    config.cache = CacheConfig(dir=root)
    module, x = toy(2), rows(2)
    with pcgsvc.build_runner(module, x, dynamic_dims={"x": 0}, config=config) as runner:
        right = torch.equal(runner(x), plain(module, x))
        return {"right": right, "start": runner.report["compile"]["start"]}


def forked(root: str) -> dict[str, Any]:
    """Build, fork, and build again in both processes; the child's exit status is in the result."""
    before = build_and_call(root)
    child = os.fork()
    if child == 0:
        os._exit(0 if build_and_call(root)["right"] else 1)
    _, status = os.waitpid(child, 0)
    after = build_and_call(root)
    return {"right": before["right"] and after["right"], "child": status}


def main() -> None:
    """Do what the command line says."""
    root, where = sys.argv[1:]
    torch.set_num_threads(1)
    if where in STAGES:
        wait_at(where)
    result = forked(root) if where == "fork" else build_and_call(root)
    print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
