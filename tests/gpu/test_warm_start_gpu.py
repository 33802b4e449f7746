"""A warm start on a GPU, in new processes: nothing of the compilers is imported or asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

_START = """
import json, os, sys
import pcgsvc

processes = []
def hook(event, args):
    if event == "subprocess.Popen":
        processes.append(args)
sys.addaudithook(hook)
with pcgsvc.load_runner(json.loads(sys.argv[1])) as runner:
    loaded = [m for m in ("torch._dynamo", "torch._inductor") if m in sys.modules]
    rows = runner.report["verify"]
    compile_ = runner.report["compile"]
    print(json.dumps({
        "start": compile_["start"], "traces": compile_["num_traces"],
        "compiled": compile_["num_compiled"], "loaded": loaded,
        "processes": [" ".join(map(str, p[1])) for p in processes],
        "ok": [row["ok"] for row in rows], "kernels": compile_["num_kernels"],
    }))
"""


def start(overrides: list[str], **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _START, json.dumps(overrides)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def without_compilers(folder: Path) -> str:
    """Return a PATH with all programs of this one's except compilers, assemblers and linkers."""
    folder.mkdir()
    pattern = re.compile(r"cc|gcc|[cg]\+\+|clang|ld|as|nvcc|ptxas")
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if Path(place).is_dir() else []:
            link = folder / program.name
            if not pattern.search(program.name) and not link.exists():
                link.symlink_to(program)
    return str(folder)


@pytest.mark.parametrize(
    ("strategy", "attention", "compiler"),
    [
        ("fx", "paged", "inductor"),
        ("inductor", "paged", "inductor"),
        ("fx", "triton", "inductor"),
        ("fx", "triton", "eager"),
    ],
)
def test_a_warm_start_needs_no_compiler_in_any_form(
    strategy: str, attention: str, compiler: str, tmp_path: Path
) -> None:
    wanted = ["model=llama", f"attention={attention}", f"compiler={compiler}", "device=cuda"]
    wanted += [f"partition.strategy={strategy}", "capture.sizes=[1,4,16]"]
    wanted += [f"cache.dir={tmp_path / 'cache'}"]
    cold = start(wanted)
    assert cold["start"] == "cold"
    bare = {
        "PATH": without_compilers(tmp_path / "bin"),
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path),
    }
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        bare[name] = str(tmp_path / "empty")
    warm = start(wanted, **bare)
    assert (warm["start"], warm["traces"], warm["compiled"]) == ("warm", 0, 0)
    assert warm["loaded"] == []
    # cuda-bindings looks for NVRTC by ldconfig; Triton asks for the driver's library, the platform
    # and ptxas's version. Nothing else runs.
    asked = ("ldconfig -p", *(("file -b", "--version") if attention == "triton" else ()))
    assert all(any(word in p for word in asked) for p in warm["processes"]), warm["processes"]
    assert all(cold["ok"])
    assert all(warm["ok"])
    assert warm["kernels"] == cold["kernels"]
    assert not (tmp_path / "empty").exists()


def test_job_compile_leaves_what_a_warm_start_needs(tmp_path: Path) -> None:
    wanted = ["model=llama", "compiler=inductor", "device=cuda", "capture.sizes=[1,4]"]
    wanted += [f"cache.dir={tmp_path / 'cache'}"]
    subprocess.run(
        [sys.executable, "-m", "pcgsvc", *wanted, "job=compile", f"hydra.run.dir={tmp_path}"],
        check=True,
        capture_output=True,
    )
    warm = start(wanted)
    assert (warm["start"], warm["traces"], warm["compiled"]) == ("warm", 0, 0)
    assert all(warm["ok"])
