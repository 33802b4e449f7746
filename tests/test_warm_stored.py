"""What a build stores: Inductor's artifacts (stubbed), classes of results, shared pieces."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from core_helpers import attended, make_config, rows, toy
from torch.utils import _pytree as pytree
from warm_helpers import Starter

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.cache.store import Kind, Store
from pcgsvc.config import CacheConfig, CacheMode

# ---- Inductor, stubbed ---------------------------------------------------------------------------


class StubArtifact:
    """What `inductor_compile` gives, without a compiler."""

    made: dict[bytes, Any] = {}  # noqa: RUF012 - stands for the disk of the compiler

    def __init__(self, module: Any) -> None:
        self.module = module
        self.name = str(len(self.made)).encode()
        self.made[self.name] = self

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


class Stub:
    """Counts what a stubbed Inductor does."""

    compiled = probed = 0

    def probe(self) -> None:
        self.probed += 1

    def compile(self, module: Any, inputs: Any, options: Any) -> StubArtifact:
        self.compiled += 1
        return StubArtifact(module)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setattr(torch_private, "inductor_compile", made.compile)
    monkeypatch.setattr(torch_private, "probe_cpp_compiler", made.probe)
    monkeypatch.setattr(torch_private, "inductor_serialize", lambda artifact: artifact.name)
    monkeypatch.setattr(torch_private, "inductor_deserialize", lambda d: StubArtifact.made[d])
    monkeypatch.setattr(torch_private, "inductor_source", lambda artifact: "")
    return made


def test_inductors_pieces_and_toolchain_are_stored_and_loaded(start: Starter, stub: Stub) -> None:
    first = start(toy(2), compiler="inductor")
    assert first.right
    assert (stub.compiled, stub.probed) == (3, 1)
    assert start(toy(2), compiler="inductor").warm
    assert (stub.compiled, stub.probed) == (3, 1)


def test_the_toolchain_goes_where_the_program_goes(
    start: Starter, stub: Stub, tmp_path: Path
) -> None:
    assert not start(toy(1), compiler="inductor").warm
    with Store.open(str(start.root)) as store:
        (program,) = store.ls()
        assert store.check().orphans == []
        kinds = {
            store.read(Kind.PIECE, key).facts.get("kind")
            for key in store.read(Kind.PROGRAM, program.key).pieces
        }
    assert "toolchain" in kinds


def broken_serialize(artifact: Any) -> bytes:
    raise RuntimeError("no artifacts in this version")


@pytest.mark.parametrize("serialize", [broken_serialize, lambda a: b""], ids=["raises", "nothing"])
def test_what_torch_cannot_write_down_runs_and_is_not_stored(
    start: Starter,
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    serialize: Callable[[Any], bytes],
) -> None:
    monkeypatch.setattr(torch_private, "inductor_serialize", serialize)
    for _ in range(2):
        caplog.clear()
        done = start(toy(1), compiler="inductor")
        assert done.right
        assert not done.warm
        assert "cannot be written down" in caplog.text


@pytest.mark.parametrize("serialize", [broken_serialize, lambda a: b""], ids=["raises", "nothing"])
def test_the_report_says_what_torch_could_not_write_down(
    start: Starter, stub: Stub, monkeypatch: pytest.MonkeyPatch, serialize: Callable[[Any], bytes]
) -> None:
    monkeypatch.setattr(torch_private, "inductor_serialize", serialize)
    assert "cannot be written down" in start(toy(1), compiler="inductor").reasons


def test_what_torch_cannot_load_again_is_compiled_again(
    start: Starter, stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not start(toy(1), compiler="inductor").warm

    def broken(data: bytes) -> Any:
        raise EOFError("short pickle")

    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "inductor_deserialize", broken)
        again = start(toy(1), compiler="inductor")
        assert again.right
        assert not again.warm
        assert again.report["compile"]["num_compiled"] == 2
        assert again.report["compile"]["num_loaded"] == 0
        assert "torch cannot load it (EOFError: short pickle)" in again.reasons
        # Neither does it help to compile where nothing can be written down at all.
        patch.setattr(torch_private, "inductor_serialize", broken_serialize)
        assert start(toy(1), compiler="inductor").right
    assert start(toy(1), compiler="inductor").warm


# ---- results with classes of their own -----------------------------------------------------------


class Pair:
    """A result of a class that is registered without a name to write."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.one, pair.other], None), lambda values, _: Pair(*values)
)


class Named(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def test_a_named_tuple_comes_out_as_one(start: Starter) -> None:
    def forward(x: torch.Tensor) -> Named:
        return Named(attended(x), x + 1)

    config = make_config(sizes=(2,))
    with pcgsvc.build_runner(forward, rows(2), dynamic_dims={"x": 0}, config=config) as runner:
        result = runner(rows(2))
        assert isinstance(result, Named)
        assert torch.equal(result.other, rows(2) + 1)


def test_a_result_that_torch_cannot_write_down_is_served_uncached(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(x: torch.Tensor) -> Pair:
        return Pair(attended(x), x + 1)

    config = make_config(sizes=(2,))
    config.cache = CacheConfig(dir=str(root), mode=CacheMode.READWRITE)
    for _ in range(2):
        with pcgsvc.build_runner(forward, rows(2), dynamic_dims={"x": 0}, config=config) as runner:
            result = runner(rows(2))
            assert isinstance(result, Pair)
            assert torch.equal(result.other, rows(2) + 1)
            assert runner.report["compile"]["start"] == "cold"
    assert "the result cannot be written down" in caplog.text


# ---- several at once -----------------------------------------------------------------------------


def test_two_threads_that_build_one_program_at_once_compile_it_once(start: Starter) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: start(toy(2)), range(2)))
    assert all(each.right for each in done)
    assert sum(each.report["compile"]["num_compiled"] for each in done) == 3
    assert sorted(each.warm for each in done) == [False, True]


def test_two_programs_share_their_pieces(start: Starter) -> None:
    assert start(toy(3)).report["compile"]["num_compiled"] == 3
    more = start(toy(4))
    assert more.right
    assert not more.warm
    assert (more.report["compile"]["num_compiled"], more.report["compile"]["num_loaded"]) == (0, 3)
