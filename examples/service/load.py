"""A load generator: clients that send one request after the other, and what they saw.

    python examples/service/load.py --url http://127.0.0.1:8000 --clients 64 --requests 2000

Each client has one connection and sends its next request when the last one is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


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


async def generate(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    """Send one request to `/generate` and read its stream to the end."""
    answer, started = Answer(body), time.perf_counter()
    try:
        async with client.stream("POST", f"{url}/generate", json=body) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = (await response.aread()).decode()
                return answer
            async for line in response.aiter_lines():
                if line:
                    _read(answer, json.loads(line.removeprefix("data: ")), started)
    except httpx.HTTPError as error:
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
        async with httpx.AsyncClient(timeout=None) as client:
            for body in waiting:
                answers.append(await generate(client, url, body))

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
