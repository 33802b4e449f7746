"""What every test gets: its own cache directories, the GPU rule, and the report's schema.

Imports nothing of pcgsvc and no torch: a run that selects no GPU test does not wait for either.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from warm_helpers import Sources, Starter

    from pcgsvc import Runner

SCHEMA = Path(__file__).with_name("report.schema.json")
"""A copy of the contract's schema; the published report format changes only together with it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-gpu`."""
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, rather than skip, the tests marked gpu where there is no CUDA device",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a GPU test where there is no CUDA device, or fail it under `--require-gpu`."""
    if item.get_closest_marker("gpu") is None or _has_gpu():
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail("--require-gpu: torch sees no CUDA device here", pytrace=False)
    pytest.skip("needs a CUDA device")


@cache
def _has_gpu() -> bool:
    import torch  # here, so that only runs with GPU tests pay for it

    with warnings.catch_warnings():
        # A CUDA build without a usable driver warns; the answer is "no" all the same.
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


@pytest.fixture(scope="session")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's and Triton's own directories, one for the session.

    Not one per test: the first C++ compile in a directory precompiles a header for seconds.
    """
    return tmp_path_factory.mktemp("compiler-cache")


@pytest.fixture(autouse=True)
def clean_env(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, compiler_cache: Path
) -> Path:
    """Point every cache at a fresh folder and drop the caller's own pcgsvc and Hydra settings.

    PCGSVC_MODELS_DIR stays: weights lie there to be read, and no test writes them.

    Returns:
        The test's PCGSVC_CACHE_DIR: named, not made, and not inside the test's `tmp_path`.
    """
    for name in [n for n in os.environ if n.startswith(("PCGSVC_", "HYDRA_"))]:
        if name != "PCGSVC_MODELS_DIR":
            monkeypatch.delenv(name)
    root = tmp_path_factory.mktemp("env")
    monkeypatch.setenv("PCGSVC_CACHE_DIR", str(root / "pcgsvc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "xdg"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiler_cache / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiler_cache / "triton"))
    monkeypatch.setenv("MPLCONFIGDIR", str(compiler_cache / "matplotlib"))  # its list of fonts
    return root / "pcgsvc"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache root that does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture
def start(root: Path) -> Starter:
    """Return a builder of runners in one cache root, which starts empty."""
    from warm_helpers import Starter  # imports torch

    return Starter(root)


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    """Yield a folder for model files on the import path."""
    from warm_helpers import source_folder  # imports torch

    with source_folder(tmp_path / "sources") as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[Runner]:
    """A runner that tests only call."""
    from core_helpers import build, toy  # imports torch

    with build(toy(2), sizes=[4, 8]) as runner:
        yield runner


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def validate_report() -> Callable[[Mapping[str, Any] | str | Path], None]:
    """Return a check of a report (a mapping, or a file's path) against the contract's schema."""
    try:
        import jsonschema
    except ImportError:
        # A GPU machine may lack it; CI may not.
        if os.environ.get("CI") == "true":
            raise
        pytest.skip("jsonschema is missing; `scripts/gpu pack` brings it along")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))

    def validate(report: Mapping[str, Any] | str | Path) -> None:
        if isinstance(report, (str, Path)):
            report = json.loads(Path(report).read_text())
        errors = sorted(validator.iter_errors(report), key=lambda e: e.json_path)
        assert not errors, "\n".join(f"{e.json_path}: {e.message}" for e in errors)

    return validate
