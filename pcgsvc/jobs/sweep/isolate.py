"""One job in a process of its own: started, watched, ended.

In: a config. Out: an `Outcome`, however the process ended: by itself, by an error, by a signal,
by the kernel for want of memory, or at its time limit. Knows nothing of Hydra or sweeps.

The process (`child.py`) leads a session of its own, so that a Ctrl-C at the terminal reaches this
one only, which then ends the job with all that it has started. If this process is killed, the
kernel kills the job's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pcgsvc.config import Config, to_dict
from pcgsvc.jobs.sweep import child
from pcgsvc.jobs.sweep.outcome import FAILED, Outcome
from pcgsvc.jobs.sweep.records import OUTPUT

_TICK = 0.02
"""Seconds between two looks at the process: how late its end may be seen."""
_PATIENCE = ((signal.SIGINT, 5.0), (signal.SIGTERM, 2.0))
"""How a job is asked to end, and how many seconds it then has to clean up behind itself."""


def run_isolated(
    config: Config, report_path: Path, folder: Path, *, logging_config: dict[str, Any], verbose: Any
) -> Outcome:
    """Run a job in a process of its own and wait for its end, at most `sweep.timeout_s` seconds.

    The process has this one's environment, working directory and import path, and nothing else of
    it: what code has registered or changed here is missing there.

    Args:
        config: as composed.
        report_path: where its report is to go; absolute.
        folder: gets `output.txt`.
        logging_config: for `logging.config.dictConfig`; its console is `output.txt`.
        verbose: as `hydra.verbose`.

    Raises:
        OSError: the process cannot be started, or its output cannot be written.
        BaseException: what interrupted the wait, after the job's process has been ended.
    """
    task = {
        "parent": os.getpid(),
        "path": sys.path,
        "config": to_dict(config),
        "report": str(report_path),
        "logging": logging_config,
        "verbose": verbose,
    }
    output, ooms, timeout_s = folder / OUTPUT, _oom_kills(), config.sweep.timeout_s
    with _started(output) as (process, channel):
        peak, timed_out = _wait(process, task, timeout_s)
        _kill(process)  # what it started and left behind; itself is reaped here
        outcome = _received(channel)
    if outcome is None:
        limit = timeout_s if timed_out else None
        killed = _oom_kills() > ooms
        reason = _why(process.returncode, output, peak=peak, limit=limit, out_of_memory=killed)
        outcome = Outcome(code=FAILED, reason=reason)
    return replace(outcome, peak_host_bytes=peak, output=str(output))


# ---- the process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(output: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the process; at the end of the block, however it is left, it is gone.

    Yields:
        The process, and the pipe on which it sends its job's outcome.
    """
    with contextlib.ExitStack() as stack:
        channel, theirs = os.pipe()
        stack.callback(os.close, channel)
        os.set_blocking(channel, False)  # a grandchild may hold the other end for longer
        try:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    # -P: the import path is handed over; -u: a killed job's last output is kept.
                    [sys.executable, "-P", "-u", child.__file__, str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs],
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        stack.callback(_end, process)
        yield process, channel


def _wait(
    process: subprocess.Popen[bytes], task: dict[str, Any], timeout_s: float | None
) -> tuple[int | None, bool]:
    """Hand the task over and wait until the process has ended, which stays unreaped.

    Returns:
        The most memory that it was seen to hold, in bytes, and whether its time ran out.
    """
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # killed already: seen below
        process.stdin.write(json.dumps(task).encode())
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    peak: int | None = None
    while not _has_ended(process):
        peak = _peak_bytes(process.pid) or peak
        if deadline is not None and time.monotonic() > deadline:
            _end(process)
            return peak, True
        time.sleep(_TICK)
    return peak, False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is over; its number stays taken, so that its group may still be signalled."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process and all that it started to end, wait a little, kill the rest."""
    if process.returncode is not None:
        return
    try:
        for number, patience in _PATIENCE:
            _signal(process, number)
            until = time.monotonic() + patience
            while not _has_ended(process) and time.monotonic() < until:
                time.sleep(_TICK)
            if _has_ended(process):
                break
    finally:  # a second Ctrl-C ends the patience
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process's session and reap it."""
    if process.returncode is None:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


# ---- how it ended --------------------------------------------------------------------------------


def _received(channel: int) -> Outcome | None:
    """Return the outcome that the job sent at its end; None if it came to no end."""
    try:  # all of it is there, since its writer has ended
        return Outcome(**json.loads(os.read(channel, 1 << 16)))
    except (BlockingIOError, ValueError):
        return None


def _why(
    code: int, output: Path, *, peak: int | None, limit: float | None, out_of_memory: bool
) -> str:
    """Return how a process ended that sent no outcome."""
    held = f" It held up to {peak / 2**20:.0f} MiB of host memory." if peak else ""
    if limit is not None:
        return f"ended after sweep.timeout_s={limit:g} seconds, with its job not done.{held}"
    if code == -signal.SIGKILL:
        who = (
            "by the kernel, which ran out of memory"
            if out_of_memory
            else "by another process, or by a memory limit"
        )
        return f"killed (SIGKILL) {who}.{held}"
    last = _last_words(output)
    if code < 0:
        return f"ended by {signal.Signals(-code).name}{last}"
    return f"its process ended with exit code {code} before its job did{last}"


def _last_words(output: Path) -> str:
    """Return where a process crashed, as faulthandler prints it, or else what it printed last."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - (1 << 16)))
        text = file.read().decode(errors="replace")
    _, crashed, frames = text.partition("(most recent call first):")
    found = [line.strip() for line in (frames if crashed else text).splitlines() if line.strip()]
    if not found:
        return ", having printed nothing"
    if crashed:
        where = next((line for line in found if line.startswith("File")), found[0])
        return f" in {where[:400]}"
    return f", having printed last: {found[-1][:400]}"


def _peak_bytes(pid: int) -> int | None:
    """Return the most memory that a process has held; None: not known, or it has ended."""
    peak = _proc_number(f"/proc/{pid}/status", "VmHWM:")
    return None if peak is None else peak * 1024


def _oom_kills() -> int:
    """Return how many processes this machine has killed for want of memory."""
    return _proc_number("/proc/vmstat", "oom_kill ") or 0


def _proc_number(path: str, name: str) -> int | None:
    """Return the number beside a name in a file of /proc."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return None
