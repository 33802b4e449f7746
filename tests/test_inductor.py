"""`compiler=inductor`: what Inductor is told, and the processes that it may leave."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pcgsvc.compilers.inductor import _options
from pcgsvc.config import Compiler, CompilerConfig, Config, resolve, validate
from pcgsvc.errors import ConfigError


def patches(**settings: Any) -> dict[str, Any]:
    config = CompilerConfig(name=Compiler.INDUCTOR, **settings)
    found: dict[str, Any] = _options(config, [])["config_patches"]
    return found


# ---- options -------------------------------------------------------------------------------------


def test_settings_of_ours_become_inductor_s_options() -> None:
    plain = patches()
    assert (plain["max_autotune"], plain["combo_kernels"]) == (False, False)
    assert plain["compile_threads"] == 1
    assert plain["triton.cudagraphs"] is False
    tuned = patches(max_autotune=True, combo_kernels=True, threads=4)
    assert {k for k in tuned if tuned[k] != plain[k]} == {
        "max_autotune",
        "combo_kernels",
        "compile_threads",
    }


def test_an_option_by_name_has_the_last_word() -> None:
    assert patches(max_autotune=True, options={"max_autotune": False})["max_autotune"] is False


@pytest.mark.parametrize(
    "change", [{"max_autotune": True}, {"combo_kernels": True}, {"threads": 2}]
)
def test_inductor_s_settings_are_refused_where_it_is_not_used(change: dict[str, Any]) -> None:
    config = resolve(Config(), device_type="cpu")
    config.compiler = CompilerConfig(name=Compiler.EAGER, **change)
    with pytest.raises(ConfigError, match=f"compiler.{next(iter(change))}: .*compiler=inductor"):
        validate(config, device_type="cpu")
    config.compiler.name = Compiler.INDUCTOR
    validate(config, device_type="cpu")


def test_a_build_needs_at_least_one_thread() -> None:
    config = resolve(Config(), device_type="cpu")
    config.compiler = CompilerConfig(name=Compiler.INDUCTOR, threads=0)
    with pytest.raises(ConfigError, match=r"compiler\.threads: got 0, at least 1"):
        validate(config, device_type="cpu")


# ---- processes -----------------------------------------------------------------------------------

_BUILD = """
import os, sys, time
from pathlib import Path
began = time.perf_counter()
from core_helpers import attended, build, rows
from pcgsvc.compilers.folder import CompilerFolder
from torch._inductor import async_compile
imported = time.perf_counter() - began

def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

config = dict(sizes=(2,), compiler="inductor")
with build(lambda x: attended(x) + 1, **config) as runner:  # one region
    runner(rows(2))
    assert runner.report["compile"]["num_compiled"] > 0
    print("after a build:", children())
folder = CompilerFolder()
with folder.in_use(threads=2):
    folder.ready_inductor()
    async_compile.AsyncCompile.process_pool().submit(abs, -1).result()
    print("with two workers:", len(children()) > 0)
print("after the block:", children())
print(imported, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed in /proc")
def test_no_worker_outlives_a_build_and_the_process_ends_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(3)]
        imported = float(process.stdout.readline())
        ended = time.perf_counter()
        assert process.wait(timeout=60) == 0
        # Not in seconds: on a busy machine both take longer.
        assert time.perf_counter() - ended < imported
    assert lines == ["after a build: []", "with two workers: True", "after the block: []"]
