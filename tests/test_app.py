"""The command line: exit codes, messages, what is written, and sweeps.

Most tests call `main` in this process; Hydra's and logging's global state is put back after each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import TINY, Cli

from pcgsvc import pipeline
from pcgsvc.check.verify import Verified, refusal, verify
from pcgsvc.config import from_dict
from pcgsvc.errors import ConfigError, VerifyError
from pcgsvc.jobs import run as jobs
from pcgsvc.jobs.preflight import check

# ---- bad configuration ---------------------------------------------------------------------------

BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"capture": {"sizes": [0, 4]}}, "sizes are token counts, at least 1"),
    ({"capture": {"sizes": [4, 4]}}, "[4] appear twice"),
    ({"capture": {"x": 1}}, "Settings of capture: sizes, max_size"),
    ({"capture": {"graphs": "cuda"}}, "capture.graphs=recorded"),
    ({"partition": {"strategy": "fxx"}}, "Choices: fx, inductor, breakable"),
    ({"model": {"weights": "/nowhere.gguf"}}, "name a .gguf or .safetensors file"),
    ({"model": {"preset": "2b"}}, "tiny, 160m, 1b, 8b"),
    ({"device": "meta"}, "Choices: auto, cpu, cuda, cuda:N"),
    ({"dtype": "int8"}, "Choices: float32, bfloat16, float16, float64"),
    ({"x": 1}, "Settings at the top: model, attention"),
    ({"seed": "abc"}, "a whole number is needed"),
    ({"prompt": "hello"}, "model=smollm2"),
    ({"report": "/"}, "the path of a file"),
    ({"report": "/proc/x/r.json"}, "'/proc' cannot be written"),
    ({"cache": {"dir": "/etc/passwd"}}, "/etc/passwd is no folder"),
]


@pytest.mark.parametrize(("tree", "words"), BAD_VALUES, ids=str)
def test_bad_configuration_is_refused_with_what_is_wrong(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(from_dict({"device": "cpu", **tree}))
    assert words in str(caught.value)


BAD = {  # a value, an operator, a path; then what only a command line can get wrong
    "mode=piecewse": "did you mean 'piecewise'? Choices: none, piecewise, full, full_decode_only",
    "partition.splitting_ops=[no::such]": "Registered splitting ops:",
    "cache.dir=/etc/passwd": "/etc/passwd is no folder",
    "capture.sizes=1,2": "capture.sizes='[1,2,4]'",
    "model=lama": "two_regions",
    "attention=flash": "varlen",
    "x=1": "Settings at the top: model, attention",
    "+x=1": "Settings at the top: model, attention",
    "+capture.x=1": "Settings of capture: sizes, max_size",
    "capture.policy=eager": "it had one value and was never read; remove it",
    "seed=abc": "a whole number is needed",
    "hydra.nope=1": "hydra.nope",
    "--config-path=/tmp": "--config-dir",
    "--config-dir=/no/such": "is no folder",
    "--config-name=nothere": "nothere",
}


@pytest.mark.parametrize("word", BAD)
def test_bad_configuration_is_one_message_and_exit_2_with_nothing_written(
    cli: Cli, word: str
) -> None:
    done = cli("device=cpu", word) if not word.startswith(("device", "--")) else cli(word)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("pcgsvc: ") == 1
    assert BAD[word] in done.err
    assert "Traceback" not in done.err
    assert "HYDRA_FULL_ERROR" not in done.err
    assert not any(done.folder.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_cuda_on_a_machine_without_it_says_what_to_use(cli: Cli) -> None:
    done = cli("device=cuda")
    assert done.code == 2
    assert "Use device=cpu." in done.err
    assert not done.files


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


def test_strict_refuses_a_mode_that_is_not_done_as_asked(cli: Cli) -> None:
    done = cli(*TINY, "attention=varlen", "strict=true")
    assert done.code == 2
    assert "attention=varlen supports no full graphs" in done.err
    assert not any(done.folder.iterdir())


def test_an_op_that_is_not_in_the_graph_lists_those_that_are(cli: Cli) -> None:
    done = cli(*TINY, "device=cpu", "partition.splitting_ops=[aten::softmax]")
    assert done.code == 2
    assert "not in the traced graph: ['aten::softmax']" in done.out
    assert "pcgsvc::attention" in done.out
    assert "Traceback" not in done.out + done.err
    assert not done.reports


def test_an_output_folder_that_cannot_be_made_is_exit_2(cli: Cli) -> None:
    done = cli(*TINY, "device=cpu", "hydra.run.dir=/proc/nope", "job=plan")
    assert done.code == 2
    assert done.err.startswith("pcgsvc: hydra.run.dir: ")
    assert "Traceback" not in done.err


def test_an_option_that_there_is_not_is_exit_2(cli: Cli) -> None:
    done = cli("--bogus")
    assert done.code == 2
    assert "--bogus" in done.err


@pytest.mark.parametrize(
    ("verbose", "shown"), [("true", True), ("[pcgsvc]", True), ("false", False)]
)
def test_verbose_shows_the_traceback_of_a_bad_configuration(
    cli: Cli, verbose: str, shown: bool
) -> None:
    done = cli("mode=piecewse", f"hydra.verbose={verbose}")
    assert done.code == 2
    assert ("Traceback" in done.err) is shown
    assert "did you mean 'piecewise'?" in done.err.splitlines()[-1]


# ---- jobs ----------------------------------------------------------------------------------------


def test_run_verifies_times_and_reports(cli: Cli, validate_report: Any) -> None:
    words = ["model.num_layers=2", "compiler=eager", "capture.sizes=[1,2]", "bench.repeats=1"]
    done = cli(*words, "device=cpu", "mode=full_and_piecewise")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    assert report["mode"]["resolved"] == "full_and_piecewise"
    assert report["partition"]["num_boundaries"] == 2
    assert report["partition"]["num_regions"] == 3
    assert report["partition"]["num_unique_pieces"] == 3
    assert report["graphs"]["num_graphs"] == 3 * 2 + 2
    assert {(r["mode"], r["size"]) for r in report["verify"]} == {
        (mode, size) for mode in ("piecewise", "full") for size in (1, 2)
    }
    assert all(row["ok"] and row["max_rel_err"] == 0 for row in report["verify"])
    assert len(report["bench"]) == len(report["verify"])
    assert report["config"]["capture"]["self_check"] is True
    assert report["config"]["device"] == "cpu"


@pytest.mark.parametrize("job", ["plan", "compile"])
def test_plan_and_compile_report_without_graphs(cli: Cli, validate_report: Any, job: str) -> None:
    done = cli(*TINY, "device=cpu", f"job={job}")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    assert not {"graphs", "verify", "bench", "dispatch"} & set(report)
    assert report["compile"]["num_compiled"] == (0 if job == "plan" else 2)
    assert report["compile"]["seconds"]["total"] > 0


@pytest.mark.parametrize("word", ["mode=none", "capture.graphs=off"])
def test_a_run_that_captures_nothing_says_so(cli: Cli, validate_report: Any, word: str) -> None:
    done = cli(*TINY, "device=cpu", word)
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    assert report["graphs"]["backend"] == "off"
    assert report["graphs"]["num_graphs"] == 0
    assert report["verify"] == []
    assert "nothing was captured" in done.out


def test_varlen_resolves_to_piecewise_and_says_why(cli: Cli, validate_report: Any) -> None:
    done = cli(*TINY, "device=cpu", "attention=varlen", "mode=full_and_piecewise")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    mode = report["mode"]
    assert (mode["resolved"], mode["decode"], mode["mixed"]) == ("piecewise",) * 3
    assert "attention=varlen supports no full graphs" in mode["reasons"][0]
    told = [line for line in done.out.splitlines() if "supports no full graphs" in line]
    assert len([line for line in told if "[INFO]" in line]) == 1  # the default, and so no warning
    assert len([line for line in told if not line.startswith("[")]) == 1
    assert len(told) == 2
    assert report["warnings"] == []


def test_a_mode_that_was_asked_for_and_is_not_done_is_a_warning(cli: Cli) -> None:
    done = cli(*TINY, "device=cpu", "attention=varlen", "mode=full", "job=plan")
    assert done.code == 0, done.out + done.err
    told = [line for line in done.out.splitlines() if "supports no full graphs" in line]
    assert [line for line in told if "[WARNING]" in line]
    assert any("supports no full graphs" in warning for warning in done.reports[0]["warnings"])


def test_report_and_run_folder_go_where_they_are_sent(cli: Cli, tmp_path: Path) -> None:
    report, folder = tmp_path / "deep" / "r.json", tmp_path / "run"
    done = cli(*TINY, "device=cpu", "job=plan", f"report={report}", f"hydra.run.dir={folder}")
    assert done.code == 0, done.out + done.err
    assert json.loads(report.read_text())["schema"] == 1
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert not (folder / "report.json").exists()
    assert not any(done.folder.iterdir())
    assert str(report) in done.out


def test_relative_paths_are_relative_to_the_shells_folder(cli: Cli) -> None:
    done = cli(*TINY, "device=cpu", "job=plan", "report=r.json", "hydra.job.chdir=true")
    assert done.code == 0, done.out + done.err
    assert (done.folder / "r.json").is_file()
    assert Path.cwd() == done.folder


def test_a_users_folder_of_yaml_is_what_the_job_gets(cli: Cli, tmp_path: Path) -> None:
    for name, text in {
        "model/llama.yaml": "name: llama\nnum_layers: 2\n",  # before the shipped one
        "mine.yaml": "defaults: [config, _self_]\nmode: piecewise\ncache: {mode: off}\n",
    }.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    user = ["--config-dir", str(tmp_path / "conf"), "--config-name", "mine"]
    done = cli(*user, *TINY[1:], "device=cpu", "job=plan")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    assert report["partition"]["num_boundaries"] == 2
    assert report["config"]["mode"] == "piecewise"
    assert report["config"]["cache"]["mode"] == "off"


@pytest.mark.parametrize(
    ("form", "isolate", "seeds"),
    [
        (["--config-dir", "DIR"], True, [2]),
        (["--config-dir=DIR"], False, [1, 2]),
        (["-cd", "DIR"], False, [1, 2]),
    ],
)
def test_a_users_config_yaml_is_the_primary_config_of_a_sweep(
    cli: Cli, tmp_path: Path, form: list[str], isolate: bool, seeds: list[int]
) -> None:
    (tmp_path / "config.yaml").write_text(
        "defaults: [pcgsvc_schema, {model: llama}, {attention: paged}, {compiler: eager}, _self_]\n"
        "model: {num_layers: 1}\njob: plan\ndevice: cpu\ncapture: {graphs: off}\n"
    )
    words = [word.replace("DIR", str(tmp_path)) for word in form]
    sweep = f"seed={','.join(map(str, seeds))}"
    done = cli(*words, "-m", sweep, f"sweep.isolate={str(isolate).lower()}")
    assert done.code == 0, done.out + done.err
    assert [r["config"]["seed"] for r in done.reports] == seeds
    assert {r["partition"]["num_boundaries"] for r in done.reports} == {1}
    bad = cli(*words, "-m", "seed=1,x")
    assert bad.code == 2
    assert len(bad.reports) == len(seeds)  # those of before


# ---- jobs that fail ------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make verification find one wrong entry."""

    def wrong(*args: Any) -> Verified:
        found = verify(*args)
        assert found.rows is not None
        found.rows[0] |= {"ok": False, "max_rel_err": 0.5}
        return found._replace(refusal=refusal(found.rows, args[4], args[1]))

    monkeypatch.setattr(pipeline, "verify", wrong)


def test_a_wrong_replay_is_exit_1_and_the_report_is_written(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    done = cli(*TINY, "device=cpu", "mode=piecewise")
    assert done.code == 1
    (report,) = done.reports
    assert [row["ok"] for row in report["verify"]].count(False) == 1
    assert "VerifyError: replay differs from plain execution: piecewise size 2: 0.5" in done.out
    assert "1 of 2 entries differ" in done.out
    assert "WRONG" in done.out
    assert "Traceback" not in done.out + done.err


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(jobs, "run_job", fail)


def test_an_unexpected_error_is_one_line_and_exit_1(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ZeroDivisionError("by nought"))
    done = cli("device=cpu")
    assert done.code == 1
    assert "ZeroDivisionError: by nought (hydra.verbose=true shows where)" in done.out
    assert "Traceback" not in done.out + done.err


def test_verbose_shows_the_traceback_of_a_failed_job(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, VerifyError("not the same"))
    done = cli("device=cpu", "hydra.verbose=true")
    assert done.code == 1
    assert "VerifyError: not the same" in done.out
    assert "Traceback" in done.out


def test_control_c_ends_with_130_and_no_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    done = cli("device=cpu")
    assert done.code == 130
    assert done.err == "pcgsvc: interrupted\n"


def test_main_leaves_argv_and_the_environment_as_they_were(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ZeroDivisionError())
    argv, environment = list(sys.argv), dict(os.environ)
    cli("device=cpu")
    assert sys.argv == argv
    assert dict(os.environ) == environment


# ---- looking without running ---------------------------------------------------------------------


def test_help_lists_groups_and_settings(cli: Cli) -> None:
    short = cli("-h")
    assert (short.code, short.err) == (0, "")
    assert len(short.out.splitlines()) <= 45
    assert cli("--help").out == short.out
    done = cli("--help-all")
    assert done.code == 0
    (models,) = [
        line for line in done.out.splitlines() if line.startswith("  model=") and "|" in line
    ]
    assert {"llama", "module", "smollm2", "two_regions"} <= set(models.strip()[6:].split(" | "))
    assert "capture.sizes=null" in done.out
    assert "Exit codes: 0 done" in done.out
    assert not done.files


def test_version_names_pcgsvc(cli: Cli) -> None:
    done = cli("--version")
    assert done.code == 0
    assert done.out.startswith("pcgsvc 0.")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cfg", "job", "mode=piecewise"], "mode: piecewise"),
        (["--cfg", "job", "--package", "capture", "capture.sizes=[3]"], "- 3"),
        (["--cfg", "hydra"], "run:"),
        (["--info", "defaults"], "pcgsvc_schema"),
        (["--hydra-help"], "hydra/launcher"),
    ],
)
def test_hydras_own_views_work_and_write_nothing(cli: Cli, words: list[str], text: str) -> None:
    done = cli(*words)
    assert done.code == 0, done.err
    assert text in done.out
    assert not done.files


def test_a_mistake_under_cfg_is_one_message(cli: Cli) -> None:
    done = cli("--cfg", "job", "x=1")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert not done.files


# ---- as a process --------------------------------------------------------------------------------


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_module_exits_2_with_one_message_and_nothing_written(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "pcgsvc", "mode=piecewse"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pcgsvc: mode: got 'piecewse'")
    assert len(done.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_console_script_runs_a_job_from_another_folder(
    tmp_path: Path, validate_report: Any
) -> None:
    script = Path(sys.executable).with_name("pcgsvc")
    if not script.exists():
        pytest.skip("pcgsvc is not installed in this environment")
    done = run([str(script), *TINY, "device=cpu", "report=r.json"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    validate_report(tmp_path / "r.json")
