"""The example service as a process on loopback, its clients, and what they should be answered."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from generate_helpers import logits_of

EXAMPLES = Path(__file__).parents[1] / "examples"

TINY = (
    "model=llama model.num_layers=2 compiler=eager device=cpu attention.block_size=4 "
    "attention.max_model_len=64 capture.self_check=false"
)
"""The model of `generate_helpers`."""


@dataclass
class Server:
    """A process that serves."""

    url: str
    process: subprocess.Popen[bytes]
    start_s: float
    """From its start until it was ready: the processor's time, which other load does not change."""

    def metrics(self) -> dict[str, float]:
        """Return samples by name and labels, as they stand in the text."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def resident_bytes(self) -> int:
        """Return the memory that it holds."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def wait_for(condition: object, timeout_s: float = 60, pause_s: float = 0.1) -> None:
    """Wait until a function returns something true."""
    assert callable(condition)
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(pause_s)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(cache: Path, log: Path, words: str = TINY, **settings: object) -> Iterator[Server]:
    """Start the service with a cache folder and settings of `service.app`, and end it."""
    port = free_port()
    environment = os.environ | {
        "SERVICE_GENERATE": f"{words} cache.dir={cache}",
        "OMP_NUM_THREADS": "1",
        **{f"SERVICE_{name.upper()}": str(value) for name, value in settings.items()},
    }
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "--factory"]
    command += ["service.app:create_app", "--port", str(port), "--no-access-log"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--timeout-graceful-shutdown", "60"],
            env=environment,
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/readyz").status_code == 200
        return False

    try:
        wait_for(is_ready, 270)
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]
        yield Server(url, process, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))
    finally:
        process.kill()
        process.wait()


@functools.cache
def clear_tokens(prompt: tuple[int, ...], new: int) -> list[int]:
    """Return the greedy continuation as far as each choice is clear by more than 1e-3."""
    ids = list(prompt)
    for _ in range(new):
        (first, second), (token, _) = (top.tolist() for top in logits_of(ids)[-1].topk(2))
        if first - second <= 1e-3:
            break
        ids.append(token)
    return ids[len(prompt) :]


def is_right(prompt: list[int], tokens: list[int]) -> bool:
    """Whether tokens are the greedy continuation, as far as it is clear."""
    want = clear_tokens(tuple(prompt), len(tokens))
    return tokens[: len(want)] == want


def clear_share(prompts: list[list[int]], new: int) -> float:
    """Return how many of the tokens are clear."""
    clear = sum(len(clear_tokens(tuple(prompt), new)) for prompt in prompts)
    return clear / (len(prompts) * new)
