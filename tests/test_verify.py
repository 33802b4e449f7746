"""One check, one verdict: what a library build and `job=run` accept, refuse and report."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_helpers import Cli
from core_helpers import WIDTH, build, make_config, plain, rows

import pcgsvc
from pcgsvc.check import timing
from pcgsvc.config import Mode, Strategy
from pcgsvc.errors import ConfigError, UncoveredError, VerifyError
from pcgsvc.forward.results import flatten

SOURCE = """
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def example_inputs(self, rows, generator):
        return {"x": torch.randn(rows, 4, generator=generator)}


class OneRow(Base):
    def forward(self, x):
        return self.linear(x) * 3 if x.shape[0] == 1 else self.linear(x)


class Even(Base):
    def forward(self, x):
        return self.linear(x) if x.shape[0] < 3 else self.linear(x).tanh()


class Mean(Base):
    def forward(self, x):
        return self.linear(x) - x.nan_to_num().mean(0)


class Sum(Base):
    def forward(self, x):
        self.total += self.linear(x).sum(0)
        return x + 1


class Plain(Base):
    def forward(self, x):
        return self.linear(x).relu()
"""
WORDS = ["model=module", "model.inputs={}", "mode=full", "capture.sizes=[1,2,4]"]
WORDS += ["compiler=eager", "device=cpu", "bench.enabled=false"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("verdicts") / "verdicts.py"  # imported once per process
    path.write_text(SOURCE)
    return f"model.target={path}"


def captured(report: dict[str, Any]) -> tuple[list[int], int, list[int]]:
    graphs = report["graphs"]
    skipped = sorted(row["size"] for row in graphs["skipped"])
    return graphs["sizes"], graphs["num_graphs"], skipped


def test_report_plan_and_stats_speak_of_what_the_check_left(target: str) -> None:
    with pcgsvc.load_runner([*WORDS, f"{target}:OneRow"]) as runner:
        assert captured(runner.report) == ([2, 4], 2, [1])
        assert runner.report["guards"]["size_conditions"][-1] == "s > 1"
        assert [row["size"] for row in runner.report["verify"]] == [4, 2]
        found = runner.plan(1)
        assert (found.mode, found.descriptor.num_tokens) == (Mode.NONE, 1)
        assert "s > 1" in found.reason
        assert runner.stats()["never_used"] == ["full:4", "full:2"]
        runner.model.module.train(False)  # type: ignore[attr-defined]
        for rows in (1, 2, 3, 1):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(runner(x), runner.model.module(x))
        assert runner.stats()["never_used"] == []
        assert runner.stats()["fallbacks"][0]["count"] == 2


@pytest.mark.parametrize("name", ["OneRow", "Even", "Plain"])
def test_what_a_library_build_accepts_a_run_accepts(target: str, cli: Cli, name: str) -> None:
    words = [*WORDS, f"{target}:{name}"]
    with pcgsvc.load_runner(words) as runner:
        built = runner.report
    done = cli(*words)
    assert done.code == 0, done.out
    (report,) = done.reports
    assert captured(report) == captured(built)
    assert report["verify"] == built["verify"]
    assert all(row["ok"] for row in report["verify"])


@pytest.mark.parametrize(("name", "cause"), [("Mean", "mixes rows"), ("Sum", "padding rows reach")])
def test_what_a_library_build_refuses_a_run_refuses_in_the_same_words(
    target: str, cli: Cli, name: str, cause: str
) -> None:
    words = [*WORDS, f"{target}:{name}"]
    with pytest.raises(VerifyError, match=cause) as caught:
        pcgsvc.load_runner(words)
    done = cli(*words)
    assert done.code == 1
    (report,) = done.reports
    assert caught.value.report is not None
    assert report["verify"] == caught.value.report["verify"]
    assert not all(row["ok"] for row in report["verify"])
    flat = " ".join(done.out.split())
    assert " ".join(str(caught.value).split()) in flat


def test_a_run_verifies_though_the_self_check_is_off(target: str, cli: Cli) -> None:
    off = [*WORDS, f"{target}:Mean", "capture.self_check=false"]
    pcgsvc.load_runner(off).close()
    done = cli(*off)
    assert done.code == 1
    assert done.reports[0]["config"]["capture"]["self_check"] is False


# -- results and inputs of other dtypes, and operators that refuse padding --


def imaginary_count(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x + x.shape[0])


def stamped(x: torch.Tensor) -> torch.Tensor:
    return torch.full((x.shape[0],), 1_700_000_000) + x.shape[0]


@pytest.mark.parametrize("forward", [imaginary_count, stamped])
def test_counted_rows_are_found_in_imaginary_parts_and_in_large_numbers(forward: Any) -> None:
    with pytest.raises(VerifyError, match="computes with their number"):
        build(forward, rows(6), sizes=[4, 8])


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7])
def test_a_number_of_rows_that_matters_at_one_row_count_only_is_found(count: int) -> None:
    def matters(x: torch.Tensor) -> torch.Tensor:
        return x + (x.shape[0] % (count + 1)) // count  # not with 8 rows

    with pytest.raises(VerifyError, match=f"with {count} true rows: .*computes with their number"):
        build(matters, rows(6), sizes=[8])
    with build(lambda x: x + x.shape[0] // 9, rows(6), sizes=[8]) as runner:
        assert torch.equal(runner(rows(7)), rows(7))


def test_an_untraced_forward_is_tried_at_more_row_counts() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (x.shape[0] in (4, 5))

    config = make_config("full", [8])
    config.partition.strategy = Strategy.BREAKABLE
    with pytest.raises(VerifyError, match="computes with their number"):
        pcgsvc.build_runner(Branch().eval(), rows(6), dynamic_dims={"x": 0}, config=config)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.uint16, torch.uint64])
@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_inputs_of_dtypes_that_torch_cannot_compare(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2j if x.is_complex() else x.to(torch.int32) + 1

    example = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    with build(forward, example, sizes=[1, 4]) as runner:
        for num in (1, 3, 4):
            assert torch.equal(runner(example[:num]), forward(example[:num]))


class Clock(torch.nn.Module):
    ticks: torch.Tensor

    def __init__(self, masked: bool, start: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.masked = masked
        self.register_buffer("ticks", torch.tensor(start, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ticks.add_(pcgsvc.true_rows(x).sum() if self.masked else x.shape[0])
        return x * 2


@pytest.mark.parametrize(("start", "dtype"), [(1.7e9, torch.float64), (1e5, torch.float32)])
def test_padding_rows_that_a_large_count_gets_are_found(start: float, dtype: torch.dtype) -> None:
    with pytest.raises(VerifyError, match=r"reach the model's state \['ticks'\]"):
        build(Clock(False, start, dtype).eval(), rows(6), sizes=[4, 8])
    clock = Clock(True, start, dtype).eval()
    with build(clock, rows(6), sizes=[4, 8]) as runner:
        runner(rows(3))
    assert clock.ticks == start + 3


class Slots(torch.nn.Module):
    """Writes to rows of its cache by number; 0 is that of padding, or the last row."""

    def __init__(self, masked: bool = False, reads: bool = False, dtype: Any = None) -> None:
        super().__init__()
        self.masked, self.reads = masked, reads
        self.register_buffer("cache", torch.zeros(17, WIDTH, dtype=dtype))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if self.masked:
            slots = torch.where(pcgsvc.true_rows(x), slots, 16)
        self.cache.index_copy_(0, slots, (x * 4).to(self.cache.dtype))
        kept = self.cache[slots] * 2
        return kept + self.cache[0].sum() * 1e-6 if self.reads else kept


def slots_apart(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    slots = 1 + torch.randperm(15, generator=generator)[:count]
    return {"x": torch.randn(count, WIDTH, generator=generator), "slots": slots}


def slotted(module: torch.nn.Module, **null_rows: Any) -> pcgsvc.Runner:
    return pcgsvc.build_runner(
        module.eval(),
        slots_apart(3, torch.Generator().manual_seed(0)),
        dynamic_dims={"x": 0, "slots": 0},
        make_inputs=slots_apart,
        config=make_config("full", [4, 8], null_rows=null_rows),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(("masked", "null"), [(False, 0), (True, -1)])
def test_padding_may_be_written_to_rows_of_state_that_nobody_reads(
    masked: bool, null: int, dtype: torch.dtype
) -> None:
    with pytest.raises(VerifyError, match=r"\['cache'\].*capture\.null_rows"):
        slotted(Slots(masked, dtype=dtype))
    module, alone = Slots(masked, dtype=dtype).eval(), Slots(masked, dtype=dtype).eval()
    with slotted(module, cache=[null]) as runner:
        for at, count in enumerate((3, 8, 1, 5)):
            given = slots_apart(count, torch.Generator().manual_seed(at))
            torch.testing.assert_close(runner(**given), plain(lambda g: alone(**g), given))
            assert torch.equal(module.cache[1:16], alone.cache[1:16])
        assert runner.stats()["fallbacks"] == []


def test_a_null_row_that_is_read_or_does_not_exist_is_named() -> None:
    with pytest.raises(VerifyError, match=r"reads rows of capture\.null_rows"):
        slotted(Slots(reads=True), cache=[0])
    with pytest.raises(VerifyError, match="padding rows reach the model's state"):
        slotted(Slots(), cache=[3])
    for wanted, words in (
        ({"cache": [17]}, "got [17] for 'cache', which has 17 rows; name some of -17 to 16"),
        ({"cache": "0"}, "got '0' for 'cache', which has 17 rows"),
        ({"cache": []}, "got [] for 'cache'"),
        ({"kv": [0]}, "the forward writes to no 'kv'; to ['cache']"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"capture.null_rows: {words}")):
            slotted(Slots(), **wanted)


def test_complex_rows_that_mix_are_found() -> None:
    with pytest.raises(VerifyError, match="mixes rows"):
        build(lambda x: x + x.abs().nanmean(0), rows(6).to(torch.complex64), sizes=[4, 8])


def refuses_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svd(x.view(-1, 2, 2) + 0.0)[1]


def refuses_large_values(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(9)[x[:, 0].long().abs()] + x[:, :1]


def test_an_operator_that_refuses_nan_is_checked_with_large_values() -> None:
    with build(refuses_nan, rows(6), sizes=[1, 4]) as runner:
        x = rows(3)
        torch.testing.assert_close(runner(x), refuses_nan(x))
    assert {row["padding"] for row in runner.report["verify"]} <= {None, "zeros", "large values"}


def test_an_operator_that_refuses_the_padding_is_told_and_the_way_out_works() -> None:
    with pytest.raises(VerifyError, match=r"does not take .*filled with large values.*index"):
        build(refuses_large_values, rows(6), sizes=[4, 8])

    def masked(x: torch.Tensor) -> torch.Tensor:
        return refuses_large_values(torch.where(pcgsvc.true_rows(x)[:, None], x, 1))

    with build(masked, rows(6), sizes=[4, 8]) as runner:
        x = rows(3)
        assert torch.equal(runner(x), refuses_large_values(x))


def test_an_op_that_goes_another_way_while_it_is_recorded_is_told_so() -> None:
    with pytest.raises(VerifyError, match=r"as roundings do.*torch\.linalg\.svdvals"):
        build(lambda x: torch.linalg.svdvals(x.view(-1, 2, 2)), rows(64), sizes=[64])


# -- what calls do: zeros, layouts, one tensor twice, no gradients --


def pads_like_zero_rows(x: torch.Tensor) -> torch.Tensor:
    return x + (x == 0).all(1).any() * 100.0


def nan_aware(x: torch.Tensor) -> torch.Tensor:
    return x - x.nanmean(0, keepdim=True)


def hides_zeros_and_nan(x: torch.Tensor) -> torch.Tensor:
    return x + x.nan_to_num(0.0).abs().amax(0)


class Counts(torch.nn.Module):
    count: torch.Tensor

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x[:, 0] <= 0  # false for NaN, and true for the zeros of a call
        self.count.add_((low & pcgsvc.true_rows(x) if self.masked else low).sum())
        return x * 2


@pytest.mark.parametrize(
    ("forward", "padding"),
    [
        (pads_like_zero_rows, "zeros"),
        (nan_aware, "zeros"),
        (hides_zeros_and_nan, "large values"),
        (Counts(masked=False).eval(), "zeros"),
    ],
)
def test_padding_that_one_kind_of_junk_would_hide_is_found_and_named(
    forward: Any, padding: str
) -> None:
    with pytest.raises(VerifyError, match=padding) as caught:
        build(forward, rows(6), sizes=[1, 4, 8])
    assert caught.value.report is not None
    found = {row["size"]: row for row in caught.value.report["verify"]}
    assert list(found) == [8, 4, 1]
    assert found[8]["padding"].endswith(padding)
    assert found[1]["padding"] is None
    assert found[1]["ok"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.where((x == 0).all(1, keepdim=True), x - 1, x * 2),
        lambda x: torch.nan_to_num(x) + 1,
        Counts(masked=True).eval(),
    ],
    ids=["zero rows kept", "nan_to_num", "masked count"],
)
def test_rows_that_look_at_themselves_alone_are_accepted(forward: Any) -> None:
    with build(forward, rows(6), sizes=[1, 4, 8]) as runner:
        for num in (1, 3, 6):
            x = rows(num).abs()
            assert torch.equal(runner(x), forward(x))
        assert not isinstance(forward, Counts) or forward.count == 0


def images(num: int) -> torch.Tensor:
    return torch.randn(num, 3, 4, 4).to(memory_format=torch.channels_last)


def asks_for_channels_last(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x * 3


def asks_for_strides(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.stride(0) < x.stride(-1) else x * 3


@pytest.mark.parametrize(
    ("forward", "example", "same", "other"),
    [
        (asks_for_channels_last, images(6), images(5), images(5).contiguous()),
        (asks_for_channels_last, images(6).contiguous(), images(5).contiguous(), images(5)),
        (asks_for_strides, rows(WIDTH).t(), torch.randn(WIDTH, 5).t(), rows(5)),
    ],
    ids=["channels_last", "contiguous", "transposed"],
)
def test_a_forward_that_asks_for_the_layout_gets_that_of_the_call(
    forward: Any, example: torch.Tensor, same: torch.Tensor, other: torch.Tensor
) -> None:
    with build(forward, example, sizes=[4, 8]) as runner:
        assert torch.equal(runner(same), forward(same))
        assert runner.stats()["fallbacks"] == []
        assert torch.equal(runner(other), forward(other))
        (fallback,) = runner.stats()["fallbacks"]
        assert "x: the memory layout is not the example's" in fallback["reason"]
        assert (fallback["num_tokens"], fallback["count"]) == (5, 1)


def test_a_forward_that_does_not_ask_takes_any_layout_and_keeps_the_example_s() -> None:
    with build(lambda x: x * 2, images(6), sizes=[4, 8]) as runner:
        for x in (images(5), images(5).contiguous(), images(12).contiguous()):
            result = runner(x)
            assert torch.equal(result, x * 2)
            assert result.is_contiguous(memory_format=torch.channels_last)
        (fallback,) = runner.stats()["fallbacks"]
        assert fallback["num_tokens"] == 12


def test_strides_that_depend_on_the_row_count_are_refused_by_their_name() -> None:
    def reads_memory(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((x.shape[0], 2), (3, 1)) + 0

    with pytest.raises(VerifyError, match=r"the memory layout of \['x'\]"):
        build(reads_memory, torch.randn(WIDTH, 6).t(), sizes=[4, 8])


def test_a_tensor_passed_twice_is_one_tensor_to_a_forward_that_asks() -> None:
    def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 if a is b else a + b * 3

    x, y = rows(3), rows(3)
    with build(same, (rows(6), rows(6)), {"a": 0, "b": 0}, sizes=[4, 8]) as runner:
        assert torch.equal(runner(x, y), same(x, y))
        assert runner.stats()["fallbacks"] == []
        assert torch.equal(runner(x, x), x * 2)
        (fallback,) = runner.stats()["fallbacks"]
        assert "one tensor is passed twice" in fallback["reason"]
    with build(lambda a, b: a + b * 3, (x, x), {"a": 0, "b": 0}, sizes=[4, 8]) as runner:
        assert torch.equal(runner(x, x), x + x * 3)
        assert runner.stats()["fallbacks"] == []


def two(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return x * 2, "two" if len(x) == 2 else "other"


def two_is_none(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return x * 2, None if len(x) == 2 else x + 1


def two_is_computed(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return x * 2, x * 3 if len(x) == 2 else x


def two_is_nested(x: torch.Tensor) -> Any:
    return [x * 2] if len(x) == 2 else (x * 2,)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (two, r"'two' as leaf 1 for x \[2, 4\], the program 'other' as leaf 1"),
        (two_is_none, "None as leaf 1 .* the program a tensor"),
        (two_is_computed, "a tensor as leaf 1 .* the program an input"),
        (two_is_nested, r"TreeSpec\(list.* TreeSpec\(tuple"),
    ],
)
def test_what_no_graph_gives_is_compared_at_each_captured_size(forward: Any, words: str) -> None:
    """`breakable` tries the row counts 8, 7 and 1; a trace has a guard for 2."""
    config = make_config(sizes=[1, 2, 8])
    config.partition.strategy = Strategy.BREAKABLE
    with pytest.raises(VerifyError, match=words):
        pcgsvc.build_runner(forward, rows(3), dynamic_dims={"x": 0}, config=config)
    with build(forward, sizes=[1, 2, 8]) as runner:
        for count in (1, 2, 3, 8):
            (got, tree), (wanted, same) = (
                flatten(runner(rows(count))),
                flatten(forward(rows(count))),
            )
            assert tree == same
            assert all(
                torch.equal(a, b) if torch.is_tensor(b) else a == b
                for a, b in zip(got, wanted, strict=True)
            )


def test_a_word_for_one_row_is_not_that_for_several() -> None:
    """Dynamo takes the row count for at least 2 without a guard."""
    with build(lambda x: (x * 2, "one" if len(x) == 1 else "many"), sizes=[1, 4]) as runner:
        assert [runner(rows(count))[1] for count in (1, 2, 4, 1)] == ["one", "many", "many", "one"]


def test_a_flag_of_the_trace_that_is_returned_is_refused() -> None:
    with pytest.raises(VerifyError, match=r"False as leaf 1 .*, the program True"):
        build(lambda x: (x * 2, torch.compiler.is_compiling()), sizes=[4])


def test_a_call_that_needs_the_module_itself_is_an_error_under_on_uncovered_error() -> None:
    with build(asks_for_channels_last, images(6), sizes=[4, 8], on_uncovered="error") as runner:
        runner(images(5))
        with pytest.raises(UncoveredError, match="memory layout"):
            runner(images(5).contiguous())


def test_a_forward_that_asks_for_the_grad_mode_runs_as_under_no_grad() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if torch.is_grad_enabled() else x * 2

    x = rows(3)
    with torch.enable_grad(), build(forward, rows(6), sizes=[4]) as runner:
        for call in (x, rows(9)):
            assert torch.equal(runner(call), call * 2)
            assert not runner(call.requires_grad_()).requires_grad


def test_a_step_has_the_spread_of_its_runs_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = iter([9.0] + 6 * [1.0] + [1.0, 1.0, 2.0, 2.0, 6.0, 6.0])  # first, apart, runs
    clock = [0.0]

    def call() -> None:
        clock[0] += next(costs)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    times = timing.time_calls([call], lambda: None, 6, float("inf"))
    assert times == pytest.approx((1e6, 2e6, 1e6, 6e6))
    costs = iter([1.0, 1.0, 1.0])
    assert timing.time_calls([call], lambda: None, 1) == pytest.approx((1e6, 1e6, 1e6, 1e6))
