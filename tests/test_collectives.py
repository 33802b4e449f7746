"""Collectives as boundaries and in regions: traced, stored, replayed, and processes in step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from core_helpers import trace_of
from ranks_helpers import Ended, launch, outcomes
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.errors import ConfigError, PcgError, PeerError, TraceError
from pcgsvc.ops import collectives
from pcgsvc.ops.collectives import check_backend, group_of, group_word, ranks_of
from pcgsvc.ops.ranks import Ranks

WORKER = str(Path(__file__).with_name("collectives_worker.py"))
X = torch.randn(3, 8)


# ---- tracing -------------------------------------------------------------------------------------


def reduced(x: torch.Tensor) -> Any:
    return functional.all_reduce(x, "sum", distributed.group.WORLD)


def ops_of(forward: Any) -> list[str]:
    """Return the ops of a traced function of one input, in order."""
    graph = trace_of(forward, {"x": X}).graph
    named = (n for n in graph.nodes if n.op in ("call_function", "call_method"))
    return [getattr(n.target, "__name__", str(n.target)) for n in named]


def test_a_collective_and_its_waits_are_one_op_in_place_where_nothing_reads_the_operand(
    group: None,
) -> None:
    def waited_twice(x: torch.Tensor) -> Any:
        return functional.wait_tensor(reduced(x.relu())) + 1

    def in_place(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        distributed.all_reduce(h)
        return h + 1

    assert ops_of(lambda x: reduced(x * 2) + 1) == ["mul", "all_reduce", "add"]
    assert ops_of(waited_twice) == ["relu", "all_reduce", "add"]
    assert ops_of(in_place) == ["mul", "all_reduce", "add"]


def test_an_operand_that_is_read_later_or_is_not_the_forwards_own_is_copied(group: None) -> None:
    def read_later(x: torch.Tensor) -> Any:
        h = x * 2
        return reduced(h) + h

    def read_by_a_view(x: torch.Tensor) -> Any:
        h = x * 2
        return reduced(h[:, :4].contiguous().view(-1, 4)) + reduced(h.t()).t()[:, :4]

    def read_before_it_is_written(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        begun = torch.ops._c10d_functional.all_reduce(h, "sum", distributed.group.WORLD.group_name)
        before = h + 1
        h.copy_(torch.ops._c10d_functional.wait_tensor(begun))
        return before + h

    assert ops_of(read_later) == ["mul", "clone", "all_reduce", "add"]
    copied = ["mul", "clone", "all_reduce", "add", "copy_", "add"]
    assert ops_of(read_before_it_is_written) == copied
    assert ops_of(lambda x: reduced(x) + 1) == ["clone", "all_reduce", "add"]
    assert ops_of(read_by_a_view).count("clone") == 1  # of what is not contiguous


def test_gathers_and_scatters_give_new_memory_and_others_are_refused_by_name(group: None) -> None:
    world = "world"

    def both(x: torch.Tensor) -> Any:
        whole = functional.all_gather_tensor(x * 2, 0, distributed.group.WORLD)
        return functional.reduce_scatter_tensor(whole, "sum", 0, distributed.group.WORLD)

    def unwaited(x: torch.Tensor) -> Any:
        return torch.ops._c10d_functional.all_reduce(x * 2, "sum", world) + 1

    def unknown(x: torch.Tensor) -> Any:
        return functional.all_to_all_single(x * 2, None, None, distributed.group.WORLD)

    assert ops_of(both) == ["mul", "all_gather", "reduce_scatter"]
    with pytest.raises(TraceError, match=r"all_reduce at .*in unwaited: its result is read before"):
        trace_of(unwaited, {"x": X})
    with pytest.raises(
        TraceError, match=r"all_to_all_single at .*in unknown: a collective that no"
    ):
        trace_of(unknown, {"x": X})


def test_a_collective_in_place_on_a_view_with_gaps_is_refused_and_the_way_out_works(
    group: None,
) -> None:
    def gaps(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        distributed.all_reduce(h[:, 2:])
        return h

    def contiguous(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        y = h[:, 2:].contiguous()
        distributed.all_reduce(y)
        h[:, 2:] = y
        return h

    with pytest.raises(TraceError, match=r"all_reduce at .*in gaps: in place on a view with gaps"):
        trace_of(gaps, {"x": X})
    assert "all_reduce" in ops_of(contiguous)


class UsesMesh(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mesh = torch.nn.Embedding(32, 4), init_device_mesh("cpu", (1,))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        part = DTensor.from_local(self.embed(ids), self.mesh, [Partial()])
        return part.redistribute(placements=[Replicate()]).to_local()


def test_a_forward_may_make_dtensors_with_a_mesh(group: None) -> None:
    model, ids = UsesMesh().eval(), torch.tensor([3, 0, 31, 8])
    settings: dict[str, Any] = {"compiler": "eager", "cache": "off"}
    with pcgsvc.compile(model, (ids,), sizes=[2, 4], **settings) as runner:
        for num in (1, 3, 4):
            with torch.no_grad():
                assert torch.equal(runner(ids[:num]), model(ids[:num]))


# ---- groups --------------------------------------------------------------------------------------


def test_a_groups_word_is_one_for_all_its_ranks_in_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = torch.arange(16).view(2, 4, 2)
    for dim in range(3):
        words = set()
        for ranks in mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist():
            for rank in ranks:
                monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
                monkeypatch.setattr(torch_private, "process_groups", lambda r=ranks: {"g": r})
                words.add(group_word("g"))
                assert ranks_of(group_word("g")) == ranks
        assert len(words) == 1
    monkeypatch.setattr(distributed, "get_rank", lambda: 5)
    groups = {"a": [0, 1, 5], "b": [5], "c": [0, 1, 5], "d": [5, 4]}
    monkeypatch.setattr(torch_private, "process_groups", lambda: groups)
    assert [group_word(g) for g in groups] == ["0,1,5", "1@1", "0,1,5#1", "5,4"]
    assert [group_of(group_word(g)) for g in groups] == list(groups)
    with pytest.raises(PcgError, match=r"no process group '4@1' here: it was destroyed, or never"):
        group_of("4@1")


@pytest.mark.parametrize(
    ("device", "backends", "need"),
    [
        ("cpu", "cuda:nccl", "gloo"),
        ("cuda", "cpu:gloo,cuda:gloo", "nccl"),
        ("cuda", "cpu:gloo", "nccl"),
    ],
)
def test_a_group_of_another_backend_than_the_device_needs_is_refused(
    group: None, monkeypatch: pytest.MonkeyPatch, device: str, backends: str, need: str
) -> None:
    check_backend(distributed.group.WORLD, torch.device("cpu"))
    monkeypatch.setattr(distributed, "get_backend_config", lambda group: backends)
    with pytest.raises(ConfigError, match=rf"backends {backends}.* initialise it with '{need}'"):
        check_backend(distributed.group.WORLD, torch.device(device))


def test_what_torch_raises_from_a_collective_names_what_may_be_wrong(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(*args: Any) -> None:
        raise RuntimeError("Connection closed by peer\nmore")

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    with pytest.raises(PcgError, match=r"^all_reduce failed: a process .* closed by peer$"):
        collectives.all_reduce(X, "sum", "1@1")


def test_a_peer_that_does_not_come_is_named_once_and_waited_for(
    group: None, caplog: pytest.LogCaptureFixture
) -> None:
    among, store = Ranks(timeout_s=0.01), distributed.HashStore()
    among.members = (0, 1)
    among._watch = cast("Any", SimpleNamespace(store=store, refuse_lost=bool))
    late = threading.Timer(0.3, store.set, ("/1/1", "theirs"))
    late.start()
    assert among.exchange("ours") == {0: "ours", 1: "theirs"}
    late.join()
    (said,) = caplog.messages
    assert said.startswith("rank 1 has not come to what this one does in 0.01 s"), said
    with pytest.raises(PeerError, match=r"ranks \[1\] do not come to what this one does: more"):
        among.exchange("more", limit_s=0.05)


# ---- two processes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Two processes that build alike, and then differ."""
    folder = str(tmp_path_factory.mktemp("cache"))
    forms = ["in_place", "parallelize"]  # functional ones are traced to the same graph
    outs = outcomes([WORKER, "builds", folder, *forms, "+", "differ", "-"])
    assert [end.code for end in outs] == [0, 0], outs
    return outs


@pytest.fixture
def built(two_ranks: list[Ended]) -> list[list[dict[str, Any]]]:
    """What the processes report of their builds, by rank."""
    return [json.loads(end.out.splitlines()[0]) for end in two_ranks]


@pytest.mark.slow
def test_every_form_is_right_at_every_size_in_boundaries_and_in_full_graphs(
    built: list[list[dict[str, Any]]],
) -> None:
    for row in (row for of_rank in built for row in of_rank):
        assert max(row["errors"]) < 1e-5, row
        mode = row["words"][0].partition("=")[2] if "mode" in row["words"][0] else "full"
        assert row["hits"] == {f"{mode}:{size}": 2 for size in (1, 2, 4, 8, 12, 16)}
        assert row["graphs"] == 6 * (3 if mode == "piecewise" else 1)


@pytest.mark.slow
def test_a_program_is_compiled_once_over_all_ranks_and_then_warm_on_each(
    built: list[list[dict[str, Any]]],
) -> None:
    for rows in zip(*built, strict=True):
        assert not any(row["not_stored"] for row in rows)
        cold = "capture.self_check=true" in rows[0]["words"]
        assert {row["start"] for row in rows} == {"cold" if cold else "warm"}
        assert sum(row["compiled"] for row in rows) == (rows[0]["regions"] if cold else 0)


@pytest.mark.exhaustive
def test_other_collectives_and_regions_of_inductor_are_right_as_well(tmp_path: Path) -> None:
    forms = ["functional", "gathers", "embedding", "in_place:inductor"]
    for out in launch([WORKER, "builds", str(tmp_path), *forms]):
        rows = json.loads(out)
        assert [row["start"] for row in rows] == ["cold", "warm"] * 8
        assert max(error for row in rows for error in row["errors"]) < 1e-5


@pytest.mark.slow
def test_ranks_that_differ_are_told_so_and_what_fails_on_one_fails_on_all(
    two_ranks: list[Ended],
) -> None:
    for end in two_ranks:
        found = json.loads(end.out.splitlines()[1])
        assert found["modes"] == (
            "PeerError: mode differs between ranks: rank 0: 'none'; rank 1: 'full'."
        )
        assert found["budget"] == "nothing"
        assert end.err.count("capture.memory_budget=1 bytes would be passed") == 2
        assert found["sizes"] == (
            "PeerError: calls differ between ranks, and none is run: rank 0: call 2, 2 rows by "
            "piecewise:2; rank 1: call 2, 3 rows by piecewise:4."
        )
        assert found["same"] == "nothing"
        # By the call itself, or by the thread that closes the runner then.
        assert "destroyed; close the runner first" in found["destroyed"] or (
            "the runner is closed" in found["destroyed"]
        )
    assert "skipped: rank 1: capture.memory_budget=1" in two_ranks[0].err


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["compile", "capture", "call"])
def test_a_rank_that_is_killed_ends_the_other_with_a_message(when: str) -> None:
    first, last = outcomes([WORKER, "ends", "-", when])
    assert last.code == -signal.SIGKILL
    assert first.code == 1, first.err
    said = (
        "all_reduce failed: a process that takes part" if when == "call" else "rank 1 is gone: no"
    )
    assert said in first.err, first.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["compile", "capture", "call"])
def test_under_torchrun_a_rank_that_is_killed_leaves_no_process_behind(
    when: str, tmp_path: Path
) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    mark = f"PCGSVC_TEST_{os.getpid()}_{when}"
    done = subprocess.run(
        [*run, WORKER, "ends", mark, when], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode != 0
    assert "exitcode  : -9" in done.stderr, done.stderr
    deadline = time.monotonic() + 30
    while (left := _with_word(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def _with_word(word: str) -> list[int]:
    """Return the processes with a word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found
