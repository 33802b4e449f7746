"""A walk over every setting: its path, kind, default and meaning.

In: the dataclasses of `schema` and their source text, which documents each field. Out: one
`Setting` each, and the text of `--help`. Knows nothing of Hydra.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pcgsvc.config.schema import Config


@dataclass(frozen=True)
class Setting:
    """One setting, as `--help` and `job=config` show it."""

    path: str
    """Dotted, as on the command line."""
    kind: Any
    """The annotation, without `| None`; of several kinds the first."""
    default: Any
    """Its own default; an enum's word."""
    doc: str
    """Meaning, unit and limit, in one line."""
    choices: tuple[str, ...]
    """The words that an enum setting takes."""


def walk(cls: type[Any] = Config, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting below a dataclass, groups unfolded, in the order of the source."""
    hints, docs, unset = typing.get_type_hints(cls), _docs(cls), cls()
    for field in dataclasses.fields(cls):
        kind = _without_none(hints[field.name])
        path = prefix + field.name
        if dataclasses.is_dataclass(kind):
            yield from walk(typing.cast(type[Any], kind), f"{path}.")
            continue
        default = getattr(unset, field.name)
        item = next(iter(typing.get_args(kind)), kind)  # of a list, what is in it
        is_enum = isinstance(item, type) and issubclass(item, enum.Enum)
        yield Setting(
            path=path,
            kind=kind,
            default=default.value if isinstance(default, enum.Enum) else default,
            doc=docs.get(field.name, ""),
            choices=tuple(m.value for m in item) if is_enum else (),
        )


_UNITS = ("tokens", "bytes", "seconds", "features")


def unit_of(setting: Setting) -> str:
    """Return the unit of a setting's value, or what kind of value it is where it has none."""
    kind = typing.get_origin(setting.kind) or setting.kind
    if setting.choices:
        return f"one of: {', '.join(setting.choices)}"
    if kind is bool:
        return "true or false"
    if kind in (list, dict):
        of = " of tokens" if "in tokens" in setting.doc or "sizes" in setting.path else ""
        return f"a list{of}" if kind is list else "names with values"
    if kind is str:
        return "text"
    words = setting.doc.lower()
    found = [u for u in _UNITS if f"in {u}" in words or words.startswith((f"{u} ", f"most {u} "))]
    if found:
        return found[0]
    return "a count" if kind is int else "a number"


def key_reason(path: str) -> str | None:
    """Return why a setting is left out of cache keys; None: it is in them."""
    parts = path.split(".")
    names = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return next((NOT_IN_KEY[name] for name in names if name in NOT_IN_KEY), None)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    kind, *_ = [a for a in typing.get_args(hint) if a is not type(None)]
    return kind


def _docs(cls: type[Any]) -> dict[str, str]:
    """Return the string under each field of a dataclass, which only the source has."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[node.target.id] = " ".join(text.value.split())
    return found


# ---- --help --------------------------------------------------------------------------------------

_SHORT_HELP = """\
pcgsvc: piecewise CUDA graphs for PyTorch.

  pcgsvc model=llama                            build, verify, time, report
  pcgsvc model=smollm2 prompt='Name a colour.'  answer a prompt
  pcgsvc model=module model.target=FILE.py:Net  a model of your own
  pcgsvc -m capture.sizes='[1,2],[1,2,4,8]'     one job per value, one table
  pcgsvc --config-dir DIR model=mine            with your DIR/model/mine.yaml

What to do (job=...):

  run       build, verify, time and report; what is done without job=
  plan      show where it would be split, and the memory, building nothing
  doctor    find what would not work on this machine or with this model
  verify    compare every mode and strategy with plain execution
  compile   fill the disk cache and prove that a fresh process loads it
  cache     cache.action=ls, explain, check, clear, export, push …
  sizes     choose capture sizes for traffic=FILE
  compare   one table of compare.reports='[DIR]'
  config    show what set each value (config.explain=capture)

Groups (YAML files that pick values):

{groups}

Settings most used (all, with defaults: pcgsvc --help-all):

  mode=full_and_piecewise | piecewise | full | full_decode_only | none
  partition.strategy=fx | inductor | breakable
  capture.sizes='[1,2,4]' or '"1:64:8"'    rows that graphs are captured for
  device=auto | cpu | cuda    dtype=bfloat16    model.weights=FILE
  cache.dir=DIR    cache.mode=readwrite | read | off | refresh
  strict=true    what is not done as asked is an error
  report=FILE    bench.enabled=false    hydra.verbose='[pcgsvc]'

Exit codes: 0 done, 1 the job failed (verification too), 2 bad configuration.
Hydra reads the command line; its own options: pcgsvc --hydra-help
"""

_SETTINGS = "All settings (name=default; null: left open); as composed: pcgsvc --cfg job"


def short_help(groups: dict[str, list[str]], *, wrap: bool = True) -> str:
    """Return what `-h` prints: what one starts with, at most 45 lines of 80 columns.

    `wrap`: groups with many options take several lines.
    """
    lines = [f"  {name}={' | '.join(options)}" for name, options in groups.items()]
    if wrap:
        lines = [textwrap.fill(line, 80, subsequent_indent=" " * 6) for line in lines]
    return _SHORT_HELP.format(groups="\n".join(lines))


def help_text(groups: dict[str, list[str]], width: int) -> str:
    """Return what `--help-all` prints, at most `width` columns wide."""
    blocks = []
    for setting in walk():
        text = setting.doc
        if setting.choices:
            text += f" Choices: {', '.join(setting.choices)}."
        indent = " " * 6
        wrapped = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)
        blocks.append(f"  {setting.path}={word_of(setting.default)}\n{wrapped}")
    settings = "\n".join(blocks)
    return f"{short_help(groups, wrap=False)}\n{_SETTINGS}\n\n{settings}\n"


def word_of(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


NOT_IN_KEY: dict[str, str] = {
    "model.name": "the module's classes, tensors and sources are facts themselves",
    "model.preset": "as model.name: it only chooses dimensions, which show in the tensors",
    "model.weights": "a path; values of weights are no part of a compiled artifact",
    "model.path": "as model.weights; the config in it is a fact itself",
    "model.config": "a name or a path; its content is a fact itself",
    "model.reference_check": "looking at the model changes nothing that is compiled",
    "attention": "backends run in the boundaries, which are not compiled; their schema is a fact",
    "parallel.tensor": "a process's share shows in its tensors, its group in what tracing read",
    "parallel.timeout_s": "how long a process waits, not what is compiled",
    "compiler.threads": "how many processes compile, not what they make",
    "mode": "which graphs are captured, not what is compiled",
    "capture": "which graphs are captured, not what is compiled",
    "cache": "where things are stored",
    "debug": "looking inside changes nothing that is computed",
    "bench": "timing of what was built",
    "sweep": "which process a job runs in",
    "compare": "which reports are read",
    "config": "what is printed of the settings",
    "sizing": "which sizes are captured, not what is compiled",
    "on_uncovered": "what a call does, not what is compiled",
    "outputs": "what a call does, not what is compiled",
    "device": "its type, class and capability are facts themselves",
    "seed": "values of weights and of verification inputs",
    "strict": "whether warnings are errors",
    "job": "what is done with the program",
    "prompt": "what is done with the program",
    "max_new_tokens": "what is done with the program",
    "traffic": "what is done with the program",
    "max_traffic_calls": "what is done with the program",
    "report": "a path",
    "user": "only what other settings make of it counts",
}
"""Settings (or whole groups) that cannot change a compiled artifact, each with the reason."""
