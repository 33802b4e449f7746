"""`job=compile`: fill the disk cache, and prove that a start finds there what it needs.

In: a config. Out: the report of what was stored, or a `CacheError` that says why it was not.
Captures nothing.
"""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from pcgsvc.config import CacheMode, Config, from_dict, to_dict
from pcgsvc.errors import PcgError
from pcgsvc.events import Phases, Progress
from pcgsvc.models.request import request_of
from pcgsvc.ops.expert_group import uses_group
from pcgsvc.pipeline import compile_only

logger = logging.getLogger(__name__)

_FRESH = """
import json, sys
task = json.load(sys.stdin)
sys.path[:] = task["path"]
from pcgsvc.jobs.compile import load_again
sys.exit(load_again(task["config"]))
"""
"""What a fresh process runs, with this one's working directory and environment."""


def compile_and_prove(config: Config, progress: Progress) -> dict[str, Any]:
    """Compile, store, and load in a fresh process what was stored.

    Returns:
        The report; `problem_of` reads from it whether the cache is filled.
    """
    report = compile_only(request_of(config, progress), progress)
    cache = report["cache"]
    if not config.cache.prove or report["compile"]["start"] == "warm" or not cache["stored"]:
        return report  # what was loaded was in this fresh process
    if uses_group(config):
        words = "cache.prove: one process alone cannot load what shares experts with others"
        logger.warning("%s", words)
        report["warnings"].append(words)
        return report
    with Phases(progress).phase("prove"):
        cache["proof"] = _prove(config)
    return report


def problem_of(report: dict[str, Any]) -> str | None:
    """Return why the next start would not be warm; None: it would."""
    cache, start = report["cache"], report["compile"]["start"]
    if cache["mode"] == CacheMode.READ.value and start != "warm":
        return f"cache.mode=read, and it was not all stored: {'; '.join(cache['miss_reasons'])}"
    if not cache["stored"]:
        return f"nothing was stored: {'; '.join(cache['not_stored'])}"
    if not cache.get("proof", {"ok": True})["ok"]:
        return f"a fresh process could not load what was stored: {cache['proof']['reason']}"
    return None


def _prove(config: Config) -> dict[str, Any]:
    """Load the program in a fresh process, which also compares it as a start does."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the model of this process is gone; the next one needs the room
    task = {"path": sys.path, "config": to_dict(config)}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-c", _FRESH], input=json.dumps(task), capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode == 0:
        return {"ok": True, "seconds": seconds, "reason": None}
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    reason = f"exit code {done.returncode}: {last}"
    return {"ok": False, "seconds": seconds, "reason": reason}


def load_again(tree: Mapping[str, Any]) -> int | str:
    """Load what is stored for a config, as plain dicts; return 0 or what went wrong, in a line."""
    config = from_dict(tree)
    config.cache = replace(config.cache, mode=CacheMode.READ, require_warm=True, remote=None)
    try:
        compile_only(request_of(config))
    except PcgError as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return 0
