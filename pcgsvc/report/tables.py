"""What a person reads after a job: a summary of the report.

In: the report's dicts. Out: text on a console.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pcgsvc.report import words
from pcgsvc.report.columns import Column, Figures, mib, shown, table_of, written

_LABEL = 9
"""Columns of the label before each fact."""
_NO_CACHE = ("encoder", "minilm", "two_regions")
"""Families that use no attention backend."""
_MANY = 1000
"""Columns of a console that is no terminal: nothing is cut or wrapped in a file."""


def console(*, quiet: bool = False) -> Console:
    """Return a console on standard output, or one that prints nothing."""
    plain = Console(highlight=False, quiet=quiet)
    return plain if plain.is_terminal else _FileConsole(highlight=False, width=_MANY, quiet=quiet)


class _FileConsole(Console):
    """A console for files, whose tables leave no blanks at the ends of lines."""

    def print(self, *objects: Any, **style: Any) -> None:
        with self.capture() as printed:
            super().print(*objects, **style)
        self.file.write("\n".join(line.rstrip() for line in printed.get().split("\n")))


def show_report(out: Console, report: dict[str, Any]) -> None:
    """Print the summary: the verdict, what was built, its split, graphs, phases and timings."""
    out.print()
    _verdict(out, report)
    _headline(out, report)
    _split(out, report["partition"])
    if "parallel" in report:
        show_fact(out, "parallel", words.parallel(report["parallel"]))
    _compile(out, report)
    if "plan" in report:
        _plan(out, report["plan"])
    if "graphs" in report:
        _graphs(out, report["graphs"])
    _seconds(out, report)
    if report.get("verify"):
        out.print()
        _show_entries(out, report)
    if report.get("warnings"):
        out.print()
    for warning in report.get("warnings", []):
        show_fact(out, "[yellow]warning[/]", escape(warning))


def show_text(out: Console, prompt: str, text: str) -> None:
    """Print a prompt and its continuation."""
    out.print()
    show_fact(out, "prompt", escape(prompt))
    show_fact(out, "answer", f"[bold]{escape(text.strip())}[/]")


def show_place(out: Console, path: Path | str, what: str = "report") -> None:
    """Print where a file is, on one line whatever the width, so that it can be copied."""
    out.print(f"[bold]{what:<{_LABEL}}[/] {escape(str(path))}", soft_wrap=True)


def show_fact(out: Console, label: str, *lines: str) -> None:
    """Print one fact behind its label, its lines below each other; all may hold markup."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True, style="bold")
    grid.add_column()
    for at, line in enumerate(lines):
        grid.add_row("" if at else label, line)
    if lines:
        out.print(grid)


_STYLES = {"ok": "green", "warn": "yellow", "not tried": "dim"}
"""Of what a row's state or verdict says, where it has one; anything else is red."""


def show_rows(out: Console, rows: list[dict[str, Any]]) -> None:
    """Print rows of one kind as a table, a column per field; errors as powers of ten."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = [_error(v) if isinstance(v, float) else escape(v or "-") for v in row.values()]
        said = row.get("state", row.get("verdict"))
        table.add_row(*cells, style=None if said is None else _STYLES.get(said, "red"))
    out.print(table)


# ---- facts ---------------------------------------------------------------------------------------


def _headline(out: Console, report: dict[str, Any]) -> None:
    mode, config = report["mode"], report["config"]
    device = f"{escape(report['device'])}, {config['dtype']}"
    show_fact(out, "pcgsvc", f"{report['pcgsvc']}, torch {report['torch']}, {device}")
    name, split = config["model"]["name"], [o["name"] for o in report["partition"]["splitting_ops"]]
    without = name in _NO_CACHE or (name == "module" and "pcgsvc::attention" not in split)
    cache = "" if without else f", attention {config['attention']['name']}"
    show_fact(out, "model", escape(words.model(config["model"])) + cache)
    text = f"[bold]{mode['resolved']}[/]"
    if mode["requested"] != mode["resolved"]:
        text += f", not {mode['requested']}"
    if mode["decode"] == mode["mixed"]:
        text += ", for all batches"
    else:
        text += f": uniform decode {mode['decode']}, all else {mode['mixed']}"
    lines = [text]
    lines += [escape(reason) for reason in mode["reasons"] if reason not in report["warnings"]]
    show_fact(out, "mode", *lines)


def _split(out: Console, partition: dict[str, Any]) -> None:
    ops = ", ".join(f"{o['name']} x{o['count']}" for o in partition["splitting_ops"])
    at = f"cut at {escape(ops)}" if ops else "cut nowhere"
    show_fact(out, "split", f"{words.split(partition)}, {at}")
    table = Table.grid(padding=(0, 2, 0, 0))
    for right in (True, False, True, False, False):
        table.add_column(justify="right" if right else "left")
    table.columns[0].width = _LABEL + 3
    for (kind, hash_, reason), group in _alike(partition["pieces"]).items():
        ops = words.count(group[0]["ops"], "op")
        table.add_row(f"{len(group)}x", kind, ops, (hash_ or "")[:8], escape(reason))
    out.print(table, style="dim")


def _alike(pieces: list[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Group pieces of one kind, hash and reason, in order of first appearance."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for piece in pieces:
        groups.setdefault((piece["kind"], piece["hash"], piece["reason"]), []).append(piece)
    return groups


def _compile(out: Console, report: dict[str, Any]) -> None:
    compile_ = report["compile"]
    done = f"{compile_['num_compiled']} compiled, {compile_['num_loaded']} loaded"
    if compile_.get("exact_sizes"):
        done += f"; for exactly {', '.join(map(str, compile_['exact_sizes']))} rows as well"
        reasons = dict.fromkeys(row["reason"] for row in compile_.get("exact_reasons", []))
        done += f" ({'; '.join(reasons)})" if reasons else ""
    if compile_.get("uncompiled"):
        done += f"; uncompiled: {'; '.join(compile_['uncompiled'])}"
    if report["config"]["job"] == "plan":
        wanted = report["plan"]["num_artifacts"] if "plan" in report else 0
        done = f"nothing compiled, since job=plan; {words.count(wanted, 'piece')} to compile"
    show_fact(out, "compile", f"{compile_['compiler']}, {compile_['start']} start: {done}")


def _plan(out: Console, plan: dict[str, Any]) -> None:
    """Print what `job=plan` found beyond the split."""
    modes = [
        f"{asked} -> {got['resolved']}"
        for asked, got in plan["modes"].items()
        if got["resolved"] != asked
    ]
    modules = words.modules(plan["compile_modules"])
    facts = {
        "ops": [words.ops(kind) for kind in plan["kinds"]],
        "why": [plan["mode"]],
        "support": [words.support(row) for row in plan["support"]],
        "": [f"other modes: {', '.join(modes)}"] if modes else [],
        "graphs": [words.graphs(plan["graphs"])],
        "skipped": [f"size {s['size']}: {s['reason']}" for s in plan["graphs"]["skipped"]],
        "compiled": [modules] if modules else [],
        "between": [words.collectives(row) for row in plan["collectives"]],
    }
    for label, lines in facts.items():
        show_fact(out, label, *map(escape, lines))
    _memory(out, plan["memory"])
    show_fact(out, "note", *map(escape, words.notes(plan)))
    for kind, place in plan.get("files", {}).items():
        show_place(out, place, kind)


def _memory(out: Console, memory: dict[str, Any]) -> None:
    show_fact(out, "memory", f"[bold]{words.memory(memory['total_bytes'])}[/], estimated")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", width=_LABEL + 9)
    table.add_column()
    table.add_column()
    for item in memory["items"]:
        table.add_row(words.memory(item["bytes"]), item["name"], escape(item["method"]))
    out.print(table, style="dim")


def _graphs(out: Console, graphs: dict[str, Any]) -> None:
    if not graphs["num_graphs"]:
        show_fact(out, "graphs", "none captured")
    else:
        by_mode = ", ".join(f"{n} {mode}" for mode, n in graphs["by_mode"].items())
        kind = {
            "cuda": "CUDA graphs",
            "recorded": "recorded graphs (the CPU's stand-in, never faster)",
        }[graphs["backend"]]
        memory = f"{words.memory(graphs['pool_bytes'])} pool"
        if graphs["device_bytes"]:
            parts = graphs["device_parts"].items()
            each = ", ".join(f"{name} {mib(size)}" for name, size in parts)
            memory += f", {mib(graphs['device_bytes'])} MiB of the device ({each})"
        show_fact(out, "graphs", f"{graphs['num_graphs']} {kind}: {by_mode}; {memory}")
        show_fact(out, "sizes", " ".join(map(str, graphs["sizes"])))
        stitched = [
            str(row["size"]) for row in graphs.get("replay", ()) if row["replay"] == "stitched"
        ]
        if stitched:
            show_fact(out, "stitched", f"one graph per step: sizes {' '.join(stitched)}")
    for skip in graphs["skipped"]:
        show_fact(out, "[yellow]skipped[/]", f"size {skip['size']}: {escape(skip['reason'])}")


def _seconds(out: Console, report: dict[str, Any]) -> None:
    seconds = report["compile"]["seconds"]
    ready = report.get("ready", {"seconds": seconds["total"], "parts": seconds})
    phases = [(k, v) for k, v in ready["parts"].items() if k != "total" and v >= 0.0005]
    total = max(ready["seconds"], sum(v for _, v in phases))
    parts = ", ".join(f"{name} {value:.3f}" for name, value in phases)
    show_fact(out, "seconds", f"[bold]{total:.2f}[/]: {parts}")


# ---- the verdict ---------------------------------------------------------------------------------


def _verdict(out: Console, report: dict[str, Any]) -> None:
    """Print what came of the job, before anything else."""
    start, job = report["compile"]["start"], report["config"]["job"]
    ready = report.get("ready")
    when = "" if ready is None else f"ready in {ready['seconds']:.1f} s, "
    if job == "plan":
        took = "" if ready is None else f" in {ready['seconds']:.1f} s"
        show_fact(out, "planned", f"{_needs(report)}nothing was built{took}")
    elif job == "compile" and "stored" in report["cache"]:
        stored, what = _stored(report["cache"])
        label = "[green]stored[/]" if stored else "[red]failed[/]"
        show_fact(out, label, f"{what}; {when}{start} start")
    elif "verify" in report:
        equal, what = _verified(report["verify"])
        label = {True: "[green]verified[/]", False: "[red]wrong[/]", None: "built"}[equal]
        show_fact(out, label, f"{what}; {when}{start} start")


def _needs(report: dict[str, Any]) -> str:
    """Return how many graphs and bytes a plan found."""
    if "plan" not in report:
        return ""
    plan = report["plan"]
    graphs = words.count(plan["graphs"]["num_graphs"], "graph")
    each = f" on each of {report['parallel']['ranks']} ranks" if "parallel" in report else ""
    return f"{graphs}, about {words.memory(plan['memory']['total_bytes'])}{each}; "


def _stored(cache: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a program is stored and can be loaded, in words."""
    where, proof = escape(str(cache["dir"])), cache.get("proof")
    if not cache["stored"]:
        reasons = "; ".join(cache["not_stored"] or cache["miss_reasons"])
        return False, f"not stored in {where}: {escape(reasons)}"
    if proof is None:
        return True, f"the program is in {where}"
    if not proof["ok"]:
        return False, f"a fresh process could not load it: {escape(str(proof['reason']))}"
    return True, f"a fresh process loaded it from {where} in {proof['seconds']:.1f} s"


def _verified(rows: list[dict[str, Any]]) -> tuple[bool | None, str]:
    """Return whether all entries are right, in words; None: there are none."""
    if not rows:
        return None, "nothing was captured, so there is nothing to compare"
    wrong = sum(not row["ok"] for row in rows)
    worst = max(row["max_rel_err"] for row in rows)
    worst_true = max(row["max_rel_err_true"] for row in rows)
    entries = words.count(len(rows), "entry", "entries")
    equal = "equals" if len(rows) == 1 else "equal"
    what = f"[green]all {entries} {equal} plain execution[/]"
    if wrong:
        differ = "differs" if wrong == 1 else "differ"
        what = f"[red]{wrong} of {entries} {differ} from plain execution[/]"
    errors = f"{worst:.1g} on padded inputs, {worst_true:.1g} on true rows alone"
    return not wrong, f"{what}; largest error {errors}"


# ---- entries -------------------------------------------------------------------------------------


_NOISE = 0.1
"""Spread of the runs of most entries, as a share of their median, from which times are noise."""


def _error(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _verdict_mark(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[red]WRONG[/]"


def _bound(verdict: str | None) -> str:
    return (verdict or "").removesuffix("-bound")


def _timed(row: Figures) -> bool:
    return "plain_us" in row


def _on_device(row: Figures) -> bool:
    """Whether launches and device time are two things, as recorded graphs do not have them."""
    return _timed(row) and not row["recorded"]


def _spread(row: Figures) -> float | None:
    """Return half the range of the runs of an entry, as a share of their median."""
    if "step_low_us" not in row or not row["step_us"]:
        return None
    return float((row["step_high_us"] - row["step_low_us"]) / 2 / row["step_us"])


def _with_spread(step_us: float | None, spread: float | None) -> str:
    if step_us is None:
        return ""
    return f"{step_us:.0f}" if spread is None else f"{step_us:.0f} ±{spread:.0%}"


_US = written("{:.0f}")
_ENTRY = (
    Column("entry", ("mode",), str, left=True),
    Column("size", ("size",), str),
    Column("rows", ("num_tokens",), str),
    Column("", ("ok",), _verdict_mark, left=True),
    Column("error,\npadded", ("max_rel_err",), _error),
    Column("true\nrows", ("max_rel_err_true",), _error),
    Column("plain", ("plain_us",), _US, when=_timed),
    Column(
        "reduce-\noverhead",
        ("reduce_overhead_us",),
        _US,
        when=lambda row: "reduce_overhead_us" in row,
    ),
    Column("replay", ("step_us", "spread"), _with_spread, when=_timed),
)
_WIDE = (
    Column("host", ("host_us",), _US, when=_on_device),
    Column("regions", ("region_us",), _US, when=_timed),
    Column("bound-\naries", ("boundary_us",), _US, when=_timed),
    Column("bound\nby", ("verdict",), _bound, when=_on_device, left=True),
)
"""Further columns where the terminal is wide enough."""


def _show_entries(out: Console, report: dict[str, Any]) -> None:
    """Print one row per captured entry: errors, and times where they were taken."""
    bench = {(row["mode"], row["size"]): row for row in report.get("bench", [])}
    recorded = {"recorded": report["graphs"]["backend"] == "recorded"}
    rows = []
    for checked in sorted(report["verify"], key=lambda row: (row["mode"], row["size"])):
        row = {**checked, **bench.get((checked["mode"], checked["size"]), {}), **recorded}
        rows.append({**row, "spread": _spread(row)})
    columns = shown((*_ENTRY, *_WIDE), rows)
    if _width(columns, rows, gap=1) > out.width:
        columns = shown(_ENTRY, rows)
    gap = 2 if _width(columns, rows, gap=2) <= out.width else 1
    table = table_of(columns, padding=(0, gap, 0, 0))
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    out.print(table)
    for note in _notes(rows, columns) if bench else ():
        out.print(note, style="italic dim")


def _width(columns: Sequence[Column], rows: list[dict[str, Any]], gap: int) -> int:
    """Return how many characters a table needs; rich's own measure ends at the console's width."""
    cells = [[*c.header.split("\n"), *(c.cell(row) for row in rows)] for c in columns]
    return sum(gap + max(Text.from_markup(cell).cell_len for cell in found) for found in cells)


def _notes(rows: list[dict[str, Any]], columns: Sequence[Column]) -> list[str]:
    """Return what explains the times."""
    notes = ["microseconds per step, medians of runs; ±: half their range"]
    if any("host_us" in column.figures for column in columns):
        notes.append("host: until the last step is launched")
    spreads = [row["spread"] for row in rows if row["spread"] is not None]
    if spreads and statistics.median(spreads) > _NOISE:
        share = statistics.median(spreads)
        notes.append(f"noisy machine: runs of one entry differ by ±{share:.0%}; times are rough")
    return notes
