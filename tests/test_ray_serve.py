"""`examples/ray_serve` on a local Ray, warm from a remote: answers while replicas die or change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_helpers import EXAMPLES, TINY, free_port, is_right, wait_for

import pcgsvc

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),  # what Ray warns of is its own
    pytest.mark.timeout(900),  # most of it is starting processes
]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of Serve on a Ray of this test, with two logical GPUs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    import ray
    from ray import serve

    port = free_port()
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, address="local")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def replicas() -> set[int]:
    """Return the processes of replicas."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::ServeReplica:pcgsvc:Replica"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


async def ask(url: str, body: dict[str, Any]) -> Any:
    """Send a request, again while its replica is lost, and return the answer."""
    from service.load import Connection, generate

    with contextlib.closing(Connection(url, timeout_s=60)) as client:
        for _ in range(100):
            answer = await generate(client, body)
            if answer.status == 200 and answer.finished == "length":
                return answer
            assert answer.status in (0, 200, 500, 503), answer  # lost on its way, or in its stream
            await asyncio.sleep(0.2)
    raise AssertionError(answer)


async def ask_all(url: str, bodies: list[dict[str, Any]], at: dict[int, Any]) -> list[Any]:
    """Send requests from 16 clients; call what stands in `at` when so many are answered."""
    answers: list[Any] = []
    waiting = iter(bodies)

    async def one() -> None:
        for body in waiting:
            answers.append(await ask(url, body))
            if (act := at.get(len(answers))) is not None:
                threading.Thread(target=act).start()

    await asyncio.gather(*(one() for _ in range(16)))
    return answers


def test_500_requests_are_answered_right_while_a_replica_dies_and_all_are_replaced(
    address: str, root: Path
) -> None:
    from ray import serve
    from ray_serve.app import Replica, Settings

    words = f"{TINY} cache.remote={root / 'remote'}"
    pcgsvc.load_runner([*words.split(), f"cache.dir={root / 'builder'}"]).close()

    def deploy(slots: int) -> None:
        two = Replica.options(num_replicas=2, autoscaling_config=None)
        generate = f"{words} cache.dir={root / 'replicas'}"
        bound = two.bind(Settings(generate=generate, require_warm=1, slots=slots))
        serve.run(bound, name="pcgsvc", route_prefix="/")

    deploy(8)
    first = replicas()
    assert len(first) == 2
    draw = random.Random(0)
    prompts = [[draw.randrange(512) for _ in range(draw.randint(1, 12))] for _ in range(40)]
    bodies = [{"prompt": prompts[at % 40], "max_new_tokens": 6} for at in range(500)]
    updated = threading.Event()

    def update() -> None:
        deploy(4)
        updated.set()

    at = {150: lambda: os.kill(min(first), signal.SIGKILL), 300: update}
    answers = asyncio.run(ask_all(address, bodies, at))
    assert len(answers) == 500
    assert all(is_right(a.body["prompt"], a.tokens) for a in answers)
    assert updated.wait(120)
    wait_for(lambda: len(replicas()) == 2 and not replicas() & first)
    last = asyncio.run(ask_all(address, bodies[:20], {}))
    assert all(is_right(a.body["prompt"], a.tokens) for a in last)


def test_the_shipped_deployment_is_one_that_ray_takes() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema
    from ray_serve.app import Replica, app

    tree = yaml.safe_load((EXAMPLES / "ray_serve" / "serve.yaml").read_text())
    (shipped,) = ServeDeploySchema.model_validate(tree).applications
    assert shipped.import_path == "ray_serve.app:app"
    assert [each.name for each in shipped.deployments] == [Replica.name]
    app(shipped.args)
    with pytest.raises(ValueError, match="neither is set"):
        app({})
