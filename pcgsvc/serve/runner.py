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
from pcgsvc.forward.batch import Batch, CheckedBatch, check_batch, refuse_lost_context
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
from pcgsvc.serve.replay import Replay, input_views, poison_others
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
        self._plain_calls: dict[int, tuple[CheckedBatch, bool, EntryKey | None]] = {}
        """What calls without a batch are served by, by row count."""
        self._inputs = InputBinder(model.arguments, memory)
        clone = config.outputs is Outputs.CLONE
        self._cloned = range(len(model.outputs.specs)) if clone else input_views(table, memory)
        """The graph results that a call clones."""
        self._depends_on = model.depends_on
        self._ranks = model.ranks
        self._poison, self._query_len = config.debug.poison, config.capture.uniform_query_len
        self._device_type = memory.device.type
        self._order = None if memory.stream is None else CallOrder(memory.stream)
        self._replays: dict[EntryKey, Replay] = {}
        is_done = None if self._order is None else self._order.is_done
        model.ranks.serve(self.close, self._lock, is_done, check_calls=config.debug.check_calls)

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
        inputs, num_tokens = self._inputs.bind(args, kwargs)
        checked, uniform, key = self._find(batch, num_tokens)
        unlike = None
        if self._depends_on:
            unlike = unlike_traced(self._depends_on, self.memory.inputs, inputs)
            key = key if unlike is None else None
        if key is None:
            self._counts.uncovered(checked, uniform, unlike)
        self._weights.check()
        self._ranks.before_call(num_tokens, "no graph" if key is None else key[0].value)
        self._counts.calls[num_tokens, uniform] += 1
        order = self._order
        if order is None and not torch.is_autocast_enabled("cpu"):
            return self._execute(key, inputs, checked, unlike)
        if order is not None and torch_private.current_device() != order.index:
            with torch.cuda.device(order.index):
                return self._execute_apart(key, inputs, checked, unlike)
        return self._execute_apart(key, inputs, checked, unlike)

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
            self._replays.clear()
            self.table.entries.clear()
            self.memory.close()
            self._plain_calls.clear()
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
    ) -> tuple[CheckedBatch, bool, EntryKey | None]:
        """Return the checked batch, whether it is uniform, and the entry that serves it.

        What a call without a batch means is worked out once per row count.
        """
        if batch is None:
            found = self._plain_calls.get(num_tokens)
            if found is not None:
                return found
        checked = self._check(batch, num_tokens)
        uniform = self.dispatch.is_uniform(checked.query_lens)
        key = self.dispatch.find(num_tokens, len(checked.query_lens), uniform)
        if batch is None and num_tokens <= self.memory.max_tokens:
            checked.images = {}
            self._plain_calls[num_tokens] = checked, uniform, key
        return checked, uniform, key

    def _check(self, batch: Batch | CheckedBatch | None, num_tokens: int) -> CheckedBatch:
        if isinstance(batch, CheckedBatch):
            if batch.num_tokens != num_tokens:
                raise BatchError(
                    f"batch: of {batch.num_tokens} rows; the inputs have {num_tokens}."
                )
            return batch
        checked = check_batch(batch, num_tokens, self.memory.geometry)
        if batch is not None and batch.block_tables is None:
            refuse_lost_context(checked)
        return checked

    def _execute_apart(
        self,
        key: EntryKey | None,
        inputs: dict[str, torch.Tensor],
        batch: CheckedBatch,
        unlike: str | None,
    ) -> Any:
        """Execute after the call before, and outside the caller's autocast."""
        order = self._order
        if order is not None:
            order.enter()
        try:
            if not torch.is_autocast_enabled(self._device_type):
                return self._execute(key, inputs, batch, unlike)
            if not self._autocast_met:
                logger.warning("called under torch.autocast, which a runner does not follow")
                self._autocast_met = True
            with torch.autocast(self._device_type, enabled=False):
                return self._execute(key, inputs, batch, unlike)
        finally:
            if order is not None:
                order.leave()

    def _execute(
        self,
        key: EntryKey | None,
        inputs: dict[str, torch.Tensor],
        batch: CheckedBatch,
        unlike: str | None,
    ) -> Any:
        if key is not None:
            results = self._replay(key, inputs, batch)
        elif unlike is None and self.dispatch.is_valid(batch.num_tokens):
            results = self._run_uncaptured(inputs, batch)
        else:
            return self._run_itself(inputs, batch)
        for at in self._cloned:
            results[at] = results[at].clone()
        return self.model.outputs.build(results, inputs)

    def _replay(
        self,
        key: EntryKey,
        inputs: dict[str, torch.Tensor],
        batch: CheckedBatch,
    ) -> list[torch.Tensor]:
        replay = self._replays.get(key)
        if replay is None:
            entry = self.table.entries[key]
            replay = self._replays[key] = Replay(key, entry, self.model)
        size, rows = replay.size, batch.num_tokens
        if self._poison:
            poison_others(self.table, replay.entry)
        self.memory.load(inputs, rows, size)
        if replay.reads_metadata:
            query_len = self._query_len if replay.uniform else None
            context = self.memory.context(batch, size, query_len, in_full_graph=replay.is_full)
            token = set_context(context)
            try:
                for step in replay.steps:
                    step()
            finally:
                reset_context(token)
        else:
            for step in replay.steps:
                step()
        counts = self._counts
        counts.hits[replay.name] += 1
        counts.rows += rows
        counts.padded += size - rows
        return replay.results(rows)

    def _run_uncaptured(
        self, inputs: dict[str, torch.Tensor], batch: CheckedBatch
    ) -> list[torch.Tensor]:
        """Run the program without graphs."""
        memory, rows = self.memory, batch.num_tokens
        device = memory.device
        inputs = {s.name: s.laid_out(inputs[s.name].to(device)) for s in memory.inputs}
        self._counts.rows += rows
        with use_context(self.memory.unpadded_context(batch)):
            program = self.model.program.for_size(rows)
            return program.run(memory.values(inputs, rows), Direct())

    def _run_itself(self, inputs: dict[str, torch.Tensor], batch: CheckedBatch) -> Any:
        """Return what the module itself gives, for a call that the program is not valid for.

        Nothing of the trace may be put around it: its result may have another structure.
        """
        moved = {k: v.to(self.memory.device) for k, v in inputs.items()}
        self._counts.rows += batch.num_tokens
        with use_context(self.memory.unpadded_context(batch)):
            return self.model.module(**moved, **self.model.arguments.constants)
