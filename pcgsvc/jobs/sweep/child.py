"""The process of one isolated job of a sweep; started by `isolate.py` as a script.

In: a task as JSON on standard input, and the number of a pipe. Out: the job's outcome as JSON on
that pipe, and its exit code. Imports nothing of pcgsvc before the task has brought the import path.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: which signal comes when the parent dies."""
_INTERRUPTED = 130
_MOST = 4_000
"""Characters of a reason: 48 KiB at worst as JSON, of the 64 KiB that an unread pipe takes."""


def main() -> int:
    """Do the job that stands on standard input."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    faulthandler.enable()  # a segmentation fault shows where
    task = json.load(sys.stdin)
    _die_with(task["parent"])
    sys.path[:] = task["path"]
    try:
        outcome = _perform(task)
    except KeyboardInterrupt:
        return _INTERRUPTED
    os.write(channel, json.dumps(outcome).encode())
    return int(outcome["code"])


def _die_with(parent: int) -> None:
    """Be killed when the sweep is, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has been already
        sys.exit(_INTERRUPTED)


def _perform(task: dict[str, Any]) -> dict[str, Any]:
    from hydra.core.utils import configure_log
    from omegaconf import OmegaConf

    from pcgsvc.config import from_dict
    from pcgsvc.jobs.sweep.outcome import perform

    logging.raiseExceptions = False  # a full disk must not fill the output with tracebacks
    configure_log(OmegaConf.create(task["logging"]), task["verbose"])
    config, path = from_dict(task["config"]), Path(task["report"])
    outcome = perform(config, path, verbose=bool(task["verbose"]))
    reason = outcome.reason and outcome.reason[:_MOST]
    return {"code": outcome.code, "reason": reason, "report": outcome.report}


if __name__ == "__main__":
    sys.exit(main())
