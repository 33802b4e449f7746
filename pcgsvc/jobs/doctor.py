"""`job=doctor`: what would not work here with the given settings, and what the model does.

In: a config. Out: a `Finding` per thing that was looked at: torch, devices and compilers, the
cache, the ops and the model. A file of one line is compiled, the model is run once and traced;
nothing is captured, and nothing is stored.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pcgsvc import torch_private
from pcgsvc.cache.remote import RemoteError, open_remote
from pcgsvc.cache.root import DataFolder, find_root, open_data_folder
from pcgsvc.capture.recorded import HOST_DATA
from pcgsvc.check.hazards import Observation, observe
from pcgsvc.config import (
    CacheAction,
    CacheConfig,
    CacheMode,
    Compiler,
    Config,
    Mode,
    Strategy,
    to_dict,
)
from pcgsvc.config.devices import is_here
from pcgsvc.errors import CacheError, ConfigError
from pcgsvc.events import Progress
from pcgsvc.forward.plain import place_of, words_of
from pcgsvc.jobs.plan.planner import plan
from pcgsvc.models.request import request_of
from pcgsvc.ops.registry import registered_names
from pcgsvc.report import words
from pcgsvc.sizing.resolve import resolve_config

OK, WARN, FAIL = "ok", "warn", "fail"
_LOW_BYTES = 1 << 30
"""Free space below which a cache is warned of, unless its budget is smaller."""
_TRIVIAL = "int answer(void) { return 42; }\n"


class Finding(NamedTuple):
    """One row of the table."""

    item: str
    state: str
    """`ok`, `warn`, or `fail`: a job with these settings would not work."""
    found: str
    advice: str = ""
    """What to do."""


def examine(config: Config, progress: Progress) -> list[Finding]:
    """Look at everything that a job with these settings needs.

    Args:
        config: as composed; its job is `doctor`, so that a device need not be there.
        progress: shows that the model is made and traced.

    Raises:
        ConfigError: the settings are no valid ones.
    """
    resolved = resolve_config(config)
    config, device = resolved.config, resolved.device
    return [
        *_torch(device),
        *_compilers(config, device),
        *_cache(config.cache),
        *_model(config, device, progress),
    ]


# ---- torch, devices, compilers -------------------------------------------------------------------


def _torch(device: torch.device) -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("torch", OK, f"{torch.__version__}, Python {python}")
    missing, driver = not is_here(device), _driver()
    state = FAIL if missing else OK
    advice = "set device=cpu, or use a machine with a GPU" if missing else ""
    built = torch.version.cuda
    found = f"torch is built for CUDA {built}" if built else "torch is built without CUDA"
    if torch.cuda.is_available():
        names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
        found += f"; devices: {', '.join(names)}"
    else:
        found += f"; no CUDA device: {_why_no_cuda()}" if built else "; no CUDA device"
        if driver is not None and state is OK:
            state, advice = WARN, "install the torch build that fits the driver"
    yield Finding("CUDA", state, f"{found}; this job uses {device}", advice)
    state = FAIL if missing and driver is None else OK
    yield Finding("driver", state, driver or "no NVIDIA driver", advice if state == FAIL else "")


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return f"NVIDIA {version[0]}" if version else text.splitlines()[0]


def _why_no_cuda() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return words_of(error)
    return "none is visible"


def _compilers(config: Config, device: torch.device) -> Iterator[Finding]:
    inductor, cuda = config.compiler.name is Compiler.INDUCTOR, device.type == "cuda"
    needs_triton = cuda and (inductor or config.attention.name == "triton")
    version = torch_private.triton_version()
    state = FAIL if needs_triton and version is None else OK
    advice = "install the triton that this torch brings (a CUDA build of torch does)"
    yield Finding("triton", state, version or "not installed", advice if state == FAIL else "")
    if needs_triton:
        names = (os.environ.get("CC"), "gcc", "clang")
        c = next((name for name in names if name and shutil.which(name)), None)
        yield _compiler("C compiler", c, ["Python.h"], is_needed=True, why="triton")
    headers = ["Python.h", "omp.h", "cmath"]
    why = "compiler=inductor on the CPU"
    cxx = torch_private.cpp_compiler()
    yield _compiler("C++ compiler", cxx, headers, is_needed=inductor and not cuda, why=why)


def _compiler(
    item: str, compiler: str | None, headers: list[str], *, is_needed: bool, why: str
) -> Finding:
    state = FAIL if is_needed else WARN
    advice = f"install one, with Python's headers (g++, python3-dev); {why} needs it"
    if compiler is None:
        return Finding(item, state, "none on the PATH", advice)
    problem = _try_compiler(compiler, headers)
    if problem is not None:
        return Finding(item, state, f"{compiler}: {problem}", advice)
    return Finding(item, OK, f"{shutil.which(compiler)}: compiled a file, which was loaded")


def _try_compiler(compiler: str, headers: list[str]) -> str | None:
    """Compile and load a trivial file as Inductor and Triton do; return what went wrong."""
    with tempfile.TemporaryDirectory(prefix="pcgsvc-") as folder:
        suffix, extern = (".cpp", 'extern "C" ') if "cmath" in headers else (".c", "")
        source, library = Path(folder, f"trivial{suffix}"), Path(folder, "trivial.so")
        includes = "".join(f"#include <{header}>\n" for header in headers)
        source.write_text(f"{includes}{extern}{_TRIVIAL}")
        flags = ["-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
        flags += ["-fopenmp"] if "omp.h" in headers else []
        line = [compiler, *flags, "-o", str(library), str(source)]
        try:
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [text for text in done.stderr.splitlines() if "error" in text]
                return (errors or done.stderr.splitlines() or ["it failed"])[0].strip()
            ctypes.CDLL(str(library)).answer()
        except OSError as error:  # it cannot be run, or its result cannot be loaded
            return str(error)
    return None


# ---- the cache -----------------------------------------------------------------------------------


def _cache(cache: CacheConfig) -> Iterator[Finding]:
    if cache.mode is CacheMode.OFF:
        yield Finding("cache", OK, "off: every start compiles")
        return
    root, source = find_root(cache.dir)
    try:
        folder = open_data_folder(root, source, write=cache.mode is not CacheMode.READ)
    except CacheError as error:
        yield Finding("cache", FAIL, str(error), f"or set cache.mode=off; {source} chose it")
        return
    reason = _why_unwritable(folder)
    where = f"{folder.data} ({source})"
    if not reason:
        yield Finding("cache", OK, f"{where}: yours alone, and can be written")
    elif cache.mode is CacheMode.READ:
        yield Finding("cache", OK, f"{where}: read only, as cache.mode=read asks")
    else:
        needed = cache.action in (CacheAction.CLEAR, CacheAction.IMPORT)
        yield Finding(
            "cache",
            FAIL if needed else WARN,
            f"{where}: {reason}: what is in it is loaded, nothing is stored",
            "set cache.dir to a folder of your own on a local disk, or cache.mode=read",
        )
    existing = next(path for path in (folder.data, *folder.data.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    low = free < min(_LOW_BYTES, cache.max_bytes)
    found = f"{words.memory(free)} free, cache.max_bytes is {words.memory(cache.max_bytes)}"
    advice = "free some, or set cache.dir to another disk"
    yield Finding("disk", WARN if low else OK, found, advice if low else "")
    yield from _remote(cache)


def _remote(cache: CacheConfig) -> Iterator[Finding]:
    try:
        remote = open_remote(cache)
        if remote is not None:
            remote.versions()
            yield Finding("remote", OK, f"{remote.url} answers")
    except ConfigError as error:
        yield Finding("remote", FAIL, str(error))
    except RemoteError as error:
        advice = "builds go on without it; look at the URL, its credentials and the network"
        yield Finding("remote", WARN, f"{cache.remote}: {error}", advice)


def _why_unwritable(folder: DataFolder) -> str:
    """Return why nothing can be written, also where only an attempt shows that."""
    if folder.writable:
        try:
            with tempfile.TemporaryFile(dir=folder.data):
                pass
        except OSError as error:
            return f"cannot be written: {error.strerror}"
    return folder.reason


# ---- the model and its ops -----------------------------------------------------------------------


def _model(config: Config, device: torch.device, progress: Progress) -> Iterator[Finding]:
    """Make, run and trace the model; its own exception is a row."""
    seen, name = Observation(), words.model(to_dict(config)["model"])
    if not is_here(device):
        yield Finding("model", WARN, f"{name}: not run, since {device} is not here", _RUN)
    else:
        try:
            seen = observe(request_of(config, progress))
        except Exception as error:  # noqa: BLE001 - the user's code
            found = f"{name}: {words_of(error)}{place_of(error)}"
            yield Finding("model", FAIL, found, "mend the model, or model.inputs")
            return
        yield Finding("model", OK, f"{name}: ran once on {device}, without graphs")
    traced, ops = _traced(config, progress)
    yield traced
    yield from _ops(seen, config)
    lifted = ops is not None and not any(f"aten::{made.__name__}" in ops for made in HOST_DATA)
    for kind, what, line, way_out in seen.hazards:
        if kind == "host data" and lifted:
            continue
        state = FAIL if _is_fatal(kind, config, refused=traced.state == FAIL) else WARN
        advice = way_out or _ADVICE[kind]
        yield Finding(kind, state, f"{what}, at {line}" if line else what, advice)


def _traced(config: Config, progress: Progress) -> tuple[Finding, Mapping[str, int] | None]:
    """Plan the job, which says whether the model can be traced and split, and its ops if it was."""
    item = f"split ({config.partition.strategy.value})"
    try:
        done = plan(config, progress)
    except Exception as error:  # noqa: BLE001 - an untraced forward is run
        found, _, advice = str(error).partition("Ways out: ")
        found = " ".join(found.splitlines()[:2]) or words_of(error)
        return Finding(item, FAIL, found, advice), None
    traced = config.partition.strategy is not Strategy.BREAKABLE
    mode = done.capture.resolution.resolved.value
    found = f"{words.count(len(done.image.pieces), 'piece')}, mode {mode}"
    notes = [*done.warnings, *done.skipped.values()]
    finding = Finding(item, WARN if notes else OK, "; ".join([found, *notes]))
    return finding, done.image.ops if traced else None


def _ops(seen: Observation, config: Config) -> Iterator[Finding]:
    """Say which ops keep to their schema, of those that the model calls."""
    breakable = config.partition.strategy is Strategy.BREAKABLE
    for op, argument, schema, is_write, is_models in seen.undeclared:
        does = "writes to" if is_write else "returns, or returns a view of,"
        found = f"{does} its argument {argument!r}, which the schema does not say: {schema}"
        state = FAIL if is_write and is_models and not breakable else WARN
        yield Finding(f"op {op}", state, found, _DECLARE)
    honest = sorted(set(seen.called) - {fault.op for fault in seen.undeclared})
    if honest:
        yield Finding("ops", OK, f"do what their schema says: {', '.join(honest)}")
    mine = {name for name in registered_names() if not name.startswith("pcgsvc::")}
    untried = sorted(mine - set(seen.called))
    if untried:
        yield Finding("ops", OK, f"not tried, since this run calls none: {', '.join(untried)}")


_RUN = "run job=doctor where the device is"
_DECLARE = "declare it (mutates_args, or Tensor(a!)), or use a copy"
_ADVICE = {
    "host data": "keep it on the device, as a buffer of the model",
    "host read": "compute it with tensors, or in a splitting op, which runs outside the graphs",
    "random numbers": "switch that off (module.eval(), p=0), or pass the numbers as an input",
    "row index": "if it can be negative, use k % pcgsvc.true_rows(x).sum() in its place",
    "attribute write": "write into a registered buffer in place, or return the value",
    "print": "take it out: it happens when the forward is traced or captured, and never again",
}


def _is_fatal(kind: str, config: Config, *, refused: bool) -> bool:
    """Whether a hazard keeps the job from working; `refused`: the model cannot be traced."""
    if kind == "row index":  # of numbers that are not negative nothing is wrong
        return False
    if kind == "random numbers":  # no two runs are alike, which `job=run` refuses
        return True
    if config.partition.strategy is Strategy.BREAKABLE:
        return kind != "print" and config.mode is not Mode.NONE
    return refused
