#!/usr/bin/env python3
"""Time `capture.replay=stitched` beside pieces and one full graph; prints one JSON object.

    python scripts/bench_stitch.py [--llama LAYERS] [--out FILE]

A decoder of 32 layers x 512 under Inductor whose op launches one Triton kernel; its grid and an
integer argument come from the step's lengths on the host. `full` froze those of its capture: what
cannot be had for such an op, as the yardstick. Per case: microseconds of host time until a step is
enqueued (median, 10th percentile), and back to back (median of rounds), over bare replays whose
contexts are made beforehand. Pieces and stitched are the same captured entry. `--llama`:
Llama-3-8B shapes with so many layers, `attention=triton`, eager, 8 requests of 512 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_model import chain_us, launch_us

import pcgsvc
from pcgsvc.capture.stitch import Joined, Stitched
from pcgsvc.config import Mode
from pcgsvc.cuda_driver import Launch
from pcgsvc.forward.batch import check_batch
from pcgsvc.ops.context import ForwardContext, set_context, use_context
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
    config = pcgsvc.load_config([*words, *overrides])
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
    """Return host and back-to-back times of replaying `steps` under each context in turn.

    Host times are those of the round in which launching a graph of one kernel took least.
    """
    turn = itertools.cycle(given)

    def run() -> None:
        set_context(next(turn))
        for step in steps:
            step()
        set_context(None)

    for _ in range(10):
        run()
    torch.cuda.synchronize()
    hosts: dict[float, list[float]] = {}
    for _ in range(6):
        state, times = launch_us(), []
        for _ in range(40):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
            torch.cuda.synchronize()
        hosts[max(state, launch_us())] = times
    quietest = min(hosts)
    rounds = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(30):
            run()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / 30)
    return {
        "host_us": round(1e6 * statistics.median(hosts[quietest]), 1),
        "host_low_us": round(1e6 * statistics.quantiles(hosts[quietest], n=10)[0], 1),
        "launch_us": quietest,
        "step_us": round(1e6 * statistics.median(rounds), 1),
    }


LENGTHS = {"same": [512], "integers": [512, 511, 510, 509], "grids": [512, 64, 300, 1024]}


def cases(runner: Runner, mode: Mode, steps: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    """Time one way to replay, where nothing, integers alone, or grids too change each step."""
    with torch.no_grad(), runner.memory.on_stream():
        return {
            name: measure(steps, contexts(runner, mode, lengths))
            for name, lengths in LENGTHS.items()
        }


def whole_call(runner: Runner) -> dict[str, float]:
    """Time calls of a runner whose lengths change each time."""
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    batches = [pcgsvc.Batch(query_lens=[1] * ROWS, seq_lens=[n] * ROWS) for n in LENGTHS["grids"]]
    turn = itertools.cycle(batches)
    return measure([lambda: runner(x, batch=next(turn))], [None])


def decoder(out: dict[str, Any], cache: str) -> None:
    """Time the decoder; its regions are compiled once."""
    out["yardstick_us"] = [chain_us()]
    with build("frozen", "mode=full", cache) as runner:
        (entry,) = runner.table.entries.values()
        out["full"] = {
            **cases(runner, Mode.FULL, entry.calls),
            "whole_call_grids": whole_call(runner),
        }
    ways = {
        "pieces": ("attend", "capture.replay=pieces"),
        "stitched": ("attend", "capture.replay=stitched"),
        "stitched_without_plan": ("python", "capture.replay=stitched"),
    }
    for name, (op, replay) in ways.items():
        with build(op, "mode=piecewise", replay, cache) as runner:
            (entry,) = runner.table.entries.values()
            out[name] = cases(runner, Mode.PIECEWISE, entry.calls)
            out[name]["whole_call_grids"] = whole_call(runner)
            if entry.joined is not None and entry.joined.stitched:
                if name == "stitched":
                    with torch.no_grad(), runner.memory.on_stream():
                        out["parts"] = parts(runner, entry.joined)
                out[name]["cost"] = cost_of(runner, entry.joined)
        out["yardstick_us"].append(chain_us())
    full = out["full"]["same"]["step_us"]
    out["to_full"] = {
        name: {case: round(out[name][case]["step_us"] / full, 3) for case in LENGTHS}
        for name in ("pieces", "stitched", "stitched_without_plan")
    }


def parts(runner: Runner, joined: Joined) -> dict[str, float]:
    """Return median host µs of what a stitched step whose integers change does, part by part."""
    (one,) = joined.stitched
    turn = itertools.cycle(contexts(runner, Mode.PIECEWISE, LENGTHS["integers"]))
    nodes = [node for source in one.sources for m in source.members.values() for node in m.nodes]

    def plan_launches() -> None:
        set_context(context := next(turn))
        for source in one.sources:
            source.ask(context)

    def plan_and_set() -> None:
        set_context(context := next(turn))
        for source in one.sources:
            source.patch(source.ask(context))

    def set_nothing_new() -> None:
        for node in nodes:
            node.change(None, [])

    composed: Any = one._composed
    stream = torch.cuda.current_stream().cuda_stream
    timed: dict[str, Callable[[], object]] = {
        "plan": plan_launches,
        "plan_and_set": plan_and_set,
        "set_nothing_new": set_nothing_new,
        "upload": lambda: composed._made.upload(stream),
        "launch": lambda: composed.replay(patched=False),
    }
    return {"nodes": len(nodes)} | {
        name: measure([run], [None])["host_us"] for name, run in timed.items()
    }


def cost_of(runner: Runner, joined: Joined) -> dict[str, float]:
    """Return what one more executable of an entry takes: milliseconds, and bytes of the device.

    The first one's nodes are taken from it: it is not replayed any more.
    """
    (one,) = joined.stitched
    context = contexts(runner, Mode.PIECEWISE, [512])[0]
    free = torch.cuda.mem_get_info()[0]
    with use_context(context), runner.memory.on_stream():
        started = time.perf_counter()
        more = [Stitched(one.parts, one.sources, one.composer, Counter()) for _ in range(8)]
        seconds = (time.perf_counter() - started) / len(more)
        for other in more:
            other()
        torch.cuda.synchronize()
    taken = (free - torch.cuda.mem_get_info()[0]) / len(more)
    return {"ms": round(1e3 * seconds, 2), "bytes": int(taken)}


def llama(out: dict[str, Any], layers: int) -> None:
    """Time Llama-3-8B shapes with `attention=triton`: its launches are the same at every step."""
    words = ["model=llama", "model.preset=8b", f"model.num_layers={layers}", "dtype=bfloat16"]
    words += ["attention=triton", "compiler=eager", f"capture.sizes=[{ROWS}]", "cache.mode=off"]
    words += ["capture.self_check=false", "attention.max_model_len=1024"]
    out["layers"] = layers
    for name, more in (
        ("full", ["mode=full"]),
        ("stitched", ["mode=piecewise", "capture.replay=stitched"]),
    ):
        with pcgsvc.load_runner([*words, *more]) as runner:
            assert runner.blocks is not None
            tables = [runner.blocks.allocate(32) for _ in range(ROWS)]
            batch = pcgsvc.Batch(query_lens=[1] * ROWS, seq_lens=[512] * ROWS, block_tables=tables)
            checked = check_batch(batch, ROWS, runner.memory.geometry)
            made = runner.request.bundle.make_inputs(ROWS, torch.Generator().manual_seed(0))
            (entry,) = runner.table.entries.values()
            with torch.no_grad(), runner.memory.on_stream():
                runner.memory.load({k: v.cuda() for k, v in made.items()}, ROWS, ROWS)
                context = runner.memory.context(checked, ROWS, in_full_graph=name == "full")
                out[name] = measure(entry.calls, [context])
                if name == "stitched":
                    out["pieces"] = measure(entry.steps, [context])
        out["yardstick_us"] = chain_us()
    full = out["full"]["step_us"]
    out["to_full"] = {n: round(out[n]["step_us"] / full, 4) for n in ("pieces", "stitched")}


def main() -> None:
    """Run, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=int, metavar="LAYERS")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "pcgsvc": pcgsvc.__version__,
        "rows": ROWS,
        "llama_8b": {},
        "decoder": {},
    }
    try:
        if words.llama:
            llama(found["llama_8b"], words.llama)
        with tempfile.TemporaryDirectory() as folder:
            decoder(found["decoder"], f"cache.dir={folder}")
    finally:
        text = json.dumps(found, indent=1)
        print(text)
        if words.out is not None:
            words.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
