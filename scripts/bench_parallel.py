"""`scripts/bench parallel`: tensor and expert parallel steps over the devices of one machine.

Run by itself it is one rank of that benchmark, started by torchrun: `bench_parallel.py SPEC`. On
CUDA, Llama-3-8B shapes in bf16 with random weights made on each device, context 512; on the CPU a
tiny model over gloo, which shows that it runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import pcgsvc
from pcgsvc.capture.plan import general_descriptor, uniform_descriptor
from pcgsvc.config import Mode
from pcgsvc.forward.batch import check_batch
from pcgsvc.ops.context import use_context
from pcgsvc.serve.runner import Runner

RANKS, CONTEXT, BATCHES = 2, 512, (1, 8)
LIMITS_S = {"tensor": 240, "starts": 240, "experts": 120}
"""The parts, and how long each may take; one that takes longer is left with what it has found."""


def bench_parallel(device: str, limits_s: dict[str, float] = LIMITS_S) -> dict[str, Any]:
    """Return what each part found, and how long it took; a part fails alone."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, limit_s in limits_s.items():
            began, row = time.perf_counter(), found.setdefault(part, {})
            try:
                if part == "starts":
                    starts(device, folder, limit_s, row)
                else:
                    _launched({"part": part, "device": device, "folder": folder}, limit_s, row)
            except (subprocess.SubprocessError, KeyError, ValueError) as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[-500:]}"
            row["took_s"] = round(time.perf_counter() - began, 1)
            print(json.dumps({part: row}), file=sys.stderr, flush=True)
    return found


def _torchrun(arguments: list[str]) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(RANKS), *arguments]


def _launched(spec: dict[str, Any], limit_s: float, row: dict[str, Any]) -> None:
    """Run a part on all ranks; `row` gets the last that rank 0 printed, also where it failed."""
    env = os.environ | {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    command = ["timeout", str(limit_s), *_torchrun([__file__, json.dumps(spec)])]
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    row.update(json.loads(lines[-1]) if lines else {})
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command)


def tell(found: dict[str, Any]) -> None:
    """Print what was found so far, on rank 0."""
    if distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)


def words_of(device: str, folder: str) -> list[str]:
    """Return the settings of the model that is timed."""
    words = ["model=llama", f"cache.dir={folder}", "capture.self_check=false"]
    words += ["attention.max_model_len=1024", "capture.sizes=[1,8]", "mode=full_and_piecewise"]
    if device == "cuda":
        return [*words, "model.preset=8b", "attention=triton"]
    return [*words, "device=cpu", "attention.max_model_len=null", "compiler=eager"]


# ---- one rank ------------------------------------------------------------------------------------


class Timer:
    """Times steps that all ranks make together."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.sync: Callable[[], None] = torch.cuda.synchronize if self.cuda else lambda: None
        self.repeats, self.rounds = (100, 7) if self.cuda else (4, 3)

    def __call__(self, run: Callable[[], Any]) -> dict[str, float]:
        """Return the median step in µs, back to back, and how far apart the ranks end a step."""
        for _ in range(self.repeats // 4):
            run()
        rounds, ends = [], []
        for _ in range(self.rounds):
            self.sync()
            distributed.barrier()
            self.sync()
            began = time.perf_counter()
            for _ in range(self.repeats):
                run()
            self.sync()
            rounds.append((time.perf_counter() - began) / self.repeats)
        for _ in range(self.repeats // 2):
            run()
            self.sync()
            ends.append(time.perf_counter())  # one clock for all processes of a machine
        every: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, ends)
        skews = [max(at) - min(at) for at in zip(*every, strict=True)]
        return {
            "step_us": round(1e6 * statistics.median(rounds), 1),
            "skew_us": round(1e6 * statistics.median(skews), 1),
            "skew_most_us": round(1e6 * max(skews), 1),
        }


def tensor(device: str, folder: str) -> dict[str, Any]:
    """Time decode steps on all ranks and on one, and the floor of the former."""
    timer, words, found = Timer(device), words_of(device, folder), {}
    world = distributed.get_world_size()
    bandwidth = bytes_per_second(timer)
    shared = [*words, f"parallel.tensor={world}"]
    if timer.cuda:
        found["copy_gb_s"] = round(bandwidth / 1e9, 1)
    for name, more in (  # the most telling first: time may end
        ("region", [*shared, "parallel.collectives=region"]),
        ("one", words),
        ("boundary", [*shared, "parallel.collectives=boundary"]),
    ):
        began = time.perf_counter()
        with pcgsvc.load_runner(more) as runner:
            row: dict[str, Any] = {"build_s": round(time.perf_counter() - began, 1)}
            row["compile"] = {
                k: v for k, v in runner.report["compile"].items() if k in ("start", "num_compiled")
            }
            for batch in BATCHES:
                row[f"batch_{batch}"] = decode(runner, batch, timer)
            if name == "region":
                row["floor"] = floors(runner, bandwidth, timer)
            found[name] = row
        tell(found | compared(found))
    return found | compared(found)


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Return the speed against one device, and the step against its floor."""
    if not {"one", "region"} <= found.keys():
        return {}
    keys = [f"batch_{batch}" for batch in BATCHES]
    one, many = ([found[n][key]["full"]["step_us"] for key in keys] for n in ("one", "region"))
    floor = [found["region"]["floor"][key]["us"] for key in keys]
    return {
        key: {"times_one": round(a / b, 3), "to_floor": round(b / c, 3)}
        for key, a, b, c in zip(keys, one, many, floor, strict=True)
    }


def decode(runner: Runner, batch: int, timer: Timer) -> dict[str, Any]:
    """Time the entries of a decode step of `batch` requests, and the call of the runner."""
    geometry, memory = runner.memory.geometry, runner.memory
    assert geometry is not None
    length = min(CONTEXT, geometry.max_model_len)
    blocks, first = -(-length // geometry.block_size), geometry.first_free_block
    tables = [[first + r * blocks + b for b in range(blocks)] for r in range(batch)]
    lens = pcgsvc.Batch(query_lens=[1] * batch, seq_lens=[length] * batch, block_tables=tables)
    checked = check_batch(lens, batch, geometry)
    made = runner.request.bundle.make_inputs(batch, torch.Generator().manual_seed(0))
    inputs = {name: value.to(memory.device) for name, value in made.items()}
    found: dict[str, Any] = {"call": timer(lambda: runner(**inputs, batch=checked))}
    memory.load(inputs, batch, batch)
    for mode, key, query_len in (
        (Mode.FULL, uniform_descriptor(batch, 1), 1),
        (Mode.PIECEWISE, general_descriptor(batch), None),
    ):
        entry = runner.table.entries.get((mode, key))
        if entry is None:
            continue
        with (
            torch.no_grad(),
            memory.on_stream(),
            use_context(memory.context(checked, batch, query_len)),
        ):
            found[mode.value] = timer(lambda steps=entry.steps: [step() for step in steps])
    if "full" not in found:
        found["full"] = found["piecewise"]
    return found


def bytes_per_second(timer: Timer) -> float:
    """Return the bandwidth of a copy on the device, bytes read and written."""
    size = 1 << 30 if timer.cuda else 1 << 20
    source = torch.empty(size, dtype=torch.int8, device="cuda" if timer.cuda else "cpu")
    target = torch.empty_like(source)
    return 2 * size / (timer(lambda: target.copy_(source))["step_us"] * 1e-6)


def floors(runner: Runner, bandwidth: float, timer: Timer) -> dict[str, Any]:
    """Return per batch the least time of a step: memory read once, and its collectives alone."""
    tensors, spec = runner.memory.tensors, runner.memory.attention.spec  # type: ignore[union-attr]
    table = tensors["embed_tokens.weight"]  # a few rows of it are read
    weights = sum(t.numel() * t.element_size() for t in tensors.values()) - table.nbytes
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * table.element_size()
    dims: Any = runner.model.module.dims  # type: ignore[attr-defined]
    found = {}
    for batch in BATCHES:
        x = table.new_zeros(batch, dims.hidden_size)
        head = table.new_zeros(batch, dims.vocab_size // distributed.get_world_size())
        alone = timer(collectives(x, head, 2 * dims.num_layers, timer.cuda))
        memory_us = 1e6 * (weights + batch * CONTEXT * per_token) / bandwidth
        found[f"batch_{batch}"] = {
            "memory_us": round(memory_us, 1),
            "collectives_us": alone["step_us"],
            "us": round(memory_us + alone["step_us"], 1),
        }
    return found


def collectives(
    x: torch.Tensor, head: torch.Tensor, count: int, cuda: bool
) -> Callable[[], object]:
    """Return what runs the collectives of one step: in a graph of their own on CUDA."""
    logits = head.new_empty(head.shape[0] * distributed.get_world_size(), head.shape[1])

    def run() -> None:
        for _ in range(count):
            distributed.all_reduce(x)
        distributed.all_gather_into_tensor(logits, head)

    if not cuda:
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def experts(device: str, folder: str) -> dict[str, Any]:
    """Time steps of a mixture whose experts are spread over the ranks, and one with all local."""
    timer, world, found = Timer(device), distributed.get_world_size(), {}
    words = [*words_of(device, folder), "model=llama_moe", "mode=piecewise"]
    if device == "cuda":
        words += ["model.preset=8x7b", "model.num_layers=4"]
    for name, more in (
        ("local", ["model.moe.backend=local"]),
        ("all_to_all", ["model.moe.backend=all_to_all"]),
        ("tensor", [f"parallel.tensor={world}"]),
        ("both", [f"parallel.tensor={world}", "model.moe.backend=all_to_all"]),
    ):
        with pcgsvc.load_runner([*words, *more]) as runner:
            found[name] = {f"batch_{b}": decode(runner, b, timer)["piecewise"] for b in BATCHES}
        tell(found)
    return found


# ---- starts --------------------------------------------------------------------------------------


def starts(device: str, folder: str, limit_s: float, found: dict[str, Any]) -> None:
    """Find how long a warm start of one process and of all ranks takes, in seconds.

    Where the first start of a program is cold, a second one is made.
    """
    base, ends = [*words_of(device, folder), "bench.enabled=false"], time.perf_counter() + limit_s
    for name, ranks in (("one", 1), ("all", RANKS)):
        report = Path(folder) / f"{name}.json"
        words = ["-m", "pcgsvc", *base, f"parallel.tensor={ranks}", f"report={report}"]
        words.append(f"hydra.run.dir={folder}/out")
        for _ in range(2):
            command = [sys.executable, *words] if ranks == 1 else _torchrun(words)
            left = max(1.0, ends - time.perf_counter())
            subprocess.run(["timeout", str(left), *command], stdout=subprocess.DEVNULL, check=True)
            paths = [report, *([report.with_suffix(".rank1.json")] if ranks > 1 else [])]
            read = [json.loads(path.read_text()) for path in paths]
            start = {r["compile"]["start"] for r in read}
            found[f"{name}_{min(start)}"] = {
                "ready_s": round(max(r["ready"]["seconds"] for r in read), 2),
                "compiled": [r["compile"]["num_compiled"] for r in read],
                "parts": {k: round(v, 2) for k, v in read[0]["ready"]["parts"].items()},
            }
            if start == {"warm"}:
                break
    ready = [found[name]["ready_s"] for name in ("one_warm", "all_warm")]
    found["warm_times_one"] = round(ready[1] / ready[0], 3)


def main() -> None:
    """Run one part as one rank; rank 0 prints what it found."""
    spec = json.loads(sys.argv[1])
    device = spec["device"]
    if device == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        distributed.init_process_group("nccl", device_id=here)
    else:
        distributed.init_process_group("gloo")
    found = {"tensor": tensor, "experts": experts}[spec["part"]](device, spec["folder"])
    tell(found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
