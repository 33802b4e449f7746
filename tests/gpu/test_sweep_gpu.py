"""Sweeps on a CUDA device: a job's memory is its own, and the sweep itself holds none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

CHECK = """
import sys
import torch
from pcgsvc.config.compose import compose_command
from pcgsvc.jobs.preflight import check_command

for device in ("auto", "cuda", "cuda:0"):
    check_command(compose_command([f"device={device}", "mode=full,piecewise"], multirun=True))
    assert not torch.cuda.is_initialized(), device
"""


def test_checking_a_sweep_starts_no_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_job_without_enough_device_memory_fails_alone(
    tmp_path: Path,
) -> None:
    _, total = torch.cuda.mem_get_info()
    words = ["device=cuda", "compiler=eager", "model.num_layers=1", "capture.sizes=[1,2]"]
    blocks = f"attention.num_blocks=64,{total // 1024},64"  # a block of the tiny model takes 2 KiB
    done = subprocess.run(
        [sys.executable, "-m", "pcgsvc", "-m", *words, blocks, "hydra.sweep.dir=out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    jobs = json.loads((tmp_path / "out" / "sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["done", "failed", "done"]
    assert "memory" in jobs[1]["reason"]
    assert jobs[2]["compile"]["start"] == "warm"
    assert jobs[0]["graphs"]["backend"] == "cuda"
