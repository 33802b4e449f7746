"""What the wheel holds: the code, the settings and the type marker, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, since a build leaves `build/` in the folder that it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("pcgsvc", "conf", "tests", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps"]
    built = subprocess.run(
        [*command, "--no-build-isolation", "-w", str(out), "."],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def _tree(folder: str, pattern: str, into: str) -> set[str]:
    return {f"{into}/{p.relative_to(ROOT / folder)}" for p in (ROOT / folder).rglob(pattern)}


def test_wheel_holds_every_module_and_every_settings_file_and_nothing_else(wheel: Path) -> None:
    modules = _tree("pcgsvc", "*.py", "pcgsvc")
    settings = _tree("conf", "*.yaml", "pcgsvc/conf") | {"pcgsvc/conf/__init__.py"}
    assert "pcgsvc/conf/config.yaml" in settings
    configs = _tree("pcgsvc", "models/hf/configs/*.json", "pcgsvc")
    assert "pcgsvc/models/hf/configs/tiny-qwen3.json" in configs
    assert _names(wheel) == modules | settings | configs | {
        "pcgsvc/py.typed",
        "pcgsvc/__init__.pyi",
    }


def test_unpacked_wheel_finds_its_settings_without_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = (
        "import importlib.resources as r, pcgsvc.version; "
        "print(r.files('pcgsvc.conf').joinpath('config.yaml').is_file(), pcgsvc.version.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", str(site / "pcgsvc" / "version.py")]
