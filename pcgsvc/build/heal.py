"""Stored programs that turn out wrong: dropped, and built cold in the same job.

In: an attempt at a build. Out: what it makes, at the second try if the first one loaded a program
that fails its self-check. Knows nothing of the check.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from pcgsvc.build.environment import BuildEnvironment
from pcgsvc.cache.store import Store
from pcgsvc.errors import CacheError, VerifyError
from pcgsvc.events import log_event
from pcgsvc.forward.request import Request
from pcgsvc.program.keys import key_of
from pcgsvc.program.model import CompiledModel

logger = logging.getLogger(__name__)

Built = TypeVar("Built")


class WrongProgramError(Exception):
    """A loaded program fails its self-check; `str()` of it is which, how, and what became of it."""


def healed(attempt: Callable[[str | None], Built]) -> Built:
    """Return what an attempt makes; cold, if the program that it loads at first is wrong.

    Args:
        attempt: takes None, or why no stored program may be loaded. What the first one allocates is
            freed before the second one begins.
    """
    try:
        return attempt(None)
    except WrongProgramError as error:  # its traceback keeps memory and graphs of the failed try
        wrong = str(error)
    gc.collect()
    words = "cache: %s; building it cold"
    log_event(logger, logging.WARNING, "healed", words, wrong, reason=wrong)
    return attempt(wrong)


@contextlib.contextmanager
def wrong_program_dropped(
    model: CompiledModel, request: Request, env: BuildEnvironment
) -> Iterator[None]:
    """Drop a loaded program for which a block raises `VerifyError`.

    Raises:
        WrongProgramError: it was dropped, or left where nothing may be written.
        VerifyError: the program was made here; or it was loaded and must not be made anew, under
            `cache.require_warm=true` (it is left then) or by one of several processes that run
            a model together.
    """
    try:
        yield
    except VerifyError as error:
        if model.start != "warm" or model.facts is None:
            raise
        key, config = key_of(model.facts), request.config
        folder = env.store.folder.data if env.store.folder is not None else None
        found = str(error).rstrip(".")
        wrong = f"the stored program {key[:12]} in {folder} fails its self-check: {found}."
        if config.cache.require_warm:
            raise VerifyError(
                f"cache.require_warm=true, and {wrong} It is left there. Build it anew with "
                "job=compile cache.mode=refresh cache.require_warm=false.",
                error.report,
            ) from error
        wrong = f"{wrong} {_drop(env.store, key)}"
        if model.ranks.many:
            raise VerifyError(
                f"{wrong}. Processes that run a model together build together: start them again.",
                error.report,
            ) from error
        raise WrongProgramError(wrong) from error


def _drop(store: Store, key: str) -> str:
    """Drop a program and its pieces; return what became of them, as a sentence without its end."""
    if not store.writable:
        return f"It is left there, since nothing is written ({store.why_not_writable()})"
    try:
        return f"It is dropped, with the {store.drop_program(key)} pieces that it names"
    except CacheError as error:
        return f"It could not be dropped ({error})"
