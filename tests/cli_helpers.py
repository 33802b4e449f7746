"""The command line, called in this process; Hydra's and logging's global state is put back."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.singleton import Singleton
from model_helpers import config_of

from pcgsvc.jobs.app import main
from pcgsvc.jobs.run import run_job as job

TINY = ["model.num_layers=1", "compiler=eager", "capture.sizes=[1,2]"]
TINY += ["bench.enabled=false", "cache.prove=false"]


@dataclass
class Done:
    """What a command line left behind."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def files(self) -> list[Path]:
        return sorted(p for p in self.folder.rglob("*") if p.is_file())

    @property
    def reports(self) -> list[dict[str, Any]]:
        found = [p for p in self.files if p.name == "report.json"]
        return [json.loads(p.read_text()) for p in found]


Cli = Callable[..., Done]


@contextlib.contextmanager
def host_state_kept() -> Iterator[Callable[[Sequence[str]], int]]:
    """Yield a call of `main`; put back the state of Hydra, logging and torch's threads."""
    singletons, root = copy.copy(Singleton.get_state()), logging.getLogger()
    handlers, level, threads = list(root.handlers), root.level, torch.get_num_threads()
    torch.set_num_threads(1)

    def run(argv: Sequence[str]) -> int:
        code = main(argv)
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
            handler.close()
        return code

    yield run
    torch.set_num_threads(threads)
    root.setLevel(level)
    root.handlers[:] = handlers
    Singleton.set_state(singletons)


@contextlib.contextmanager
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Yield a call of `main` in an empty folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with host_state_kept() as run:

        def call(*argv: str) -> Done:
            code = run(argv)
            captured = capsys.readouterr()
            return Done(code, captured.out, captured.err, folder)

        yield call


def run_job(words: list[str], folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the job of a command line, without Hydra's folders; return its report."""
    patch.chdir(folder)
    return job(config_of(words), folder / "report.json")
