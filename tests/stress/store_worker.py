"""One process of test_store_processes.py; imports no torch.

Prints `ready`, waits for a line on stdin, does its work, prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from pcgsvc.config import CacheMode
from pcgsvc.store import Built, Store


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


def main() -> None:
    """Run the job named on the command line: job, root, keys, further arguments."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    job, root, keys, *rest = sys.argv[1:]
    mode = CacheMode.REFRESH if job == "overwrite" else CacheMode.READWRITE
    print("ready", flush=True)  # noqa: T201 - the parent reads it
    sys.stdin.readline()
    with Store.open(root, mode=mode, timeout_s=60) as store:
        if job == "build":
            result = build_one(store, keys, Path(rest[0]))
        elif job == "open":
            result = open_at_once(store, keys)
        else:
            result = overwrite(store, keys.split(","))
    result["torch"] = "torch" in sys.modules
    print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
