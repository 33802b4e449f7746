"""A prepared call: steps of one row count over the runner's own buffers, for loops that own theirs.

In: a row count and a batch. Out: buffers to write to and to read from, and `step`. Knows nothing of
models and of how graphs are captured.
"""

from __future__ import annotations

from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.errors import BatchError, PcgError, UncoveredError
from pcgsvc.forward.batch import Batch, CheckedBatch
from pcgsvc.ops.context import ForwardContext
from pcgsvc.serve.calls import Calls
from pcgsvc.serve.replay import Route


class PreparedCall:
    """Steps of one row count, served by one entry; made by `Runner.prepare`.

    A step is `update(batch)`, writing to `inputs`, `step()`, and reading `results`, on one CUDA
    stream. The buffers are the runner's, and the next step or call of the runner writes to them:
    results that must outlive it are to be copied. They are valid until the runner is closed.

    `step` runs what `update` said last. For a model with attention a second step needs a second
    `update`, since the first one has moved the rows on; so does one on a stream that is not
    torch's. After another call of the runner, and on another stream, `step` is refused as well:
    `update` takes the buffers back, and orders what follows after what ran before; inputs are then
    to be written again. Where other threads use the runner too, hold `runner.lock` from `update`
    until the results are read.
    """

    def __init__(
        self, calls: Calls, num_tokens: int, batch: Batch | CheckedBatch | None = None
    ) -> None:
        if type(num_tokens) is not int or num_tokens < 1:
            raise BatchError(f"num_tokens: got {num_tokens!r}; at least 1 row is needed.")
        self._calls, self.num_tokens = calls, num_tokens
        with calls.lock:
            calls.ensure_open()
            calls.refuse_nested()
            checked, route = calls.find(batch, num_tokens)
            if route is None:
                reqs, dispatch = len(checked.query_lens), calls.dispatch
                why = dispatch.why_none(num_tokens, reqs, dispatch.is_uniform(checked.query_lens))
                raise UncoveredError(
                    f"prepare: no graph serves {num_tokens} rows in {reqs} requests: {why}."
                )
            targets, calls.lends = route.load.targets, True
            names = [spec.name for spec in calls.memory.inputs]
            self.inputs: dict[str, torch.Tensor] = dict(zip(names, targets, strict=True))
            """The input buffers' true rows, by argument name; padding rows are zero."""
            self.results: Any = calls.model.outputs.build(route.results, targets)
            """The forward's result over the graphs' memory."""
            self._route, self._order = route, calls.order
            self._context: ForwardContext | None = None
            self._stream, self._is_updated = 0, False
            self._moves_on = calls.memory.attention is not None
            is_plain = route.replay.is_full and not calls.poison
            self._is_graph = self._order is not None and is_plain
            """Whether a step is the launch of a CUDA graph, which heeds none of torch's modes."""
            calls.apart(self._set, checked, route)

    def update(self, batch: Batch | CheckedBatch | None = None) -> None:
        """Set what the next step runs; call it before writing its inputs, on the same stream.

        Args:
            batch: the requests behind the rows, as for a call of the runner.

        Raises:
            BatchError: it does not fit, or another entry serves such batches; nothing was touched.
            PcgError: the runner is closed, busy with a call that this is a part of, or the stream
                is being captured.
        """
        calls = self._calls
        with calls.lock:
            calls.ensure_open()
            calls.refuse_nested()
            checked, route = calls.find(batch, self.num_tokens)
            if route is None or route.replay is not self._route.replay:
                raise BatchError(
                    f"batch: such batches are served by {route.name if route else 'no graph'}; "
                    f"this call was prepared for {self._route.name}. Prepare another one for them."
                )
            calls.apart(self._set, checked, route)

    def _set(self, batch: CheckedBatch, route: Route) -> None:
        calls = self._calls
        calls.prepared = None
        calls.memory.pad(route.load)
        if calls.model.reads_metadata:
            self._context = calls.context(batch, route)
        if self._order is not None:
            self._stream = self._order.raw
        self._route, self._is_updated, calls.prepared = route, True, self

    def step(self) -> Any:
        """Run one step and return `results`.

        Raises:
            PcgError: `update` must come first (see the class), or the runner is closed or busy with
                a call that this is a part of.
            StaleAddressError: a weight's memory was replaced since capture.
        """
        if not self._is_graph:
            return self._calls.guarded(self._calls.apart, self._replay)
        calls = self._calls
        with calls.lock:
            calls.refuse_nested()
            if calls.counts.listeners:
                return calls.counts.timed(self._launch)
            return self._launch()

    def _launch(self) -> Any:
        """Launch the graph: what `Calls` does around a call, as far as a launch needs that."""
        order, route = self._order, self._route
        assert order is not None, "a launch without a stream"
        if torch_private.current_device() != order.index:
            with torch.cuda.device(order.index):
                return self._launch()
        order.enter()
        self._take()
        route.calls += 1
        try:
            for step in route.replay.steps:
                step()
        finally:
            order.leave()
        route.hits += 1
        return self.results

    def _replay(self) -> Any:
        self._take()
        self._calls.replay(self._route, self._context, self._route.replay.steps)
        return self.results

    def _take(self) -> None:
        """Refuse a step whose buffers are not known to be right, and whose weights are not."""
        calls, order = self._calls, self._order
        if calls.prepared is not self or not self._is_updated:
            calls.ensure_open()
            raise PcgError(
                "step: call update(batch) first, then write the inputs: "
                + (
                    "the last step has moved the rows on."
                    if calls.prepared is self
                    else "the runner was called since, and its calls use the same buffers."
                )
            )
        if order is not None and order.raw != self._stream:
            raise PcgError(
                "step: called on another stream than update(), so that its inputs may still be "
                "being written. Call update(batch) on this stream, write the inputs, and step."
            )
        calls.weights.check()
        calls.meet(self.num_tokens, self._route)
        # The handle of a stream that is not torch's may be another stream's at the next step.
        self._is_updated = not (self._moves_on or (order is not None and order.is_external))
