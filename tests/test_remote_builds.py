"""Builds that share a remote: variants of a program, wrong programs, and a remote that is down."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from core_helpers import make_config, plain, rows
from read_models import Flexible
from remote_helpers import make_remote, memory_url, objects
from test_heal import Added, spoil, subtract
from torch import nn

import pcgsvc
from pcgsvc.cache import transfer
from pcgsvc.cache.store import Store
from pcgsvc.config import CacheConfig, CacheMode


@pytest.fixture
def url() -> str:
    return memory_url()


def report_of(module: nn.Module, folder: Path, url: str, **cache: Any) -> dict[str, Any]:
    """Build on the machine whose folder that is, compare, and return the report."""
    config = make_config("none", sizes=(2, 4))
    config.cache = CacheConfig(dir=str(folder), remote=url, **cache)
    module.eval()
    with pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))
        return runner.report


def test_instances_that_look_alike_are_found_wherever_they_were_built(
    url: str, tmp_path: Path
) -> None:
    def start(eps: float, machine: str) -> str:
        report = report_of(Flexible(eps=eps), tmp_path / machine, url)
        return str(report["compile"]["start"])

    assert start(1.0, "a") == "cold"
    assert start(2.0, "b") == "cold"
    assert start(2.0, "a") == "warm"  # has 1.0 itself, under the same key
    assert start(3.0, "a") == "cold"
    assert [start(eps, "c") for eps in (1.0, 2.0, 3.0)] == ["warm"] * 3


def test_a_wrong_program_of_the_remote_is_dropped_there_and_mended(
    url: str, tmp_path: Path
) -> None:
    report_of(Added(), tmp_path / "a", memory_url())
    key = spoil(tmp_path / "a", subtract)
    with Store.open(str(tmp_path / "a")) as store:
        transfer.push(store, make_remote(url, None))
    wrong = objects(url)
    report = report_of(Added(), tmp_path / "b", url)
    assert (report["cache"]["healed"], report["compile"]["start"]) == (1, "cold")
    assert objects(url)[f"programs/{key}"] != wrong[f"programs/{key}"]
    again = report_of(Added(), tmp_path / "c", url)
    assert (again["cache"]["healed"], again["compile"]["start"]) == (0, "warm")


def test_a_local_folder_that_is_only_read_starts_warm_from_the_remote(
    url: str, tmp_path: Path
) -> None:
    report_of(Added(), tmp_path / "a", url)
    for _ in range(2):
        report = report_of(Added(), tmp_path / "b", url, mode=CacheMode.READ, require_warm=True)
        assert report["compile"]["start"] == "warm"
        assert report["cache"]["remote"]["hits"] > 1
    assert not list((tmp_path / "b").rglob("*"))


def test_a_remote_that_is_down_changes_nothing_but_the_report(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down(*args: Any, **settings: Any) -> None:
        raise ConnectionError("connection refused")

    for name in ("cat_ranges", "pipe_file", "info", "find"):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, down)
    report = report_of(Added(), tmp_path / "a", url)
    found = report["cache"]["remote"]
    assert (len(found["problems"]), found["published"]) == (1, 0)
    assert found["unpublished"] > 1
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert ["connection refused" in r.getMessage() for r in warnings] == [True]
    monkeypatch.undo()
    assert report_of(Added(), tmp_path / "a", url)["compile"]["start"] == "warm"
    assert objects(url) == {}
