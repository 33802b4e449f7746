"""Load the example service with SmolLM2 on the CPU: one client, then many, in one run.

    python scripts/bench_service.py --clients 64 --out docs/results/service-cpu.json

Starts `examples/service` as a process on loopback, compares every answer of a prompt with the first
one, and writes throughput and latencies. Ratios are taken within one run. Other load on the machine
moves the figures by the clock, hardly those by the processor's time that the service used.

Then the same requests go through `pcgsvc.Slots` in this process, without the service around it:
what the front adds is the service's time over that of the steps alone, device included; where
`clients_cpu_s` is near `seconds`, the clients were what limited it. With
`--ids N`, prompts are N token ids each, for models without a tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

import pcgsvc

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from service.load import Answer, figures, load  # noqa: E402

MODEL = (
    "model=smollm2 device=cpu compiler=eager attention.max_model_len=128 "
    "capture.sizes=[1,8,32,64,72,80,96] capture.self_check=false attention.max_num_reqs=64"
)
PORT = 8765


def bodies(count: int, distinct: int, new: int, ids: int) -> list[dict[str, Any]]:
    """Return requests; greedy, so that each prompt has one answer."""
    prompts: list[Any] = [f"The number {at} is known for" for at in range(distinct)]
    if ids:
        prompts = [[1 + (7 * at + i) % 999 for i in range(ids)] for at in range(distinct)]
    return [
        {"prompt": prompts[at % distinct], "max_new_tokens": new, "temperature": 0}
        for at in range(count)
    ]


def start(words: str) -> tuple[subprocess.Popen[bytes], float]:
    """Return the service once it is ready, and how long that took in seconds."""
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(ROOT / "examples"), "--factory"]
    command += ["service.app:create_app", "--port", str(PORT), "--log-level", "warning"]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | {"SERVICE_GENERATE": words})
    while process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/readyz").status_code == 200:
                return process, time.perf_counter() - started
        except httpx.HTTPError:
            time.sleep(0.5)
    raise SystemExit("the service did not start")


def cpu_s(pid: int) -> float:
    """Return what a process has used of the processors, in seconds."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def measured(
    requests: list[dict[str, Any]], clients: int, pid: int
) -> tuple[list[Answer], dict[str, Any]]:
    """Send requests from some clients; return the answers and the figures."""
    started, used, own = time.perf_counter(), cpu_s(pid), time.process_time()
    answers = asyncio.run(load(f"http://127.0.0.1:{PORT}", requests, clients))
    made = figures(answers, time.perf_counter() - started)
    used = cpu_s(pid) - used
    return answers, {
        **made,
        "cpu_s": round(used, 2),
        "tokens_per_cpu_s": round(made["tokens"] / used, 2),
        "clients_cpu_s": round(time.process_time() - own, 2),
    }


def different(answers: list[Answer]) -> int:
    """Return how many answers are not the first one of their prompt."""
    first: dict[str, list[int]] = {}
    return sum(first.setdefault(str(a.body["prompt"]), a.tokens) != a.tokens for a in answers)


def without_front(words: list[str], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the same requests take through slots alone, and their steps' own time."""
    with pcgsvc.load_runner(words) as runner:
        cuda = next(runner.model.module.parameters()).is_cuda
        steps: list[float] = []

        def listen(seconds: float) -> None:
            launched = time.perf_counter()
            if cuda:
                torch.cuda.synchronize()
            steps.append(seconds + time.perf_counter() - launched)

        prompts, new = [r["prompt"] for r in requests], requests[0]["max_new_tokens"]
        greedy = pcgsvc.Sampling(temperature=0)
        runner.generate(prompts[:64], 4, sampling=greedy, return_ids=True)
        started = time.perf_counter()
        runner.generate(prompts, new, sampling=greedy, return_ids=True)
        seconds = time.perf_counter() - started
        runner.time_calls(listen)  # waits for each step, so that none is launched beside another
        runner.generate(prompts, new, sampling=greedy, return_ids=True)
    return {
        "seconds": round(seconds, 3),
        "steps": len(steps),
        "steps_s": round(sum(steps), 3),
        "median_step_ms": round(statistics.median(steps) * 1e3, 3),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument(
        "--alone", type=int, default=12, help="requests of one client, before/after"
    )
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--ids", type=int, default=0)
    parser.add_argument("--model", default=MODEL, help="settings of what is served")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    few = bodies(given.alone, given.prompts, given.max_new_tokens, given.ids)
    many = bodies(given.requests, given.prompts, given.max_new_tokens, given.ids)
    with tempfile.TemporaryDirectory() as cache:
        words = [*given.model.split(), f"cache.dir={cache}"]
        command = [sys.executable, "-m", "pcgsvc", "job=compile", f"hydra.run.dir={cache}/log"]
        is_stored = subprocess.run([*command, *words], check=False).returncode == 0
        process, ready_s = start(" ".join(words))
        try:
            load_before = os.getloadavg()[0]
            before, alone = measured(few, 1, process.pid)
            answers, together = measured(many, given.clients, process.pid)
            after, again = measured(few, 1, process.pid)
        finally:
            process.terminate()
            process.wait()
        direct = without_front(words, many)

    def speedup(name: str) -> float:
        return round(together[name] / statistics.mean((alone[name], again[name])), 2)

    report = {
        "command": "python " + " ".join(["scripts/bench_service.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "settings": given.model,
        "threads": os.environ.get("OMP_NUM_THREADS", "as torch chooses"),
        "load_average": [round(load, 1) for load in (load_before, os.getloadavg()[0])],
        f"ready_after_a_{'warm' if is_stored else 'cold'}_start_s": round(ready_s, 2),
        "one_client": [alone, again],
        f"{given.clients}_clients": together,
        "without_the_front": direct,
        "front_adds_to_the_steps": round(together["seconds"] / direct["steps_s"] - 1, 3),
        "front_adds_to_slots_alone": round(together["seconds"] / direct["seconds"] - 1, 3),
        "speedup": {n: speedup(n) for n in ("tokens_per_s", "tokens_per_cpu_s")},
        "answers_unlike_the_first_of_their_prompt": different([*before, *answers, *after]),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
