"""`compiler.specialize_sizes`: artifacts for exact sizes beside the general one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended, make_config, partition_of, rows, trace_of
from model_helpers import make_context
from torch import nn

import pcgsvc
from pcgsvc.cache.pieces import Pieces
from pcgsvc.cache.store import Store
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.compilers.specialize import baked_inputs, graph_for, specialized
from pcgsvc.config import (
    CacheConfig,
    CacheMode,
    Config,
    Graphs,
    Strategy,
    from_dict,
    resolve,
    validate,
)
from pcgsvc.errors import ConfigError
from pcgsvc.forward.specs import SizePredicate
from pcgsvc.jobs.cache import _check
from pcgsvc.ops.context import use_context
from pcgsvc.partition.fx import partition_fx
from pcgsvc.program.facts import piece_facts
from pcgsvc.program.image import ProgramImage, image_of
from pcgsvc.program.keys import key_of
from pcgsvc.program.pieces import Kind
from pcgsvc.program.program import Program


class Counted(nn.Module):
    """Rows that know their number: an int crosses from the first region to the last.

    The first one calls the library only: Inductor takes seconds for each kernel of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        twice = x.shape[0] * 2
        h = attended(self.linear(x)).relu() * 2
        return h + torch.arange(x.shape[0]).unsqueeze(1) + torch.zeros(twice).sum()


# ---- settings ------------------------------------------------------------------------------------


def checked(sizes: Any, **settings: Any) -> Config:
    tree = {"compiler": {"name": "inductor", "specialize_sizes": sizes}, **settings}
    config = resolve(from_dict({"capture": {"sizes": [4, 8]}, **tree}), device_type="cpu")
    validate(config, device_type="cpu")
    return config


def test_sizes_are_written_as_capture_sizes_are() -> None:
    assert checked("4,8").compiler.specialize_sizes == [4, 8]
    assert checked([8]).compiler.specialize_sizes == [8]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([5], r"\[5\] are no capture sizes.*padded"),
        ([0], r"got \[0\] among \[0\]"),
        ([4, 4], r"\[4\] appear twice"),
    ],
)
def test_a_size_that_no_call_reaches_is_refused(sizes: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=f"compiler.specialize_sizes: {words}"):
        checked(sizes)


def test_a_size_above_the_limit_is_no_capture_size() -> None:
    with pytest.raises(ConfigError, match=r"\[8\] are no capture sizes.*Capture sizes: \[4\]"):
        checked([8], capture={"sizes": [4, 8], "max_size": 4})


def test_other_compilers_and_strategies_refuse_it() -> None:
    with pytest.raises(ConfigError, match=r"compiler\.specialize_sizes: .*compiler=inductor"):
        checked([4], compiler={"name": "eager", "specialize_sizes": [4]})
    config = checked([4])
    config.partition.strategy, config.capture.graphs = Strategy.BREAKABLE, Graphs.CUDA
    with pytest.raises(ConfigError, match=r"specialize_sizes: not read with .*breakable"):
        validate(config, device_type="cuda")


def test_a_piece_s_facts_have_its_own_size_and_not_the_list_of_them() -> None:
    def key(sizes: list[int], size: int | None = None) -> str:
        return key_of(piece_facts("p", checked(sizes), {}, num_outputs=1, ops={}, size=size))

    assert key([]) == key([4])
    assert len({key([4]), key([4], 4), key([4], 8)}) == 3


# ---- graphs --------------------------------------------------------------------------------------


def test_a_graph_for_one_size_has_no_symbol_left() -> None:
    partition = partition_of(Counted())
    for piece in partition.unique().values():
        assert piece.document is not None
        graph = graph_for(piece, 5).graph
        values = [n.meta["example_value"] for n in graph.nodes if n.op != "output"]
        assert not any(isinstance(v, torch.SymInt) for v in values)
        shapes = [v.shape for v in values if isinstance(v, torch.Tensor)]
        assert all(type(n) is int for shape in shapes for n in shape)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        assert len(placeholders) == len(piece.inputs) - len(baked_inputs(piece.document))
    assert any(baked_inputs(p.document or {}) for p in partition.unique().values())
    results = [n for p in partition.unique().values() for n in p.outputs]
    assert any(isinstance(n.meta["example_value"], torch.SymInt) for n in results)


def test_the_traced_graph_is_left_as_it_was() -> None:
    traced = trace_of(Counted())
    piece = next(p for p in partition_fx(traced, None).pieces if p.kind is Kind.REGION)
    before = [str(n.meta.get("example_value")) for n in traced.graph.nodes]
    graph_for(piece, 5)
    assert [str(n.meta.get("example_value")) for n in traced.graph.nodes] == before


def test_inputs_that_share_memory_share_it_still() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x + 1
            left, right = h[:, :2], h[:, 2:]
            out = attended(h)
            return out[:, :2] * left + right

    regions = [p for p in partition_of(Halves()).pieces if p.kind is Kind.REGION]
    last = graph_for(regions[-1], 5).graph
    fakes = [n.meta["example_value"] for n in last.nodes if n.op == "placeholder"]
    wanted = [n.meta["example_value"] for n in regions[-1].inputs]

    def sharing(tensors: list[Any]) -> list[list[bool]]:
        stores = [t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)]
        return [[a == b for a in stores] for b in stores]

    assert sharing(fakes) == sharing(wanted)


def test_only_pieces_that_know_the_rows_and_valid_sizes_are_specialised() -> None:
    image = counted_image(predicate=SizePredicate(("s <= 4",)))
    fixed: dict[str, Any] = {"inputs": [["tensor", "f", [3], [1], 0, "cpu", "s"], ["int", 2]]}
    image = replace(image, documents={**image.documents, "fixed": fixed})
    assert specialized(image, checked([4, 8])) == [(4, h) for h in image.documents if h != "fixed"]


def counted_image(**changed: Any) -> ProgramImage:
    traced = trace_of(Counted())
    partition = partition_fx(traced, None)
    return replace(image_of(traced, partition, partition, guards=[], files={}), **changed)


def test_a_region_is_compiled_for_the_captured_sizes_that_break_what_its_code_assumes() -> None:
    first, last = counted_image().documents
    image = counted_image(
        predicate=SizePredicate(("s < 64",), ("a line",)),
        assumes={first: ("s <= 8",), last: ("s <= 8", "s != 4")},
    )
    wide = {"capture": {"sizes": [4, 8, 16, 64]}}
    assert specialized(image, checked([], **wide)) == [(4, last), (16, first), (16, last)]
    assert specialized(image, checked([8], **wide))[1:3] == [(8, first), (8, last)]
    assert specialized(image, checked([], **wide, mode="none")) == []
    uncompiled = replace(image, uncompiled={last: "it is wrong"})
    assert specialized(uncompiled, checked([], **wide)) == [(16, first)]
    assert image.general.broken_by(4) == "rows != 4 (from the compiler)"
    assert uncompiled.general.broken_by(4) is None


# ---- a whole start -------------------------------------------------------------------------------


@pytest.mark.parametrize("self_check", [True, False])
def test_sizes_that_break_what_the_compiler_assumes_are_compiled_on_their_own_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, self_check: bool
) -> None:
    """A compiler whose code for all sizes is wrong where it is not valid."""

    def run(piece: EagerPiece, *args: Any) -> Any:
        (x,) = [a for a in args if isinstance(a, torch.Tensor)]
        right = id(piece) in exact or len(x) in (2, 8)
        return [result if right else result * 0 for result in plain_run(piece, *args)]

    def compiled(pieces: Pieces, piece: Any, dump_path: Any, size: int | None) -> Any:
        made, data = compile_(pieces, piece, dump_path, size)
        exact.update({id(made): size} if size is not None else {})
        return made, data

    def loaded(pieces: Pieces, name: str, data: bytes, document: Any, size: int | None) -> Any:
        made = load(pieces, name, data, document, size)
        exact.update({id(made): size} if size is not None else {})
        return made

    exact: dict[int, int] = {}
    plain_run, compile_, load = EagerPiece.__call__, Pieces._compile, Pieces._load
    monkeypatch.setattr(EagerPiece, "__call__", run)
    monkeypatch.setattr(EagerPiece, "assumes", ("s <= 8", "s != 3", "s != 4"))
    monkeypatch.setattr(Pieces, "_compile", compiled)
    monkeypatch.setattr(Pieces, "_load", loaded)
    config = make_config("full", sizes=(2, 4, 8, 16), self_check=self_check)
    config.cache = CacheConfig(dir=str(tmp_path))
    for start in ("cold", "warm"):
        with pcgsvc.build_runner(
            Ramp().eval(), rows(5), dynamic_dims={"x": 0}, config=config
        ) as runner:
            report = runner.report
            assert report["compile"]["start"] == start
            assert report["graphs"]["skipped"] == []
            assert report["compile"]["exact_reasons"] == [
                {"size": 4, "reason": "code for all sizes needs rows != 4 (from the compiler)"},
                {"size": 16, "reason": "code for all sizes needs rows <= 8 (from the compiler)"},
            ]
            assert report["compile"]["exact_sizes"] == sorted(exact.values()) == [4, 16]
            own = "compiled on its own, since code for all sizes needs rows"
            assert [n for n in range(1, 17) if own in runner.plan(n).reason] == [
                3,
                4,
                *range(9, 17),
            ]
            for count in (1, 2, 3, 4, 5, 8, 9, 16, 17):
                torch.testing.assert_close(runner(rows(count)), Ramp()(rows(count)))
            assert "run by the module itself" in runner.plan(17).reason
        exact.clear()
    config.capture.sizes = [2, 32]
    with pcgsvc.build_runner(
        Ramp().eval(), rows(5), dynamic_dims={"x": 0}, config=config
    ) as runner:
        report = runner.report
        assert report["compile"]["exact_sizes"] == [32]
        assert (report["compile"]["num_loaded"], report["compile"]["num_compiled"]) == (1, 1)
        assert any("for 32 rows: absent" in why for why in report["cache"]["miss_reasons"])
        torch.testing.assert_close(runner(rows(9)), Ramp()(rows(9)))


class Ramp(nn.Module):
    """One region that knows the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.arange(x.shape[0]).unsqueeze(1)


class Branching(Ramp):
    """Variants of one program, by what tracing reads."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factors = {"a": factor}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factors["a"]


def test_variants_and_the_check_of_a_cache_need_no_size_that_others_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagerPiece, "assumes", ("s <= 8",))
    config = make_config("full", sizes=(2, 16))
    config.cache = CacheConfig(dir=str(tmp_path))
    found = []
    for factor, largest in ((2, 16), (3, 32), (2, 16), (3, 32)):
        config.capture.sizes = [2, largest]
        module = Branching(factor).eval()
        with pcgsvc.build_runner(module, rows(5), dynamic_dims={"x": 0}, config=config) as runner:
            assert runner.report["compile"]["exact_sizes"] == [largest]
            found.append((runner.report["compile"]["start"], runner.report["cache"]["program_key"]))
            torch.testing.assert_close(runner(rows(9)), module(rows(9)))
    assert [start for start, _ in found] == ["cold", "cold", "warm", "warm"]
    assert len({key for _, key in found}) == 1
    with Store.open(str(tmp_path), mode=CacheMode.READ) as store:
        told = list(_check(config, store))
    assert "loaded" in told[-1]


def test_many_sizes_that_are_compiled_on_their_own_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EagerPiece, "assumes", ("s <= 8",))
    for many in (8, 9):
        config = make_config("full", sizes=range(8, 9 + many), strict=True, self_check=False)
        pcgsvc.build_runner(Ramp().eval(), rows(5), dynamic_dims={"x": 0}, config=config).close()
        words = f"code of its own for {many} capture sizes, since that for all needs rows <= 8"
        (level,) = (r.levelname for r in caplog.records if words in r.getMessage())
        assert level == ("WARNING" if many > 8 else "INFO")


class Starts:
    """The same program, cold and warm."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.root, self.module = root, Counted().eval()

    def build(self, sizes: list[int]) -> pcgsvc.Runner:
        config = make_config(compiler="inductor", sizes=(4, 8))
        config.compiler.specialize_sizes = sizes
        config.cache = CacheConfig(dir=str(self.root), mode=CacheMode.READWRITE)
        return pcgsvc.build_runner(self.module, rows(3), dynamic_dims={"x": 0}, config=config)

    def wanted(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), use_context(make_context(None, [x.shape[0]])):
            result: torch.Tensor = self.module(x)
        return result


def sizes_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with the sizes whose program is looked up."""
    asked: list[int] = []
    for_size = Program.for_size

    def spy(program: Program, size: int) -> Program:
        asked.append(size)
        return for_size(program, size)

    monkeypatch.setattr(Program, "for_size", spy)
    return asked


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def cold(starts: Starts) -> Iterator[pcgsvc.Runner]:
    with starts.build([4]) as runner:
        yield runner


@pytest.mark.slow
def test_every_size_gives_what_the_module_gives(starts: Starts, cold: pcgsvc.Runner) -> None:
    for count in (4, 8, 11):  # specialised, general, uncaptured
        torch.testing.assert_close(cold(rows(count)), starts.wanted(rows(count)))
    general = cold.model.program
    assert general.for_size(8) is general
    special = general.for_size(4)
    assert set(special.pieces) == set(general.pieces)
    assert all(special.pieces[h] is not general.pieces[h] for h in general.pieces)
    assert cold.report["compile"]["num_compiled"] == 2 * len(general.pieces)


@pytest.mark.slow
def test_the_exact_artifact_runs_where_nothing_is_captured(
    starts: Starts, cold: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sizes_asked_for(monkeypatch)
    monkeypatch.setattr(cold.dispatch, "find", lambda *args: None)
    batch = pcgsvc.Batch(query_lens=[4])  # asks; what a call without one means is worked out once
    torch.testing.assert_close(cold(rows(4), batch=batch), starts.wanted(rows(4)))
    assert asked == [4]


@pytest.mark.slow
def test_a_warm_start_compiles_nothing_and_captures_the_exact_artifact(
    starts: Starts, cold: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sizes_asked_for(monkeypatch)
    with starts.build([4]) as warm:
        assert {4, 8} <= set(asked)
        done = warm.report["compile"]
        assert (done["start"], done["num_traces"], done["num_compiled"]) == ("warm", 0, 0)
        assert done["num_loaded"] == cold.report["compile"]["num_compiled"]
        general = warm.model.program
        assert general.for_size(4) is not general
        for count in (4, 8, 11):
            assert torch.equal(warm(rows(count)), cold(rows(count)))


@pytest.mark.slow
def test_another_list_of_sizes_keeps_the_general_pieces(
    starts: Starts, cold: pcgsvc.Runner
) -> None:
    with starts.build([]) as plain:
        assert plain.report["compile"]["start"] == "cold"
        assert plain.report["compile"]["num_compiled"] == 0
        torch.testing.assert_close(plain(rows(4)), starts.wanted(rows(4)))
