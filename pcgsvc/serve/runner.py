"""The runner: what users hold and call.

In: a program, its captured entries and static memory. Out: results of calls. Pads, dispatches,
replays, cuts. Knows nothing of how any of it was built, and of no model in particular.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from pcgsvc.capture.capture import GraphTable
from pcgsvc.errors import BatchError
from pcgsvc.events import memory as memory_text
from pcgsvc.forward.batch import Batch, CheckedBatch, check_batch
from pcgsvc.forward.request import Request
from pcgsvc.forward.sampling import Sampling
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.modes import Resolution
from pcgsvc.program.model import CompiledModel
from pcgsvc.serve.blocks import BlockAllocator
from pcgsvc.serve.calls import Calls
from pcgsvc.serve.continuation import NewToken
from pcgsvc.serve.dispatch import Dispatch, DispatchTable
from pcgsvc.serve.embed import embed
from pcgsvc.serve.generate import generate, stream
from pcgsvc.serve.prepared import PreparedCall
from pcgsvc.serve.weights import LoadedState


class Runner:
    """Runs a model with piecewise or full graphs.

    Safe to call from any thread (calls are serialised) and from any CUDA stream: the work runs on
    the caller's stream, which waits for the call before where that was on another one. Results are
    the caller's own (`outputs=clone`), or alias graph memory until the next call of this runner
    (`outputs=view`). Use as a context manager, or `close()`.
    """

    def __init__(
        self,
        request: Request,
        model: CompiledModel,
        memory: Workspace,
        table: GraphTable,
        resolution: Resolution,
        report: dict[str, Any],
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        config = request.config
        self.request = request
        """What was asked for; like the next three, what the runner is made of and for our own use:
        gone once it is closed, and to be used under `lock`."""
        self.model, self.memory, self.table = model, memory, table
        self.dispatch = DispatchTable(
            resolution,
            table.entries,
            uniform_query_len=config.capture.uniform_query_len,
            max_padding=config.capture.max_padding,
            max_reqs=memory.max_reqs,
            skipped=table.skipped,
            predicate=model.predicate,
            for_all=model.image.general,
        )
        self.blocks = None if memory.geometry is None else BlockAllocator(memory.geometry)
        """The KV blocks that callers may use; None for models without attention."""
        self.report = report
        """The JSON report of the build, as plain dicts; `stats()` is added when it is written."""
        self._at_close = at_close
        self._model_name = getattr(model.module, "__name__", type(model.module).__name__)
        self._calls = calls = Calls(config, model, memory, table, self.dispatch)
        is_done = None if calls.order is None else calls.order.is_done
        model.ranks.serve(self.close, calls.lock, is_done, check_calls=config.debug.check_calls)

    # -- calls --

    def __call__(
        self, /, *args: Any, batch: Batch | CheckedBatch | None = None, **kwargs: Any
    ) -> Any:
        """Run one step, under `torch.no_grad` as the forward was traced.

        Args:
            *args: the forward's tensor inputs in its order, N rows each in their row dimensions;
                or, where one of them is no tensor, its arguments in its order.
            batch: the requests behind the rows; None: one new request on scratch KV blocks. What
                `check_batch` gave for as many rows is taken as it is.
            **kwargs: arguments by name. Those that were fixed at the build may be left out.

        Returns:
            The forward's result, with N rows wherever it has rows.

        Raises:
            BatchError: inputs or batch do not fit; nothing was touched.
            UncoveredError: no graph serves the call and `on_uncovered=error` or `strict=true`.
            StaleAddressError: a weight's memory was replaced since capture.
            ConfigError: the module's training mode or hooks are not those of the build.
            PcgError: the runner is closed, or a splitting op of its own model called it.
            PeerError: another process that runs the model is gone, or makes another call.
        """
        return self._calls.guarded(self._calls.run, args, kwargs, batch)

    def prepare(self, num_tokens: int, batch: Batch | CheckedBatch | None = None) -> PreparedCall:
        """Return a call over the runner's own buffers, for loops that write them on the device.

        Args:
            num_tokens: rows of each of its steps.
            batch: the requests of the first step; which entry serves them is fixed here.

        Raises:
            BatchError: the batch does not fit; nothing was touched.
            UncoveredError: no graph serves it.
            PcgError: the runner is closed, or busy with a call that this is a part of.
        """
        return PreparedCall(self._calls, num_tokens, batch)

    def plan(self, num_tokens: int, query_lens: Sequence[int] | None = None) -> Dispatch:
        """Return what a batch of `num_tokens` rows would run, and why; runs nothing.

        Args:
            num_tokens: rows, at least 1.
            query_lens: new tokens of each request; None: one request.

        Raises:
            BatchError: a number is out of range, or they do not add up.
            PcgError: the runner is closed.
        """
        self.ensure_open()
        given: Any = num_tokens
        if not isinstance(given, Integral) or num_tokens < 1:  # numpy's numbers are welcome
            raise BatchError(f"num_tokens: got {given!r}; at least 1 row is needed.")
        lens = [num_tokens] if query_lens is None else query_lens
        batch = check_batch(Batch(query_lens=lens), num_tokens, None)
        uniform = self.dispatch.is_uniform(batch.query_lens)
        return self.dispatch.plan(num_tokens, len(batch.query_lens), uniform)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int = 16,
        *,
        sampling: Sampling | None = None,
        slots: int | None = None,
        return_ids: bool = False,
    ) -> Any:
        """Continue prompts of any number; see `pcgsvc.serve.generate.generate`."""
        return generate(
            self, prompts, max_new_tokens, sampling=sampling, slots=slots, return_ids=return_ids
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 16,
        *,
        sampling: Sampling | None = None,
    ) -> Iterator[NewToken]:
        """Continue one prompt, token by token; see `pcgsvc.serve.generate.stream`."""
        return stream(self, prompt, max_new_tokens, sampling=sampling)

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, truncate: bool = False
    ) -> torch.Tensor:
        """Return one sentence vector per text; see `pcgsvc.serve.embed.embed`."""
        return embed(self, texts, truncate=truncate)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> LoadedState:
        """Write new weights into the module in place; graphs read them from the next call on.

        Everything is compared before anything is written, under the runner's lock: calls see all
        of the old values or all of the new ones. No graph is captured again. Values may lie on any
        device; they are copied.

        Args:
            state: tensors by the names of `module.state_dict()`, of the module's shapes and dtypes.
                Of tied tensors one name is enough; several must have one value.
            strict: whether names that are missing, or that the module does not have, are an error.

        Returns:
            The names that were left out, with `strict=False`.

        Raises:
            StateError: the state does not fit; nothing was written.
            StaleAddressError: a weight's memory was replaced since capture.
        """
        with self.lock:
            self.ensure_open()
            return self._calls.load(state, strict=strict)

    # -- inspection --

    @property
    def lock(self) -> threading.RLock:
        """Held during calls; hold it to use what the runner is made of from outside.

        Raises:
            PcgError: this process is a fork of the one that built the runner, and it uses CUDA.
        """
        return self._calls.lock

    def stats(self) -> dict[str, Any]:
        """Return what was called and what served it; saved as JSON, it is a traffic file.

        Returns:
            hits: replays by `mode:size`. never_used: captured entries without any, in this form.
            fallbacks: calls without a graph, with reasons. in_pieces: steps of stitched entries
            that ran as their pieces, with reasons. calls: counts by true row count and
            kind of batch. rows, padding_rows: what ran. padding_share: padding rows by all rows.
        """
        with self.lock:
            return self._calls.counts.stats()

    def time_calls(self, listener: Callable[[float], None]) -> None:
        """Have a function told each call's seconds, under the lock; CUDA's until launched."""
        with self.lock:
            self._calls.counts.listeners.append(listener)

    def reset_stats(self) -> None:
        """Forget all counts, so that `stats()` speaks of what follows."""
        with self.lock:
            self._calls.counts.reset()

    def __repr__(self) -> str:
        """Return five lines: model, modes, sizes, graphs, warm or cold."""
        return _summary(self._model_name, self.report, is_closed=self._calls.is_closed)

    # -- life --

    def close(self) -> None:
        """Free graphs, pool, buffers and KV cache; twice is fine."""
        with self.lock:
            if self._calls.is_closed:
                return
            self._calls.close()
            self.table.entries.clear()
            self.memory.close()
            self._at_close()
            del self.request, self.model, self.memory, self.table

    def __enter__(self) -> Runner:
        """Return self; the runner is closed at the end of the block."""
        self.ensure_open()
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the runner."""
        self.close()

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled: graphs and their memory belong to one process."""
        raise TypeError(
            "a Runner cannot be copied or pickled: graphs belong to the process that made them. "
            "Call pcgsvc.load_runner(...) where it is needed; it starts warm from the disk cache."
        )

    def ensure_open(self) -> None:
        """Raise PcgError if the runner is closed."""
        self._calls.ensure_open()


def _summary(model_name: str, report: dict[str, Any], *, is_closed: bool) -> str:
    """Return model, modes, sizes, graphs, and how the runner was started, a line each."""
    mode, graphs, compiled = report["mode"], report["graphs"], report["compile"]
    asked = "" if mode["requested"] == mode["resolved"] else f" ({mode['requested']} asked for)"
    skipped = f", {len(graphs['skipped'])} skipped" if graphs["skipped"] else ""
    serves = f": {mode['decode']} for decode batches, {mode['mixed']} for all others"
    if mode["decode"] == mode["mixed"]:
        serves = ", for all batches"
    held = f"{graphs['num_graphs']} {graphs['backend']}, {memory_text(graphs['pool_bytes'])}"
    if not graphs["num_graphs"]:
        held = "none"
    regions = "region" if compiled["num_compiled"] == 1 else "regions"
    made = f"{compiled['num_compiled']} {regions} compiled, {compiled['num_loaded']} loaded"
    return "\n".join(
        [
            f"pcgsvc.Runner of {model_name} on {report['device']}, {report['config']['dtype']}"
            + (", closed" if is_closed else ""),
            f"  modes: {mode['resolved']}{asked}{serves}",
            f"  sizes: {', '.join(map(str, graphs['sizes'])) or 'none'}{skipped}",
            f"  graphs: {held}",
            f"  start: {compiled['start']}, {made}, {compiled['seconds']['total']:.1f} s",
        ]
    )
