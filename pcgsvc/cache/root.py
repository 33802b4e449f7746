"""Where the cache is, and whether that place is safe.

In: `cache.dir`, the environment, the file system. Out: a `DataFolder`, or a `CacheError` that says
what to change. Knows nothing of entries.

Loading a cache runs code, so the data is in a folder of our own, `<root>/store`, made 0700 and
refused when other users but root could have put something there. It is not the root itself since a
clone makes a checkout's `cache/` group-writable under umask 002. World-writable roots without the
sticky bit are refused: another `store` could be put in its place after it was checked.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pcgsvc.config import CacheConfig, CacheMode
from pcgsvc.errors import CacheError

ENVIRONMENT_NAME = "PCGSVC_CACHE_DIR"
DATA_NAME = "store"
ENTRIES_NAME, INDEX_NAME = "entries", "index"
_CHECKED = ("", "entries", "entries/program", "entries/piece", "index", "index/cache.db")
"""Below the data folder; the file of an entry is checked when it is opened."""
_PACKAGE = Path(__file__).resolve().parents[1]
_ELSEWHERE = f"set cache.dir or {ENVIRONMENT_NAME} to a folder of your own on a local disk"

# Locks may not hold between the hosts that share these.
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|smb2|ncpfs|afs|coda|ceph|lustre|glusterfs|gpfs|beegfs|orangefs|pvfs2"
    r"|gfs2|ocfs2|wekafs|fuse\.(sshfs|glusterfs|ceph|cephfs|ceph-fuse|s3fs|gcsfuse|goofys|rclone"
    r"|juicefs|blobfuse2?|mountpoint-s3|moosefs|mfs|lizardfs|davfs2?|beegfs|jindo.*|alluxio.*|hdfs)"
)


@dataclass(frozen=True, slots=True)
class DataFolder:
    """The place of one store."""

    root: Path
    data: Path
    """`<root>/store`; it exists if `writable`."""
    source: str
    """Who chose the root."""
    writable: bool
    reason: str = ""
    """Why it is not writable."""


# ---- which root ----------------------------------------------------------------------------------


def find_root(
    directory: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    package: Path = _PACKAGE,
) -> tuple[Path, str]:
    """Return the root directory and who chose it.

    The order: `directory`, PCGSVC_CACHE_DIR, the checkout's `cache/`, the user's cache directory,
    a temporary directory per uid. The last three are passed over where they can neither be read nor
    made, as for a uid without account and HOME.

    Args:
        directory: `cache.dir`.
        environ: instead of `os.environ`.
        package: folder of the package; a checkout has pyproject.toml beside it.
    """
    environ = os.environ if environ is None else environ
    for path, source in (
        (directory, "cache.dir"),
        (environ.get(ENVIRONMENT_NAME), ENVIRONMENT_NAME),
    ):
        if path:
            return _absolute(path), source
    for root, source in _implicit_roots(environ, package):
        if _usable(root):
            return root, source
    return Path(tempfile.gettempdir()).absolute() / f"pcgsvc-{os.geteuid()}", "temporary directory"


def _implicit_roots(environ: Mapping[str, str], package: Path) -> Iterator[tuple[Path, str]]:
    if os.path.isfile(package.parent / "pyproject.toml"):
        yield package.parent / "cache", "checkout"
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the specification says to ignore a relative one
        yield xdg / "pcgsvc", "XDG_CACHE_HOME"
    elif Path(environ.get("HOME", "")).is_absolute():
        yield Path(environ["HOME"]) / ".cache" / "pcgsvc", "user's cache directory"


def _absolute(path: str) -> Path:
    # A "~" without an account stays as it is: a folder of that name, rather than no cache at all.
    return Path(os.path.abspath(os.path.expanduser(path)))


def _usable(root: Path) -> bool:
    data = root / DATA_NAME
    if os.path.isdir(data):  # Path.is_dir raises where a folder above is hidden from us
        return _access(data, os.R_OK | os.X_OK)
    return _access(_nearest_existing(data), os.W_OK | os.X_OK)


# ---- is it safe ----------------------------------------------------------------------------------


def check_place(cache: CacheConfig, *, needed: bool) -> None:
    """Check the root of a config before any work, without making it.

    Raises:
        CacheError: it is not safe (see `check_root`), or the cache is off and `needed`.
    """
    if cache.mode is not CacheMode.OFF:
        check_root(*find_root(cache.dir))
    elif needed:
        raise CacheError("cache.mode: got 'off' with job=cache; there is no cache to look at.")


def why_not_writable(cache: CacheConfig) -> str:
    """Return why nothing can be stored in the root of a config, without making it; else ""."""
    data = find_root(cache.dir)[0] / DATA_NAME
    place = _nearest_existing(data)
    is_open = _access(place, os.W_OK | os.X_OK)
    return _network_reason(data) or ("" if is_open else f"{place} is not writable")


def open_data_folder(root: Path, source: str, *, write: bool) -> DataFolder:
    """Check an absolute root's data folder, and make it if it is to be written.

    `source`: who chose the root, for messages.

    Raises:
        CacheError: the place is not safe, or is no folder.
    """
    data = root / DATA_NAME
    check_root(root, source)
    reason = _network_reason(data) or ("" if write else "cache.mode=read") or _make(root, data)
    try:
        for name in _CHECKED:
            check_safe(data / name)
        if source == "temporary directory":
            check_safe(root)  # any user may make folders beside it
    except OSError as error:
        reason = f"{data} cannot be looked at: {error.strerror}"
    if not reason and not _access(data, os.W_OK | os.X_OK):
        reason = f"{data} is not writable"
    return DataFolder(root, data, source, not reason, reason)


def check_root(root: Path, source: str) -> None:
    """Check what a root is, without making it; a missing one is fine.

    Raises:
        CacheError: it is no folder, another user's link, or world-writable without the sticky bit.
    """
    data = root / DATA_NAME
    if os.path.expandvars(str(data)) != str(data):
        words = f"cache root ({source}): {root}: diskcache would expand the $; {_ELSEWHERE}."
        raise CacheError(words)
    for path in (root, data):
        _check_link(path, source)
    try:
        mode = stat.S_IMODE(root.stat().st_mode)
    except OSError:
        return  # missing, or hidden from us: found out where it is made or looked at
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CacheError(
            f"cache root ({source}): {root} has mode {mode:04o}: any user may put another "
            f"{DATA_NAME} in it, and loading one runs code. If only you did so far: chmod go-w "
            f"{root}. Or {_ELSEWHERE}."
        )


def check_safe(path: Path) -> None:
    """Check that only this user and root can have written to `path`; a missing one is fine.

    Raises:
        CacheError: another user owns it, or may write to it.
        OSError: it cannot be looked at.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if is_ours_alone(status):
        return
    if status.st_uid not in (0, os.geteuid()):
        raise CacheError(
            f"cache: {path} belongs to uid {status.st_uid}, not to you (uid {os.geteuid()}) or "
            f"root; loading it would run code of theirs. Remove it, or {_ELSEWHERE}."
        )
    raise CacheError(
        f"cache: {path} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it, "
        f"and loading it runs code. If only you did so far: chmod -R go-w {path}. "
        f"Or {_ELSEWHERE}."
    )


def is_ours_alone(status: os.stat_result) -> bool:
    """Return whether only this user and root can have written to a file or folder."""
    owned = status.st_uid in (0, os.geteuid())
    return owned and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _check_link(path: Path, source: str) -> None:
    fault = ""
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            fault = (
                f"is a symbolic link of uid {status.st_uid}, who can point it anywhere. Remove it,"
            )
        elif not path.is_dir():
            fault = "is no folder. Remove it,"
    except NotADirectoryError:
        fault = "is below a file; move that,"
    except OSError:
        return  # missing, or hidden from us: found out where it is made or looked at
    if fault:
        raise CacheError(f"cache root ({source}): {path} {fault} or {_ELSEWHERE}.")


def _make(root: Path, data: Path) -> str:
    """Make root and data folder; return why that did not work."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for path in (root, data):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{data} cannot be made: {error.strerror}"
    return ""


# ---- the file system -----------------------------------------------------------------------------


def _network_reason(data: Path) -> str:
    if network := network_file_system(data):
        return f"{data} is on a network file system ({network}), where locks are unreliable"
    return ""


def network_file_system(path: Path, mountinfo: str | None = None) -> str | None:
    """Return the type of the network file system that `path` is on, or None if it is on none.

    Args:
        path: need not exist.
        mountinfo: instead of the text of /proc/self/mountinfo.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return None
    place = Path(os.path.realpath(path))
    best, kind = -1, None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, about = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(about) < 1:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        # >=: of two mounts on one point the later one hides the earlier.
        if place.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), _network_type(about)
    return kind


def _network_type(about: list[str]) -> str | None:
    """Judge the part of a mountinfo line after " - ": type, source, options."""
    if about[0] == "9p":
        # Virtual machines and sandboxes share one host's disk by 9p; only these go over a network.
        return "9p" if re.search(r"trans=(tcp|rdma)", about[-1]) else None
    return about[0] if _NETWORK.fullmatch(about[0]) else None


def _nearest_existing(path: Path) -> Path:
    for candidate in (path, *path.parents):
        with contextlib.suppress(OSError):
            if candidate.exists():
                return candidate
    return Path("/")


def _access(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)
