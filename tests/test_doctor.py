"""`job=doctor`: what would not work here, and what a model does that graphs cannot hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Cli, Done
from store_helpers import mounted
from torch.nn.utils import prune

from pcgsvc.config import CacheAction, CacheConfig, CacheMode, Config
from pcgsvc.events import Silent
from pcgsvc.forward.request import request_for
from pcgsvc.jobs import doctor as job
from pcgsvc.jobs.doctor import Finding

SOURCE = """
import torch
from torch import nn

import pcgsvc

if not hasattr(torch.ops.doctored, "lie"):
    LIBRARY = torch.library.Library("doctored", "FRAGMENT")
    LIBRARY.define("lie(Tensor x, Tensor kv) -> Tensor")
    LIBRARY.define("alias(Tensor x) -> Tensor")
    LIBRARY.define("honest(Tensor x, Tensor(a!) kv) -> Tensor")

    def write(x, kv):
        kv.add_(1)
        return x * 2

    LIBRARY.impl("lie", write, "CPU")
    LIBRARY.impl("honest", write, "CPU")
    LIBRARY.impl("alias", lambda x: x[:], "CPU")
    for name in ("lie", "honest"):
        fake = lambda x, kv: torch.empty_like(x)
        torch.library.register_fake(f"doctored::{name}", fake, lib=LIBRARY)
    torch.library.register_fake("doctored::alias", torch.empty_like, lib=LIBRARY)


@pcgsvc.splitting_op("doctored::reads", mutates_args=("out",))
def reads(x: torch.Tensor, out: torch.Tensor) -> None:
    x.sum().item()
    x.tolist()
    torch.rand(1)
    out.copy_(x * 2)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kv", torch.arange(4.0))
        self.calls = 0

    def example_inputs(self, rows, generator):
        return {"x": torch.randn(rows, 4, generator=generator)}


class Good(Base):
    def forward(self, x):
        h = self.linear(x)
        out = torch.empty_like(h)
        torch.ops.doctored.reads(h, out)
        return torch.ops.doctored.honest(out, self.kv)


class Lies(Base):
    def forward(self, x):
        return torch.ops.doctored.alias(torch.ops.doctored.lie(self.linear(x), self.kv))


class Item(Base):
    def forward(self, x):
        h = self.linear(x)
        if h.sum().item() > 0:  # the line
            h = h * 2
        return h + len(h[0].tolist())


class Numbers(Base):
    def forward(self, x):
        return self.linear(x) + torch.tensor([2.0], device=x.device)  # here


class Busy(Base):
    def forward(self, x):
        print("a forward")  # the line
        self.calls += 1
        return self.linear(x) + torch.rand_like(x)


class Raises(Base):
    def forward(self, x):
        raise ValueError("not today")  # the line


class Dies(Base):
    def __init__(self):
        raise KeyError("no file")
"""
LINES = {name: at for at, name in enumerate(SOURCE.splitlines(), 1)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with SOURCE, which is imported once."""
    made = tmp_path_factory.mktemp("models") / "doctored_models.py"
    made.write_text(SOURCE)
    return made


@pytest.fixture
def doctor(cli: Cli, file: Path) -> Callable[..., Done]:
    """Return a call of the job for a class of SOURCE."""

    def call(name: str, *words: str) -> Done:
        target = f"model.target={file}:{name}"
        return cli("job=doctor", "model=module", target, "capture.sizes=[2,4]", *words)

    return call


def rows(done: Done, item: str) -> list[tuple[str, str]]:
    """Return state and text of the rows of one item."""
    (report,) = done.reports
    return [(row["state"], row["found"]) for row in report["doctor"] if row["item"] == item]


@pytest.mark.slow
def test_a_sound_machine_and_model_are_exit_code_0_and_ops_are_tried_or_said_not_to_be(
    doctor: Callable[..., Done], validate_report: Callable[..., None]
) -> None:
    done = doctor("Good", "device=cpu", "mode=piecewise")
    assert done.code == 0, done.err
    (report,) = done.reports
    validate_report(report)
    items = [row["item"] for row in report["doctor"]]
    assert items[:7] == ["torch", "CUDA", "driver", "triton", "C++ compiler", "cache", "disk"]
    assert {row["state"] for row in report["doctor"]} == {"ok"}
    honest, *untried = [found for _, found in rows(done, "ops")]
    assert "doctored::honest, doctored::reads" in honest
    assert "pcgsvc::" not in "".join(untried)  # ours that it does not use are no news


@pytest.mark.slow
def test_an_op_that_writes_what_it_does_not_declare_is_named_with_its_argument(
    doctor: Callable[..., Done],
) -> None:
    done = doctor("Lies", "device=cpu")
    assert done.code == 1
    ((state, found),) = rows(done, "op doctored::lie")
    assert state == "fail"
    assert "writes to its argument 'kv'" in found
    assert "doctored::lie(Tensor x, Tensor kv) -> Tensor" in found
    assert "op doctored::lie" in done.out
    ((state, found),) = rows(done, "op doctored::alias")
    assert state == "warn"
    assert "a view of, its argument 'x'" in found


@pytest.mark.slow
def test_host_reads_are_named_with_their_op_and_line(doctor: Callable[..., Done]) -> None:
    done = doctor("Item", "device=cpu")
    assert done.code == 1
    line = LINES["        if h.sum().item() > 0:  # the line"]
    reads = rows(done, "host read")
    assert [state for state, _ in reads] == ["fail", "fail"]
    assert "aten::_local_scalar_dense" in reads[0][1]
    assert f"doctored_models.py:{line} in forward" in reads[0][1]
    assert f"doctored_models.py:{line + 2} in forward" in reads[1][1]
    assert "tolist" in reads[1][1]
    ((state, found),) = rows(done, "split (fx)")
    assert state == "fail"
    assert f"doctored_models.py:{line}" in found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_numbers_of_the_source_are_a_hazard_where_no_trace_lifts_them(
    doctor: Callable[..., Done], strategy: str
) -> None:
    done = doctor("Numbers", "device=cpu", f"partition.strategy={strategy}")
    found = rows(done, "host data")
    if strategy == "fx":
        assert (done.code, found) == (0, [])
        return
    ((state, text),) = found
    assert (done.code, state) == (1, "fail")
    line = LINES["        return self.linear(x) + torch.tensor([2.0], device=x.device)  # here"]
    assert f"doctored_models.py:{line} in forward" in text


@pytest.mark.slow
def test_prints_attributes_and_random_numbers_are_named_with_their_line(
    doctor: Callable[..., Done],
) -> None:
    done = doctor("Busy", "device=cpu", "partition.strategy=breakable", "mode=none")
    assert done.code == 1
    line = LINES['        print("a forward")  # the line']
    for item, state, word, at in (
        ("print", "warn", "standard output", line),
        ("attribute write", "warn", "calls", line + 1),
        ("random numbers", "fail", "aten::rand_like", line + 2),
    ):
        ((got, found),) = rows(done, item)
        assert got == state
        assert word in found
        assert f"doctored_models.py:{at} in forward" in found


@pytest.mark.parametrize(("name", "words"), [("Raises", "ValueError: not today"), ("Dies", "Key")])
@pytest.mark.slow
def test_a_model_that_fails_is_a_row(doctor: Callable[..., Done], name: str, words: str) -> None:
    done = doctor(name, "device=cpu")
    assert done.code == 1
    ((state, found),) = rows(done, "model")
    assert state == "fail"
    assert words in found
    assert "doctored_models.py:" in found
    assert "Traceback" not in done.out + done.err


def examine_module(
    monkeypatch: pytest.MonkeyPatch, module: Callable[..., Any], **example: torch.Tensor
) -> dict[str, Finding]:
    """Return the rows of a module of this process, by item."""
    request = request_for(module, example, dict.fromkeys(example, 0), Config())
    monkeypatch.setattr(job, "request_of", lambda *args: request)
    return {row.item: row for row in job._model(Config(), torch.device("cpu"), Silent())}


@pytest.mark.slow
def test_a_weight_that_a_hook_of_torch_s_sets_has_its_own_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5).eval()
    found = examine_module(monkeypatch, layer, input=torch.randn(3, 4))["attribute write"]
    assert found.found == "weight"
    assert "torch.nn.utils.prune.remove(model, 'weight')" in found.advice


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.slow
def test_rows_that_are_picked_by_their_numbers_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    table = torch.randn(5, 4)

    def picked(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        y = x + table[k]
        return y.index_put((k,), x) if writes else y[k]

    def looked_up(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (x + table[k])[x[:, 0] > 0].sum(0) + x

    example = {"x": torch.randn(5, 4), "k": torch.arange(5)}
    found = examine_module(monkeypatch, picked, **example)["row index"]
    assert (found.state, "in picked" in found.found) == ("warn", True)
    assert "pcgsvc.true_rows" in found.advice
    assert "row index" not in examine_module(monkeypatch, looked_up, **example)


# ---- the machine ---------------------------------------------------------------------------------


def examine_machine(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Finding]:
    """Return the rows that need no model, by item."""
    import pcgsvc

    monkeypatch.setattr(job, "_model", lambda *args: [])
    found = job.examine(pcgsvc.load_config(["job=doctor", *words]), Silent())
    return {row.item: row for row in found}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave no compiler on the PATH, but what mounts."""
    from torch._inductor import cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()  # torch keeps what it has found
    for name in filter(shutil.which, ("mount", "umount")):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see no device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("words", "states"),
    {
        ("device=auto", "compiler=eager"): ("ok", "warn"),
        ("device=cpu", "compiler=inductor"): ("ok", "fail"),
        ("device=cuda", "compiler=eager"): ("fail", "warn"),
        ("device=cuda", "compiler=inductor"): ("fail", "warn"),
    }.items(),
)
def test_no_gpu_and_no_compiler_fail_only_what_needs_them(
    words: tuple[str, ...],
    states: tuple[str, str],
    no_gpu: None,
    no_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = examine_machine(monkeypatch, *words)
    assert (found["CUDA"].state, found["C++ compiler"].state) == states
    assert "no CUDA device" in found["CUDA"].found
    assert "AssertionError" not in found["CUDA"].found  # of a torch without CUDA, said already
    assert all(row.advice for row in found.values() if row.state != "ok")


def test_a_compiler_that_runs_and_compiles_nothing_is_said_with_its_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "g++"
    broken.write_text(
        "#!/bin/sh\necho 'x.cpp:1: fatal error: Python.h: No such file' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setattr(job.torch_private, "cpp_compiler", lambda: str(broken))
    found = examine_machine(monkeypatch, "device=cpu", "compiler=inductor")["C++ compiler"]
    assert found.state == "fail"
    assert "fatal error: Python.h" in found.found


@pytest.mark.slow
def test_a_model_for_a_device_that_is_not_here_is_not_run(
    doctor: Callable[..., Done], no_gpu: None
) -> None:
    done = doctor("Good", "device=cuda", "compiler=eager")
    assert done.code == 1
    ((state, found),) = rows(done, "model")
    assert state == "warn"
    assert "not run, since cuda:0 is not here" in found
    assert rows(done, "split (fx)")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_no_gpu_no_compiler_and_a_cache_on_a_read_only_mount_are_each_said(
    no_gpu: None, no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "mounted"
    with mounted(place, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        found = examine_machine(monkeypatch, f"cache.dir={place}", "compiler=eager")
    assert "no CUDA device" in found["CUDA"].found
    assert found["C++ compiler"].found == "none on the PATH"
    assert "Read-only file system" in found["cache"].found
    assert {row.state for row in found.values()} == {"ok", "warn"}


# ---- the cache -----------------------------------------------------------------------------------


def cache(**settings: Any) -> list[Finding]:
    return list(job._cache(CacheConfig(**settings)))


def test_a_cache_that_others_may_write_to_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (found,) = cache(dir=str(tmp_path))
    assert found.state == "fail"
    assert "any user may put another" in found.found
    assert cache(dir=str(tmp_path), mode=CacheMode.OFF)[0].state == "ok"


def test_a_cache_that_cannot_be_written_fails_only_what_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    writes = os.W_OK | os.X_OK
    monkeypatch.setattr(os, "access", lambda p, mode, **k: mode != writes and access(p, mode))
    assert cache(dir=str(tmp_path), mode=CacheMode.READ)[0].state == "ok"
    found = cache(dir=str(tmp_path))[0]
    assert (found.state, "nothing is stored" in found.found) == ("warn", True)
    assert cache(dir=str(tmp_path), action=CacheAction.IMPORT)[0].state == "fail"


def test_a_full_disk_is_found_by_writing_and_little_space_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job.tempfile, "TemporaryFile", full)
    monkeypatch.setattr(job, "_LOW_BYTES", 1 << 62)
    first, disk = cache(dir=str(tmp_path), max_bytes=1 << 62)
    assert "No space left on device" in first.found
    assert (first.state, disk.state) == ("warn", "warn")
