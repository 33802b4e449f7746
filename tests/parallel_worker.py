"""One of several ranks: runners of `parallel.tensor` beside what this process computes alone.

Its argument is JSON: `words` of a command line, `cases` of further words, and how many `calls` of
changing sizes each case makes. Prints JSON lines, the last of which has all cases: the largest
relative difference of logits from one process's, how many tokens were compared and differ, what was
compiled, and which graphs served.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from typing import Any

import torch
from torch import distributed

import pcgsvc

STEPS = [[3], [5, 1], [1, 1, 1, 1], [18, 1, 5]]
"""Query lengths of the calls that are compared."""


def main() -> None:
    """Do what the argument says."""
    asked = json.loads(sys.argv[1])
    cuda = torch.cuda.is_available() and "device=cpu" not in asked["words"]
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    found = compare(asked["words"], asked["cases"], asked.get("calls", []))
    began = time.perf_counter()
    distributed.destroy_process_group()
    found["end_s"] = time.perf_counter() - began
    tell(found)


def tell(found: dict[str, Any]) -> None:
    """Print what was found so far."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def compare(words: list[str], cases: list[list[str]], calls: list[int]) -> dict[str, Any]:
    """Return what each case's runner gives beside one of this process alone."""
    alone = ["mode=none", "compiler=eager", "capture.self_check=false", "cache.mode=off"]
    with pcgsvc.load_runner([*words, *alone]) as runner:
        wanted = [call(runner, lens) for lens in STEPS]
    found: list[dict[str, Any]] = []
    for case, count in itertools.zip_longest(cases, calls, fillvalue=0):
        began = time.perf_counter()
        with pcgsvc.load_runner(
            [*words, *case, f"parallel.tensor={distributed.get_world_size()}"]
        ) as runner:
            seconds = time.perf_counter() - began
            got = [call(runner, lens) for lens in STEPS]
            many(runner, count)
            again = [call(runner, lens) for lens in STEPS]
            report, stats = runner.report, runner.stats()
        found.append(
            {
                **differences(got, wanted),
                "repeats": all(map(torch.equal, got, again)),
                "mode": report["mode"]["resolved"],
                "start": report["compile"]["start"],
                "compiled": report["compile"]["num_compiled"],
                "boundaries": report["partition"]["num_boundaries"],
                "parallel": report["parallel"],
                "hits": stats["hits"],
                "seconds": round(seconds, 2),
            }
        )
        tell({"rank": distributed.get_rank(), "cases": found})
    return {"rank": distributed.get_rank(), "cases": found}


def call(runner: pcgsvc.Runner, lens: list[int]) -> torch.Tensor:
    """Return the logits of new requests of some lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(lens))
    ids = torch.randint(200, (sum(lens),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lens])
    device = runner.memory.device
    logits: torch.Tensor = runner(
        ids.to(device), positions.to(device), batch=pcgsvc.Batch(query_lens=lens)
    )
    return logits.float().cpu()


def many(runner: pcgsvc.Runner, calls: int) -> None:
    """Make calls of sizes that change from one to the next."""
    draw = random.Random(0)
    for _ in range(calls):
        call(runner, [draw.randint(1, 8) for _ in range(draw.randint(1, 3))])


def differences(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, Any]:
    """Return how far logits are apart, and at how many clear tokens another one is the largest.

    Clear: the best two are further apart than twice the largest error, or than 1e-3.
    """
    pairs = list(zip(got, wanted, strict=True))
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    clear = wrong = 0
    for a, b in pairs:
        best = b.topk(2).values
        rows = best[:, 0] - best[:, 1] > max(1e-3, 2 * worst)
        clear += int(rows.sum())
        wrong += int((a.argmax(-1) != b.argmax(-1))[rows].sum())
    largest = max(float(b.abs().max()) for b in wanted)
    return {"error": worst / largest, "clear_tokens": clear, "wrong_tokens": wrong}


if __name__ == "__main__":
    main()
