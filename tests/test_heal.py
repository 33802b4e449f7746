"""A stored program that is wrong under valid digests: found, dropped, and built cold once."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended, make_config, plain, rows
from torch import nn
from warm_cli_helpers import Cli

import pcgsvc
from pcgsvc import pipeline, torch_private
from pcgsvc.cache.store import Kind, Store
from pcgsvc.config import CacheConfig, CacheMode, Compiler, Config
from pcgsvc.errors import VerifyError
from pcgsvc.forward.workspace import Workspace
from pcgsvc.program.keys import key_of
from pcgsvc.trace.rows import digest

ADD = "operator.add"


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(self.up(x)) + x


def spoil(root: Path, edit: Callable[[list[Any]], None]) -> str:
    """Change the ops of a stored program and of its pieces, with their digests and keys."""
    with Store.open(str(root)) as store:
        (program,) = store.ls()
        entry = store.read(Kind.PROGRAM, program.key)
        manifest = json.loads(entry.payload)
        (text,) = manifest["variants"]
        pieces = {}
        for key in entry.pieces:
            piece = store.read(Kind.PIECE, key)
            document = json.loads(piece.payload)
            old = digest(document)
            edit(document["rows"])
            new = digest(document)
            facts = {**piece.facts, "piece": new}
            image = json.loads(text)
            image["documents"][new] = image["documents"].pop(old) and document
            text = json.dumps(image).replace(old, new)
            pieces[key_of(facts)] = (json.dumps(document, sort_keys=True).encode(), facts)
        for key, (data, facts) in pieces.items():
            assert store.put_piece(key, data, facts=facts)
        payload = json.dumps({**manifest, "variants": [text]}).encode()
        assert store.put_program(program.key, payload, pieces=sorted(pieces), facts=entry.facts)
    return str(program.key)


def subtract(ops: list[Any]) -> None:
    """Make a subtraction of every addition."""
    for row in ops:
        row[1] = "operator.sub" if row[1] == ADD else row[1]


def unknown_op(ops: list[Any]) -> None:
    """Make what raises of every addition."""
    for row in ops:
        row[1] = "operator.matmul" if row[1] == ADD else row[1]


def in_cache(root: Path, mode: str = "piecewise", **cache: Any) -> Config:
    config = make_config(mode, sizes=(2, 4))
    config.cache = CacheConfig(dir=str(root), **cache)
    return config


def built(module: nn.Module, config: Config) -> pcgsvc.Runner:
    return pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config)


@pytest.mark.parametrize("mode", ["none", "piecewise"])
@pytest.mark.parametrize("edit", [subtract, unknown_op])
def test_a_wrong_stored_program_is_dropped_and_built_cold(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    edit: Callable[[list[Any]], None],
) -> None:
    module, config = Added().eval(), in_cache(tmp_path, mode)
    with built(module, config) as first:
        assert first.report["cache"]["healed"] == 0
    key = spoil(tmp_path, edit)
    caplog.clear()
    with built(module, config) as runner:
        report = runner.report
        for size in (1, 2, 3, 4, 7):
            torch.testing.assert_close(runner(rows(size)), plain(module, rows(size)))
    assert report["cache"]["healed"] == 1
    assert report["compile"]["start"] == "cold"
    (warning,) = [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "healed"]
    for fact in (key[:12], str(tmp_path), "2 rows", "dropped, with the 2 pieces"):
        assert fact in warning
    assert any(key[:12] in reason for reason in report["cache"]["miss_reasons"])
    with built(module, config) as again:
        assert again.report["compile"]["start"] == "warm"
        assert again.report["cache"]["healed"] == 0


@pytest.mark.slow
def test_a_wrong_library_is_not_taken_from_this_process_again(tmp_path: Path) -> None:
    """Torch keeps what it has loaded by the hash of the source, whatever the library computes."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x) * 3.2537  # one region: Inductor takes seconds for each

    module, config = Scaled().eval(), in_cache(tmp_path)
    config.compiler.name = Compiler.INDUCTOR
    built(module, config).close()
    right, wrong = (struct.pack("<f", factor) for factor in (3.2537, 4.2537))
    with Store.open(str(tmp_path)) as store:
        (program,) = store.ls()
        keys = store.read(Kind.PROGRAM, program.key).pieces
        pieces = [(key, store.read(Kind.PIECE, key)) for key in keys]
        assert any(right in piece.payload for _, piece in pieces)
        for key, piece in pieces:
            assert store.put_piece(key, piece.payload.replace(right, wrong), facts=piece.facts)
    torch_private.forget_loaded_code()  # as a new process has not loaded it
    with built(module, config) as runner:
        assert runner.report["cache"]["healed"] == 1
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))


def test_the_memory_of_the_failed_try_is_freed_before_the_cold_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, config = Added().eval(), in_cache(tmp_path)
    built(module, config).close()
    spoil(tmp_path, subtract)
    alive: list[weakref.ref[Workspace]] = []
    make, counts = pipeline.make_program, []

    def counting(*args: Any) -> Any:
        counts.append(sum(memory() is not None for memory in alive))
        return make(*args)

    def remembering(memory: Workspace, *args: Any, **kwargs: Any) -> None:
        alive.append(weakref.ref(memory))
        set_up(memory, *args, **kwargs)

    set_up = Workspace.__init__
    monkeypatch.setattr(Workspace, "__init__", remembering)
    monkeypatch.setattr(pipeline, "make_program", counting)
    with built(module, config) as runner:
        assert runner.report["cache"]["healed"] == 1
    assert len(alive) == 2
    assert counts == [0, 0]


def test_require_warm_names_the_entry_and_leaves_it(tmp_path: Path) -> None:
    module = Added().eval()
    built(module, in_cache(tmp_path)).close()
    key = spoil(tmp_path, subtract)
    for _ in range(2):
        with pytest.raises(VerifyError, match=rf"require_warm.*{key[:12]}.*mode=refresh") as caught:
            built(module, in_cache(tmp_path, require_warm=True))
        assert caught.value.report is not None
        assert caught.value.report["compile"]["start"] == "warm"


def test_mode_read_builds_cold_and_stores_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Added().eval()
    built(module, in_cache(tmp_path)).close()
    spoil(tmp_path, subtract)
    before = {p: p.read_bytes() for p in (tmp_path / "store" / "entries").rglob("*") if p.is_file()}
    for _ in range(2):
        caplog.clear()
        config = in_cache(tmp_path)
        config.cache.mode = CacheMode.READ
        with built(module, config) as runner:
            torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))
            cache, compiled = runner.report["cache"], runner.report["compile"]
        assert (cache["mode"], cache["healed"], compiled["num_compiled"]) == ("read", 1, 2)
        assert "left there, since nothing is written (cache.mode=read)" in caplog.text
    assert before
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_program_of_which_one_row_is_right_is_wrong(tmp_path: Path) -> None:
    """The only capture size is one row, which the module runs itself where they differ."""
    module, config = Added().eval(), in_cache(tmp_path)
    config.capture.sizes = [1]
    built(module, config).close()
    spoil(tmp_path, subtract)
    with built(module, config) as runner:
        assert runner.report["cache"]["healed"] == 1
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))


def test_a_cold_failure_is_an_error(tmp_path: Path) -> None:
    """Nothing heals a model that the self-check refuses whatever is stored."""

    class Mixing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x) + x.mean(0)

    for _ in range(2):
        with pytest.raises(VerifyError, match="mixes rows"):
            built(Mixing().eval(), in_cache(tmp_path))


def test_without_the_self_check_nothing_heals(tmp_path: Path) -> None:
    """What it says of `capture.self_check=false` in the README."""
    module, config = Added().eval(), in_cache(tmp_path)
    built(module, config).close()
    spoil(tmp_path, subtract)
    config.capture.self_check = False
    with built(module, config) as runner:
        assert runner.report["cache"]["healed"] == 0
        assert not torch.equal(runner(rows(3)), plain(module, rows(3)))


@pytest.mark.parametrize("job", ["compile", "run"])
def test_jobs_heal_and_count_it(
    cached_cli: Cli, root: Path, job: str, validate_report: Callable[[Any], None]
) -> None:
    assert cached_cli("job=compile").code == 0
    key = spoil(root, subtract)
    refused = cached_cli(f"job={job}", "cache.require_warm=true")
    assert refused.code == 1
    assert key[:12] in refused.out
    assert [r["compile"]["start"] for r in refused.reports] == ["warm"]
    done = cached_cli(f"job={job}")
    assert (done.code, done.start) == (0, ("cold", 1, 2))
    assert f"the stored program {key[:12]} in" in done.out
    (report,) = done.reports
    assert report["cache"]["healed"] == 1
    if job == "run":
        validate_report(report)
        assert all(row["ok"] for row in report["verify"])
    again = cached_cli(f"job={job}", "cache.require_warm=true")
    assert (again.code, again.start) == (0, ("warm", 0, 0))
    assert again.reports[0]["cache"]["healed"] == 0
