"""The fronts: concurrent requests become steps of one runner.

In: requests from an event loop. Out: their answers, on that loop. One thread per runner does all of
its work; queues between it and the loop are the only shared state. Uses public names of pcgsvc.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pcgsvc
from pcgsvc.errors import BatchError

logger = logging.getLogger(__name__)


class BusyError(Exception):
    """The queue is full; the client should come back."""


class DrainingError(Exception):
    """The service is shutting down and takes no new request."""


class StepError(Exception):
    """A step raised, and with it the requests that were in it; others go on."""


Item = TypeVar("Item")


class _Front(Generic[Item]):
    """A bounded queue and the thread that empties it.

    Args:
        name: of the thread.
        max_waiting: requests that may wait; further ones are `BusyError`.
        window_s: how long a request that finds the runner idle waits for company, in seconds.
    """

    def __init__(self, name: str, max_waiting: int, window_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_waiting, self._window_s = max_waiting, window_s
        self._waiting: deque[Item] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.error: Exception | None = None
        """What the last step raised; None after one that did not."""
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and answered."""
        return self._thread.is_alive() and not self._closing and self.error is None

    def _withdraw(self, item: Item) -> None:
        """Take an item out of the queue, if it is still there."""
        with self._wake, contextlib.suppress(ValueError):
            self._waiting.remove(item)

    def _put(self, item: Item) -> None:
        with self._wake:
            if self._closing:
                raise DrainingError("shutting down")
            if len(self._waiting) >= self._max_waiting:
                raise BusyError(f"{len(self._waiting)} requests are waiting; try again later")
            self._waiting.append(item)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                idle = False
                while not self._waiting and not self.running and not self._closing:
                    idle = self._wake.wait()
                if self._closing and not self._waiting and not self.running:
                    return
            if idle:
                time.sleep(self._window_s)
            try:
                self._work()
                self.error = None
            except Exception as error:  # whatever it is, the others' requests go on
                logger.exception("a step failed")
                self.error = error
                self._fail(StepError(f"{type(error).__name__}: {error}"))

    @property
    def running(self) -> int:
        """Requests that hold a slot, which is work besides the queue's."""
        return 0

    def _work(self) -> None:
        raise NotImplementedError

    def _fail(self, error: StepError) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Answer what was taken, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)


# ---- generation ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """One request for a continuation; iterate over it for its tokens."""

    continuation: pcgsvc.Continuation
    cancelled: bool = False
    _events: list[pcgsvc.NewToken | StepError | None] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: pcgsvc.NewToken | StepError | None) -> None:
        """Take a token, an error that ends it, or None: it is over. On the loop only."""
        self._events.append(event)
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[list[pcgsvc.NewToken]]:
        """Yield its tokens, all that wait at once; raise what the step of one of them raised."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            events, self._events = self._events, []
            tokens = [event for event in events if isinstance(event, pcgsvc.NewToken)]
            if tokens:
                yield tokens
            if isinstance(events[-1], StepError):
                raise events[-1]
            if events[-1] is None:
                return


class GenerateFront(_Front[Job]):
    """Continuous batching: requests enter the running steps as slots become free.

    Args:
        runner: of a language model; stays the caller's.
        slots: requests that run at once; None: as many as a captured step holds.
        on_step: told the seconds of each step.
    """

    def __init__(
        self,
        runner: pcgsvc.Runner,
        *,
        slots: int | None,
        max_waiting: int,
        window_s: float,
        on_step: Any,
    ) -> None:
        self._slots = pcgsvc.Slots(runner, max_requests=slots)
        self._on_step = on_step
        self._jobs: dict[pcgsvc.Continuation, Job] = {}
        self._events: list[tuple[Job, pcgsvc.NewToken | StepError | None]] = []
        super().__init__("generate", max_waiting, window_s)

    @property
    def sampling(self) -> pcgsvc.Sampling:
        """What a request without sampling has."""
        return self._slots.sampling

    def submit(
        self, prompt: str | Sequence[int], max_new_tokens: int, sampling: pcgsvc.Sampling
    ) -> Job:
        """Check a request and queue it.

        Raises:
            BatchError, ConfigError: the request cannot be served, ever.
            BusyError, DrainingError: not now.
        """
        job = Job(self._slots.prepare(prompt, max_new_tokens, sampling))
        self._put(job)
        return job

    def cancel(self, job: Job) -> None:
        """Give a request up: it leaves the queue now, or its slot before the next step."""
        job.cancelled = True
        self._withdraw(job)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._slots.running)

    def _work(self) -> None:
        for job in [job for job in self._jobs.values() if job.cancelled]:
            self._slots.cancel(job.continuation)
            del self._jobs[job.continuation]
        self._admit()
        if not self._slots.running:
            self._hand_out()
            time.sleep(self._window_s)  # all were cancelled, or others hold the KV blocks
            return
        started = time.perf_counter()
        tokens = self._slots.step(self._hand_out)  # what the last step gave, while this one runs
        self._on_step(time.perf_counter() - started)
        for token in tokens:
            job = self._jobs[token.continuation]
            self._events.append((job, token))
            if token.continuation.finished is not None:
                self._events.append((job, None))
                del self._jobs[token.continuation]
        if not self._slots.running:  # no step follows
            self._hand_out()

    def _admit(self) -> None:
        """Start what waits, in order, as long as there are slots and KV blocks."""
        while True:
            with self._wake:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            if job.cancelled:  # later, it has a slot, and the next step's beginning frees that
                continue
            self._jobs[job.continuation] = job  # before it starts: what raises there ends it, too
            if not self._slots.start(job.continuation):
                del self._jobs[job.continuation]
                with self._wake:
                    self._waiting.appendleft(job)
                return

    def _fail(self, error: StepError) -> None:
        self._slots.close()
        for continuation, job in self._jobs.items():
            self._slots.cancel(continuation)  # of one whose start raised
            self._events.append((job, error))
        self._jobs.clear()
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the last step's events to their jobs, which are the loop's: one call for all.

        The loop takes Python's lock to write them, and so would hold up the next step's launch.
        """
        events, self._events = self._events, []

        def put() -> None:
            for job, event in events:
                job.put(event)

        if events:
            self._loop.call_soon_threadsafe(put)


# ---- embedding -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Texts:
    texts: Sequence[str]
    truncate: bool
    answer: asyncio.Future[list[list[float]]]


class EmbedFront(_Front[_Texts]):
    """Texts of concurrent requests share calls.

    Args:
        runner: of an encoder with a tokenizer; stays the caller's.
        max_texts: most texts of one call, unless one request has more.
    """

    def __init__(
        self, runner: pcgsvc.Runner, *, max_texts: int, max_waiting: int, window_s: float
    ) -> None:
        self._runner, self._max_texts = runner, max_texts
        self._taken: list[_Texts] = []
        super().__init__("embed", max_waiting, window_s)

    async def embed(self, texts: Sequence[str], truncate: bool) -> list[list[float]]:
        """Return one vector per text; errors as of `GenerateFront.submit`."""
        item = _Texts(texts, truncate, self._loop.create_future())
        self._put(item)
        try:
            return await item.answer
        finally:
            self._withdraw(item)  # of a client that is gone

    def _take(self) -> Iterator[_Texts]:
        """Take from the queue what one call may hold."""
        count, waiting = 0, self._waiting
        with self._wake:
            truncate = waiting[0].truncate if waiting else False
            while waiting and waiting[0].truncate == truncate:
                count += len(waiting[0].texts)
                if count > self._max_texts and count > len(waiting[0].texts):
                    break
                yield waiting.popleft()

    def _work(self) -> None:
        self._taken = list(self._take())
        if not self._taken:
            return
        try:
            self._embed(self._taken)
        except BatchError:  # one of them has a text too long: each for itself
            for item in self._taken:
                try:
                    self._embed([item])
                except BatchError as error:
                    self._answer(item, error)

    def _embed(self, items: list[_Texts]) -> None:
        texts = [text for item in items for text in item.texts]
        vectors = self._runner.embed(texts, truncate=items[0].truncate).tolist()
        for item in items:
            self._answer(item, vectors[: len(item.texts)])
            del vectors[: len(item.texts)]

    def _fail(self, error: StepError) -> None:
        for item in self._taken:
            self._answer(item, error)

    def _answer(self, item: _Texts, answer: Any) -> None:
        def put() -> None:
            if item.answer.done():  # its client is gone
                return
            if isinstance(answer, Exception):
                item.answer.set_exception(answer)
            else:
                item.answer.set_result(answer)

        self._loop.call_soon_threadsafe(put)
