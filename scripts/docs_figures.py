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
    raw = _raw("bench-h200")["call"]
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
        ("`runner.prepare(8)`, `step()`, piecewise", piecewise, "prepared"),
    ]
    table = []
    for label, runs, kind in kinds:
        cells = [
            ("", "") if run is None else (_us(run[kind]["step_us"]), _us(run[kind]["host_low_us"]))
            for run in runs
        ]
        chain = _chain(*(run[kind] for run in runs if run is not None))
        table.append([label, *itertools.chain(*cells), chain])
    later = {name: row["whole_call_grids"] for name, row in _stitched_rows().items()}
    beside = ", ".join(f"{name} {_us(later[name]['step_us'])}" for name in ("full", "pieces"))
    label = f"`runner(x, batch=…)`, stitched, new lengths each call (in that run: {beside})"
    times = [_us(later["stitched"][figure]) for figure in ("step_us", "host_low_us")]
    ends = _raw("stitched-h200")["decoder"]["yardstick_us"]
    chain = " to ".join(sorted({f"{min(ends):.2f}", f"{max(ends):.2f}"}))
    table.append([label, "", "", *times, chain])
    head = ["µs per call, 8 rows", "2 products", "host", "32 layers", "host", "yardstick"]
    return _table(head, table)


def rows() -> str:
    """Calls of several row counts."""
    raw = _raw("bench-h200")["call"]
    labels = {
        "bare": "its steps alone",
        "clone": "`runner(x)`",
        "hand_made": "made by hand",
        "clone_own_stream": "`runner(x)`, own stream",
        "hand_made_own_stream": "by hand, own stream",
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
    raw = _raw("bench-h200")["decode"]
    labels = {
        "full": "the full graph alone",
        "prepared": "`prepared.step()`, updated before",
        "checked": "`runner(…, batch=CheckedBatch)`",
        "numpy": "`runner(…, batch=Batch)` of numpy arrays",
        "lists": "`runner(…, batch=Batch)` of lists",
    }
    table = [
        [label, _us(run["host_low_us"]), _us(run["step_us"]), _chain(run)]
        for kind, label in labels.items()
        if (run := raw.get(kind))
    ]
    return _table(["decode of 8 requests", "host µs", "back to back", "yardstick"], table)


def _stitched_rows() -> Any:
    raw = _raw("stitched-h200")["decoder"]
    return {name: raw[name] for name in ("full", "pieces", "stitched", "stitched_without_plan")}


def stitched() -> str:
    """A boundary's kernels set in one graph, beside pieces and one graph whose lengths froze."""
    raw = _stitched_rows()
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


def stitched_llama() -> str:
    """Launches that are the same at every step, behind wide layers."""
    raw = _raw("stitched-h200")["llama_8b"]
    ratio, host = (
        raw["to_full"],
        {name: _us(raw[name]["host_us"]) for name in ("pieces", "stitched")},
    )
    return (
        f"Llama-3-8B shapes ({raw['layers']} layers, eager, 8 requests of 512 tokens) take "
        f"{ratio['stitched']:.3f} times the full graph's time and {host['stitched']} µs of the "
        f"host; in pieces {ratio['pieces']:.3f} times and {host['pieces']} µs.\n"
    )


def strategies() -> str:
    """The strategies on one model of 32 layers."""
    raw = _raw("bench-h200")["strategies"]
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
            f"{row['piecewise']['step_us'] / row['full']['step_us']:.2f}",
            _us(row["piecewise_call"]["step_us"]),
            _us(row["hand_made_loop"]["step_us"]),
            f"{row['full']['step_us'] / row['hand_made']['step_us']:.3f}",
            f"{row['glue']:.1f}",
            str(row["num_graphs"]),
            f"{row['memory_mib']['pool']:.0f}",
        ]
        for name, label in names.items()
        if (row := raw.get(name))
    ]
    head = ["strategy, compiler", "step µs", "÷ its full graph", "`runner(x)`", "loop by hand"]
    return _table([*head, "full ÷ by hand", "glue µs", "graphs", "pool MiB"], rows)


def peers() -> str:
    """Whole calls of other systems on one model, each in a process alone on the card."""
    raw = _raw("peers-h200")["peers"]
    names = {
        "pcgsvc, full": ("prod", "pcg_fx_inductor_full"),
        "vLLM 0.26, full": ("vllm", "vllm_pw_FULL"),
        "`reduce-overhead`": ("trees", "trees_full"),
        "pcgsvc, piecewise": ("prod_piecewise", "pcg_fx_inductor_piecewise"),
        "vLLM 0.26, piecewise": ("vllm", "vllm_pw"),
        "`reduce-overhead`, graph partition": ("trees_part", "trees_part"),
    }
    sizes, table = (1, 8, 64, 512), []
    for label, (system, row) in names.items():
        runs = [raw[system][f"{row} {size} clone"] for size in sizes]
        host = _us(runs[1]["host_low_us"])
        table.append([label, *(_us(run["step_us"]) for run in runs), host, _chain(*runs)])
    head = ["µs per call, cloned", *(f"{size} rows" for size in sizes), "host, 8 rows"]
    return _table([*head, "yardstick"], table)


def starts() -> str:
    """Cold and warm starts of a 32-layer Llama."""
    places = {
        "H200, inductor": _raw("warm-start-h200")["warm_start"],
        "2-core CPU, eager": _raw("cpu")["warm_start_eager"],
    }
    labels = {
        "cold": "cold",
        "warm": "warm",
        "warm_again": "warm, again",
        "warm_without_compilers_on_path": "warm, no compiler on the PATH",
        "cold_inductor": "cold, partitioned by Inductor",
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
    start = _raw("warm-start-h200")["warm_start"]
    cold, again = (start[kind]["ready_to_capture_s"] for kind in ("cold", "warm"))
    return (
        "In a new process a 32-layer Llama under Inductor is ready to capture "
        f"{cold:.1f} s after `import torch` when cold, {again:.1f} s when warm.\n"
    )


def glue() -> str:
    """What is left of a step and of a call when nothing runs."""
    raw = _raw("bench-h200")
    own, capture = raw["glue"], raw["strategies"]["fx"]["seconds"]["capture"]
    rows = raw["call"]["small_full"]["8"]
    call, batch = (rows[k]["host_us"] - rows["bare"]["host_us"] for k in ("clone", "with_batch"))
    return (
        f"With every replay and op body empty, a step of {own['step_callables']} callables takes "
        f"{own['glue_us_per_step']:.1f} µs.\nA whole call takes {call:.0f} µs of the host above "
        f"its steps, with the batch of the call before {batch:.0f}. Capturing 4\nsizes of 33 "
        f"regions, full and in pieces, takes {capture:.2f} s.\n"
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
    "rows": rows,
    "decode": decode,
    "stitched": stitched,
    "stitched_llama": stitched_llama,
    "strategies": strategies,
    "peers": peers,
    "starts": starts,
    "warm": warm,
    "glue": glue,
    "llama_8b": llama_8b,
    "floor": floor,
}
