"""Every check of a config that needs no build, before any output is written.

In: a composed command. Out: nothing, or a `ConfigError`. Knows nothing of Hydra.
"""

from __future__ import annotations

import os
from pathlib import Path

from pcgsvc.cache.remote import open_remote
from pcgsvc.cache.root import check_place, why_not_writable
from pcgsvc.config import CacheAction, CacheMode, Config, Job, Strategy
from pcgsvc.config.compose import Command
from pcgsvc.config.devices import dtype_of, is_here
from pcgsvc.config.launchers import check_launcher
from pcgsvc.errors import CacheError, ConfigError, near
from pcgsvc.jobs.sweep.objective import check_objective
from pcgsvc.models.catalog import validate_model
from pcgsvc.ops.backends import find_backend
from pcgsvc.ops.expert_group import check_launch, refuse_sweep
from pcgsvc.ops.modes import resolve_mode
from pcgsvc.ops.registry import registered_names
from pcgsvc.ops.support import Support
from pcgsvc.partition.fx import canonical_op_name
from pcgsvc.report.existing import read_reports
from pcgsvc.report.plots import has_matplotlib
from pcgsvc.sizing.resolve import load_traffic, plan_for, resolve_config
from pcgsvc.torch_private import op_exists

_ENCODERS = ("encoder", "minilm")
"""Families that give sentence vectors and have no KV cache."""

_WITH_CACHE = (Job.RUN, Job.COMPILE, Job.CACHE, Job.VERIFY)
"""Jobs that open the disk cache."""


def check_command(command: Command) -> None:
    """Check every job of a command line, and that no job would write over another's report.

    Raises:
        ConfigError: as `check`; of several jobs, the message says which. Or the launcher's package
            is missing.
    """
    configs = command.jobs
    if command.launcher is not None:
        check_launcher(command.launcher)
    for at, config in enumerate(configs):
        try:
            if command.multirun:
                refuse_sweep(config)
            check(config)
            check_launch(config)
            if command.multirun:
                _check_sweep(config)
        except ConfigError as error:
            where = f" (job {at + 1} of {len(configs)}; none was run)" if len(configs) > 1 else ""
            raise ConfigError(f"{error}{where}") from error
    if command.multirun:
        check_objective(configs, command.sweeper)
    reports = [Path(c.report).absolute() for c in configs if c.report is not None]
    for path in reports:
        if reports.count(path) > 1:
            raise ConfigError(
                f"report: {reports.count(path)} jobs would write '{path}'; leave it out (each job "
                "writes report.json in a folder of its own), or sweep over it as well."
            )


def check(config: Config) -> None:
    """Raise `ConfigError` for a config that cannot be built."""
    found = resolve_config(config)
    resolved, device = found.config, found.device
    if resolved.dtype is not None:
        dtype_of(resolved)
    validate_model(resolved)
    backend = find_backend(resolved.attention.name)
    if is_here(device):  # else it is planned for, and its kernels need not load
        backend.check(device)
    _check_op_names(resolved)
    _check_unread(resolved)
    _check_outputs(resolved)
    _check_prompt(resolved)
    _check_inputs(config)
    _check_strict(resolved)


def _check_sweep(config: Config) -> None:
    """Refuse what a sweep could not do as asked."""
    if config.sweep.timeout_s is not None and not config.sweep.isolate:
        raise ConfigError(
            "sweep.timeout_s: set with sweep.isolate=false, where a job cannot be ended; leave one "
            "of them out."
        )
    _check_picture(config)


def _check_unread(config: Config) -> None:
    """Refuse settings that the job would ignore."""
    job = config.job
    if config.compare.reports and job is not Job.COMPARE:
        raise ConfigError(
            f"compare.reports: set, but job={job.value} does not read it; use job=compare."
        )
    if config.traffic is not None and job not in (Job.RUN, Job.SIZES):
        raise ConfigError(
            f"traffic: job={job.value} does not read it; use job=run to replay it, or job=sizes to "
            "choose sizes for it."
        )
    if config.prompt is not None and job is not Job.RUN:
        raise ConfigError(f"prompt: job={job.value} runs no model; use job=run.")
    if config.report is not None and job is Job.COMPARE:
        raise ConfigError("report: job=compare writes none; its files go to hydra.run.dir.")


def _check_picture(config: Config, name: str = "sweep.png") -> None:
    if config.strict and not has_matplotlib():
        raise ConfigError(
            f"strict=true, and {name} cannot be drawn: matplotlib is not installed (pip install "
            "matplotlib)."
        )


def _check_strict(config: Config) -> None:
    """Resolve the mode where that needs no trace: a Llama's boundaries are known."""
    if not config.strict or config.model.name in ("two_regions", "module", *_ENCODERS):
        return
    support = find_backend(config.attention.name).cudagraph_support
    why = f"attention={config.attention.name}"
    if config.model.name == "llama_moe":
        support, why = Support.NEVER, f"model.moe.backend={config.model.moe.backend.value}"
    resolution = resolve_mode(
        config.mode,
        support,
        num_boundaries=1,
        uniform_query_len=config.capture.uniform_query_len,
        why=why,
    )
    if resolution.reasons:
        raise ConfigError(f"strict=true, and {'; '.join(resolution.reasons)}")


def _check_op_names(config: Config) -> None:
    partition = config.partition
    for setting, names in (
        ("partition.splitting_ops", partition.splitting_ops or []),
        ("partition.extra_splitting_ops", partition.extra_splitting_ops),
    ):
        for name in names:
            canonical = canonical_op_name(name)
            if "::" in canonical and not op_exists(canonical):
                known = registered_names()
                raise ConfigError(
                    f"{setting}: {name!r} is no operator that torch knows{near(canonical, known)} "
                    f"Registered splitting ops: {', '.join(known)}; a name that exists but is not "
                    "in the model's graph is answered with the operators that are."
                )


def _check_outputs(config: Config) -> None:
    """Find out before the work, not after it, that its results cannot be written."""
    if config.report is not None:
        _check_file("report", config.report)
    if config.debug.dump_dir is not None:
        _check_folder("debug.dump_dir", Path(config.debug.dump_dir).absolute())
    if config.job in _WITH_CACHE:
        try:
            check_place(config.cache, needed=config.job is Job.CACHE)
            open_remote(config.cache)
        except CacheError as error:
            raise ConfigError(str(error)) from error
    if config.job is Job.CACHE:
        check_cache_job(config)
    elif config.job is Job.COMPILE:
        _check_compile(config)


def _check_compile(config: Config) -> None:
    """Refuse `job=compile` where nothing could be stored, or loaded again."""
    cache = config.cache
    if cache.mode is CacheMode.OFF:
        raise ConfigError(
            "cache.mode: got 'off' with job=compile, which fills the cache; use readwrite, or "
            "job=run to build without a cache."
        )
    if config.partition.strategy is Strategy.BREAKABLE:
        raise ConfigError(
            "partition.strategy: got 'breakable' with job=compile; its forward is run anew at each "
            "start, so there is nothing to store. Use fx or inductor, or job=run."
        )
    if cache.mode is CacheMode.REFRESH and (reason := why_not_writable(cache)):
        raise ConfigError(
            f"cache.mode: got 'refresh' with job=compile, but {reason}; set cache.dir to a folder "
            "that can be written."
        )


def check_cache_job(config: Config) -> None:
    """Refuse an action without its remote, and a bundle that cannot be read or written."""
    cache = config.cache
    if cache.action in (CacheAction.PUSH, CacheAction.PULL) and cache.remote is None:
        raise ConfigError(
            f"cache.remote: cache.action={cache.action.value} needs the URL of a remote, e.g. "
            "cache.remote=s3://bucket/folder."
        )
    if cache.action not in (CacheAction.EXPORT, CacheAction.IMPORT):
        return
    if not cache.file:
        raise ConfigError(
            f"cache.file: cache.action={cache.action.value} needs the path of a bundle, e.g. "
            "cache.file=programs.tar."
        )
    if cache.action is CacheAction.EXPORT:
        _check_file("cache.file", cache.file)
    elif not Path(cache.file).is_file():
        path = Path(cache.file).absolute()
        raise ConfigError(f"cache.file: there is no file '{path}' to import.")


def _check_file(setting: str, name: str) -> None:
    """Refuse a path where no file can be written."""
    path = Path(name).absolute()
    if not name or path.is_dir():
        raise ConfigError(f"{setting}: got {name!r}, the path of a file is needed.")
    _check_folder(setting, path.parent)


def _check_folder(setting: str, folder: Path) -> None:
    """Refuse a folder that neither exists nor can be made."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"{setting}: '{existing}' is no folder; name another place.")
    # No file can be made in /proc and /sys, whatever `access` says.
    is_kernels = Path(os.path.realpath(existing)).parts[1:2] in (("proc",), ("sys",))
    if is_kernels or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: '{existing}' cannot be written; name another place.")


def _check_inputs(config: Config) -> None:
    """Read reports and traffic before the work that they are for.

    Args:
        config: not resolved, as `job=sizes` reads it: no `capture.max_size` is no limit.
    """
    if config.job is Job.COMPARE:
        read_reports(config.compare.reports)
        _check_picture(config)
    elif config.job is Job.SIZES:
        plan_for(config, {})
        _check_picture(config, "sizes.png")
    elif config.traffic is not None:
        query_len = config.capture.uniform_query_len
        load_traffic(config, config.traffic).as_dispatched(query_len)


def _check_prompt(config: Config) -> None:
    """Refuse a prompt for which there can be no tokenizer."""
    if config.prompt is None:
        return
    if config.model.name in _ENCODERS:
        raise ConfigError(
            f"prompt: model={config.model.name} continues no text, it gives sentence vectors: in "
            "Python, runner.embed([text, ...]). Use model=smollm2 to continue a prompt."
        )
    if config.model.name in ("two_regions", "llama_moe", "module") or (
        config.model.name == "llama" and config.model.weights is None
    ):
        raise ConfigError(
            f"prompt: model={config.model.name} without a checkpoint of text has no tokenizer; use "
            "model=smollm2, or model=llama with a .gguf checkpoint as model.weights."
        )
