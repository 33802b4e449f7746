"""Choosing sizes: forecasts against real dispatch, costs from reports, curve and knee."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pcgsvc.capture.plan import wanted_entries
from pcgsvc.config import Config, Mode, SizingConfig, from_dict, resolve, validate
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.preflight import check
from pcgsvc.jobs.sizes import general_lens, sample
from pcgsvc.ops.modes import Resolution
from pcgsvc.ops.support import Support
from pcgsvc.report import sizes_plot
from pcgsvc.report.sizes_plot import draw_calls
from pcgsvc.serve.dispatch import DispatchTable
from pcgsvc.sizing.choice import SizePlan, plan_sizes
from pcgsvc.sizing.cost import StepCost, measured, modelled
from pcgsvc.sizing.expect import Forecast, Service, service_of
from pcgsvc.sizing.resolve import plan_for, with_sizes
from pcgsvc.sizing.traffic import Traffic, make_traffic

BOTH = Service(decode=Mode.FULL, mixed=Mode.PIECEWISE, query_len=1)
ROWS = modelled(0.0, 1.0)


def traffic_of(general: dict[int, int], uniform: dict[int, int] | None = None) -> Traffic:
    calls = {(n, False): c for n, c in general.items()}
    return make_traffic("t.csv", calls | {(n, True): c for n, c in (uniform or {}).items()})


def random_traffic(rng: random.Random, query_len: int, most: int = 40) -> Traffic:
    general = {rng.randint(1, most): rng.randint(1, 9) for _ in range(rng.randint(1, 12))}
    uniform = {
        rng.randint(1, most // query_len) * query_len: rng.randint(1, 9)
        for _ in range(rng.randint(1, 12))
    }
    return traffic_of(general, uniform)


def bimodal() -> Traffic:
    """Decode batches around 24 requests, and prefills around 380 tokens."""
    rng = random.Random(1)
    uniform = [min(96, max(1, int(rng.gauss(24, 8)))) for _ in range(9000)]
    general = [min(512, max(2, int(rng.gauss(380, 60)))) for _ in range(1000)]
    count = {n: general.count(n) for n in general}
    return traffic_of(count, {n: uniform.count(n) for n in uniform})


def plan(
    traffic: Traffic,
    service: Service = BOTH,
    *,
    cost: StepCost = ROWS,
    max_size: int | None = None,
    **sizing: Any,
) -> SizePlan:
    return plan_sizes(traffic, service, cost, SizingConfig(**sizing), max_size=max_size)


# ---- forecast ------------------------------------------------------------------------------------

SERVED = [m for m in Mode if m is not Mode.NONE]


@pytest.mark.parametrize(
    ("mode", "query_len", "max_reqs"), [*itertools.product(Mode, (1, 3), (None, 5))]
)
def test_a_forecast_is_what_dispatch_does(mode: Mode, query_len: int, max_reqs: int | None) -> None:
    """In every second traffic, calls of thousands of rows: some are too far from their size."""
    for seed in range(30):
        rng, scale, max_padding = random.Random(seed), (1, 100)[seed % 2], 1 + seed % 4
        traffic = random_traffic(rng, query_len, most=40 * scale).as_dispatched(query_len)
        sizes = sorted(rng.sample(range(1, 50 * scale), rng.randint(1, 8)))
        resolution = Resolution(requested=mode, resolved=mode)
        table = DispatchTable(
            resolution,
            wanted_entries(resolution, sizes, query_len),
            uniform_query_len=query_len,
            max_padding=max_padding,
            max_reqs=max(sizes) if max_reqs is None else max_reqs,
            skipped={},
        )
        padded = uncovered = time = 0
        for uniform, calls in ((False, traffic.general), (True, traffic.uniform)):
            for rows, count in calls.items():
                found = table.find(rows, rows // query_len if uniform else 1, uniform)
                runs = rows if found is None else found[1].num_tokens
                padded += count * (runs - rows)
                uncovered += 0 if found else count
                time += count * (10 + runs)
        service = Service(
            decode=resolution.decode,
            mixed=resolution.mixed,
            query_len=query_len,
            max_reqs=max_reqs,
            max_padding=max_padding,
        )
        got = Forecast(traffic, service, modelled(10.0, 1.0)).of(sizes)
        assert got.uncovered == uncovered
        assert got.padding_share == padded / (traffic.num_rows + padded)
        assert got.step_us == pytest.approx(time / traffic.num_calls)


def test_what_serves_is_the_mode_as_the_boundaries_allow() -> None:
    config = Config(mode=Mode.FULL)
    assert service_of(config, Support.ALWAYS).modes == [Mode.FULL]
    assert service_of(config, Support.NEVER).modes == [Mode.PIECEWISE]
    assert service_of(config, Support.UNIFORM_BATCH).own_uniform
    assert service_of(config, None).modes == [Mode.FULL]


# ---- choice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("mode", SERVED)
def test_chosen_sizes_are_the_best_of_all_sets_of_sizes_there_are(seed: int, mode: Mode) -> None:
    """Of every set of up to 3 sizes that covers what can be covered, also between row counts."""
    rng = random.Random(seed)
    traffic = random_traffic(rng, 1, most=14)
    resolution = Resolution(requested=mode, resolved=mode)
    service = Service(decode=resolution.decode, mixed=resolution.mixed, query_len=1)
    cost = modelled(float(rng.randint(0, 5)), 1.0)
    found = plan(traffic, service, cost=cost)
    forecast = Forecast(traffic.as_dispatched(1), service, cost)
    largest = found.points[0].sizes[-1]
    for point in found.points[:3]:
        others = itertools.combinations(range(1, largest), point.count - 1)
        best = min(forecast.of([*chosen, largest]).step_us for chosen in others)
        assert point.step_us == pytest.approx(best, rel=1e-12)
    shares = [p.step_us for p in found.points]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("query_len", [2, 4])
@pytest.mark.parametrize("max_size", [None, 30])
def test_sizes_serve_uniform_batches_of_several_rows_a_request(
    query_len: int, max_size: int | None
) -> None:
    for seed in range(30):
        traffic = random_traffic(random.Random(seed), query_len)
        service = Service(decode=Mode.FULL, mixed=Mode.PIECEWISE, query_len=query_len)
        try:
            found = plan(traffic, service, max_size=max_size)
        except ConfigError:
            assert max_size is not None
            assert min(traffic.distinct) > max_size
            continue
        for point in found.points:
            if any(n <= (max_size or n) for n in traffic.uniform):
                assert all(size % query_len == 0 for size in point.sizes[:-1])
            assert max_size is None or point.sizes[-1] <= max_size
        forecast = Forecast(traffic, service, ROWS)
        assert forecast.of(found.chosen.sizes).uncovered == found.uncovered
        if max_size is None and len(found.points) > 2:
            largest = found.points[0].sizes[0]
            pairs = itertools.combinations(range(query_len, largest, query_len), 2)
            best = min(forecast.of([*pair, largest]).step_us for pair in pairs)
            assert found.points[2].step_us == pytest.approx(best, rel=1e-12)


def test_the_best_sizes_beat_powers_of_two_and_the_schedule_at_equal_number() -> None:
    found = plan(bimodal())
    for name, least in (("powers of two", 0.1), ("default schedule", 0.05)):
        other = found.others[name]
        equal = found.points[other.count - 1]
        assert equal.count == other.count
        assert other.padding_share - equal.padding_share > least
        assert equal.step_us < other.step_us
    assert found.others["powers of two"].sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_more_sizes_than_row_counts_are_fewer_sizes_and_said_so() -> None:
    found = plan(traffic_of({3: 5, 9: 1, 12: 2}))
    assert [p.count for p in found.points] == [1, 2, 3]
    assert found.points[-1].padding_share == 0
    assert found.notes == ["3 distinct sizes leave no padding, so the curve ends there, not at 64"]
    assert plan(traffic_of({3: 5, 9: 1}), count=10).chosen.sizes == [3, 9]


def test_the_knee_is_the_last_size_that_saves_enough() -> None:
    traffic = bimodal()
    for min_gain in (0.0, 0.001, 0.01, 0.1):
        found = plan(traffic, min_gain=min_gain)
        at = found.chosen.count - 1
        times = [p.step_us for p in found.points]
        saved = -np.diff(times) / found.no_padding_us
        assert np.all(saved[:at] >= min_gain)
        assert np.all(saved[at:] < min_gain)  # convex: nothing after it is worth more
    assert plan(traffic, count=3).chosen.count == 3


def test_calls_above_the_largest_size_are_left_out_and_told() -> None:
    found = plan(traffic_of({3: 5, 9: 1, 40: 2}), max_size=16)
    assert found.points[-1].sizes == [3, 9]
    assert found.uncovered == 2
    assert "2 of 8 calls (25.00%) run without a graph" in found.notes[-1]
    with pytest.raises(ConfigError, match=r"capture\.max_size=2 is below them all"):
        plan(traffic_of({3: 5}), max_size=2)
    decode_only = Service(decode=Mode.FULL, mixed=Mode.NONE, query_len=1)
    with pytest.raises(ConfigError, match=r"Mark uniform decode batches in the column uniform"):
        plan(traffic_of({3: 5}), decode_only)
    few = Service(decode=Mode.FULL, mixed=Mode.NONE, query_len=1, max_reqs=2)
    with pytest.raises(ConfigError, match=r"Raise attention\.max_num_reqs=2"):
        plan(traffic_of({}, {3: 5}), few)


# ---- cost ----------------------------------------------------------------------------------------


def report_file(folder: Path, bench: list[dict[str, Any]], **more: Any) -> Path:
    path = folder / "report.json"
    mode = {"requested": "full_and_piecewise", "decode": "full", "mixed": "piecewise"}
    graphs = {"backend": "cuda", "sizes": [8, 64], "num_graphs": 20, "pool_bytes": 64 << 20}
    tree = {
        "schema": 1,
        "device": "cuda",
        "mode": mode,
        "bench": bench,
        "graphs": {**graphs, "device_bytes": 84 << 20},
    }
    path.write_text(json.dumps({**tree, **more}))
    return path


def bench_rows(mode: str, times: dict[int, float]) -> list[dict[str, Any]]:
    return [{"mode": mode, "size": s, "step_us": t, "plain_us": 2 * t} for s, t in times.items()]


def test_measured_costs_are_interpolated_and_never_fall(tmp_path: Path) -> None:
    bench = bench_rows("full", {8: 100, 16: 140, 32: 120, 64: 200})
    bench += bench_rows("piecewise", {8: 300, 64: 860})
    cost = measured(report_file(tmp_path, bench), [Mode.FULL, Mode.PIECEWISE])
    full, piecewise = cost.graphs[Mode.FULL], cost.graphs[Mode.PIECEWISE]
    assert full.at([1, 8, 12, 16, 32, 48, 64, 96]).tolist() == [
        100,
        100,
        115,
        130,  # 140 and 120 are noise about their mean
        130,
        165,
        200,
        270,
    ]
    assert piecewise.at([9, 65]).tolist() == [310, 870]
    assert cost.measured == (8, 64)
    notes = plan(traffic_of({2: 1, 100: 1}), cost=cost).notes
    assert any("above 64 rows are extrapolated" in n for n in notes)
    assert any("below 8 rows" in n for n in notes)
    assert cost.noise == pytest.approx(10 / 120)
    assert any("were moved by up to 8%" in n for n in notes)
    steady = measured(report_file(tmp_path, bench), [Mode.PIECEWISE])
    assert steady.noise == 0


def test_memory_follows_the_largest_size_and_the_number_of_graphs(tmp_path: Path) -> None:
    path = report_file(tmp_path, bench_rows("full", {8: 1, 64: 2}))
    memory = measured(path, [Mode.FULL]).memory
    assert memory is not None
    assert memory.at([8, 64]) == 84 << 20
    assert memory.at([32]) == (32 << 20) + (10 << 20)
    assert memory.graphs([1, 2, 3]) == 30
    graphs = {"backend": "recorded", "sizes": [8, 64], "num_graphs": 4, "pool_bytes": 720}
    path = report_file(
        tmp_path, bench_rows("full", {8: 1, 64: 2}), graphs={**graphs, "device_bytes": 0}
    )
    memory = measured(path, [Mode.FULL]).memory
    assert memory is not None
    assert memory.at([1, 2]) == 30


def test_flat_costs_need_one_size_and_dear_rows_need_more(tmp_path: Path) -> None:
    """Padding that costs nothing is no reason for a graph: what is least is time, not rows."""
    bench = bench_rows("full", {1: 100, 64: 100}) + bench_rows("piecewise", {1: 100, 64: 6400})
    cost = measured(report_file(tmp_path, bench), [Mode.FULL, Mode.PIECEWISE])
    uniform = {n: 10 for n in range(2, 65)}
    assert plan(traffic_of({}, uniform), cost=cost).chosen.sizes == [64]
    assert plan(traffic_of(uniform), cost=cost).chosen.count > 5
    assert cost.graphs[Mode.FULL].at([128]).tolist() == [100]
    pooled = {1: 100, 32: 300, 64: 300}  # a flat end must not make larger sizes free
    steep = measured(report_file(tmp_path, bench_rows("full", pooled)), [Mode.FULL])
    assert steep.graphs[Mode.FULL].at([127]).tolist() == [500]
    (sizes,) = [p.sizes for p in plan(traffic_of({}, uniform), cost=cost).points if p.count == 3]
    assert sizes == [22, 43, 64]  # where time is flat, padding decides
    mixed = plan(traffic_of({60: 10, 64: 1}, {n: 10 for n in range(2, 30)}), cost=cost)
    assert mixed.points[1].sizes == [60, 64]  # the dear kind gets the second size


BAD_COST = {
    "nothing": ({"bench": []}, "has no bench rows"),
    "schema": ({"schema": 2}, "has schema 2; a report.json of schema 1 is needed"),
    "one size": ({"bench": bench_rows("full", {8: 1})}, "has bench rows of 1 of full; two sizes"),
    "half a mode": (
        {"graphs": {"sizes": [8], "backend": "cuda"}},
        "graphs: KeyError: 'pool_bytes'",
    ),
    "no number": (
        {"bench": [{"mode": "full", "size": 8, "step_us": "x", "plain_us": 1}]},
        "bench[0].step_us: got 'x', a number above 0",
    ),
}


@pytest.mark.parametrize("case", BAD_COST)
def test_a_report_that_tells_no_cost_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = BAD_COST[case]
    tree: dict[str, Any] = {"bench": bench_rows("full", {8: 1, 16: 2}), **changes}
    with pytest.raises(ConfigError) as raised:
        measured(report_file(tmp_path, **tree), [Mode.FULL])
    assert str(raised.value).startswith("sizing.cost: '")
    assert message in str(raised.value)
    with pytest.raises(ConfigError, match=r"nowhere.json' cannot be read"):
        measured(tmp_path / "nowhere.json", [Mode.FULL])


# ---- config --------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "t.csv"
    path.write_text("num_tokens,count,uniform\n3,5,true\n9,2,false\n12,1,false\n80,1,false\n")
    return str(path)


def test_auto_sizes_become_a_list_before_validation(file: str) -> None:
    config = from_dict({"capture": {"sizes": f"auto:{file}"}, "sizing": {"count": 3}})
    assert from_dict({"capture": {"sizes": f" auto: {file} "}}).capture.sizes == f"auto:{file}"
    out, found = with_sizes(config)
    assert config.capture.sizes == f"auto:{file}"
    assert found is not None
    assert out.capture.sizes == found.chosen.sizes == [3, 12, 80]
    resolved = resolve(out, device_type="cpu")
    validate(resolved, device_type="cpu")
    assert resolved.capture.max_size == 80
    assert with_sizes(out) == (out, None)


def test_auto_sizes_respect_the_largest_size_and_serve_any_mode(file: str) -> None:
    for mode in ("none", "piecewise", "full", "full_and_piecewise"):
        tree = {"mode": mode, "capture": {"sizes": f"auto:{file}", "max_size": 10}}
        out, found = with_sizes(from_dict(tree))
        assert out.capture.sizes == [3, 9], mode
        assert found is not None
        assert found.uncovered == 2
    tree = {"mode": "full_decode_only", "capture": {"sizes": f"auto:{file}"}}
    assert with_sizes(from_dict(tree))[0].capture.sizes == [3]


BAD = {
    "no file": ({"capture": {"sizes": "auto:"}}, r"^capture\.sizes: got 'auto:', a traffic file"),
    "gone": ({"capture": {"sizes": "auto:/no.csv"}}, r"^capture\.sizes: '/no\.csv' does not exist"),
    "below": (
        {"capture": {"sizes": "auto:FILE", "max_size": 2}},
        r"^traffic: .*capture\.max_size=2 is below them all",
    ),
    "no count": (
        {"capture": {"sizes": "auto:FILE"}, "sizing": {"max_count": 0}},
        r"max_count: got",
    ),
    "no rows": ({"capture": {"sizes": "auto:FILE", "uniform_query_len": 0}}, r"query_len: got 0"),
    "odd rows": (
        {"capture": {"sizes": "auto:FILE", "uniform_query_len": 2}},
        r"uniform calls of 3 rows, which is no multiple of capture\.uniform_query_len=2",
    ),
    "gain": ({"sizing": {"min_gain": 2.0}}, r"^sizing\.min_gain: got 2\.0, at most 1"),
    "free rows": ({"sizing": {"row_us": 0.0}}, r"^sizing\.row_us: got 0\.0, a number above 0"),
    "two costs": ({"sizing": {"cost": "r.json", "row_us": 2.0}}, r"leave one of them out"),
    "cost": (
        {"capture": {"sizes": "auto:FILE"}, "sizing": {"cost": "/no.json"}},
        r"^sizing\.cost: '/no\.json' cannot be read",
    ),
    "no traffic": ({"job": "sizes"}, r"^traffic: job=sizes needs a traffic file"),
    "nothing captured": ({"job": "sizes", "traffic": "FILE", "mode": "none"}, r"^mode: got 'none'"),
    "not replayed": ({"job": "plan", "traffic": "FILE"}, r"^traffic: job=plan does not read it"),
    "replayed": ({"traffic": "/no.csv"}, r"^traffic: '/no\.csv' does not exist"),
    "replayed rows": (
        {"traffic": "FILE", "capture": {"uniform_query_len": 2}},
        r"^traffic: .*uniform calls of 3 rows",
    ),
    "other sizes": (
        {"compiler": {"specialize_sizes": ["auto:x"]}},
        r"^compiler\.specialize_sizes: got",
    ),
}


def filled(tree: Any, file: str) -> Any:
    if isinstance(tree, dict):
        return {k: filled(v, file) for k, v in tree.items()}
    return tree.replace("FILE", file) if isinstance(tree, str) else tree


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_chosen_is_refused_before_building(case: str, file: str) -> None:
    tree, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        check(from_dict({"device": "cpu", **filled(tree, file)}))


def test_a_report_of_the_same_mode_says_what_serves(file: str, tmp_path: Path) -> None:
    mode = {"requested": "full_and_piecewise", "decode": "piecewise", "mixed": "piecewise"}
    path = report_file(tmp_path, bench_rows("piecewise", {8: 1, 64: 2}), mode=mode)
    tree: dict[str, Any] = {"traffic": file, "sizing": {"cost": str(path)}}
    assert plan_for(from_dict(tree), {}).service.modes == [Mode.PIECEWISE]
    with pytest.raises(ConfigError, match="of 2 of piecewise; two sizes or more of full are"):
        plan_for(from_dict({**tree, "mode": "full"}), {})
    path = report_file(tmp_path, bench_rows("piecewise", {8: 1, 64: 2}), mode={**mode, "mixed": 1})
    with pytest.raises(ConfigError, match="mode: ValueError: 1 is not a valid Mode"):
        plan_for(from_dict(tree), {})


# ---- replayed calls ------------------------------------------------------------------------------


def test_all_calls_are_replayed_or_an_even_share_of_them() -> None:
    traffic = traffic_of({3: 6, 9: 30}, {2: 4})
    everything = sample(traffic, 2000)
    assert {c: everything.count(c) for c in everything} == {
        (3, False): 6,
        (9, False): 30,
        (2, True): 4,
    }
    half = sample(traffic, 20)
    assert [half.count(c) for c in ((3, False), (9, False), (2, True))] == [3, 15, 2]
    flat = sample(traffic_of({n: 1 for n in range(1, 1001)}), 10)
    assert [n for n, _ in flat] == list(range(51, 1000, 100))
    assert len(sample(traffic_of({5: 10**15}), 7)) == 7


@pytest.mark.parametrize("query_len", [1, 2, 3])
def test_general_calls_are_made_of_requests_that_are_not_all_uniform(query_len: int) -> None:
    for rows, longest in itertools.product(range(2, 40), (query_len + 1, 7, 100)):
        lens = general_lens(rows, query_len, longest)
        assert sum(lens) == rows
        assert 1 <= min(lens) <= max(lens) <= longest
        assert {*lens} != {query_len}
        assert len(lens) <= -(-rows // longest) + 1


# ---- the picture ---------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [64, 512, 8191])
def test_bars_cover_as_many_row_counts_each_and_add_up_to_the_calls(largest: int) -> None:
    from matplotlib.figure import Figure  # the GPU machine lacks it

    rng = random.Random(largest)
    calls = {rng.randint(1, largest): rng.randint(1, 9) for _ in range(100)} | {largest: 3}
    axes = Figure().subplots()
    draw_calls(axes, "decode", calls, [8, 16, largest])
    bars = [bar for bar in axes.patches if bar.get_height()]
    assert sum(bar.get_height() for bar in bars) == sum(calls.values())
    width = -(-largest // 200)
    for bar in bars:
        assert bar.get_width() == pytest.approx(width)
        assert bar.get_x() % 1 == pytest.approx(0.5)  # no row count is on an edge
        rows = range(round(bar.get_x() + 0.5), round(bar.get_x() + width + 0.5))
        assert bar.get_height() == sum(calls.get(n, 0) for n in rows)


def test_the_picture_has_a_panel_for_each_kind_of_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[int]] = {}
    monkeypatch.setattr(
        sizes_plot, "draw_calls", lambda axes, name, calls, sizes: drawn.update({name: list(calls)})
    )
    sizes_plot.draw_sizes(plan(bimodal()), tmp_path / "sizes.png")
    assert max(drawn["uniform decode"]) <= 96
    assert max(drawn["other calls"]) > 96
