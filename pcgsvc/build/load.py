"""The stored program of a request, if there is one that fits.

In: a request. Out: a `ProgramLookup`: the model, or why there is none. Imports no compiler; knows
nothing of how a program is made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pcgsvc.build.dump import dump_loaded
from pcgsvc.build.environment import BuildEnvironment
from pcgsvc.cache.envelope import Kind
from pcgsvc.cache.programs import Artifacts, NoProgramError, require_warm
from pcgsvc.config import Strategy
from pcgsvc.errors import CacheError
from pcgsvc.events import log_event
from pcgsvc.forward.request import Request
from pcgsvc.ops.collectives import is_among_many
from pcgsvc.program.facts import program_facts
from pcgsvc.program.forms import NotCanonicalError
from pcgsvc.program.keys import key_of
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.program import Program

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ProgramLookup:
    """What the store has for a request."""

    model: CompiledModel | None = None
    facts: Mapping[str, Any] | None = None
    """What the program is stored under; None: it has no facts that can be written down."""
    misses: list[str] = field(default_factory=list)
    """Why there is none."""
    problems: list[str] = field(default_factory=list)
    """What keeps the program from being stored."""

    @property
    def key(self) -> str | None:
        """Hash of the facts."""
        return None if self.facts is None else key_of(self.facts)


def load_program(request: Request, env: BuildEnvironment) -> ProgramLookup:
    """Look the program up; if it is not there, keep other processes from building it as well.

    Raises:
        CacheError: `cache.require_warm=true`, and there is no program that fits.
    """
    config = request.config
    if config.partition.strategy is Strategy.BREAKABLE:
        why = "partition.strategy=breakable: the forward is run anew at each start"
        return ProgramLookup(misses=[why])
    try:
        facts = facts_of(request, env.artifacts)
    except NotCanonicalError as error:
        problem = str(error)
        if config.cache.require_warm:
            why = f"cache.require_warm=true, and the program cannot be stored: {problem}"
            raise CacheError(why) from error
        return ProgramLookup(problems=[problem])
    found = ProgramLookup(facts=facts, misses=[] if env.wrong is None else [env.wrong])
    _load(request, found, env)
    if found.model is None:
        if config.cache.require_warm:
            raise require_warm(env.store, facts, found.misses[-1])
        if is_among_many():  # they check it together before it is stored; each piece has a lock
            return found
        held = env.until_stored.enter_context(env.artifacts.lock(facts))
        # Another process may have stored it while this one waited for the lock.
        if held and env.store.writable and env.store.available(Kind.PROGRAM, key_of(facts)):
            _load(request, found, env)
    return found


def facts_of(request: Request, artifacts: Artifacts) -> Mapping[str, Any]:
    """Return what the program of a request is stored under.

    Raises:
        NotCanonicalError: some of it cannot be written down.
    """
    bundle = request.bundle
    return program_facts(
        request.config,
        bundle.module,
        request.inputs,
        request.constants,
        artifacts.pieces.environment,
        bundle.facts,
    )


def _load(request: Request, found: ProgramLookup, env: BuildEnvironment) -> None:
    """Set the model, or note why there is none."""
    artifacts = env.artifacts
    assert found.facts is not None
    with env.phases.phase("load"):
        try:
            image, pieces = artifacts.load(found.facts, request.bundle.module, request.constants)
        except NoProgramError as error:
            miss = str(error)  # not the error: a log record would keep its frames alive
            if miss not in found.misses:
                found.misses.append(miss)
                words = "cache: no stored program fits: %s"
                log_event(logger, logging.INFO, "cache_miss", words, miss, reason=miss)
            return
    dump_loaded(image, pieces, artifacts.specialized, request.config)
    found.model = CompiledModel(
        module=request.bundle.module,
        arguments=request.arguments,
        image=image,
        program=Program(image.spec, pieces, artifacts.specialized),
        start="warm",
        counts=artifacts.pieces.counts,
        facts=found.facts,
        misses=found.misses,
        ranks=env.ranks,
    )
