"""The facts of a program and of its environment, for its key.

In: a module, its inputs and a device. Out: flat dicts of JSON types. Gathers without tracing, and
imports no compiler unless Inductor is asked for. Knows nothing of stores.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.config import Compiler, Config
from pcgsvc.keys import config_facts, key_of, version_facts
from pcgsvc.reads import NotCanonicalError, canonical, code_digest, name_of
from pcgsvc.traced import InputSpec

_COMPILER_ENVIRONMENT = ("TORCHINDUCTOR_", "TRITON_", "TORCH_COMPILE_", "CXX", "CC")
_PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def program_facts(
    config: Config,
    module: Callable[..., Any],
    inputs: Sequence[InputSpec],
    constants: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Return everything that decides a program, without tracing it.

    What tracing reads beyond this (attributes, closures, globals, source files) is compared when
    a stored program is loaded; see `pcgsvc.reads`.

    Raises:
        NotCanonicalError: a constant argument has no form that can be written down.
    """
    facts = {
        **config_facts(config),
        **environment_facts(config, device),
        "module": name_of(type(module) if isinstance(module, torch.nn.Module) else module),
        "module.code": code_digest(
            type(module).forward if isinstance(module, torch.nn.Module) else module
        ),
        "inputs": [_input_facts(spec) for spec in inputs],
        "constants": canonical(dict(constants)),
    }
    tensors, shape = _tensor_facts(module)
    facts["tensors"] = shape
    facts["tensors.digest"] = key_of({"tensors": tensors})
    return facts


def environment_facts(config: Config, device: torch.device) -> dict[str, Any]:
    """Return versions, hardware and numerics flags."""
    facts: dict[str, Any] = {
        **version_facts(),
        "torch": torch.__version__,
        "torch.git": torch.version.git_version,
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
    if config.compiler.name is Compiler.INDUCTOR:
        facts |= _inductor_facts(device)
    return facts


def _inductor_facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "inductor.config": key_of(torch_private.inductor_settings()),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_COMPILER_ENVIRONMENT) and name not in _PLACES
        },
    }
    if device.type == "cuda":
        facts["device.index"] = device.index  # generated code names the device
        facts["triton"] = torch_private.triton_version()
    else:
        facts["cpu.capability"] = torch.backends.cpu.get_cpu_capability()
        facts["cpu.compiler"] = _cpp_compiler()
    return facts


@cache
def _cpp_compiler() -> str:
    """Return the C++ compiler's first version line, or say that there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return done.stdout.split("\n")[0]
    return "none"


def _numerics(device: torch.device) -> dict[str, Any]:
    matmul = torch.backends.cuda.matmul
    return {
        "numerics.matmul": torch.get_float32_matmul_precision(),
        "numerics.tf32": [matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "numerics.reduced": [
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ],
        "numerics.deterministic": torch.are_deterministic_algorithms_enabled(),
        "numerics.default_dtype": str(torch.get_default_dtype()),
        "numerics.default_device": str(torch.get_default_device()),
        "numerics.autocast": torch.is_autocast_enabled(device.type),
    }


def _input_facts(spec: InputSpec) -> list[Any]:
    shape: list[Any] = list(spec.example.shape)
    if spec.dim is not None:
        shape[spec.dim] = "s"
    return [spec.name, str(spec.example.dtype), shape, spec.example.device.type]


def _tensor_facts(module: Callable[..., Any]) -> tuple[list[Any], str]:
    """Return the signature of all parameters and buffers with their ties, and it in a few words."""
    if not isinstance(module, torch.nn.Module):
        return [], "none"
    first: dict[int, str] = {}
    rows: list[Any] = []
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        tied = first.setdefault(id(tensor), name)
        shape, stride = list(tensor.shape), list(tensor.stride())
        rows.append([name, str(tensor.dtype), shape, stride, tensor.device.type, tied])
    elements = sum(t.numel() for t in {id(t): t for _, t in named}.values())
    dtypes = sorted({row[1] for row in rows})
    return rows, f"{len(rows)} tensors, {elements} elements, {', '.join(dtypes)}"


def piece_facts(
    document_hash: str, config: Config, device: torch.device, *, num_outputs: int
) -> dict[str, Any]:
    """Return what decides one compiled piece."""
    facts = {
        "piece": document_hash,
        "compiler": config.compiler.name.value if config.compiler.name else None,
        "num_outputs": num_outputs,
    }
    compiler = {k: v for k, v in config_facts(config).items() if k.startswith("config.compiler")}
    return {**facts, **compiler, **environment_facts(config, device)}


__all__ = ["NotCanonicalError", "environment_facts", "piece_facts", "program_facts"]
