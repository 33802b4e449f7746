"""`job=cache`: looking at the disk cache and moving it about.

In: a config with `cache.action`. Out: words for a person. Builds nothing, captures nothing; knows
nothing of graphs.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pcgsvc.cache.bundle import export_bundle, import_bundle
from pcgsvc.cache.programs import Artifacts, NoProgramError, explain
from pcgsvc.cache.reports import ABSENT
from pcgsvc.cache.store import Store
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.config import CacheAction, CacheMode, Config
from pcgsvc.errors import CacheError, ConfigError
from pcgsvc.forward.request import Request
from pcgsvc.models.request import request_of
from pcgsvc.program.facts import program_facts
from pcgsvc.program.guards import NotCanonicalError
from pcgsvc.program.keys import key_of

logger = logging.getLogger(__name__)


def cache_job(config: Config, out: Console) -> None:
    """Do `config.cache.action` and print what it found.

    Raises:
        ConfigError: the cache is off, or a bundle's path is missing.
        CacheError: the store is damaged (`check`), cannot be written, or a bundle is refused.
    """
    actions: dict[CacheAction, Callable[[Config, Store, Console], None]] = {
        CacheAction.LS: _ls,
        CacheAction.EXPLAIN: _explain,
        CacheAction.CHECK: _check,
        CacheAction.CLEAR: _clear,
        CacheAction.EXPORT: _export,
        CacheAction.IMPORT: _import,
    }
    cache = config.cache
    if cache.mode is CacheMode.OFF:
        raise ConfigError("cache.mode: got 'off' with job=cache; there is no cache to look at.")
    with Store.open(cache.dir, mode=cache.mode, max_bytes=cache.max_bytes) as store:
        actions[cache.action](config, store, out)


def _say(out: Console, text: str) -> None:
    out.print(escape(text), highlight=False, soft_wrap=True)


def _ls(config: Config, store: Store, out: Console) -> None:
    programs = store.ls()
    where = store.folder.data if store.folder is not None else "-"
    _say(out, f"{where}: {len(programs)} programs, {store.num_bytes() / 2**20:.1f} MiB in all")
    for program in programs:
        used = datetime.datetime.fromtimestamp(program.last_use).isoformat(" ", "seconds")
        words = ", ".join(
            f"{k}={v}"
            for k, v in program.summary.items()
            if not k.endswith(("digest", "inductor.config")) and v != ABSENT
        )
        _say(
            out,
            f"  {program.key[:12]}  {program.num_bytes / 2**20:7.2f} MiB  {program.num_pieces} "
            f"pieces  used {used}  {words}",
        )


def _explain(config: Config, store: Store, out: Console) -> None:
    """Say hit or miss for the composed config, and on a miss what differs."""
    request = request_of(config)
    folder = CompilerFolder()
    try:
        with folder.in_use(request.config.compiler.threads):
            _say(out, _hit_or_miss(request, store, folder))
    finally:
        folder.close()


def _hit_or_miss(request: Request, store: Store, folder: CompilerFolder) -> str:
    module, constants = request.bundle.module, request.constants
    artifacts = Artifacts(request.config, request.device, store, folder)
    try:
        facts = program_facts(
            request.config,
            module,
            request.inputs,
            constants,
            artifacts.environment,
            request.bundle.facts,
        )
    except NotCanonicalError as error:
        return f"miss: the program cannot be stored: {error}"
    key = key_of(facts)[:12]
    try:
        artifacts.load(facts, module, constants)
    except NoProgramError as error:
        return f"miss: program {key}: {error}. {explain(store, facts)}"
    return f"hit: program {key}, {artifacts.counts.loaded} pieces"


def _check(config: Config, store: Store, out: Console) -> None:
    found = store.check()
    _say(
        out,
        f"{found.num_programs} programs and {found.num_pieces} pieces are sound "
        f"({found.num_bytes / 2**20:.1f} MiB); {len(found.orphans)} pieces that no program lists, "
        f"{len(found.strays)} stray files, {len(found.quarantined)} in quarantine",
    )
    for problem in found.problems:
        _say(out, f"  damaged: {problem}")
    if not found.ok:
        raise CacheError(
            f"cache check: {len(found.problems)} entries are damaged; each is a miss, and is "
            "rebuilt when it is next asked for."
        )


def _clear(config: Config, store: Store, out: Console) -> None:
    _say(out, f"cleared {store.clear() / 2**20:.1f} MiB")


def _export(config: Config, store: Store, out: Console) -> None:
    info = export_bundle(store, _file(config))
    _say(
        out,
        f"{info.path}: {info.num_programs} programs, {info.num_pieces} pieces, "
        f"{info.num_bytes / 2**20:.1f} MiB\nsha256 {info.sha256}",
    )


def _import(config: Config, store: Store, out: Console) -> None:
    info = import_bundle(store, _file(config), expected_sha256=config.cache.import_sha256)
    _say(out, f"{info.num_written} entries written, {info.num_present} were there already")


def _file(config: Config) -> Path:
    if config.cache.file is None:
        raise ConfigError(
            f"cache.file: cache.action={config.cache.action.value} needs the path of a bundle, "
            "e.g. cache.file=programs.tar."
        )
    return Path(config.cache.file)
