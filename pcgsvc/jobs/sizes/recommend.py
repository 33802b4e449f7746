"""`job=sizes`: from a traffic file to a curve, a recommendation and a picture.

In: a config with `traffic`. Out: a table, and `sizes.json` and `sizes.png` in the output folder.
Builds no model.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from pcgsvc.config import Config
from pcgsvc.report.plots import has_matplotlib, not_drawn
from pcgsvc.report.report import write_report
from pcgsvc.report.sizes_plot import draw_sizes
from pcgsvc.report.sizes_table import show_sizes
from pcgsvc.report.tables import show_place
from pcgsvc.sizing.auto import plan_for, with_sizes

logger = logging.getLogger(__name__)


def sizes_job(config: Config, report_path: Path, out: Console) -> None:
    """Choose capture sizes for `config.traffic`; those that are set are judged beside them.

    Args:
        config: as composed.
        report_path: where `report` points, or `report.json` in the output folder.
        out: where the table goes.

    Raises:
        ConfigError: a file cannot be used.
    """
    named = with_sizes(config)[0].capture.sizes
    plan = plan_for(config, {"capture.sizes": named} if isinstance(named, list) else {})
    path = report_path if config.report is not None else report_path.with_name("sizes.json")
    picture = path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    warnings = []
    if has_matplotlib():
        draw_sizes(plan, picture)
    else:
        warnings.append(not_drawn(picture.name))
        logger.warning("%s", warnings[0])
    write_report({**plan.as_json(), "warnings": warnings}, path)
    show_sizes(out, plan)
    show_place(out, path.absolute())
    if not warnings:
        show_place(out, picture.absolute(), "picture")
