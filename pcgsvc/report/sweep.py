"""The table at the end of a sweep: one row per job, so that jobs can be compared.

In: what every job asked for, and its report. Out: a table on a console. Knows nothing of Hydra.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Done:
    """One job of a sweep."""

    overrides: list[str]
    code: int
    report: dict[str, Any]
    """Empty if the job failed before it had one."""


def show_sweep(out: Console, jobs: list[Done]) -> None:
    """Print one row per job; of the overrides only those in which the jobs differ."""
    common = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs))
    table = Table(title="sweep", title_justify="left", box=None, pad_edge=False)
    table.add_column("job", justify="right")
    table.add_column("differs in", overflow="fold")
    for name in (
        "reg/bound",
        "unique",
        "kernels",
        "compile s",
        "graphs",
        "MiB",
        "pw µs",
        "full µs",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for at, job in enumerate(jobs):
        words = " ".join(o for o in job.overrides if o not in common) or "-"
        table.add_row(str(at), words, *_cells(job.report), _result(job))
    out.print()
    out.print(table)
    out.print(
        "kernels: per step; compile: trace, split, compile and load; µs: per step at the largest "
        "size, pw: piecewise",
        style="dim",
    )


def _cells(report: dict[str, Any]) -> list[str]:
    if not report:
        return [""] * 8
    partition, compile_ = report["partition"], report["compile"]
    seconds = compile_["seconds"]
    made = sum(seconds.get(k, 0.0) for k in ("trace", "split", "compile", "load"))
    graphs = report.get("graphs", {})
    return [
        f"{partition['num_regions']}/{partition['num_boundaries']}",
        str(partition["num_unique_pieces"]),
        str(compile_.get("num_kernels", "")),
        f"{made:.2f} {compile_['start']}",
        str(graphs.get("num_graphs", "")),
        f"{graphs['pool_bytes'] / 2**20:.1f}" if graphs else "",
        _step(report, "piecewise"),
        _step(report, "full"),
    ]


def _step(report: dict[str, Any], mode: str) -> str:
    rows = [r for r in report.get("bench", []) if r["mode"] == mode]
    return f"{max(rows, key=lambda r: r['size'])['step_us']:.0f}" if rows else ""


def _result(job: Done) -> str:
    if job.code:
        return f"failed (exit {job.code})"
    rows = job.report.get("verify")
    return "done" if not rows else f"verified {sum(r['ok'] for r in rows)}/{len(rows)}"
