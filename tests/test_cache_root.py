"""Which root is chosen, and which places are refused or only read."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from store_helpers import as_user, shared_folder

from pcgsvc.cache import root as cache_root
from pcgsvc.cache.root import check_safe, find_root, network_file_system, open_data_folder
from pcgsvc.cache.store import Store
from pcgsvc.config import CacheMode
from pcgsvc.errors import CacheError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package folder of a checkout."""
    folder = tmp_path / "checkout" / "pcgsvc"
    folder.mkdir(parents=True)
    (folder.parent / "pyproject.toml").write_text("")
    return folder


# ---- which root ----------------------------------------------------------------------------------


def test_each_root_gives_way_to_the_one_before_it(package: Path, tmp_path: Path) -> None:
    environ = {
        "PCGSVC_CACHE_DIR": str(tmp_path / "env"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
        "HOME": str(tmp_path),
    }
    chosen = [find_root(str(tmp_path / "explicit"), environ=environ, package=package)]
    chosen.append(find_root(None, environ=environ, package=package))
    del environ["PCGSVC_CACHE_DIR"]
    chosen.append(find_root(None, environ=environ, package=package))
    (package.parent / "pyproject.toml").unlink()
    chosen.append(find_root(None, environ=environ, package=package))
    del environ["XDG_CACHE_HOME"]
    chosen.append(find_root(None, environ=environ, package=package))
    del environ["HOME"]
    chosen.append(find_root(None, environ=environ, package=package))
    assert [root for root, _ in chosen[:5]] == [
        tmp_path / "explicit",
        tmp_path / "env",
        package.parent / "cache",
        tmp_path / "xdg" / "pcgsvc",
        tmp_path / ".cache" / "pcgsvc",
    ]
    assert chosen[5][0].name == f"pcgsvc-{os.geteuid()}"
    assert [source for _, source in chosen] == [
        "cache.dir",
        "PCGSVC_CACHE_DIR",
        "checkout",
        "XDG_CACHE_HOME",
        "user's cache directory",
        "temporary directory",
    ]


def test_this_checkout_s_cache_is_its_default_root() -> None:
    checkout = Path(cache_root.__file__).parents[2]
    if not os.access(checkout, os.W_OK):
        pytest.skip("the checkout is not ours to write")
    assert find_root(environ={}) == (checkout / "cache", "checkout")


def test_empty_settings_and_a_relative_xdg_cache_home_count_as_unset(tmp_path: Path) -> None:
    environ = {"PCGSVC_CACHE_DIR": "", "XDG_CACHE_HOME": "relative", "HOME": str(tmp_path)}
    root, _ = find_root("", environ=environ, package=tmp_path)
    assert root == tmp_path / ".cache" / "pcgsvc"


def test_a_relative_root_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert find_root("some/where")[0] == tmp_path / "some" / "where"
    assert find_root("~/where")[0] == tmp_path / "home" / "where"


@needs_root
def test_a_uid_without_account_and_home_caches_in_a_temporary_folder_of_its_own() -> None:
    def work(home: dict[str, str]) -> str:
        os.environ.clear()
        os.environ.update(home, TMPDIR=str(folder))
        tempfile.tempdir = None
        with Store.open() as store:
            assert store.put_piece("a" * 64, b"x", facts={})
            assert store.folder is not None
            return f"{store.folder.root} {store.folder.source}"

    with shared_folder() as folder:
        folder.chmod(0o1777)
        expected = f"{folder}/pcgsvc-54321 temporary directory"
        for home in ({}, {"HOME": "/nonexistent"}, {"HOME": "/"}, {"HOME": "/root"}):
            assert as_user(54321, partial(work, home)) == expected
        data = folder / "pcgsvc-54321" / "store"
        assert (data.stat().st_uid, stat.S_IMODE(data.stat().st_mode)) == (54321, 0o700)
        assert stat.S_IMODE(data.parent.stat().st_mode) == 0o700


# ---- what is refused -----------------------------------------------------------------------------


def open_root(root: Path, source: str = "cache.dir") -> cache_root.DataFolder:
    return open_data_folder(root, source, write=True)


def test_the_data_folder_is_made_0700_whatever_the_umask_and_the_root_s_mode(
    tmp_path: Path,
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o775)  # as a clone under umask 002 makes it
    previous = os.umask(0)
    try:
        folder = open_root(root)
    finally:
        os.umask(previous)
    assert folder.writable
    assert stat.S_IMODE(folder.data.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
def test_a_data_folder_that_others_may_write_to_is_refused_with_the_fix(
    tmp_path: Path, mode: int
) -> None:
    data = tmp_path / "store"
    data.mkdir()
    data.chmod(mode)
    for store_mode in (CacheMode.READWRITE, CacheMode.READ, CacheMode.REFRESH):
        with pytest.raises(CacheError, match=f"{mode:04o}.*chmod -R go-w {data}"):
            Store.open(str(tmp_path), mode=store_mode)
    Store.open(str(tmp_path), mode=CacheMode.OFF).close()
    data.chmod(0o755)
    assert open_root(tmp_path).writable


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_root_that_anybody_may_write_to_is_refused_unless_it_is_sticky(
    tmp_path: Path, mode: int
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(CacheError, match=f"{mode:04o}.*chmod go-w {root}"):
        open_root(root)
    assert not any(root.iterdir())
    root.chmod(mode | stat.S_ISVTX)
    assert open_root(root).writable


@pytest.mark.parametrize(
    "name", ["entries", "entries/program", "entries/piece", "index", "index/cache.db"]
)
def test_a_store_or_database_that_others_may_write_to_is_refused(tmp_path: Path, name: str) -> None:
    with Store.open(str(tmp_path)) as store:
        store.put_piece("a" * 64, b"x", facts={})
        store.put_program("a" * 64, b"x", pieces=["a" * 64], facts={})
        store.ls()
    (tmp_path / "store" / name).chmod(0o777)
    with pytest.raises(CacheError, match="others may write"):
        Store.open(str(tmp_path))


@needs_root
def test_a_data_folder_of_another_user_is_refused_and_one_of_root_is_not(tmp_path: Path) -> None:
    with Store.open(str(tmp_path)) as store:
        store.put_piece("a" * 64, b"x", facts={})
    check_safe(tmp_path / "store")
    os.chown(tmp_path / "store", 12345, 12345)
    with pytest.raises(CacheError, match="belongs to uid 12345"):
        Store.open(str(tmp_path))


@needs_root
@pytest.mark.parametrize("name", ["root", "root/store"])
def test_a_symbolic_link_of_another_user_is_refused_and_one_s_own_is_followed(
    tmp_path: Path, name: str
) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    assert open_root(tmp_path / "root").writable
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(CacheError, match="symbolic link of uid 12345"):
        open_root(tmp_path / "root")


@needs_root
def test_a_temporary_root_that_somebody_else_made_first_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "pcgsvc-0"
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(CacheError, match="belongs to uid 12345"):
        open_root(root, "temporary directory")


@pytest.mark.parametrize("name", ["root", "root/store", "root/store/.."])
def test_a_file_in_the_way_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    if name == "root/store/..":  # a file above the root
        (tmp_path / "root").write_text("")
        root = tmp_path / "root" / "below"
    else:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        root = tmp_path / "root"
    with pytest.raises(CacheError, match=r"no folder|below a file"):
        open_root(root)


def test_a_dollar_that_diskcache_would_expand_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOMEWHERE", "/elsewhere")
    with pytest.raises(CacheError, match=r"expand the \$"):
        open_root(tmp_path / "$SOMEWHERE")
    assert open_root(tmp_path / "$NOT_SET").writable


@pytest.mark.parametrize("name", ["with space", "per%20cent", "ques?tion#mark", "ünïcode", "a'b"])
def test_odd_characters_in_the_path_are_fine(tmp_path: Path, name: str) -> None:
    with Store.open(str(tmp_path / name)) as store:
        assert store.put_program("a" * 64, b"x" * 5000, pieces=[], facts={})
        assert store.get_program("a" * 64).hit
        assert len(store.ls()) == 1
    assert (tmp_path / name / "store" / "index" / "cache.db").exists()


# ---- network file systems ------------------------------------------------------------------------

MOUNTS = r"""
22 1 254:0 / / rw - ext4 /dev/vda rw
23 22 0:40 / /home rw - nfs4 server:/home rw,vers=4.2
24 23 0:41 / /home/local rw - xfs /dev/sdb rw
25 22 0:42 / /mnt/with\040space rw - cifs //server/share rw
26 22 0:43 / /mnt/s rw - fuse.sshfs me@server: rw
27 22 0:44 / /mnt/overlay rw - fuse.fuse-overlayfs overlay rw
28 22 0:45 / /mnt/9 rw - 9p share rw,trans=virtio
29 22 0:46 / /mnt/9net rw - 9p 10.0.0.1 rw,trans=tcp,port=564
30 22 0:47 / /mnt/lustre rw shared:3 - lustre a@tcp:/fs rw
31 22 0:48 / /mnt/twice rw - nfs server:/x rw
32 31 0:49 / /mnt/twice rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/cache", None),
        ("/home/me/.cache/pcgsvc", "nfs4"),
        ("/home", "nfs4"),
        ("/homes", None),
        ("/home/local/me", None),
        ("/mnt/with space/x", "cifs"),
        ("/mnt/s/x", "fuse.sshfs"),
        ("/mnt/overlay/x", None),
        ("/mnt/9/x", None),
        ("/mnt/9net/x", "9p"),
        ("/mnt/lustre/x", "lustre"),
        ("/mnt/twice/x", None),
    ],
)
def test_network_file_systems_are_told_from_local_ones(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind


def test_a_path_is_judged_where_its_links_lead(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/somebody")
    assert network_file_system(tmp_path / "link" / "x", MOUNTS) == "nfs4"


def test_on_a_network_file_system_hits_are_served_and_nothing_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(str(tmp_path)) as store:
        store.put_piece("a" * 64, b"x", facts={})
        store.put_program("a" * 64, b"x", pieces=["a" * 64], facts={})
        store.ls()
    monkeypatch.setattr(cache_root, "network_file_system", lambda _: "nfs4")
    with (
        Store.open(str(tmp_path)) as store,
        closing(sqlite3.connect(tmp_path / "store" / "index" / "cache.db")) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")  # SQLite is not used: its locks would mean nothing there
        assert len(store.ls()) == 1
        assert store.get_piece("a" * 64).value == b"x"
        assert not store.put_piece("b" * 64, b"x", facts={})
        assert "network file system (nfs4)" in store.why_not_writable()
    with Store.open(str(tmp_path / "new")) as store:
        assert store.get_piece("a" * 64).miss == "absent"
    assert not (tmp_path / "new").exists()
    assert "network file system (nfs4)" in caplog.text


def test_a_root_that_cannot_be_made_is_no_error_but_caches_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Store.open("/proc/nowhere/cache") as store:
        assert store.get_piece("a" * 64).miss == "absent"
        assert not store.put_piece("a" * 64, b"x", facts={})
    assert "cannot be made" in caplog.text
