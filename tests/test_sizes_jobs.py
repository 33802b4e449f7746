"""`job=sizes`, `capture.sizes=auto:FILE` and replayed traffic: the command line, and Python."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Cli
from core_helpers import make_config, rows, toy

import pcgsvc
from pcgsvc.config import from_dict, to_dict
from pcgsvc.jobs import preflight, sizes

TINY = ["device=cpu", "model.num_layers=1", "compiler=eager", "bench.enabled=false"]


@pytest.fixture(autouse=True)
def one_cache(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and calls are what is looked at: a program is traced once for the file."""
    monkeypatch.setenv("PCGSVC_CACHE_DIR", str(programs))


def histogram() -> dict[tuple[int, bool], int]:
    """Return a small bimodal traffic: decode around 6 requests, prefills around 40 tokens."""
    rng, found = random.Random(2), {}
    for mean, spread, calls, uniform in ((6, 2, 60, True), (40, 6, 20, False)):
        for _ in range(calls):
            key = max(2, round(rng.gauss(mean, spread))), uniform
            found[key] = found.get(key, 0) + 1
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    lines = [f"{n},{count},{uniform}" for (n, uniform), count in histogram().items()]
    path.write_text("\n".join(["num_tokens,count,uniform", *lines, ""]))
    return path


# ---- job=sizes -----------------------------------------------------------------------------------


def test_job_sizes_prints_the_curve_and_writes_it_with_a_picture(cli: Cli, file: Path) -> None:
    done = cli("job=sizes", f"traffic={file}", "device=cpu", "capture.sizes=[8,64]")
    assert done.code == 0, done.out + done.err
    (path,) = [p for p in done.files if p.name == "sizes.json"]
    found = json.loads(path.read_text())
    assert [p["count"] for p in found["curve"]] == list(range(1, found["traffic"]["distinct"] + 1))
    assert found["traffic"]["calls"] == 80
    best = found["recommended"]
    assert best["override"] == f"capture.sizes={best['sizes']}".replace(" ", "")
    (line,) = [s for s in done.out.splitlines() if s.startswith("override")]
    assert shlex.split(line)[1] == best["override"]
    assert set(found["others"]) == {"powers of two", "default schedule", "capture.sizes"}
    assert found["others"]["capture.sizes"]["sizes"] == [8, 64]
    powers = found["others"]["powers of two"]
    equal = found["curve"][powers["count"] - 1]
    assert equal["padding_share"] < powers["padding_share"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert f"{best['padding_share']:.1%}" in done.out


def test_job_sizes_writes_where_report_points(cli: Cli, file: Path, tmp_path: Path) -> None:
    done = cli("job=sizes", f"traffic={file}", "device=cpu", f"report={tmp_path / 'x' / 's.json'}")
    assert done.code == 0, done.out + done.err
    assert json.loads((tmp_path / "x" / "s.json").read_text())["recommended"]
    assert (tmp_path / "x" / "s.png").is_file()


@pytest.mark.parametrize("calls", ["5,1,false", "1,1,true", "5,1,false\n7,9,true"])
def test_a_picture_is_drawn_of_any_traffic_under_any_name(cli: Cli, calls: str) -> None:
    path = Path("a $b$ [c].csv")
    path.write_text(f"num_tokens,count,uniform\n{calls}\n")
    done = cli("job=sizes", f"traffic='{path}'", "device=cpu")
    assert done.code == 0, done.out + done.err
    assert sum(p.suffix == ".png" for p in done.files) == 1
    assert path.name in done.out


def test_a_sweep_takes_the_sizes_of_each_traffic_file(cli: Cli) -> None:
    for at in (1, 2):
        Path(f"t{at}.csv").write_text(f"num_tokens\n{at}\n{at + 2}\n")
    words = ["mode=piecewise", "capture.sizes=auto:t1.csv,auto:t2.csv", "sweep.isolate=false"]
    done = cli("-m", *TINY, *words)
    assert done.code == 0, done.out + done.err
    assert [r["graphs"]["sizes"] for r in done.reports] == [[1, 3], [2, 4]]


def test_without_matplotlib_there_is_no_picture_and_that_is_said(
    cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "has_matplotlib", lambda: False)
    monkeypatch.setattr(preflight, "has_matplotlib", lambda: False)
    refused = cli("job=sizes", f"traffic={file}", "device=cpu", "strict=true")
    assert refused.code == 2
    assert "strict=true, and sizes.png cannot be drawn" in refused.err
    assert not refused.files
    done = cli("job=sizes", f"traffic={file}", "device=cpu")
    assert done.code == 0
    assert "sizes.png is not drawn: matplotlib is not installed" in done.out
    (path,) = [p for p in done.files if p.name == "sizes.json"]
    assert json.loads(path.read_text())["warnings"][0].startswith("sizes.png is not drawn")
    assert not path.with_suffix(".png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job=sizes"], "traffic: job=sizes needs a traffic file"),
        (["job=sizes", "traffic=bad.csv"], "traffic: 'bad.csv', line 3: got '-4'"),
        (["traffic=bad.csv"], "traffic: 'bad.csv', line 3: got '-4'"),
        (["capture.sizes=auto:bad.csv"], "capture.sizes: 'bad.csv', line 3: got '-4'"),
        (["job=compile", "capture.sizes=auto:no.csv"], "capture.sizes: 'no.csv' does not exist"),
    ],
)
def test_a_bad_traffic_file_is_exit_2_with_nothing_written(
    cli: Cli, words: list[str], message: str
) -> None:
    Path("bad.csv").write_text("num_tokens\n4\n-4\n")
    done = cli("device=cpu", *words)
    assert done.code == 2
    assert done.err.count("pcgsvc: ") == 1
    assert message in done.err
    assert [p.name for p in done.files] == ["bad.csv"]


# ---- the recommendation in a run -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full_and_piecewise", "piecewise", "full"])
def test_recommended_sizes_give_the_predicted_padding_in_a_run_of_the_same_traffic(
    cli: Cli, file: Path, validate_report: Any, mode: str
) -> None:
    words = [f"traffic={file}", f"mode={mode}", "sizing.count=5"]
    planned = cli("job=sizes", "device=cpu", *words)
    (path,) = [p for p in planned.files if p.name == "sizes.json"]
    best = json.loads(path.read_text())["recommended"]
    done = cli(*TINY, *words, best["override"])
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    used = report["traffic"]
    assert used["padding_share"] == best["padding_share"] == used["expected_padding_share"]
    assert used["num_calls"] == used["calls_in_file"] == sum(used["hits"].values()) == 80
    assert used["fallbacks"] == used["refused"] == []
    captured = {f"{row['mode']}:{row['size']}" for row in report["verify"]}
    assert set(used["never_used"]) == captured - set(used["hits"])
    assert report["dispatch"]["padding_share"] == best["padding_share"]
    # What the runner counted is the file again.
    calls = {(c["num_tokens"], c["uniform"]): c["count"] for c in report["dispatch"]["calls"]}
    assert calls == histogram()


def test_auto_sizes_are_captured_and_the_report_says_how_they_were_chosen(
    cli: Cli, file: Path, validate_report: Any
) -> None:
    done = cli(*TINY, f"capture.sizes=auto:{file}", "sizing.count=4", "capture.max_size=44")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    chosen = report["chosen_sizes"]
    sizes = report["config"]["capture"]["sizes"]
    assert sizes == report["graphs"]["sizes"] == chosen["recommended"]["sizes"]
    assert len(sizes) == 4
    assert max(sizes) <= 44
    assert chosen["recommended"]["why"] == "sizing.count=4"
    assert chosen["traffic"]["file"] == str(file)
    assert chosen["traffic"]["uncovered_calls"] > 0
    assert "run without a graph" in chosen["notes"][-1]
    # The report's config builds the same again, without the file.
    assert to_dict(from_dict(report["config"])) == report["config"]


def test_a_run_tells_fallbacks_and_graphs_that_were_never_used(
    cli: Cli, file: Path, validate_report: Any
) -> None:
    done = cli(*TINY, f"traffic={file}", "capture.sizes=[4,12,16]", "max_traffic_calls=40")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    used = report["traffic"]
    assert (used["num_calls"], used["calls_in_file"]) == (40, 80)
    assert {f["reason"] for f in used["fallbacks"]} == {"above the largest capture size"}
    assert sum(f["count"] for f in used["fallbacks"]) == 10  # half of the prefills
    assert sum(used["hits"].values()) == 30
    assert set(used["never_used"]) == {"full:16", "piecewise:4", "piecewise:12", "piecewise:16"}
    assert "40 calls of 80, taken evenly" in done.out
    assert "10 calls: above the largest capture size" in done.out
    unused = [s.split(maxsplit=1)[1] for s in done.out.splitlines() if s.startswith("unused")]
    assert unused == ["full: 16", "piecewise: 4 12 16"]
    assert done.out.count("a call of") == 1  # one line per reason, not per call


def test_refused_calls_of_a_replay_are_reported_and_exit_1(cli: Cli, file: Path) -> None:
    done = cli(*TINY, f"traffic={file}", "capture.sizes=[4,16]", "on_uncovered=error")
    assert done.code == 1
    (report,) = done.reports
    refused = report["traffic"]["refused"]
    assert sum(r["count"] for r in refused) == 20
    assert "traffic: 20 calls were refused" in done.out


@pytest.mark.parametrize("word", ["mode=none", "capture.graphs=off"])
def test_a_replay_without_graphs_runs_every_call_plainly(cli: Cli, file: Path, word: str) -> None:
    done = cli(*TINY, f"traffic={file}", word)
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    used = report["traffic"]
    assert used["padding_share"] == used["expected_padding_share"] == 0
    assert sum(f["count"] for f in used["fallbacks"]) == used["num_calls"] == 80


def test_a_replay_serves_batches_of_several_tokens_a_request(
    cli: Cli, tmp_path: Path, validate_report: Any
) -> None:
    path = tmp_path / "q.csv"
    path.write_text("num_tokens,count,uniform\n3,2,true\n9,2,true\n7,3,false\n3,4,false\n30,1,0\n")
    words = [f"capture.sizes=auto:{path}", f"traffic={path}", "capture.uniform_query_len=3"]
    done = cli(*TINY, *words, "attention.max_model_len=16")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    validate_report(report)
    used = report["traffic"]
    assert used["padding_share"] == used["expected_padding_share"]
    assert used["padding_share"] == report["chosen_sizes"]["recommended"]["padding_share"]
    assert used["hits"] == {"full:3": 2, "full:9": 2, "piecewise:9": 3, "piecewise:3": 4} | {
        "piecewise:30": 1
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "two_regions"])
def test_any_model_replays_traffic_within_a_small_cache(cli: Cli, file: Path, model: str) -> None:
    """Calls far above the captured sizes share blocks; nothing is refused for want of them."""
    words = [f"model={model}", f"traffic={file}", "capture.sizes=[2]", "attention.max_model_len=32"]
    words += ["attention.num_blocks=6"] if model == "llama" else []
    done = cli("device=cpu", "compiler=eager", "bench.enabled=false", *words)
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    used = report["traffic"]
    assert sum(used["hits"].values()) + sum(f["count"] for f in used["fallbacks"]) == 80


def test_a_callers_own_module_takes_auto_sizes(file: Path) -> None:
    config = make_config("piecewise")
    config.capture.sizes = f"auto:{file}"
    config.sizing.count = 3
    with pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        chosen = runner.report["chosen_sizes"]["recommended"]["sizes"]
        assert runner.report["graphs"]["sizes"] == chosen
        assert len(chosen) == 3
        for (count, uniform), calls in histogram().items():
            lens = [1] * count if uniform else [count]
            for _ in range(calls):
                runner(rows(count), batch=pcgsvc.Batch(query_lens=lens))
        expected = runner.report["chosen_sizes"]["recommended"]["padding_share"]
        assert runner.stats()["padding_share"] == expected
        assert torch.is_tensor(runner(rows(2)))
