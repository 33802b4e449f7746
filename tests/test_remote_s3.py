"""`cache.remote=s3://…` with moto's server, which is also stopped, mute, and without a bucket."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import request

import pytest
from remote_helpers import make_remote, objects, overwrite
from store_helpers import PIECES, PROGRAMS, fill, key, misses, open_store
from warm_cli_helpers import WARM, Cli

from pcgsvc.cache.envelope import Built
from pcgsvc.config import CacheConfig

pytest.importorskip("s3fs", reason="pip install 'pcgsvc[test-scale]'")
moto_server = pytest.importorskip("moto.server", reason="pip install 'pcgsvc[test-scale]'")

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

URL = "s3://bucket/folder"
PIECE = next(iter(PIECES))
NUM_ENTRIES = len(PIECES) + len(PROGRAMS)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server on loopback with an empty bucket; the variables by which botocore finds it."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("KEY", "a secret")
    made = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    # What a server holds is the process's.
    request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield made
    made.stop()


def test_s3_build_publish_pull_warm_and_mended(cached_cli: Cli, tmp_path: Path) -> None:
    signed = [f"cache.remote={URL}", "cache.remote_key=KEY"]
    first = cached_cli("job=compile", *signed)
    assert (first.code, first.start[0]) == (0, "cold")
    found = first.reports[-1]["cache"]["remote"]
    assert (found["unpublished"], found["problems"]) == (0, [])
    second = cached_cli(*signed, f"cache.dir={tmp_path}/two", "cache.require_warm=true")
    assert (second.code, second.start) == (0, WARM)
    for name, data in objects(URL).items():
        if not name.startswith("versions/"):
            overwrite(URL, name, data[:-1] + bytes([data[-1] ^ 1]))
    third = cached_cli(*signed, f"cache.dir={tmp_path}/three")
    assert (third.code, third.start[0]) == (0, "cold")
    assert third.reports[-1]["cache"]["remote"]["refused"] > 1
    checked = cached_cli("job=cache", "cache.action=check", *signed, f"cache.dir={tmp_path}/three")
    assert checked.code == 0, checked.out


def test_s3_without_a_key_and_with_a_wrong_one(
    cached_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = cached_cli("job=compile", f"cache.remote={URL}")
    assert (refused.code, "without cache.remote_key" in refused.out) == (2, True)
    trusted = cached_cli("job=compile", f"cache.remote={URL}", "cache.remote_trust=true")
    found = trusted.reports[-1]["cache"]["remote"]
    assert (found["published"] > 1, found["problems"]) == (True, [])
    words = [f"cache.remote={URL}", "cache.remote_key=KEY", f"cache.dir={tmp_path}/two"]
    unsigned = cached_cli("job=compile", *words)
    assert (unsigned.code, unsigned.start[0]) == (0, "cold")
    assert ["not signed" in p for p in unsigned.reports[-1]["cache"]["remote"]["problems"]] == [
        True
    ]


def test_a_bucket_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    with open_store(tmp_path / "root", remote=make_remote("s3://missing/folder")) as store:
        assert "bucket does not exist" in str(store.get_piece(PIECE).miss)
        fill(store)
        assert misses(store) == []
        assert store.sharing is not None
        (problem,) = store.sharing.section()["problems"]
        assert "bucket does not exist" in problem


def test_a_build_with_a_bucket_that_is_not_there_goes_on(cached_cli: Cli) -> None:
    words = ["job=compile", "cache.remote=s3://missing", "cache.remote_key=KEY"]
    for mode in ("readwrite", "refresh"):
        done = cached_cli(*words, f"cache.mode={mode}")
        assert (done.code, done.start[0]) == (0, "cold")
        (problem,) = done.reports[-1]["cache"]["remote"]["problems"]
        assert "bucket does not exist" in problem
    assert cached_cli(*words, "job=cache", "cache.action=check").code == 1


class Cut:
    """A way to the server that is cut for good after some bytes were sent on it."""

    def __init__(self, port: int, num_bytes: int) -> None:
        self._port, self._left = port, num_bytes
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1000):
                self._left -= len(data)
                if self._left < 0:
                    self.close()
                target.sendall(data)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_a_server_that_goes_away_in_the_middle_of_an_upload_leaves_what_is_whole(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Cut(server.get_host_and_port()[1], 20_000)) as cut:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{cut.port}")
        with open_store(tmp_path / "first", remote=make_remote(URL)) as store:
            fill(store)
            assert misses(store) == []
            assert store.sharing is not None
            found = store.sharing.section()
        assert 0 < found["published"] < NUM_ENTRIES
        assert found["published"] + found["unpublished"] == NUM_ENTRIES
        assert len(found["problems"]) == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    with open_store(tmp_path / "second", remote=make_remote(URL)) as store:
        assert len(misses(store)) == found["unpublished"]
        assert store.sharing is not None
        assert store.sharing.section()["problems"] == []


def test_a_server_that_does_not_answer_costs_one_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        started = time.monotonic()
        with open_store(tmp_path / "first", remote=make_remote(URL, timeout_s=1.0)) as store:
            assert "did not answer within 1 s" in str(store.get_piece(PIECE).miss)
            fill(store)
            assert misses(store) == []
        assert 1.0 <= time.monotonic() - started < 15


def test_a_remote_hit_of_three_pieces_costs_at_most_a_second_more_than_a_local_one(
    tmp_path: Path,
) -> None:
    from core_helpers import make_config, rows, toy

    import pcgsvc

    # Of the processor, the server's included: what it takes on idle cores, whatever else runs here.
    # Nothing on the way of a hit sleeps, which this would not show.
    def seconds(folder: str, remote: str | None = URL) -> float:
        config = make_config("none", sizes=(1, 2))
        config.cache = CacheConfig(dir=str(tmp_path / folder), remote=remote, remote_key="KEY")
        started = time.process_time()
        with pcgsvc.build_runner(toy(2), rows(2), dynamic_dims={"x": 0}, config=config) as runner:
            found = runner.report["compile"]
        assert (found["start"], found["num_loaded"]) == (("warm", 3) if warm else ("cold", 0))
        return time.process_time() - started

    warm = False
    seconds("first")
    warm = True
    local = min(seconds("first", None) for _ in range(3))
    more = min(seconds(f"other {i}") for i in range(3)) - local
    assert more <= 1.0


def test_s3_keeps_two_machines_from_building_the_same(tmp_path: Path) -> None:
    built, name = [], key("a")

    def work(folder: str) -> None:
        def build() -> Built:
            time.sleep(0.5)
            built.append(folder)
            return Built(b"made once")

        with open_store(tmp_path / folder, remote=make_remote(URL)) as store:
            assert store.get_or_build(name, build).value == b"made once"

    threads = [threading.Thread(target=work, args=(folder,)) for folder in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert [n for n in objects(URL) if n.startswith("claims/")] == []
