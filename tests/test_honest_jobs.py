"""Jobs that say what they did: job=compile, cache actions, plans and sizes for another machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from store_helpers import stored_files
from warm_cli_helpers import Cli

from pcgsvc.cache.store import Store
from pcgsvc.config.compose import compose
from pcgsvc.events import Silent
from pcgsvc.jobs import cache as cache_jobs
from pcgsvc.jobs import compile as compile_jobs
from pcgsvc.jobs.cache import cache_job
from pcgsvc.jobs.plan import planner
from pcgsvc.jobs.plan.planner import plan

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
PLANNED = ["job=plan", "model.num_layers=1", "compiler=eager", "capture.sizes=[1,2]"]


# ---- job=compile ---------------------------------------------------------------------------------


def test_a_fresh_process_loads_what_was_stored_and_the_report_says_so(
    cached_cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch, validate_report: Any
) -> None:
    done = cached_cli("job=compile", "cache.prove=true")
    assert done.code == 0, done.out
    (report,) = done.reports
    validate_report(report)
    assert report["cache"]["stored"]
    assert report["cache"]["proof"]["ok"]
    assert "a fresh process loaded it" in done.out
    # Nothing is stored by a warm start, so there is nothing to prove.
    monkeypatch.setattr(compile_jobs, "_prove", None)
    assert "proof" not in cached_cli("job=compile", "cache.prove=true").reports[0]["cache"]


def test_what_a_fresh_process_cannot_load_fails_the_job(
    cached_cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = compile_jobs._prove

    def spoiled(config: Any) -> dict[str, Any]:
        for path in stored_files(root):
            path.unlink()
        return prove(config)

    monkeypatch.setattr(compile_jobs, "_prove", spoiled)
    done = cached_cli("job=compile", "cache.prove=true")
    assert done.code == 1
    assert done.reports[0]["cache"]["proof"]["ok"] is False
    assert "a fresh process could not load what was stored" in done.out.splitlines()[-1]
    assert "cache.require_warm=true" in done.out.splitlines()[-1]


def unwritable(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Make folders below a root read-only, whoever runs the test."""
    (root / "store").mkdir(parents=True, mode=0o700)
    access = os.access

    def refuse(path: Any, mode: int, **kwargs: Any) -> bool:
        return not mode & os.W_OK and access(path, mode, **kwargs)

    monkeypatch.setattr("pcgsvc.cache.root.os.access", refuse)


def test_a_folder_that_cannot_be_written_is_exit_1_with_the_reason_last(
    cached_cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwritable(monkeypatch, root)
    done = cached_cli("job=compile")
    assert done.code == 1
    assert "not stored" in done.out
    last = done.out.splitlines()[-1]
    assert f"job=compile: nothing was stored: {root / 'store'} is not writable" in last
    assert not done.reports[0]["cache"]["stored"]
    assert done.reports[0]["cache"]["not_stored"] == [f"{root / 'store'} is not writable"]
    assert not stored_files(root)


def test_a_program_that_cannot_be_written_down_is_exit_1(
    cached_cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, *args: Any, **kwargs: Any) -> bool:
        self._failure = "No space left on device"
        return False

    monkeypatch.setattr(Store, "put_program", full)
    done = cached_cli("job=compile")
    assert done.code == 1
    assert "nothing was stored: No space left on device" in done.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cache.mode=off", "cache.mode: got 'off' with job=compile"),
        ("partition.strategy=breakable", "partition.strategy: got 'breakable' with job=compile"),
    ],
)
def test_settings_with_which_nothing_can_be_stored_are_exit_2(
    cached_cli: Cli, word: str, message: str
) -> None:
    done = cached_cli("job=compile", word)
    assert done.code == 2
    assert message in done.out


def test_refresh_without_a_folder_to_write_is_exit_2(
    cached_cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwritable(monkeypatch, root)
    done = cached_cli("job=compile", "cache.mode=refresh")
    assert done.code == 2
    assert f"got 'refresh' with job=compile, but {root / 'store'} is not writable" in done.out


def test_reading_alone_succeeds_where_all_is_stored(cached_cli: Cli) -> None:
    missing = cached_cli("job=compile", "cache.mode=read")
    assert missing.code == 1
    assert "cache.mode=read, and it was not all stored: absent" in missing.out.splitlines()[-1]
    assert cached_cli("job=compile").code == 0
    assert cached_cli("job=compile", "cache.mode=read").code == 0


# ---- job=cache -----------------------------------------------------------------------------------


def test_ls_shows_model_settings_device_and_date(cached_cli: Cli, root: Path) -> None:
    assert cached_cli("job=compile", "model.hidden_size=64").code == 0
    told = cached_cli("job=cache").out
    for word in ("1 program,", "Llama", "on cpu", "made 20", "model.hidden_size=64", str(root)):
        assert word in told
    assert "compiler.name=eager dtype=float32" in told
    assert "mode=" not in told.replace("model", "")


def test_check_loads_every_program(cached_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_cli("job=compile").code == 0
    assert ": loaded" in cached_cli("job=cache", "cache.action=check", "cache.mode=refresh").out
    found = cache_jobs.Artifacts

    class Elsewhere(found):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.pieces.environment = {"torch": "1.0"}

    monkeypatch.setattr(cache_jobs, "Artifacts", Elsewhere)
    told = cached_cli("job=cache", "cache.action=check")
    assert told.code == 0
    assert "not loaded: made where torch differ" in told.out

    def broken(*args: Any) -> None:
        raise compile_jobs_error

    compile_jobs_error = cache_jobs.NoProgramError("piece 0: torch cannot load it")
    monkeypatch.setattr(found, "load_all", broken)
    monkeypatch.setattr(cache_jobs, "Artifacts", found)
    told = cached_cli("job=cache", "cache.action=check")
    assert told.code == 1
    assert "cannot be loaded: piece 0: torch cannot load it" in told.out
    assert "1 entry damaged" in told.out


@pytest.mark.parametrize(
    ("terminal", "words", "answer", "left"),
    [
        (True, [], "n", True),
        (True, [], "y", False),
        (True, ["cache.yes=true"], None, False),
        (False, [], None, False),
    ],
)
def test_clear_asks_on_a_terminal_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    words: list[str],
    answer: str | None,
    left: bool,
) -> None:
    from store_helpers import fill, open_store

    with open_store(tmp_path) as store:
        fill(store)
    asked: list[str] = []

    def reply(self: Console, question: str) -> str:
        asked.append(question)
        assert answer is not None
        return answer

    monkeypatch.setattr(Console, "input", reply)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    out = Console(force_terminal=terminal, width=200, record=True)
    settings = ["job=cache", "cache.action=clear", f"cache.dir={tmp_path}", "device=cpu", *words]
    cache_job(compose(settings), out)
    told = out.export_text()
    assert [str(tmp_path) in question for question in asked] == [True] * (answer is not None)
    assert bool(stored_files(tmp_path / "store" / "..")) or not left
    assert ("nothing was deleted" in told) is left
    assert (f"cleared {tmp_path / 'store'}" in told) is not left


# ---- plans and sizes for a machine that is not here ----------------------------------------------


def test_weights_wider_than_their_checkpoint_are_said_with_the_setting() -> None:
    pytest.importorskip("transformers")
    words = [*PLANNED[:1], *PLANNED[2:], "device=cpu", "model=hf", "model.config=tiny-mixtral"]
    done = plan(compose(words), Silent())
    stored = done.request.bundle.stored_dtype
    notes = " ".join(done.planned.notes)
    assert ("dtype=bfloat16 takes half the memory" in notes) is (stored == "bfloat16")
    done.request.bundle.stored_dtype = "bfloat16"
    from pcgsvc.jobs.plan.request import _dtype_note

    (note,) = _dtype_note(done.request.config, done.request.bundle)
    assert note.startswith("weights are float32, and the checkpoint says bfloat16: dtype=bfloat16")


@NO_CUDA
def test_a_plan_for_cuda_says_that_experts_run_in_another_form_there() -> None:
    pytest.importorskip("transformers")
    words = ["model=hf", "model.config=tiny-mixtral", "device=cuda", *PLANNED[:1], *PLANNED[2:]]
    done = plan(compose(words), Silent())
    assert any("planned as batched_mm" in n and "grouped_mm" in n for n in done.planned.notes)


def test_more_memory_than_any_machine_has_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*PLANNED, "device=cpu"]
    assert not plan(compose(words), Silent()).warnings
    monkeypatch.setattr(planner.os, "sysconf", lambda name: 512)
    (warning,) = plan(compose([*words, "strict=true"]), Silent()).warnings
    assert "this machine has 256.0 KiB" in warning
    assert planner._beyond(1 << 40, torch.device("cuda", 99)) is not None
    assert planner._beyond(200 << 30, torch.device("cuda", 99)) is None


@NO_CUDA
def test_sizes_for_cuda_need_no_gpu(cached_cli: Cli, tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.csv"
    traffic.write_text("num_tokens,count\n4,10\n600,3\n")
    done = cached_cli("job=sizes", "device=cuda", f"traffic={traffic}", "capture.sizes=null")
    assert done.code == 0, done.out
