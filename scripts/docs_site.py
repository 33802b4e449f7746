"""What mkdocs calls while it builds: writes the page of all settings from the config classes.

In: `pcgsvc.config.schema` and `conf/`. Out: `settings.md`, in the site only.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from pcgsvc.config import Config
from pcgsvc.config.settings import Setting, key_reason, unit_of, walk, word_of

CONF = Path(__file__).parents[1] / "conf"
_INTRO = """\
# Settings

Every setting with its default, meaning, unit and limit. `null` is "left open": pcgsvc chooses, as
the text says. The same on the command line: `pcgsvc --help-all`; what a setting is and who set it:
`pcgsvc job=config config.explain=capture.max_size`.

All settings are `name=value` on the command line, keyword arguments of `pcgsvc.compile` and
`pcgsvc.load` (`capture={"max_size": 32}`), or lines of a YAML file.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files


def settings_page() -> str:
    """Return the page as Markdown."""
    by_group = itertools.groupby(walk(), key=lambda s: s.path.rpartition(".")[0])
    sections: dict[str, list[Setting]] = {}
    for group, settings in by_group:
        sections.setdefault(group, []).extend(settings)
    top = sections.pop("")
    parts = [_INTRO, _groups(), "## The job\n", *map(_entry, top)]
    for group, settings in sections.items():
        parts += [f"## {group}\n", f"{_meaning(group)}\n", *map(_entry, settings)]
    return "\n".join(parts)


def _groups() -> str:
    """Return the files that pick values for several settings at once."""
    rows = [
        "## Groups\n",
        "`group=choice` takes a file of values.\n",
        "| choice | is |",
        "|---|---|",
    ]
    for path in sorted(CONF.glob("*/*.yaml")):
        comment = itertools.takewhile(
            lambda line: line.startswith("#"),
            (li for li in path.read_text().splitlines() if not li.startswith("# @")),
        )
        text = " ".join(line.removeprefix("#").strip() for line in comment)
        values = yaml.safe_load(path.read_text()) or {}
        shown = text or ", ".join(f"`{k}: {word_of(v)}`" for k, v in values.items())
        rows.append(f"| `{path.parent.name}={path.stem}` | {shown} |")
    return "\n".join(rows) + "\n"


def _meaning(group: str) -> str:
    """Return what a group of settings is about: its class's docstring."""
    owner: Any = Config()
    for name in group.split("."):
        owner = getattr(owner, name)
    assert dataclasses.is_dataclass(owner)
    return inspect.cleandoc(owner.__doc__ or "")


def _entry(setting: Setting) -> str:
    """Return one setting as an item of a definition list."""
    reason = key_reason(setting.path)
    key = "in the cache key" if reason is None else f"not in the cache key: {reason}"
    head = f"`{setting.path}` = `{word_of(setting.default)}` {{: #{setting.path} }}"
    return f"{head}\n:   {setting.doc}\n\n    *{unit_of(setting)}; {key}*\n"
