"""Sentences about a report that the terminal, and the page and the picture of a plan, share.

In: parts of a report. Out: plain text, without markup.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pcgsvc.events import count as count
from pcgsvc.events import memory as memory

_PRESETS = ("llama", "llama_moe", "encoder")
"""Families that have presets."""
_MOST_OPS = 8
"""Ops of a piece that are named; the rest are counted."""


def model(config: dict[str, Any]) -> str:
    """Return which model of which family `config.model` is."""
    if config["name"] == "module":
        which = str(config["target"])
    elif named := config["weights"] or config.get("path") or config.get("config"):
        which = Path(named).name
    else:
        which = str(config["preset"]) if config["name"] in _PRESETS else ""
    return f"{config['name']} {which}".rstrip()


def split(partition: dict[str, Any]) -> str:
    """Return into how many pieces the model is split."""
    regions = count(partition["num_regions"], "region")
    boundaries = count(partition["num_boundaries"], "boundary", "boundaries")
    unique, strategy = partition["num_unique_pieces"], partition["strategy"]
    return f"{regions} ({unique} unique), {boundaries} by {strategy}"


def graphs(planned: dict[str, Any]) -> str:
    """Return how many graphs there would be and how they come about."""
    if not planned["num_graphs"]:
        return "none would be captured"
    parts = [
        f"{g['graphs']} {mode} ({g['per_entry']} x {g['entries']} sizes)"
        for mode, g in planned["by_mode"].items()
    ]
    sizes = " ".join(map(str, planned["sizes"]))
    return f"{planned['num_graphs']}: {' + '.join(parts)}; sizes {sizes}"


def support(row: dict[str, str]) -> str:
    """Return in which batches a splitting op may be captured, and what decided it."""
    return f"{row['op']}: {row['support']}, {row['meaning']} (by {row['said_by']})"


def parallel(section: dict[str, Any]) -> str:
    """Return among how many ranks a model is shared out, and what of it is not split."""
    parts = [f"{key.replace('_', ' ')} {value}" for key, value in section.items() if key != "ranks"]
    return f"{section['ranks']} ranks: {', '.join(parts)}"


def collectives(row: dict[str, Any]) -> str:
    """Return how many collectives of a kind a step has, and what each moves at two sizes."""
    ends = dict.fromkeys([min(row["bytes"], key=int), max(row["bytes"], key=int)])
    sizes = ", ".join(f"{memory(row['bytes'][size])} at size {size}" for size in ends)
    return f"{row['count']}x {row['op']}, each {sizes}"


def modules(names: list[str]) -> str:
    """Return names of submodules, those of a list's items folded into one."""
    folded: dict[str, int] = {}
    for name in names:
        key = ".".join("*" if part.isdigit() else part for part in name.split("."))
        folded[key] = folded.get(key, 0) + 1
    return ", ".join(f"{name} ({many})" if many > 1 else name for name, many in folded.items())


def ops(kind: dict[str, Any]) -> str:
    """Return the ops of one kind of piece, the most frequent ones first."""
    first = kind["ops"][:_MOST_OPS]
    named = [f"{op['op'].removeprefix('aten::')} {op['count']}" for op in first]
    rest = kind["num_ops"] - sum(op["count"] for op in first)
    label = f"{kind['count']}x {kind['kind']} {(kind['hash'] or '')[:8]}".rstrip()
    return f"{label}: {', '.join(named)}{f', {rest} more' if rest else ''}"


def content(kind: dict[str, Any]) -> list[str]:
    """Return what a kind of piece holds: how many ops, or which splitting ops."""
    if kind["kind"] == "region":
        return [f"{kind['num_ops']} ops"]
    return [op["op"] for op in kind["splitting"]]


def notes(plan: dict[str, Any]) -> list[str]:
    """Return the notes on a plan and on its memory."""
    return [*plan["notes"], *plan["memory"]["notes"]]
