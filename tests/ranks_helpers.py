"""Several processes as torchrun would start them, for tests of what they do together."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import NamedTuple


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outcomes(arguments: list[str], count: int = 2, timeout_s: float = 250) -> list[Ended]:
    """Run one process per rank, as torchrun would, until all have ended; return how they did."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=os.environ
                    | place
                    | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(count)
        ]
        try:
            done = [process.communicate(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
    return [Ended(p.returncode, *texts) for p, texts in zip(processes, done, strict=True)]


def launch(arguments: list[str], count: int = 2) -> list[str]:
    """Run one process per rank, none of which may fail; return their standard outputs."""
    ended = outcomes(arguments, count)
    assert [end.code for end in ended] == [0] * count, "\n".join(end.err for end in ended)
    return [end.out for end in ended]
