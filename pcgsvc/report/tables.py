"""What a person reads after a job: a summary of the report.

In: the report's dicts. Out: text on a console. Knows nothing of how the figures came about.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pcgsvc.report.plan_text import show_plan

_LABEL = 9
"""Columns of the label before each fact."""
_ENTRY_WIDTH = 78
"""Columns of the entry table with all its timings; a narrower terminal gets the first ones."""
_PRESETS = ("llama", "llama_moe", "encoder")
"""Families that have presets."""
_NO_CACHE = ("encoder", "minilm", "two_regions")
"""Families that read no attention backend."""
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
        show_plan(out, report["plan"])
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
        _fact(out, "[yellow]warning[/]", escape(warning))


def show_text(out: Console, prompt: str, text: str) -> None:
    """Print a prompt and its continuation."""
    out.print()
    _fact(out, "prompt", escape(prompt))
    _fact(out, "answer", f"[bold]{escape(text.strip())}[/]")


def show_place(out: Console, path: Path, what: str = "report") -> None:
    """Print where the report lies; never wrapped, so that it can be copied."""
    out.print(f"[bold]{what:<{_LABEL}}[/] {escape(str(path))}", soft_wrap=True)


def show_fact(out: Console, label: str, text: str) -> None:
    """Print one fact as the summary does; both may hold markup."""
    _fact(out, label, text)


# ---- facts ---------------------------------------------------------------------------------------


def _fact(out: Console, label: str, text: str) -> None:
    """Print one fact behind its label; further lines are indented."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True, style="bold")
    grid.add_column()
    grid.add_row(label, text)
    out.print(grid)


def _headline(out: Console, report: dict[str, Any]) -> None:
    mode, config = report["mode"], report["config"]
    model = config["model"]
    _fact(
        out,
        "pcgsvc",
        f"{report['pcgsvc']}, torch {report['torch']}, {escape(report['device'])}, "
        f"{config['dtype']}",
    )
    cut = [op["name"] for op in report["partition"]["splitting_ops"]]
    without = model["name"] in _NO_CACHE or (
        model["name"] == "module" and "pcgsvc::attention" not in cut
    )
    cache = "" if without else f", attention {config['attention']['name']}"
    _fact(out, "model", f"{model['name']} {_which(model)}".rstrip() + cache)
    text = f"[bold]{mode['resolved']}[/]"
    if mode["requested"] != mode["resolved"]:
        text += f", not {mode['requested']} as asked"
    _fact(out, "mode", f"{text}: uniform decode {mode['decode']}, all else {mode['mixed']}")


def _which(model: dict[str, Any]) -> str:
    """Return which of a family's models it is."""
    if model["name"] == "module":
        return escape(str(model["target"]))
    named = model["weights"] or model.get("path") or model.get("config")
    if named is not None:
        return escape(Path(named).name)
    return str(model["preset"]) if model["name"] in _PRESETS else ""


def _split(out: Console, partition: dict[str, Any]) -> None:
    ops = ", ".join(f"{o['name']} x{o['count']}" for o in partition["splitting_ops"])
    at = f", cut at {escape(ops)}" if ops else ", cut nowhere"
    _fact(
        out,
        "split",
        f"{_count(partition['num_regions'], 'region')} "
        f"({partition['num_unique_pieces']} unique), "
        f"{_count(partition['num_boundaries'], 'boundary', 'boundaries')} "
        f"by {partition['strategy']}{at}",
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", width=_LABEL + 3)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_column()
    for group in _alike(partition["pieces"]):
        piece = group[0]
        table.add_row(
            f"{len(group)}x",
            piece["kind"],
            _count(piece["ops"], "op"),
            (piece["hash"] or "")[:8],
            escape(piece["reason"]),
        )
    out.print(table, style="dim")


def _alike(pieces: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group pieces of one kind and hash, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for piece in pieces:
        key = (piece["kind"], piece["hash"], piece["reason"])
        groups.setdefault(key, []).append(piece)
    return list(groups.values())


def _compile(out: Console, report: dict[str, Any]) -> None:
    compile_ = report["compile"]
    done = f"{compile_['num_compiled']} compiled, {compile_['num_loaded']} loaded"
    if compile_.get("exact_sizes"):
        done += f"; for exactly {', '.join(map(str, compile_['exact_sizes']))} rows as well"
    if report["config"]["job"] == "plan":
        wanted = report["plan"]["num_artifacts"] if "plan" in report else 0
        done = f"nothing compiled, since job=plan; {_count(wanted, 'piece')} to compile"
    _fact(out, "compile", f"{compile_['compiler']}, {compile_['start']} start: {done}")


def _graphs(out: Console, graphs: dict[str, Any]) -> None:
    if not graphs["num_graphs"]:
        _fact(out, "graphs", "none captured")
    else:
        by_mode = ", ".join(f"{n} {mode}" for mode, n in graphs["by_mode"].items())
        kind = {
            "cuda": "CUDA graphs",
            "recorded": "recorded graphs (the CPU's stand-in, never faster)",
        }[graphs["backend"]]
        memory = f"{graphs['pool_bytes'] / 2**20:.1f} MiB pool"
        if graphs["device_bytes"]:
            memory += f", {graphs['device_bytes'] / 2**20:.1f} MiB of the device"
        sizes = " ".join(map(str, graphs["sizes"]))
        _fact(out, "graphs", f"{graphs['num_graphs']} {kind}: {by_mode}; {memory}")
        _fact(out, "sizes", sizes)
    for skip in graphs["skipped"]:
        _fact(out, "[yellow]skipped[/]", f"size {skip['size']}: {escape(skip['reason'])}")


def _seconds(out: Console, seconds: dict[str, float]) -> None:
    phases = [(k, v) for k, v in seconds.items() if k != "total" and v >= 0.0005]
    total = max(seconds["total"], sum(v for _, v in phases))
    parts = ", ".join(f"{name} {value:.3f}" for name, value in phases)
    _fact(out, "seconds", f"[bold]{total:.2f}[/]: {parts}")


def _verdict(out: Console, report: dict[str, Any]) -> None:
    rows = report["verify"]
    if not rows:
        _fact(out, "verify", "nothing was captured, so there is nothing to compare")
        return
    wrong = sum(not row["ok"] for row in rows)
    worst = max(row["max_rel_err"] for row in rows)
    worst_true = max(row["max_rel_err_true"] for row in rows)
    what = (
        f"[red]{wrong} of {len(rows)} entries differ from plain execution[/]"
        if wrong
        else f"[green]all {len(rows)} entries equal plain execution[/]"
    )
    _fact(
        out,
        "verify",
        f"{what}; largest error {worst:.1g} on padded inputs, {worst_true:.1g} on true rows alone",
    )


# ---- entries -------------------------------------------------------------------------------------


def _entries(report: dict[str, Any], width: int) -> Table:
    """Return one row per captured entry: errors, and times where they were taken."""
    bench = {(b["mode"], b["size"]): b for b in report.get("bench", [])}
    times = ["plain", "replay"] if bench else []
    if bench and width >= _ENTRY_WIDTH:
        times += ["host", "regions", "bounds", "bound by"]
    table = Table(
        box=None,
        padding=(0, 2, 0, 0) if width > _ENTRY_WIDTH + 22 else (0, 1, 0, 0),
        header_style="bold",
        caption="times in microseconds per step; host: until the last step is launched"
        if bench
        else None,
        caption_justify="left",
    )
    for name in ("entry", "size", "rows", "", "error", "true", *times):
        left = name in ("entry", "", "bound by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in sorted(report["verify"], key=lambda r: (r["mode"], r["size"])):
        found = bench.get((row["mode"], row["size"]))
        table.add_row(
            row["mode"],
            str(row["size"]),
            str(row["num_tokens"]),
            "[green]ok[/]" if row["ok"] else "[red]WRONG[/]",
            _error(row["max_rel_err"]),
            _error(row["max_rel_err_true"]),
            *(_times(found)[: len(times)] if found else [""] * len(times)),
        )
    return table


def _error(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _times(row: dict[str, Any]) -> list[str]:
    keys = ("plain_us", "step_us", "host_us", "region_us", "boundary_us")
    cells = [f"{row[k]:.0f}" for k in keys]
    return [*cells, str(row.get("verdict", "")).removesuffix("-bound")]


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
