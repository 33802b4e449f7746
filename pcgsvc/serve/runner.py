"""The runner: what users hold and call.

In: a program, its captured entries and static memory. Out: results of calls. Pads, dispatches,
replays, cuts. Knows nothing of how any of it was built, and of no model in particular.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.plan import EntryKey
from pcgsvc.config import Outputs
from pcgsvc.errors import BatchError, PcgError
from pcgsvc.forward.batch import Batch, CheckedBatch, check_batch
from pcgsvc.forward.recheck import BatchChecker
from pcgsvc.forward.request import Request
from pcgsvc.forward.sampling import Sampling
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.context import reset_context, set_context, use_context
from pcgsvc.ops.modes import Resolution
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.program import Direct
from pcgsvc.serve.blocks import BlockAllocator
from pcgsvc.serve.counts import CallCounts
from pcgsvc.serve.dispatch import Dispatch, DispatchTable, unlike_traced
from pcgsvc.serve.embed import embed
from pcgsvc.serve.generate import generate, stream
from pcgsvc.serve.inputs import InputBinder
from pcgsvc.serve.replay import Replay, Route, clone_all, input_views, poison_others
from pcgsvc.serve.slots import NewToken
from pcgsvc.serve.streams import CallOrder
from pcgsvc.serve.summary import summary
from pcgsvc.serve.weights import LoadedState, Weights

logger = logging.getLogger(__name__)


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
            max_reqs=memory.max_reqs,
            skipped=table.skipped,
            predicate=model.predicate,
        )
        self.blocks = None if memory.geometry is None else BlockAllocator(memory.geometry)
        """The KV blocks that callers may use; None for models without attention."""
        self.report = report
        """The JSON report of the build, as plain dicts; `stats()` is added when it is written."""
        self._closed, self._at_close = False, at_close
        self._model_name = getattr(model.module, "__name__", type(model.module).__name__)
        self._lock, self._process = threading.RLock(), os.getpid()
        self._running = self._autocast_met = False
        self._counts = CallCounts(config, self.dispatch, table)
        static = memory.static_tensors if config.debug.check_addresses else None
        self._weights = Weights(model.module, memory.tensors, static)
        self._batches = BatchChecker(memory.geometry)
        self._served: tuple[CheckedBatch | None, Route | None] = None, None
        """The last call's batch, and what serves it."""
        self._without_batch: dict[int, tuple[CheckedBatch, Route]] = {}
        """The same for calls without a batch, by row count."""
        self._routes: dict[tuple[int, bool], Route] = {}
        """By row count, and whether the batch is uniform."""
        self._inputs = InputBinder(model.arguments, memory)
        clone = config.outputs is Outputs.CLONE
        every = list(range(len(model.outputs.specs)))
        self._cloned = every if clone else input_views(table, memory)
        """The graph results that a call clones."""
        self._poison = config.debug.poison
        self._query_len = config.capture.uniform_query_len
        self._device_type = memory.device.type
        self._order = None if memory.stream is None else CallOrder(memory.stream)
        self._replays: dict[EntryKey, Replay] = {}
        self.prepared: object = None
        """The prepared call that has the buffers; each other call takes them."""

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
            PcgError: the runner is closed, or a splitting op of its own model called it.
        """
        with self.lock:
            if self._running:
                raise PcgError(
                    "the runner was called by a splitting op of a call that it is still busy with; "
                    "both would use the same buffers. Build another runner for the inner model."
                )
            self._running, grad = True, torch.is_grad_enabled()
            if grad:
                torch_private.set_grad(False)
            try:
                if self._counts.listeners:
                    return self._counts.timed(self._call, args, kwargs, batch)
                return self._call(args, kwargs, batch)
            finally:
                self._running = False
                if grad:
                    torch_private.set_grad(True)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch | CheckedBatch | None
    ) -> Any:
        self.ensure_open()
        values, num_tokens = self._inputs.bind(args, kwargs)
        checked, route = self._find(batch, num_tokens)
        self._weights.check()
        unlike = None
        if self.model.depends_on:
            unlike = unlike_traced(self.model.depends_on, self.memory.inputs, values)
        if route is None or unlike is not None:
            self._counts.uncovered(checked, self.dispatch.is_uniform(checked.query_lens), unlike)
        self.prepared = None
        order = self._order
        if order is None and not torch.is_autocast_enabled("cpu"):
            return self._execute(route, values, checked, unlike)
        if order is not None and torch_private.current_device() != order.index:
            with torch.cuda.device(order.index):
                return self._execute_apart(route, values, checked, unlike)
        return self._execute_apart(route, values, checked, unlike)

    def plan(self, num_tokens: int, query_lens: Sequence[int] | None = None) -> Dispatch:
        """Return what a batch of `num_tokens` rows would run, and why; runs nothing.

        Args:
            num_tokens: rows.
            query_lens: new tokens of each request; None: one request.
        """
        self.ensure_open()
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

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> torch.Tensor:
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
            if self._order is None:
                return self._weights.load(state, strict=strict)
            with torch.cuda.device(self._order.index):
                self._order.enter()
                try:
                    return self._weights.load(state, strict=strict)
                finally:
                    self._order.leave()

    # -- inspection --

    @property
    def lock(self) -> threading.RLock:
        """Held during calls; hold it to use what the runner is made of from outside.

        Raises:
            PcgError: this process is a fork of the one that built the runner, and it uses CUDA.
        """
        if self._process != os.getpid():
            self._after_fork()
        return self._lock

    def _after_fork(self) -> None:
        """Take a new lock: the thread that may hold the old one is not in this process."""
        if not self._closed and self.memory.stream is not None:
            raise PcgError(
                f"the runner was built in process {self._process}, of which this one is a fork; "
                "CUDA does not work here. Start processes by 'spawn' and build a runner in each."
            )
        self._lock, self._process, self._running = threading.RLock(), os.getpid(), False

    def stats(self) -> dict[str, Any]:
        """Return what was called and what served it; saved as JSON, it is a traffic file.

        Returns:
            hits: replays by `mode:size`. never_used: captured entries without any, in this form.
            fallbacks: calls without a graph, with reasons. calls: counts by true row count and
            kind of batch. rows, padding_rows: what ran. padding_share: padding rows by all rows.
        """
        with self.lock:
            return self._counts.stats()

    def time_calls(self, listener: Callable[[float], None]) -> None:
        """Have a function told each call's seconds, under the lock; CUDA's until launched."""
        with self.lock:
            self._counts.listeners.append(listener)

    def reset_stats(self) -> None:
        """Forget all counts, so that `stats()` speaks of what follows."""
        with self.lock:
            self._counts.reset()

    def __repr__(self) -> str:
        """Return five lines: model, modes, sizes, graphs, warm or cold."""
        return summary(self._model_name, self.report, is_closed=self._closed)

    # -- life --

    def close(self) -> None:
        """Free graphs, pool, buffers and KV cache; twice is fine."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._counts.log_totals()
            if self._order is not None:
                self._order.synchronize()
            self._counts.close()
            self._served, self.prepared = (None, None), None
            for held in (self._replays, self._routes, self._without_batch, self.table.entries):
                held.clear()
            self.memory.close()
            self._at_close()
            del self.request, self.model, self.memory, self.table, self._weights, self._inputs

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
        if self._closed:
            raise PcgError("the runner is closed; build another one.")

    # -- one step --

    def _find(
        self, batch: Batch | CheckedBatch | None, num_tokens: int
    ) -> tuple[CheckedBatch, Route | None]:
        """Return the checked batch and what serves it; None: no graph does.

        What a call without a batch means is worked out once per row count.
        """
        if batch is None:
            kept = self._without_batch.get(num_tokens)
            if kept is not None:
                return kept
            checked = check_batch(None, num_tokens, self.memory.geometry)
            route = self.route_of(checked)
            if route is not None:
                self._without_batch[num_tokens] = checked, route
            return checked, route
        if not isinstance(batch, CheckedBatch):
            batch = self._batches.check(batch, num_tokens)
        elif batch.num_tokens != num_tokens:
            raise BatchError(f"batch: of {batch.num_tokens} rows; the inputs have {num_tokens}.")
        if self._served[0] is not batch:
            self._served = batch, self.route_of(batch)
        return batch, self._served[1]

    def route_of(self, batch: CheckedBatch) -> Route | None:
        """Return what serves a batch; None: no graph does. Used under the lock."""
        rows, uniform = batch.num_tokens, self.dispatch.is_uniform(batch.query_lens)
        key = self.dispatch.find(rows, len(batch.query_lens), uniform)
        if key is None:
            return None
        route = self._routes.get((rows, uniform))
        if route is None:
            replay = self._replays.get(key)
            if replay is None:
                entry = self.table.entries[key]
                replay = self._replays[key] = Replay(key, entry, self._query_len)
            route = Route(replay, self.model, self.memory, rows, uniform)
            self._routes[rows, uniform] = route
            self._counts.routes.append(route)
        return route

    def _execute_apart(
        self,
        route: Route | None,
        values: Sequence[torch.Tensor],
        batch: CheckedBatch,
        unlike: str | None,
    ) -> Any:
        """Execute after the call before, and outside the caller's autocast."""
        order = self._order
        if order is not None:
            order.enter()
        try:
            if not torch.is_autocast_enabled(self._device_type):
                return self._execute(route, values, batch, unlike)
            if not self._autocast_met:
                logger.warning("called under torch.autocast, which a runner does not follow")
                self._autocast_met = True
            with torch.autocast(self._device_type, enabled=False):
                return self._execute(route, values, batch, unlike)
        finally:
            if order is not None:
                order.leave()

    def _execute(
        self,
        route: Route | None,
        values: Sequence[torch.Tensor],
        batch: CheckedBatch,
        unlike: str | None,
    ) -> Any:
        if route is not None and unlike is None:
            results = self._replay(route, values, batch)
        elif unlike is None and self.dispatch.is_valid(batch.num_tokens):
            results = self._run_uncaptured(values, batch)
        else:
            return self._run_itself(values, batch)
        if len(self._cloned) == 1:
            at = self._cloned[0]
            results[at] = results[at].clone()
        elif self._cloned:
            clone_all(results, self._cloned)
        return self.model.outputs.build(results, values)

    def _replay(
        self, route: Route, values: Sequence[torch.Tensor], batch: CheckedBatch
    ) -> list[torch.Tensor]:
        replay = route.replay
        if self._poison:
            poison_others(self.table, replay.entry)
        self.memory.copy_in(values, route.load)
        route.calls += 1
        if self.model.reads_metadata:
            context = self.memory.context(
                batch, replay.size, replay.query_len, in_full_graph=replay.is_full
            )
            token = set_context(context)
            try:
                for step in replay.steps:
                    step()
            finally:
                reset_context(token)
        else:
            for step in replay.steps:
                step()
        route.hits += 1
        return route.results.copy()

    def _run_uncaptured(
        self, values: Sequence[torch.Tensor], batch: CheckedBatch
    ) -> list[torch.Tensor]:
        """Run the program without graphs."""
        memory, rows = self.memory, batch.num_tokens
        pairs = zip(memory.inputs, values, strict=True)
        inputs = {s.name: s.laid_out(v.to(memory.device)) for s, v in pairs}
        self._counts.rows += rows
        with use_context(self.memory.unpadded_context(batch)):
            program = self.model.program.for_size(rows)
            return program.run(memory.values(inputs, rows), Direct())

    def _run_itself(self, values: Sequence[torch.Tensor], batch: CheckedBatch) -> Any:
        """Return what the module itself gives, for a call that the program is not valid for.

        Nothing of the trace may be put around it: its result may have another structure.
        """
        pairs = zip(self.memory.inputs, values, strict=True)
        moved = {s.name: v.to(self.memory.device) for s, v in pairs}
        self._counts.rows += batch.num_tokens
        with use_context(self.memory.unpadded_context(batch)):
            return self.model.module(**moved, **self.model.arguments.constants)
