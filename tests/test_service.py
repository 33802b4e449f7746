"""The example service as a process: answers, refusals, clients that leave, counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from generate_helpers import wanted  # noqa: E402
from service.load import load  # noqa: E402
from service_helpers import Server, is_right, serving, wait_for  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("service")
    words = "model=llama model.num_layers=2 model.max_position=1024 compiler=eager device=cpu "
    words += "attention.block_size=4 attention.max_model_len=1024 attention.max_num_reqs=4 "
    words += "capture.sizes=[1,4,16] capture.self_check=false"
    with serving(
        folder / "cache", folder / "log", words, max_waiting=16, max_body=50_000
    ) as server:
        yield server


def post(server: Server, **body: Any) -> Any:
    return httpx.post(f"{server.url}/generate", json=body, timeout=60)


def reason(got: Any) -> str:
    """Return why a request was refused; all refusals have one shape."""
    body = got.json()
    assert list(body) == ["error"], body
    assert isinstance(body["error"], str)
    return str(body["error"])


def is_idle(server: Server) -> bool:
    got = server.metrics()
    held = got['pcgsvc_kv_blocks{runner="generate",state="held"}']
    return held == got['service_running{endpoint="generate"}'] == 0


def test_concurrent_requests_get_what_each_would_get_alone(server: Server) -> None:
    prompts = [[5, 17, 200, 3], [9], list(range(100, 130)), [42, 43]] * 4
    before = server.metrics()
    bodies = [{"prompt": p, "max_new_tokens": 5} for p in prompts]
    answers = asyncio.run(load(server.url, bodies, 8))
    assert {a.status for a in answers} == {200}
    assert all(a.finished == "length" and len(a.tokens) == 5 for a in answers)
    assert all(is_right(a.body["prompt"], a.tokens) for a in answers)
    whole = post(server, prompt=[9], max_new_tokens=5, stream=False).json()
    assert whole == {"tokens": wanted([[9]], 5)[0], "text": "", "finished": "length"}
    after = server.metrics()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    sent = sum(map(len, prompts)) + 1
    assert grew('service_requests_total{endpoint="generate",status="200"}') == 17
    assert grew('service_tokens_total{kind="prompt"}') == sent
    assert grew('service_tokens_total{kind="new"}') == 17 * 5
    assert grew('pcgsvc_rows_total{runner="generate"}') == sent + 17 * 4
    steps = grew("service_step_seconds_count")
    assert grew('pcgsvc_call_seconds_count{runner="generate"}') == steps < 17 * 5


def test_sampling_is_the_request_s(server: Server) -> None:
    def made(**sampling: Any) -> list[int]:
        body = {"prompt": [5, 6, 7], "max_new_tokens": 12, "stream": False, **sampling}
        tokens: list[int] = post(server, **body).json()["tokens"]
        return tokens

    drawn = made(temperature=5.0, seed=3)
    assert drawn == made(temperature=5.0, seed=3)
    assert drawn != made(temperature=5.0, seed=4)
    assert made(temperature=5.0, top_k=1) == made()
    assert len(set(made(repetition_penalty=100.0))) == 12


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": []}, 422, "none may be empty"),
        ({"prompt": ""}, 422, "at least 1 character"),
        ({"prompt": [1, 512]}, 422, "got token 512"),
        ({"prompt": [1.5]}, 422, "valid integer"),
        ({"prompt": "text"}, 422, "no tokenizer"),
        ({"prompt": [1] * 1020, "max_new_tokens": 5}, 422, "max_model_len=1024"),
        ({"prompt": [1], "max_new_tokens": 0}, 422, "max_new_tokens: got 0"),
        ({"prompt": [1], "max_new_tokens": 5000}, 422, "got 5000; at most 1024"),
        ({"prompt": [1], "temperature": -1}, 422, "temperature: got -1"),
        ({"prompt": [1], "top_p": 2}, 422, "top_p: got 2"),
        ({"prompt": [1], "seed": -1}, 422, "seed: got -1"),
        ({"prompt": [1], "temperature": True}, 422, "temperature: Input should be a valid number"),
        ({"prompt": [1], "top_p": "0.5"}, 422, "top_p: Input should be a valid number"),
        ({"prompt": [1], "stream": "false"}, 422, "stream: Input should be a valid boolean"),
        ({"prompt": [1], "stop": ["x"]}, 422, "no tokenizer"),
        ({"prompt": [1], "temprature": 1}, 422, "temprature"),
        ({"prompt": [1] * 30_000}, 413, "50000 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_is_refused_with_its_reason(
    server: Server, body: dict[str, Any], status: int, words: str
) -> None:
    got = post(server, **body)
    assert (got.status_code, words in reason(got)) == (status, True), got.text


def test_what_is_no_json_or_ends_early_is_refused(server: Server) -> None:
    kind = {"Content-Type": "application/json"}
    broken = httpx.post(f"{server.url}/generate", content=b'{"prompt": [1', headers=kind)
    assert (broken.status_code, "JSON decode error" in reason(broken)) == (422, True)
    assert "body.prompt: Field required" in reason(post(server))
    for content, words in (
        (b"[" * 9000, "RecursionError"),
        (b'{"prompt": [1], "seed": ' + b"1" * 5000 + b"}", "limit"),
        (b'{"prompt": "\xff"}', "utf-8"),
    ):
        odd = httpx.post(f"{server.url}/generate", content=content, headers=kind)
        assert (odd.status_code, words in reason(odd)) == (422, True), odd.text
    body = b'{"prompt": [1], "max_new_tokens": 1}'
    untold = httpx.post(f"{server.url}/generate", content=body, headers={"Content-Type": "text/x"})
    assert (untold.status_code, "got 'text/x'; application/json" in reason(untold)) == (422, True)
    many = reason(post(server, prompt=["x"] * 5000))
    assert len(many) < 1000, many[:2000]
    assert many.endswith("and 4996 more"), many[-100:]
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as cut:
        cut.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        cut.shutdown(socket.SHUT_WR)
        assert cut.recv(100).startswith((b"HTTP/1.1 400", b""))
    for method, path, status, words in (
        ("post", "embed", 422, "body.texts: Field required"),
        ("post", "nowhere", 404, "Not Found"),
        ("get", "generate", 405, "Method Not Allowed"),
    ):
        got = httpx.request(method, f"{server.url}/{path}", json={})
        assert (got.status_code, words in reason(got)) == (status, True)
    absent = httpx.post(f"{server.url}/embed", json={"texts": ["x"]})
    assert (absent.status_code, reason(absent)) == (404, "SERVICE_EMBED is not set")
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert post(server, prompt=[9], max_new_tokens=2, stream=False).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_and_blocks(server: Server, stream: bool) -> None:
    def counts() -> list[float]:
        names = ["service_cancelled_total"]
        names += [f'service_requests_total{{endpoint="generate",status="{s}"}}' for s in (200, 499)]
        return [server.metrics().get(name, 0.0) for name in names]

    before = counts()
    body = json.dumps({"prompt": [1], "max_new_tokens": 1000, "stream": stream}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(head + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: not is_idle(server), pause_s=0)  # a thousand steps are to come
    wait_for(lambda: is_idle(server))
    grew = [1, 1, 0] if stream else [1, 0, 1]
    wait_for(lambda: [b - a for a, b in zip(before, counts(), strict=True)] == grew)


def test_a_full_queue_refuses_and_those_that_wait_are_answered(server: Server) -> None:
    body = {"prompt": [5, 6, 7], "max_new_tokens": 15}
    answers = asyncio.run(load(server.url, [body] * 60, 60))
    by_status = {s: [a for a in answers if a.status == s] for s in {a.status for a in answers}}
    assert set(by_status) == {200, 429}
    assert len(by_status[200]) >= 8
    assert all(is_right(body["prompt"], a.tokens) for a in by_status[200])  # type: ignore[arg-type]
    assert "requests are waiting" in json.loads(by_status[429][0].error)["error"]
    wait_for(lambda: is_idle(server))


def test_a_scrape_waits_for_a_step_and_not_the_loop(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda at: server.metrics()["service_cancelled_total"], range(8)))
    assert len(set(got)) == 1


def test_an_exception_that_nobody_foresaw_is_counted_and_has_the_shape_of_a_refusal() -> None:
    from service.app import Service, Settings, app_of

    service = Service(Settings(generate="not loaded"))

    async def fails() -> None:
        raise KeyError("inside")

    app = app_of(service)
    app.get("/fails")(fails)

    async def main() -> Any:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return [await client.get("/fails"), await client.get("/openapi.json")]

    got, documented = asyncio.run(main())
    assert (got.status_code, reason(got)) == (500, "KeyError; the log has more")
    counted = {"endpoint": "other", "status": "500"}
    assert service.registry.get_sample_value("service_requests_total", counted) == 1
    answers = documented.json()["paths"]["/generate"]["post"]["responses"]
    schemas = {
        a["content"]["application/json"]["schema"]["$ref"] for s, a in answers.items() if s != "200"
    }
    assert schemas == {"#/components/schemas/Refusal"}


@pytest.mark.parametrize("streams", [True, False])
def test_what_the_grace_time_of_a_shutdown_leaves_running_is_told(streams: bool) -> None:
    from collections.abc import AsyncIterator

    from service.app import Service, Settings, _Events, app_of

    service = Service(Settings(generate="not loaded"))
    app, sent, ended = app_of(service), list[Any](), list[bool]()

    async def waits() -> Any:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: {}\n\n"
            await asyncio.Event().wait()

        if not streams:
            await asyncio.Event().wait()
        return _Events(events(), lambda: ended.append(True))

    app.get("/generate", response_model=None)(waits)
    scope = {"type": "http", "method": "GET", "path": "/generate", "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "asgi": {"version": "3.0"}}

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        task = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait_for(task, 10)

    asyncio.run(main())
    counted = {"endpoint": "generate", "status": "200" if streams else "503"}
    assert sent[0]["status"] == int(counted["status"])
    assert service.registry.get_sample_value("service_requests_total", counted) == 1
    *_, last = sent
    event = json.loads(last["body"].removeprefix(b"data: "))
    assert event == {"error": "the service shuts down, and this took too long"}
    assert not last.get("more_body")
    assert ended == [True] * streams


def test_without_a_model_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.app import create_app

    for name in ("SERVICE_GENERATE", "SERVICE_EMBED"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="neither is set"):
        create_app()
    monkeypatch.setenv("SERVICE_GENERATE", "model=llama")
    for name, value in (
        ("SLOTS", "many"),
        ("SLOTS", "-1"),
        ("WINDOW_MS", "-1"),
        ("WINDOW_MS", "nan"),
        ("MAX_WAITING", "0"),
        ("MAX_NEW_TOKENS", "0"),
        ("MAX_BODY", "0"),
        ("REQUIRE_WARM", "yes"),
    ):
        with monkeypatch.context() as one:
            one.setenv(f"SERVICE_{name}", value)
            with pytest.raises(ValueError, match=f"{name.lower()}: got '?{value}"):
                create_app()


@pytest.mark.parametrize("words", ["model=llama model.num_layers=1", "model=encoder"])
def test_a_model_that_embeds_no_texts_ends_the_start(words: str) -> None:
    from service.app import Service, Settings

    from pcgsvc.errors import ConfigError

    words += " compiler=eager device=cpu capture.sizes=[16] cache.mode=off"

    async def main() -> None:
        async with Service(Settings(embed=words)).running():
            pass

    with pytest.raises(ConfigError, match=r"gives no sentence vectors|has no tokenizer"):
        asyncio.run(main())


def test_texts_of_concurrent_requests_share_calls_and_one_bad_one_spoils_none() -> None:
    import torch
    from service.front import BusyError, DrainingError, EmbedFront, StepError

    from pcgsvc.errors import BatchError

    calls: list[list[str]] = []

    class Encoder:
        def embed(self, texts: list[str], *, truncate: bool) -> torch.Tensor:
            calls.append(texts)
            if "long" in texts:
                raise BatchError("too long")
            if "broken" in texts:
                raise RuntimeError("lost")
            return torch.tensor([[float(len(text))] for text in texts])

    async def main() -> list[Any]:
        runner: Any = Encoder()
        front = EmbedFront(runner, max_texts=8, max_waiting=4, window_s=0.2)
        asked = (["a", "bb"], ["ccc"], ["long"], ["d"], ["one too many"])
        got: list[Any] = await asyncio.gather(
            *(front.embed(texts, False) for texts in asked), return_exceptions=True
        )
        got.append((await asyncio.gather(front.embed(["broken"], True), return_exceptions=True))[0])
        got.append(await front.embed(["e"], True))
        await front.close()
        got += await asyncio.gather(front.embed(["f"], True), return_exceptions=True)
        return got

    *answers, late = asyncio.run(main())
    assert answers[:2] == [[[1.0], [2.0]], [[3.0]]]
    assert answers[3] == [[1.0]]
    kinds = [type(answer) for answer in (answers[2], answers[4], answers[5], late)]
    assert kinds == [BatchError, BusyError, StepError, DrainingError]
    assert answers[6] == [[1.0]]
    assert calls[0] == ["a", "bb", "ccc", "long", "d"]


@pytest.mark.parametrize("then", ["others are cancelled", "a step raises", "nothing runs"])
def test_what_a_step_gave_is_handed_out_whatever_follows(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    from generate_helpers import load as load_runner
    from service.front import GenerateFront, Job, StepError

    import pcgsvc

    real, jobs, steps = pcgsvc.Slots.step, list[Job](), 0

    def step(self: Any, meanwhile: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3 and then == "a step raises":
            raise RuntimeError("lost")
        return real(self, meanwhile)

    async def read(job: Job) -> Any:
        got: list[int] = []
        try:
            async for tokens in job:
                got += [token.token for token in tokens]
        except StepError as error:
            return got, str(error)
        return got

    async def main(runner: pcgsvc.Runner) -> list[Any]:
        def after_step(_: float) -> None:
            if steps == 2 and then == "others are cancelled":
                front.cancel(jobs[1])

        front = GenerateFront(runner, slots=2, max_waiting=2, window_s=0.1, on_step=after_step)
        news = (2, 2 if then == "nothing runs" else 4)
        jobs.extend(front.submit([9], new, front.sampling) for new in news)
        try:
            whole = jobs[:1] if then == "others are cancelled" else jobs
            return await asyncio.wait_for(asyncio.gather(*map(read, whole)), 60)
        finally:
            await front.close()

    monkeypatch.setattr(pcgsvc.Slots, "step", step)
    with load_runner() as runner:
        got = asyncio.run(main(runner))
    two = wanted([[9]], 2)[0]
    failed = (two, "RuntimeError: lost")
    assert (
        got
        == {
            "others are cancelled": [two],
            "a step raises": [two, failed],
            "nothing runs": [two, two],
        }[then]
    )


@pytest.mark.parametrize("then", ["it is cancelled", "it raises"])
def test_a_request_is_answered_or_freed_whatever_comes_while_it_is_started(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    from generate_helpers import load as load_runner
    from service.front import GenerateFront, Job, StepError

    import pcgsvc

    real = pcgsvc.Slots.start

    async def read(job: Job) -> list[int]:
        return [token.token async for tokens in job for token in tokens]

    async def main(runner: pcgsvc.Runner) -> list[Any]:
        front = GenerateFront(
            runner, slots=2, max_waiting=2, window_s=0.1, on_step=lambda seconds: None
        )
        jobs: list[Job] = []

        def start(self: Any, continuation: Any) -> bool:
            started = real(self, continuation)
            if continuation is jobs[1].continuation:
                if then == "it raises":
                    raise RuntimeError("lost")
                front.cancel(jobs[1])
            return started

        monkeypatch.setattr(pcgsvc.Slots, "start", start)
        jobs.extend(front.submit([9], 4, front.sampling) for _ in range(2))
        read_by = jobs[:1] if then == "it is cancelled" else jobs
        try:
            work = asyncio.gather(*map(read, read_by), return_exceptions=True)
            return [*await asyncio.wait_for(work, 60), jobs[1].continuation.finished]
        finally:
            await front.close()

    with load_runner() as runner:
        *got, finished = asyncio.run(main(runner))
        assert runner.blocks is not None
        assert runner.blocks.num_free == runner.blocks.num_blocks
    assert finished == "cancelled"
    if then == "it is cancelled":
        assert got == [wanted([[9]], 4)[0]]
    else:
        assert [(type(one), str(one)) for one in got] == [(StepError, "RuntimeError: lost")] * 2


def test_texts_of_a_client_that_left_are_not_embedded_and_hold_no_place() -> None:
    import torch
    from service.front import EmbedFront

    calls: list[list[str]] = []
    begun, may_end = threading.Event(), threading.Event()

    class Encoder:
        def embed(self, texts: list[str], *, truncate: bool) -> torch.Tensor:
            calls.append(texts)
            begun.set()
            may_end.wait(60)
            return torch.zeros(len(texts), 1)

    async def main() -> None:
        runner: Any = Encoder()
        front = EmbedFront(runner, max_texts=8, max_waiting=1, window_s=0)
        first = asyncio.ensure_future(front.embed(["a"], True))
        await asyncio.to_thread(begun.wait, 60)
        gone = asyncio.ensure_future(front.embed(["b"], True))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        last = asyncio.ensure_future(front.embed(["c"], True))  # its place is free
        await asyncio.sleep(0)
        may_end.set()
        try:
            await asyncio.gather(first, last)
        finally:
            await front.close()

    asyncio.run(main())
    assert calls == [["a"], ["c"]]


def test_tokens_that_wait_together_come_at_once_and_what_ends_them_after_them() -> None:
    from service.front import Job, StepError

    import pcgsvc

    continuation: Any = object()
    one, two, three = (pcgsvc.NewToken(continuation, at, str(at)) for at in range(3))

    async def read(job: Job, got: list[Any]) -> None:
        try:
            async for tokens in job:
                got.append(tokens)
        except StepError as error:
            got.append(error)

    async def main() -> list[list[Any]]:
        answers: list[list[Any]] = []
        for end in (None, StepError("lost")):
            got: list[Any] = []
            job = Job(continuation)
            reading = asyncio.ensure_future(read(job, got))
            job.put(one)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for event in (two, three, end):
                job.put(event)
            await asyncio.wait_for(reading, 10)
            answers.append(got)
        return answers

    ended, failed = asyncio.run(main())
    assert ended == [[one], [two, three]]
    assert failed[:2] == ended
    assert isinstance(failed[2], StepError)


def test_a_client_reads_events_cut_anywhere_and_goes_on_after_its_connection_broke() -> None:
    from service.load import Connection, generate

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = (b'data: {"token": 5, "te', b'xt": "a"}\n\ndata: {"token": 6, "text": "b"}\n\n',
             b'data: {"text": "ab", "finished": "length"}\n\n')  # fmt: skip
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    busy = b"HTTP/1.1 429 Busy\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlater"
    answers = [head + chunks + b"0\r\n\r\n", head + chunks, busy, head + chunks + b"0\r\n\r\n"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answers:
            got = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(got.lower().split(b"content-length: ")[1].split()[0]))
            writer.write(answers.pop(0))
            if len(answers) in (1, 2):
                break
        writer.close()

    async def main() -> list[Any]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with contextlib.closing(Connection(f"http://127.0.0.1:{port}", 30)) as client:
                return [await generate(client, {"prompt": [1]}) for _ in range(4)]

    whole, broken, refused, again = asyncio.run(main())
    for good in (whole, again):
        assert (good.status, good.tokens, good.text) == (200, [5, 6], "ab")
        assert good.finished == "length"
    assert (broken.status, "IncompleteRead" in broken.error) == (0, True)
    assert (refused.status, refused.error) == (429, "later")
    with pytest.raises(ValueError, match="https://there"):
        Connection("https://there")


def test_the_example_uses_public_names_only() -> None:
    for path in (Path(__file__).parents[1] / "examples" / "service").glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("import pcgsvc", "from pcgsvc")):
                allowed = ("import pcgsvc", "from pcgsvc.errors ", "from pcgsvc.metrics ")
                assert line.startswith(allowed), f"{path.name}: {line}"
            assert "runner._" not in line, f"{path.name}: {line}"
