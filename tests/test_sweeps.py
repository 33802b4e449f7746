"""Sweeps: jobs apart from each other, what is written, exit codes, and how a sweep is ended."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Cli, Done
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf
from rich.console import Console

from pcgsvc import pipeline
from pcgsvc.check.verify import Verified, refusal, verify
from pcgsvc.config import Config
from pcgsvc.config.devices import device_of
from pcgsvc.jobs import preflight
from pcgsvc.jobs.sweep import child, whole
from pcgsvc.jobs.sweep.task import Membership
from pcgsvc.report import comparison

TINY = ["model=two_regions", "compiler=eager", "capture.sizes=[1,2]", "bench.enabled=false"]
HERE = ["device=cpu", "hydra.sweep.dir=out", "sweep.isolate=false"]
"""A sweep in this process, where a test can reach into its jobs."""


def table_of(done: Done) -> list[dict[str, Any]]:
    """Return the jobs of `sweep.json`."""
    tree = json.loads((done.folder / "out" / "sweep.json").read_text())
    assert tree["num_jobs"] == len(tree["jobs"])
    return list(tree["jobs"])


def names_in(folder: Path) -> set[str]:
    """Return the files directly in a folder."""
    return {path.name for path in folder.iterdir() if path.is_file()}


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def jobs_of(sweep: int) -> list[int]:
    """Return those children of a sweep that run its jobs: torch's import starts `ldconfig`."""
    found = []
    for pid in children_of(sweep):
        with contextlib.suppress(OSError):  # over by now
            if child.__file__ in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def wait_for(what: Any, seconds: float = 60.0) -> Any:
    """Return the first true value of a call."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


# ---- a whole sweep -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_leaves_a_report_per_job_one_table_and_its_files_and_starts_warm_after_the_first(
    cli: Cli, validate_report: Any
) -> None:
    words = ["device=cpu", "compiler=eager", "bench.repeats=1", "hydra.sweep.dir=out"]
    words += ["model.num_layers=1", "mode=full_and_piecewise"]
    done = cli("capture.sizes=[1,2,4],[1,2,4,8,16]", *words, "-m")
    assert done.code == 0, done.out + done.err
    assert len(done.reports) == 2
    for report in done.reports:
        validate_report(report)
        assert all(row["ok"] for row in report["verify"])
    starts = [r["compile"] for r in done.reports]
    assert [s["start"] for s in starts] == ["cold", "warm"]
    assert [(s["num_traces"], s["num_compiled"]) for s in starts] == [(1, 2), (0, 0)]

    out = done.folder / "out"
    assert names_in(out) == {"multirun.yaml", "sweep.csv", "sweep.json", "sweep.png"}
    for number in range(2):
        names = {"job.json", "output.txt", "pcgsvc.log", "report.json"}
        assert names_in(out / str(number)) == names
        assert "entries equal plain execution" in (out / str(number) / "output.txt").read_text()
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    lines = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert [x["capture.sizes"] for x in lines] == ["[1,2,4]", "[1,2,4,8,16]"]
    assert [x["graphs.num_graphs"] for x in lines] == ["9", "15"]  # per size: two regions, a whole
    assert all(float(x["step_us.piecewise.4"]) > 0 for x in lines)
    assert all(int(x["peak_host_bytes"]) > 50 << 20 for x in lines)

    assert done.out.count("sweep of 2 jobs: 2 done") == 1
    assert done.out.count("verified ") == 2
    assert "job 1 (2 of 2): done in " in done.out
    assert "regions (" not in done.out  # what a job prints is in its folder
    assert done.err == ""


@pytest.mark.slow
def test_jobs_that_run_out_of_memory_or_are_killed_do_not_end_the_others(
    cli: Cli, validate_report: Any
) -> None:
    here = os.getpid()

    def kill() -> None:
        wait_for((Path.cwd() / "out" / "1" / "job.json").is_file)
        (pid,) = wait_for(lambda: jobs_of(here))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    vocab = "model.vocab_size=2000000000,512,256"  # the first wants half a terabyte
    words = ["compiler=eager", "model.num_layers=1", "job=compile", "hydra.sweep.dir=out"]
    words += ["cache.prove=false"]
    done = cli("-m", *words, "device=cpu", vocab)
    killer.join()
    assert done.code == 1
    assert [job["status"] for job in table_of(done)] == ["failed", "failed", "done"]
    assert "can't allocate memory" in table_of(done)[0]["reason"]
    assert table_of(done)[1]["reason"].startswith("killed (SIGKILL) by ")
    assert "sweep of 3 jobs: 2 failed, 1 done" in done.out
    assert "job 0 failed: RuntimeError: " in done.out
    assert "job 1 failed: killed (SIGKILL) by " in done.out
    (report,) = done.reports
    validate_report(report)
    assert not [path for path in done.files if path.name.startswith(".")]
    assert not children_of(here)


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_and_has_failed(cli: Cli) -> None:
    done = cli("-m", *TINY, "device=cpu", "hydra.sweep.dir=out", "sweep.timeout_s=1")
    assert done.code == 1
    (job,) = table_of(done)
    assert job["reason"].startswith("ended after sweep.timeout_s=1 seconds")
    assert job["wall_s"] < 10
    assert not done.reports


# ---- ended from outside --------------------------------------------------------------------------


SWEEP = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
from pcgsvc.jobs.app import entry
entry()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_a_sweep_ends_its_job_and_what_was_done_is_told(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", SWEEP, "-m", *TINY, "device=cpu", "seed=1,2"]
    with subprocess.Popen(
        [*command, "hydra.sweep.dir=out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as sweep:
        (job,) = wait_for(lambda: jobs_of(sweep.pid))
        time.sleep(0.3)  # its interpreter has started
        sweep.send_signal(number)
        out, err = sweep.communicate(timeout=30)
    wait_for(lambda: not Path(f"/proc/{job}").exists(), seconds=10)
    if number is signal.SIGKILL:
        return
    assert sweep.returncode == 130
    assert err == "pcgsvc: interrupted\n"
    assert "sweep of 2 jobs: 1 interrupted, 1 not run" in out
    names = {"multirun.yaml", "sweep.csv", "sweep.json"}
    assert names_in(tmp_path / "out") == names


def test_sigterm_ends_a_sweep_as_control_c_does_and_means_what_it_did_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), whole.term_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


# ---- in this process -----------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make verification find one wrong entry."""

    def wrong(*args: Any) -> Verified:
        found = verify(*args)
        assert found.rows is not None
        found.rows[0] |= {"ok": False, "max_rel_err": 0.5}
        return found._replace(refusal=refusal(found.rows, args[4], args[1]))

    monkeypatch.setattr(pipeline, "verify", wrong)


@pytest.mark.slow
def test_a_wrong_replay_fails_its_job_whose_report_is_compared_all_the_same(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    done = cli("-m", *TINY, *HERE, "mode=piecewise,full")
    assert done.code == 1
    assert len(done.reports) == 2
    for job in table_of(done):
        assert job["status"] == "failed"
        assert job["reason"].startswith("VerifyError: replay differs from plain execution")
        assert job["verify"]["num_ok"] == 1
        assert not job["pareto"]


def fail_once(cli: Cli, word: str) -> Done:
    """Run a sweep of two jobs, of which the first fails."""
    ops = "partition.splitting_ops=[aten::softmax],null"  # the first is found only after tracing
    done = cli(word, *TINY, *HERE, "job=plan", ops)
    assert done.code == 1
    (report,) = done.reports
    assert report["partition"]["num_boundaries"] == 1
    assert [job["status"] for job in table_of(done)] == ["failed", "done"]
    assert "not in the traced graph" in table_of(done)[0]["reason"]
    assert "job 0 (1 of 2): failed after " in done.out
    assert "Traceback" not in done.out + done.err
    return done


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failed_job_and_its_exit_code_is_1(cli: Cli) -> None:
    fail_once(cli, "-m")


@pytest.mark.slow
def test_nothing_is_left_in_a_folder_of_the_sweep_that_was_there_before(cli: Cli) -> None:
    assert cli("-m", *TINY, *HERE, "job=plan", "seed=1,2").code == 0
    (Path("out") / "sweep.png").write_text("old")
    again = fail_once(cli, "hydra.mode=MULTIRUN")
    assert not (again.folder / "out" / "0" / "report.json").exists()
    assert not (again.folder / "out" / "sweep.png").exists()


def test_a_sweep_of_one_job_has_a_table_as_well(cli: Cli) -> None:
    done = cli("-m", *TINY, *HERE, "job=plan")
    assert done.code == 0
    (job,) = table_of(done)
    assert job["differs"] == {}
    assert "sweep of 1 job: 1 done" in done.out


def test_a_single_job_has_no_table_and_leaves_no_record(cli: Cli) -> None:
    done = cli(*TINY, "device=cpu", "job=plan", "hydra.run.dir=out")
    assert done.code == 0
    assert names_in(done.folder / "out") == {"pcgsvc.log", "report.json", "plan.html", "plan.svg"}
    assert "callbacks: {}" in (done.folder / "out" / ".hydra" / "hydra.yaml").read_text()


# ---- in a terminal -------------------------------------------------------------------------------


def multirun(launcher: str, *, isolate: bool = True) -> Any:
    """Return what Hydra tells of a sweep at its start."""
    target = f"hydra._internal.core_plugins.{launcher}"
    return OmegaConf.create(
        {
            "hydra": {"sweep": {"dir": "out"}, "launcher": {"_target_": target}},
            "sweep": {"isolate": isolate},
        }
    )


BASIC = "basic_launcher.BasicLauncher"


@pytest.mark.parametrize(
    ("told", "terminal", "bar"),
    [
        (multirun(BASIC), True, True),
        (multirun(BASIC), False, False),
        (multirun(BASIC, isolate=False), True, False),  # its jobs draw bars of their own
        (multirun("other.Launcher"), True, False),  # its jobs end unseen
    ],
)
def test_a_bar_counts_jobs_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, told: Any, terminal: bool, bar: bool
) -> None:
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=terminal, width=80, color_system=None)
    monkeypatch.setattr(whole, "console", lambda: shown)
    with whole.watching(Membership("s", 3)) as mine:
        assert whole.current() is mine
        mine.on_multirun_start(told)
        mine.on_job_end(told, None)
        time.sleep(0.3)  # until it is drawn again
    assert mine.folder == Path.cwd() / "out"
    assert ("sweep" in screen.getvalue()) is bar
    assert ("1/3" in screen.getvalue()) is bar
    assert whole.current() is not mine


def test_in_a_launchers_process_the_watch_does_nothing() -> None:
    with whole.watching(Membership("s", 3)) as mine:
        assert type(pickle.loads(pickle.dumps(mine))) is Callback


def test_the_device_of_a_sweep_is_found_without_starting_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started() -> int:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", started)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_of(Config(device="auto")) == torch.device("cuda", 0)
    assert device_of(Config(device="cuda:1")) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of(Config(device="cuda")) == torch.device("cuda", 1)


# ---- launchers -----------------------------------------------------------------------------------


class Losing(BasicLauncher):
    """Runs the first job only, as a cluster may."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        return super().launch(job_overrides[:1], initial_job_idx)


class Breaking(Losing):
    """Breaks after its first job."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        super().launch(job_overrides, initial_job_idx)
        raise RuntimeError("the cluster is gone")


@pytest.mark.parametrize(("launcher", "said"), [(Losing, ""), (Breaking, "the cluster is gone")])
def test_a_job_that_a_launcher_never_ran_is_missed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, launcher: type[BasicLauncher], said: str
) -> None:
    name = f"hydra_plugins.ours.{launcher.__name__}"  # Hydra takes launchers of that package only
    monkeypatch.setitem(Plugins.instance().class_name_to_class, name, launcher)
    words = [*TINY, *HERE, "job=plan", "seed=1,2", f"hydra.launcher._target_={name}"]
    done = cli("-m", *words)
    assert done.code == 1
    assert [job["status"] for job in table_of(done)] == ["done", "not run"]
    assert table_of(done)[1]["differs"] == {"seed": "2"}
    assert "job 1 not run: the launcher never started it" in done.out
    assert said in done.err


# ---- bad configuration ---------------------------------------------------------------------------


def test_one_bad_value_in_a_sweep_ends_it_before_any_job_ran(cli: Cli) -> None:
    done = cli("-m", *TINY, "capture.sizes=[1],[1,0]", "mode=piecewise,full")
    assert done.code == 2
    assert "capture.sizes: got [0] among [1, 0]" in done.err
    assert "(job 3 of 4; none was run)" in done.err
    assert not any(done.folder.iterdir())


def test_jobs_of_a_sweep_may_not_write_one_report(cli: Cli) -> None:
    done = cli("-m", *TINY, "mode=piecewise,full", "report=r.json")
    assert done.code == 2
    assert "2 jobs would write" in done.err
    assert not any(done.folder.iterdir())


def test_a_time_limit_that_cannot_be_kept_is_refused(cli: Cli) -> None:
    done = cli("-m", *TINY, "sweep.isolate=false", "sweep.timeout_s=5")
    assert done.code == 2
    assert "sweep.timeout_s: set with sweep.isolate=false" in done.err
    assert not any(done.folder.iterdir())


def test_a_folder_that_cannot_be_made_is_exit_2(cli: Cli) -> None:
    done = cli("-m", *TINY, "device=cpu", "job=plan", "hydra.sweep.dir=/proc/nope")
    assert done.code == 2
    assert "hydra.sweep.dir" in done.err
    assert "Traceback" not in done.err


# ---- without matplotlib --------------------------------------------------------------------------


@pytest.mark.slow
def test_without_matplotlib_a_warning_stands_in_for_the_picture(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "has_matplotlib", lambda: False)
    done = cli("-m", *TINY, *HERE)
    assert done.code == 0
    assert names_in(done.folder / "out") == {"multirun.yaml", "sweep.csv", "sweep.json"}
    assert "sweep.png is not drawn: matplotlib is not installed (pip install" in done.out


def test_without_matplotlib_strict_refuses_the_sweep(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_matplotlib", lambda: False)
    done = cli("-m", *TINY, "device=cpu", "strict=true")
    assert done.code == 2
    assert "strict=true, and sweep.png cannot be drawn" in done.err
    assert not any(done.folder.iterdir())
