"""Nested plain dicts <-> the settings' dataclasses.

In: a tree of dicts. Out: a `Config`, or an error that names the setting. Knows no limits.
"""

from __future__ import annotations

import enum
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

from pcgsvc.config.choices import Form, Objective
from pcgsvc.config.schema import AUTO, Config
from pcgsvc.errors import ConfigError, near

T = TypeVar("T")

_REMOVED = {"capture.policy": "it had one value and was never read; remove it"}
"""Settings that there were, with what to do where they still stand."""
_BYTES = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Build a `Config` from nested plain dicts; what is left out keeps its default.

    Raises:
        ConfigError: an unknown name, a value of the wrong kind, or a choice that does not exist;
            the message names the setting by its dotted path. `validate` checks ranges.
    """
    return _dataclass(Config, tree, "")


def updated(group: T, changes: Mapping[str, Any]) -> T:
    """Return a copy of a dataclass of settings with some replaced; nested groups are updated.

    Raises:
        ConfigError: as `from_dict`; `group` is a `Config`.
    """
    tree = _merged(group, changes)
    return _dataclass(type(group), tree, "")


def _merged(group: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    tree = {f.name: getattr(group, f.name) for f in fields(group)}
    for name, value in changes.items():
        old = tree.get(name)
        nested = is_dataclass(old) and isinstance(value, Mapping)
        tree[name] = _merged(old, value) if nested else value
    return tree


def to_dict(config: Any) -> dict[str, Any]:
    """Return nested plain dicts of JSON types (enum members by their word)."""
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            out[f.name] = to_dict(value)
        elif isinstance(value, enum.Enum):
            out[f.name] = value.value
        elif isinstance(value, list):
            out[f.name] = [v.value if isinstance(v, enum.Enum) else v for v in value]
        else:
            out[f.name] = value
    return out


def unknown_setting(path: str) -> str:
    """Return the message for a dotted name that no setting has, or has any more."""
    tree, group = to_dict(Config()), ""
    for name in path.split(".")[:-1]:
        if not isinstance(tree.get(name), dict):
            break
        tree, group = tree[name], f"{group}.{name}".lstrip(".")
    last = path.rpartition(".")[2]
    choices = [f"{group}.{name}".lstrip(".") for name in tree]
    elsewhere = [f"{k}.{last}" for k, v in to_dict(Config()).items() if last in _names(v)]
    is_near = near(last, tree) != "."  # the group's name alone makes no likeness
    hint = near(path, choices) if is_near else "."
    if elsewhere:
        hint = f"; did you mean {' or '.join(elsewhere)}?"
    if path in _REMOVED:
        hint = f"; {_REMOVED[path]}."
    return (
        f"{path}: there is no such setting{hint} "
        f"Settings {'of ' + group if group else 'at the top'}: {', '.join(tree)}."
    )


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _dataclass(cls: type[T], tree: Any, path: str) -> T:
    if is_dataclass(tree):
        tree = to_dict(tree)
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{path}: got {tree!r}, a group of settings is needed here{_meant(cls, tree, path)} "
            f"Settings of {path}: {', '.join(f.name for f in fields(cls))}."  # type: ignore[arg-type]
        )
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for name in tree:
        if name not in names:
            raise ConfigError(unknown_setting(f"{path}.{name}".lstrip(".")))
    values = {
        name: _value(hints[name], value, f"{path}.{name}".lstrip("."))
        for name, value in tree.items()
    }
    return cls(**values)


def _meant(cls: type[Any], value: Any, path: str) -> str:
    """Return the setting of a group that was probably meant by a word in the group's place."""
    word = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    for name, hint in typing.get_type_hints(cls).items():
        kinds = [hint, *typing.get_args(hint)]
        if bool in kinds and name == "enabled" and word in ("on", "off", "true", "false"):
            return f"; did you mean {path}.{name}={str(word in ('on', 'true')).lower()}?"
        for kind in kinds:
            is_choice = isinstance(kind, type) and issubclass(kind, enum.Enum)
            if is_choice and word in [member.value for member in kind]:
                return f"; did you mean {path}.{name}={word}?"
    return "."


def _value(hint: Any, value: Any, path: str) -> Any:
    """Convert one value to the annotated type, or say what is wrong with it."""
    if hint is Any:
        return value
    if typing.get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = [a for a in typing.get_args(hint) if a is not type(None)]
    if typing.get_origin(hint) is Annotated:
        hint, *marks = typing.get_args(hint)
        for form in marks:
            if isinstance(form, Form):
                return _FORMS[form](value, path)
    if is_dataclass(hint):
        return _dataclass(typing.cast(Any, hint), value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice(hint, value, path)
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path}: got {value!r}, a list is needed, such as '[a,b]'.")
        return [_value(item, v, f"{path}[{i}]") for i, v in enumerate(value)]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: got {value!r}, a mapping is needed, such as '{{a: 1}}'.")
        return dict(value)
    return _scalar(hint, value, path)


def _choice(hint: type[enum.Enum], value: Any, path: str) -> enum.Enum:
    if isinstance(value, hint):
        return value
    words = [m.value for m in hint]
    if value is False and "off" in words:  # YAML 1.1 reads an unquoted `off` as false
        value = "off"
    if value not in words:
        raise ConfigError(
            f"{path}: got {value!r}{near(str(value), words)} Choices: {', '.join(words)}."
        )
    return hint(value)


def _scalar(hint: type, value: Any, path: str) -> Any:
    if hint is float and type(value) is int:
        value = float(value)
    if hint is str and isinstance(value, Path):
        value = str(value)
    if type(value) is not hint:
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
        quoted = f"; write {path}='\"{value}\"'" if hint is str and value is not None else ""
        raise ConfigError(f"{path}: got {value!r}, {kind} is needed{quoted}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: got {value!r}, a finite number is needed.")
    return value


def _bytes(value: Any, path: str) -> int:
    if not isinstance(value, str):
        return int(_scalar(int, value, path))
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = (match.group(2) or "B").lower() if match else ""
    if not match or unit not in _BYTES:
        raise ConfigError(
            f"{path}: got {value!r}, bytes are needed, such as 268435456 or '256MiB'."
        )
    return int(float(match.group(1)) * _BYTES[unit])


def _auto_or_sizes(value: Any, path: str) -> list[int] | str:
    """Read what `_sizes` reads, or `auto:FILE`, whose file is read when the config is used."""
    if not isinstance(value, str) or not value.strip().startswith(AUTO):
        return _sizes(value, path)
    file = value.strip().removeprefix(AUTO).strip()
    if not file:
        raise ConfigError(f"{path}: got {value!r}, a traffic file is needed: auto:traffic.csv.")
    return f"{AUTO}{file}"


def _sizes(value: Any, path: str) -> list[int]:
    """Read a list, `"1,2,4"` or `"1:64:8"`."""
    help_ = (
        "a list such as '[1,2,4]', auto:FILE, or the string '\"1:64:8\"' (quoted: YAML reads "
        "1:64:8 as a time)"
    )
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"\d+:\d+:\d+", text):
            start, stop, step = (int(p) for p in text.split(":"))
            if not 1 <= start <= stop or step < 1:
                raise ConfigError(
                    f"{path}: got {value!r}; start:stop:step needs 1 <= start <= stop, step >= 1."
                )
            return sorted({start, *range(step, stop + 1, step), stop} - set(range(start)))
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
            return [int(p) for p in text.split(",")]
        raise ConfigError(f"{path}: got {value!r}, {help_} is needed.")
    if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
        # An unquoted 1:64:8 in a YAML file arrives here as the number 7448.
        raise ConfigError(f"{path}: got {value!r}, {help_} is needed.")
    return list(value)


def _objectives(value: Any, path: str) -> list[enum.Enum]:
    """Read a word or a list of words, each once."""
    found = [
        _choice(Objective, word, path) for word in (value if isinstance(value, list) else [value])
    ]
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{path}: got {value!r}; name one or several, each once.")
    return found


_FORMS: dict[Form, Callable[[Any, str], Any]] = {
    Form.BYTES: _bytes,
    Form.SIZES: _sizes,
    Form.SIZES_OR_FILE: _auto_or_sizes,
    Form.OBJECTIVES: _objectives,
}
"""What reads each form, given the value and the setting's path."""


def copy(config: Config) -> Config:
    """Return a deep copy, so that a resolved config never shares lists with its source."""
    return from_dict(to_dict(config))
