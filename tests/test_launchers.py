"""Sweeps through launchers: what jobs give back, lost ones; joblib, Ray and submitit themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Cli, Done
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from pcgsvc.config.launchers import register_launchers
from pcgsvc.jobs.sweep.records import Record, Returned, Status, keep, read_records, write_record

SMALL = ["model=two_regions", "compiler=eager", "bench.enabled=false", "device=cpu"]
OUT = ["hydra.sweep.dir=out", "capture.sizes=[1,2]"]
TWO = [*OUT, "mode=piecewise,full"]
FOUR = ["capture.sizes=[1,2],[1,2,4]", "mode=piecewise,full", "hydra.sweep.dir=out"]


def table_of(done: Done) -> list[dict[str, Any]]:
    """Return the jobs of `sweep.json`."""
    return list(json.loads((done.folder / "out" / "sweep.json").read_text())["jobs"])


def returned(folder: Path, number: int = 0) -> Returned:
    """Return what a job gives back that ran in a folder."""
    record = Record(
        sweep="mine",
        number=number,
        overrides=[],
        folder=str(folder),
        host="far",
        status=Status.DONE,
        report=str(folder / "report.json"),
        output=str(folder / "output.txt"),
    )
    files = {"report.json": b"{}\n", "output.txt": b"said\n"}
    return Returned(record=record, place=str(number), files=files, value=0)


# ---- what comes back -----------------------------------------------------------------------------


def test_record_report_and_output_of_another_machine_are_written_here(tmp_path: Path) -> None:
    keep(returned(Path("/far/away/0")), tmp_path)
    (record,) = read_records(tmp_path, "mine", None, {}, interrupted=False)
    assert record.folder == str(tmp_path / "0")
    assert record.host == "far"
    assert Path(str(record.report)).read_bytes() == b"{}\n"
    assert Path(str(record.output)).read_bytes() == b"said\n"


def test_a_job_without_a_report_gets_none_here(tmp_path: Path) -> None:
    keep(replace(returned(Path("/far/away/0")), files={}), tmp_path)
    (record,) = read_records(tmp_path, "mine", None, {}, interrupted=False)
    assert (record.report, record.output) == (None, None)


def test_a_job_that_shares_the_folder_keeps_what_it_wrote(tmp_path: Path) -> None:
    given = returned(tmp_path / "0")
    (tmp_path / "0").mkdir()
    write_record(given.record)
    (tmp_path / "0" / "report.json").write_text("its own")
    keep(given, tmp_path)
    assert read_records(tmp_path, "mine", None, {}, interrupted=False) == [given.record]
    assert (tmp_path / "0" / "report.json").read_text() == "its own"


def test_a_lost_job_has_its_reason_whether_or_not_it_left_a_record(tmp_path: Path) -> None:
    begun = replace(returned(tmp_path / "0").record, status=Status.RUNNING)
    (tmp_path / "0").mkdir()
    write_record(begun)
    gone = {
        number: replace(begun, number=number, host=None, status=Status.FAILED, reason="lost: x")
        for number in (0, 1)
    }
    found = read_records(tmp_path, "mine", [["a=1"], ["a=2"], ["a=3"]], gone, interrupted=False)
    assert [(r.status, r.reason, r.host) for r in found] == [
        ("failed", "lost: x", "far"),
        ("failed", "lost: x", None),
        ("not run", "the launcher never started it", None),
    ]


class Elsewhere(BasicLauncher):
    """Runs jobs where no folder is shared; the first one's machine is lost on the way."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        with contextlib.chdir(os.environ["ELSEWHERE"]):
            done = list(super().launch(job_overrides, initial_job_idx))
        done[0] = JobReturn(status=JobStatus.FAILED, _return_value=ConnectionError("no route"))
        return done


@pytest.mark.slow
def test_without_a_shared_folder_the_table_comes_from_what_jobs_give_back(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_report: Any
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere"))
    name = "hydra_plugins.ours.Elsewhere"
    monkeypatch.setitem(Plugins.instance().class_name_to_class, name, Elsewhere)
    words = [*SMALL, *OUT, "sweep.isolate=false", "seed=1,2,3"]
    done = cli("-m", *words, f"hydra.launcher._target_={name}")
    assert done.code == 1
    assert [job["status"] for job in table_of(done)] == ["failed", "done", "done"]
    assert "job 0 failed: lost: ConnectionError: no route" in done.out
    assert [job["report"] for job in table_of(done)] == [None, "1/report.json", "2/report.json"]
    assert len(done.reports) == 2
    for report in done.reports:
        validate_report(report)
        assert report["host"] == {"name": os.uname().nodename, "gpu": None}
    assert table_of(done)[1]["host"] == os.uname().nodename


# ---- settings ------------------------------------------------------------------------------------


LAUNCHERS = {
    "joblib": ("hydra-joblib-launcher", "joblib"),
    "ray": ("hydra-ray-launcher", "ray"),
    "submitit_local": ("hydra-submitit-launcher", "slurm"),
    "submitit_slurm": ("hydra-submitit-launcher", "slurm"),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_whose_package_is_missing_names_its_extra(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = util.find_spec
    monkeypatch.setattr(
        "pcgsvc.config.launchers.find_spec",
        lambda word: None if word.startswith("hydra_plugins.") else found(word),
    )
    done = cli("-m", f"hydra/launcher={name}", *SMALL, "seed=1,2")
    assert done.code == 2
    package, extra = LAUNCHERS[name]
    assert done.err == (
        f"pcgsvc: hydra/launcher: {name} needs {package}, which is not installed "
        f"(pip install 'pcgsvc[{extra}]').\n"
    )
    assert not any(done.folder.iterdir())


def test_a_job_asks_for_one_gpu_wherever_gpus_are_given_out() -> None:
    register_launchers()
    register_launchers()
    store = ConfigStore.instance()
    nodes = {name: store.load(f"hydra/launcher/{name}.yaml").node for name in LAUNCHERS}
    assert nodes["ray"].ray.remote == {"num_cpus": 1, "num_gpus": 1, "max_retries": 0}
    assert nodes["submitit_local"].gpus_per_node == nodes["submitit_slurm"].gpus_per_node == 1
    assert all(OmegaConf.is_config(node) and "_target_" in node for node in nodes.values())


# ---- the launchers themselves --------------------------------------------------------------------

scale = pytest.mark.exhaustive
"""Needs the packages of the extra `test-scale`, which only that tier has."""
foreign = pytest.mark.filterwarnings("ignore")
"""What these packages warn of is theirs."""
patient = pytest.mark.timeout(900)
"""Most of it is starting processes: seconds on idle cores, minutes beside other tests."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes of Ray on this machine, with a logical GPU and a cache folder each."""
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        from ray.cluster_utils import Cluster

        with contextlib.chdir(folder):  # the folder of the first test is gone after it
            made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
            for name in "ab":
                own = {"PCGSVC_CACHE_DIR": str(folder / name)}
                made.add_node(num_cpus=1, num_gpus=1, env_vars=own)
        yield made
        made.shutdown()


@pytest.fixture
def launched(
    cli: Cli, root: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Done]]:
    """Return a call of a sweep through a launcher, each of which has its own cache."""

    def call(launcher: str, *words: str) -> Done:
        own = [f"hydra/launcher={launcher}"]
        if not any(word.startswith("cache.remote=") for word in words):
            own.append(f"cache.dir={root / launcher}")
        if launcher == "ray":
            address = request.getfixturevalue("cluster").address
            own.append(f"hydra.launcher.ray.init.address='{address}'")
        if launcher == "joblib":
            own.append("hydra.launcher.n_jobs=2")
        return cli("-m", *own, *SMALL, *words)

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    yield call
    with contextlib.suppress(ImportError):
        import ray

        ray.shutdown()
    with contextlib.suppress(ImportError):
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True, kill_workers=True)


def process_of(folder: Path) -> int | None:
    """Return the process of the job in a folder: the one that prints there."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "fd" / "1").readlink() == folder / "output.txt":
                return int(path.name)
    return None


def parents_of(pid: int) -> Iterator[int]:
    """Yield a process and those that it descends from."""
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def when_it_runs(folder: Path, act: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile, wait for the process of the job in a folder, and act upon it."""

    def run() -> None:
        until = time.monotonic() + 200
        while (pid := process_of(folder)) is None and time.monotonic() < until:
            time.sleep(0.02)
        if pid is not None:
            act(pid)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


def without_times(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return jobs as they are wherever they run, and whichever of them compiled for all."""
    varying = ("seconds", "wall_s", "peak_host_bytes", "output", "overrides", "compile")
    return [{k: v for k, v in job.items() if k not in varying} for job in jobs]


@foreign
@patient
@scale
@pytest.mark.parametrize("launcher", ["joblib", "ray", "submitit_local"])
def test_four_jobs_compile_once_and_have_the_table_of_one_machine(
    launched: Any, launcher: str
) -> None:
    here = without_times(table_of(launched("basic", *FOUR, "sweep.isolate=false")))
    done = launched(launcher, *FOUR)
    assert done.code == 0, done.out + done.err
    assert "sweep of 4 jobs: 4 done" in done.out
    assert without_times(table_of(done)) == here
    starts = [job["compile"]["start"] for job in table_of(done)]
    assert sorted(starts) == ["cold", "warm", "warm", "warm"]


@foreign
@patient
@scale
@pytest.mark.parametrize("launcher", ["joblib", "ray", "submitit_local"])
def test_a_job_killed_on_a_launcher_is_one_failed_row(launched: Any, launcher: str) -> None:
    with when_it_runs(Path.cwd() / "out" / "1", lambda pid: os.kill(pid, signal.SIGKILL)):
        done = launched(launcher, *TWO)
    assert done.code == 1
    assert [job["status"] for job in table_of(done)] == ["done", "failed"]
    assert table_of(done)[1]["reason"].startswith("killed (SIGKILL) by ")


@foreign
@patient
@scale
def test_two_nodes_with_caches_of_their_own_and_one_remote_compile_once(
    launched: Any, tmp_path: Path
) -> None:
    words = [*OUT, f"cache.remote={tmp_path / 'remote'}", "seed=1,2"]
    done = launched("ray", *words)
    assert done.code == 0, done.out + done.err
    starts = {job["compile"]["start"]: job["compile"]["num_compiled"] for job in table_of(done)}
    assert starts == {"cold": 2, "warm": 0}
    assert len({report["cache"]["dir"] for report in done.reports}) == 2


@foreign
@patient
@scale
def test_a_node_of_ray_that_is_removed_is_one_failed_row(launched: Any, cluster: Any) -> None:
    def remove(pid: int) -> None:
        above = set(parents_of(pid))
        (node,) = [
            node
            for node in cluster.list_all_nodes()
            if node.all_processes["raylet"][0].process.pid in above
        ]
        cluster.remove_node(node, allow_graceful=False)

    with when_it_runs(Path.cwd() / "out" / "0", remove):
        done = launched("ray", *FOUR)
    cluster.add_node(num_cpus=1, num_gpus=1)
    assert done.code == 1
    assert [job["status"] for job in table_of(done)] == ["failed", "done", "done", "done"]
    assert table_of(done)[0]["reason"].startswith("lost: NodeDiedError: Task failed because the")


@foreign
@patient
@scale
def test_a_lost_process_of_submitit_is_one_failed_row(launched: Any) -> None:
    def kill(pid: int) -> None:
        _, worker, *_ = parents_of(pid)
        os.kill(worker, signal.SIGKILL)

    with when_it_runs(Path.cwd() / "out" / "0", kill):
        done = launched("submitit_local", *TWO)
    assert done.code == 1
    assert [job["status"] for job in table_of(done)] == ["failed", "done"]
    assert table_of(done)[0]["reason"].startswith("lost: UncompletedJobError: ")


SLURM = {
    "sbatch": """
echo 'Submitted batch job 7'
export SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=1 SLURM_JOB_ID=8 SLURM_JOB_NODELIST=node2
export SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
bash "$1" >/dev/null 2>&1 &
""",
    "srun": 'while [[ $1 != */python* ]]; do shift; done; exec "$@"',
    "sacct": "printf 'JobID|State|NodeList\\n7_0|NODE_FAIL|node1\\n7_1|RUNNING|node2\\n'",
}
"""Slurm's commands: an array of two jobs, of which the second one is run here."""


@foreign
@patient
@scale
def test_a_node_of_slurm_that_fails_is_one_failed_row(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = launched("submitit_slurm", *TWO)
    assert done.code == 1
    assert [job["status"] for job in table_of(done)] == ["failed", "done"]
    reason = table_of(done)[0]["reason"]
    assert reason.startswith("lost: UncompletedJobError: ")
    assert "NODE_FAIL" in reason
    (script,) = (done.folder / "out" / ".submitit").rglob("*_submission.sh")
    assert "#SBATCH --array=0-1%2\n" in script.read_text()
    assert "#SBATCH --gpus-per-node=1\n" in script.read_text()
