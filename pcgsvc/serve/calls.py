"""How the calls of one runner are made: one at a time, each on its caller's stream.

In: arguments and batches. Out: results, and what a prepared call needs. Checks, finds the entry,
pads, replays, cuts. Knows nothing of how the entries were captured.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.capture.capture import GraphTable
from pcgsvc.capture.plan import EntryKey
from pcgsvc.capture.sources import Step
from pcgsvc.config import Config, Outputs
from pcgsvc.cuda_driver import DriverError
from pcgsvc.errors import BatchError, PcgError
from pcgsvc.forward.batch import (
    Batch,
    CheckedBatch,
    check_batch,
    refuse_lost_context,
    refuse_other_runner,
)
from pcgsvc.forward.recheck import BatchChecker
from pcgsvc.forward.workspace import Workspace
from pcgsvc.ops.context import ForwardContext, find_context, set_context
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.program import Direct
from pcgsvc.serve.counts import CallCounts
from pcgsvc.serve.dispatch import DispatchTable, unlike_traced
from pcgsvc.serve.inputs import InputBinder
from pcgsvc.serve.replay import (
    Replay,
    Route,
    clone_all,
    cloned,
    input_views,
    poison_others,
    result_memory,
)
from pcgsvc.serve.streams import CallOrder
from pcgsvc.serve.weights import LoadedState, Weights

logger = logging.getLogger(__name__)

_BUILD_ANOTHER = "Build another runner for the inner model."


class Calls:
    """Makes the calls of one runner. All but `run` and `guarded` is used under `lock`.

    Args:
        config: of the request.
        model: what is called.
        memory: its buffers.
        table: its entries.
        dispatch: says which entry serves which batch.
    """

    def __init__(
        self,
        config: Config,
        model: CompiledModel,
        memory: Workspace,
        table: GraphTable,
        dispatch: DispatchTable,
    ) -> None:
        self.model, self.memory, self.table, self.dispatch = model, memory, table, dispatch
        self.is_closed = False
        self._lock, self._process = threading.RLock(), os.getpid()
        self._running = self._autocast_met = False
        self.counts = CallCounts(config, dispatch, table)
        static = memory.static_tensors if config.debug.check_addresses else None
        self.weights = Weights(model.module, memory.tensors, static)
        self._batches = BatchChecker(memory.geometry)
        self._served: tuple[tuple[int, ...] | None, Route | None] = None, None
        """The query lengths of the last batch, and what serves such."""
        self._without_batch: dict[int, tuple[CheckedBatch, Route]] = {}
        """The same for calls without a batch, by row count."""
        self._routes: dict[tuple[int, bool], Route] = {}
        """By row count, and whether the batch is uniform."""
        self._replays: dict[EntryKey, Replay] = {}
        self._inputs = InputBinder(model.arguments, memory)
        self._clones = clone = config.outputs is Outputs.CLONE
        every = list(range(len(model.outputs.specs)))
        self._cloned = every if clone else input_views(table, memory)
        """The graph results that a call clones."""
        self._returned = {at for kind, at in model.outputs.leaves if kind == "input"}
        """The inputs that a call returns as they are."""
        self._graph_memory = result_memory(table) if self._returned else set()
        self.poison = config.debug.poison
        self._query_len = config.capture.uniform_query_len
        self._device_type = memory.device.type
        self.order = None if memory.stream is None else CallOrder(memory.stream)
        self.prepared: object = None
        """The prepared call that has the buffers; each other call takes them."""
        self.lends = False
        """Whether a prepared call has ever shown them to the caller."""

    def close(self) -> None:
        """Wait for the last call, and let go of all but the counts."""
        self.refuse_nested("closed", "Close it after the call.")
        self.is_closed = True
        if self.order is not None:
            self.order.synchronize()
        self.counts.log_totals()
        self.counts.close()
        self._served, self.prepared = (None, None), None
        for held in (self._replays, self._routes, self._without_batch):
            held.clear()
        del self.model, self.memory, self.table, self.weights, self._inputs

    def ensure_open(self) -> None:
        """Raise PcgError if the runner is closed."""
        if self.is_closed:
            raise PcgError("the runner is closed; build another one.")

    # -- around a call --

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
        if not self.is_closed and self.memory.stream is not None:
            raise PcgError(
                f"the runner was built in process {self._process}, of which this one is a fork; "
                "CUDA does not work here. Start processes by 'spawn' and build a runner in each."
            )
        self._lock, self._process, self._running = threading.RLock(), os.getpid(), False

    def guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call under the lock, not inside another, without gradients; tell listeners.

        The caller's context and grad mode are put back, wherever an interrupt comes. A function
        that torch compiles breaks its graph here: what a call does on the host is not traced.
        """
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self.guarded)(call, *args)
        with self.lock:
            self.refuse_nested()
            grad, context = torch.is_grad_enabled(), find_context()
            try:
                self._running = True
                if grad:
                    torch_private.set_grad(False)
                if self.counts.listeners:
                    return self.counts.timed(call, *args)
                return call(*args)
            finally:
                self._running = False
                try:
                    set_context(context)
                finally:
                    if grad:
                        torch_private.set_grad(True)

    def refuse_nested(self, done: str = "called", instead: str = _BUILD_ANOTHER) -> None:
        """Raise PcgError if a splitting op of a call is calling; used under the lock."""
        if self._running:
            raise PcgError(
                f"the runner was {done} by a splitting op of a call that it is still busy with; "
                f"both would use the same buffers. {instead}"
            )

    def apart(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call on the runner's device, after the one before, with the autocast off."""
        order = self.order
        if order is not None:
            if torch_private.current_device() != order.index:
                with torch.cuda.device(order.index):
                    return self.apart(call, *args)
            order.enter()
        try:
            if not torch.is_autocast_enabled(self._device_type):
                return call(*args)
            if not self._autocast_met:
                logger.warning("called under torch.autocast, which a runner does not follow")
                self._autocast_met = True
            with torch.autocast(self._device_type, enabled=False):
                return call(*args)
        finally:
            if order is not None:
                order.leave()

    # -- a call --

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch | CheckedBatch | None
    ) -> Any:
        """Make one call; see `Runner.__call__`."""
        self.ensure_open()
        values, num_tokens = self._inputs.bind(args, kwargs)
        checked, route = self.find(batch, num_tokens)
        self.weights.check()
        self.meet(num_tokens, route)
        unlike = None
        if self.model.depends_on:
            unlike = unlike_traced(self.model.depends_on, self.memory.inputs, values)
        if route is None or unlike is not None:
            self.counts.uncovered(checked, self.dispatch.is_uniform(checked.query_lens), unlike)
        self.prepared = None
        return self.apart(self._execute, route, values, checked, unlike)

    def meet(self, rows: int, route: Route | None) -> None:
        """Refuse a step that other processes cannot, or do not, take as well."""
        self.model.ranks.before_call(rows, "no graph" if route is None else route.replay.name)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> LoadedState:
        """Write new weights, after the last call; see `Runner.load_state_dict`."""
        self.ensure_open()
        self.refuse_nested("given weights", "Load them between two calls.")
        loaded: LoadedState = self.apart(lambda: self.weights.load(state, strict=strict))
        return loaded

    def find(
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
        else:
            refuse_other_runner(batch, self.memory.geometry)
            refuse_lost_context(batch)
        if self._served[0] != batch.query_lens:
            self._served = batch.query_lens, self.route_of(batch)
        return batch, self._served[1]

    def route_of(self, batch: CheckedBatch) -> Route | None:
        """Return what serves a batch; None: no graph does."""
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
            self.counts.routes.append(route)
        return route

    def _execute(
        self,
        route: Route | None,
        values: Sequence[torch.Tensor],
        batch: CheckedBatch,
        unlike: str | None,
    ) -> Any:
        if route is not None and unlike is None:
            if self._returned and (self.lends or not self._clones):
                values = self._not_of_graphs(values)
            given = self._inputs.apart(values) if self.lends else values
            results = self._run_with_copies(route, given, batch)
            if results is None:
                self.memory.copy_in(given, route.load)
                context = self.context(batch, route) if self.model.reads_metadata else None
                self.replay(route, context, route.replay.steps)
                results = self._clone(route.results)
        elif unlike is not None or not self.dispatch.is_valid(batch.num_tokens):
            module, constants = self.model.module, self.model.arguments.constants
            return self._run_itself(values, batch, lambda inputs: module(**inputs, **constants))
        elif self.model.untraced is not None:
            result = self._run_itself(values, batch, self.model.untraced)
            return cloned(result, values) if self._clones else result
        else:
            results = self._clone(self._run_uncaptured(values, batch))
        return self.model.outputs.build(results, values)

    def _not_of_graphs(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return inputs with clones of those to return that are results, which a replay writes."""
        return [
            v.clone()
            if at in self._returned and v.untyped_storage().data_ptr() in self._graph_memory
            else v
            for at, v in enumerate(values)
        ]

    def _run_with_copies(
        self, route: Route, values: Sequence[torch.Tensor], batch: CheckedBatch
    ) -> list[torch.Tensor] | None:
        """Run an entry whose graphs make the call's copies; None: they do not, and nothing ran."""
        copies, memory, context = route.copies, self.memory, None
        if copies is None or self.poison or not copies.take(values):
            return None
        memory.pad(route.load)
        if self.model.reads_metadata:
            context = self.context(batch, route, stage=copies.has_metadata)
        try:
            results = copies.set(values, memory.staged)
        except DriverError as error:
            logger.info("%s: copies are made outside of its graphs: %s", route.name, error)
            route.copies = None
            return None
        self.replay(route, context, copies.steps)
        memory.sent()
        return results or self._clone(route.results)

    def _clone(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return results, with those that the caller shall own copied."""
        found = list(results)
        if len(self._cloned) == 1:
            at = self._cloned[0]
            found[at] = found[at].clone()
        elif self._cloned:
            clone_all(found, self._cloned)
        return found

    def context(self, batch: CheckedBatch, route: Route, *, stage: bool = False) -> ForwardContext:
        """Fill in a step's metadata, or stage it, and return its context."""
        replay = route.replay
        return self.memory.context(
            batch, replay.size, replay.query_len, in_full_graph=replay.is_full, stage=stage
        )

    def replay(self, route: Route, context: ForwardContext | None, steps: Sequence[Step]) -> None:
        """Run the steps of an entry over what is in the buffers; inside of `guarded`."""
        if self.poison:
            poison_others(self.table, route.replay.entry)
        route.calls += 1
        if context is not None:
            set_context(context)
        for step in steps:
            step()
        route.hits += 1

    def _run_uncaptured(
        self, values: Sequence[torch.Tensor], batch: CheckedBatch
    ) -> list[torch.Tensor]:
        """Run the program without graphs."""
        memory, rows = self.memory, batch.num_tokens
        pairs = zip(memory.inputs, values, strict=True)
        inputs = {s.name: s.laid_out(v.to(memory.device)) for s, v in pairs}
        self.counts.rows += rows
        set_context(memory.unpadded_context(batch))
        return self.model.program.for_size(rows).run(memory.values(inputs, rows), Direct())

    def _run_itself(
        self,
        values: Sequence[torch.Tensor],
        batch: CheckedBatch,
        module: Callable[[Mapping[str, torch.Tensor]], Any],
    ) -> Any:
        """Return what the module itself gives, where no trace is valid or there is none.

        Nothing of the program may be put around it: its result may have another structure.
        """
        pairs = zip(self.memory.inputs, values, strict=True)
        moved = {s.name: v.to(self.memory.device) for s, v in pairs}
        self.counts.rows += batch.num_tokens
        set_context(self.memory.unpadded_context(batch))
        return module(moved)
