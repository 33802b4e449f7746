"""One check, one verdict: what a library build and `job=run` accept, refuse and report."""

from __future__ import annotations

from typing import Any

import pytest
import test_app
import torch
from cli_helpers import Cli

import pcgsvc
from pcgsvc.config import Mode
from pcgsvc.errors import VerifyError

cli = test_app.cli
"""The fixture."""

SOURCE = """
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def example_inputs(self, rows, generator):
        return {"x": torch.randn(rows, 4, generator=generator)}


class OneRow(Base):
    def forward(self, x):
        return self.linear(x) * 3 if x.shape[0] == 1 else self.linear(x)


class Even(Base):
    def forward(self, x):
        return self.linear(x) if x.shape[0] < 3 else self.linear(x).tanh()


class Mean(Base):
    def forward(self, x):
        return self.linear(x) - x.nan_to_num().mean(0)


class Sum(Base):
    def forward(self, x):
        self.total += self.linear(x).sum(0)
        return x + 1


class Plain(Base):
    def forward(self, x):
        return self.linear(x).relu()
"""
WORDS = ["model=module", "model.inputs={}", "mode=full", "capture.sizes=[1,2,4]"]
WORDS += ["compiler=eager", "device=cpu", "bench.enabled=false"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("verdicts") / "verdicts.py"  # imported once per process
    path.write_text(SOURCE)
    return f"model.target={path}"


def captured(report: dict[str, Any]) -> tuple[list[int], int, list[int]]:
    graphs = report["graphs"]
    skipped = sorted(row["size"] for row in graphs["skipped"])
    return graphs["sizes"], graphs["num_graphs"], skipped


def test_report_plan_and_stats_speak_of_what_the_check_left(target: str) -> None:
    with pcgsvc.load_runner([*WORDS, f"{target}:OneRow"]) as runner:
        assert captured(runner.report) == ([2, 4], 2, [1])
        assert runner.report["guards"]["size_conditions"][-1] == "s > 1"
        assert [row["size"] for row in runner.report["verify"]] == [4, 2]
        found = runner.plan(1)
        assert (found.mode, found.descriptor.num_tokens) == (Mode.NONE, 1)
        assert "s > 1" in found.reason
        assert runner.stats()["never_used"] == ["full:4", "full:2"]
        runner.model.module.train(False)  # type: ignore[attr-defined]
        for rows in (1, 2, 3, 1):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(runner(x), runner.model.module(x))
        assert runner.stats()["never_used"] == []
        assert runner.stats()["fallbacks"][0]["count"] == 2


@pytest.mark.parametrize("name", ["OneRow", "Even", "Plain"])
def test_what_a_library_build_accepts_a_run_accepts(target: str, cli: Cli, name: str) -> None:
    words = [*WORDS, f"{target}:{name}"]
    with pcgsvc.load_runner(words) as runner:
        built = runner.report
    done = cli(*words)
    assert done.code == 0, done.out
    (report,) = done.reports
    assert captured(report) == captured(built)
    assert report["verify"] == built["verify"]
    assert all(row["ok"] for row in report["verify"])


@pytest.mark.parametrize(("name", "cause"), [("Mean", "mixes rows"), ("Sum", "padding rows reach")])
def test_what_a_library_build_refuses_a_run_refuses_in_the_same_words(
    target: str, cli: Cli, name: str, cause: str
) -> None:
    words = [*WORDS, f"{target}:{name}"]
    with pytest.raises(VerifyError, match=cause) as caught:
        pcgsvc.load_runner(words)
    done = cli(*words)
    assert done.code == 1
    (report,) = done.reports
    assert caught.value.report is not None
    assert report["verify"] == caught.value.report["verify"]
    assert not all(row["ok"] for row in report["verify"])
    flat = " ".join(done.out.split())
    assert " ".join(str(caught.value).split()) in flat


def test_a_run_verifies_though_the_self_check_is_off(target: str, cli: Cli) -> None:
    off = [*WORDS, f"{target}:Mean", "capture.self_check=false"]
    pcgsvc.load_runner(off).close()
    done = cli(*off)
    assert done.code == 1
    assert done.reports[0]["config"]["capture"]["self_check"] is False
