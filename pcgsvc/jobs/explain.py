"""`job=config`: what a setting means, its value, what set it, and whether it is in cache keys.

In: overrides as on the command line. Out: text on a console; nothing is written.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pcgsvc.config.settings import Setting, key_reason, unit_of, walk, word_of
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.origins import Origin, compose_with_origins
from pcgsvc.report.tables import show_rows


def explain(
    overrides: Sequence[str],
    out: Console,
    *,
    config_dir: str | None = None,
    config_name: str = "config",
) -> None:
    """Print what `config.explain` names: one setting in full, a group or all of them as a table.

    Raises:
        ConfigError: no setting and no group has that name; the message names near ones.
    """
    config, origins = compose_with_origins(
        overrides, config_dir=config_dir, config_name=config_name
    )
    name = config.config.explain
    settings = list(walk())
    chosen = [s for s in settings if name is None or f"{s.path}.".startswith(f"{name}.")]
    if not chosen:
        raise ConfigError(_unknown(str(name), [s.path for s in settings]))
    if chosen[0].path == name:
        _full(out, chosen[0], origins[name])
    else:
        _table(out, chosen, origins)


def _unknown(name: str, paths: Sequence[str]) -> str:
    """Return the message for an unknown name: near names, by their last part as well."""
    groups = sorted({p.rpartition(".")[0] for p in paths} - {""})
    ends = dict.fromkeys(p.rpartition(".")[2] for p in paths)
    alike = difflib.get_close_matches(name.rpartition(".")[2], ends, n=3)
    near = [p for end in alike for p in paths if p.rpartition(".")[2] == end]
    near += difflib.get_close_matches(name, [*paths, *groups], n=4)
    meant = list(dict.fromkeys(near))[:3]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else "."
    return (
        f"config.explain: got {name!r}, which is no setting and no group{hint} "
        f"Groups: {', '.join(groups)}; without config.explain all settings are listed."
    )


def _full(out: Console, setting: Setting, origin: Origin) -> None:
    """Print one setting in full."""
    reason, unset = key_reason(setting.path), setting.default is None
    rows = {
        "meaning": setting.doc,
        "unit": unit_of(setting),
        "default": "null: chosen by pcgsvc, or left out" if unset else _value(setting.default),
        "value": _value(origin.value),
        "set by": origin.set_by,
        "cache key": "in it" if reason is None else f"not in it: {reason}",
    }
    out.print(f"[bold]{setting.path}[/]")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=11, style="bold")
    grid.add_column()
    for label, text in rows.items():
        grid.add_row(f"  {label}", escape(text))
    out.print(grid)


def _value(value: Any) -> str:
    if value is None:
        return "null (worked out while building, or not used)"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return word_of(value)


def _table(out: Console, settings: Sequence[Setting], origins: dict[str, Origin]) -> None:
    """Print one row per setting."""
    rows = []
    for setting in settings:
        origin = origins[setting.path]
        value = "null" if origin.value is None else _value(origin.value)
        known = "yes" if key_reason(setting.path) is None else "no"
        row = {"setting": setting.path, "value": value, "set by": origin.set_by, "in key": known}
        rows.append(row)
    show_rows(out, rows)
    out.print("job=config config.explain=SETTING explains one in full", style="dim")
