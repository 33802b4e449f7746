"""The command line and processes of their own against one cache root, for tests of warm starts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import host_state_kept

PACKAGE = Path(__file__).parent.parent
TINY = ["device=cpu", "model.num_layers=1", "capture.sizes=[1,2]"]
TINY += ["bench.enabled=false", "cache.prove=false"]


@dataclass
class Done:
    """What a command line left behind."""

    code: int
    out: str
    reports: list[dict[str, Any]]
    log: str

    @property
    def start(self) -> tuple[str, int, int]:
        """Start, traces and compiled pieces of the last report."""
        compiled = self.reports[-1]["compile"]
        return compiled["start"], compiled["num_traces"], compiled["num_compiled"]

    @property
    def reasons(self) -> str:
        return "; ".join(self.reports[-1]["cache"]["miss_reasons"])


WARM = ("warm", 0, 0)
Cli = Callable[..., Done]


@contextlib.contextmanager
def cache_command_line(
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Cli]:
    """Yield a call of `main` in a new folder each, with a tiny eager model and `root`."""
    with host_state_kept() as run:

        def call(*argv: str) -> Done:
            folder = tmp_path / f"cwd {len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            monkeypatch.chdir(folder)
            caplog.clear()
            flags = [word for word in argv if word.startswith("-")]
            words = [word for word in argv if not word.startswith("-")]
            code = run([*flags, *TINY, f"cache.dir={root}", *words])
            found = sorted(folder.rglob("report.json"))
            captured = capsys.readouterr()
            reports = [json.loads(p.read_text()) for p in found]
            return Done(code, captured.out + captured.err, reports, caplog.text)

        yield call


def in_process(
    code: str, argv: list[str], folder: Path, **environment: str
) -> subprocess.Popen[str]:
    """Start Python in a folder, with nothing of this process's environment but what it needs."""
    kept = {n: v for n, v in os.environ.items() if n in ("PATH", "LD_LIBRARY_PATH")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    with process:  # closes its pipe, however this ends
        try:
            out, _ = process.communicate(timeout=250)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, out
    return out


def home(folder: Path) -> dict[str, str]:
    """Make a home of somebody else's."""
    for name in ("home", "tmp", "cwd"):
        (folder / name).mkdir(parents=True)
    return {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "USER": "somebody"}


def listing(*folders: Path) -> set[str]:
    return {str(p) for folder in folders for p in folder.rglob("*")}


PLAIN = "import sys, torch; torch.set_num_threads(1); from pcgsvc.jobs.app import main\n" + (
    "sys.exit(main(sys.argv[1:]))"
)
