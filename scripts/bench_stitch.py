#!/usr/bin/env python3
"""Time `capture.replay=stitched` beside pieces and one full graph; prints one JSON object.

    python scripts/bench_stitch.py [--llama] [--out FILE]

A decoder of 32 layers x 512 under Inductor whose op launches one Triton kernel; its grid and an
integer argument come from the step's lengths on the host. `full` froze those of its capture: what
cannot be had for such an op, as the yardstick. Per case: microseconds of host time until a step is
enqueued (median, 10th percentile), and back to back (median of rounds), over bare replays whose
contexts are made beforehand. `--llama`: Llama-3-8B shapes, `attention=triton`, 8 requests of 512.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pcgsvc
from pcgsvc.config import Mode
from pcgsvc.cuda_driver import Launch
from pcgsvc.forward.batch import check_batch
from pcgsvc.ops.context import ForwardContext, reset_context, set_context
from pcgsvc.ops.launches import triton_launch
from pcgsvc.serve.runner import Runner

LAYERS, WIDTH, ROWS = 32, 512, 8


@triton.jit(do_not_specialize=["total"])
def attend_kernel(q, k, v, out, row, total, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write q + v; splits beyond the first have nothing to do."""
    at = tl.arange(0, WIDTH)
    if tl.program_id(1) == 0:
        here = tl.program_id(0) * row + at
        value = tl.load(q + here) + tl.load(v + here)
        tl.store(out + tl.program_id(0) * WIDTH + at, tl.where(total > 0, value, 0))


def call_of(context: ForwardContext, q: Any, k: Any, v: Any, out: Any) -> tuple[Any, Any]:
    """Return the grid and arguments of the launch: one split per 64 keys of the longest request."""
    lengths = context.seq_lens_host
    args = (q, k, v, out, q.stride(0), sum(lengths), WIDTH)
    return (q.shape[0], -(-max(lengths) // 64), 1), args


def plan(context: ForwardContext, *tensors: torch.Tensor) -> Sequence[Launch]:
    """Describe the launch; see `OpSpec.plan_launches`."""
    grid, args = call_of(context, *tensors)
    launch = triton_launch(attend_kernel, grid, *args)
    assert launch is not None
    return [launch]


@pcgsvc.splitting_op(
    "benchstitch::attend", mutates_args=("out",), zeroes_padding=True, plan_launches=plan
)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Stand in for attention that is planned on the host."""
    grid, args = call_of(pcgsvc.current_context(), q, k, v, out)
    attend_kernel[grid](*args)


@pcgsvc.splitting_op("benchstitch::python", mutates_args=("out",), zeroes_padding=True)
def python(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """The same without a plan: its Python is captured at each step."""
    grid, args = call_of(pcgsvc.current_context(), q, k, v, out)
    attend_kernel[grid](*args)


@pcgsvc.splitting_op(
    "benchstitch::frozen", mutates_args=("out",), support="always", zeroes_padding=True
)
def frozen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """The same kernel, with lengths of its own: can be inside a full graph."""
    attend_kernel[(q.shape[0], 1, 1)](q, k, v, out, q.stride(0), 1, WIDTH)


class Block(torch.nn.Module):
    """A decoder block."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op
        self.norm1, self.norm2 = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> [rows, width]."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        out = torch.empty_like(x)
        getattr(torch.ops.benchstitch, self.op)(q, k, v, out)
        x = x + self.out(out)
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def build(op: str, *overrides: str) -> Runner:
    """Build a runner of the benchmark model."""
    torch.manual_seed(0)
    blocks = [Block(op).to("cuda", torch.bfloat16) for _ in range(LAYERS)]
    module = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
    words = ["capture.self_check=false", f"capture.sizes=[{ROWS}]", "compiler=inductor"]
    config = pcgsvc.load_config([*words, "cache.mode=off", *overrides])
    example = {"input": torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)}
    return pcgsvc.build_runner(module, example, dynamic_dims={"input": 0}, config=config)


def contexts(runner: Runner, mode: Mode, lengths: Sequence[int]) -> list[ForwardContext]:
    """Return the context of one step per longest length."""
    found = []
    for length in lengths:
        batch = pcgsvc.Batch(query_lens=[1] * ROWS, seq_lens=[length] * ROWS)
        checked = check_batch(batch, ROWS, None)
        found.append(runner.memory.context(checked, ROWS, None, in_full_graph=mode is Mode.FULL))
    return found


def measure(steps: Sequence[Callable[[], Any]], given: Sequence[Any]) -> dict[str, float]:
    """Return host and back-to-back times of replaying `steps` under each context in turn."""
    turn = itertools.cycle(given)

    def run() -> None:
        token = set_context(next(turn))
        for step in steps:
            step()
        reset_context(token)

    for _ in range(10):
        run()
    torch.cuda.synchronize()
    hosts = []
    for _ in range(200):
        started = time.perf_counter()
        run()
        hosts.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    rounds = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(60):
            run()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / 60)
    return {
        "host_us": round(1e6 * statistics.median(hosts), 1),
        "host_low_us": round(1e6 * statistics.quantiles(hosts, n=10)[0], 1),
        "step_us": round(1e6 * statistics.median(rounds), 1),
    }


def yardstick() -> float:
    """Return microseconds per kernel of a graph of 200 tiny ones: the state of the card."""
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            x.add_(1)
    return round(measure([graph.replay], [None])["step_us"] / 200, 3)


LENGTHS = {"same": [512], "integers": [512, 511, 510, 509], "grids": [512, 64, 300, 1024]}


def row(op: str, mode: Mode, *overrides: str) -> dict[str, Any]:
    """Build one way, and time it where nothing, integers alone, or grids too change each step."""
    with build(op, f"mode={mode.value}", *overrides) as runner:
        (entry,) = runner.table.entries.values()
        steps, out = entry.calls, {"calls": len(entry.calls), "device_bytes": None}
        out["device_bytes"] = runner.table.device_bytes
        out["capture_seconds"] = round(runner.table.capture_seconds, 4)
        if entry.joined is not None and entry.joined.comparison is not None:
            out["comparison"] = str(entry.joined.comparison)
        with torch.no_grad(), runner.memory.on_stream():
            for name, lengths in LENGTHS.items():
                out[name] = measure(steps, contexts(runner, mode, lengths))
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        batches = [
            pcgsvc.Batch(query_lens=[1] * ROWS, seq_lens=[n] * ROWS) for n in LENGTHS["grids"]
        ]
        turn = itertools.cycle(batches)
        out["whole_call_grids"] = measure([lambda: runner(x, batch=next(turn))], [None])
    return {**out, "yardstick_us": yardstick()}


def decoder() -> dict[str, Any]:
    """Time the decoder."""
    out: dict[str, Any] = {
        "full": row("frozen", Mode.FULL),
        "pieces": row("attend", Mode.PIECEWISE, "capture.replay=pieces"),
        "stitched": row("attend", Mode.PIECEWISE, "capture.replay=stitched"),
        "stitched_without_plan": row("python", Mode.PIECEWISE, "capture.replay=stitched"),
        "auto": row("attend", Mode.PIECEWISE, "capture.replay=auto"),
    }
    full = out["full"]["same"]["step_us"]
    out["to_full"] = {
        name: {case: round(out[name][case]["step_us"] / full, 3) for case in LENGTHS}
        for name in ("pieces", "stitched", "stitched_without_plan")
    }
    return out


def llama() -> dict[str, Any]:
    """Time Llama-3-8B shapes with `attention=triton`: its launches are the same at every step."""
    words = ["model=llama", "model.preset=8b", "attention=triton", "dtype=bfloat16"]
    words += ["compiler=inductor", f"capture.sizes=[{ROWS}]", "capture.self_check=false"]
    out: dict[str, Any] = {}
    for name, more in {
        "full": ["mode=full"],
        "pieces": ["mode=piecewise", "capture.replay=pieces"],
        "stitched": ["mode=piecewise", "capture.replay=stitched"],
    }.items():
        with pcgsvc.load_runner([*words, "attention.max_model_len=1024", *more]) as runner:
            assert runner.blocks is not None
            tables = [runner.blocks.allocate(32) for _ in range(ROWS)]
            batch = pcgsvc.Batch(query_lens=[1] * ROWS, seq_lens=[512] * ROWS, block_tables=tables)
            checked = check_batch(batch, ROWS, runner.memory.geometry)
            (((mode, _), entry),) = runner.table.entries.items()
            generator = torch.Generator().manual_seed(0)
            made = runner.request.bundle.make_inputs(ROWS, generator)
            with torch.no_grad(), runner.memory.on_stream():
                runner.memory.load({k: v.cuda() for k, v in made.items()}, ROWS, ROWS)
                context = runner.memory.context(checked, ROWS, in_full_graph=mode is Mode.FULL)
                out[name] = {"calls": len(entry.calls), **measure(entry.calls, [context])}
            out[name]["device_bytes"] = runner.table.device_bytes
        out[name]["yardstick_us"] = yardstick()
    full = out["full"]["step_us"]
    out["to_full"] = {n: round(out[n]["step_us"] / full, 4) for n in ("pieces", "stitched")}
    return out


def main() -> None:
    """Run, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "pcgsvc": pcgsvc.__version__,
        "rows": ROWS,
        "decoder": decoder(),
    }
    if words.llama:
        found["llama_8b"] = llama()
    text = json.dumps(found, indent=1)
    print(text)
    if words.out is not None:
        words.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
