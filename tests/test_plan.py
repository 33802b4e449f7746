"""`job=plan`: counts, hashes and memory as of a real build, without weights or a device."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from core_helpers import WIDTH, attended
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.config import Config, Job, resolve
from pcgsvc.config.compose import compose
from pcgsvc.config.devices import device_of, is_here
from pcgsvc.errors import ConfigError
from pcgsvc.events import Phases, Silent
from pcgsvc.forward.arguments import input_specs, resampler
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.forward.request import Planned, Request, arguments_of
from pcgsvc.jobs.plan import planner
from pcgsvc.jobs.plan.planner import Plan, plan
from pcgsvc.jobs.plan.pool import MIB, Event, Pool
from pcgsvc.jobs.plan.section import fold, plan_report, plan_section
from pcgsvc.jobs.plan.tracked import Tracked
from pcgsvc.jobs.preflight import check
from pcgsvc.jobs.run import run_job
from pcgsvc.models import catalog
from pcgsvc.report import plan_svg
from pcgsvc.report.plan_html import draw_plan

SMALL = ["model.num_layers=2", "capture.sizes=[1,4]", "device=cpu", "compiler=eager"]
NO_CUDA = pytest.mark.skipif(
    torch.cuda.is_available(), reason="is about machines without a CUDA device"
)


def planned(*overrides: str) -> Plan:
    return plan(compose(["job=plan", *overrides]), Silent())


def memory_of(done: Plan) -> dict[str, int]:
    return {item.name: item.num_bytes for item in done.memory.items}


def run_of(*overrides: str) -> dict[str, Any]:
    """Return the report of a real build."""
    with pcgsvc.load_runner(["bench.enabled=false", "cache.mode=off", *overrides]) as runner:
        return runner.report


# ---- counts and hashes ---------------------------------------------------------------------------


def test_a_plan_gives_the_pieces_and_hashes_of_a_build_without_any_weights() -> None:
    done = planned(*SMALL)
    module = done.request.bundle.module
    assert isinstance(module, nn.Module)
    tensors = [*module.parameters(), *module.buffers()]
    assert tensors
    assert not any(map(torch_private.has_memory, tensors))
    report, real = plan_report(done), run_of(*SMALL)
    assert report["partition"] == real["partition"]
    assert report["mode"] == real["mode"]
    assert done.graphs() == {
        "piecewise": {"entries": 2, "per_entry": 3, "graphs": 6},
        "full": {"entries": 2, "per_entry": 1, "graphs": 2},
    }
    assert real["graphs"]["by_mode"] == {"piecewise": 6, "full": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        SMALL,
        [*SMALL, "mode=piecewise"],
        [*SMALL, "mode=piecewise", "partition.strategy=breakable"],
        [*SMALL, "attention=varlen"],
        [*SMALL, "partition.splitting_ops=[]"],
        ["model=two_regions", "device=cpu", "capture.sizes=[1,2,8]"],
        ["model=two_regions", "device=cpu", "partition.strategy=breakable"],
    ],
    ids=" ".join,
)
def test_the_memory_estimate_is_what_a_recorded_build_takes(overrides: list[str]) -> None:
    done, real = planned(*overrides), run_of(*overrides)
    assert memory_of(done)["graph pool"] == real["graphs"]["pool_bytes"]
    graphs = {mode: g["graphs"] for mode, g in done.graphs().items()}
    assert graphs == real["graphs"]["by_mode"]


@pytest.mark.slow
def test_the_estimate_of_an_untraced_full_graph_leaves_nothing_out() -> None:
    words = [*SMALL, "mode=full", "partition.strategy=breakable"]
    estimated, real = memory_of(planned(*words))["graph pool"], run_of(*words)["graphs"]
    assert real["pool_bytes"] <= estimated <= 1.5 * real["pool_bytes"]


@pytest.mark.slow
def test_weights_buffers_and_cache_are_those_of_a_build() -> None:
    done = planned(*SMALL)
    with pcgsvc.load_runner([*SMALL, "cache.mode=off"]) as runner:
        workspace = runner.memory
        assert workspace.attention is not None
        cache = sum(t.nbytes for t in workspace.attention.kv_cache)
        buffers = sum(t.nbytes for t in workspace.buffers.values()) + workspace.step.num_bytes
        weights = sum(t.nbytes for t in workspace.tensors.values())
    sizes = memory_of(done)
    assert (sizes["weights"], sizes["static buffers"]) == (weights, buffers)
    assert sizes["KV cache"] == cache


def test_off_captures_nothing_and_the_plan_says_so() -> None:
    done = planned(*SMALL, "capture.graphs=off")
    assert done.graphs() == {}
    assert "graph pool" not in memory_of(done)


def test_sizes_chosen_for_traffic_are_planned(tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.csv"
    traffic.write_text("num_tokens,count\n3,9\n7,5\n40,2\n")
    done = planned("model.num_layers=2", f"capture.sizes=auto:{traffic}")
    assert done.capture.sizes == [3, 7, 40]


def test_a_plan_says_what_each_mode_would_become() -> None:
    section = plan_section(planned(*SMALL, "attention=varlen"))
    assert section["modes"]["full"]["resolved"] == "piecewise"
    assert section["modes"]["none"] == {"resolved": "none", "reasons": []}
    assert "attention=varlen supports no full graphs" in section["mode"]
    (row,) = section["support"]
    assert (row["op"], row["support"]) == ("pcgsvc::attention", "NEVER")
    assert row["said_by"] == "attention=varlen"


def test_a_mode_that_stays_says_who_allows_it() -> None:
    words = plan_section(planned(*SMALL))["mode"]
    assert words.startswith("full_and_piecewise stays as asked")
    assert "ALWAYS, by attention=paged" in words


def test_pieces_are_described_with_ops_borders_and_lines() -> None:
    section = plan_section(planned(*SMALL))
    kinds = section["kinds"]
    assert [k["kind"] for k in kinds] == ["region", "boundary", "region", "region"]
    assert [k["count"] for k in kinds] == [1, 2, 1, 1]
    assert kinds[1]["splitting"] == [{"op": "pcgsvc::attention", "count": 1}]
    assert all(sum(o["count"] for o in k["ops"]) == k["num_ops"] for k in kinds)
    assert any("llama.py:" in line for line in kinds[0]["code"])
    assert any("float32[s, 4, 16]" in words for words in kinds[0]["outputs"])


def test_a_forward_that_is_not_traced_is_said_to_be_run() -> None:
    done = planned(*SMALL, "partition.strategy=breakable")
    section = plan_section(done)
    assert any("nothing is traced" in note for note in section["notes"])
    assert section["weights_in_memory"] is False
    region = section["kinds"][0]
    assert {"aten::mm", "aten::mul"} <= {o["op"] for o in region["ops"]}
    assert not any(o["op"].startswith("prim::") for k in section["kinds"] for o in k["ops"])


# ---- devices -------------------------------------------------------------------------------------


@NO_CUDA
def test_a_gpu_can_be_planned_for_where_there_is_none() -> None:
    done = planned("model.num_layers=2", "device=cuda")
    config = done.request.config
    assert (config.dtype, config.capture.max_size) == ("bfloat16", 512)
    section = plan_section(done)
    assert (section["device"], section["traced_on"]) == ("cuda:0", "cpu")
    assert any("which this machine lacks" in note for note in section["notes"])
    assert "not on this machine" in plan_report(done)["device"]
    with pytest.raises(ConfigError, match="Use device=cpu"):
        device_of(compose(["device=cuda", "job=compile"]))


@NO_CUDA
def test_the_inductor_strategy_is_planned_with_the_boundaries_of_fx() -> None:
    done = planned("model.num_layers=2", "device=cuda", "partition.strategy=inductor")
    partition = plan_report(done)["partition"]
    assert (partition["num_regions"], partition["num_boundaries"]) == (3, 2)
    assert partition["num_unique_pieces"] == 3  # one artifact: no region is used twice
    assert done.graphs()["piecewise"]["per_entry"] == 3


@NO_CUDA
def test_a_backend_that_cannot_be_loaded_here_is_planned_by_its_cache() -> None:
    config = compose(["job=plan", "model.num_layers=2", "device=cuda", "attention=triton"])
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("triton is there, and can be loaded")
    check(config)
    done = plan(config, Silent())
    assert memory_of(done)["KV cache"] > 0
    assert any("attention=triton cannot be loaded" in note for note in done.planned.notes)


def test_a_device_that_is_here_is_here() -> None:
    assert is_here(torch.device("cpu"))
    assert is_here(torch.device("cuda", 0)) is torch.cuda.is_available()
    assert not is_here(torch.device("cuda", 99))


# ---- models that need values ---------------------------------------------------------------------


class ReadsAtStart(nn.Module):
    """Reads a value in its constructor, as drop-path rates are made."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = float(torch.linspace(0, 1, 5)[2].item())
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(self.up(x)) * self.rate


class Converted(nn.Module):
    """Is converted after it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.to(torch.bfloat16).to(torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(self.norm(self.up(x)))


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[nn.Module]], None]:
    """Return a function that makes `model=two_regions` build another module."""

    def put(kind: type[nn.Module]) -> None:
        def make(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
            return {"x": torch.randn(rows, WIDTH, generator=generator)}

        def build(*args: Any) -> ModelBundle:
            return ModelBundle(module=kind().eval(), make_inputs=make, dynamic_dims={"x": 0})

        family = catalog.families()["two_regions"]
        table = {"two_regions": catalog.Family(family.settings, family.validate, build)}
        monkeypatch.setattr(catalog, "families", lambda: table)

    return put


def test_a_constructor_that_reads_values_is_run_for_real_with_a_warning(family: Any) -> None:
    family(ReadsAtStart)
    done = planned("model=two_regions", "device=cpu", "mode=piecewise")
    section = plan_section(done)
    assert section["weights_in_memory"] is True
    (warning,) = [w for w in done.warnings if "weights in memory" in w]
    assert "its constructor needs them" in warning
    assert section["graphs"]["by_mode"]["piecewise"]["per_entry"] == 2
    with pytest.raises(ConfigError, match=r"strict=true.*weights in memory"):
        planned("model=two_regions", "device=cpu", "mode=piecewise", "strict=true")


def test_a_module_that_is_converted_needs_no_weights(family: Any) -> None:
    family(Converted)
    done = planned("model=two_regions", "device=cpu", "mode=piecewise")
    assert plan_section(done)["weights_in_memory"] is False
    assert memory_of(done)["weights"] == 4 * (WIDTH * WIDTH + 3 * WIDTH)


# ---- the pool ------------------------------------------------------------------------------------


def bench_pool_mib(*overrides: str) -> float:
    """Return the estimate for the model of `scripts/bench strategies` on CUDA."""
    path = Path(__file__).parents[1] / "scripts" / "bench_model.py"
    loader = importlib.machinery.SourceFileLoader("bench_script", str(path))
    module_spec = importlib.util.spec_from_loader("bench_script", loader)
    assert module_spec is not None
    script = importlib.util.module_from_spec(module_spec)
    sys.modules["bench_script"] = script  # Dynamo looks the forward's module up
    loader.exec_module(script)
    words = ["capture.sizes=[1,8,64,512]", "mode=piecewise", "device=cuda", "job=plan", *overrides]
    config = resolve(compose(words), device_type="cuda")
    fake = torch_private.fake_tensors()
    with fake, torch_private.swappable(fake):
        blocks = [script.Block(script.WIDTH).to(torch.bfloat16) for _ in range(script.LAYERS)]
        specs = input_specs({"input": torch.randn(4, script.WIDTH).bfloat16()}, {"input": 0})
    bundle = ModelBundle(
        module=nn.Sequential(*blocks).eval().requires_grad_(False),
        make_inputs=resampler(specs),
        dynamic_dims={"input": 0},
    )
    request = Request(
        config=config,
        device=torch.device("cpu"),
        bundle=bundle,
        inputs=specs,
        arguments=arguments_of(bundle, specs),
    )
    request.planned = Planned(target=torch.device("cuda:0"), fake=fake, notes=[], warnings=[])
    breakable = "partition.strategy=breakable" in overrides
    make = planner._probed if breakable else planner._traced
    with torch.no_grad(), fake:
        return memory_of(make(request, request.planned, Phases()))["graph pool"] / MIB


MEASURED = json.loads(
    (Path(__file__).parents[1] / "docs" / "results" / "bench-h200.json").read_text()
)["strategies"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "overrides", "estimate"),
    [
        # The buffer that `residual_add` gives a matrix product is not in the estimate.
        ("fx", ["compiler=inductor"], 22.0),
        ("inductor", ["compiler=inductor", "partition.strategy=inductor"], 22.0),
        # On the CPU's tensors an RMS norm is made of more ops than on CUDA's.
        ("breakable", ["compiler=eager", "partition.strategy=breakable"], 26.0),
    ],
)
def test_the_pool_estimate_is_near_what_an_h200_took(
    row: str, overrides: list[str], estimate: float
) -> None:
    assert bench_pool_mib(*overrides) == estimate
    assert estimate == pytest.approx(MEASURED[row]["memory_mib"]["pool"], rel=0.1, abs=0)


def test_small_and_large_blocks_come_from_segments_of_their_own() -> None:
    pool = Pool()
    pool.allocate("small", 1)
    assert pool.num_bytes == 2 * MIB
    pool.allocate("large", MIB + 1)
    assert pool.num_bytes == 22 * MIB
    pool.allocate("huge", 25 * MIB + 1)
    assert pool.num_bytes == (22 + 26) * MIB
    assert pool.peak == 1 + MIB + 1 + 25 * MIB + 1


def test_freed_neighbours_are_joined_and_used_again() -> None:
    pool = Pool()
    for key in range(4):
        pool.allocate(key, 5 * MIB)  # one segment of 20 MiB
    for key in (1, 2):
        pool.release(key)
    pool.allocate("joined", 9 * MIB)
    assert pool.num_bytes == 20 * MIB


@given(st.lists(st.integers(1, 3 * MIB), max_size=40), st.randoms(use_true_random=False))
def test_a_pool_never_grows_when_the_same_is_played_again(sizes: list[int], random: Any) -> None:
    events = [Event("alloc", at, size) for at, size in enumerate(sizes)]
    order = list(range(len(sizes)))
    random.shuffle(order)
    events += [Event("free", at) for at in order]
    pool = Pool()
    pool.play(events)
    before = pool.num_bytes
    assert before >= pool.peak == sum(sizes)
    pool.play(events)
    assert pool.num_bytes == before


def test_tracking_notes_when_memory_comes_and_goes() -> None:
    tracked = Tracked()
    with torch_private.fake_tensors(), tracked:
        a = torch.empty(8, 4)
        view = a[2:]
        del a
        b = view + 1
        del view
        b.mul_(2)
    assert [(e.kind, e.num_bytes) for e in tracked.events] == [
        ("alloc", 128),
        ("alloc", 96),
        ("free", 0),
    ]
    assert tracked.close()[-1].kind == "free"


# ---- folding -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=60))
def test_unfolding_gives_what_was_folded(keys: list[int]) -> None:
    unfolded: list[int] = []
    for stretch in fold(keys):
        unfolded += keys[stretch.first : stretch.first + stretch.length] * stretch.repeat
    assert unfolded == keys


@pytest.mark.parametrize(
    ("keys", "folded"),
    [
        ("", []),
        ("ABA", ["ABA"]),
        ("ABCBCBCBD", ["A", "3 BC", "BD"]),
        ("AAAA", ["4 A"]),
        ("ABABCCCCCC", ["2 AB", "6 C"]),
        ("XABCABCABCX", ["X", "3 ABC", "X"]),
    ],
)
def test_what_repeats_is_one_stretch(keys: str, folded: list[str]) -> None:
    words = []
    for s in fold(keys):
        pattern = keys[s.first : s.first + s.length]
        words.append(pattern if s.repeat == 1 else f"{s.repeat} {pattern}")
    assert words == folded


# ---- files ---------------------------------------------------------------------------------------


def report_of(config: Config, path: Path) -> dict[str, Any]:
    config.job, config.report = Job.PLAN, str(path)
    return run_job(config, path)


def test_files_lie_beside_the_report_and_say_what_it_says(
    tmp_path: Path,
    validate_report: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # the picture needs none
    report = report_of(compose([*SMALL, "model.num_layers=5"]), tmp_path / "report.json")
    validate_report(report)
    validate_report(tmp_path / "report.json")
    assert report["plan"]["files"] == {
        "html": str(tmp_path / "plan.html"),
        "svg": str(tmp_path / "plan.svg"),
    }
    picture = ElementTree.fromstring((tmp_path / "plan.svg").read_text())
    drawn = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "4 times" in drawn
    assert sum(t == "region" for t in drawn) == 3
    assert sum(t == "boundary" for t in drawn) == 2
    page = (tmp_path / "plan.html").read_text()
    assert "<b>4 times</b>" in page
    for words in ("pcgsvc::attention", "between two splitting ops", "KV cache", "stays as asked"):
        assert words in page
    assert "@media (prefers-color-scheme: dark)" in page
    for heading in ("times", "operators", "why", "calls in the graph", "graphs per size"):
        assert f'data-is="{heading}"' in page  # a phone shows it before the cell
    assert "src=" not in page
    assert "://" not in page  # nothing is fetched
    shown = capsys.readouterr().out
    assert str(tmp_path / "plan.svg") in shown
    assert "graphs    14: 12 piecewise (6 x 2 sizes) + 2 full (1 x 2 sizes); sizes 1 4" in shown


def test_a_report_of_another_name_has_files_of_that_name(tmp_path: Path) -> None:
    report_of(compose(["model=two_regions", "device=cpu"]), tmp_path / "mine.json")
    assert {p.name for p in tmp_path.iterdir()} == {"mine.json", "mine.html", "mine.svg"}


def test_words_of_a_model_cannot_become_markup(tmp_path: Path) -> None:
    report = report_of(compose(["model=two_regions", "device=cpu"]), tmp_path / "report.json")
    report["plan"]["kinds"][0]["reason"] = "<script>$x_1$ & more"
    draw_plan(report, tmp_path / "report.json")
    assert "<script>" not in (tmp_path / "plan.html").read_text()
    picture = ElementTree.fromstring((tmp_path / "plan.svg").read_text())
    texts = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "<script>$x_1$ & more" in texts


@pytest.mark.slow
@pytest.mark.exhaustive  # stress: time and memory at full size
def test_an_8b_model_is_planned_within_a_minute_and_4_gib(tmp_path: Path) -> None:
    words = ["job=plan", "model=llama", "model.preset=8b", "device=cpu", "report=r.json"]
    code = (
        "import resource, sys\n"
        "from pcgsvc.jobs.app import main\n"
        "code = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('USED', used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    seconds, peak = map(float, done.stdout.split("USED")[1].split())
    assert seconds <= 60  # of the processor: the machine may be shared
    assert peak <= 4 << 30
    report = json.loads((tmp_path / "r.json").read_text())
    partition = report["partition"]
    assert partition["num_boundaries"] == 32
    assert partition["num_regions"] == 33
    assert partition["num_unique_pieces"] == 3
    assert report["plan"]["weights_in_memory"] is False
    assert {"repeat": 31, "kinds": [1, 2]} in report["plan"]["sequence"]


def boxes_of(*stretches: tuple[int, int]) -> list[plan_svg.Cell]:
    """Return boxes of stretches, each (length, repeat)."""
    plan_ = {"sequence": [{"kinds": [0] * n, "repeat": r} for n, r in stretches]}
    return plan_svg.cells(plan_)


@pytest.mark.parametrize(
    ("stretches", "rows"),
    [
        ([(3, 1)], [0] * 3),
        ([(10, 1)], [0] * 8 + [1] * 2),
        ([(6, 1), (4, 9)], [0] * 6 + [1] * 4),  # what repeats stays together
        ([(2, 1), (4, 9), (3, 1)], [0] * 8 + [1]),
        ([(1, 1), (12, 2)], [0] + [1] * 8 + [2] * 4),  # longer than any row
    ],
)
def test_boxes_fill_rows_and_repetitions_are_not_torn(
    stretches: list[tuple[int, int]], rows: list[int]
) -> None:
    assert [row for row, _ in plan_svg._places(boxes_of(*stretches))] == rows


def test_a_budget_that_the_pool_passes_is_told() -> None:
    done = planned(*SMALL, "capture.memory_budget=1000")
    assert any("passes capture.memory_budget=1000 bytes" in n for n in done.memory.notes)
    done = planned(*SMALL, "capture.memory_budget=1GiB")
    assert not any("memory_budget" in n for n in done.memory.notes)
