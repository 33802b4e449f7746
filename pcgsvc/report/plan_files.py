"""The files of a plan beside its report: a picture, and a page with everything in it.

In: a report with its `plan`. Out: `plan.svg` and `plan.html`. Knows nothing of how they look.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from pcgsvc.report.plan_html import plan_html
from pcgsvc.report.plan_svg import plan_svg


def draw_plan(report: dict[str, Any], path: Path) -> None:
    """Write the files beside the report and note their places in it.

    Args:
        report: with `plan`; gets `plan.files`.
        path: of the report. `report.json` has `plan.svg` and `plan.html` beside it, `NAME.json`
            has `NAME.svg` and `NAME.html`.
    """
    stem = "plan" if path.stem == "report" else path.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {"html": path.with_name(f"{stem}.html")}
    files["html"].write_text(plan_html(report))
    if picture_problem() is None:
        files["svg"] = path.with_name(f"{stem}.svg")
        files["svg"].write_text(plan_svg(report))
    report["plan"]["files"] = {kind: str(place) for kind, place in files.items()}


def picture_problem() -> str | None:
    """Return why no picture can be drawn, or None."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return "plan.svg is not drawn: matplotlib is missing; pip install matplotlib"
