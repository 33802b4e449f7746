"""A whole store against a whole remote: pushed, pulled, checked.

In: a `Store`, a `Remote`. Out: what was copied, and what was not, with its reason. Asks the remote
directly, so that what fails is an error here and no warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from pcgsvc.cache.envelope import Entry, Kind, MissError
from pcgsvc.cache.remote import Remote, RemoteError, version_of
from pcgsvc.cache.store import Store
from pcgsvc.errors import CacheError


@dataclass(slots=True)
class Transfer:
    """What came of one action; of entries, pieces included."""

    num_copied: int = 0
    num_present: int = 0
    """There already, and sound; or only looked at."""
    refused: list[str] = field(default_factory=list)
    """What was left out or is damaged, each with its reason."""


def push(store: Store, remote: Remote) -> Transfer:
    """Write all sound programs of a store, and their pieces, that the remote has not in order.

    Raises:
        CacheError: the store holds no program, or the remote cannot be read or written.
    """
    done, seen, programs = Transfer(), set[str](), store.ls()
    if not programs:
        raise CacheError("cache push: the store holds no program; run job=compile first.")
    with _failures("push", remote):
        for info in programs:
            try:
                program = store.read(Kind.PROGRAM, info.key)
                pieces = [store.read(Kind.PIECE, p) for p in program.pieces if p not in seen]
            except MissError as miss:
                done.refused.append(f"program {info.key[:12]} is not whole here: {miss}")
                continue
            seen |= set(program.pieces)
            for entry in [*pieces, program]:
                (found,) = remote.get(entry.kind, [entry.key])
                if isinstance(found, MissError):
                    remote.put(entry)
                done.num_copied += isinstance(found, MissError)
                done.num_present += isinstance(found, Entry)
            remote.write(f"versions/{version_of(program.facts)}", b"")
    return done


def pull(store: Store, remote: Remote) -> Transfer:
    """Store what the remote has and the store lacks, programs with their pieces.

    Raises:
        CacheError: the remote cannot be read or has no entry, the store cannot be written, or is
            too small.
    """
    done = Transfer()
    with _failures("pull", remote), store.no_eviction():
        sizes = remote.sizes()
        if not sizes:
            raise CacheError(
                f"cache pull: there is no entry at {remote.url}. cache.remote names another place, "
                "or nothing has been published there yet (cache.action=push)."
            )
        num_bytes = sum(sizes.values())
        if num_bytes > store.max_bytes:
            raise CacheError(
                f"cache pull: {remote.url} holds {num_bytes} bytes, cache.max_bytes is "
                f"{store.max_bytes}; raise it."
            )
        for kind, key in sorted(sizes, key=lambda name: name[0] is Kind.PROGRAM):
            if store.has(kind, key):
                done.num_present += 1
                continue
            (found,) = remote.get(kind, [key])
            label = f"{kind.value} {key[:12]}: "
            if isinstance(found, MissError):
                done.refused.append(f"{label}{found}")
            elif not store.put(found, in_use=False, publish=False):
                done.refused.append(f"{label}{store.why_not_stored().removeprefix(label)}")
            else:
                done.num_copied += 1
    return done


def check(remote: Remote) -> Transfer:
    """Read every entry of a remote, and compare signatures, digests and piece lists.

    Raises:
        CacheError: the remote cannot be read.
    """
    done = Transfer()
    with _failures("check", remote):
        sizes = remote.sizes()
        for kind, key in sizes:
            (found,) = remote.get(kind, [key])
            missing = () if isinstance(found, MissError) else found.pieces
            lost = [piece[:12] for piece in missing if (Kind.PIECE, piece) not in sizes]
            if isinstance(found, MissError):
                done.refused.append(f"{kind.value} {key[:12]}: {found}")
            elif lost:
                done.refused.append(f"{kind.value} {key[:12]}: pieces missing: {', '.join(lost)}")
            else:
                done.num_present += 1
    return done


@contextlib.contextmanager
def _failures(action: str, remote: Remote) -> Iterator[None]:
    try:
        yield
    except RemoteError as error:
        raise CacheError(f"cache {action}: {remote.url}: {error}.") from error
