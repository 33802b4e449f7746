"""Reports by hand: whole, valid, and with figures that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pcgsvc.report.rows import Row, facts_of

Time = Callable[[str, int], float]


def even(mode: str, size: int) -> float:
    """Return a step time: full graphs are twice as fast, and each row costs one."""
    return size + (10.0 if mode == "full" else 20.0)


def make_report(
    mode: str = "piecewise",
    sizes: Sequence[int] = (1, 2, 4),
    *,
    time: Time = even,
    plain: Time = lambda mode, size: 100.0 + size,
    pool_bytes: int = 1 << 20,
    start: str = "warm",
    bench: bool = True,
    graphs: bool = True,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a report of schema 1 of a job that captured `sizes` under `mode`, all right."""
    halves = {
        "none": ("none", "none"),
        "piecewise": ("piecewise", "piecewise"),
        "full": ("full", "full"),
        "full_decode_only": ("full", "none"),
        "full_and_piecewise": ("full", "piecewise"),
    }[mode]
    entries = [(m, s) for m in sorted({*halves} - {"none"}) for s in sorted(sizes, reverse=True)]
    regions = {"piecewise": 5, "full": 1}
    report: dict[str, Any] = {
        "schema": 1,
        "pcgsvc": "0.1.0",
        "torch": "2.13.0",
        "device": device,
        "config": {
            "mode": mode,
            "dtype": "float32",
            "model": {"name": "llama", "preset": "tiny"},
            "attention": {"name": "paged"},
            "capture": {"sizes": list(sizes), "uniform_query_len": 1},
            "report": None,
            **(settings or {}),
        },
        "mode": {
            "requested": mode,
            "resolved": mode,
            "decode": halves[0],
            "mixed": halves[1],
            "reasons": [],
        },
        "partition": {
            "strategy": "fx",
            "splitting_ops": [{"name": "ns::op", "count": 4}],
            "num_boundaries": 4,
            "num_regions": 5,
            "num_unique_pieces": 3,
            "pieces": [],
        },
        "compile": {
            "compiler": "eager",
            "start": start,
            "num_traces": int(start == "cold"),
            "num_compiled": 3 if start == "cold" else 0,
            "num_loaded": 0 if start == "cold" else 3,
            "num_kernels": 238,
            "seconds": {
                **dict.fromkeys(("import", "split", "compile", "load"), 0.0),
                "trace": 2.0 if start == "cold" else 0.0,
                "warmup": 0.01 * len(entries),
                "capture": 0.02 * len(entries),
                "total": (2.5 if start == "cold" else 0.5) + 0.03 * len(entries),
            },
        },
        "cache": {
            "mode": "readwrite",
            "dir": "/c",
            "program_key": "0" * 64,
            "hits": 0,
            "misses": 0,
            "miss_reasons": [],
            "bytes": 0,
        },
    }
    if not graphs:
        return report
    by_mode = {m: sum(regions[m] for entry, _ in entries if entry == m) for m, _ in entries}
    report["graphs"] = {
        "backend": "cuda" if device.startswith("cuda") else "recorded",
        "num_graphs": sum(by_mode.values()),
        "by_mode": by_mode,
        "sizes": sorted(sizes) if entries else [],
        "skipped": [],
        "pool_bytes": pool_bytes,
        "device_bytes": 0,
    }
    errors = {"max_rel_err": 0.0, "tolerance": 0.0, "max_rel_err_true": 0.0, "tolerance_true": 1e-4}
    report["verify"] = [
        {"mode": m, "size": s, "num_tokens": s, **errors, "ok": True} for m, s in entries
    ]
    report["bench"] = [
        {
            "mode": m,
            "size": s,
            "host_us": time(m, s) / 2,
            "step_us": time(m, s),
            "step_low_us": 0.9 * time(m, s),
            "step_high_us": 1.5 * time(m, s),
            "plain_us": plain(m, s),
            "region_us": 1.0,
            "boundary_us": 1.0,
        }
        for m, s in entries
        if bench
    ]
    report["dispatch"] = {"hits": {}, "fallbacks": [], "padding_share": 0.125}
    return report


def make_row(name: str = "0", report: dict[str, Any] | None = None, **fields: Any) -> Row:
    """Return the row of a job that is done; `report={}` gives one that left none."""
    facts = facts_of(make_report() if report is None else report) if report != {} else None
    settings: dict[str, Any] = {"differs": {"seed": name}, "status": "done", **fields}
    return Row(name=name, facts=facts, **settings)
