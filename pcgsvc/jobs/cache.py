"""`job=cache`: list, explain, check, clear, export and import the disk cache.

In: a config with `cache.action`. Out: text on a console. Builds nothing and captures nothing.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pcgsvc.cache.bundle import export_bundle, import_bundle
from pcgsvc.cache.programs import Artifacts, NoProgramError, explain
from pcgsvc.cache.reports import ABSENT
from pcgsvc.cache.store import Store
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.config import CacheAction, Config
from pcgsvc.errors import CacheError
from pcgsvc.forward.request import Request
from pcgsvc.jobs.preflight import check_cache_job
from pcgsvc.models.request import request_of
from pcgsvc.program.facts import program_facts
from pcgsvc.program.forms import NotCanonicalError
from pcgsvc.program.keys import key_of


def cache_job(config: Config, out: Console) -> None:
    """Do `config.cache.action` and print what it found.

    Raises:
        ConfigError: the cache is off, or a bundle's path is missing or unusable.
        CacheError: the store is damaged (`check`), cannot be written, or a bundle is refused.
    """
    actions: dict[CacheAction, Callable[[Config, Store], Iterator[str]]] = {
        CacheAction.LS: _ls,
        CacheAction.EXPLAIN: _explain,
        CacheAction.CHECK: _check,
        CacheAction.CLEAR: _clear,
        CacheAction.EXPORT: _export,
        CacheAction.IMPORT: _import,
    }
    check_cache_job(config)
    cache = config.cache
    with Store.open(cache.dir, mode=cache.mode, max_bytes=cache.max_bytes) as store:
        for line in actions[cache.action](config, store):
            out.print(escape(line), highlight=False, soft_wrap=True)


def _ls(config: Config, store: Store) -> Iterator[str]:
    programs = store.ls()
    where = store.folder.data if store.folder is not None else "-"
    yield f"{where}: {len(programs)} programs, {store.num_bytes() / 2**20:.1f} MiB in all"
    for program in programs:
        used = datetime.datetime.fromtimestamp(program.last_use).isoformat(" ", "seconds")
        words = ", ".join(
            f"{k}={v}"
            for k, v in program.summary.items()
            if not k.endswith(("digest", "inductor.config")) and v != ABSENT
        )
        yield (
            f"  {program.key[:12]}  {program.num_bytes / 2**20:7.2f} MiB  {program.num_pieces} "
            f"pieces  used {used}  {words}"
        )


def _explain(config: Config, store: Store) -> Iterator[str]:
    """Yield hit or miss for the composed config, and on a miss what differs."""
    request = request_of(config)
    threads = request.config.compiler.threads
    with contextlib.closing(CompilerFolder()) as folder, folder.in_use(threads):
        yield _hit_or_miss(request, store, folder)


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


def _check(config: Config, store: Store) -> Iterator[str]:
    found = store.check()
    yield (
        f"{found.num_programs} programs and {found.num_pieces} pieces are sound "
        f"({found.num_bytes / 2**20:.1f} MiB); {len(found.orphans)} pieces that no program lists, "
        f"{len(found.strays)} stray files, {len(found.quarantined)} in quarantine"
    )
    for problem in found.problems:
        yield f"  damaged: {problem}"
    if not found.ok:
        raise CacheError(
            f"cache check: {len(found.problems)} entries are damaged; each is a miss, and is "
            "rebuilt when it is next asked for."
        )


def _clear(config: Config, store: Store) -> Iterator[str]:
    yield f"cleared {store.clear() / 2**20:.1f} MiB"


def _export(config: Config, store: Store) -> Iterator[str]:
    info = export_bundle(store, _file(config))
    yield (
        f"{info.path}: {info.num_programs} programs, {info.num_pieces} pieces, "
        f"{info.num_bytes / 2**20:.1f} MiB"
    )
    yield f"sha256 {info.sha256}"


def _import(config: Config, store: Store) -> Iterator[str]:
    info = import_bundle(store, _file(config), expected_sha256=config.cache.import_sha256)
    yield f"{info.num_written} entries written, {info.num_present} were already stored"


def _file(config: Config) -> Path:
    assert config.cache.file is not None, "check_cache_job refuses it"
    return Path(config.cache.file)
