"""Measured figures in README.md and docs/, from docs/results/*.json.

In: Markdown with `<!-- figures: NAME -->` … `<!-- /figures -->`. Out: the same with what
that name makes between them. `scripts/docs outputs` writes them; a test compares.
"""

from __future__ import annotations

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


def calls() -> str:
    """Whole calls beside a graph made by hand of the same program."""
    raw = _raw("calls-h200")
    call, plain = raw["call"], raw["piecewise"]["inductor"]["plain"]
    full, piecewise = ("2x512_full", "32x512_full"), ("2x512_piecewise", "32x512_piecewise")
    kinds = [
        ("CUDA graph made by hand: copy in, replay, clone", full, "hand_made"),
        ("`runner(x)`, full graph", full, "clone"),
        ("`runner(x)`, full graph, `outputs=view`", full, "view"),
        ("`runner(x)`, piecewise: 3 and 33 graphs", piecewise, "clone"),
        ("`runner(x)`, piecewise, `outputs=view`", piecewise, "view"),
    ]
    rows = [
        [
            "the module without graphs, eager",
            "not timed",
            "not timed",
            _us(plain["step_us"]),
            _us(plain["host_us"]),
        ]
    ]
    for label, models, kind in kinds:
        times = [call[model][kind][figure] for model in models for figure in ("step_us", "host_us")]
        rows.append([label, *map(_us, times)])
    return _table(["µs per call, 8 rows", "2 layers", "host", "32 layers", "host"], rows)


def stitched() -> str:
    """A boundary's kernels set in one graph, beside pieces and one graph whose lengths froze."""
    raw = _raw("stitched-h200")["decoder"]
    names = {
        "full": "one full graph, its lengths frozen",
        "pieces": "pieces: 33 graphs",
        "stitched": "stitched, by launch plans",
        "stitched_without_plan": "stitched, by the ops' Python",
    }
    full = raw["full"]["same"]["step_us"]
    rows = []
    for name, label in names.items():
        cells = [label]
        for case in ("integers", "grids"):
            times = raw[name][case]
            ratio = f"{times['step_us'] / full:.3f}"
            cells += [_us(times["step_us"]), ratio, _us(times["host_us"])]
        rows.append(cells)
    head = ["µs per step, 8 rows", "integers change", "÷ full", "host"]
    return _table([*head, "grids change too", "÷ full", "host"], rows)


def strategies() -> str:
    """The strategies on one model of 32 layers."""
    raw = _raw("strategies-h200")["strategies"]
    names = {
        "fx": "`fx`, inductor",
        "inductor": "`inductor`, inductor",
        "breakable": "`breakable`, eager",
        "breakable_inductor": "`breakable`, inductor",
    }
    rows = [
        [
            label,
            _us(row["piecewise"]["step_us"]),
            _us(row["piecewise"]["host_us"]),
            f"{row['piecewise_to_full']:.2f}",
            f"{row['full_to_hand_made']:.3f}",
            f"{row['glue']:.1f}",
            str(row["num_graphs"]),
            f"{row['pool_mib']:.0f}",
        ]
        for name, label in names.items()
        if (row := raw.get(name))
    ]
    head = ["strategy, compiler", "step µs", "host µs", "÷ its full graph", "full ÷ hand-made"]
    return _table([*head, "glue µs", "graphs", "pool MiB"], rows)


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
    raw = _raw("calls-h200")
    own, capture = raw["glue"], raw["piecewise"]["inductor"]["seconds"]["capture"]
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


def floor() -> str:
    """Decode steps with and without the pass `gemv`, in one run."""
    raw, rows = _raw("decode-floor-h200")["llama_8b"], []
    for batch in (1, 8):
        steps = [raw[f"{name}_batch_{batch}"] for name in ("fx", "fx_gemv")]
        cells = [f"{_us(s['full']['step_us'])} ({s['full_to_floor']:.2f})" for s in steps]
        rows.append([f"batch {batch}", _us(steps[0]["floor_us"]), *cells])
    return _table(["full graph, µs (÷ floor)", "floor", "default", "with `gemv`"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "calls": calls,
    "stitched": stitched,
    "strategies": strategies,
    "starts": starts,
    "warm": warm,
    "glue": glue,
    "llama_8b": llama_8b,
    "floor": floor,
}
