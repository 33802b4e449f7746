"""Benchmarks of processes: starts cold and warm, peers; and the choice of sizes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pcgsvc.config import Mode, SizingConfig
from pcgsvc.sizing.choice import plan_sizes
from pcgsvc.sizing.cost import modelled
from pcgsvc.sizing.expect import Service
from pcgsvc.sizing.files import read_traffic
from pcgsvc.sizing.traffic import make_traffic

_CHILD = """
import json, sys, time
import torch
started = time.perf_counter()
import pcgsvc
runner = pcgsvc.load_runner(json.loads(sys.argv[1]))
ready = time.perf_counter() - started
compile_ = runner.report["compile"]
after = compile_["seconds"]["warmup"] + compile_["seconds"]["capture"]
print(json.dumps({"start": compile_["start"], "ready_to_capture_s": ready - after,
                  "ready_to_serve_s": ready, "num_compiled": compile_["num_compiled"],
                  "num_traces": compile_["num_traces"], "seconds": compile_["seconds"]}))
"""


def bench_warm_start(device: str, compiler: str = "inductor") -> dict[str, Any]:
    """Time new processes from the end of `import torch`: cold, then warm, with empty compiler dirs.

    A 32-layer Llama. The compilers' folders are temporary ones in every start, so a warm start has
    only what the store gives it. All starts have Python's bytecode, as pip leaves an installation:
    an image may lack it, and every import then compiles its source.
    """
    dims = ["model.num_layers=32", "model.hidden_size=512", "model.num_heads=8"]
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["model=llama", *dims, f"device={device}", f"compiler={compiler}"]
        overrides += ["capture.sizes=[1,8]", "capture.self_check=false"]
        bytecode = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        around = {**os.environ, **bytecode}
        _child([*overrides, "cache.mode=off"], around)
        overrides.append(f"cache.dir={folder}/store")
        starts = ("cold", "warm", "warm_again")
        row: dict[str, Any] = {start: _child(overrides, around) for start in starts}
        bare = {**around, "PATH": "/nonexistent"}
        row["warm_without_compilers_on_path"] = _child(overrides, bare)
        if device == "cuda" and compiler == "inductor":
            row["cold_inductor"] = _child([*overrides, "partition.strategy=inductor"], around)
    ratio = row["warm_again"]["ready_to_capture_s"] / row["cold"]["ready_to_capture_s"]
    row["warm_to_cold"] = round(ratio, 3)
    return row


def bench_warm_start_eager(device: str) -> dict[str, Any]:
    """As `warm_start`, with `compiler=eager`."""
    return bench_warm_start(device, "eager")


def _child(overrides: list[str], environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, json.dumps(overrides)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().split("\n")[-1], "ready_to_capture_s": float("nan")}
    row: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    return row


def bench_sizes(device: str) -> dict[str, Any]:
    """Time the choice of capture sizes for 10 000 distinct row counts and K up to 64; CPU only.

    Calls are drawn anew for each histogram: even, falling as 1/n, and two modes far apart. Reading
    is of a CSV with one row per call.
    """
    del device
    rng = np.random.default_rng(0)
    rows = np.arange(1, 10_001)
    two = np.exp(-(((rows - 900) / 500) ** 2)) + 0.2 * np.exp(-(((rows - 7000) / 900) ** 2))
    shapes = {"even": np.ones(10_000), "falling": 1e6 / rows, "two_modes": two / two.max() * 1e6}
    service = Service(decode=Mode.FULL, mixed=Mode.PIECEWISE, query_len=1)
    cost = modelled(0.0, 1.0)
    out: dict[str, Any] = {"distinct": 10_000, "max_count": 64}
    for name, mean in shapes.items():
        counts = 1 + rng.poisson(np.asarray(mean) * 0.5)
        calls = {(int(n), bool(n % 2)): int(c) for n, c in zip(rows, counts, strict=True)}
        traffic = make_traffic(name, calls)
        times = []
        for _ in range(3):
            started = time.perf_counter()
            plan = plan_sizes(traffic, service, cost, SizingConfig(), max_size=None)
            times.append(time.perf_counter() - started)
        powers = plan.others["powers of two"]
        equal = plan.points[powers.count - 1]
        out[name] = {
            "seconds": round(statistics.median(times), 3),
            "recommended": plan.chosen.count,
            "padding_share": round(plan.chosen.padding_share, 4),
            f"padding_share_of_{powers.count}": round(equal.padding_share, 4),
            "padding_share_of_powers_of_two": round(powers.padding_share, 4),
        }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traffic.csv"
        drawn = rng.integers(1, 512, 5_000_000).tolist()
        path.write_text("num_tokens\n" + "\n".join(map(str, drawn)) + "\n")
        started = time.perf_counter()
        assert read_traffic(path).num_calls == len(drawn)
        seconds = time.perf_counter() - started
        out["reading"] = {"rows": len(drawn), "seconds": round(seconds, 3)}
    return out


PEERS = {
    "trees": ("trees", ""),
    "trees_part": ("trees_part", ""),
    "vllm": ("vllm", ""),
    "prod": ("prod", "full"),
    "prod_piecewise": ("prod", "piecewise"),
}
"""Reduce-overhead, the same with graph partition, vLLM, and ourselves on the peers' model: the
system's name there, and our mode, of which a process has one runner."""


def bench_peers(folder: Path) -> dict[str, Any]:
    """Run each system of `folder`'s side.py in a process of its own, alone on the card, in turn.

    Returns:
        Medians over rounds by system and row, each with the yardstick's least and most; of a system
        that failed, the end of what it printed.
    """
    out: dict[str, Any] = {}
    for name, (system, mode) in PEERS.items():
        with tempfile.TemporaryDirectory() as work:
            command = [sys.executable, str(folder / "side.py"), "--systems", system, "--out", work]
            command += ["--peers", str(folder), "--build-s", "80", "--budget", "110"]
            command += ["--rounds", "1"]
            alone = {"SIDE_ONE": "1", "SIDE_MODES": mode} if mode else {}
            around = {**os.environ, **alone}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
            lines = (Path(work) / "side.jsonl").read_text().splitlines()
        found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
        for line in lines:
            for row in json.loads(line).get("rows", []):
                found.setdefault((row["row"], row["n"], row["kind"]), []).append(row)
        out[name] = {
            f"{row} {rows} {kind}": {
                "host_us": round(statistics.median(r["host"] for r in runs), 1),
                "host_low_us": round(statistics.median(r["p10"] for r in runs), 1),
                "step_us": round(statistics.median(r["b2b"] for r in runs), 1),
                "chain_us": [
                    round(end(y for r in runs for y in r["yard"]), 3) for end in (min, max)
                ],
            }
            for (row, rows, kind), runs in found.items()
            if kind in ("bare", "view", "clone")
        } or {"failed": done.stdout[-600:]}
    return out
