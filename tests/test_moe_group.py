"""Mixture of experts over a process group: who makes it, who ends it, several processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import command_line, run_job
from model_helpers import make_context
from moe_helpers import ALL_TO_ALL, TINY, layer_tensors, moe_config
from ranks_helpers import free_port, launch
from torch import distributed

import pcgsvc
from pcgsvc.check.timing import time_calls
from pcgsvc.check.tolerance import DRAWS, tolerance_of
from pcgsvc.config import MoeBackend
from pcgsvc.errors import ConfigError, PcgError
from pcgsvc.jobs.app import main
from pcgsvc.ops.context import use_context
from pcgsvc.ops.expert_group import command_line_group
from pcgsvc.ops.experts import moe_all_to_all

WORKER = Path(__file__).with_name("moe_worker.py")


def test_without_a_group_a_library_build_says_who_makes_it() -> None:
    with pytest.raises(ConfigError, match=r"no process group\. Call torch\.distributed\.init_pro"):
        pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"])


@pytest.mark.slow
def test_experts_over_a_group_of_one_equal_local_ones_and_closing_leaves_the_group(
    group: None, validate_report: Callable[[Any], None]
) -> None:
    ids = torch.arange(7)
    with pcgsvc.load_runner([*TINY, "cache.mode=off", "mode=piecewise"]) as runner:
        wanted = runner(ids, ids)
    with pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"]) as runner:
        got, report = runner(ids, ids), runner.report
    torch.testing.assert_close(got, wanted)
    validate_report(report)
    assert report["partition"]["splitting_ops"][1] == {
        "name": "pcgsvc::moe_all_to_all",
        "count": 2,
        "reason": "model.moe.backend=all_to_all exchanges rows between processes, as the data "
        "asks for",
    }
    reasons = {p["reason"] for p in report["partition"]["pieces"] if p["kind"] == "boundary"}
    assert any(r.startswith("pcgsvc::moe_all_to_all: model.moe.backend=all_to_") for r in reasons)
    assert distributed.is_initialized()


def test_a_group_that_cannot_reach_the_device_or_share_the_experts_is_refused(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_backend", lambda: "nccl")
    with pytest.raises(ConfigError, match=r"backend 'nccl', which cannot exchange rows on cpu"):
        pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"])
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match=r"num_experts: got 8, which the 3 processes"):
        pcgsvc.load_runner([*ALL_TO_ALL, "cache.mode=off"])


def test_a_group_that_has_changed_since_the_build_is_noticed(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    x, logits, gate_up, down = layer_tensors()
    with (
        use_context(make_context(None, [9])),
        pytest.raises(PcgError, match=r"6 of 6 experts are here, but the group has 2 processes"),
    ):
        moe_all_to_all(x, logits, gate_up, down, torch.empty_like(x), 2)


def test_the_command_line_makes_a_group_for_its_jobs_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = moe_config(backend=MoeBackend.ALL_TO_ALL)
    config.device = "cpu"
    with command_line_group(config):
        assert distributed.get_world_size() == 1
        with command_line_group(config):  # one that exists is not ours
            pass
        report = run_job([*ALL_TO_ALL, "cache.mode=off"], tmp_path, monkeypatch)
        assert [row["ok"] for row in report["verify"]] == [True, True]
    assert not distributed.is_initialized()
    with command_line_group(moe_config()):
        assert not distributed.is_initialized()


def test_a_sweep_is_refused_where_several_processes_would_have_to_share_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *ALL_TO_ALL, "seed=0,1"]) == 2
    assert "a sweep cannot be spread over 2 processes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_each_job_of_a_sweep_has_a_group_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # In one process, where a group that is left behind is there afterwards.
    with command_line(tmp_path, monkeypatch, capsys) as cli:
        done = cli("-m", *ALL_TO_ALL, "sweep.isolate=false", "capture.sizes=[4],[8]")
    assert done.code == 0, done.out + done.err
    verified = [[row["ok"] for row in report["verify"]] for report in done.reports]
    assert verified == [[True], [True]]
    assert not distributed.is_initialized()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What two processes of `moe_worker.py` leave in a folder, and print."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [*ALL_TO_ALL, f"report={folder / 'r.json'}", f"hydra.run.dir={folder / 'out'}"]
    words[words.index("bench.enabled=false")] = "bench.repeats=3"
    words.append("cache.mode=off")
    return folder, launch([str(WORKER), str(free_port()), *words])


@pytest.mark.slow
def test_two_processes_with_different_batches_each_get_what_one_process_gets(
    two_ranks: tuple[Path, list[str]],
) -> None:
    first, second = (json.loads(out.splitlines()[0]) for out in two_ranks[1])
    assert (first["rank"], second["rank"]) == (0, 1)
    for found in (first, second):
        assert found["experts"] == 4
        assert found["hits"] == {"piecewise:8": 1, "piecewise:4": 1}
        assert max(found["errors"]) < 1e-5


@pytest.mark.slow
def test_the_command_line_under_torchrun_writes_one_report_per_process(
    two_ranks: tuple[Path, list[str]],
) -> None:
    folder, (first, second) = two_ranks
    assert "entries equal plain execution" in first
    assert "entries equal plain execution" not in second
    for name in ("r.json", "r.rank1.json"):
        report = json.loads((folder / name).read_text())
        assert [row["ok"] for row in report["verify"]] == [True, True]


def test_timing_in_lockstep_makes_as_many_calls_as_asked_for_however_slow() -> None:
    made: list[int] = []
    for limit, wanted in ((0.0, 1 + 3 + 3), (float("inf"), 1 + 6 + 6)):
        made.clear()
        time_calls([lambda: made.append(1)], lambda: None, 6, limit)
        assert len(made) == wanted


def test_the_noise_run_of_half_precision_is_made_by_every_process_or_none() -> None:
    wanted = [torch.ones(3, dtype=torch.bfloat16)]
    made: list[int] = []

    def again() -> list[torch.Tensor]:
        made.append(1)
        return wanted

    for error in (0.0, 1.0):
        made.clear()
        tolerance_of(wanted, error, again, always=True)
        assert len(made) == DRAWS
    made.clear()
    limit = tolerance_of(wanted, 0.0, again, always=False)
    assert not made
    assert tolerance_of(wanted, 0.0, again, always=True) == limit
