#!/usr/bin/env python3
"""Time `attention=triton` against torch SDPA on the same keys and values; prints one JSON object.

    python scripts/bench_attention.py [--quick] [--tune] [--out FILE] [--heads 32,8,128]

Llama-3-8B shapes and bfloat16 unless told otherwise. SDPA gets the KV gathered into one tensor
beforehand, for nothing, and writes no cache; ours reads the paged cache and writes the new rows.
Each number is the median over replays of one CUDA graph that holds a call for each of several
layers, whose KV together is several times the L2 cache. `--tune` also times other tilings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.ops.context import ForwardContext
from pcgsvc.ops.triton_attention import TritonAttention
from pcgsvc.ops.triton_tuning import Tiling, Tuning

BLOCK = 16
MAX_REQS = 256
KV_BYTES = 320 << 20
"""KV of all layers of a case together, at least: the H200's L2 has 60 MB."""


class Case:
    """`batch` requests of `query` new rows each on `past` cached keys, in several layers."""

    def __init__(
        self, heads: tuple[int, int, int], batch: int, past: int, query: int, max_keys: int
    ) -> None:
        self.heads, self.batch, self.past, self.query = heads, batch, past, query
        num_heads, kv_heads, dim = heads
        self.length = past + query
        self.kv_bytes = 2 * batch * self.length * kv_heads * dim * 2
        self.layers = min(96, max(2, -(-KV_BYTES // self.kv_bytes)))
        blocks = -(-self.length // BLOCK)
        self.num_blocks = 1 + batch * blocks
        rows = batch * query
        shuffled = torch.randperm(batch * blocks, device="cuda").view(batch, blocks) + 1
        where = torch.arange(self.length, device="cuda")
        slots = shuffled[:, where // BLOCK] * BLOCK + where % BLOCK  # [batch, length]
        self.slots = slots
        tables = torch.zeros(MAX_REQS + 1, -(-max_keys // BLOCK), dtype=torch.int32, device="cuda")
        tables[:batch, :blocks] = shuffled
        starts = torch.full((MAX_REQS + 1,), rows, dtype=torch.int32, device="cuda")
        starts[:batch] = torch.arange(batch, device="cuda") * query
        lengths = torch.zeros(MAX_REQS, dtype=torch.int32, device="cuda")
        lengths[:batch] = self.length
        self.context: dict[str, Any] = {
            "padded_tokens": rows,
            "num_tokens": rows,
            "query_lens": [query] * batch,
            "seq_lens_host": [self.length] * batch,
            "slot_mapping": slots[:, past:].flatten().int(),
            "token_to_req": torch.arange(batch, device="cuda").repeat_interleave(query).int(),
            "kv_lens": (where[past:] + 1).repeat(batch).int(),
            "block_tables": tables,
            "query_start_loc": starts,
            "seq_lens": lengths,
            "num_tokens_tensor": torch.tensor([rows], dtype=torch.int32, device="cuda"),
        }
        self.cache = [
            torch.randn(
                2, self.num_blocks, BLOCK, kv_heads, dim, device="cuda", dtype=torch.bfloat16
            )
            for _ in range(self.layers)
        ]
        for layer in self.cache:
            layer[:, 0] = 0
        self.q = [
            torch.randn(rows, num_heads, dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(self.layers)
        ]
        new = self.context["slot_mapping"].long()
        # What is written is what is there already, so that every version sees the same keys.
        self.kv = [layer.flatten(1, 2)[:, new].clone() for layer in self.cache]

    @property
    def flops(self) -> float:
        """Multiplications and additions of one layer."""
        pairs = self.query * self.past + self.query * (self.query + 1) / 2
        return 4.0 * self.batch * self.heads[0] * self.heads[2] * pairs

    def ours(
        self, *, uniform: bool, tuning: Tuning | None = None
    ) -> tuple[list[Callable[[], None]], list[torch.Tensor], TritonAttention]:
        """Return one call per layer, their outputs and the backend."""
        num_heads, kv_heads, dim = self.heads
        backend = TritonAttention(
            AttentionSpec(
                num_layers=self.layers,
                num_heads=num_heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                scale=dim**-0.5,
                max_position=1 << 20,
            ),
            num_blocks=1,  # replaced below
            block_size=BLOCK,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            tuning=tuning,
        )
        backend.kv_cache = self.cache
        context = ForwardContext(
            **self.context, uniform_query_len=self.query if uniform else None, attention=backend
        )
        outputs = [torch.full_like(q, float("nan")) for q in self.q]

        def call(layer: int) -> Callable[[], None]:
            q, (k, v), out = self.q[layer], self.kv[layer], outputs[layer]
            return lambda: backend.forward(q, k, v, out, layer, context)

        return [call(layer) for layer in range(self.layers)], outputs, backend

    def sdpa(self) -> tuple[list[Callable[[], None]], list[torch.Tensor]]:
        """Return one call per layer of torch's SDPA, and the list that their outputs land in."""
        outputs: list[Any] = [None] * self.layers
        causal = self.query > 1 and self.past == 0
        assert self.query == 1 or causal

        def call(layer: int) -> Callable[[], None]:
            flat = self.cache[layer].flatten(1, 2)
            keys, values = flat[:, self.slots].transpose(2, 3).contiguous()  # [batch, K, L, D]
            q = self.q[layer].view(self.batch, self.query, *self.heads[::2]).transpose(1, 2)

            def run() -> None:
                outputs[layer] = torch.nn.functional.scaled_dot_product_attention(
                    q, keys, values, is_causal=causal, enable_gqa=True
                )

            return run

        return [call(layer) for layer in range(self.layers)], outputs


def graph_us(calls: list[Callable[[], None]], replays: int) -> float:
    """Return the median time of one of `calls`, from replays of a graph of all, in µs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) * 1e3 / len(calls)


def host_us(calls: list[Callable[[], None]]) -> float:
    """Return the host time of one remembered call in µs (median of bursts that fill no queue)."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for call in calls[:8] * 4:
            call()
        times.append((time.perf_counter() - begin) / (4 * len(calls[:8])))
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative difference of two results."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def gathered(case: Case, outputs: list[Any], layer: int) -> torch.Tensor:
    """Return SDPA's output in our layout."""
    return outputs[layer].transpose(1, 2).reshape(case.batch * case.query, *case.heads[::2])


def measure(case: Case, replays: int) -> dict[str, Any]:
    """Time one case, ours and SDPA's; the results must agree."""
    row: dict[str, Any] = {
        "kind": "decode" if case.query == 1 else "prefill",
        "batch": case.batch,
        "context": case.length,
        "layers_rotated": case.layers,
        "kv_mb": round(case.kv_bytes / 1e6, 2),
    }
    calls, reference = case.sdpa()
    row["sdpa_us"] = graph_us(calls, replays)
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            try:
                row[f"sdpa_{name.split('_')[0].lower()}_us"] = graph_us(calls, replays)
            except RuntimeError as problem:
                row[f"sdpa_{name.split('_')[0].lower()}_us"] = None
                print(f"{name}: {str(problem).splitlines()[0]}", file=sys.stderr)
    for call in calls:
        call()
    for name in ["single", "mixed"] if case.query == 1 else ["mixed"]:
        ours, outputs, backend = case.ours(uniform=name == "single")
        row[f"{name}_us"] = took = graph_us(ours, replays)
        row[f"{name}_host_us"] = host_us(ours)
        row[f"{name}_error"] = worst = max(
            error(outputs[i], gathered(case, reference, i)) for i in (0, case.layers - 1)
        )
        assert worst < 1e-2, f"{name} is wrong: {worst}"
        row[f"{name}_over_sdpa"] = row["sdpa_us"] / took
        row[f"{name}_gb_s"] = case.kv_bytes / took / 1e3
        row[f"{name}_tflop_s"] = case.flops / took / 1e6
        del backend
    return row


def tilings(kind: str) -> Iterator[Tuning]:
    """Yield the tunings worth trying for `single`, `mixed` decode or prefill."""
    if kind == "prefill":
        for (m, warps), n, stages in itertools.product(
            [(32, 4), (64, 4), (128, 4), (128, 8)], [32, 64, 128], [3, 5]
        ):
            yield Tuning(mixed=Tiling(block_m=m, block_n=n, num_warps=warps, num_stages=stages))
        return
    for n, warps, stages in itertools.product([32, 64, 128], [2, 4], [3, 5, 7]):
        tiling = Tiling(block_m=16, block_n=n, num_warps=warps, num_stages=stages)
        yield Tuning(**{kind: tiling})
    for keys in (64, 256):
        yield Tuning(split_keys=keys)
    for splits in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        yield Tuning(num_splits=splits)


def tune(case: Case, kind: str, replays: int) -> list[dict[str, Any]]:
    """Return the fastest tunings of one case, best first."""
    rows = []
    for tuning in [Tuning(), *tilings(kind)]:
        try:
            calls, _, _ = case.ours(uniform=kind == "single", tuning=tuning)
            rows.append({"us": graph_us(calls, replays), "tuning": str(tuning)})
        except Exception as problem:  # noqa: BLE001 - too large a tiling for the chip; any type
            rows.append({"us": float("inf"), "tuning": f"{tuning}: {type(problem).__name__}"})
    default = rows[0]["us"]
    rows = [row for row in rows if row["us"] != float("inf")]
    return [{"us": default, "tuning": "default"}, *sorted(rows, key=lambda r: r["us"])[:6]]


def main() -> None:
    """Run all cases and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one decode and one prefill case")
    parser.add_argument("--tune", action="store_true", help="time other tilings as well (minutes)")
    parser.add_argument("--out", help="write the JSON here too")
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, head dim")
    parser.add_argument("--max-keys", type=int, default=8192, help="width of the block tables")
    parser.add_argument("--replays", type=int, default=30)
    args = parser.parse_args()
    heads = tuple(int(n) for n in args.heads.split(","))
    decode = [(8, 4096)] if args.quick else list(itertools.product((1, 8, 64), (512, 4096)))
    prefill = [512] if args.quick else [512, 2048]
    shapes = [(batch, length - 1, 1) for batch, length in decode]
    shapes += [(1, 0, length) for length in prefill]
    import triton

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "heads": heads,
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "max_keys": args.max_keys,
        "cases": [],
        "tuning": [],
    }
    torch.manual_seed(0)
    for shape in shapes:
        case = Case(heads, *shape, args.max_keys)
        row = measure(case, args.replays)
        report["cases"].append(row)
        print(json.dumps(row), file=sys.stderr)
        if args.tune:
            for kind in ["single", "mixed"] if case.query == 1 else ["prefill"]:
                best = tune(case, kind, max(5, args.replays // 3))
                report["tuning"].append({"shape": shape, "kind": kind, "best": best})
                print(json.dumps(report["tuning"][-1], indent=1), file=sys.stderr)
        del case
        torch.cuda.empty_cache()
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
