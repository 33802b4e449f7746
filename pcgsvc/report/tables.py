"""What a person reads after a job: a summary of the report.

In: the report's dicts. Out: text on a console.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pcgsvc.report import words
from pcgsvc.report.columns import Column, Figures, mib, shown, table_of, written

_LABEL = 9
"""Columns of the label before each fact."""
_ENTRY_WIDTH = 78
"""Columns of the entry table with all its timings; a narrower terminal gets the first ones."""
_NO_CACHE = ("encoder", "minilm", "two_regions")
"""Families that use no attention backend."""
_MANY = 1000
"""Columns of a console that is no terminal: nothing is cut or wrapped in a file."""


def console(*, quiet: bool = False) -> Console:
    """Return a console on standard output, or one that prints nothing."""
    plain = Console(highlight=False, quiet=quiet)
    return plain if plain.is_terminal else Console(highlight=False, width=_MANY, quiet=quiet)


def show_report(out: Console, report: dict[str, Any]) -> None:
    """Print the summary: mode, split, graphs, phases, verification and timings."""
    out.print()
    _headline(out, report)
    _split(out, report["partition"])
    _compile(out, report)
    if "plan" in report:
        _plan(out, report["plan"])
    if "graphs" in report:
        _graphs(out, report["graphs"])
    _seconds(out, report["compile"]["seconds"])
    if "verify" in report:
        _verdict(out, report)
    if report.get("verify"):
        out.print()
        out.print(_entries(report, out.width))
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
"""Of what a row's state or verdict says; anything else is red."""


def show_rows(out: Console, rows: list[dict[str, Any]]) -> None:
    """Print rows of one kind as a table, a column per field; errors as powers of ten."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = [_error(v) if isinstance(v, float) else escape(v or "-") for v in row.values()]
        said = row.get("state", row.get("verdict"))
        table.add_row(*cells, style=_STYLES.get(str(said), "red"))
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
        text += f", not {mode['requested']} as asked"
    show_fact(out, "mode", f"{text}: uniform decode {mode['decode']}, all else {mode['mixed']}")


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
        memory = f"{mib(graphs['pool_bytes'])} MiB pool"
        if graphs["device_bytes"]:
            memory += f", {mib(graphs['device_bytes'])} MiB of the device"
        show_fact(out, "graphs", f"{graphs['num_graphs']} {kind}: {by_mode}; {memory}")
        show_fact(out, "sizes", " ".join(map(str, graphs["sizes"])))
    for skip in graphs["skipped"]:
        show_fact(out, "[yellow]skipped[/]", f"size {skip['size']}: {escape(skip['reason'])}")


def _seconds(out: Console, seconds: dict[str, float]) -> None:
    phases = [(k, v) for k, v in seconds.items() if k != "total" and v >= 0.0005]
    total = max(seconds["total"], sum(v for _, v in phases))
    parts = ", ".join(f"{name} {value:.3f}" for name, value in phases)
    show_fact(out, "seconds", f"[bold]{total:.2f}[/]: {parts}")


def _verdict(out: Console, report: dict[str, Any]) -> None:
    rows = report["verify"]
    if not rows:
        show_fact(out, "verify", "nothing was captured, so there is nothing to compare")
        return
    wrong = sum(not row["ok"] for row in rows)
    worst = max(row["max_rel_err"] for row in rows)
    worst_true = max(row["max_rel_err_true"] for row in rows)
    what = f"[green]all {len(rows)} entries equal plain execution[/]"
    if wrong:
        what = f"[red]{wrong} of {len(rows)} entries differ from plain execution[/]"
    errors = f"{worst:.1g} on padded inputs, {worst_true:.1g} on true rows alone"
    show_fact(out, "verify", f"{what}; largest error {errors}")


# ---- entries -------------------------------------------------------------------------------------


def _error(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _verdict_mark(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[red]WRONG[/]"


def _bound(verdict: str | None) -> str:
    return (verdict or "").removesuffix("-bound")


def _timed(row: Figures) -> bool:
    return "plain_us" in row


_US = written("{:.0f}")
_ENTRY = (
    Column("entry", ("mode",), str, left=True),
    Column("size", ("size",), str),
    Column("rows", ("num_tokens",), str),
    Column("", ("ok",), _verdict_mark, left=True),
    Column("error", ("max_rel_err",), _error),
    Column("true", ("max_rel_err_true",), _error),
    Column("plain", ("plain_us",), _US, when=_timed),
    Column("replay", ("step_us",), _US, when=_timed),
)
_WIDE = (
    Column("host", ("host_us",), _US, when=_timed),
    Column("regions", ("region_us",), _US, when=_timed),
    Column("bounds", ("boundary_us",), _US, when=_timed),
    Column("bound by", ("verdict",), _bound, when=_timed, left=True),
)
"""Further columns where the terminal is wide enough."""


def _entries(report: dict[str, Any], width: int) -> Table:
    """Return one row per captured entry: errors, and times where they were taken."""
    bench = {(row["mode"], row["size"]): row for row in report.get("bench", [])}
    rows = [{**row, **bench.get((row["mode"], row["size"]), {})} for row in report["verify"]]
    columns = shown((*_ENTRY, *(_WIDE if width >= _ENTRY_WIDTH else ())), rows)
    note = "times in microseconds per step; host: until the last step is launched"
    table = table_of(
        columns,
        padding=(0, 2 if width > _ENTRY_WIDTH + 22 else 1, 0, 0),
        caption=note if bench else None,
        caption_justify="left",
    )
    for row in sorted(rows, key=lambda row: (row["mode"], row["size"])):
        table.add_row(*(column.cell(row) for column in columns))
    return table
