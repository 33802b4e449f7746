"""Comparing jobs by their reports: costs, the Pareto front, table, files and picture."""

from __future__ import annotations

import csv
import io
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Cli
from hypothesis import given, settings
from hypothesis import strategies as st
from report_helpers import even, make_report, make_row
from rich.console import Console

from pcgsvc.errors import ConfigError
from pcgsvc.report.comparison import csv_of, show_and_write, tree_of
from pcgsvc.report.comparison_table import show_jobs
from pcgsvc.report.costs import Cost, weigh
from pcgsvc.report.plots import figure_of, png_of
from pcgsvc.report.rows import Row, differing_overrides, differing_settings, facts_of

MODES = ["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]


@pytest.mark.parametrize("mode", MODES)
def test_the_reports_of_these_tests_are_reports(mode: str, validate_report: Any) -> None:
    validate_report(make_report(mode))


# ---- differences ---------------------------------------------------------------------------------


def test_of_overrides_those_are_shown_that_not_all_jobs_have() -> None:
    jobs = [["a=1", "b=[1,2]", "+c.d=x=y"], ["a=1", "b=[1]", "+c.d=x=y"], ["a=1", "e=2"]]
    assert differing_overrides(jobs) == [
        {"b": "[1,2]", "+c.d": "x=y"},
        {"b": "[1]", "+c.d": "x=y"},
        {"e": "2"},
    ]
    assert differing_overrides([["a=1"], ["a=1"]]) == [{}, {}]


def test_of_reports_the_settings_and_circumstances_are_shown_that_not_all_share() -> None:
    reports = [
        make_report("piecewise", [1, 2], settings={"report": "a", "seed": 1, "prompt": None}),
        make_report("piecewise", [1], settings={"report": "b", "seed": 1, "prompt": "x"}),
    ]
    reports[1]["torch"] = "2.14.0"
    assert differing_settings(reports) == [
        {"capture.sizes": "[1,2]", "prompt": "null", "torch": "2.13.0"},
        {"capture.sizes": "[1]", "prompt": "x", "torch": "2.14.0"},
    ]


# ---- costs ---------------------------------------------------------------------------------------


def costs_of(rows: list[Row]) -> list[Cost | None]:
    return [job.cost for job in weigh(rows)]


def test_mean_times_count_each_batch_at_its_padded_size_and_what_no_graph_holds_as_plain() -> None:
    small, large = costs_of(
        [make_row("0", make_report("piecewise", [2])), make_row("1", make_report("full", [1, 4]))]
    )
    assert small is not None
    assert large is not None
    assert small.limit == large.limit == 4
    # Batches of 1 to 4 tokens: two of them padded to 2, two plain; even() gives the times.
    assert small.mean_us["mixed"] == (22 + 22 + 103 + 104) / 4
    assert large.mean_us["decode"] == (11 + 14 + 14 + 14) / 4
    assert small.padding["mixed"] == 1 - 10 / (2 + 2 + 3 + 4)
    assert large.padding["mixed"] == 1 - 10 / (1 + 4 + 4 + 4)
    assert (small.served["mixed"], large.served["mixed"]) == (0.5, 1.0)


def test_uniform_batches_climb_their_own_ladder_first() -> None:
    report = make_report("full_and_piecewise", [2, 4])
    for name in ("verify", "bench"):  # the full graph of size 4 was skipped
        report[name] = [r for r in report[name] if (r["mode"], r["size"]) != ("full", 4)]
    (cost,) = costs_of([make_row("0", report)])
    assert cost is not None
    assert cost.mean_us["decode"] == (12 + 12 + 24 + 24) / 4
    assert cost.mean_us["mixed"] == (22 + 22 + 24 + 24) / 4


def test_uniform_batches_of_several_tokens_per_request_come_in_such_steps() -> None:
    report = make_report("full", [4], settings={"capture": {"uniform_query_len": 2}})
    (cost,) = costs_of([make_row("0", report)])
    assert cost is not None
    assert cost.padding["decode"] == 1 - (2 + 4) / 8
    assert cost.padding["mixed"] == 1 - 10 / 16


@given(
    sizes=st.lists(st.sets(st.integers(1, 40), min_size=1), min_size=1, max_size=3),
    modes=st.lists(st.sampled_from(MODES[1:]), min_size=3, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_costs_are_those_of_a_count_of_every_batch(sizes: list[set[int]], modes: list[str]) -> None:
    rows = [
        make_row(str(at), make_report(mode, sorted(ladder)))
        for at, (ladder, mode) in enumerate(zip(sizes, modes, strict=False))
    ]
    limit = max(map(max, sizes))
    for ladder, mode, cost in zip(sizes, modes, costs_of(rows), strict=False):
        assert cost is not None
        kind = "full" if mode.startswith("full") else "piecewise"
        times, computed = [], 0
        for count in range(1, limit + 1):
            fits = [size for size in ladder if size >= count]
            times.append(even(kind, min(fits)) if fits else 100.0 + count)
            computed += min(fits, default=count)
        assert cost.padding["decode"] == pytest.approx(1 - sum(range(limit + 1)) / computed)
        # Where no job timed the plain module at a size, its time is read off a line.
        assert cost.mean_us["decode"] == pytest.approx(sum(times) / limit, rel=0.2)
        if all(any(size >= count for size in ladder) for count in range(1, limit + 1)):
            assert cost.mean_us["decode"] == pytest.approx(sum(times) / limit)


@given(points=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_front_is_who_nobody_beats(points: list[tuple[int, int]]) -> None:
    rows = [
        make_row(str(at), make_report("full", [1], time=lambda m, s, t=t: t, pool_bytes=memory))
        for at, (memory, t) in enumerate(points)
    ]
    front = [cost is not None and cost.front for cost in costs_of(rows)]
    beaten = [
        any((a <= memory and b < time) or (a < memory and b <= time) for a, b in points)
        for memory, time in points
    ]
    assert front == [not one for one in beaten]


def test_a_job_that_failed_is_on_no_front_and_beats_nobody() -> None:
    good = make_row("0", make_report(pool_bytes=9))
    wrong = make_row("1", make_report(pool_bytes=1), status="failed", reason="wrong")
    assert [cost is not None and cost.front for cost in costs_of([good, wrong])] == [True, False]


def test_jobs_of_another_model_or_device_are_weighed_among_themselves() -> None:
    fast = make_report(time=lambda m, s: 1.0, device="cuda:0 (NVIDIA H200)")
    slow = make_report()
    assert all(
        cost is not None and cost.front
        for cost in costs_of([make_row("0", fast), make_row("1", slow)])
    )


def test_what_was_not_timed_or_not_captured_has_no_cost() -> None:
    untimed, plan, none, lost = costs_of(
        [
            make_row("0", make_report(bench=False)),
            make_row("1", make_report(graphs=False)),
            make_row("2", make_report("none")),
            make_row("3", {}, status="failed"),
        ]
    )
    assert lost is None
    for cost in (untimed, plan, none):
        assert cost is not None
        assert cost.mean_us == {"decode": None, "mixed": None}
        assert not cost.front
    assert untimed is not None
    assert untimed.padding["mixed"] == 1 - 10 / (1 + 2 + 4 + 4)


# ---- files ---------------------------------------------------------------------------------------


def sweep() -> list[Row]:
    """Return four jobs as in the README, and one that failed."""
    jobs = itertools.product([[1, 2, 4], [1, 2, 4, 8, 16]], ["piecewise", "full_and_piecewise"])
    rows = [
        make_row(
            str(at),
            make_report(mode, sizes, start="warm" if at else "cold", pool_bytes=(at + 1) << 20),
            differs={"capture.sizes": str(sizes).replace(" ", ""), "mode": mode},
        )
        for at, (sizes, mode) in enumerate(jobs)
    ]
    reason = "killed [SIGKILL] by the kernel"
    return [*rows, make_row("4", {}, status="failed", reason=reason, output="4/output.txt")]


def test_json_and_csv_hold_the_same_and_csv_reads_back() -> None:
    rows = sweep()
    tree = tree_of(weigh(rows))
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree
    assert (tree["num_jobs"], tree["num_done"]) == (5, 4)
    lines = list(csv.DictReader(io.StringIO(csv_of(tree))))
    assert [line["capture.sizes"] for line in lines[:3]] == ["[1,2,4]", "[1,2,4]", "[1,2,4,8,16]"]
    assert [line["mode.resolved"] for line in lines[:2]] == ["piecewise", "full_and_piecewise"]
    assert lines[4]["reason"] == "killed [SIGKILL] by the kernel"
    assert lines[4]["seconds.total"] == lines[4]["step_us.piecewise.4"] == ""
    for job, line in zip(tree["jobs"], lines, strict=True):
        assert line["status"] == job["status"]
        for step in job.get("steps", []):
            for name in ("step_us", "host_us", "plain_us", "speedup"):
                assert float(line[f"{name}.{step['mode']}.{step['size']}"]) == step[name]
    names = list(lines[0])
    steps = [name for name in names if name.startswith("step_us.piecewise.")]
    assert steps == [f"step_us.piecewise.{size}" for size in (1, 2, 4, 8, 16)]
    assert len(names) == len(set(names))


def test_each_job_says_where_its_time_memory_and_padding_went() -> None:
    rows = sweep()
    job = tree_of(weigh(rows))["jobs"][3]
    assert job["seconds"]["capture"] == pytest.approx(0.2)
    assert job["compile"]["start"] == "warm"
    assert job["graphs"]["num_graphs"] == 5 * 5 + 5
    assert job["memory_bytes"] == 4 << 20
    assert job["verify"] == {"num_ok": 10, "num_entries": 10, "max_rel_err": 0.0}
    assert job["dispatch"]["padding_share"] == 0.125  # of the calls that it served
    assert job["padding_share"]["mixed"] == pytest.approx(1 - 136 / 171)
    assert job["steps"][0]["speedup"] == pytest.approx(101 / 11)


# ---- the table -----------------------------------------------------------------------------------


def shown(rows: list[Row], width: int) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    show_jobs(out, "sweep of 5 jobs", weigh(rows))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_the_table_has_a_row_per_job_with_its_figures() -> None:
    text = shown(sweep(), 200)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["0*"][1:] == [
        *("capture.sizes=[1,2,4]", "mode=piecewise", "5/4", "238", "15", "1.0", "2.59", "cold"),
        *("25", "1", "24.0", "24.0", "4.33", "verified", "3/3"),
    ]
    assert rows["3*"][1:3] == ["capture.sizes=[1,2,4,8,16]", "mode=full_and_piecewise"]
    assert rows["3*"][-5:-2] == ["14.0", "24.0", "7.43"]
    assert "job 4 failed: killed [SIGKILL] by the kernel [4/output.txt]" in text
    assert "µs: per step at 4 tokens" in text  # the largest size that all have
    assert "front of memory and mean decode step of batches of 1 to 16 tokens" in text
    assert "say nothing of CUDA graphs' speed" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(width: int) -> None:
    text = shown(sweep(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "verified 10/10" in text
    assert "decode µs" in text


def test_only_graphs_of_a_device_have_a_host_time() -> None:
    report = make_report()
    assert report["graphs"]["backend"] == "recorded"
    assert "host" not in shown([make_row("0", report)], 200)  # nor is it explained
    report["graphs"]["backend"] = "cuda"
    text = shown([make_row("0", report)], 200)
    assert "host µs" in text
    assert "\nhost: until it is enqueued" in text


def test_a_mode_that_is_not_as_asked_has_a_column() -> None:
    report = make_report()
    report["mode"]["requested"] = "full"
    assert "mode " in shown([make_row("0", report)], 200).splitlines()[2]
    assert "mode " not in shown([make_row("0")], 200).splitlines()[2]


# ---- the picture ---------------------------------------------------------------------------------


def panels(rows: list[Row]) -> dict[str, Any]:
    """Return the picture's axes by title."""
    figure = figure_of("t", weigh(rows))
    return {axes.get_title(): axes for axes in figure.get_axes()}


def test_the_picture_is_a_png_of_a_size_that_can_be_read() -> None:
    rows = sweep()
    png = png_of("sweep", weigh(rows))
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert 1200 <= width <= 2000
    assert 700 <= height <= 1400


def test_each_panel_shows_each_job() -> None:
    found = panels(sweep())
    assert list(found) == [
        "Step time of uniform decode batches",
        "Step time of all other batches",
        "Padding by tokens in the batch",
        "Memory by number of graphs",
        "Start-up time by number of graphs",
        "Pareto front: decode step against memory",
    ]
    for title in list(found)[3:]:
        labels = {text.get_text() for text in found[title].texts}
        assert labels == {"0", "1", "2", "3"}
    memory = found["Memory by number of graphs"]
    assert {tuple(line.get_xydata()[0]) for line in memory.lines} == {
        (15.0, 1.0),
        (18.0, 2.0),
        (25.0, 3.0),
        (30.0, 4.0),
    }
    stairs = [ln for ln in found["Step time of all other batches"].lines if ln.get_marker() == "D"]
    (job_2,) = stairs
    assert job_2.get_xydata().tolist() == [[s, 20.0 + s] for s in (1, 2, 4, 8, 16)]
    (long, short) = found["Padding by tokens in the batch"].lines
    assert (long.get_label(), short.get_label()) == ("jobs 2, 3", "jobs 0, 1")
    assert long.get_ydata()[8] == pytest.approx(100 * 7 / 16)


def test_marks_of_step_times_have_bars_from_the_fastest_to_the_slowest_run() -> None:
    without = make_report("piecewise", [8])
    for name in ("step_low_us", "step_high_us"):  # as reports were before they had them
        del without["bench"][0][name]
    rows = [make_row("0", make_report("piecewise", [4], time=lambda m, s: 100.0))]
    (bar,) = panels([*rows, make_row("1", without)])["Step time of all other batches"].collections
    ((low, high),) = bar.get_segments()
    assert low.tolist() == pytest.approx([4, 90])
    assert high.tolist() == pytest.approx([4, 150])


def test_a_picture_of_many_jobs_colours_the_front_and_names_what_is_grey_or_missing() -> None:
    rows = [
        make_row(str(at), make_report("full", time=lambda m, s, at=at: 100.0 + at))
        for at in reversed(range(20))
    ]
    rows.append(make_row("20", {}, status="failed", reason="x"))
    figure = figure_of("t", weigh(rows))
    (legend,) = [legend for sub in figure.subfigs for legend in sub.legends]
    names = [text.get_text().partition(":")[0] for text in legend.get_texts()]
    assert len(names) == 9
    assert "0" in names  # the last row, and the only one on the front
    notes = " ".join(text.get_text() for sub in figure.subfigs for text in sub.texts)
    assert "grey: 11 more jobs" in notes
    assert "not drawn, failed or without graphs: 20" in notes


@pytest.mark.parametrize(
    "reports",
    [
        [make_report(bench=False)],
        [make_report("none"), make_report()],
        [make_report("full_decode_only", [512, 1])],
        [make_report(time=lambda m, s: 1e-3), make_report(time=lambda m, s: 1e6)],
        [make_report(), make_report(device="cuda:0 (NVIDIA H200)")],
    ],
)
def test_whatever_reports_there_are_a_picture_comes_out(reports: list[dict[str, Any]]) -> None:
    rows = [make_row(str(at), report) for at, report in enumerate(reports)]
    assert png_of("t", weigh(rows)).startswith(b"\x89PNG")


ALONE = """
import sys
from report_helpers import make_row
from pcgsvc.report.comparison import show_and_write
from pcgsvc.report.costs import weigh
from pcgsvc.report.rows import differing_overrides, differing_settings
from pcgsvc.report.plots import png_of
assert not [m for m in sys.modules if m.startswith("matplotlib")]
rows = [make_row()]
png_of("t", weigh(rows))
import matplotlib
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.get_backend(auto_select=False) is None
"""


@pytest.mark.slow
def test_matplotlib_is_imported_for_a_picture_only_and_its_backend_is_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_files_are_written_whole_and_an_old_picture_goes(tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), width=200)
    show_and_write(out, "t", sweep(), tmp_path)
    names = ["sweep.csv", "sweep.json", "sweep.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    show_and_write(out, "t", [make_row("0", make_report(graphs=False))], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == names[:2]


# ---- job=compare ---------------------------------------------------------------------------------


def write(path: Path, report: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report if isinstance(report, str) else json.dumps(report))
    return str(path)


def test_existing_reports_are_compared_folders_by_natural_order(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "sweep" / "10" / "report.json", make_report("full", [1]))
    write(tmp_path / "sweep" / "9" / "report.json", make_report("piecewise", [1]))
    write(tmp_path / "sweep" / "11" / "report.json", {"schema": 1, "doctor": []})  # no build
    write(tmp_path / "sweep" / "12" / "report.json", make_report() | {"tries": []})  # many
    single = write(tmp_path / "mine.json", make_report("none"))
    done = cli("job=compare", f"compare.reports=[{single},../sweep]", "hydra.run.dir=out")
    assert done.code == 0, done.err
    out = done.folder / "out"
    tree = json.loads((out / "sweep.json").read_text())
    assert [job["mode"]["resolved"] for job in tree["jobs"]] == ["none", "piecewise", "full"]
    assert [Path(job["report"]).parent.name for job in tree["jobs"][1:]] == ["9", "10"]
    assert tree["jobs"][1]["differs"]["mode"] == "piecewise"
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))) == 3
    assert "comparison of 3 reports" in done.out
    assert not (out / "report.json").exists()


def test_a_report_of_a_wrong_replay_is_shown_as_failed(cli: Cli, tmp_path: Path) -> None:
    report = make_report()
    report["verify"][0]["ok"] = False
    path = write(tmp_path / "a.json", report)
    done = cli("job=compare", f"compare.reports=[{path}]")
    assert done.code == 0
    assert "job 0 failed: its replay differs from plain execution" in done.out


def without(path: str) -> dict[str, Any]:
    report = make_report()
    *groups, name = path.split(".")
    place = report
    for group in groups:
        place = place[group]
    del place[name]
    return report


WHOLE = json.dumps(make_report())
REFUSED = {
    "of another schema": (make_report() | {"schema": 2}, "its schema is 2"),
    "without a schema": (without("schema"), "its schema is None"),
    "cut off": (WHOLE[: len(WHOLE) // 2], "is no JSON, or is cut off"),
    "empty": ("", "is no JSON, or is cut off"),
    "no JSON": ("a,b\n1,2\n", "is no JSON"),
    "not finite": (WHOLE.replace("0.125", "NaN"), "NaN is no JSON"),
    "a list": ([1], "it holds list"),
    "without its mode": (without("mode.decode"), "mode.decode is missing"),
    "without seconds": (without("compile.seconds.total"), "compile.seconds.total is missing"),
    "without memory": (without("graphs.pool_bytes"), "graphs.pool_bytes is missing"),
    "of a wrong kind": (
        make_report() | {"device": 7},
        "device is 7",
    ),
    "with half an entry": (
        make_report() | {"bench": [{"mode": "full", "size": 1, "step_us": "fast"}]},
        "bench[0].step_us is 'fast'",
    ),
    "of a size below 1": (
        make_report() | {"verify": [{"mode": "full", "size": 0, "ok": True, "max_rel_err": 0}]},
        "verify[0].size is 0",
    ),
    "with a size skipped for no reason": (
        make_report() | {"graphs": {**make_report()["graphs"], "skipped": [8]}},
        "graphs.skipped[0] is 8",
    ),
    "of a word for a time": (
        make_report()
        | {"compile": {**make_report()["compile"], "seconds": {"total": 1, "x": "y"}}},
        "compile.seconds.x is 'y'",
    ),
    "of settings of another form": (
        make_report(settings={"capture": {"uniform_query_len": "two"}}),
        "config.capture.uniform_query_len is 'two'",
    ),
    "a sweep.json": (tree_of(weigh([make_row()])), "is missing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_whole_report_is_refused_by_name_and_nothing_is_written(
    cli: Cli, tmp_path: Path, what: str
) -> None:
    content, message = REFUSED[what]
    good, bad = write(tmp_path / "good.json", make_report()), write(tmp_path / "bad.json", content)
    done = cli("job=compare", f"compare.reports=[{good},{bad}]")
    assert done.code == 2
    assert f"compare.reports: '{bad}'" in done.err
    assert message in done.err
    assert done.out == ""
    assert not any(done.folder.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job=compare"], "compare.reports: got [], paths of reports are needed"),
        (["job=compare", "compare.reports=[no.json]"], "compare.reports: 'no.json' does not exist"),
        (["job=compare", "compare.reports=[.]"], "there is no report.json in '.'"),
        (["job=compare", "compare.reports=[../r.json,../r.json]"], "is listed twice"),
        (["job=compare", "compare.reports=[../r.json]", "report=x.json"], "writes none"),
        (["job=run", "compare.reports=[../r.json]"], "set, but job=run does not read it"),
    ],
)
def test_a_comparison_of_nothing_or_by_another_job_is_refused(
    cli: Cli, tmp_path: Path, words: list[str], message: str
) -> None:
    write(tmp_path / "r.json", make_report())
    done = cli("device=cpu", *words)
    assert done.code == 2
    assert message in done.err
    assert not any(done.folder.iterdir())


def test_a_report_that_is_whole_is_read_whatever_else_stands_in_it() -> None:
    report = make_report() | {"new": {"later": 1}}
    report["bench"][0]["verdict"] = "launch-bound"
    assert len(facts_of(report).steps) == 3
    with pytest.raises(ConfigError, match=r"graphs\.num_graphs is True"):
        facts_of(report | {"graphs": {**report["graphs"], "num_graphs": True}})
