"""Stores that share a remote: what is fetched, what is published, and what is never loaded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from remote_helpers import SECRET, make_remote, memory_url, objects, overwrite
from store_helpers import PIECES, PROGRAMS, fill, key, misses, open_store

from pcgsvc.cache import sharing
from pcgsvc.cache.envelope import Built, Kind
from pcgsvc.cache.remote import Remote, RemoteError
from pcgsvc.config import CacheMode

A = key("a")
PIECE = next(iter(PIECES))
PROGRAM = next(iter(PROGRAMS))


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote" if request.param == "file" else memory_url()


@pytest.fixture
def filled(url: str, tmp_path: Path) -> str:
    """A remote to which one store has published."""
    with open_store(tmp_path / "first", remote=make_remote(url)) as store:
        fill(store)
    return url


def section(store: Any) -> dict[str, Any]:
    assert store.sharing is not None
    return dict(store.sharing.section())


# ---- there and back ------------------------------------------------------------------------------


def test_what_one_store_builds_another_one_loads_and_keeps(filled: str, tmp_path: Path) -> None:
    names = {*(f"pieces/{name}" for name in PIECES), *(f"programs/{name}" for name in PROGRAMS)}
    assert {n for n in objects(filled) if not n.startswith("versions/")} == names
    with open_store(tmp_path / "second", remote=make_remote(filled)) as store:
        assert store.get_program(PROGRAM).hit  # with its pieces
        assert section(store)["hits"] == 4
        assert misses(store) == []
        assert (section(store)["hits"], section(store)["published"]) == (6, 0)
    with open_store(tmp_path / "second") as store:
        assert misses(store) == []


def test_what_neither_side_has_is_a_miss_that_names_both(url: str, tmp_path: Path) -> None:
    with open_store(tmp_path / "root", remote=make_remote(url)) as store:
        assert store.get_piece(A).miss == "absent; on the remote: absent"
        assert (section(store)["misses"], section(store)["problems"]) == (1, [])


def test_a_damaged_local_entry_is_replaced_by_the_remote_s(filled: str, tmp_path: Path) -> None:
    from store_helpers import flip_payload, value_file

    flip_payload(value_file(tmp_path / "first", PIECE))
    with open_store(tmp_path / "first", remote=make_remote(filled)) as store:
        assert store.get_piece(PIECE).value == PIECES[PIECE]


def test_a_program_is_published_after_pieces_that_were_stored_before_there_was_a_remote(
    url: str, tmp_path: Path
) -> None:
    manifest, pieces = PROGRAMS[PROGRAM]
    with open_store(tmp_path / "first") as store:
        fill(store)
    with open_store(tmp_path / "first", remote=make_remote(url)) as store:
        store.put_program(PROGRAM, manifest, pieces=pieces, facts={})
    assert {f"pieces/{name}" for name in pieces} <= objects(url).keys()


# ---- modes ---------------------------------------------------------------------------------------


def test_mode_read_serves_the_remote_s_entries_and_writes_nothing_anywhere(
    filled: str, tmp_path: Path
) -> None:
    before = objects(filled)
    with open_store(tmp_path / "second", CacheMode.READ, remote=make_remote(filled)) as store:
        assert misses(store) == []
        assert not store.put_piece(A, b"x", facts={})
        with store.lock(A) as held:
            assert held
    assert objects(filled) == before
    assert not list((tmp_path / "second").rglob("*"))


def test_mode_refresh_loads_nothing_and_publishes_what_it_builds(
    filled: str, tmp_path: Path
) -> None:
    with open_store(tmp_path / "second", CacheMode.REFRESH, remote=make_remote(filled)) as store:
        assert store.get_piece(PIECE).miss == "refresh"
        assert not store.available(Kind.PIECE, key("absent"))
        store.put_piece(PIECE, b"built anew", facts={})
        assert section(store)["hits"] == 0
    with open_store(tmp_path / "third", remote=make_remote(filled)) as store:
        assert store.get_piece(PIECE).value == b"built anew"


# ---- never loaded --------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "tampered": (flipped, "signature does not match"),
    "cut": (lambda data: data[:-100], "signature does not match"),
    "half a head": (lambda data: data[:20], "foreign or incomplete"),
    "empty": (lambda data: b"", "foreign or incomplete"),
    "foreign": (lambda data: b"x" * 100, "foreign or incomplete"),
    "unsigned": (lambda data: data[:8] + bytes(32) + data[40:], "not signed"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_not_signed_as_asked_is_a_miss_with_a_warning(
    filled: str, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, cause = DAMAGE[how]
    overwrite(filled, f"pieces/{PIECE}", damage(objects(filled)[f"pieces/{PIECE}"]))
    with open_store(tmp_path / "second", remote=make_remote(filled)) as store:
        found = store.get_piece(PIECE)
        assert found.value is None
        assert cause in str(found.miss)
        assert PIECE[:12] in str(store.get_program(PROGRAM).miss)  # it needs that piece
        made = store.get_or_build(PIECE, lambda: Built(PIECES[PIECE], {"of": PIECE}))
        assert made.built
        assert store.get_program(PROGRAM).hit  # the remote is mended by what was built
        assert section(store)["refused"] >= 1
        assert [p for p in section(store)["problems"] if cause in p]
    assert [r for r in caplog.records if r.levelno == logging.WARNING and cause in r.getMessage()]


def test_another_key_and_an_object_of_another_name_are_not_loaded(
    filled: str, tmp_path: Path
) -> None:
    other = list(PIECES)[1]
    with open_store(tmp_path / "second", remote=make_remote(filled, b"another key")) as store:
        assert len(misses(store)) == len(PIECES) + len(PROGRAMS)
        assert len(section(store)["problems"]) == 1  # one message
    overwrite(filled, f"pieces/{PIECE}", objects(filled)[f"pieces/{other}"])
    with open_store(tmp_path / "third", remote=make_remote(filled)) as store:
        assert "signature does not match" in str(store.get_piece(PIECE).miss)


def test_without_a_key_damage_is_found_by_its_digest(url: str, tmp_path: Path) -> None:
    with open_store(tmp_path / "first", remote=make_remote(url, None)) as store:
        fill(store)
    overwrite(url, f"pieces/{PIECE}", flipped(objects(url)[f"pieces/{PIECE}"]))
    with open_store(tmp_path / "second", remote=make_remote(url, None)) as store:
        assert "digest mismatch" in str(store.get_piece(PIECE).miss)
        assert store.get_piece(list(PIECES)[1]).hit


def test_an_unsigned_file_that_others_may_write_is_not_loaded_unless_they_are_trusted(
    tmp_path: Path,
) -> None:
    place = tmp_path / "remote"
    with open_store(tmp_path / "first", remote=make_remote(place, None)) as store:
        fill(store)
    (place / "pieces" / PIECE).chmod(0o664)
    with open_store(tmp_path / "second", remote=make_remote(place, None)) as store:
        assert "others may write to" in str(store.get_piece(PIECE).miss)
        assert store.get_piece(list(PIECES)[1]).hit
    place.chmod(0o777)
    with open_store(tmp_path / "third", remote=make_remote(place, None)) as store:
        assert len(misses(store)) == len(PIECES) + len(PROGRAMS)
    with open_store(tmp_path / "third", remote=make_remote(place, None, trusted=True)) as store:
        assert misses(store) == []


# ---- one builder among machines ------------------------------------------------------------------


def test_two_stores_with_one_remote_build_once(url: str, tmp_path: Path) -> None:
    built, made = [], []

    def work(name: str) -> None:
        def build() -> Built:
            time.sleep(0.3)
            built.append(name)
            return Built(name.encode())

        with open_store(tmp_path / name, remote=make_remote(url)) as store:
            made.append(store.get_or_build(A, build).value)

    threads = [threading.Thread(target=work, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert made == [built[0].encode()] * 3
    assert not [name for name in objects(url) if name.startswith("claims/")]


def test_a_claim_that_is_not_rewritten_is_taken_over_and_a_living_one_is_not(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_STALE_S", 0.6)
    monkeypatch.setattr(sharing, "_BEAT_S", 0.05)
    monkeypatch.setattr(sharing, "_LONGEST_SLEEP_S", 0.1)
    make_remote(url).create(f"claims/{A}", b"of a machine that was lost")
    with open_store(tmp_path / "first", remote=make_remote(url)) as store, store.lock(A):
        assert section(store)["waited"] == 1
        with open_store(tmp_path / "second", remote=make_remote(url)) as other:
            started = time.monotonic()
            with other.lock(A, 1.0) as held:
                assert held  # built here as well: nothing is waited for without end
            assert time.monotonic() - started >= 1.0
            assert "built elsewhere" in section(other)["problems"][0]
    assert not [name for name in objects(url) if name.startswith("claims/")]


# ---- a remote that fails -------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a switch that has a method of the remote's file system do something else."""

    def switch(remote: Remote, **methods: Callable[..., Any]) -> None:
        fs, _ = remote._place
        for name, method in methods.items():
            monkeypatch.setattr(fs, name, method)

    return switch


def hang(*args: Any, **settings: Any) -> None:
    time.sleep(20)


def fail(*args: Any, **settings: Any) -> None:
    raise ConnectionError("connection refused")


def test_a_remote_that_is_down_costs_one_call_and_one_warning(
    filled: str, tmp_path: Path, broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    remote = make_remote(filled)
    broken(remote, cat_ranges=fail)
    with open_store(tmp_path / "second", remote=remote) as store:
        assert "connection refused" in str(store.get_piece(PIECE).miss)
        fill(store)
        assert misses(store) == []
        assert section(store)["problems"] == [
            "ConnectionError: connection refused; it is left alone in this build"
        ]
        assert section(store)["unpublished"] == len(PIECES) + len(PROGRAMS)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_a_slow_download_is_waited_for_once_and_no_longer_than_asked(
    filled: str, tmp_path: Path, broken: Any
) -> None:
    remote = make_remote(filled, timeout_s=0.3)
    broken(remote, cat_ranges=hang)
    with open_store(tmp_path / "second", remote=remote) as store:
        started = time.monotonic()
        assert len(misses(store)) == len(PIECES) + len(PROGRAMS)
        assert 0.3 <= time.monotonic() - started < 10
        assert "did not answer within 0.3 s" in section(store)["problems"][0]


def test_a_slow_upload_holds_nothing_up_and_is_given_up_at_the_end(
    url: str, tmp_path: Path, broken: Any
) -> None:
    remote = make_remote(url, timeout_s=0.5)
    broken(remote, pipe_file=hang)
    started = time.monotonic()
    with open_store(tmp_path / "first", remote=remote) as store:
        fill(store)
        assert time.monotonic() - started < 10
        assert section(store)["unpublished"] == len(PIECES) + len(PROGRAMS)
        assert misses(store) == []
    assert time.monotonic() - started < 15
    assert len(section(store)["problems"]) == 1


@pytest.mark.parametrize("error", [PermissionError("read only"), OSError(28, "no space left")])
def test_a_remote_that_takes_nothing_is_still_read(
    filled: str, tmp_path: Path, broken: Any, error: OSError
) -> None:
    remote = make_remote(filled)
    read = remote._place[0].open

    def refuse(path: str, mode: Any = "rb", *args: Any, **settings: Any) -> Any:
        if mode != "rb":
            raise error
        return read(path, mode, *args, **settings)

    broken(remote, pipe_file=refuse, open=refuse)
    with open_store(tmp_path / "second", remote=remote) as store:
        made = store.get_or_build(A, lambda: Built(b"made here"))
        assert (made.stored, made.value) == (True, b"made here")
        assert misses(store) == []
        assert len(section(store)["problems"]) == 1
        assert "nothing more is published" in section(store)["problems"][0]


def test_an_upload_that_breaks_off_leaves_a_miss_and_no_wrong_entry(
    url: str, tmp_path: Path, broken: Any
) -> None:
    remote = make_remote(url)
    whole = remote._place[0].pipe_file

    def half(path: str, data: bytes, **settings: Any) -> None:
        whole(path, data[: len(data) // 2])
        raise ConnectionError("the server went away")

    broken(remote, pipe_file=half)
    with open_store(tmp_path / "first", remote=remote) as store:
        fill(store)
    with open_store(tmp_path / "second", remote=make_remote(url)) as store:
        assert len(misses(store)) == len(PIECES) + len(PROGRAMS)
        fill(store)
    with open_store(tmp_path / "third", remote=make_remote(url)) as store:
        assert misses(store) == []


def test_every_call_of_a_remote_names_its_failure(url: str, broken: Any) -> None:
    remote = make_remote(url)
    broken(remote, info=fail, find=fail, cat_file=fail, rm_file=fail)
    for call in (
        lambda: remote.size_of(Kind.PIECE, A),
        remote.sizes,
        remote.versions,
        lambda: remote.read("claims/x"),
        lambda: remote.remove("claims/x"),
    ):
        with pytest.raises(RemoteError, match="connection refused"):
            call()  # type: ignore[no-untyped-call]


def test_nothing_of_an_object_is_read_before_its_signature_was_compared(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*args: Any) -> None:
        raise AssertionError("an envelope was parsed")

    monkeypatch.setattr("pcgsvc.cache.remote.decode", parse)
    overwrite(filled, f"pieces/{PIECE}", flipped(objects(filled)[f"pieces/{PIECE}"]))
    remote = make_remote(filled, SECRET)
    assert "signature" in str(remote.get(Kind.PIECE, [PIECE])[0])
    with pytest.raises(AssertionError, match="parsed"):
        remote.get(Kind.PIECE, [list(PIECES)[1]])
