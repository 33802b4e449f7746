"""What is around every build: the process-wide lock, torch's modes, compilers' folder and store.

In: a request. Out: a `BuildEnvironment`. Knows nothing of stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.cache.programs import Artifacts
from pcgsvc.cache.remote import open_remote
from pcgsvc.cache.store import Store
from pcgsvc.compilers.folder import CompilerFolder
from pcgsvc.errors import CacheError
from pcgsvc.events import Phases, count, log_event
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.process import build_modes, collector_eased
from pcgsvc.forward.request import Request
from pcgsvc.forward.workspace import Workspace, preserved
from pcgsvc.ops.ranks import Ranks
from pcgsvc.program.model import CompiledModel, allocate
from pcgsvc.program.pieces import Kind
from pcgsvc.program.writes import undeclared_writes_refused

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class BuildEnvironment:
    """What the stages of one build use together."""

    phases: Phases
    folder: CompilerFolder
    """Where the compilers keep their files; the runner keeps it until it is closed."""
    store: Store
    artifacts: Artifacts
    wrong: str | None
    """Why the program that was loaded at first is built cold; None: that did not happen."""
    fast_paths: bool
    """Whether attention modules of torch.nn take their fused path outside of builds."""
    ranks: Ranks
    """The processes that build the program together."""
    strict: bool
    """Whether what the remote does not do is an error."""
    until_stored: ExitStack
    """Held while other processes wait for this build of the program; closed once it is stored."""

    def close(self) -> None:
        """Let go of what outlives the build."""
        self.folder.close()
        self.ranks.close()

    def ready_compilers(self, *, inductor: bool) -> None:
        """Import what traces and compiles; with Inductor, under our settings for this build."""
        if inductor:
            self.folder.ready_inductor()
        torch_private.import_compilers(inductor=inductor)
        if inductor:
            torch_private.wake_compile_workers()

    def store_tuned_kernels(self, model: CompiledModel) -> None:
        """Store what only running the program shows, once it has run: kernels and their choice.

        Raises:
            CacheError: under `strict=true`, something was not fetched or published as asked.
        """
        if model.facts is not None:
            self.artifacts.finish(model.facts, model.image, model.program.pieces)
        sharing = self.store.sharing
        if self.strict and sharing is not None and (problems := sharing.section()["problems"]):
            raise CacheError(f"strict=true, and cache.remote failed: {'; '.join(problems)}.")

    def cache_section(self, model: CompiledModel, key: str | None) -> dict[str, Any]:
        """Return the report's `cache`, and log why pieces were not loaded."""
        unsaved = (f"cannot be written down: {piece}" for piece in model.counts.unsaved)
        reasons = [*model.misses, *self.store.counts.miss_reasons, *unsaved]
        for reason in dict.fromkeys(reasons):
            if reason not in model.misses:  # those are logged where they are met
                log_event(logger, logging.DEBUG, "cache_miss", "cache: %s", reason, reason=reason)
        return {
            "mode": self.store.mode.value,
            "dir": None if self.store.folder is None else str(self.store.folder.data),
            "program_key": key,
            "hits": self.store.counts.hits,
            "misses": self.store.counts.misses,
            "miss_reasons": list(dict.fromkeys(reasons)),
            "bytes": self.store.num_bytes(),
            "healed": int(self.wrong is not None),
            "stored": model.facts is not None,
            "not_stored": model.unstored,
            **({} if self.store.sharing is None else {"remote": self.store.sharing.section()}),
        }


def log_start(model: CompiledModel) -> None:
    """Log how a model came about, in one line."""
    image, counts = model.image, model.counts
    logger.info(
        "%s start: %s in %s (%d unique) and %s; %d compiled, %d loaded",
        model.start,
        count(sum(image.ops.values()), "op"),
        count(image.count(Kind.REGION), "region"),
        image.unique_regions,
        count(image.count(Kind.BOUNDARY), "boundary", "boundaries"),
        counts.compiled,
        counts.loaded,
    )


@contextmanager
def build_environment(
    request: Request, phases: Phases, wrong: str | None = None
) -> Iterator[BuildEnvironment]:
    """Hold the build lock, fix torch's modes, give the compilers a folder, and open the store.

    Python's collector runs rarely meanwhile.

    The folder is removed if the block raises; else the caller closes it.

    Args:
        request: what is built.
        phases: times the job.
        wrong: why nothing is loaded from the store; see `BuildEnvironment.wrong`.
    """
    config, folder = request.config, CompilerFolder()
    ranks = Ranks(config.parallel.timeout_s)
    try:
        with (
            ranks.building(),
            build_modes(request.device) as fast_paths,
            collector_eased(tensors_of(request.bundle.module).values()),
            folder.in_use(config.compiler.threads),
            Store.open(
                config.cache.dir,
                mode=config.cache.mode,
                max_bytes=config.cache.max_bytes,
                refresh=wrong is not None,
                remote=open_remote(config.cache),
            ) as store,
            ExitStack() as until_stored,
        ):
            if wrong is not None:
                torch_private.forget_loaded_code()
            yield BuildEnvironment(
                phases=phases,
                folder=folder,
                store=store,
                artifacts=Artifacts(config, request.device, store, folder),
                wrong=wrong,
                fast_paths=fast_paths,
                ranks=ranks,
                strict=config.strict,
                until_stored=until_stored,
            )
    except BaseException:
        folder.close()
        raise


@contextmanager
def working_memory(request: Request, model: CompiledModel) -> Iterator[Workspace]:
    """Give a block the memory in which a model runs; the module's state is put back afterwards.

    The memory is closed if the block raises; else the caller closes it.

    Raises:
        CaptureError: an op has written what its schema does not declare.
    """
    memory = model.memory or allocate(request, model)
    with (
        memory.closed_on_error(),
        undeclared_writes_refused(model, memory.tensors),
        preserved(memory.bound(model.mutated)),
    ):
        yield memory
    if memory.stream is not None:
        torch.cuda.empty_cache()  # what compiling, warming up and checking took for a while
