"""What the benchmarks share: models, the timer with its yardstick, and graphs made by hand."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import pcgsvc
from pcgsvc.capture.plan import EntryKey, general_descriptor
from pcgsvc.config import Mode
from pcgsvc.forward.samples import Samples
from pcgsvc.ops.context import use_context
from pcgsvc.program.program import Direct
from pcgsvc.serve.runner import Runner

LAYERS, WIDTH = 32, 512


@pcgsvc.splitting_op("bench::attend", mutates_args=("out",), support="always", zeroes_padding=True)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Stand in for attention: one small kernel."""
    torch.add(q, v, out=out)


class Block(torch.nn.Module):
    """A decoder block with a cheap op in place of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = torch.nn.RMSNorm(width)
        self.norm2 = torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 8 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> [rows, width]."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        out = torch.empty_like(x)
        torch.ops.bench.attend(q, k, v, out)
        x = x + self.out(out)
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


@functools.cache
def decoder(device: str) -> torch.nn.Module:
    """Return the benchmarks' decoder: one for the whole process, so that it is compiled once."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    blocks = [Block(WIDTH).to(device, dtype) for _ in range(LAYERS)]
    return torch.nn.Sequential(*blocks).eval().requires_grad_(False)


@functools.cache
def small(device: str) -> torch.nn.Module:
    """Return a model of two products, whose call is mostly what is around it."""
    torch.manual_seed(0)
    layers = [part for _ in range(2) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers).eval().requires_grad_(False).to(device)


def build(module: torch.nn.Module, overrides: list[str]) -> Runner:
    """Build a runner of one of these models."""
    weight = next(module.parameters())
    config = pcgsvc.load_config(["capture.self_check=false", *overrides])
    example = {"input": weight.new_empty(4, weight.shape[-1]).normal_()}
    return pcgsvc.build_runner(module, example, dynamic_dims={"input": 0}, config=config)


# ---- time ----------------------------------------------------------------------------------------


@functools.cache
def _chain(kernels: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of one-element kernels, and their memory: a graph does not keep it."""
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x.add_(1)
    return graph, x


def chain_us() -> float:
    """Return the µs per kernel of a graph of 200 one-element kernels: the card's state."""
    graph, ends = _chain(200)[0], [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    graph.replay()
    ends[0].record()
    for _ in range(4):
        graph.replay()
    ends[1].record()
    torch.cuda.synchronize()
    return round(ends[0].elapsed_time(ends[1]) / 800 * 1e3, 3)


def launch_us() -> float:
    """Return the median host µs of launching a graph of one kernel: 2.8 where nobody else works."""
    graph, times = _chain(1)[0], []
    for _ in range(40):
        started = time.perf_counter()
        graph.replay()
        times.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    return round(1e6 * statistics.median(times), 2)


def measure(
    run: Callable[[], Any],
    device: str,
    repeats: int = 100,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Return median host time (enqueue only) and back-to-back time per run, in µs.

    `before`: called before each run; not in the host time, but in the back-to-back time.
    `host_low_us`: the 10th percentile. On a lent machine whose CPU others use as well, the median
    says as much about them. `chain_us`, `launch_us`: of the card's yardstick and of the host's,
    right before and right after.
    """
    cuda = device == "cuda"
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    for _ in range(10):
        before()
        run()
    sync()
    states = [(chain_us(), launch_us())] if cuda else []
    hosts = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        run()
        hosts.append(time.perf_counter() - started)
        sync()
    rounds = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(repeats // 4):
            before()
            run()
        sync()
        rounds.append((time.perf_counter() - started) / (repeats // 4))
    found: dict[str, Any] = {
        "host_us": round(1e6 * statistics.median(hosts), 2),
        "host_low_us": round(1e6 * statistics.quantiles(hosts, n=10)[0], 2),
        "step_us": round(1e6 * statistics.median(rounds), 2),
    }
    if cuda:
        states.append((chain_us(), launch_us()))
        found["chain_us"], found["launch_us"] = map(list, zip(*states, strict=True))
    return found


_CACHES = 1 << 21
"""Float64 numbers that are written between two cold runs: more than the processor's caches hold."""


def alone(run: Callable[[], Any], repeats: int = 300) -> dict[str, float]:
    """Return median host µs of a part of a call: in a loop, and with the caches emptied before."""
    between, sync = torch.zeros(_CACHES, dtype=torch.float64), torch.cuda.synchronize
    found: dict[str, float] = {}
    for kind, count in (("loop_us", 4 * repeats), ("cold_us", repeats)):
        times = []
        for at in range(count + 20):
            if kind == "cold_us":
                between.add_(1)
            elif at % 200 == 0 and torch.cuda.is_available():
                sync()  # launches of many queue up
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        found[kind] = round(1e6 * statistics.median(times[20:]), 2)
    return found


# ---- what is timed -------------------------------------------------------------------------------


@contextmanager
def loaded(runner: Runner, key: EntryKey) -> Iterator[None]:
    """Give a block inputs and context of a call that an entry serves, on the caller's stream."""
    mode, (size, _, uniform) = key[0], dataclasses.astuple(key[1])
    samples = Samples(runner.memory, runner.request.bundle.make_inputs, seed=0, query_len=1)
    batch, query_len = samples.batch(size, uniform=uniform), 1 if uniform else None
    with torch.no_grad():
        with runner.memory.on_stream():
            runner.memory.load(samples.inputs(size), size, size)
            full = mode is Mode.FULL
            context = runner.memory.context(batch, size, query_len, in_full_graph=full)
        with use_context(context):
            yield


def steps_of(runner: Runner, key: EntryKey) -> Callable[[], None]:
    """Return a callable that replays one entry's steps."""
    steps = runner.table.entries[key].steps

    def run() -> None:
        for step in steps:
            step()

    return run


def bare(runner: Runner, key: EntryKey, device: str) -> dict[str, Any]:
    """Time the steps of one entry alone."""
    with loaded(runner, key):
        return measure(steps_of(runner, key), device)


def hand_made(runner: Runner, x: torch.Tensor, *, call: bool) -> dict[str, Any]:
    """Time a `torch.cuda.CUDAGraph` made by hand of the same program; its replay, or a whole call.

    The call is what one would write: copy the input in, replay, copy the result out.
    """
    buffer, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
    values = runner.memory.values({"input": buffer}, x.shape[0])
    with loaded(runner, (Mode.FULL, general_descriptor(x.shape[0]))), runner.memory.on_stream():
        runner.model.program.run(values, Direct())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            (result,) = runner.model.program.run(values, Direct())
    if not call:
        return measure(graph.replay, "cuda")

    def whole() -> None:
        buffer.copy_(x)
        graph.replay()
        result.clone()

    with torch.no_grad():
        return measure(whole, "cuda")


def hand_made_loop(runner: Runner, x: torch.Tensor, device: str) -> dict[str, Any]:
    """Time what one would write over the same graphs and ops: copy in, the loop, copy out."""
    size = x.shape[0]
    key = (Mode.PIECEWISE, general_descriptor(size))
    buffer, run = runner.memory.buffers["input"][:size], steps_of(runner, key)
    (result,) = runner.table.entries[key].outputs

    def whole() -> None:
        buffer.copy_(x)
        run()
        result.clone()

    with loaded(runner, key):
        return measure(whole, device)


@functools.cache
def reduce_overhead(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a whole call of a module under `torch.compile(mode="reduce-overhead")`."""
    compiled = torch.compile(module, mode="reduce-overhead", dynamic=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result: torch.Tensor = compiled(x)
        return result.clone()

    return call
