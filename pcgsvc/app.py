"""The command line.

In: `sys.argv`. Out: an exit code: 0 done, 1 a job failed (verification included), 2 bad
configuration. Every job of a sweep is composed and validated before Hydra creates a folder; then
Hydra's own entry takes over for output folders, logging and multirun.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pcgsvc.compose import compose, expand_sweep, from_hydra, register_schema
from pcgsvc.config import Config
from pcgsvc.errors import ConfigError, PcgError

logger = logging.getLogger(__name__)

OK, FAILED, BAD_CONFIG = 0, 1, 2


def entry() -> None:
    """Entry point of the `pcgsvc` command."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    words = _read_words(argv)
    if words.only_hydra:
        _hand_over(argv, [])
        return OK
    jobs = []
    try:
        sweep = expand_sweep(words.overrides) if words.multirun else [list(words.overrides)]
        for overrides in sweep:
            plain = [o for o in overrides if not o.lstrip("+~").startswith("hydra")]
            jobs.append(_checked(plain, words.config_dir, words.config_name))
    except ConfigError as error:
        print(f"pcgsvc: {error}", file=sys.stderr)  # noqa: T201 - before logging is set up
        return BAD_CONFIG
    codes: list[int] = []
    _hand_over(argv, codes)
    return max(codes, default=OK)


class _Words(argparse.Namespace):
    overrides: list[str]
    multirun: bool
    config_dir: str | None
    config_name: str
    only_hydra: bool


def _read_words(argv: Sequence[str]) -> _Words:
    """Read what pcgsvc must know of Hydra's command line; Hydra reads it again."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--experimental-rerun")
    parser.add_argument("--package", "-p")
    for flags in (
        ("--help", "-h"),
        ("--hydra-help",),
        ("--version",),
        ("--resolve",),
        ("--shell-completion", "-sc"),
    ):
        parser.add_argument(*flags, dest="only_hydra", action="store_true")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--cfg", "-c", dest="cfg")
    parser.add_argument("--info", "-i", dest="info", nargs="?", const="all")
    words = parser.parse_args(list(argv), namespace=_Words())
    words.only_hydra = words.only_hydra or words.cfg is not None or words.info is not None
    return words


def _checked(overrides: Sequence[str], config_dir: str | None, config_name: str) -> Config:
    """Compose one job and check all of it that can be checked without building."""
    from pcgsvc.preflight import check

    config = compose(overrides, config_dir=config_dir, config_name=config_name)
    check(config)
    return config


def _hand_over(argv: Sequence[str], codes: list[int]) -> None:
    """Let Hydra run the job, or the jobs of a sweep; their exit codes go to `codes`."""

    def task(composed: DictConfig) -> int:
        code = _job(composed)
        codes.append(code)
        return code

    register_schema()
    sys.argv[1:] = list(argv)
    hydra.main(version_base="1.3", config_path="pkg://pcgsvc.conf", config_name="config")(task)()


def _job(composed: DictConfig) -> int:
    """Run one job and turn its errors into one readable message and a code."""
    from pcgsvc.jobs import run_job

    hydra_config = HydraConfig.get()
    try:
        config = from_hydra(composed)
        folder = Path(hydra_config.runtime.output_dir)
        run_job(config, Path(config.report) if config.report else folder / "report.json")
    except PcgError as error:
        if hydra_config.verbose:
            logger.exception("job failed")
        logger.error("%s: %s", type(error).__name__, error)
        return BAD_CONFIG if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        if hydra_config.verbose:
            logger.exception("job failed")
        logger.error(
            "%s: %s (hydra.verbose=true shows where)", type(error).__name__, str(error).strip()
        )
        return FAILED
    return OK
