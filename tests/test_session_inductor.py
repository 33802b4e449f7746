"""Capture of pieces that Inductor compiled, and the sources that `dump_dir` holds of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended, build, make_config, plain, rows, toy
from torch import nn

import pcgsvc
from pcgsvc.config import CacheConfig
from pcgsvc.errors import PcgError


@pytest.fixture(scope="module")
def inductor() -> Iterator[tuple[Any, pcgsvc.Runner]]:
    module = toy(3)
    with build(module, compiler="inductor", sizes=[4, 8], poison=True) as runner:
        yield module, runner


@pytest.mark.slow
def test_inductor_pieces_replay_what_the_module_gives(inductor: tuple[Any, Any]) -> None:
    module, runner = inductor
    for at, size in enumerate((5, 8, 1, 4, 5, 20)):
        x = rows(size, seed=at)
        torch.testing.assert_close(runner(x), plain(module, x), rtol=1e-4, atol=1e-5)
    assert runner.report["compile"]["num_compiled"] == 3
    assert set(runner.stats()["hits"]) == {"piecewise:4", "piecewise:8"}


@pytest.mark.slow
def test_generated_code_reads_an_input_that_is_to_be_negated_as_it_reads(
    inductor: tuple[Any, Any],
) -> None:
    module, runner = inductor
    for size in (5, 20):  # of a graph, and without one
        x = torch.view_as_complex(rows(size, 2 * WIDTH).view(size, WIDTH, 2)).conj().imag
        assert x.is_neg()
        for given in (x, torch._neg_view(rows(size))):
            wanted = plain(module, given.clone())
            torch.testing.assert_close(runner(given), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_inductor_piece_that_only_writes_is_replayed() -> None:
    class Writes(nn.Module):
        state: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(1, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = attended(x)
            y.mul_(3)  # the region's only result is the memory that it was given
            z = attended(y)
            self.state += 1  # a region without any result
            return attended(z)

    module = Writes().eval()
    with build(module, compiler="inductor", sizes=[8]) as runner:
        for at in range(3):
            x = rows(5, seed=at)
            torch.testing.assert_close(runner(x), x * 24)
        assert module.state[0, 0].item() == 3


@pytest.mark.slow
def test_inductor_refuses_to_part_two_views_that_are_written_behind_a_split() -> None:
    from pcgsvc.errors import SplitError

    def forward(x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        a, b = base.view(-1), base.view(2, -1)
        y = attended(x)
        a.mul_(2)
        return b.sum() + y + a.view(-1, WIDTH)

    with pytest.raises(SplitError, match="share memory"):
        build(forward, compiler="inductor", sizes=[8])


@pytest.mark.slow
def test_what_a_region_writes_in_place_is_what_a_later_splitting_op_writes_on() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        torch.ops.toy.attend(h, h)
        h += 1  # the result of this line is h, not another tensor
        torch.ops.toy.attend(h, h)
        return h

    with build(forward, compiler="inductor", sizes=[8]) as runner:
        assert runner.report["graphs"]["num_graphs"] == 2
        for at in range(2):
            x = rows(5, seed=at)
            torch.testing.assert_close(runner(x), x * 8 + 2)


@pytest.mark.slow
def test_a_region_that_writes_in_place_and_returns_views_alone_is_replayed() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.ops.toy.fresh(x)
        h.mul_(2)
        return h, h[:, :1]

    with build(forward, compiler="inductor", sizes=[8]) as runner:
        for at in range(2):
            x = rows(5, seed=at)
            torch.testing.assert_close(runner(x), forward(x))


@pytest.mark.slow
def test_a_region_may_take_the_row_count_of_an_input_that_it_does_not_read() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        h = torch.ops.toy.fresh(y)
        h[torch.arange(x.shape[0]), at] = 1
        return h

    given = (rows(5), rows(5, seed=1), torch.arange(5) % 3)
    with build(forward, given, {"x": 0, "y": 0, "at": 0}, compiler="inductor", sizes=[8]) as runner:
        torch.testing.assert_close(runner(*given), forward(*given))


@pytest.mark.slow
def test_inductor_refuses_a_view_of_what_its_region_writes_and_a_splitting_op_then() -> None:
    from pcgsvc.errors import SplitError

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        torch.ops.toy.attend(h, h)
        part = h[:, :2].add_(1)
        torch.ops.toy.attend(h, h)
        return h + part.sum()

    with pytest.raises(SplitError, match="a result and what it writes share memory"):
        build(forward, compiler="inductor", sizes=[8])


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_buffer_that_negates_on_reading_is_read_so_or_refused_by_name(compiler: str) -> None:
    class Negated(nn.Module):
        k: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch._neg_view(rows(1)[0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x) * self.k

    module = Negated().eval()
    assert module.k.is_neg()
    if compiler == "inductor":
        with pytest.raises(PcgError, match=r"_k_? is a view that negates .* \.resolve_neg\(\)"):
            build(module, compiler=compiler, self_check=False)
        return
    with build(module, compiler=compiler) as runner:
        torch.testing.assert_close(runner(rows(3)), plain(module, rows(3)))


@pytest.mark.slow
def test_an_inductor_option_that_does_not_exist_names_the_piece() -> None:
    from core_helpers import make_config

    config = make_config(compiler="inductor", sizes=[4])
    config.compiler.options = {"no_such_option": 1}
    with pytest.raises(PcgError, match="piece_00"):
        pcgsvc.build_runner(toy(1), rows(3), dynamic_dims={"x": 0}, config=config)


@pytest.mark.slow
def test_dump_dir_holds_the_sources_of_the_pieces_at_a_cold_and_a_warm_start(
    tmp_path: Path,
) -> None:
    from core_helpers import make_config

    config = make_config(compiler="inductor", sizes=[4])
    config.compiler.specialize_sizes = [4]
    config.cache = CacheConfig(dir=str(tmp_path / "cache"))
    dumps = []
    for start in ("cold", "warm"):
        config.debug.dump_dir = str(tmp_path / start)
        with pcgsvc.build_runner(sines, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
            assert runner.report["compile"]["start"] == start
        dumps.append({p.name: p.read_text() for p in (tmp_path / start).iterdir()})
    assert sorted(dumps[0]) == [
        "piece_00.fx.py",
        "piece_00.inductor.py",
        "piece_00.size_4.inductor.py",
    ]
    assert dumps[0] == dumps[1]


@pytest.mark.slow
def test_what_cannot_be_dumped_at_a_warm_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pcgsvc.compilers.inductor import InductorPiece

    config = make_config(compiler="inductor", sizes=[4])
    config.cache = CacheConfig(dir=str(tmp_path / "cache"))
    pcgsvc.build_runner(sines, rows(3), dynamic_dims={"x": 0}, config=config).close()
    config.debug.dump_dir = str(tmp_path / "dump")

    def none(piece: InductorPiece) -> str:
        raise AttributeError("source_code")

    monkeypatch.setattr(InductorPiece, "generated", none)
    monkeypatch.setattr(InductorPiece, "num_kernels", lambda piece: 1)
    pcgsvc.build_runner(sines, rows(3), dynamic_dims={"x": 0}, config=config).close()
    assert [p.name for p in (tmp_path / "dump").iterdir()] == ["piece_00.fx.py"]
    assert "debug.dump_dir: piece_00.inductor.py cannot be written" in caplog.text


def sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@pytest.mark.slow
def test_what_inductor_assumes_of_the_row_count_is_kept_and_other_sizes_have_code_of_their_own(
    tmp_path: Path,
) -> None:
    # AOTAutograd decomposes a product of few numbers, and guards on there being few.
    needed = re.compile("run by the module itself.* needs .*<= 32 .from the compiler")
    config = make_config("full", [8, 64], compiler="inductor")
    config.cache = CacheConfig(dir=str(tmp_path / "cache"))
    for kind, start, compiled in ((Outer, "cold", 2), (Outer, "warm", 0), (Again, "cold", 0)):
        module = kind().eval()
        with pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
            report = runner.report
            assert (report["compile"]["start"], report["compile"]["num_compiled"]) == (
                start,
                compiled,
            )
            assert (report["compile"]["exact_sizes"], report["graphs"]["skipped"]) == ([64], [])
            for count in (5, 20, 21, 64, 65):
                assert bool(needed.search(runner.plan(count).reason)) is (count > 64)
                torch.testing.assert_close(runner(rows(count)), plain(module, rows(count)))


class Outer(nn.Module):
    """Multiplies a column with a row."""

    w: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.linspace(-1, 1, 12).view(1, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] @ self.w


class Again(Outer):
    """Another program of the same piece."""


@pytest.mark.slow
@pytest.mark.parametrize("self_check", [True, False])
def test_a_write_with_which_torch_fixes_the_row_count_is_refused_and_the_ways_out_work(
    self_check: bool,
) -> None:
    def by_unbind(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h.unbind(1)[0].zero_()
        return h

    def by_index(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h[:, 0].zero_()
        return h

    settings = {"mode": "full", "sizes": [4], "self_check": self_check}
    with pytest.raises(PcgError, match=r"for 11 rows only.*write to x\[:, 0\] instead"):
        build(by_unbind, compiler="inductor", **settings)
    for forward, compiler in ((by_unbind, "eager"), (by_index, "inductor")):
        with build(forward, compiler=compiler, **settings) as runner:
            for count in (3, 9):
                torch.testing.assert_close(runner(rows(count)), forward(rows(count)))
