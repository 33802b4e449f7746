"""Warm starts of processes of their own: another home and place, no Dynamo, no compiler, no file.

Those with Inductor share one cold build.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from store_helpers import damage_entry, entry_files
from warm_cli_helpers import (
    TINY,
    WARM,
    Cli,
    finish,
    home,
    in_process,
    listing,
)

import pcgsvc
from pcgsvc.cache.store import Kind, Store
from pcgsvc.compilers import blob

NO_DYNAMO = """
import sys
import torch  # from 2.14 on it asks whether triton is installed, without importing it
torch.set_num_threads(1)
from pcgsvc.jobs.app import main
code = main(sys.argv[1:])
loaded = [n for n in sys.modules if n.startswith(("torch._dynamo", "torch._inductor", "triton"))]
sys.exit(f"imported: {loaded}" if loaded else code)
"""


def test_another_process_home_and_place_is_warm_without_importing_dynamo(
    cached_cli: Cli, root: Path, tmp_path: Path
) -> None:
    assert cached_cli().code == 0
    moved = tmp_path / "moved" / "elsewhere"
    moved.parent.mkdir()
    root.rename(moved)
    environment = home(tmp_path / "other")
    report = tmp_path / "report.json"
    argv = [*TINY, f"cache.dir={moved}", f"report={report}", "cache.require_warm=true"]
    finish(in_process(NO_DYNAMO, argv, tmp_path / "other" / "cwd", **environment))
    compiled = json.loads(report.read_text())["compile"]
    assert (compiled["start"], compiled["num_traces"], compiled["num_compiled"]) == WARM
    assert all(row["ok"] for row in json.loads(report.read_text())["verify"])


# ---- Inductor ------------------------------------------------------------------------------------

# One region of one op: g++ takes seconds for each kernel.
INDUCTOR = ["device=cpu", "model=module", "model.target=torch.nn:GELU", "compiler=inductor"]
INDUCTOR += ["model.inputs={input: {shape: [rows, 32]}}", "capture.sizes=[1,2]", "mode=full"]
INDUCTOR += ["bench.enabled=false"]
RAISING = """
import sys
import torch
torch.set_num_threads(1)
from pcgsvc import torch_private
from pcgsvc.jobs.app import main

def refuse(*args, **kwargs):
    raise AssertionError("a warm start traces or compiles")

torch_private.dynamo_trace = refuse
torch_private.inductor_compile = torch_private.probe_cpp_compiler = refuse
sys.exit(main(sys.argv[1:]))
"""
# On the PATH without this wrapper: `-v` prints how the compiler was found, and that is compared.
WRAPPER = """#!/bin/bash
echo "$@" >> {log}
for word in "$@"; do
    case "$word" in --version|-v|-dump*) exec env PATH="{path}" {name} "$@";; esac
done
echo "asked for more than its version: $@" >&2
exit 1
"""


# Each of its arguments is a command line.
SEVERAL = """
import json
import sys
import torch
torch.set_num_threads(1)
from pcgsvc.jobs.app import main
sys.exit(max(main(json.loads(words)) for words in sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a process that built an Inductor program cold, and two without a cache."""
    folder = tmp_path_factory.mktemp("inductor")
    off = [f"cache.dir={folder / 'off'}", "cache.mode=off"]
    jobs = [
        [*INDUCTOR, f"cache.dir={folder / 'cache'}"],
        # Another kernel: torch keeps what a process has loaded.
        [*INDUCTOR, "model.target=torch.nn:Tanh", *off],
        [*TINY, "compiler=eager", *off],
    ]
    lines = [json.dumps([*words, f"hydra.run.dir=o{at}"]) for at, words in enumerate(jobs)]
    finish(in_process(SEVERAL, lines, folder / "builder" / "cwd", **home(folder / "builder")))
    return folder


@pytest.fixture(scope="module")
def inductor_root(builder: Path) -> Path:
    """A cache with one Inductor program."""
    return builder / "cache"


@pytest.mark.slow
def test_a_build_leaves_no_file_outside_its_cache_and_none_anywhere_with_it_off(
    builder: Path,
) -> None:
    """Also of the vector instructions that it tries out."""
    own = builder / "builder"
    reports = [json.loads((own / "cwd" / f"o{at}" / "report.json").read_text()) for at in range(3)]
    found = [report["compile"] for report in reports]
    assert [(f["start"], f["num_compiled"]) for f in found] == [
        ("cold", 1),
        ("cold", 1),
        ("cold", 2),
    ]
    assert listing(own / "home", own / "tmp") == set()
    assert {p.name for p in (own / "cwd").iterdir()} == {"o0", "o1", "o2"}
    assert {p.name for p in builder.iterdir()} == {"builder", "cache"}
    with Store.open(str(builder / "cache")) as store:
        assert len(store.ls()) == 1


def only_versions(folder: Path) -> tuple[str, Path]:
    """Return a PATH on which every C++ compiler tells its version only, and the log of calls."""
    folder.mkdir()
    log = folder / "log"
    log.touch()
    for name in ("g++", "gcc", "c++", "cc", "clang++", "clang"):
        if shutil.which(name) is not None:
            text = WRAPPER.format(log=log, name=name, path=os.environ["PATH"])
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}", log


def start_warm(root: Path, folder: Path, *, code: str = RAISING) -> dict[str, Any]:
    """Start in a process of another home and place, with compilers that only tell their version."""
    environment = home(folder)
    environment["PATH"], log = only_versions(folder / "bin")
    report = folder / "report.json"
    argv = [*INDUCTOR, f"cache.dir={root}", f"report={report}", "cache.require_warm=true"]
    finish(in_process(code, argv, folder / "cwd", **environment))
    assert set(listing(folder / "tmp", folder / "home")) == set()
    calls = log.read_text().splitlines()
    assert all(len(call.split()) <= 2 for call in calls), calls
    return dict(json.loads(report.read_text()))


@pytest.mark.slow
def test_what_inductor_tries_of_its_compiler_is_stored_apart_from_the_piece(
    inductor_root: Path, tmp_path: Path
) -> None:
    """In a piece it would be missing where a program of other pieces starts warm."""
    with Store.open(str(inductor_root)) as store:
        (program,) = store.ls()
        keys = store.read(Kind.PROGRAM, program.key).pieces
        for key in keys:
            blob.unpack(store.read(Kind.PIECE, key).payload, tmp_path / key)
    libraries = [len(list((tmp_path / key).rglob("*.so"))) for key in keys]
    assert min(libraries) == 1, libraries  # the kernel
    assert len(libraries) == 2
    assert max(libraries) > 2


@pytest.mark.slow
def test_inductor_is_warm_elsewhere_and_asks_the_compiler_for_its_version_only(
    inductor_root: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved" / "deeper"
    shutil.copytree(inductor_root, moved)
    report = start_warm(moved, tmp_path / "other")
    compiled = report["compile"]
    assert (compiled["start"], compiled["num_traces"], compiled["num_compiled"]) == WARM
    assert compiled["num_loaded"] == 1
    assert report["verify"]
    assert all(row["ok"] for row in report["verify"])


@pytest.mark.slow
def test_an_exported_inductor_program_is_warm_on_a_fresh_machine(
    inductor_root: Path, tmp_path: Path
) -> None:
    from pcgsvc.cache.bundle import export_bundle, import_bundle

    with Store.open(str(inductor_root)) as store:
        info = export_bundle(store, tmp_path / "bundle.tar")
    with Store.open(str(tmp_path / "fresh")) as store:
        import_bundle(store, tmp_path / "bundle.tar", expected_sha256=info.sha256)
        assert store.check().ok
    assert start_warm(tmp_path / "fresh", tmp_path / "other")["compile"]["start"] == "warm"


@pytest.mark.slow
def test_flipped_bytes_of_inductor_entries_are_never_loaded(
    inductor_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As for the builder; else these are other programs than its, and nothing damaged is looked at.
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK")
    copied = tmp_path / "copy"
    shutil.copytree(inductor_root, copied)
    paths = entry_files(copied)
    assert len(paths) == 3  # program, toolchain, piece
    for path in paths:
        damage_entry(path)
    torch.set_num_threads(1)
    with pcgsvc.load_runner([*INDUCTOR, f"cache.dir={copied}"]) as runner:
        assert runner.report["compile"]["num_compiled"] == 1
        x = torch.randn(2, 32)
        with torch.no_grad():
            assert torch.isfinite(runner(x)).all()
        # Each is a miss that is named, whichever part of its file is hit.
        damaged = {f"{path.parts[-3]} {path.name[:12]}: digest mismatch" for path in paths}
        assert damaged <= set(runner.report["cache"]["miss_reasons"])
        assert runner.report["compile"]["num_loaded"] == 0
    with pcgsvc.load_runner([*INDUCTOR, f"cache.dir={copied}"]) as runner:
        assert runner.report["compile"]["start"] == "warm"
