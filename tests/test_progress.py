"""Long phases: bars in a terminal, one log line per phase otherwise, and every unit counted."""

from __future__ import annotations

import io
import logging
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from pcgsvc.config.compose import compose
from pcgsvc.jobs import run as jobs
from pcgsvc.jobs.plan.planner import plan
from pcgsvc.jobs.run import run_job
from pcgsvc.pipeline import build_from_config
from pcgsvc.report import progress
from pcgsvc.report.progress import progress_for

SMALL = [
    "model.num_layers=2",
    "capture.sizes=[1,2]",
    "device=cpu",
    "compiler=eager",
    "cache.mode=off",
    "bench.repeats=1",
]
PHASES = ["model", "load", "import", "trace", "split", "compile"]
PHASES += ["check", "capture", "verify", "bench"]


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.phases: dict[str, list[int]] = {}
        """Per phase: how many units it announced, and how many were done."""
        self._open: str | None = None

    def start(self, phase: str, total: int) -> None:
        assert self._open is None, f"{phase} begins inside {self._open}"
        self._open = phase
        self.phases[phase] = [total, 0]

    def advance(self) -> None:
        assert self._open is not None
        self.phases[self._open][1] += 1

    def stop(self) -> None:
        assert self._open is not None
        self._open = None

    @property
    def over(self) -> bool:
        return self._open is None


def test_a_build_announces_its_phases_and_counts_their_units() -> None:
    heard = Heard()
    with build_from_config(compose(SMALL), heard):
        assert heard.over
    assert list(heard.phases) == [*PHASES[:9]]
    assert heard.phases["compile"] == [3, 3]  # unique regions
    assert heard.phases["capture"] == [4, 4]  # two sizes in two modes
    assert heard.phases["verify"] == [4, 4]


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_a_plan_announces_its_phases(strategy: str) -> None:
    heard = Heard()
    plan(compose([*SMALL, "job=plan", f"partition.strategy={strategy}"]), heard)
    assert heard.over
    assert {"model", "split", "count"} <= set(heard.phases)
    if strategy == "breakable":
        assert heard.phases["count"] == [2, 2]


def test_a_phase_that_fails_is_over_all_the_same() -> None:
    heard = Heard()
    with pytest.raises(Exception, match="not in the traced graph"):
        plan(compose([*SMALL, "job=plan", "partition.splitting_ops=[aten::softmax]"]), heard)
    assert heard.over


@pytest.mark.slow
def test_without_a_terminal_each_phase_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="pcgsvc"):
        run_job(compose(SMALL), tmp_path / "report.json")
    begun = [m.split(":")[0] for m in caplog.messages if re.match(r"\w+: .*\d", m)]
    assert [p for p in begun if p in PHASES] == PHASES
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.slow
def test_in_a_terminal_each_phase_has_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    out = Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(jobs, "console", lambda **_: out)
    run_job(compose(SMALL), tmp_path / "report.json")
    drawn = screen.getvalue()
    for phase in PHASES:
        assert re.search(rf"\b{phase} [━╸╺ ]{{40}} *\d/", drawn), phase
    assert "0/4" in drawn
    assert "0/3" in drawn


def test_a_long_phase_has_a_line_every_few_seconds_without_a_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.02)
    with caplog.at_level(logging.INFO, logger="pcgsvc"):
        with progress_for(Console(file=io.StringIO())) as listener:
            listener.start("compile", 3)
            listener.advance()
            time.sleep(0.3)
            listener.stop()
            listener.start("trace", 1)
            listener.stop()
        told = [r for r in caplog.records if getattr(r, "event", "") == "progress"]
        time.sleep(0.1)  # nothing is logged of what is over
        assert told == [r for r in caplog.records if getattr(r, "event", "") == "progress"]
    assert len(told) >= 3
    assert re.fullmatch(r"compile: 1 of 3, still running after \d+ s", told[-1].getMessage())
    assert {vars(r)["phase"] for r in told} == {"compile"}
    assert (vars(told[-1])["done"], vars(told[-1])["total"]) == (1, 3)


def test_one_unit_has_a_bar_that_moves_and_no_count() -> None:
    screen = io.StringIO()
    out = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with progress_for(out) as progress:
        progress.start("trace", 1)
        progress.stop()
    assert "trace" in screen.getvalue()
    assert "0/?" in screen.getvalue()
    assert "0/1" not in screen.getvalue()
