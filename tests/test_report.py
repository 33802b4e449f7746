"""The report as a file, and the summary that people read."""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pcgsvc.capture.capture import GraphTable
from pcgsvc.report.progress import Lines, progress_for
from pcgsvc.report.report import write_report
from pcgsvc.report.tables import console, show_place, show_report, show_text

REGION = {"kind": "region", "ops": 42, "hash": "2a48b746248b", "reason": "before the first one"}
BOUNDARY = {
    "kind": "boundary",
    "ops": 1,
    "hash": None,
    "reason": "ns::op: registered [splitting op]",
}


@pytest.fixture
def report() -> dict[str, Any]:
    """A report with everything in it, by hand: its figures are what the tests look for."""
    entries = [
        {"mode": mode, "size": size, "num_tokens": size - 1, "uniform": mode == "full"}
        for size in (512, 8)
        for mode in ("piecewise", "full")
    ]
    errors = {"max_rel_err": 0.0, "tolerance": 0.0, "max_rel_err_true": 2e-7}
    times = {"host_us": 12.4, "step_us": 345.6, "plain_us": 78901.2, "region_us": 300.0}
    times |= {"step_low_us": 330.0, "step_high_us": 395.0}
    return {
        "schema": 1,
        "pcgsvc": "0.1.0",
        "torch": "2.13.0",
        "device": "cuda:0 (NVIDIA H200)",
        "config": {
            "dtype": "bfloat16",
            "job": "run",
            "model": {"name": "llama", "preset": "1b", "weights": None},
            "attention": {"name": "paged"},
        },
        "mode": {
            "requested": "full",
            "resolved": "full_and_piecewise",
            "decode": "full",
            "mixed": "piecewise",
            "reasons": ["full was asked for, but it cannot be had [so]"],
        },
        "partition": {
            "strategy": "fx",
            "splitting_ops": [{"name": "ns::op", "count": 2}],
            "num_boundaries": 2,
            "num_regions": 3,
            "num_unique_pieces": 1,
            "pieces": [
                {"name": f"piece_{i:02}", **(BOUNDARY if i % 2 else REGION)} for i in range(5)
            ],
        },
        "compile": {
            "compiler": "inductor",
            "start": "cold",
            "num_traces": 1,
            "num_compiled": 1,
            "num_loaded": 0,
            "seconds": {
                **dict.fromkeys(("import", "split", "load", "warmup"), 0.0),
                "trace": 1.25,
                "compile": 3.5,
                "capture": 0.25,
                "total": 5.5,
            },
        },
        "cache": {
            "mode": "off",
            "dir": None,
            "program_key": None,
            "hits": 0,
            "misses": 0,
            "miss_reasons": [],
            "bytes": 0,
        },
        "graphs": {
            "backend": "cuda",
            "num_graphs": 8,
            "by_mode": {"piecewise": 6, "full": 2},
            "sizes": [8, 512],
            "skipped": [{"size": 1024, "reason": "over the budget [bytes]"}],
            "pool_bytes": 3 << 20,
            "device_bytes": 0,
        },
        "verify": [{**e, **errors, "tolerance_true": 5e-2, "ok": True} for e in entries],
        "bench": [
            {"mode": e["mode"], "size": e["size"], "boundary_us": 5.0, "verdict": "launch-bound"}
            | times
            for e in entries
        ],
        "ready": {
            "start": "cold",
            "seconds": 6.5,
            "parts": {"trace": 1.25, "compile": 3.5, "check": 1.25, "capture": 0.5},
        },
        "dispatch": {"hits": {}, "fallbacks": [], "padding_share": 0.0},
        "warnings": ["full was asked for, but it cannot be had [so]"],
    }


def shown(report: dict[str, Any], width: int, *, terminal: bool = False) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=terminal)
    show_report(out, report)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_device_memory_is_shown_in_parts_and_the_rest_is_kernels(
    report: dict[str, Any], validate_report: Any
) -> None:
    table = GraphTable(
        pool_bytes=24 << 20, device_bytes=144 << 20, graph_bytes=18 << 20, workspace_bytes=34 << 20
    )
    parts = table.without({}).device_parts
    assert parts["kernels"] == 68 << 20
    assert sum(parts.values()) == table.device_bytes
    assert not GraphTable(pool_bytes=1).device_parts
    report["graphs"] |= {"device_bytes": table.device_bytes, "device_parts": parts}
    validate_report(report)
    words = "144.0 MiB of the device (pool 24.0, workspaces 34.0, graphs 18.0, kernels 68.0)"
    assert words in " ".join(shown(report, 200).split())


def header_of(text: str) -> list[str]:
    """Return the words of the two lines above the entries, the lower one first."""
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("entry"))
    return [*lines[at].split(), *lines[at - 1].split()]


def test_the_example_is_a_report(report: dict[str, Any], validate_report: Any) -> None:
    validate_report(report)


# ---- what people read ----------------------------------------------------------------------------


def test_a_mode_that_is_the_same_for_all_batches_is_said_once(report: dict[str, Any]) -> None:
    report["mode"] |= {"resolved": "piecewise", "decode": "piecewise", "mixed": "piecewise"}
    report["graphs"]["pool_bytes"] = 28 << 10
    text = shown(report, 200)
    assert "piecewise, not full, for all batches\n" in text.replace(" \n", "\n").replace("  ", "")
    assert "; 28.0 KiB pool" in text


def test_summary_says_what_was_built_and_found(report: dict[str, Any]) -> None:
    text = shown(report, 200)
    for fact in (
        "0.1.0, torch 2.13.0, cuda:0 (NVIDIA H200), bfloat16",
        "llama 1b, attention paged",
        "full_and_piecewise, not full: uniform decode full, all else piecewise",
        "3 regions (1 unique), 2 boundaries by fx, cut at ns::op x2",
        "inductor, cold start: 1 compiled, 0 loaded",
        "8 CUDA graphs: 6 piecewise, 2 full; 3.0 MiB pool",
        "size 1024: over the budget [bytes]",
        "6.50: trace 1.250, compile 3.500, check 1.250, capture 0.500",
        "all 4 entries equal plain execution; largest error 0 on padded inputs, 2e-07 on true",
        "full was asked for, but it cannot be had [so]",
    ):
        assert fact in text


def test_equal_pieces_share_a_line_with_their_number_and_reason(report: dict[str, Any]) -> None:
    lines = [line.split() for line in shown(report, 200).splitlines()]
    assert ["3x", "region", "42", "ops", "2a48b746", "before", "the", "first", "one"] in lines
    assert ["2x", "boundary", "1", "op", "ns::op:", "registered", "[splitting", "op]"] in lines


def test_entries_are_listed_by_mode_and_rising_size(report: dict[str, Any]) -> None:
    rows = [line.split() for line in shown(report, 200).splitlines()]
    entries = [row for row in rows if row[:1] in (["full"], ["piecewise"])]
    assert [(row[0], row[1]) for row in entries] == [
        ("full", "8"),
        ("full", "512"),
        ("piecewise", "8"),
        ("piecewise", "512"),
    ]
    figures = ["7", "ok", "0", "2e-07", "78901", "346", "±9%", "12", "300", "5", "launch"]
    assert entries[0][2:] == figures


def test_in_a_file_no_line_ends_in_blanks(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    show_report(console(), report)
    text = capsys.readouterr().out
    assert text.splitlines() == [line.rstrip() for line in shown(report, 1000).splitlines()]
    assert text.endswith("\n")
    show_report(console(quiet=True), report)
    assert not capsys.readouterr().out


def test_wrong_entries_stand_out(report: dict[str, Any]) -> None:
    report["verify"][0] |= {"ok": False, "max_rel_err": 0.5}
    text = shown(report, 200)
    assert "1 of 4 entries differs from plain execution; largest error 0.5" in text
    (line,) = [line for line in text.splitlines() if "WRONG" in line]
    assert line.split()[:2] == ["piecewise", "512"]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(report: dict[str, Any], width: int) -> None:
    lines = shown(report, width).splitlines()
    assert max(map(len, lines)) <= width


def test_eighty_columns_show_every_timing_uncut(report: dict[str, Any]) -> None:
    text = shown(report, 80)
    assert header_of(text) == [
        *("entry", "size", "rows", "padded", "rows", "plain", "replay"),
        *("host", "regions", "aries", "by", "error,", "true", "bound-", "bound"),
    ]
    assert "…" not in text


def test_a_narrow_terminal_keeps_errors_and_the_two_times_that_matter(
    report: dict[str, Any],
) -> None:
    assert header_of(shown(report, 60)) == [
        *("entry", "size", "rows", "padded", "rows", "plain", "replay", "error,", "true"),
    ]


def test_recorded_graphs_are_never_called_cuda_graphs(report: dict[str, Any]) -> None:
    report["graphs"]["backend"] = "recorded"
    text = shown(report, 200)
    assert "8 recorded graphs (the CPU's stand-in, never faster)" in text
    assert "CUDA graphs" not in text
    assert not {"host", "bound", "by"} & set(header_of(text))  # there is no device to wait for
    assert "launched" not in text
    assert {"regions", "replay", "plain"} <= set(header_of(text))


def test_the_verdict_comes_first(report: dict[str, Any]) -> None:
    first = shown(report, 200).strip().splitlines()[0]
    assert first.startswith("verified")
    assert "all 4 entries equal plain execution" in first
    assert first.endswith("ready in 6.5 s, cold start")
    report["verify"][0] |= {"ok": False}
    assert shown(report, 200).strip().startswith("wrong")


def test_sizes_that_are_compiled_on_their_own_say_why_once(report: dict[str, Any]) -> None:
    reason = "code for all sizes needs rows <= 8 (from the compiler)"
    rows = [{"size": size, "reason": reason} for size in (16, 32)]
    report["compile"] |= {"exact_sizes": [4, 16, 32], "exact_reasons": rows}
    assert f"for exactly 4, 16, 32 rows as well ({reason})" in shown(report, 250)


def test_one_of_a_kind_is_singular(report: dict[str, Any]) -> None:
    report["verify"] = report["verify"][:1]
    assert "all 1 entry equals plain execution" in shown(report, 200)


def test_spread_is_shown_and_a_noisy_machine_is_named(report: dict[str, Any]) -> None:
    assert "346 ±9%" in shown(report, 200)
    assert "noisy machine" not in shown(report, 200)
    for row in report["bench"]:
        row["step_high_us"] = 2 * row["step_us"]
    assert "noisy machine: runs of one entry differ by ±52%" in shown(report, 200)


def test_reduce_overhead_has_a_column_where_it_was_timed(report: dict[str, Any]) -> None:
    assert "overhead" not in shown(report, 200)
    report["bench"][0]["reduce_overhead_us"] = 543.2
    words = header_of(shown(report, 200))
    assert {"reduce-", "overhead", "plain", "replay"} <= set(words)
    assert " 543 " in shown(report, 200)


def test_a_mode_that_was_resolved_says_why_once(report: dict[str, Any]) -> None:
    report["mode"]["reasons"] = ["full_and_piecewise becomes piecewise, since [it must]"]
    report["warnings"] = []
    assert shown(report, 200).count("since [it must]") == 1
    report["warnings"] = list(report["mode"]["reasons"])
    assert shown(report, 200).count("since [it must]") == 1


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({"stored": True, "proof": {"ok": True, "seconds": 2.0, "reason": None}}, "stored"),
        ({"stored": True, "proof": {"ok": False, "seconds": 2.0, "reason": "no [x]"}}, "failed"),
        ({"stored": False, "not_stored": ["a full disk"]}, "failed"),
        ({"stored": True}, "stored"),
    ],
)
def test_compile_says_first_whether_it_stored(
    report: dict[str, Any], cache: dict[str, Any], words: str
) -> None:
    report["config"]["job"] = "compile"
    report["cache"] |= {"dir": "/there", "not_stored": [], **cache}
    del report["verify"], report["bench"], report["graphs"]
    first = shown(report, 200).strip().splitlines()[0]
    assert first.startswith(words)
    expected = {"stored": "/there", "failed": "no [x]" if "proof" in cache else "a full disk"}
    assert expected[words] in first


def test_a_plan_shows_the_split_and_no_entries(report: dict[str, Any]) -> None:
    report["config"]["job"] = "plan"
    plan = {k: v for k, v in report.items() if k not in ("graphs", "verify", "bench", "dispatch")}
    text = shown(plan, 200)
    assert "3 regions (1 unique)" in text
    assert "nothing compiled, since job=plan" in text
    assert "entry" not in text
    assert "verify" not in text


def test_untimed_entries_have_no_columns_for_times(report: dict[str, Any]) -> None:
    report["bench"] = []
    text = shown(report, 200)
    assert "replay" not in text
    assert "microseconds" not in text


def test_showing_leaves_the_report_as_it_was(report: dict[str, Any]) -> None:
    before = copy.deepcopy(report)
    shown(report, 80)
    assert report == before


def test_colours_are_for_terminals_only(report: dict[str, Any]) -> None:
    assert "\x1b[" in shown(report, 80, terminal=True)
    assert "\x1b[" not in shown(report, 80)


def test_a_file_gets_whole_lines_without_padding_to_the_consoles_width(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report["warnings"] = ["long " * 100]
    out = console()
    show_report(out, report)
    show_place(out, Path("/a/very/long/path" * 20))
    text = capsys.readouterr().out
    assert "long " * 99 + "long" in text
    assert "/a/very/long/path" * 20 in text
    assert max(len(line) - len(line.rstrip()) for line in text.splitlines()) < 40


def test_a_prompt_is_shown_as_it_is_whatever_brackets_it_has() -> None:
    out = Console(file=io.StringIO(), width=80)
    show_text(out, "say [bold]x[/]", " [red] and blue \n")
    assert isinstance(out.file, io.StringIO)
    assert "say [bold]x[/]" in out.file.getvalue()
    assert "[red] and blue" in out.file.getvalue()


# ---- progress ------------------------------------------------------------------------------------


def test_no_bars_where_there_is_no_terminal() -> None:
    with progress_for(Console(file=io.StringIO())) as progress:
        assert isinstance(progress, Lines)


def test_bars_name_the_phase_and_log_lines_stand_above_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    handler, root = logging.StreamHandler(screen), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    out = Console(file=screen, force_terminal=True, width=80, color_system=None)
    with progress_for(out) as progress:
        progress.start("capture", 2)
        progress.advance()
        assert handler.stream is not screen
        root.warning("a line")
        progress.advance()
        progress.stop()
    assert handler.stream is screen
    assert "capture" in screen.getvalue()
    line = next(ln for ln in screen.getvalue().splitlines() if "a line" in ln)
    assert "capture" not in line


# ---- the file ------------------------------------------------------------------------------------


def test_the_file_holds_the_report_and_nothing_is_left_beside_it(
    report: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "not" / "yet" / "report.json"
    write_report(report, path)
    assert json.loads(path.read_text()) == report
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("bad", [float("nan"), object()])
def test_a_report_that_is_no_json_leaves_the_old_file_whole(
    report: dict[str, Any], tmp_path: Path, bad: Any
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises((ValueError, TypeError)):
        write_report(report | {"extra": bad}, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
