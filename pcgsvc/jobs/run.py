"""The jobs of the command line, as functions of a config.

In: a validated config. Out: a report, and what a person reads. Knows nothing of Hydra.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from pcgsvc.capture.plan import plan_capture
from pcgsvc.check.timing import ReduceOverhead, time_entries
from pcgsvc.config import Config, Job
from pcgsvc.config.devices import device_of
from pcgsvc.errors import CacheError, ConfigError, PcgError, UncoveredError, VerifyError
from pcgsvc.events import Phases, Progress, phase_events
from pcgsvc.forward.request import make_samples
from pcgsvc.forward.sampling import Sampling
from pcgsvc.jobs.cache import cache_job
from pcgsvc.jobs.compile import compile_and_prove, problem_of
from pcgsvc.jobs.doctor import FAIL, examine
from pcgsvc.jobs.plan.planner import plan
from pcgsvc.jobs.plan.section import plan_report
from pcgsvc.jobs.sizes import replay, sizes_job
from pcgsvc.jobs.verify import verify_all
from pcgsvc.ops.collectives import rank_and_world
from pcgsvc.ops.expert_group import uses_group
from pcgsvc.ops.support import Support
from pcgsvc.pipeline import build_from_config
from pcgsvc.report.comparison import show_and_write
from pcgsvc.report.existing import read_reports
from pcgsvc.report.plan_html import draw_plan
from pcgsvc.report.progress import progress_for
from pcgsvc.report.report import report_head, write_report
from pcgsvc.report.sizes_table import show_traffic
from pcgsvc.report.tables import console, show_place, show_report, show_rows, show_text
from pcgsvc.serve.runner import Runner

logger = logging.getLogger(__name__)


def run_job(config: Config, report_path: Path) -> dict[str, Any]:
    """Do `config.job`, print what it found, and write the report.

    Of several processes that share a model's experts, the first one prints, and each other one
    writes its report beside the first one's, as `NAME.rank1.json` and so on.

    Returns:
        The report; empty for a job that makes none.

    Raises:
        VerifyError: a replay differs from plain execution; the report is written all the same.
    """
    jobs: dict[Job, Callable[[Config, Path, Console], dict[str, Any] | None]] = {
        Job.RUN: _run,
        Job.PLAN: _plan,
        Job.COMPILE: _compile,
        Job.CACHE: lambda config, report_path, out: cache_job(config, out),
        Job.COMPARE: _compare,
        Job.CONFIG: _config,
        Job.SIZES: sizes_job,
        Job.VERIFY: _verify,
        Job.DOCTOR: _doctor,
    }
    rank, _ = (rank_and_world() if uses_group(config) else None) or (0, 1)
    if rank:
        report_path = report_path.with_suffix(f".rank{rank}{report_path.suffix}")
    return jobs[config.job](config, report_path, console(quiet=rank > 0)) or {}


def _compare(config: Config, report_path: Path, out: Console) -> None:
    """Compare existing reports; the files go where a report would."""
    rows = read_reports(config.compare.reports)
    title = f"comparison of {len(rows)} report{'s' if len(rows) > 1 else ''}"
    show_and_write(out, title, rows, report_path.parent)


def _config(config: Config, report_path: Path, out: Console) -> NoReturn:
    raise ConfigError(
        "job: got 'config', which tells who set each setting, and so needs a command line: "
        "python -m pcgsvc job=config."
    )


def _plan(config: Config, report_path: Path, out: Console) -> dict[str, Any]:
    started = time.perf_counter()
    with progress_for(out) as progress:
        done = plan(config, progress)
    report = plan_report(done)
    draw_plan(report, report_path.absolute())
    report["compile"]["seconds"]["total"] = time.perf_counter() - started
    return _finish(report, report_path, out)


def _compile(config: Config, report_path: Path, out: Console) -> dict[str, Any]:
    started = time.perf_counter()
    with progress_for(out) as progress, _refusal_reported(progress, report_path, out):
        report = compile_and_prove(config, progress)
    report["compile"]["seconds"]["total"] = time.perf_counter() - started
    _finish(report, report_path, out)
    if (problem := problem_of(report)) is not None:
        raise CacheError(f"job=compile: {problem}")
    return report


def _verify(config: Config, report_path: Path, out: Console) -> dict[str, Any]:
    """Try every mode and strategy, and report; VerifyError if any was wrong."""
    with progress_for(out) as progress:
        done = verify_all(config, progress)
    head = report_head(config, device_of(config))
    report = {**done.report, **head, "tries": [one._asdict() for one in done.tries]}
    _show_rows(report["tries"], report, report_path, out)
    if (problem := done.problem()) is not None:
        raise VerifyError(f"job=verify: {problem}")
    return report


def _doctor(config: Config, report_path: Path, out: Console) -> dict[str, Any]:
    """Look at machine and model, and report; PcgError if a job would not work."""
    with progress_for(out) as progress:
        found = examine(config, progress)
    head = report_head(config, device_of(config))
    report = {**head, "doctor": [one._asdict() for one in found]}
    _show_rows(report["doctor"], report, report_path, out)
    if failed := [one.item for one in found if one.state == FAIL]:
        raise PcgError(f"job=doctor: would not work with these settings: {', '.join(failed)}")
    return report


def _show_rows(
    rows: list[dict[str, Any]], report: dict[str, Any], path: Path, out: Console
) -> None:
    write_report(report, path)
    show_rows(out, rows)
    show_place(out, path.absolute())


def _run(config: Config, report_path: Path, out: Console) -> dict[str, Any]:
    """Build, verify every entry, time it, continue the prompt, report."""
    with progress_for(out) as progress, contextlib.ExitStack() as life:
        with _refusal_reported(progress, report_path, out, bench=[]):
            runner = life.enter_context(build_from_config(config, progress, check=True))
        report = runner.report
        report["bench"] = _timed(runner, progress) if runner.request.config.bench.enabled else []
        if config.traffic is not None:
            with phase_events(logger, "traffic", 0):
                report["traffic"] = replay(runner, config, progress)
        text = _continue_prompt(runner, config) if config.prompt is not None else None
        report["dispatch"] = runner.stats()
    _finish(report, report_path, out)
    if "traffic" in report:
        show_traffic(out, report["traffic"])
    if text is not None:
        show_text(out, str(config.prompt), text)
    refused = report.get("traffic", {}).get("refused")
    if refused:
        raise UncoveredError(
            f"traffic: {sum(r['count'] for r in refused)} calls were refused; the first: "
            f"{refused[0]['reason']}"
        )
    return report


def _timed(runner: Runner, progress: Progress) -> list[dict[str, Any]]:
    """Time every entry."""
    config = runner.request.config
    samples = make_samples(runner.request, runner.memory, seed=config.seed + 2)
    model, memory, table = runner.model, runner.memory, runner.table
    whole = plan_capture(runner.request, model.image).support is Support.ALWAYS
    rival = None
    if config.bench.reduce_overhead and whole and not uses_group(config):
        rival = ReduceOverhead(model)
    with runner.lock, Phases(progress).phase("bench", len(table.entries)):
        return time_entries(
            model, memory, table, samples, config, rival=rival, on_entry=progress.advance
        )


@contextlib.contextmanager
def _refusal_reported(
    progress: Progress, report_path: Path, out: Console, **sections: Any
) -> Iterator[None]:
    """Write and show the report of what a block refuses, with further sections, before raising."""
    try:
        yield
    except VerifyError as error:
        if error.report is not None:
            progress.stop()
            _finish({**error.report, **sections}, report_path, out)
        raise


def _continue_prompt(runner: Runner, config: Config) -> str:
    tokenizer = runner.request.bundle.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"prompt: model={config.model.name} has no tokenizer; use model=smollm2, or leave the "
            "prompt out."
        )
    ids = tokenizer.encode_chat(str(config.prompt))
    own = runner.request.bundle.sampling or Sampling()
    sampling = replace(own, seed=config.seed)
    (text,) = runner.generate([ids], config.max_new_tokens, sampling=sampling)
    return str(text)


def _finish(report: dict[str, Any], path: Path, out: Console) -> dict[str, Any]:
    write_report(report, path)
    show_report(out, report)
    show_place(out, path.absolute())
    return report
