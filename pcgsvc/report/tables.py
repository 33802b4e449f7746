"""What a person reads after a job: rich tables of the report.

In: the report's dicts. Out: text on a console. Knows nothing of how the figures came about.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_NARROW = 100


def console() -> Console:
    """Return a console on standard output; wide enough for the tables when it is no terminal."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=max(plain.width, _NARROW))


def show_report(out: Console, report: dict[str, Any]) -> None:
    """Print the summary: mode, split, graphs, phases, verification and timings."""
    _headline(out, report)
    out.print(_split_table(report))
    if "graphs" in report:
        _graphs(out, report)
    out.print(_phase_table(report))
    if report.get("verify"):
        out.print(_entry_table(report))
    for warning in report.get("warnings", []):
        out.print(f"[yellow]warning[/] {escape(warning)}")


def show_text(out: Console, prompt: str, text: str) -> None:
    """Print a prompt and its continuation."""
    out.print(f"[bold]prompt[/]        {escape(prompt)}")
    out.print(f"[bold]continuation[/]  {escape(text.strip())}")


def _headline(out: Console, report: dict[str, Any]) -> None:
    mode, config = report["mode"], report["config"]
    same = mode["requested"] == mode["resolved"]
    asked = "" if same else f" (asked for: {mode['requested']})"
    model = config["model"]
    out.print(
        f"[bold]pcgsvc {report['pcgsvc']}[/]  {model['name']}:{model['preset']}  "
        f"{report['device']}  {config['dtype']}  torch {report['torch']}"
    )
    out.print(
        f"mode [bold]{mode['resolved']}[/]{asked}: uniform decode -> {mode['decode']}, "
        f"everything else -> {mode['mixed']}"
    )


def _split_table(report: dict[str, Any]) -> Table:
    partition = report["partition"]
    ops = ", ".join(f"{o['name']} x{o['count']}" for o in partition["splitting_ops"]) or "none"
    table = Table(
        title=f"split ({partition['strategy']}): {partition['num_boundaries']} boundaries, "
        f"{partition['num_regions']} regions, {partition['num_unique_pieces']} unique pieces; "
        f"cut at {ops}",
        title_justify="left",
    )
    for name in ("pieces", "kind", "ops", "hash", "why"):
        table.add_column(name)
    for group in _alike(partition["pieces"]):
        first, last = group[0], group[-1]
        names = first["name"] if first is last else f"{first['name']} … {last['name']}"
        count = "" if len(group) == 1 else f" ({len(group)}x)"
        table.add_row(
            names + count,
            first["kind"],
            str(first["ops"]),
            (first["hash"] or "")[:12],
            first["reason"],
        )
    return table


def _alike(pieces: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group pieces of one kind and hash, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for piece in pieces:
        key = (piece["kind"], piece["hash"], piece["reason"])
        groups.setdefault(key, []).append(piece)
    return list(groups.values())


def _graphs(out: Console, report: dict[str, Any]) -> None:
    graphs = report["graphs"]
    by_mode = ", ".join(f"{n} {mode}" for mode, n in graphs["by_mode"].items()) or "none"
    out.print(
        f"graphs ({graphs['backend']}): [bold]{graphs['num_graphs']}[/] ({by_mode}) for sizes "
        f"{graphs['sizes']}; pool {graphs['pool_bytes'] / 2**20:.1f} MiB, device "
        f"{graphs['device_bytes'] / 2**20:.1f} MiB",
        highlight=False,
    )
    if graphs["backend"] == "recorded":
        out.print("[dim]recorded graphs stand in for CUDA graphs and are never faster[/]")
    for skip in graphs["skipped"]:
        out.print(f"[yellow]skipped[/] size {skip['size']}: {escape(skip['reason'])}")


def _phase_table(report: dict[str, Any]) -> Table:
    compile_ = report["compile"]
    table = Table(
        title=f"{compile_['start']} start, compiler {compile_['compiler']}: "
        f"{compile_['num_traces']} traced, {compile_['num_compiled']} compiled, "
        f"{compile_['num_loaded']} loaded",
        title_justify="left",
    )
    seconds = {k: v for k, v in compile_["seconds"].items() if v}
    for name in seconds:
        table.add_column(name, justify="right")
    table.add_row(*(f"{v:.3f} s" for v in seconds.values()))
    return table


def _entry_table(report: dict[str, Any]) -> Table:
    bench = {(b["mode"], b["size"], b["uniform"]): b for b in report.get("bench", [])}
    table = Table(
        title="entries: errors against plain execution (padded inputs / true rows), µs per step",
        title_justify="left",
    )
    for name in ("mode", "size", "rows", "ok", "err", "err true"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("plain", "replay", "host", "region", "bound.", "bound by"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["verify"]:
        times = bench.get((row["mode"], row["size"], row["uniform"]))
        keys = ("plain_us", "step_us", "host_us", "region_us", "boundary_us")
        cells = [f"{times[k]:.0f}" for k in keys] if times else [""] * len(keys)
        table.add_row(
            row["mode"],
            str(row["size"]),
            str(row["num_tokens"]),
            "[green]ok[/]" if row["ok"] else "[red]WRONG[/]",
            f"{row['max_rel_err']:.0e}" if row["max_rel_err"] else "0",
            f"{row['max_rel_err_true']:.0e}" if row["max_rel_err_true"] else "0",
            *cells,
            str(times["verdict"]).removesuffix("-bound") if times else "",
        )
    return table
