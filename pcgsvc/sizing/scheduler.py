"""The simulated scheduler: the steps that a serving engine would make of a trace's requests.

In: a trace, the scheduler's settings, and what a step takes where requests arrive at their times.
Out: a `Traffic` that knows its `Simulation`. Knows nothing of graphs and sizes.

Continuous batching as vLLM and SGLang do it: every request that decodes is in every step, and
prompts fill what is left of it, in order of arrival and cut into chunks. The step that ends a
prompt gives the first output token. KV-cache memory, preemption and shared prefixes are not
simulated.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pcgsvc.config import SchedulerConfig
from pcgsvc.sizing.traces import Request, Trace
from pcgsvc.sizing.traffic import Simulation, Traffic, make_traffic

Pace = Callable[[int, bool], float]
"""Seconds of a step of so many rows, uniform or not."""


class Step(NamedTuple):
    """Equal steps in a row."""

    decodes: int
    """Requests that decode, with `1 + speculative_len` rows each."""
    chunks: tuple[int, ...] = ()
    """Prompt rows of each request that is prefilled."""
    times: int = 1
    """How many such steps; 1 where there are chunks."""

    @property
    def kind(self) -> str:
        """`decode`, `prefill` or `mixed`."""
        if not self.chunks:
            return "decode"
        return "mixed" if self.decodes else "prefill"

    def shape(self, query_len: int) -> tuple[int, bool]:
        """Return the rows of a step, and whether every request has `query_len` of them."""
        rows = self.decodes * query_len + sum(self.chunks)
        return rows, all(chunk == query_len for chunk in self.chunks)


class _Prefill:
    """A request whose prompt is not done."""

    def __init__(self, request: Request) -> None:
        self.left, self.output = request.prompt, request.output


def simulate(trace: Trace, scheduler: SchedulerConfig, pace: Pace | None) -> Traffic:
    """Return the steps of a trace as traffic; `pace`: of `arrivals=kept`; None: a closed loop."""
    query_len = 1 + scheduler.speculative_len
    calls: Counter[tuple[int, bool]] = Counter()
    kinds: dict[str, Counter[int]] = {"decode": Counter(), "prefill": Counter(), "mixed": Counter()}
    most = 0
    for step in steps(trace.requests, scheduler, pace):
        shape = step.shape(query_len)
        calls[shape] += step.times
        kinds[step.kind][shape[0]] += step.times
        most = max(most, step.decodes + len(step.chunks))
    simulation = Simulation(
        form=trace.form,
        num_requests=len(trace.requests),
        left_out=trace.left_out,
        prompt_tokens=sum(request.prompt for request in trace.requests),
        output_tokens=sum(request.output for request in trace.requests),
        scheduler=scheduler,
        kinds={kind: dict(sorted(rows.items())) for kind, rows in kinds.items()},
        max_requests=most,
        notes=trace.notes,
    )
    return dataclasses.replace(make_traffic(trace.source, calls), simulation=simulation)


def steps(
    requests: Sequence[Request], scheduler: SchedulerConfig, pace: Pace | None
) -> Iterator[Step]:
    """Yield the steps that serve requests, equal ones at once.

    Args:
        requests: in order of arrival.
        scheduler: its limits.
        pace: requests arrive at their times, and steps take this long; None: a request arrives as
            soon as fewer than `max_num_seqs` run.
    """
    query_len, limit = 1 + scheduler.speculative_len, scheduler.max_num_batched_tokens
    prompts: list[_Prefill] = []
    ends: list[int] = []  # a heap: the number of steps after which each decoding request is done
    taken = done = 0  # requests, steps
    now = requests[0].arrival_s
    while taken < len(requests) or prompts or ends:
        free = scheduler.max_num_seqs - len(prompts) - len(ends)
        while free and taken < len(requests) and (pace is None or requests[taken].arrival_s <= now):
            prompts.append(_Prefill(requests[taken]))
            taken, free = taken + 1, free - 1
        if not prompts and not ends:
            now = requests[taken].arrival_s
            continue
        chunks = _chunks(prompts, limit - len(ends) * query_len, scheduler.chunk)
        step = Step(len(ends), chunks)
        took = 0.0 if pace is None else pace(*step.shape(query_len))
        if not chunks:
            times = ends[0] - done
            if pace is not None and free and taken < len(requests):
                times = min(times, max(1, math.ceil((requests[taken].arrival_s - now) / took)))
            step = step._replace(times=times)
        yield step
        done, now = done + step.times, now + step.times * took
        while ends and ends[0] <= done:
            heapq.heappop(ends)
        for prompt in prompts:
            if not prompt.left and prompt.output > 1:  # its first token is out
                heapq.heappush(ends, done + math.ceil((prompt.output - 1) / query_len))
        prompts = [prompt for prompt in prompts if prompt.left]


def _chunks(prompts: Sequence[_Prefill], room: int, most: int | None) -> tuple[int, ...]:
    """Take rows of prompts, in order, until a step has no more room."""
    chunks = []
    for prompt in prompts:
        if not room:
            break
        rows = min(prompt.left, room, prompt.left if most is None else most)
        prompt.left -= rows
        room -= rows
        chunks.append(rows)
    return tuple(chunks)
