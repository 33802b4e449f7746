"""One job in a process of its own, however that process ends; the process is a stand-in here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pcgsvc.config import Config, from_dict
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.sweep import child, isolate, outcome
from pcgsvc.jobs.sweep.isolate import run_isolated
from pcgsvc.jobs.sweep.outcome import Outcome, perform
from pcgsvc.jobs.sweep.records import NAME, Record, Status, read_records, write_record

REPLY = "import json, os, sys; channel = int(sys.argv[1]); task = json.load(sys.stdin)\n"
"""How a stand-in begins: as the real one, it reads its task."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a call that runs a stand-in of the job's process."""

    def call(body: str, *, timeout_s: float | None = None) -> Outcome:
        script = tmp_path / "child.py"
        script.write_text(REPLY + body)
        monkeypatch.setattr(child, "__file__", str(script))
        return run_isolated(
            from_dict({"seed": 7, "sweep": {"timeout_s": timeout_s}}),
            tmp_path / "report.json",
            tmp_path,
            logging_config={"version": 1},
            verbose=False,
        )

    return call


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


# ---- its end -------------------------------------------------------------------------------------


def test_the_process_gets_the_task_and_says_what_became_of_it(run: Any, tmp_path: Path) -> None:
    done = run(
        "print(task['config']['seed'], task['parent'] == os.getppid(), flush=True)\n"
        "said = {'code': 1, 'reason': 'why', 'report': task['report']}\n"
        "os.write(channel, json.dumps(said).encode())\n"
        "sys.exit(1)\n"
    )
    report = tmp_path / "report.json"
    assert (done.code, done.reason, done.report) == (1, "why", str(report))
    assert Path(done.output).read_text() == "7 True\n"


ENDS = {
    "os.kill(os.getpid(), 9)": "killed (SIGKILL) by another process, or by a memory limit.",
    "import faulthandler; faulthandler.enable(); os.kill(os.getpid(), 11)": (
        "ended by SIGSEGV in File"
    ),
    "print('last'); sys.stdout.flush(); os.kill(os.getpid(), 6)": (
        "ended by SIGABRT, having printed last: last"
    ),
    "os._exit(3)": "its process ended with exit code 3 before its job did, having printed nothing",
    "os._exit(0)": "its process ended with exit code 0 before its job did",
    "os.write(channel, b'{\"code\":'); os._exit(0)": "its process ended with exit code 0",
    "raise ValueError('x')": "exit code 1 before its job did, having printed last: ValueError: x",
}


@pytest.mark.parametrize("body", ENDS)
def test_a_process_that_ends_in_its_job_is_a_failed_job_with_a_reason(run: Any, body: str) -> None:
    done = run(body)
    assert done.code == 1
    assert done.report is None
    assert ENDS[body] in str(done.reason)


def test_a_kill_while_the_kernel_was_out_of_memory_is_called_that(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr(isolate, "_oom_kills", lambda: next(counts))
    done = run("x = bytearray(64 << 20); import time; time.sleep(0.3); os.kill(os.getpid(), 9)")
    assert "killed (SIGKILL) by the kernel, which ran out of memory." in done.reason
    assert done.peak_host_bytes > 64 << 20


def test_the_kernel_tells_its_kills() -> None:
    text = Path("/proc/vmstat").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("oom_kill ")]
    assert isolate._oom_kills() >= int(line.split()[1])


def test_what_a_job_leaves_running_is_ended_with_it(run: Any) -> None:
    done = run(
        "import subprocess\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(left.pid, flush=True)\n"
        "os.write(channel, json.dumps({'code': 0, 'reason': None, 'report': None}).encode())\n"
    )
    assert done.code == 0
    assert gone(int(Path(done.output).read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, True])
def test_a_job_is_ended_at_its_time_limit_and_may_clean_up(
    run: Any, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    monkeypatch.setattr(isolate, "_PATIENCE", ((signal.SIGINT, 0.3), (signal.SIGTERM, 0.1)))
    ignore = "import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n"
    body = (
        "import signal, time; signal.signal(2, signal.default_int_handler)\n"
        + (ignore if deaf else "")
        + "try: time.sleep(600)\nfinally: print('clean', flush=True)\n"
    )
    started = time.monotonic()
    done = run(body, timeout_s=3)
    assert done.reason.startswith("ended after sweep.timeout_s=3 seconds")
    assert ("clean" in Path(done.output).read_text()) is not deaf
    assert time.monotonic() - started < 30


def test_an_interrupted_wait_ends_the_process(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolate, "_PATIENCE", ((signal.SIGINT, 0.2),))

    def interrupt() -> None:
        until = time.monotonic() + 30
        output = tmp_path / isolate.OUTPUT
        while time.monotonic() < until and not (output.exists() and output.read_text()):
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run("print(os.getpid(), flush=True); import time; time.sleep(600)")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert gone(int((tmp_path / isolate.OUTPUT).read_text().split()[0]))


def test_no_file_descriptor_is_left_open(run: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for body in ("os._exit(0)", "os.kill(os.getpid(), 9)"):
        run(body)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reason_of_any_length_fits_the_pipe() -> None:
    longest = {"code": 1, "reason": "\U0001f600" * child._MOST, "report": None}
    assert len(json.dumps(longest)) < 1 << 16


# ---- outcomes ------------------------------------------------------------------------------------


def test_an_outcome_names_only_a_report_that_this_job_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")  # an older one
    monkeypatch.setattr("pcgsvc.jobs.run.run_job", lambda config, report: {})
    assert perform(Config(), path, verbose=False) == Outcome(code=outcome.OK)

    def write_and_fail(config: Config, report: Path) -> None:
        report.unlink()
        report.write_text("{}")
        raise ConfigError("no")

    monkeypatch.setattr("pcgsvc.jobs.run.run_job", write_and_fail)
    found = perform(Config(), path, verbose=False)
    assert found == Outcome(code=outcome.BAD_CONFIG, reason="ConfigError: no", report=str(path))


# ---- records -------------------------------------------------------------------------------------


def record(folder: Path, number: int, **fields: Any) -> Record:
    here = folder / str(number)
    made = Record(sweep="mine", number=number, overrides=["a=1"], folder=str(here), **fields)
    write_record(made)
    return made


def test_records_come_back_by_number_whatever_lies_around(tmp_path: Path) -> None:
    late = record(tmp_path, 10, status=Status.DONE, seconds=1.5, report="/r.json")
    early = record(tmp_path, 2, status=Status.FAILED, reason="why", peak_host_bytes=3)
    write_record(Record(sweep="other", number=3, overrides=[], folder=str(tmp_path / "3")))
    for name, text in (("4", "{"), ("5", "[]"), ("6", "{}"), ("7", '{"status": "odd"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / NAME).write_text(text)
    assert read_records(tmp_path, "mine", None, {}, interrupted=False) == [early, late]


def test_a_job_that_never_reported_its_end_has_failed_or_was_interrupted(tmp_path: Path) -> None:
    record(tmp_path, 0)
    (lost,) = read_records(tmp_path, "mine", None, {}, interrupted=False)
    assert (lost.status, lost.reason) == (
        Status.FAILED,
        "the process that ran it ended without a word",
    )
    ended, missing = read_records(tmp_path, "mine", [["a=1"], ["a=2"]], {}, interrupted=True)
    assert (ended.status, missing.status) == (Status.INTERRUPTED, Status.NOT_RUN)
    assert missing.overrides == ["a=2"]
