"""Entries in a place that machines share, through fsspec: one object each, signed with a key.

In: a URL, a key, entries. Out: the same entries, or a `MissError` that names its cause. Knows
nothing of when the place is asked, and nothing of what an entry means.

Below the URL, named as in a bundle: `programs/<key>` and `pieces/<key>`. An object is a mark (8
bytes), an HMAC-SHA256 over name and envelope (32 bytes; zeros where there is no key), and the
envelope. Nothing of an envelope is parsed before the HMAC was compared. Beside them are
`claims/<key>` (what is being built, by which machine) and `versions/<name>` (empty: which versions
have stored programs).
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pcgsvc.cache.envelope import (
    NAME,
    AbsentError,
    DamagedError,
    Entry,
    Kind,
    MissError,
    UnavailableError,
    decode,
    encode,
    name_of,
)
from pcgsvc.cache.root import is_ours_alone
from pcgsvc.config import CacheConfig, CacheMode
from pcgsvc.errors import ConfigError, near

MAGIC = b"PCGSHARE"
_NUM_MAC_BYTES = 32
_NUM_HEAD_BYTES = len(MAGIC) + _NUM_MAC_BYTES
_UNSIGNED = bytes(_NUM_MAC_BYTES)
_FILE, _HERE = ("file", "local"), ("file", "local", "memory")
"""Protocols of this machine, which need no key."""

_VERSION = re.compile(r"[\w.-]{1,200}")

T = TypeVar("T")


class RemoteError(Exception):
    """The remote did not do what it was asked; `str()` of it is why."""


class Remote:
    """The objects below one URL. Safe from any thread.

    Every method but `__init__` raises `RemoteError` if the remote fails, or does not answer within
    `timeout_s`.

    Args:
        url: without a password.
        secret: signs what is written, and must have signed what is read; None: neither.
        trusted: whether what others may have written is loaded without a signature.
        timeout_s: how long one call may take.

    Raises:
        ConfigError: no such protocol, or its package is not installed.
    """

    def __init__(self, url: str, *, secret: bytes | None, trusted: bool, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._secret = secret
        _check_protocol(url)
        self._is_file = _protocol(url) in _FILE
        self._is_checked = self._is_file and secret is None and not trusted

    # ---- entries ---------------------------------------------------------------------------------

    def get(self, kind: Kind, keys: Sequence[str]) -> list[Entry | MissError]:
        """Return entries, or for each why it may not be loaded; they travel side by side."""
        names = [name_of(kind, key) for key in keys]
        found = self._bounded(lambda: self._read(names)) if names else []
        return [self._checked(kind, *pair) for pair in zip(keys, found, strict=True)]

    def put(self, entry: Entry) -> None:
        """Write an entry, over whatever is there."""
        name, raw = name_of(entry.kind, entry.key), encode(entry)
        self.write(name, b"".join((MAGIC, self._mac(name, raw), raw)))

    def size_of(self, kind: Kind, key: str) -> int | None:
        """Return the size of an entry's envelope in bytes, unread; None: it is not there."""
        name = name_of(kind, key)
        try:
            found = self._bounded(lambda: self._fs.info(self._path(name)))
        except AbsentError:
            return None
        return int(found["size"]) - _NUM_HEAD_BYTES

    def sizes(self) -> dict[tuple[Kind, str], int]:
        """Return the size of every entry's envelope in bytes, unread."""
        listed = [(kind, *item) for kind in Kind for item in self._listed(f"{kind.value}s").items()]
        return {
            (kind, key): size - _NUM_HEAD_BYTES
            for kind, key, size in listed
            if NAME.fullmatch(name_of(kind, key))
        }

    # ---- other objects ---------------------------------------------------------------------------

    def versions(self) -> list[str]:
        """Return the names below `versions/`, but for those that no `version_of` gives."""
        return sorted(name for name in self._listed("versions") if _VERSION.fullmatch(name))

    def read(self, name: str) -> bytes | None:
        """Return an object as it is; None: it is not there."""
        try:
            return self._bounded(lambda: bytes(self._fs.cat_file(self._path(name))))
        except AbsentError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write an object, over whatever is there."""
        self._bounded(lambda: self._replace(self._path(name), data), absent=False)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless it is there; return whether it was written.

        At once for `file`, and for protocols whose `pipe_file(mode="create")` is; else two machines
        may both be told yes.
        """
        return self._bounded(lambda: self._create(self._path(name), data), absent=False)

    def remove(self, name: str) -> None:
        """Delete an object; a missing one is fine."""
        with contextlib.suppress(AbsentError):
            self._bounded(lambda: self._fs.rm_file(self._path(name)))

    # ---- what is in an object --------------------------------------------------------------------

    def _checked(self, kind: Kind, key: str, data: bytes | Exception) -> Entry | MissError:
        """Return the entry in an object, once its signature was compared."""
        if isinstance(data, MissError):
            return data
        if isinstance(data, FileNotFoundError):
            # In the client's words where more than the object is missing: a bucket, say.
            return AbsentError("absent" if key in str(data) else f"absent: {data}")
        if isinstance(data, Exception):
            raise RemoteError(_words(data)) from data
        mac, raw = data[len(MAGIC) : _NUM_HEAD_BYTES], data[_NUM_HEAD_BYTES:]
        if not data.startswith(MAGIC) or not raw:
            return DamagedError("foreign or incomplete")
        if self._secret is not None and mac == _UNSIGNED:
            return DamagedError("not signed, and cache.remote_key is set")
        if self._secret is not None and not hmac.compare_digest(
            mac, self._mac(name_of(kind, key), raw)
        ):
            return DamagedError("its signature does not match: another key, changed or incomplete")
        try:
            return decode(raw, kind, key)
        except DamagedError as damage:
            return damage

    def _mac(self, name: str, raw: bytes) -> bytes:
        if self._secret is None:
            return _UNSIGNED
        mac = hmac.new(self._secret, f"{name}\n".encode(), "sha256")
        mac.update(raw)
        return mac.digest()

    # ---- calls of fsspec -------------------------------------------------------------------------

    @functools.cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, and the path in it; some protocols connect when this is asked."""
        import fsspec

        # Else instances are shared in a process, and listings are remembered.
        settings = {"skip_instance_cache": True, "use_listings_cache": False}
        fs, path = fsspec.core.url_to_fs(self.url, **settings)
        return fs, path.rstrip("/")

    @property
    def _fs(self) -> Any:
        return self._place[0]

    def _path(self, name: str) -> str:
        return f"{self._place[1]}/{name}"

    def _read(self, names: Sequence[str]) -> list[bytes | Exception]:
        paths = [self._path(name) for name in names]
        found = self._fs.cat_ranges(paths, None, None, on_error="return")
        return [self._distrust(path) or data for path, data in zip(paths, found, strict=True)]

    def _distrust(self, path: str) -> MissError | None:
        """Return why an unsigned file may not be loaded, as in the cache's own folder."""
        for each in (Path(path), *Path(path).parents[:2]) if self._is_checked else ():
            with contextlib.suppress(FileNotFoundError):
                if not is_ours_alone(each.stat()):
                    return UnavailableError(
                        f"others may write to {each}; set cache.remote_key, or cache.remote_trust"
                    )
        return None

    def _replace(self, path: str, data: bytes) -> None:
        if not self._is_file:
            self._fs.pipe_file(path, data)
            return
        temporary = f"{path}.{secrets.token_hex(8)}"  # no other process sees half of it
        self._make_folder(path)
        try:
            self._fs.pipe_file(temporary, data)
            if self._is_checked:
                os.chmod(temporary, 0o644)
            self._fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _create(self, path: str, data: bytes) -> bool:
        try:
            if self._is_file:
                self._make_folder(path)
                with self._fs.open(path, "xb") as file:
                    file.write(data)
            else:
                self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _make_folder(self, path: str) -> None:
        """Make the folder of a file; only this user writes there if that is what is checked."""
        for folder in (Path(path).parents[1], Path(path).parent):
            folder.mkdir(0o755 if self._is_checked else 0o777, parents=True, exist_ok=True)

    def _listed(self, folder: str) -> dict[str, int]:
        """Return the sizes of the objects in a folder, by name in it."""
        # A folder that is not there is empty for `find`; what it raises for is a bucket, say.
        found = self._bounded(lambda: self._fs.find(self._path(folder), detail=True), absent=False)
        return {path.rsplit("/", 1)[-1]: int(info["size"] or 0) for path, info in found.items()}

    def _bounded(self, work: Callable[[], T], *, absent: bool = True) -> T:
        """Return what a call gives within the time; one that hangs is left to itself.

        Raises:
            AbsentError: there is no such object, and `absent`.
        """
        result: list[T] = []
        failure: list[Exception] = []

        def call() -> None:
            try:
                result.append(work())
            except Exception as error:  # noqa: BLE001 - each protocol raises what its client does
                failure.append(error)

        thread = threading.Thread(target=call, name="pcgsvc-remote", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if failure and absent and isinstance(failure[0], FileNotFoundError):
            raise AbsentError("absent") from failure[0]
        if failure:
            raise RemoteError(_words(failure[0])) from failure[0]
        if not result:
            raise RemoteError(f"it did not answer within {self.timeout_s:g} s")
        return result[0]


def open_remote(cache: CacheConfig, environ: Mapping[str, str] = os.environ) -> Remote | None:
    """Return the remote of a config, not yet asked anything; None: it has none.

    Raises:
        ConfigError: it cannot be used as asked.
    """
    if cache.remote is None or cache.mode is CacheMode.OFF:
        return None
    secret = None if cache.remote_key is None else _secret(cache.remote_key, environ)
    if urlsplit(cache.remote).password:
        raise ConfigError(
            "cache.remote: the URL holds a password, which reports and logs would show; give it to "
            "fsspec instead (its configuration, or the protocol's own variables)."
        )
    protocol = _protocol(cache.remote)
    remote = Remote(
        cache.remote, secret=secret, trusted=cache.remote_trust, timeout_s=cache.remote_timeout_s
    )
    if secret is None and not cache.remote_trust and protocol not in _HERE:
        raise ConfigError(
            f"cache.remote: got {cache.remote!r} without cache.remote_key, and loading runs code: "
            "name the environment variable or the file that holds the key with which all who write "
            "there sign, or set cache.remote_trust=true if all of them may run code as you."
        )
    return remote


def _secret(name: str, environ: Mapping[str, str]) -> bytes:
    """Return the key in an environment variable, or else in a file."""
    try:
        value = environ[name].encode() if name in environ else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cache.remote_key: got {name!r}, which is no environment variable, nor a file that "
            f"can be read ({error.strerror})."
        ) from error
    if not value.strip():
        raise ConfigError(f"cache.remote_key: the key in {name!r} is empty; put a secret there.")
    return value.strip()


def _protocol(url: str) -> str:
    return url.split("://", 1)[0] if "://" in url else "file"


def _check_protocol(url: str) -> None:
    """Refuse a URL that fsspec cannot open here."""
    protocol = _protocol(url)
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        known = fsspec.available_protocols()
        raise ConfigError(
            f"cache.remote: got {url!r}; fsspec has no protocol {protocol!r}{near(protocol, known)}"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"cache.remote: got {url!r}, for which a package is missing: {error} (pip install "
            "'pcgsvc[remote]', or 'pcgsvc[s3]' for s3)."
        ) from error


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def version_of(facts: Mapping[str, Any]) -> str:
    """Return the name of the versions that a program's facts hold."""
    words = f"pcgsvc-{facts.get('pcgsvc')}-{facts.get('format')} torch-{facts.get('torch')}"
    return re.sub(r"[^\w.-]", "_", words)
