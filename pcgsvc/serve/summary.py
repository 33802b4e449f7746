"""What `repr(runner)` says.

In: the report of a build. Out: five lines for a person. Knows nothing of graphs.
"""

from __future__ import annotations

from typing import Any

from pcgsvc.events import memory


def summary(model_name: str, report: dict[str, Any], *, is_closed: bool) -> str:
    """Return model, modes, sizes, graphs, and how the runner was started, a line each."""
    mode, graphs, compiled = report["mode"], report["graphs"], report["compile"]
    asked = "" if mode["requested"] == mode["resolved"] else f" ({mode['requested']} asked for)"
    skipped = f", {len(graphs['skipped'])} skipped" if graphs["skipped"] else ""
    serves = f": {mode['decode']} for decode batches, {mode['mixed']} for all others"
    if mode["decode"] == mode["mixed"]:
        serves = ", for all batches"
    held = f"{graphs['num_graphs']} {graphs['backend']}, {memory(graphs['pool_bytes'])}"
    if not graphs["num_graphs"]:
        held = "none"
    regions = "region" if compiled["num_compiled"] == 1 else "regions"
    made = f"{compiled['num_compiled']} {regions} compiled, {compiled['num_loaded']} loaded"
    return "\n".join(
        [
            f"pcgsvc.Runner of {model_name} on {report['device']}, {report['config']['dtype']}"
            + (", closed" if is_closed else ""),
            f"  modes: {mode['resolved']}{asked}{serves}",
            f"  sizes: {', '.join(map(str, graphs['sizes'])) or 'none'}{skipped}",
            f"  graphs: {held}",
            f"  start: {compiled['start']}, {made}, {compiled['seconds']['total']:.1f} s",
        ]
    )
