"""Measured figures in README.md and docs/, from docs/results/*.json.

In: Markdown with `<!-- figures: NAME -->` … `<!-- /figures -->`. Out: the same with what
that name makes between them. `scripts/docs outputs` writes them; a test compares.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"
_PLACE = re.compile(r"(?<=<!-- figures: )([^ ]+)( -->\n).*?(?=<!-- /figures -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return a page with its tables as the raw figures have them."""
    return _PLACE.sub(lambda found: f"{found[1]}{found[2]}{TABLES[found[1]]()}", text)


def _raw(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---", *["---:"] * (len(lines[0]) - 1)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _us(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def _chain(*runs: dict[str, Any]) -> str:
    """Return the yardstick beside some figures, its least and most: the card's state."""
    seen = [time for run in runs for time in run["chain_us"]]
    ends = sorted({f"{min(seen):.2f}", f"{max(seen):.2f}"})
    return " to ".join(ends)


def calls() -> str:
    """Whole calls beside graphs made by hand, reduce-overhead and the module as it is."""
    raw = _raw("call-h200")["call"]
    models = (raw["small_full"]["8"], raw["32x512_full"]["8"])
    piecewise = (None, raw["32x512_piecewise"]["8"])
    kinds = [
        ("the module without graphs, eager", models, "plain"),
        ('`torch.compile(mode="reduce-overhead")`, cloned', models, "reduce_overhead"),
        ("CUDA graph made by hand: copy in, replay, clone", models, "hand_made"),
        ("`runner(x)`, full graph", models, "clone"),
        ("`runner(x)`, full graph, `outputs=view`", models, "view"),
        ("`runner.prepare(8)`, `step()`, full graph", models, "prepared"),
        ("33 graphs in a loop made by hand: copy in, clone", piecewise, "hand_made"),
        ("`runner(x)`, piecewise", piecewise, "clone"),
        ("`runner(x)`, piecewise, `outputs=view`", piecewise, "view"),
    ]
    rows = []
    for label, runs, kind in kinds:
        cells = [
            ("", "") if run is None else (_us(run[kind]["step_us"]), _us(run[kind]["host_us"]))
            for run in runs
        ]
        chain = _chain(*(run[kind] for run in runs if run is not None))
        rows.append([label, *itertools.chain(*cells), chain])
    head = ["µs per call, 8 rows", "2 products", "host", "32 layers", "host", "yardstick"]
    return _table(head, rows)


def rows() -> str:
    """Calls of other row counts in a full graph."""
    raw = _raw("call-h200")["call"]
    labels = {
        "bare": "its steps alone",
        "clone": "`runner(x)`",
        "hand_made": "made by hand",
        "reduce_overhead": "reduce-overhead",
        "plain": "eager",
    }
    table = []
    for name, mode in (("32x512_full", "full"), ("32x512_piecewise", "piecewise")):
        for count, run in raw[name].items():
            cells = [_us(run[kind]["step_us"]) if kind in run else "" for kind in labels]
            seen = [run[kind] for kind in labels if kind in run]
            table.append([f"{mode}, {count} rows", *cells, _chain(*seen)])
    return _table(["µs, back to back", *labels.values(), "yardstick"], table)


def decode() -> str:
    """A decode of 8 requests by how its batch is given."""
    raw = _raw("call-h200")["decode"]
    labels = {
        "full": "the full graph alone",
        "prepared": "`prepared.step()`, updated before",
        "checked": "`runner(…, batch=CheckedBatch)`",
        "numpy": "`runner(…, batch=Batch)` of numpy arrays",
        "lists": "`runner(…, batch=Batch)` of lists",
    }
    table = [
        [label, _us(run["host_us"]), _us(run["step_us"]), _chain(run)]
        for kind, label in labels.items()
        if (run := raw.get(kind))
    ]
    return _table(["decode of 8 requests", "host µs", "back to back", "yardstick"], table)


def strategies() -> str:
    """The strategies on one model of 32 layers."""
    raw = _raw("strategies-h200")["strategies"]
    names = {
        "fx": "`fx`, inductor",
        "inductor": "`inductor`, inductor",
        "breakable": "`breakable`, eager",
        "breakable_inductor": "`breakable`, inductor",
    }
    kinds = ("piecewise", "piecewise_call", "hand_made_loop", "full", "full_call", "hand_made_call")
    table = []
    for name, label in names.items():
        row = raw[name]
        ratio = row["piecewise"]["step_us"] / row["full"]["step_us"]
        cells = [_us(row[kind]["step_us"]) for kind in kinds]
        memory = [f"{row['memory_mib'][part]:.0f}" for part in ("pool", "device")]
        chain = _chain(*(row[kind] for kind in kinds))
        table.append([label, *cells, f"{ratio:.2f}", f"{row['glue']:.1f}", *memory, chain])
    head = ["strategy, compiler", "piecewise", "its call", "loop by hand", "full", "its call"]
    head += ["by hand", "piecewise ÷ full", "glue", "pool MiB", "device MiB", "yardstick"]
    return _table(head, table)


def memory() -> str:
    """Device memory of the strategies, in parts."""
    raw = _raw("strategies-h200")["strategies"]
    parts = ("pool", "workspaces", "graphs", "kernels", "device", "returned")
    table = [
        [f"`{name}`", *(f"{raw[name]['memory_mib'][part]:.0f}" for part in parts)]
        for name in ("fx", "inductor", "breakable", "breakable_inductor")
    ]
    return _table(["MiB", *parts[:-2], "in all", "given back"], table)


def starts() -> str:
    """Cold and warm starts of a 32-layer Llama."""
    places = {
        "H200, inductor": _raw("calls-h200")["warm_start"],
        "2-core CPU, eager": _raw("cpu")["warm_start_eager"],
    }
    labels = {
        "cold": "cold",
        "warm": "warm",
        "warm_again": "warm, again",
        "warm_without_compilers_on_path": "warm, no compiler on the PATH",
    }
    rows = [
        [
            f"{place}: {label}",
            f"{start['ready_to_capture_s']:.2f}",
            f"{start['ready_to_serve_s']:.2f}",
        ]
        for place, raw in places.items()
        for kind, label in labels.items()
        if (start := raw.get(kind))
    ]
    return _table(["seconds after `import torch`", "ready to capture", "graphs captured"], rows)


def warm() -> str:
    """The start of a new process in a sentence."""
    start = _raw("calls-h200")["warm_start"]
    cold, again = (start[kind]["ready_to_capture_s"] for kind in ("cold", "warm"))
    return (
        "In a new process a 32-layer Llama under Inductor is ready to capture "
        f"{cold:.1f} s after `import torch` when cold, {again:.1f} s when warm.\n"
    )


def glue() -> str:
    """What is left of a step and of a call when nothing runs."""
    own = _raw("call-h200")["glue"]
    capture = _raw("strategies-h200")["strategies"]["fx"]["seconds"]["capture"]
    call, batch = own["call_minus_steps_us"], own["call_with_batch_minus_steps_us"]
    return (
        f"With every replay and op body empty, a step of {own['step_callables']} callables takes "
        f"{own['glue_us_per_step']:.1f} µs; a whole call\ntakes {call:.0f} µs above its steps, "
        f"with a `Batch` {batch:.0f} µs (`scripts/bench glue`). Capturing\n"
        f"4 sizes of 33 regions takes {capture:.2f} s.\n"
    )


def llama_8b() -> str:
    """Decode steps of Llama-3-8B shapes against the memory floor."""
    raws = [_raw(f"llama-8b-h200{suffix}")["llama_8b"] for suffix in ("", "-quiet")]
    rows = []
    for batch in (1, 8):
        for strategy in ("inductor", "fx"):
            runs = [raw[f"{strategy}_batch_{batch}"] for raw in raws]
            ratios = sorted(run["full_to_floor"] for run in runs)
            hosts = sorted(run["piecewise"]["host_us"] for run in runs)
            floor = _us(runs[-1]["floor_us"])
            spans = [f"{ratios[0]:.2f} to {ratios[-1]:.2f}", f"{_us(hosts[0])} to {_us(hosts[-1])}"]
            rows.append([f"batch {batch}, `{strategy}`", floor, *spans])
    return _table(["decode step", "floor µs", "full graph ÷ floor", "piecewise, host µs"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "calls": calls,
    "rows": rows,
    "decode": decode,
    "strategies": strategies,
    "memory": memory,
    "starts": starts,
    "warm": warm,
    "glue": glue,
    "llama_8b": llama_8b,
}
