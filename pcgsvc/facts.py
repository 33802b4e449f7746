"""The facts of a program and of its environment, for its key.

In: a module, its inputs and a device. Out: flat dicts of JSON types. Gathers without tracing, and
imports no compiler unless Inductor is asked for. Knows nothing of stores.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from pcgsvc import torch_private
from pcgsvc.config import Compiler, Config
from pcgsvc.keys import config_facts, key_of, version_facts
from pcgsvc.reads import (
    NotCanonicalError,
    canonical,
    class_digest,
    code_digest,
    hook_form,
    is_versioned_class,
    name_of,
    sources_of,
)
from pcgsvc.traced import InputSpec

_COMPILER_ENVIRONMENT = ("TORCHINDUCTOR_", "TRITON_", "TORCH_COMPILE_")
_COMPILERS = ("CC", "CXX")
_PLACES = ("_DIR", "_PATH", "_HOME")
"""Endings of variables that name places. Torch sets some of them itself when Inductor is imported
(TRITON_PTXAS_PATH), so that a start that traces would see other facts than one that loads."""


def program_facts(
    config: Config,
    module: Callable[..., Any],
    inputs: Sequence[InputSpec],
    constants: Mapping[str, Any],
    device: torch.device,
    model_facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return everything that decides a program, without tracing it.

    What tracing reads beyond this (attributes, closures, globals, source files) is compared when
    a stored program is loaded; see `pcgsvc.reads`.

    `model_facts`: what the model's family adds (`ModelBundle.facts`).

    Raises:
        NotCanonicalError: a constant argument has no form that can be written down.
    """
    facts = {
        **(model_facts or {}),
        **config_facts(config),
        **environment_facts(config, device),
        "module": name_of(module),
        "module.code": _code_facts(module),
        "module.global_hooks": [hook_form(hook) for hook in torch_private.global_hooks()],
        "source": {name: file_digest(path) for name, path in sources_of(module).items()},
        "inputs": [_input_facts(spec) for spec in inputs],
        "constants": canonical(dict(constants)),
    }
    tensors, shape = _tensor_facts(module)
    facts["tensors"] = shape
    facts["tensors.digest"] = key_of({"tensors": tensors})
    facts["modules.digest"] = key_of({"modules": _module_facts(module)})
    return facts


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


def _code_facts(module: Callable[..., Any]) -> dict[str, Any]:
    """Return digests of the code of a module's classes, or of a callable, by name."""
    if not isinstance(module, torch.nn.Module):
        return {name_of(module): code_digest(module)}
    found: dict[str, set[str]] = {}
    for cls in {type(sub) for sub in module.modules()}:
        if not is_versioned_class(cls):
            found.setdefault(name_of(cls), set()).add(class_digest(cls))
    return {name: ",".join(sorted(digests)) for name, digests in sorted(found.items())}


def file_digest(path: str) -> str | None:
    """Return the sha256 of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _input_facts(spec: InputSpec) -> list[Any]:
    shape: list[Any] = ["s" if d in spec.dims else n for d, n in enumerate(spec.example.shape)]
    return [spec.name, str(spec.example.dtype), shape, spec.example.device.type]


def _tensor_facts(module: Callable[..., Any]) -> tuple[list[Any], str]:
    """Return the signature of all parameters and buffers with their ties, and it in a few words."""
    if not isinstance(module, torch.nn.Module):
        return [], "none"
    first: dict[int, str] = {}
    storages: dict[int, str] = {}
    rows: list[Any] = []
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        tied = first.setdefault(id(tensor), name)
        row: list[Any] = [name, str(tensor.dtype), list(tensor.shape), tensor.device.type, tied]
        row += [name_of(type(tensor)), str(tensor.layout), tensor.requires_grad]
        if tensor.layout is torch.strided:
            memory = storages.setdefault(torch_private.storage_id(tensor), name)
            row += [list(tensor.stride()), memory, tensor.storage_offset()]
        rows.append(row)
    elements = sum(t.numel() for t in {id(t): t for _, t in named}.values())
    dtypes = sorted({row[1] for row in rows})
    return rows, f"{len(rows)} tensors, {elements} elements, {', '.join(dtypes)}"


def _module_facts(module: Callable[..., Any]) -> list[Any]:
    """Return names and classes of all submodules, and which of them are one and the same."""
    if not isinstance(module, torch.nn.Module):
        return []
    first: dict[int, str] = {}
    rows = []
    for name, sub in module.named_modules(remove_duplicate=False):
        rows.append([name, name_of(type(sub)), first.setdefault(id(sub), name)])
    return rows


def piece_facts(
    document_hash: str,
    config: Config,
    device: torch.device,
    *,
    num_outputs: int,
    ops: Mapping[str, str],
    size: int | None = None,
    environment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what decides one compiled piece.

    Args:
        document_hash: of its canonical form.
        config: resolved.
        device: what is compiled for.
        num_outputs: how many results it has.
        ops: identities of the custom ops that it calls; the canonical form has their names only.
        size: the row count that it is compiled for; None: any.
        environment: `environment_facts`, taken before anything was compiled; None: taken now.
    """
    facts = {
        "piece": document_hash,
        "ops": dict(ops),
        "compiler": config.compiler.name.value if config.compiler.name else None,
        "num_outputs": num_outputs,
    }
    compiler = {k: v for k, v in config_facts(config).items() if k.startswith("config.compiler")}
    del compiler["config.compiler.specialize_sizes"]  # a piece has its own size, or none
    if size is not None:
        facts["size"] = size
    if environment is None:
        environment = environment_facts(config, device)
    return {**facts, **compiler, **environment}


__all__ = [
    "NotCanonicalError",
    "environment_facts",
    "file_digest",
    "piece_facts",
    "program_facts",
]
