"""Warm starts from a damaged store, under `require_warm`, and beside other instances."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import attended, rows, toy
from store_helpers import all_files, damage_entry, entry_files
from torch import nn
from warm_helpers import Starter

from pcgsvc.cache.store import Kind, Store
from pcgsvc.errors import CacheError


def test_refresh_keeps_the_programs_of_other_instances(start: Starter) -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x * self.by)

    assert not start(Scaled(2.0)).warm
    assert not start(Scaled(3.0)).warm
    assert not start(Scaled(3.0), cache="refresh").warm
    assert start(Scaled(3.0)).warm
    assert start(Scaled(2.0)).warm


def test_require_warm_on_an_empty_store_says_what_to_do(start: Starter) -> None:
    with pytest.raises(CacheError, match="job=compile") as caught:
        start(toy(1), require_warm=True)
    assert "holds no program" in str(caught.value)


def test_require_warm_refuses_arguments_without_a_form(start: Starter) -> None:
    def forward(x: torch.Tensor, mark: Any) -> torch.Tensor:
        return attended(x)

    with pytest.raises(CacheError):
        start(forward, example={"x": rows(2), "mark": object()}, require_warm=True)


# ---- damage --------------------------------------------------------------------------------------


def test_a_damaged_piece_is_a_named_miss_put_aside_and_compiled_again(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    assert not start(toy(2)).warm
    pieces = entry_files(start.root, kind="piece")
    assert len(pieces) == 3
    damage_entry(pieces[0])
    caplog.clear()
    again = start(toy(2))
    assert again.right
    compiled = again.report["compile"]
    assert (compiled["start"], compiled["num_compiled"], compiled["num_loaded"]) == ("cold", 1, 2)
    assert "a miss: " in caplog.text
    assert list((start.root / "store" / "quarantine").iterdir())
    assert start(toy(2)).warm


def test_a_variant_whose_piece_was_lost_does_not_keep_another_from_being_stored(
    start: Starter,
) -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x * self.by)

    assert not start(Scaled(2.0)).warm
    (lost,) = entry_files(start.root, kind="piece")
    lost.unlink()
    assert not start(Scaled(3.0)).warm
    assert start(Scaled(3.0)).warm
    assert not start(Scaled(2.0)).warm
    assert start(Scaled(2.0)).warm
    assert start(Scaled(3.0)).warm


def test_an_entry_of_another_version_of_ours_is_a_miss_and_is_replaced(start: Starter) -> None:
    assert not start(toy(1)).warm
    for manifest in (b"{}", b'{"variants": ["{}"]}', b'{"variants": [3]}', b"\xff", b"[]"):
        with Store.open(str(start.root)) as store:
            (program,) = store.ls()
            entry = store.read(Kind.PROGRAM, program.key)
            assert store.put_program(program.key, manifest, pieces=entry.pieces, facts=entry.facts)
        again = start(toy(1))
        assert again.right
        assert not again.warm
        assert start(toy(1)).warm


def test_a_module_that_cannot_be_imported_any_more_is_a_miss(start: Starter) -> None:
    assert not start(toy(1)).warm
    with Store.open(str(start.root)) as store:
        (program,) = store.ls()
        entry = store.read(Kind.PROGRAM, program.key)
        manifest = json.loads(entry.payload)
        image = json.loads(manifest["variants"][0])
        image["modules"] = ["pcgtest_gone"]
        payload = json.dumps({**manifest, "variants": [json.dumps(image)]}).encode()
        assert store.put_program(program.key, payload, pieces=entry.pieces, facts=entry.facts)
    again = start(toy(1))
    assert again.right
    assert "pcgtest_gone" in again.reasons


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 5))]
)
def test_a_flipped_byte_anywhere_never_gives_a_wrong_result_and_is_mended(
    start: Starter, tmp_path: Path, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    module = toy(2)
    assert not start(module).warm
    good = tmp_path / "good"
    shutil.copytree(start.root, good)
    rng = random.Random(part)
    hit = 0
    for _ in range(10):
        shutil.rmtree(start.root)
        shutil.copytree(good, start.root)
        files = [p for p in all_files(start.root) if p.stat().st_size]
        sizes = [p.stat().st_size for p in files]
        (path,) = rng.choices(files, sizes)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        caplog.clear()
        again = start(module)
        assert again.right
        if not again.warm:
            hit += 1
            assert again.reasons
            assert "cache:" in caplog.text
            assert start(module).warm
    assert hit  # half of the file is entries
