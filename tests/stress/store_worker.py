"""One process of test_store_processes.py; imports no torch.

Prints `ready`; for each line on stdin does its work and prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pcgsvc.cache import sharing
from pcgsvc.cache.remote import Remote
from pcgsvc.cache.store import Built, Store
from pcgsvc.config import CacheMode


def payload(key: str) -> bytes:
    """Return the right bytes for a key; too many for one write to be atomic by luck."""
    return random.Random(key).randbytes(300_000)


def build_one(store: Store, key: str, log: Path) -> dict[str, Any]:
    """Build or load one key, noting begin and end of a build."""

    def note(word: str) -> None:
        with log.open("a") as file:
            file.write(f"{word} {os.getpid()}\n")

    def build() -> Built:
        note("begin")
        time.sleep(0.03)
        note("end")
        return Built(payload(key), {"key": key})

    made = store.get_or_build(key, build, timeout_s=60)
    return {"built": made.built, "stored": made.stored, "right": made.value == payload(key)}


def open_at_once(store: Store, key: str) -> dict[str, Any]:
    """Write a piece and a program as the very first thing."""
    piece = store.put_piece(key, payload(key), facts={"key": key})
    program = store.put_program(key, b"{}", pieces=[key], facts={"key": key})
    return {"stored": piece and program, "right": store.get_piece(key).value == payload(key)}


def overwrite(store: Store, keys: list[str]) -> dict[str, Any]:
    """Replace entries for ever."""
    while True:
        for key in random.sample(keys, len(keys)):
            assert store.put_piece(key, payload(key)[: random.randrange(1, 9000)], facts={})


def part(key: str) -> Built:
    """Build a smaller piece."""
    return Built(payload(key)[:20_000])


def use_small_budget(root: str, seconds: float) -> dict[str, Any]:
    """Build and load programs that share pieces; what is found must be whole."""
    end, hits = time.monotonic() + seconds, 0
    keys = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(41)]
    while time.monotonic() < end:
        number = random.randrange(24)
        program, pieces = keys[17 + number], [keys[(number * 7 + n) % 17] for n in range(4)]
        with (
            Store.open(root, max_bytes=200_000) as store,
            store.lock(program, 20) as held,
        ):
            assert held
            found = store.get_program(program)
            for piece in found.pieces:
                assert store.get_piece(piece).value == payload(piece)[:20_000]
            hits += found.hit
            if not found.hit:
                assert found.miss == "absent", found.miss
                for piece in pieces:
                    store.get_or_build(piece, partial(part, piece), timeout_s=20)
                assert store.put_program(program, b"{}", pieces=pieces, facts={})
    return {"hits": hits}


def work(root: str, job: str, arguments: list[str]) -> dict[str, Any]:
    """Do one job in a store that is opened for it."""
    if job == "budget":
        return use_small_budget(root, float(arguments[0]))
    mode = CacheMode.REFRESH if job == "overwrite" else CacheMode.READWRITE
    remote = None
    if job == "build" and len(arguments) > 2:
        remote = Remote(arguments[2], secret=b"secret", trusted=False, timeout_s=30)
        sharing._BEAT_S, sharing._STALE_S = 0.3, 3.0
    with Store.open(root, mode=mode, remote=remote) as store:
        if job == "build":
            return build_one(store, arguments[0], Path(arguments[1]))
        if job == "open":
            return open_at_once(store, arguments[0])
        return overwrite(store, arguments)


def main() -> None:
    """Serve the jobs that come on stdin: root, job and its arguments, one job a line."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    print("ready", flush=True)  # noqa: T201 - the parent reads it
    for line in sys.stdin:
        root, job, *arguments = json.loads(line)
        if job == "budget":
            logging.getLogger("pcgsvc").setLevel(logging.ERROR)  # over it while all is in use
        result = work(root, job, arguments) | {"torch": "torch" in sys.modules}
        print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
