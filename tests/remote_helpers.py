"""A remote for stores to share, and what must hold of what comes out of it. Imports no torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import fsspec

from pcgsvc.cache.remote import Remote

SECRET = b"a secret"
FRESH: Any = {"skip_instance_cache": True, "use_listings_cache": False}
_NAMES = itertools.count()


def memory_url() -> str:
    """Return a URL in this process's memory that no other test has."""
    return f"memory://remote-{next(_NAMES)}"


def make_remote(url: str | Path, secret: bytes | None = SECRET, **settings: Any) -> Remote:
    return Remote(str(url), secret=secret, **{"trusted": False, "timeout_s": 60.0, **settings})


def objects(url: str | Path) -> dict[str, bytes]:
    """Return all objects of a remote by name."""
    fs, root = fsspec.core.url_to_fs(str(url), **FRESH)
    found = fs.find(root)
    return {path.removeprefix(root).lstrip("/"): fs.cat_file(path) for path in found}


def overwrite(url: str | Path, name: str, data: bytes) -> None:
    fs, root = fsspec.core.url_to_fs(str(url), **FRESH)
    fs.pipe_file(f"{root}/{name}", data)
