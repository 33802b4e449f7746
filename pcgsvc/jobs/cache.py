"""`job=cache`: list, explain, check, clear, export, import, push and pull the disk cache.

In: a config with `cache.action`. Out: text on a console. Builds nothing and captures nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from pcgsvc.build.load import facts_of
from pcgsvc.cache import transfer
from pcgsvc.cache.bundle import export_bundle, import_bundle
from pcgsvc.cache.envelope import MissError
from pcgsvc.cache.programs import Artifacts, NoProgramError, explain
from pcgsvc.cache.remote import Remote, open_remote
from pcgsvc.cache.reports import ProgramInfo
from pcgsvc.cache.store import Store
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.config import CacheAction, CacheMode, Config, from_dict, resolve
from pcgsvc.config.devices import is_here
from pcgsvc.config.settings import word_of as settings_word
from pcgsvc.errors import CacheError
from pcgsvc.forward.request import Request
from pcgsvc.jobs.preflight import check_cache_job
from pcgsvc.models.request import request_of
from pcgsvc.program.forms import NotCanonicalError
from pcgsvc.program.keys import config_facts, flatten, key_of
from pcgsvc.report import words


def cache_job(config: Config, out: Console) -> None:
    """Do `config.cache.action` and print what it found.

    Raises:
        ConfigError: the cache is off, or a bundle's path is missing or unusable.
        CacheError: the store is damaged (`check`), cannot be written, or a bundle is refused; or
            the remote fails, or holds what may not be loaded.
    """
    actions: dict[CacheAction, Callable[[Config, Store], Iterator[str]]] = {
        CacheAction.LS: _ls,
        CacheAction.EXPLAIN: _explain,
        CacheAction.CHECK: _check,
        CacheAction.CLEAR: _clear,
        CacheAction.EXPORT: _export,
        CacheAction.IMPORT: _import,
        CacheAction.PUSH: _push,
        CacheAction.PULL: _pull,
    }
    check_cache_job(config)
    cache = config.cache
    mode = CacheMode.READ if cache.action in (CacheAction.LS, CacheAction.CHECK) else cache.mode
    remote = open_remote(cache) if cache.action is CacheAction.EXPLAIN else None
    with Store.open(cache.dir, mode=mode, max_bytes=cache.max_bytes, remote=remote) as store:
        if cache.action is CacheAction.CLEAR and not _may_clear(config, store, out):
            out.print("nothing was deleted")
            return
        for line in actions[cache.action](config, store):
            out.print(escape(line), highlight=False, soft_wrap=True)


def _may_clear(config: Config, store: Store, out: Console) -> bool:
    """Ask, where somebody is there to answer."""
    if config.cache.yes or not (out.is_terminal and sys.stdin.isatty()):
        return True
    programs = words.count(len(store.ls()), "program")
    size = words.memory(store.num_bytes())
    question = f"Delete {programs} ({size}) in {_place(store)}? [y/N] "
    return out.input(escape(question)).strip().lower() in ("y", "yes")


def _place(store: Store) -> str:
    return "-" if store.folder is None else str(store.folder.data)


def _ls(config: Config, store: Store) -> Iterator[str]:
    programs, unset = store.ls(), flatten(config_facts(Config()))
    count, size = words.count(len(programs), "program"), words.memory(store.num_bytes())
    yield f"{_place(store)}: {count}, {size} in all"
    for program in programs:
        facts = flatten(program.facts)
        made, used = map(_date, (program.created, program.last_use))
        device = facts.get("gpu", facts.get("device"))
        pieces = words.count(program.num_pieces, "piece")
        yield f"  {program.key[:12]}  {facts.get('module')} ({facts.get('tensors')}) on {device}"
        yield (
            f"      made {made}, last used {used}, {words.memory(program.num_bytes)} in {pieces}, "
            f"torch {facts.get('torch')}"
        )
        settings = [
            f"{name.removeprefix('config.')}={settings_word(value)}"
            for name, value in facts.items()
            if name.startswith("config.") and value != unset.get(name)
        ]
        yield f"      {' '.join(settings)}"


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def _explain(config: Config, store: Store) -> Iterator[str]:
    """Yield hit or miss for the composed config, and on a miss what differs."""
    request = request_of(config)
    threads = request.config.compiler.threads
    with contextlib.closing(CompilerFolder()) as folder, folder.in_use(threads):
        yield _hit_or_miss(request, store, folder)


def _hit_or_miss(request: Request, store: Store, folder: CompilerFolder) -> str:
    artifacts = Artifacts(request.config, request.device, store, folder)
    try:
        facts = facts_of(request, artifacts)
    except NotCanonicalError as error:
        return f"miss: the program cannot be stored: {error}"
    key = key_of(facts)[:12]
    try:
        artifacts.load(facts, request.bundle.module, request.constants)
    except NoProgramError as error:
        return f"miss: program {key}: {error}. {explain(store, facts)}"
    return f"hit: program {key}, {words.count(artifacts.pieces.counts.loaded, 'piece')}"


def _check(config: Config, store: Store) -> Iterator[str]:
    found = store.check()
    yield (
        f"{words.count(found.num_programs, 'program')} and "
        f"{words.count(found.num_pieces, 'piece')} sound ({words.memory(found.num_bytes)}); "
        f"{words.count(len(found.orphans), 'piece')} without a program, "
        f"{words.count(len(found.strays), 'stray file')}, {len(found.quarantined)} in quarantine"
    )
    damaged = [f"{problem.what}: {problem.cause}" for problem in found.problems]
    for program in store.ls():
        name = f"program {program.key[:12]}"
        try:
            elsewhere = _load_all(program, store)
        except (NoProgramError, MissError) as error:
            damaged.append(f"{name} cannot be loaded: {error}")
        else:
            yield f"  {name}: {'loaded' if elsewhere is None else f'not loaded: {elsewhere}'}"
    remote = open_remote(config.cache)
    if remote is not None:
        there = transfer.check(remote)
        yield f"{remote.url}: {words.count(there.num_present, 'entry', 'entries')} sound"
        damaged += [f"{remote.url}: {problem}" for problem in there.refused]
    for problem in damaged:
        yield f"  damaged: {problem}"
    if damaged:
        raise CacheError(
            f"cache check: {words.count(len(damaged), 'entry', 'entries')} damaged; each is a "
            "miss, and is rebuilt when it is next asked for."
        )


def _load_all(program: ProgramInfo, store: Store) -> str | None:
    """Load a program with the compiler settings that it was stored with; see `load_all`."""
    facts = flatten(program.facts)
    device = torch.device(facts["device"])
    if "device.index" in facts:
        device = torch.device(facts["device"], facts["device.index"])
    if not is_here(device):
        return f"it is for {facts.get('gpu', device)}, which this machine lacks"
    config = _stored_settings(facts, device)
    threads = config.compiler.threads
    with contextlib.closing(CompilerFolder()) as folder, folder.in_use(threads):
        return Artifacts(config, device, store, folder).load_all(program)


def _stored_settings(facts: Mapping[str, Any], device: torch.device) -> Config:
    """Return a config that compiles as the one did that a program was stored with.

    It captures nothing: for which sizes that one did is not known.
    """
    own: dict[str, Any] = {"options": {}}
    for name, value in facts.items():
        if name.startswith("config.compiler.options."):
            own["options"][name.removeprefix("config.compiler.options.")] = value
        elif name.startswith("config.compiler.") and name != "config.compiler.options":
            own[name.removeprefix("config.compiler.")] = value
    return resolve(from_dict({"compiler": own, "mode": "none"}), device_type=device.type)


def _clear(config: Config, store: Store) -> Iterator[str]:
    yield f"cleared {_place(store)}: {words.memory(store.clear())}"


def _export(config: Config, store: Store) -> Iterator[str]:
    info = export_bundle(store, _file(config))
    yield (
        f"{info.path}: {words.count(info.num_programs, 'program')}, "
        f"{words.count(info.num_pieces, 'piece')}, {words.memory(info.num_bytes)}"
    )
    yield f"sha256 {info.sha256}"


def _import(config: Config, store: Store) -> Iterator[str]:
    info = import_bundle(store, _file(config), expected_sha256=config.cache.import_sha256)
    written = words.count(info.num_written, "entry", "entries")
    yield f"{written} written, {info.num_present} already stored"


def _push(config: Config, store: Store) -> Iterator[str]:
    done = transfer.push(store, _remote(config))
    yield f"{words.count(done.num_copied, 'entry', 'entries')} published, {done.num_present} there"
    yield from _left_out("push", done)


def _pull(config: Config, store: Store) -> Iterator[str]:
    done = transfer.pull(store, _remote(config))
    written = words.count(done.num_copied, "entry", "entries")
    yield f"{written} written, {done.num_present} already stored"
    yield from _left_out("pull", done)


def _left_out(action: str, done: transfer.Transfer) -> Iterator[str]:
    for problem in done.refused:
        yield f"  left out: {problem}"
    if done.refused:
        entries = words.count(len(done.refused), "entry", "entries")
        raise CacheError(f"cache {action}: {entries} left out; the rest was copied.")


def _remote(config: Config) -> Remote:
    remote = open_remote(config.cache)
    assert remote is not None, "check_cache_job refuses it"
    return remote


def _file(config: Config) -> Path:
    assert config.cache.file is not None, "check_cache_job refuses it"
    return Path(config.cache.file)
