"""The example service under load: thousands of requests, a flood, a signal, a restart."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from service.load import Answer, load  # noqa: E402
from service_helpers import TINY, Server, clear_share, is_right, serving, wait_for  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]
NEW = 8
WORDS = f"{TINY} attention.max_num_reqs=64 capture.sizes=[1,2,4,8,16,32,64,128]"


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(512) for _ in range(draw.randint(1, 40))] for _ in range(40)]


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"prompt": prompts()[at % 40], "max_new_tokens": NEW} for at in range(count)]


def wrong(answers: list[Answer]) -> list[Answer]:
    """Return the answers that are not whole, or not the reference where it is clear."""
    return [
        answer
        for answer in answers
        if answer.finished != "length"
        or len(answer.tokens) != NEW
        or not is_right(answer.body["prompt"], answer.tokens)
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one start of the service has filled."""
    folder = tmp_path_factory.mktemp("service")
    with serving(folder / "cache", folder / "log", WORDS):
        pass
    return folder / "cache"


@pytest.fixture
def server(cache: Path) -> Iterator[Server]:
    """A service that must start warm, as in production."""
    with serving(cache, cache.with_name("log"), WORDS, require_warm=1) as server:
        yield server


async def leave_early(server: Server, count: int) -> None:
    """Ask for long answers, and go away after the first bytes."""
    port = int(server.url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": [1, 2, 3], "max_new_tokens": 60}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"Content-Type: application/json\r\n\r\n" + body)
        await reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()


def test_two_thousand_requests_of_forty_prompts_from_sixty_four_clients(server: Server) -> None:
    assert server.start_s < 10  # warm, in seconds of the processor
    assert clear_share(prompts(), NEW) > 0.9
    asyncio.run(load(server.url, bodies(300), 64))
    before, resident = server.metrics(), server.resident_bytes()

    async def everything() -> list[Answer]:
        answers, _ = await asyncio.gather(
            load(server.url, bodies(2000), 64), leave_early(server, 20)
        )
        return answers

    answers = asyncio.run(everything())
    assert Counter(a.status for a in answers) == {200: 2000}
    assert wrong(answers) == []
    assert server.resident_bytes() - resident < 32 << 20
    wait_for(lambda: server.metrics()['pcgsvc_kv_blocks{runner="generate",state="held"}'] == 0)
    after = server.metrics()

    def grew(name: str) -> float:
        return after[name] - before[name]

    assert grew('service_requests_total{endpoint="generate",status="200"}') == 2020
    assert grew("service_cancelled_total") == 20
    assert grew('service_tokens_total{kind="prompt"}') == 50 * sum(map(len, prompts())) + 60
    assert grew('service_tokens_total{kind="new"}') == 2000 * NEW
    steps = grew("service_step_seconds_count")
    assert grew('pcgsvc_call_seconds_count{runner="generate"}') == steps < 2000 * NEW / 8
    replays = sum(grew(n) for n in after if n.startswith("pcgsvc_replays_total") and n in before)
    new = sum(v for n, v in after.items() if n.startswith("pcgsvc_replays") and n not in before)
    assert replays + new == steps  # no step ran without a graph


def test_ten_thousand_requests_at_once_are_refused_or_answered_rightly(server: Server) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count = min(10_000, most - 1000)
    port = int(server.url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": [5, 6, 7], "max_new_tokens": NEW}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    head += b"Content-Type: application/json\r\nConnection: close\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        answer = await reader.read()
        writer.close()
        if b" 429 " in answer.split(b"\r\n", 1)[0]:
            assert b"requests are waiting" in answer
        return int(answer.split(b" ", 2)[1])

    async def flood() -> tuple[list[int], list[Answer]]:
        others = load(server.url, bodies(64), 4)
        statuses, answers = await asyncio.gather(
            asyncio.gather(*(one() for _ in range(count))), others
        )
        return statuses, answers

    statuses, answers = asyncio.run(flood())
    assert set(statuses) == {200, 429}
    served = [answer for answer in answers if answer.status == 200]
    assert {a.status for a in answers} <= {200, 429}
    assert wrong(served) == []
    again = asyncio.run(load(server.url, bodies(80), 8))
    assert Counter(a.status for a in again) == {200: 80}
    assert wrong(again) == []


def test_a_signal_under_load_ends_it_with_everything_answered(server: Server) -> None:
    async def interrupted() -> list[Answer]:
        work = asyncio.ensure_future(load(server.url, bodies(2000), 64))
        await asyncio.sleep(0.5)
        while server.metrics()['service_running{endpoint="generate"}'] < 32:
            await asyncio.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        return await work

    answers = asyncio.run(interrupted())
    server.process.wait(60)
    assert server.process.returncode in (0, -signal.SIGTERM)
    served = [answer for answer in answers if answer.status]
    assert {a.status for a in served} == {200}
    assert wrong(served) == []  # what was taken was answered to its end
    assert len(served) >= 32
    refused = [answer for answer in answers if not answer.status]
    assert refused
    assert not any(answer.tokens for answer in refused)
