"""Full disks and read-only roots: hits are served, and what is not stored is said once."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from store_helpers import (
    PIECES,
    PROGRAMS,
    as_user,
    fill,
    hot_journal,
    key,
    misses,
    mounted,
    open_store,
    shared_folder,
    stored_files,
)

from pcgsvc.cache.store import Built
from pcgsvc.config import CacheMode

SMALL, PIECE, *_ = PIECES
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, or changes its uid")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine") / "root"
    with open_store(root) as store:
        fill(store)
        assert misses(store) == []
        store.ls()  # makes the index
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "root"))


# ---- full disk -----------------------------------------------------------------------------------


@needs_root
def test_a_full_disk_is_warned_of_once_and_leaves_nothing_half_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "small"
    with (
        mounted(root, "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs"),
        open_store(root) as store,
    ):
        fill(store)
        before = stored_files(root)
        big = key("big")
        for _ in range(3):
            assert not store.put_piece(big, os.urandom(400_000), facts={})
        assert not store.put_program(key("p"), b"{}", pieces=[big], facts={})
        assert store.get_or_build(big, lambda: Built(os.urandom(400_000))).stored is False
        assert store.get_piece(big).miss == "absent"
        assert misses(store) == []
        assert stored_files(root) == before
        assert store.check().ok
        assert not store.check().strays
        assert store.put_piece(big, b"smaller", facts={})
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "no space left on the disk" in warnings[0]


@needs_root
@pytest.mark.parametrize("free", [0, 4, 12, 24, 36, 48])
def test_a_disk_full_from_the_start_serves_uncached_until_there_is_room(
    tmp_path: Path, free: int
) -> None:
    root = tmp_path / "small"
    with mounted(root, "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs"):
        (root / "filler").write_bytes(b"x" * (256 - free) * 1024)
        with open_store(root) as store:
            for name in ("a", "b"):
                assert not store.put_piece(key(name), os.urandom(50_000), facts={})
                assert store.get_piece(key(name)).miss == "absent"
        (root / "filler").unlink()
        with open_store(root) as store:
            assert store.put_piece(key("a"), b"x" * 5000, facts={})
            assert store.check().ok
            assert not store.check().quarantined


def test_no_space_for_a_value_file_leaves_no_part_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = stored_files(root)
    with open_store(root) as store:
        monkeypatch.setattr(os, "fsync", full)
        assert not store.put_piece(PIECE, b"new" * 1000, facts={})
        monkeypatch.undo()
        assert stored_files(root) == before
        assert store.get_piece(PIECE).value == PIECES[PIECE]
    assert "no space left on the disk" in caplog.text


def test_what_cannot_be_read_back_is_not_stored(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.fsync

    def lose_it(fd: int) -> None:
        real(fd)
        os.ftruncate(fd, 10)

    with open_store(root) as store:
        monkeypatch.setattr(os, "fsync", lose_it)
        assert not store.put_piece(key("new"), b"new" * 1000, facts={})
        monkeypatch.undo()
        assert store.get_piece(key("new")).miss == "absent"
    assert "read back after writing" in caplog.text


# ---- read-only roots -----------------------------------------------------------------------------


def expect_read_only(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode in (CacheMode.READWRITE, CacheMode.READ):
        with open_store(root, mode) as store:
            assert misses(store) == []
            assert not store.put_piece(key("new"), b"x", facts={})
            assert store.get_piece(key("new")).miss == "absent"
            assert store.get_or_build(key("new"), lambda: Built(b"x")).value == b"x"
            assert store.check().ok
            assert len(store.ls()) == len(PROGRAMS)
    said = [r.getMessage() for r in caplog.records if "nothing is stored" in r.getMessage()]
    assert len(said) == 1


@needs_root
def test_a_read_only_mount_serves_hits_and_says_once_that_nothing_is_stored(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "mounted"
    with mounted(place, "--bind", "-o", "ro", str(root)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        assert os.statvfs(place).f_flag & os.ST_RDONLY
        expect_read_only(place, caplog)


@needs_root
def test_a_root_owned_by_root_serves_hits_to_another_user_once_it_is_readable(
    pristine: Path,
) -> None:
    """As baked into an image: filled by root, used by any uid."""

    def look() -> str:
        with open_store(place) as store:
            assert not store.writable
            assert not store.put_piece(key("new"), b"x", facts={})
            return f"{len(misses(store))} misses, {store.why_not_writable()}"

    with shared_folder() as folder:
        place = Path(shutil.copytree(pristine, folder / "root"))
        text = as_user(12345, look)
        assert text.startswith("6 misses")
        assert "Permission denied" in text
        subprocess.run(["chmod", "-R", "go+rX", str(place)], check=True)
        assert as_user(12345, look).startswith("0 misses")


@needs_root
def test_a_journal_of_a_killed_writer_does_not_hide_the_entries_of_a_read_only_root(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hot_journal(root)
    place = tmp_path / "mounted"
    with mounted(place, "--bind", "-o", "ro", str(root)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        with open_store(place) as store:
            assert misses(store) == []
