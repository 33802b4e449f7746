"""A load generator: clients that send one request after the other, and what they saw.

    python examples/service/load.py --url http://127.0.0.1:8000 --clients 64 --requests 2000

Each client has one connection and sends its next request when the last one is answered. It has to
cost less than what it measures: look at its own processor's time where the service seems slow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """What one request got."""

    body: dict[str, Any]
    """As it was sent."""
    status: int = 0
    """0: the connection broke."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: str | None = None
    error: str = ""
    first_s: float = 0.0
    """From sending to the first token."""
    total_s: float = 0.0
    """From sending to the last byte."""


class Connection:
    """One connection over plain HTTP/1.1: kept between requests, made anew after it broke.

    No client library: httpx needs more of the processor per token than the service does, and so it
    would be the generator's limit that is measured.

    Args:
        url: http://HOST:PORT, and a path before `/generate` if there is one.
        timeout_s: longest time of one request; None: no limit.
    """

    def __init__(self, url: str, timeout_s: float | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"url: got {url!r}; http://HOST:PORT is needed")
        self._host, self._port, self._path = parts.hostname, parts.port or 80, parts.path
        self.timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        """Close it; the next request makes another one."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def post(self, path: str, body: bytes) -> tuple[int, AsyncIterator[bytes]]:
        """Send JSON; return the status, and the parts of the answer's body as they come."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        head = (
            f"POST {self._path.rstrip('/')}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        )
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        got = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status, *lines = got.rstrip().split("\r\n")
        headers = {
            name: value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        return int(status.split()[1]), self._parts(reader, headers)

    async def _parts(
        self, reader: asyncio.StreamReader, headers: dict[str, str]
    ) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readuntil(b"\r\n")
        else:
            yield await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()


async def generate(client: Connection, body: dict[str, Any]) -> Answer:
    """Send one request to `/generate` and read its stream to the end."""
    answer, started, rest = Answer(body), time.perf_counter(), b""
    try:
        async with asyncio.timeout(client.timeout_s):
            answer.status, parts = await client.post("/generate", json.dumps(body).encode())
            if answer.status != 200:
                answer.error = b"".join([part async for part in parts]).decode()
                return answer
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in filter(None, lines):
                    _read(answer, json.loads(line.removeprefix(b"data: ")), started)
    except (OSError, EOFError) as error:  # it broke, or took too long
        client.close()
        answer.status, answer.error = 0, repr(error)
    answer.total_s = time.perf_counter() - started
    return answer


def _read(answer: Answer, event: dict[str, Any], started: float) -> None:
    if "token" in event:
        answer.first_s = answer.first_s or time.perf_counter() - started
        answer.tokens.append(event["token"])
        answer.text += event["text"]
    else:
        answer.finished, answer.error = event.get("finished"), event.get("error", "")


async def load(url: str, bodies: Iterable[dict[str, Any]], clients: int) -> list[Answer]:
    """Send all bodies from some clients at once; a body goes to the next client that is free."""
    waiting: Iterator[dict[str, Any]] = iter(bodies)
    answers: list[Answer] = []

    async def one() -> None:
        with contextlib.closing(Connection(url)) as client:
            for body in waiting:
                answers.append(await generate(client, body))

    await asyncio.gather(*(one() for _ in range(clients)))
    return answers


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return throughput and latencies of requests that were answered in `seconds`."""
    good = [a for a in answers if a.status == 200 and not a.error]
    tokens = sum(len(a.tokens) for a in good)
    made: dict[str, Any] = {
        "requests": len(answers),
        "by_status": dict(Counter(str(a.status) for a in answers)),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 2),
    }
    for name in ("first_s", "total_s"):
        values = sorted(getattr(a, name) for a in good)
        if len(values) > 1:
            cuts = statistics.quantiles(values, n=100, method="inclusive")
            made[name] = {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4)}
    return made


def main() -> None:
    """Load a service and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=40, help="distinct prompts")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    given = parser.parse_args()
    bodies = (
        {
            "prompt": f"Write a line about {at % given.prompts}.",
            "max_new_tokens": given.max_new_tokens,
        }
        for at in range(given.requests)
    )
    started = time.perf_counter()
    answers = asyncio.run(load(given.url, bodies, given.clients))
    print(json.dumps(figures(answers, time.perf_counter() - started), indent=2))


if __name__ == "__main__":
    main()
