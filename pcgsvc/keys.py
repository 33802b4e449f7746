"""Facts -> key. Facts are a flat, readable dict, hashed whole and stored beside what they name.

In: a config and facts that others have gathered. Out: hex keys. Imports no stage; knows nothing of
graphs or of where entries lie.

Every setting counts unless it stands in `NOT_IN_KEY`, and every fact counts. Not among them: paths,
host names, process ids, times, ports and the values of weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pcgsvc.config import Config, to_dict
from pcgsvc.version import __version__

FORMAT = 1
"""Counts up when what is stored changes its meaning."""

NOT_IN_KEY: dict[str, str] = {
    "model.name": "the module's classes, tensors and sources are facts themselves",
    "model.preset": "as model.name: it only chooses dimensions, which show in the tensors",
    "model.weights": "a path; values of weights are no part of a compiled artifact",
    "model.path": "as model.weights; the config that lies there is a fact itself",
    "model.config": "a name or a path; what it says is a fact itself",
    "model.reference_check": "looking at the model changes nothing that is compiled",
    "attention": "backends run in the boundaries, which are not compiled; their schema is a fact",
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
}
"""Settings (or whole groups) that cannot change a compiled artifact, each with the reason."""


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the hex sha256 of facts of JSON types; the order of names does not matter."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def config_facts(config: Config) -> dict[str, Any]:
    """Return every setting that counts, as `config.<dotted name>`."""
    return {
        f"config.{name}": value for name, value in _flat(to_dict(config), "") if not _ignored(name)
    }


def version_facts() -> dict[str, Any]:
    """Return what stored entries depend on of this package."""
    return {"pcgsvc": __version__, "format": FORMAT}


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{dotted}.")
        else:
            found.append((dotted, value))
    return found


def _ignored(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[: n + 1]) in NOT_IN_KEY for n in range(len(parts)))
