"""What calls were made of a runner, and what served them.

In: the dispatch table and what the runner counts in each call. Out: `Runner.stats()`, and a log
line, or an error, for calls that no graph serves. Knows nothing of tensors. The runner's lock
guards it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pcgsvc.capture.capture import GraphTable
from pcgsvc.config import Config, OnUncovered
from pcgsvc.errors import UncoveredError
from pcgsvc.events import log_event
from pcgsvc.forward.batch import CheckedBatch
from pcgsvc.serve.dispatch import DispatchTable
from pcgsvc.serve.replay import Route

logger = logging.getLogger(__name__)


class CallCounts:
    """Counters of one runner; replays are counted up in their routes."""

    def __init__(self, config: Config, dispatch: DispatchTable, table: GraphTable) -> None:
        self.routes: list[Route] = []
        """All that calls have taken."""
        self.rows = 0
        """Rows that ran without a graph."""
        self._calls: Counter[tuple[int, bool]] = Counter()
        """Calls that no graph served, by row count, and whether the batch was uniform."""
        self.listeners: list[Callable[[float], None]] = []
        """Told the seconds of each call; while there are none, no time is taken."""
        self._fallbacks: Counter[tuple[int, str]] = Counter()
        self._by_reason: Counter[str] = Counter()
        self._dispatch, self._sizes = dispatch, table.sizes
        self._refuses = config.on_uncovered is OnUncovered.ERROR or config.strict
        self._entries = [f"{m.value}:{d.num_tokens}" for m, d in table.entries]
        joined = [entry.joined for entry in table.entries.values()]
        self._in_pieces = [j.fallbacks for j in joined if j is not None and j.stitched]

    def uncovered(self, batch: CheckedBatch, uniform: bool, unlike: str | None) -> None:
        """Count a call that no graph serves, and log the first one of each reason.

        Args:
            batch: of the call.
            uniform: whether it is uniform.
            unlike: why the traced forward does not stand for the call, if it does not.

        Raises:
            UncoveredError: `on_uncovered=error` or `strict=true`, and the mode means to serve it.
        """
        rows, reqs = batch.num_tokens, len(batch.query_lens)
        reason = unlike or self._dispatch.why_none(rows, reqs, uniform)
        wanted = self._dispatch.wants(uniform)
        if wanted and self._refuses:
            raise UncoveredError(
                f"{rows} rows in {reqs} requests: no graph serves this call: {reason}. Captured "
                f"sizes: {self._sizes}. Raise "
                "capture.max_size or add to capture.sizes, or set on_uncovered=run."
            )
        self._fallbacks[(rows, reason)] += 1
        self._by_reason[reason] += 1
        self._calls[rows, uniform] += 1
        if self._by_reason[reason] == 1:  # `log_totals` says how many there were
            log_event(
                logger,
                logging.WARNING if wanted else logging.INFO,
                "fallback",
                "a call of %d rows runs without a graph: %s (further ones are counted, not logged)",
                rows,
                reason,
                reason=reason,
                num_tokens=rows,
                uniform=uniform,
            )

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call, tell the listeners how long it took, and return its result."""
        started = time.perf_counter()
        result = call(*args)
        seconds = time.perf_counter() - started
        for listen in self.listeners:
            listen(seconds)
        return result

    def log_totals(self) -> None:
        """Log how many calls ran without a graph since the build, by reason."""
        for reason, calls in self._by_reason.items():
            words = "%d calls ran without a graph: %s"
            fields = {"reason": reason, "calls": calls}
            log_event(logger, logging.INFO, "fallbacks", words, calls, reason, **fields)

    def stats(self) -> dict[str, Any]:
        """Return all counts as plain dicts; see `Runner.stats`."""
        hits: Counter[str] = Counter()
        calls, rows, padded = self._calls.copy(), self.rows, 0
        for route in self.routes:
            if route.hits:
                hits[route.name] += route.hits
            if route.calls:
                calls[route.rows, route.uniform] += route.calls
            rows += route.hits * route.rows
            padded += route.hits * (route.size - route.rows)
        return {
            "hits": dict(hits),
            "fallbacks": [
                {"num_tokens": n, "reason": reason, "count": count}
                for (n, reason), count in sorted(self._fallbacks.items())
            ],
            "in_pieces": [
                {"reason": reason, "count": count}
                for reason, count in sorted(sum(self._in_pieces, Counter[str]()).items())
            ],
            "rows": rows,
            "padding_rows": padded,
            "padding_share": padded / (rows + padded) if padded else 0.0,
            "calls": [
                {"num_tokens": n, "uniform": uniform, "count": count}
                for (n, uniform), count in sorted(calls.items())
            ],
            "never_used": [name for name in self._entries if name not in hits],
        }

    def close(self) -> None:
        """Keep the counts, and nothing of the memory that routes hold."""
        for route in self.routes:
            del route.replay, route.load, route.results

    def reset(self) -> None:
        """Set all counts of `stats` to zero."""
        self._calls.clear()
        self._fallbacks.clear()
        for counted in self._in_pieces:
            counted.clear()
        self.rows = 0
        for route in self.routes:
            route.calls = route.hits = 0
