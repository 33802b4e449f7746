"""The warm start by the command line: no trace, no compile, and never another program than its own.

Eager models in this process. Processes and Inductor: test_warm_processes.py; damage and modes of a
library build: test_warm_damage.py; what is stored, and for whom: test_warm_stored.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_helpers import stored_files
from warm_cli_helpers import (
    WARM,
    Cli,
)

from pcgsvc import torch_private


@pytest.fixture
def filled(cached_cli: Cli, root: Path, programs: Path) -> Path:
    """The cache root, as one cold run leaves it."""
    kept = programs / "of one run"
    if not kept.exists():
        first = cached_cli()
        assert (first.code, first.start) == (0, ("cold", 1, 2))
        root.rename(kept)
    shutil.copytree(kept, root)
    return root


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a warm start traces or compiles")


def forbid_compilers(patch: pytest.MonkeyPatch) -> None:
    for name in ("dynamo_trace", "inductor_compile", "import_compilers"):
        patch.setattr(torch_private, name, refuse)


# ---- the second run ------------------------------------------------------------------------------


def test_the_second_run_is_warm_and_right_and_its_report_says_so(
    cached_cli: Cli, validate_report: Callable[[Any], None]
) -> None:
    first = cached_cli()
    assert (first.code, first.start) == (0, ("cold", 1, 2))
    second = cached_cli()
    assert (second.code, second.start) == (0, WARM)
    (report,) = second.reports
    validate_report(report)
    assert report["compile"]["num_loaded"] == 2
    assert report["cache"]["misses"] == 0
    assert report["cache"]["miss_reasons"] == []
    assert report["cache"]["program_key"] == first.reports[0]["cache"]["program_key"]
    assert report["partition"] == first.reports[0]["partition"]
    assert report["verify"]
    assert all(row["ok"] and row["max_rel_err"] == 0 for row in report["verify"])
    seconds = report["compile"]["seconds"]
    assert (seconds["trace"], seconds["compile"]) == (0, 0)
    assert seconds["load"] > 0


def test_a_warm_start_needs_neither_dynamo_nor_a_compiler(
    cached_cli: Cli, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_compilers(monkeypatch)
    again = cached_cli()
    assert (again.code, again.start) == (0, WARM)
    assert cached_cli("model.hidden_size=64").code == 1  # the control: a cold start does need them


def test_job_compile_fills_the_cache_and_captures_nothing(cached_cli: Cli) -> None:
    filled = cached_cli("job=compile")
    assert (filled.code, filled.start) == (0, ("cold", 1, 2))
    assert "graphs" not in filled.reports[0]
    assert cached_cli("cache.require_warm=true").start == WARM


def test_a_sweep_over_sizes_and_modes_compiles_in_its_first_job_only(cached_cli: Cli) -> None:
    done = cached_cli(
        "-m", "capture.sizes=[1],[1,2]", "mode=piecewise,full,none", "sweep.isolate=false"
    )
    assert done.code == 0
    jobs = [(r["config"]["capture"]["sizes"], r["config"]["mode"]) for r in done.reports]
    assert jobs == [(s, m) for s in ([1], [1, 2]) for m in ("piecewise", "full", "none")]
    compiled = [report["compile"]["num_compiled"] for report in done.reports]
    assert sorted(compiled) == [0, 0, 0, 0, 0, 2]
    assert sorted(report["compile"]["num_traces"] for report in done.reports) == [0] * 5 + [1]


IRRELEVANT = [
    "seed=5",
    "strict=false",
    "outputs=view",
    "attention=varlen",
    "capture.warmup_calls=1",
]


def test_settings_that_cannot_matter_are_a_hit(cached_cli: Cli, filled: Path) -> None:
    assert cached_cli(*IRRELEVANT).start == WARM


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("model.hidden_size=64", "config.model.hidden_size: stored None, wanted 64"),
        ("dtype=float64", "config.dtype: stored 'float32', wanted 'float64'"),
        (
            "partition.splitting_ops=[pcgsvc::attention]",
            "config.partition.splitting_ops: stored None, wanted ['pcgsvc::attention']",
        ),
        ("model.norm_eps=0.5", "config.model.norm_eps: stored None, wanted 0.5"),
        ("compiler=inductor", "config.compiler.name: stored 'eager', wanted 'inductor'"),
    ],
)
def test_a_setting_that_matters_is_a_miss_and_explain_names_exactly_that(
    cached_cli: Cli, filled: Path, monkeypatch: pytest.MonkeyPatch, words: str, fact: str
) -> None:
    if "inductor" in words:
        monkeypatch.setattr(torch_private, "inductor_settings", dict)
    told = cached_cli("job=cache", "cache.action=explain", words)
    assert told.code == 0
    assert "miss" in told.out
    sentence = told.out.partition("The nearest program differs in: ")[2].strip()
    assert sentence.partition(" (and ")[0].rstrip(".") == fact
    refused = cached_cli("cache.require_warm=true", words)
    assert refused.code == 1
    assert fact in refused.log + refused.out
    assert "nearest stored program" not in told.out + refused.log + refused.out  # said once
    assert not refused.reports


def test_explain_says_hit_for_what_is_stored(cached_cli: Cli) -> None:
    assert "miss: program" in cached_cli("job=cache", "cache.action=explain").out
    assert cached_cli().code == 0
    told = cached_cli("job=cache", "cache.action=explain")
    assert "hit: program" in told.out
    assert "2 pieces" in told.out


def test_presets_of_one_shape_but_another_epsilon_are_told_apart(
    cached_cli: Cli, filled: Path
) -> None:
    # As two checkpoints of one architecture: nothing but what tracing read tells them apart.
    from pcgsvc.models import llama

    with pytest.MonkeyPatch.context() as patch:
        real = llama.RMSNorm.__init__

        def other(self: Any, width: int, eps: float, **where: Any) -> None:
            real(self, width, eps * 1000, **where)

        patch.setattr(llama.RMSNorm, "__init__", other)
        changed = cached_cli()
    assert changed.code == 0
    assert changed.start[0] == "cold"


# ---- moving --------------------------------------------------------------------------------------


def test_export_clear_import_is_warm(cached_cli: Cli, filled: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.tar"
    assert cached_cli("job=cache", "cache.action=export", f"cache.file={bundle}").code == 0
    assert cached_cli("job=cache", "cache.action=clear").code == 0
    assert "miss" in cached_cli("job=cache", "cache.action=explain").out
    assert cached_cli("job=cache", "cache.action=import", f"cache.file={bundle}").code == 0
    assert cached_cli("cache.require_warm=true").start == WARM
    assert "sound" in cached_cli("job=cache", "cache.action=check").out


# ---- modes ---------------------------------------------------------------------------------------


def test_read_serves_hits_and_stores_nothing(cached_cli: Cli, root: Path) -> None:
    missed = cached_cli("cache.mode=read")
    assert (missed.code, missed.start) == (0, ("cold", 1, 2))
    assert not root.exists()
    assert cached_cli().code == 0
    before = {p: p.read_bytes() for p in stored_files(root)}
    assert cached_cli("cache.mode=read").start == WARM
    assert cached_cli("cache.mode=read", "model.hidden_size=64").start[0] == "cold"
    assert {p: p.read_bytes() for p in stored_files(root)} == before


def test_refresh_compiles_anew_and_stores_it(cached_cli: Cli, filled: Path) -> None:
    fresh = cached_cli("cache.mode=refresh")
    assert (fresh.code, fresh.start) == (0, ("cold", 1, 2))
    assert cached_cli().start == WARM


def test_off_is_cold_each_time_and_says_nothing_of_a_place(cached_cli: Cli) -> None:
    for _ in range(2):
        done = cached_cli("cache.mode=off")
        assert (done.code, done.start) == (0, ("cold", 1, 2))
        assert done.reports[0]["cache"]["dir"] is None
