"""Facts -> key. Facts are a flat, readable dict, hashed whole and stored beside what they name.

In: a config and facts that others have gathered. Out: hex keys. Imports no stage.

Every setting counts unless it stands in `NOT_IN_KEY`, and every fact counts. Not among them: paths,
host names, process ids, times, ports and the values of weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pcgsvc.config import Config, to_dict
from pcgsvc.config.settings import key_reason
from pcgsvc.version import __version__

FORMAT = 7
"""Counts up when what is stored changes its meaning."""


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the hex sha256 of facts of JSON types; the order of names does not matter."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def config_facts(config: Config) -> dict[str, Any]:
    """Return every setting that counts, as `config.<dotted name>`."""
    settings = flatten(to_dict(config)).items()
    return {f"config.{name}": value for name, value in settings if key_reason(name) is None}


def version_facts() -> dict[str, Any]:
    """Return what stored entries depend on of this package."""
    return {"pcgsvc": __version__, "format": FORMAT}


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names; lists stay whole."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out
