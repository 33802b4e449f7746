"""The facts of the environment that compiled code depends on: versions, hardware, numerics flags.

In: a config and a device. Out: a flat dict of JSON types. Imports no compiler unless Inductor is
asked for. Knows nothing of stores.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import torch

from pcgsvc import torch_private
from pcgsvc.config import Compiler, Config
from pcgsvc.program.keys import key_of, version_facts

_COMPILER_ENVIRONMENT = ("TORCHINDUCTOR_", "TRITON_", "TORCH_COMPILE_")
_COMPILERS = ("CC", "CXX")
_PLACES = ("_DIR", "_PATH", "_HOME")
"""Endings of variables that name places. Torch sets some of them itself when Inductor is imported
(TRITON_PTXAS_PATH), so that a start that traces would see other facts than one that loads."""


def environment_facts(config: Config, device: torch.device) -> dict[str, Any]:
    """Return versions, hardware and numerics flags."""
    facts: dict[str, Any] = {
        **version_facts(),
        "torch": torch.__version__,
        "torch.git": torch.version.git_version,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "python.abi": sys.implementation.cache_tag,
        "machine": platform.machine(),
        "device": device.type,
        **_numerics(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["gpu.capability"] = list(torch.cuda.get_device_capability(device))
        # Generated code names the device, and so does `torch.zeros(…, device=x.device)` in a trace.
        facts["device.index"] = device.index
    if config.compiler.name is Compiler.INDUCTOR:
        facts |= _inductor_facts(device)
        if config.compiler.passes:
            from pcgsvc.compilers.passes import identities

            facts["inductor.passes"] = identities(config.compiler.passes)
    return facts


def _inductor_facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "inductor.config": key_of(torch_private.inductor_settings()),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if (name.startswith(_COMPILER_ENVIRONMENT) or name in _COMPILERS)
            and not name.endswith(_PLACES)
        },
    }
    if device.type == "cuda":
        facts["triton"] = torch_private.triton_version()
    else:
        facts["cpu.capability"] = torch.backends.cpu.get_cpu_capability()
        facts["cpu.compiler"] = _cpp_compiler()
        facts["cpu.threads"] = torch.get_num_threads()  # a loop is written for so many
    return facts


def _cpp_compiler() -> str:
    """Return the C++ compiler's version and a digest of all it says of itself, or `none`.

    The whole of `-v`, since Inductor puts it into the names of its files: with other words there,
    stored kernels are not found and are compiled anew.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name) is not None:
            return _about(name, os.environ.get("PATH", ""))
    return "none"


@cache
def _about(compiler: str, path: str) -> str:
    """Ask by name, as Inductor does: some compilers print how they were found on the PATH."""
    environment = os.environ | {"LC_ALL": "C", "PATH": path}
    done = subprocess.run(
        [compiler, "-v"], capture_output=True, text=True, check=False, env=environment
    )
    text = done.stdout + done.stderr
    version = next((line for line in text.splitlines() if " version " in line), "unknown version")
    return f"{version}, {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _numerics(device: torch.device) -> dict[str, Any]:
    backends: Any = torch.backends  # half of them have no annotations
    matmul, cuda, cudnn = backends.cuda.matmul, backends.cuda, backends.cudnn
    onednn = backends.mkldnn
    flags: dict[str, Callable[[], Any]] = {
        "matmul": torch.get_float32_matmul_precision,
        "tf32": lambda: [matmul.allow_tf32, cudnn.allow_tf32],
        "fp32": lambda: [
            part.fp32_precision
            for part in (matmul, cudnn.conv, cudnn.rnn, onednn.matmul, onednn.conv)
        ],
        "reduced": lambda: [
            str(matmul.allow_fp16_reduced_precision_reduction),
            str(matmul.allow_bf16_reduced_precision_reduction),
        ],
        "attention": lambda: [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        "cudnn": lambda: [cudnn.enabled, cudnn.benchmark, cudnn.deterministic],
        "onednn": lambda: onednn.enabled,
        "deterministic": lambda: [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "default_device": lambda: str(torch.get_default_device()),
        "autocast": lambda: [
            torch.is_autocast_enabled(device.type),
            str(torch.get_autocast_dtype(device.type)),
        ],
    }
    facts: dict[str, Any] = {}
    for name, flag in flags.items():
        facts[f"numerics.{name}"] = "not to be had"
        # Once the new settings of float32 precision are used, torch refuses to read the old ones.
        with contextlib.suppress(RuntimeError, AttributeError):
            facts[f"numerics.{name}"] = flag()
    return facts
