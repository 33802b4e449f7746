"""The Dockerfile's steps without docker: its commands, in a fresh folder and environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from service_helpers import free_port, wait_for  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "examples" / "service" / "Dockerfile"
NOT_HERE = ("useradd",)
"""Commands that need a container."""


def instructions() -> Iterator[tuple[str, str]]:
    """Yield the Dockerfile's instructions; it has no continued lines."""
    for line in DOCKERFILE.read_text().splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


class Build:
    """Follows the instructions: APP is a folder here, and each stage begins without it."""

    def __init__(self, app: Path, environment: dict[str, str]) -> None:
        self.app, self.built = app, app.with_name("built")
        self._outside, self.environment = environment, dict(environment)
        self.command: list[str] = []
        self.ran: list[str] = []

    def follow(self) -> None:
        for word, rest in instructions():
            getattr(self, f"_{word.lower()}")(rest)

    def _from(self, rest: str) -> None:
        self.environment = dict(self._outside)
        if self.app.exists():
            self.app.rename(self.built)

    def _env(self, rest: str) -> None:
        name, value = rest.split("=", 1)
        text = string.Template(value.strip('"')).substitute(self.environment)
        self.environment[name] = str(self.app) if name == "APP" else text

    _arg = _env

    def _workdir(self, rest: str) -> None:
        assert rest == "$APP"
        self.app.mkdir()

    def _copy(self, rest: str) -> None:
        *options, source, target = rest.split()
        there = Path(string.Template(target).substitute(self.environment))
        if source == ".":
            files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
            for name in files.rstrip("\0").split("\0"):
                (there / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, there / name)
            return
        assert "--from=build" in options
        shutil.copytree(self.built / source.removeprefix("$APP/"), there, symlinks=True)

    def _run(self, rest: str) -> None:
        if rest.startswith(NOT_HERE):
            return
        subprocess.run(["sh", "-ec", rest], env=self.environment, cwd=self.app, check=True)
        self.ran.append(rest)
        if " -m venv " in rest:  # what pip would fetch is taken from here
            (packages,) = self.app.glob("venv/lib/*/site-packages")
            here = [path for path in sys.path if path.endswith("site-packages")]
            (packages / "here.pth").write_text(f"import sys; sys.path[:0] = {here}\n")

    def _cmd(self, rest: str) -> None:
        self.command = json.loads(rest)

    def _user(self, rest: str) -> None:
        """Files are the test's own."""

    _expose = _user


@pytest.fixture
def build(tmp_path: Path) -> Build:
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    (tmp_path / "home").mkdir()
    build = Build(tmp_path / "srv", {"PATH": path, "HOME": str(tmp_path / "home"), **pip})
    build.follow()
    return build


def test_the_image_s_commands_give_a_service_that_starts_warm_without_a_compiler(
    build: Build, tmp_path: Path
) -> None:
    assert any("job=compile" in command for command in build.ran)
    assert not (build.app / "source").exists()
    path = build.environment["PATH"].split(":")[0]
    environment = {**build.environment, "PATH": path, "HOME": str(tmp_path / "home")}
    found = {name for name in ("gcc", "g++", "cc", "c++", "clang") if shutil.which(name, path=path)}
    assert not found
    port = free_port()
    command = ["127.0.0.1" if w == "0.0.0.0" else str(port) if w == "8000" else w
               for w in build.command]  # fmt: skip
    command[0] = str(Path(path) / command[0])
    before = {p for p in (build.app / "cache").rglob("*") if p.is_file()}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=build.app, stdout=log, stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        return False

    try:
        wait_for(is_ready, 600)
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": [5, 6, 7], "max_new_tokens": 3, "stream": False}
        assert len(httpx.post(f"{url}/generate", json=body, timeout=60).json()["tokens"]) == 3
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        assert re.search(r'pcgsvc_start_info\{[^}]*start="warm"\} 1', metrics)
        file = subprocess.check_output(
            [Path(path) / "python", "-c", "import pcgsvc; print(pcgsvc.__file__)"],
            env=environment,
            cwd=build.app,
            text=True,
        )
        assert file.startswith(str(build.app / "venv"))
    finally:
        process.terminate()
        process.wait()
    assert {p for p in (build.app / "cache").rglob("*") if p.is_file()} == before
    assert os.listdir(tmp_path / "home") == []
