"""The files of a plan beside its report: a picture, and a page with everything in it.

In: a report with its `plan`. Out: `plan.svg` and `plan.html`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pcgsvc.report.plan_html import plan_html
from pcgsvc.report.plan_svg import plan_svg
from pcgsvc.report.plots import has_matplotlib, not_drawn


def draw_plan(report: dict[str, Any], path: Path) -> None:
    """Write the files beside the report and note their paths in it.

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
    return None if has_matplotlib() else not_drawn("plan.svg")
