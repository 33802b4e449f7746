"""One process of test_pipeline_processes.py: builds one tiny eager runner and calls it.

Prints `ready` once torch and the tests' helpers are imported, waits for a line on stdin, builds,
prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from core_helpers import make_config, rows, toy
from model_helpers import make_context

import pcgsvc
from pcgsvc.cache.pieces import Pieces
from pcgsvc.config import CacheConfig
from pcgsvc.ops.context import use_context


def main() -> None:
    """Build against the root that is named; write to the log when the compiling begins."""
    root, log = sys.argv[1], Path(sys.argv[2])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    torch.set_num_threads(1)
    compile_piece = Pieces._compile

    def slow_and_told(*args: object) -> object:
        with log.open("a") as file:
            file.write("begin\n")
        time.sleep(0.1)
        return compile_piece(*args)  # type: ignore[arg-type]

    Pieces._compile = slow_and_told  # type: ignore[method-assign, assignment]
    config = make_config(sizes=(1, 2))
    config.cache = CacheConfig(dir=root)
    module, x = toy(2), rows(2)
    print("ready", flush=True)  # noqa: T201 - the parent reads it
    sys.stdin.readline()
    with pcgsvc.build_runner(module, x, dynamic_dims={"x": 0}, config=config) as runner:
        with torch.no_grad(), use_context(make_context(None, [2])):
            right = torch.equal(runner(x), module(x))
        compiled = runner.report["compile"]
    result = {"right": right, "start": compiled["start"], "compiled": compiled["num_compiled"]}
    print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
