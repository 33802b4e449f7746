"""The command line.

In: `sys.argv`. Out: an exit code: 0 done, 1 a job failed (verification included), 2 bad
configuration, 130 interrupted; of a sweep, 2 means that no job was run. Every job of a sweep is
composed and validated before Hydra creates a folder; then Hydra's own entry takes over for output
folders, logging and multirun, and calls `sweep.task` for each job.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TextIO

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pcgsvc.config import Job
from pcgsvc.config.compose import CONFIG_MODULE, Command, compose_command, register_schema
from pcgsvc.config.launchers import register_launchers
from pcgsvc.config.settings import help_text, short_help
from pcgsvc.config.tree import words_of
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.sweep.outcome import BAD_CONFIG, FAILED, INTERRUPTED, OK
from pcgsvc.version import __version__

_FIRST_SPEAKS_S = 5.0
"""How long another rank leaves the first one to print why a command is refused, in seconds."""


def entry() -> None:
    """Entry point of the `pcgsvc` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal must not end a job
    if (rank := rank_among_many()) is not None:
        sys.stdout, sys.stderr = RankedStream(sys.stdout, rank), RankedStream(sys.stderr, rank)
    logging.raiseExceptions = False  # no traceback per log line when the reader (`| head`) is gone
    # `model.target` may name modules of the folder that the command was started in. `python -m` has
    # it on the path already; else last, so that no file in it replaces an installed package.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        words = _parse(argv)
        if words.help:
            _print(short_help(_groups()))
            return OK
        if words.help_all:
            _print(help_text(_groups(), min(shutil.get_terminal_size().columns, 100)))
            return OK
        if words.version:
            _print(f"pcgsvc {__version__} (hydra-core {hydra.__version__})")
            return OK
        if words.config_path is not None:
            raise ConfigError(
                "--config-path: pcgsvc needs its own settings; add yours with --config-dir."
            )
        register_launchers()
        command = None if _is_for_hydra(words) else _check(words)
        if command is not None and command.jobs[0].job is Job.CONFIG:
            return _explain(words)
        return _hand_over(argv, words, command)
    except SystemExit as ended:  # argparse after a bad option, Hydra after its own help
        return ended.code if isinstance(ended.code, int) else FAILED
    except KeyboardInterrupt:
        _print("pcgsvc: interrupted", error=True)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last door: a message and a code, no traceback
        if _is_verbose(argv):
            traceback.print_exception(error)
        return _complain(error)


def _complain(error: Exception) -> int:
    """Print an error that no job has logged, and return its code."""
    text = str(error) if isinstance(error, ConfigError) else words_of(error)
    if isinstance(error, ConfigError) and rank_among_many():
        time.sleep(_FIRST_SPEAKS_S)  # it is the same on every rank; torchrun ends all with one
        return BAD_CONFIG
    if isinstance(error, (ConfigError, HydraException, OmegaConfBaseException)):
        _print(f"pcgsvc: {text}", error=True)
        return BAD_CONFIG
    _print(f"pcgsvc: {type(error).__name__}: {text}", error=True)
    return FAILED


def _print(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout)


# ---- before Hydra --------------------------------------------------------------------------------


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line with Hydra's parser; Hydra reads it again."""
    parser = argparse.ArgumentParser(
        prog="pcgsvc",
        usage="pcgsvc [-m] [--config-dir DIR] [setting=value ...] (pcgsvc -h tells more)",
        parents=[get_args_parser()],
        add_help=False,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    parser.add_argument("--version", action="store_true")  # ours, in place of Hydra's
    parser.add_argument("--help-all", action="store_true")
    parser.set_defaults(config_name="config")
    return parser.parse_intermixed_args(list(argv))


def _is_for_hydra(words: argparse.Namespace) -> bool:
    """Whether Hydra shows something of its own and runs no job, or runs one again."""
    own = (words.hydra_help, words.resolve, words.shell_completion, words.cfg, words.info)
    return any(own) or words.experimental_rerun is not None


def _is_verbose(argv: Sequence[str]) -> bool:
    """Whether `hydra.verbose` asks for tracebacks; composing it may be what failed."""
    pairs = (word.partition("=") for word in argv)
    values = [value for key, _, value in pairs if key.lstrip("+") == "hydra.verbose"]
    return bool(values) and values[-1].lower() not in ("false", "null", "[]", "")


def _groups() -> dict[str, list[str]]:
    """Return the shipped config groups with their options."""
    found = {
        folder.name: sorted(f.name.removesuffix(".yaml") for f in folder.iterdir())
        for folder in resources.files("pcgsvc.conf").iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    }
    return dict(sorted(found.items()))


def _check(words: argparse.Namespace) -> Command:
    """Compose every job and check all of it that can be checked without building."""
    from pcgsvc.jobs.preflight import check_command

    setup_globals()  # Hydra's resolvers, such as ${now:…}; the process is ours
    command = compose_command(
        words.overrides,
        multirun=words.multirun,
        config_dir=words.config_dir,
        config_name=words.config_name,
    )
    check_command(command)
    if len(command.jobs) > 1 and any(config.job is Job.CONFIG for config in command.jobs):
        raise ConfigError("job: got 'config' in a sweep; it explains one configuration at a time.")
    return command


def _explain(words: argparse.Namespace) -> int:
    from pcgsvc.jobs.explain import explain
    from pcgsvc.report.tables import console

    explain(words.overrides, console(), config_dir=words.config_dir, config_name=words.config_name)
    return OK


# ---- under Hydra ---------------------------------------------------------------------------------


class _PackagedSettings(SearchPathPlugin):
    """Adds our YAML behind a user's folder; Hydra's own `--config-dir` would put it before."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append to Hydra's search path."""
        search_path.append(provider="pcgsvc", path=CONFIG_MODULE)


def _hand_over(argv: Sequence[str], words: argparse.Namespace, command: Command | None) -> int:
    """Let Hydra run the job or the sweep, or show what it was asked for; return the exit code."""
    from pcgsvc.jobs.sweep.task import run_task
    from pcgsvc.jobs.sweep.whole import run_sweep

    register_schema()
    path = CONFIG_MODULE
    if words.config_dir is not None:
        path, argv = str(Path(words.config_dir).resolve()), _without_config_dir(argv)
        Plugins.instance().register(_PackagedSettings)
    hydra_main = hydra.main(version_base="1.3", config_path=path, config_name="config")
    codes: list[int] = []

    def task(composed: DictConfig) -> int:
        codes.append(run_task(composed))
        return codes[-1]

    def launch(each: Callable[[DictConfig], object], override: str) -> None:
        # Hydra's parser wants all overrides in one run, so this one stands before the first.
        at = argv.index(words.overrides[0]) if words.overrides else len(argv)
        _run(hydra_main(each), [*argv[:at], override, *argv[at:]], "hydra.sweep.dir")

    if command is not None and command.multirun:
        return run_sweep(command, launch, _complain)
    _run(hydra_main(task), argv, "hydra.run.dir")
    return max(codes, default=OK)


def _run(entry: Callable[[], object], argv: Sequence[str], setting: str) -> None:
    """Call Hydra's entry with a command line; its own errors reach `main`."""
    line, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [line[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        entry()
    except OSError as error:  # a job's own are caught where it runs
        raise ConfigError(
            f"{setting}: the output folder cannot be made or written: {error}"
        ) from error
    finally:
        sys.argv = line
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _without_config_dir(argv: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    return parser.parse_known_args(list(argv))[1]


# ---- one process among several -------------------------------------------------------------------


def rank_among_many() -> int | None:
    """Return this process's rank; None: it was not started as one of several."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else None


class RankedStream(io.TextIOBase, TextIO):
    """Text on its way to a stream that others write to as well; never a terminal.

    Args:
        stream: where the text goes; flushed, not closed.
        rank: stands before each line.
    """

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream, self._prefix = stream, f"[rank {rank}] "
        self._at_start = True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute
        """The stream's."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write text, the rank before each line that it begins."""
        if text:
            lines = text[:-1].replace("\n", f"\n{self._prefix}") + text[-1]
            self._stream.write(self._prefix * self._at_start + lines)
            self._at_start = text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        return self._stream.fileno()
