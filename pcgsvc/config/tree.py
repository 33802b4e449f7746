"""Settings as a tree that came from outside, and the messages of what composed it.

In: a mapping, in which there may be OmegaConf's nodes. Out: a `Config`. Imports neither Hydra nor
OmegaConf, which a program that gives its settings as Python values does without.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pcgsvc.config.choices import Job
from pcgsvc.config.parse import from_dict, unknown_setting
from pcgsvc.config.schema import Config
from pcgsvc.errors import ConfigError, near


def from_tree(tree: Any) -> Config:
    """Convert what Hydra composed, or any mapping (OmegaConf's nodes in it resolved).

    Hydra's own node is left out: its resolvers work only while Hydra itself runs.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"config: got {type(tree).__name__}; a Config, a mapping or a DictConfig is needed."
        )
    with readable():
        values = {str(key): plain(tree[key]) for key in tree if key != "hydra"}
    return from_dict(values)


def plain(value: Any) -> Any:
    """Return a value with all of OmegaConf's nodes in it resolved; the value itself stays."""
    omegaconf: Any = sys.modules.get("omegaconf")  # where it is not imported, nothing is a node
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


# ---- Hydra's messages ----------------------------------------------------------------------------


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turn whatever Hydra and OmegaConf raise for bad input into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    # Bad input raises yaml's errors, AssertionError, AttributeError and ValueError, too.
    except Exception as error:
        raise ConfigError(words_of(error)) from error


_BAD_SYNTAX = ("mismatched input", "extraneous input", "LexerNoViable", "no viable alternative")
"""In the messages of Hydra's parser."""


def words_of(error: BaseException) -> str:
    """Return the message of Hydra's or OmegaConf's error, with what was probably meant."""
    text = str(error).strip() or type(error).__name__
    cause = error.__cause__
    if cause is not None and str(cause).strip() not in text:
        text = f"{text}\n{cause}"
    first = text.split("\n", 1)[0]
    if first.startswith("Could not override '"):
        key = first.split("'")[1]
        if not key.startswith("hydra."):  # "use +key" would be refused as well
            return unknown_setting(key)
    text = text.partition("Config search path:")[0]
    lines = [s for s in text.splitlines() if s.strip() and "object_type=" not in s]
    if "Ambiguous value" in text:
        lines = [
            first,
            "Write a list as capture.sizes='[1,2,4]' and text with a comma as "
            "prompt='\"one, two\"', or add -m to sweep.",
        ]
    elif "missing EQUAL" in text:
        word = first.partition("'")[2].rstrip("'")
        meant = f"; did you mean job={word}?" if word in {job.value for job in Job} else "."
        lines = [f"{word}: a setting is written name=value{meant} pcgsvc -h shows them."]
    elif "Could not find '" in text and "Available options in '" in text:
        group, _, name = text.split("Could not find '")[1].split("'")[0].rpartition("/")
        choices = text.partition("Available options in")[2].split()[1:]
        lines = [f"{group}: got {name!r}{near(name, choices)} Choices: {', '.join(choices)}."]
    elif any(w in text for w in _BAD_SYNTAX):
        lines.append(
            "Quote lists and special characters for the shell, and text for Hydra as well: "
            "capture.sizes='[1,2,4]', prompt='\"one, two\"'."
        )
    elif "Unsupported interpolation type hydra" in text or "HydraConfig was not set" in text:
        lines.append("${hydra:…} is known only while a job runs; the report is in its folder.")
    return "\n".join(lines)
