"""One of two processes: its own batches over experts that both share, then a command line.

Prints what it got as one JSON line: its rank, how many experts it holds, hits, and the largest
relative difference per call from a runner that holds every expert. Then does what its arguments
say: the port for the group of the command line, and the words of it.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import distributed

import pcgsvc
from pcgsvc.jobs.app import main as command_line

WORDS = [
    "model=llama_moe",
    "model.num_layers=2",
    "compiler=eager",
    "mode=piecewise",
    "capture.sizes=[4,8]",
    "device=cpu",
    "cache.mode=off",
]


def main() -> None:
    """Build both runners, call them on batches that differ by rank, compare."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    # Each calls both sizes, in another order, with another number of rows.
    steps = [[3, 2], [1, 2]] if rank == 0 else [[4], [5, 1, 1]]
    calls = [torch.randint(512, (sum(lens),), generator=generator) for lens in steps]
    with pcgsvc.load_runner(WORDS) as alone:
        wanted = [run(alone, ids, lens) for ids, lens in zip(calls, steps, strict=True)]
    with pcgsvc.load_runner([*WORDS, "model.moe.backend=all_to_all"]) as shared:
        got = [run(shared, ids, lens) for ids, lens in zip(calls, steps, strict=True)]
        experts = len(shared.model.module.layers[0].experts.down)  # type: ignore[attr-defined]
        hits = shared.stats()["hits"]
    distributed.destroy_process_group()
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)]
    found = {"rank": rank, "experts": experts, "hits": hits, "errors": errors}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os.environ["MASTER_PORT"] = sys.argv[1]
    sys.exit(command_line(sys.argv[2:]))


def run(runner: pcgsvc.Runner, ids: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """Return the logits of new requests of some lengths."""
    positions = torch.cat([torch.arange(n) for n in lens])
    result: torch.Tensor = runner(ids, positions, batch=pcgsvc.Batch(query_lens=lens))
    return result


if __name__ == "__main__":
    main()
