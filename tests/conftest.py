"""What every test gets: its tier, its own cache directories, the GPU rule, and shared fixtures.

Imports nothing of pcgsvc and no torch: a run that selects no GPU test does not wait for either.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cli_helpers import Cli
    from warm_cli_helpers import Cli as CachedCli
    from warm_helpers import Sources, Starter

    from pcgsvc import Runner

SCHEMA = Path(__file__).with_name("report.schema.json")
"""A copy of the contract's schema; the published report format changes only together with it."""

TIERS = ("exhaustive", "soak")
"""Markers of the tiers beside the default one; a test is in one tier, the first that it names."""


# Else every process that compiles for the CPU first tries the vector instructions out: it compiles,
# and loads in a process, one file for each kind of them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-gpu` and `--require-gpus`, and an option per tier."""
    parser.addoption(
        "--require-gpus",
        type=int,
        metavar="N",
        help="fail, rather than skip, the tests marked multigpu where there are fewer CUDA devices",
    )
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail, rather than skip, the tests marked gpu where there is no CUDA device",
    )
    for tier in TIERS:
        parser.addoption(
            f"--{tier}",
            action="store_true",
            help=f"run the tests marked {tier} and, unless another tier is asked for, no others",
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the tiers that were not asked for; asked for none, the default runs."""
    wanted = {tier for tier in TIERS if config.getoption(tier)} or {None}
    kept, others = [], []
    for item in items:
        tier = next((name for name in TIERS if item.get_closest_marker(name)), None)
        (kept if tier in wanted else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


DESELECTED = pytest.StashKey[int]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count, for `pytest_sessionfinish`."""
    if items:
        stash = items[0].config.stash
        stash[DESELECTED] = stash.get(DESELECTED, 0) + len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """As a worker of xdist, tell how many tests were deselected: only workers collect."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = session.config.stash.get(DESELECTED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Count what xdist's first worker deselected, as all others did, in the summary."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    count = getattr(node, "workeroutput", {}).get("deselected", 0)
    if reporter is not None and count:
        reporter.stats["deselected"] = [SimpleNamespace()] * count


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for whose GPUs there are too few, or fail it where they are required."""
    required = item.config.getoption("--require-gpus")
    for marker, needed, option in (
        ("gpu", 1, item.config.getoption("--require-gpu")),
        ("multigpu", required or 2, required),
    ):
        if item.get_closest_marker(marker) is None or _num_gpus() >= needed:
            continue
        if option:
            pytest.fail(f"torch sees {_num_gpus()} CUDA devices here, not {needed}", pytrace=False)
        pytest.skip(f"needs {needed} CUDA device{'s' * (needed > 1)}")


@cache
def _num_gpus() -> int:
    import torch  # here, so that only runs with GPU tests pay for it

    with warnings.catch_warnings():
        # A CUDA build without a usable driver warns; the answer is "none" all the same.
        warnings.simplefilter("ignore")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="session")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's and Triton's own directories, one for the session and all of its workers.

    Not one per test: the first C++ compile in a directory precompiles a header for seconds.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiler-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the beginnings of names of folders, one for each test.

    Counted here: to number one by itself, pytest reads the names of all others. Not made: most
    tests need none, and to remove one takes milliseconds on some disks.
    """
    base = tmp_path_factory.mktemp("env")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def clean_env(
    monkeypatch: pytest.MonkeyPatch, environments: Iterator[Path], compiler_cache: Path
) -> Path:
    """Point every cache at a fresh folder and drop the caller's own pcgsvc and Hydra settings.

    PCGSVC_MODELS_DIR stays: weights lie there to be read, and no test writes them.

    Returns:
        The test's PCGSVC_CACHE_DIR: named, not made, and not inside the test's `tmp_path`.
    """
    for name in [n for n in os.environ if n.startswith(("PCGSVC_", "HYDRA_"))]:
        if name != "PCGSVC_MODELS_DIR":
            monkeypatch.delenv(name)
    place = next(environments)
    root = place.with_name(f"{place.name}-pcgsvc")
    monkeypatch.setenv("PCGSVC_CACHE_DIR", str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", f"{place}-xdg")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiler_cache / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiler_cache / "triton"))
    monkeypatch.setenv("MPLCONFIGDIR", str(compiler_cache / "matplotlib"))  # its list of fonts
    return root


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
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One disk cache for a file: what was traced once is captured anew, not built again."""
    return tmp_path_factory.mktemp("programs")


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


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Return a call of `main` in an empty folder."""
    from cli_helpers import command_line

    with command_line(tmp_path, monkeypatch, capsys) as call:
        yield call


@pytest.fixture
def cached_cli(
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[CachedCli]:
    """Return a call of `main` in a new folder each: a tiny eager model, the cache `root`."""
    from warm_cli_helpers import cache_command_line

    with cache_command_line(tmp_path, root, monkeypatch, capsys, caplog) as call:
        yield call
