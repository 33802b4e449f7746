"""The HTTP side: `/generate`, `/embed`, `/healthz`, `/readyz` and `/metrics`.

Start it with one worker per process (docs/service.md says why and how to have several):

    SERVICE_GENERATE="model=smollm2" uvicorn --app-dir examples --factory service.app:create_app
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

import pcgsvc
from pcgsvc.errors import BatchError, ConfigError
from pcgsvc.metrics import PrometheusCollector
from service.front import BusyError, DrainingError, EmbedFront, GenerateFront, Job, StepError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment says; `SERVICE_` and the field's name in capitals."""

    generate: str | None = None
    """Overrides of pcgsvc for `/generate`, as on its command line; None: no such endpoint."""
    embed: str | None = None
    """Likewise for `/embed`."""
    require_warm: int = 0
    """1: refuse to start where the disk cache does not have everything (production)."""
    slots: int = 0
    """Requests that run at once; 0: as many as a captured step holds."""
    max_waiting: int = 256
    """Requests of an endpoint that may wait; further ones get 429."""
    window_ms: float = 2.0
    """How long a request that finds the runner idle waits for company, in milliseconds."""
    max_new_tokens: int = 1024
    """Most tokens that one request may ask for."""
    max_body: int = 1 << 20
    """Largest body of a request, in bytes."""

    @staticmethod
    def from_env() -> Settings:
        """Read the environment; errors as of `from_words`."""
        given = {
            f.name: os.environ[f"SERVICE_{f.name.upper()}"]
            for f in dataclasses.fields(Settings)
            if os.environ.get(f"SERVICE_{f.name.upper()}")
        }
        return Settings.from_words(given)

    @staticmethod
    def from_words(given: Mapping[str, str]) -> Settings:
        """Read fields from text; errors as of the class, or a value is no number: ValueError."""
        kinds: dict[str, Callable[[str], Any]] = {"generate": str, "embed": str, "window_ms": float}
        values: dict[str, Any] = {}
        for name, text in given.items():
            try:
                values[name] = kinds.get(name, int)(text)
            except ValueError:
                raise ValueError(f"{name}: got {text!r}; a number is needed") from None
        return Settings(**values)

    def __post_init__(self) -> None:
        """Refuse nothing to serve, or a number out of range: ValueError."""
        if self.generate is None and self.embed is None:
            raise ValueError("generate, embed: neither is set; nothing would be served")
        for name, least, most in (
            ("require_warm", 0, 1),
            ("slots", 0, math.inf),
            ("max_waiting", 1, math.inf),
            ("window_ms", 0, 10_000),
            ("max_new_tokens", 1, math.inf),
            ("max_body", 1, math.inf),
        ):
            got = getattr(self, name)
            if not least <= got <= most:  # NaN too
                raise ValueError(f"{name}: got {got}; {least} to {most} are possible")

    def overrides(self, words: str) -> list[str]:
        """Return the overrides of a runner."""
        return [*shlex.split(words), *(["cache.require_warm=true"] if self.require_warm else [])]


Result = TypeVar("Result")


class Refusal(BaseModel):
    """The body of every answer that is not what was asked for; an event of a stream, likewise."""

    error: str


class GenerateRequest(BaseModel):
    """A prompt, and how it is continued; what is left out is as the checkpoint says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1)] | list[int]
    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str], Field(max_length=8)] | None = None
    stream: bool = True

    def sampling(self, default: pcgsvc.Sampling) -> pcgsvc.Sampling:
        """Return the checkpoint's sampling with what the request says otherwise."""
        names = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(default, **given)


class EmbedRequest(BaseModel):
    """Texts, each to become one vector."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: Annotated[list[str], Field(min_length=1, max_length=256)]
    truncate: bool = False


class Service:
    """Runners, their fronts and the metrics of one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "service_requests", "Requests answered.", ["endpoint", "status"], registry=registry
        )
        self.cancelled = Counter("service_cancelled", "Clients gone early.", registry=registry)
        words = "Of prompts that were taken; new ones, of answers that were given whole."
        self.tokens = Counter("service_tokens", words, ["kind"], registry=registry)
        self.waiting = Gauge("service_waiting", "Queued.", ["endpoint"], registry=registry)
        self.busy = Gauge("service_running", "In slots.", ["endpoint"], registry=registry)
        seconds = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
        histogram = partial(Histogram, registry=registry, buckets=seconds)
        self.first_s = histogram("service_first_token_seconds", "To a request's first token.")
        self.total_s = histogram("service_generate_seconds", "To its last.")
        self.step_s = histogram("service_step_seconds", "A step, tokens chosen and read.")
        self.generate: GenerateFront | None = None
        self.embed: EmbedFront | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the runners, and end with everything answered and freed."""
        settings, window_s = self.settings, self.settings.window_ms / 1000
        runners: dict[str, pcgsvc.Runner] = {}
        async with contextlib.AsyncExitStack() as stack:
            for name, words in (("generate", settings.generate), ("embed", settings.embed)):
                if words is not None:
                    runner = pcgsvc.load_runner(settings.overrides(words))
                    runners[name] = stack.enter_context(runner)
            if "generate" in runners:
                self.generate = GenerateFront(
                    runners["generate"],
                    slots=settings.slots or None,
                    max_waiting=settings.max_waiting,
                    window_s=window_s,
                    on_step=self.step_s.observe,
                )
                stack.push_async_callback(self.generate.close)
            if "embed" in runners:
                runners["embed"].embed([""])  # a model that embeds no texts ends the start
                runners["embed"].reset_stats()
                self.embed = EmbedFront(
                    runners["embed"],
                    max_texts=64,
                    max_waiting=settings.max_waiting,
                    window_s=window_s,
                )
                stack.push_async_callback(self.embed.close)
            for name, front in self.fronts().items():
                self.waiting.labels(name).set_function(partial(getattr, front, "waiting"))
                self.busy.labels(name).set_function(partial(getattr, front, "running"))
            self.registry.register(PrometheusCollector(runners))
            yield

    def fronts(self) -> dict[str, GenerateFront | EmbedFront]:
        """Return the fronts by endpoint."""
        both = {"generate": self.generate, "embed": self.embed}
        return {name: front for name, front in both.items() if front is not None}

    # -- endpoints --

    async def answer_generate(self, body: GenerateRequest, request: Request) -> Response:
        """Continue a prompt: server-sent events, or one JSON object."""
        front = self.generate
        if front is None:
            return _refusal("SERVICE_GENERATE is not set", 404)
        if body.max_new_tokens > self.settings.max_new_tokens:
            got, most = body.max_new_tokens, self.settings.max_new_tokens
            return _refusal(f"max_new_tokens: got {got}; at most {most} are possible", 422)
        sampling = body.sampling(front.sampling)
        job = front.submit(body.prompt, body.max_new_tokens, sampling)
        self.tokens.labels("prompt").inc(len(job.continuation.prompt))
        if body.stream:
            give_up = partial(self._give_up, front, job)
            return _Events(self._events(job), give_up)
        try:
            await _unless_gone(self._whole(job), request)
        finally:
            self._give_up(front, job)
        if job.continuation.finished is None:
            return _refusal(*_GONE)
        return JSONResponse({"tokens": job.continuation.new, **_summary(job)})

    async def _tokens(self, job: Job) -> AsyncIterator[list[pcgsvc.NewToken]]:
        """Yield a job's tokens, as they come, and count them."""
        started, first = time.perf_counter(), True
        async for tokens in job:
            if first:
                self.first_s.observe(time.perf_counter() - started)
                first = False
            yield tokens
        self.tokens.labels("new").inc(len(job.continuation.new))
        self.total_s.observe(time.perf_counter() - started)

    async def _whole(self, job: Job) -> None:
        async for _ in self._tokens(job):
            pass

    async def _events(self, job: Job) -> AsyncIterator[bytes]:
        """Yield a job's events: a chunk for all that wait, and nothing more per token."""
        try:
            async for tokens in self._tokens(job):
                yield b"".join(map(_token_event, tokens))
        except StepError as error:  # the status is sent already
            yield _event({"error": str(error)})
        else:
            yield _event(_summary(job))

    def _give_up(self, front: GenerateFront, job: Job) -> None:
        """Free what a job holds, if its client went away before its end."""
        if job.continuation.finished is None:
            front.cancel(job)
            self.cancelled.inc()

    async def answer_embed(self, body: EmbedRequest, request: Request) -> Response:
        """Return one vector per text."""
        if self.embed is None:
            return _refusal("SERVICE_EMBED is not set", 404)
        vectors = await _unless_gone(self.embed.embed(body.texts, body.truncate), request)
        if vectors is None:
            self.cancelled.inc()
            return _refusal(*_GONE)
        return JSONResponse({"vectors": vectors})

    def readiness(self) -> Response:
        """200 while requests are taken and answered."""
        states = {name: front.is_ready for name, front in self.fronts().items()}
        return JSONResponse(states, 200 if states and all(states.values()) else 503)

    def liveness(self) -> Response:
        """200 unless the last step of a runner failed: a restart may help then."""
        errors = {name: str(f.error) for name, f in self.fronts().items() if f.error is not None}
        return JSONResponse({"errors": errors}, 500 if errors else 200)


class _Events(StreamingResponse):
    """Server-sent events, and what to do when they are over, however they end."""

    def __init__(self, events: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._at_end = at_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


async def _unless_gone(work: Coroutine[Any, Any, Result], request: Request) -> Result | None:
    """Return what work returns; None: the client went away first, and it is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()  # nothing happens to work that is done
        with contextlib.suppress(asyncio.CancelledError):
            return await working
        return None
    finally:
        working.cancel()
        leaving.cancel()


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _token_event(token: pcgsvc.NewToken) -> bytes:
    """Return `_event` of a token; in a third of its time, since most of a stream is these."""
    return f'data: {{"token": {token.token}, "text": {json.dumps(token.text)}}}\n\n'.encode()


def _refusal(error: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(Refusal(error=error).model_dump(), status, headers)


def _whats_wrong(error: RequestValidationError, content_type: str) -> str:
    """Return what is wrong with a body; the first of what may be thousands of faults."""
    found = error.errors()
    if isinstance(error.body, bytes):  # it was not read as JSON
        return f"Content-Type: got {content_type!r}; application/json is needed"
    words = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found[:5]]
    more = len(found) - len(words)
    return "; ".join(words) + (f"; and {more} more" if more else "")


def _summary(job: Job) -> dict[str, Any]:
    return {"text": job.continuation.text, "finished": job.continuation.finished}


class _Edge:
    """What is nearest to the socket: refuses larger bodies, and counts answers by status."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        got, most = 0, self._service.settings.max_body
        started = streams = False
        endpoint = scope["path"].strip("/")
        endpoint = endpoint if endpoint in ENDPOINTS else "other"

        async def limited() -> Any:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > most:
                raise HTTPException(413, f"the body has more than {most} bytes")
            return message

        async def counted(message: Any) -> None:
            nonlocal started, streams
            if message["type"] == "http.response.start":
                started = True
                kind = dict(message["headers"]).get(b"content-type", b"")
                streams = kind.startswith(b"text/event-stream")
                self._service.requests.labels(endpoint, message["status"]).inc()
            await send(message)

        try:
            await self._app(scope, limited, counted)
        except asyncio.CancelledError:  # of what its grace time left running, by the server
            refusal = "the service shuts down, and this took too long"
            if not started:
                await _refusal(refusal, 503)(scope, limited, counted)
            elif streams:
                await send({"type": "http.response.body", "body": _event({"error": refusal})})
            else:
                raise
        except Exception:  # answered further out
            if not started:
                self._service.requests.labels(endpoint, 500).inc()
            raise


_GONE = "the client left before its answer", 499
"""Sent to nobody; the count of requests has it, by the status that nginx has for it."""
ENDPOINTS = ("generate", "embed", "readyz", "healthz", "metrics")
REASONS: tuple[tuple[type[Exception], int], ...] = (
    (BusyError, 429),
    (DrainingError, 503),
    (StepError, 500),
    (BatchError, 422),
    (ConfigError, 422),
)
"""What an exception of a request is answered by."""


def create_app() -> FastAPI:
    """Return the application; the environment says what it serves."""
    app = app_of(Service(Settings.from_env()))
    # Of the whole process: while the loop is busy, as with a flood of requests to refuse, the step
    # thread waits this long for Python's lock after each call into torch. By default it is 5 ms.
    sys.setswitchinterval(0.0001)
    return app


def app_of(service: Service) -> FastAPI:
    """Return the application of a service, which runs for as long as the application does."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="pcgsvc", lifespan=lifespan)

    for kind, status in REASONS:

        @app.exception_handler(kind)
        async def refuse(request: Request, error: Exception, status: int = status) -> Response:
            headers = {"Retry-After": "1"} if status == 429 else {}
            return _refusal(str(error), status, headers)

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> Response:
        why = error.__cause__
        if error.status_code == 400 and why is not None:  # FastAPI's words have no reason
            return _refusal(f"body: it cannot be read: {type(why).__name__}: {why}", 422)
        return _refusal(str(error.detail), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return _refusal(_whats_wrong(error, request.headers.get("content-type", "")), 422)

    @app.exception_handler(Exception)
    async def refuse_unforeseen(request: Request, error: Exception) -> Response:
        return _refusal(f"{type(error).__name__}; the log has more", 500)

    documented: dict[int | str, dict[str, Any]] = {
        status: {"model": Refusal} for status in (404, 413, 422, 429, 500, 503)
    }
    app.post("/generate", responses=documented)(service.answer_generate)
    app.post("/embed", responses=documented)(service.answer_embed)
    app.get("/readyz")(service.readiness)
    app.get("/healthz")(service.liveness)

    @app.get("/metrics")
    def metrics() -> Response:
        """In a thread: a scrape waits for the step that is running."""
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_middleware(_Edge, service=service)
    return app
