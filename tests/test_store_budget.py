"""What goes when there is too much, and what a whole store looks like."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from store_helpers import (
    PIECES,
    PROGRAMS,
    entry_files,
    fill,
    flip_payload,
    key,
    misses,
    open_store,
    stored_files,
    value_file,
)

from pcgsvc.cache.entries import Entries
from pcgsvc.cache.envelope import Entry, Kind
from pcgsvc.config import CacheMode

A, B, C, P, Q = (key(name) for name in "abcpq")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


# ---- budget --------------------------------------------------------------------------------------


def put_programs(root: Path, names: str, **settings: Any) -> None:
    """Store programs of one private piece each, and a piece that all share; the first is oldest."""
    for age, name in enumerate(reversed(names)):
        with open_store(root, **settings) as store:
            store.put_piece(key("shared"), b"s" * 1000, facts={})
            store.put_piece(key(f"piece {name}"), name.encode() * 10000, facts={})
            pieces = [key("shared"), key(f"piece {name}")]
            assert store.put_program(key(name), name.encode(), pieces=pieces, facts={"n": name})
        when = time.time() - 1000 * (age + 1)
        os.utime(value_file(root, key(name)), (when, when))


def programs(root: Path) -> set[str]:
    with open_store(root, CacheMode.READ) as store:
        return {info.facts["n"] for info in store.ls()}


def test_the_least_recently_used_program_goes_first_and_takes_its_own_pieces_along(
    root: Path,
) -> None:
    put_programs(root, "abcd")
    with open_store(root) as store:
        assert store.get_program(key("a")).hit  # a, the oldest, is used again
    put_programs(root, "e", max_bytes=45_000)
    assert programs(root) == {"a", "c", "d", "e"}
    with open_store(root) as store:
        assert store.get_piece(key("shared")).hit
        assert store.get_piece(key("piece b")).miss == "absent"
        report = store.check()
        assert (report.ok, report.orphans, report.strays) == (True, [], [])
        assert report.num_bytes <= 45_000
        assert len(entry_files(root)) == report.num_programs * 2 + 1


def test_a_program_in_use_by_another_process_is_never_dropped(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_programs(root, "ab")
    with open_store(root, CacheMode.READ) as user:
        assert user.get_program(key("a")).hit
        put_programs(root, "c", max_bytes=12_000)
        assert programs(root) == {"a", "c"}
        assert "in use" in caplog.text
        assert user.get_piece(key("piece a")).hit
    put_programs(root, "d", max_bytes=12_000)
    assert programs(root) == {"d"}


def test_pieces_of_a_build_in_progress_are_not_dropped_and_those_of_a_dead_one_are(
    root: Path,
) -> None:
    with open_store(root) as dead:
        dead.put_piece(A, b"a" * 20_000, facts={})
    with open_store(root) as builder:
        builder.put_piece(B, b"b" * 20_000, facts={})
        with open_store(root, max_bytes=5_000) as store:
            store.put_piece(C, b"c", facts={})
            assert store.get_piece(A).miss == "absent"
        assert builder.put_program(P, b"{}", pieces=[B], facts={})
        assert builder.get_piece(B).hit


def test_a_piece_that_a_remaining_program_lists_stays(root: Path) -> None:
    put_programs(root, "ab")
    with open_store(root, max_bytes=25_000) as store:
        store.put_piece(C, b"c" * 10_000, facts={})
        assert store.put_program(key("c"), b"c", pieces=[C], facts={"n": "c"})
        assert store.get_program(key("a")).miss == "absent"
        assert store.get_piece(key("shared")).hit
        assert store.check().ok


def test_a_program_stored_while_others_are_being_dropped_keeps_its_pieces(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(root) as dead:
        dead.put_piece(A, b"a" * 20_000, facts={})
    claim = Entries.claim

    def late(entries: Entries, kind: Kind, name: str) -> Any:
        if (kind, name) == (Kind.PIECE, A):
            with open_store(root) as other:  # after the pass began, and done before the claim
                assert other.get_piece(A).hit
                assert other.put_program(P, b"{}", pieces=[A], facts={})
        return claim(entries, kind, name)

    with open_store(root, max_bytes=21_000) as store:
        monkeypatch.setattr(Entries, "claim", late)
        store.put_piece(C, b"c" * 2000, facts={})
        monkeypatch.undo()
        assert store.get_program(P).hit
        assert store.get_piece(A).hit


def test_what_was_got_is_in_use_even_if_its_file_was_copied_meanwhile(root: Path) -> None:
    put_programs(root, "a")
    with open_store(root) as user:
        assert user.get_program(key("a")).hit
        shutil.copytree(root, root.with_name("copy"))
        shutil.rmtree(root)
        root.with_name("copy").rename(root)  # as restored from a backup: no lock is on it
        assert user.get_program(key("a")).hit
        put_programs(root, "b", max_bytes=1)
        assert programs(root) == {"a", "b"}


def test_a_program_in_use_stays_though_another_process_has_replaced_it(root: Path) -> None:
    put_programs(root, "a")
    with open_store(root) as user:
        assert user.get_program(key("a")).hit
        put_programs(root, "a")
        put_programs(root, "b", max_bytes=1)
        assert programs(root) == {"a", "b"}
        assert user.check().strays == []
    put_programs(root, "b", max_bytes=1)
    assert programs(root) == {"b"}
    with open_store(root) as store:
        assert store.check().strays == []


def test_what_was_cleared_and_stored_again_is_in_use_again_once_it_is_got(root: Path) -> None:
    put_programs(root, "a")
    with open_store(root) as user, open_store(root) as other:
        assert user.get_program(key("a")).hit
        other.clear()
        put_programs(root, "a")
        assert user.get_program(key("a")).hit
        put_programs(root, "b", max_bytes=1)
        assert programs(root) == {"a", "b"}


def test_what_is_not_there_leaves_nothing_behind_when_it_is_looked_for(root: Path) -> None:
    with open_store(root) as store:
        store.get_piece(B)
        assert not store.put_program(P, b"{}", pieces=[B], facts={})
        store.put_piece(A, b"a" * 5000, facts={})
        flip_payload(value_file(root, A))
        assert not store.get_piece(A).hit
        assert stored_files(root) == []


def test_within_its_budget_nothing_is_dropped(root: Path) -> None:
    put_programs(root, "abcdefgh", max_bytes=100_000)
    assert programs(root) == set("abcdefgh")


# ---- reports -------------------------------------------------------------------------------------


def test_ls_gives_size_last_use_and_the_facts(root: Path) -> None:
    with open_store(root) as store:
        store.put_piece(A, b"x" * 2000, facts={})
        store.put_program(P, b"{}", pieces=[A], facts={"torch": "2", "config": {"x": 1, "y": 0}})
        store.put_program(Q, b"{}", pieces=[A], facts={"torch": "2", "config": {"x": 2, "y": 0}})
        old = time.time() - 1000
        os.utime(value_file(root, P), (old, old))
        newest, oldest = store.ls()
        assert (newest.key, oldest.key) == (Q, P)
        assert abs(oldest.last_use - old) < 1
        assert abs(newest.last_use - time.time()) < 60
        assert (oldest.facts["config"]["x"], newest.facts["config"]["x"]) == (1, 2)
        assert newest.num_pieces == 1
        assert newest.num_bytes > 2000


def test_nearest_names_exactly_the_facts_that_differ(root: Path) -> None:
    with open_store(root) as store:
        store.put_program(P, b"{}", pieces=[], facts={"a": 1, "config": {"x": 1, "y": [1, 2]}})
        store.put_program(Q, b"{}", pieces=[], facts={"a": 2, "config": {"x": 2}})
        near = store.nearest({"a": 1, "config": {"x": 1, "y": [1, 3]}, "new": True})
        assert near is not None
        assert near.key == P
        assert [(d.name, d.stored, d.wanted) for d in near.differences] == [
            ("config.y", [1, 2], [1, 3]),
            ("new", "(absent)", True),
        ]
        exact = store.nearest({"a": 2, "config": {"x": 2}})
        assert exact is not None
        assert (exact.key, exact.differences) == (Q, [])


def test_nearest_of_an_empty_store_is_none(root: Path) -> None:
    with open_store(root) as store:
        assert store.nearest({"a": 1}) is None


def test_facts_of_true_and_one_differ(root: Path) -> None:
    with open_store(root) as store:
        store.put_program(P, b"{}", pieces=[], facts={"a": True})
        near = store.nearest({"a": 1})
        assert near is not None
        assert [d.name for d in near.differences] == ["a"]


def test_check_finds_orphans_and_strays_and_fix_deletes_strays(root: Path) -> None:
    with open_store(root) as store:
        fill(store)
        store.put_piece(A, b"x", facts={})
        stray = root / "store" / "entries" / "piece" / "ab" / f".{B}.0123"
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_bytes(b"x")
        report = store.check()
        assert (report.ok, report.orphans, report.strays) == (True, [A], [stray])
        assert (report.num_programs, report.num_pieces) == (len(PROGRAMS), len(PIECES) + 1)
        assert store.check(fix=True).strays == [stray]
        assert not stray.exists()
        assert misses(store) == []


def test_check_finds_a_missing_piece_and_fix_drops_the_program(root: Path) -> None:
    with open_store(root) as store:
        fill(store)
        first = next(iter(PIECES))
        store.drop(Kind.PIECE, first)
        (problem,) = store.check().problems
        assert "pieces missing" in problem.cause
        assert first[:12] in problem.cause
        store.check(fix=True)
        assert store.check().ok


def test_clear_deletes_all_entries_and_the_store_goes_on(root: Path) -> None:
    with open_store(root) as other, open_store(root) as store:
        fill(store)
        assert other.get_piece(next(iter(PIECES))).hit
        assert store.clear() > 8000
        assert not stored_files(root)
        assert set(misses(other)) == {"absent"}
        fill(other)
        assert misses(store) == []
        assert store.check().ok


def test_an_entry_is_put_back_as_it_was_read(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store, open_store(tmp_path / "other") as other:
        store.put_piece(A, b"x", facts={"f": 1})
        entry = store.read(Kind.PIECE, A)
        assert isinstance(entry, Entry)
        assert other.put(entry)
        assert other.read(Kind.PIECE, A) == entry
