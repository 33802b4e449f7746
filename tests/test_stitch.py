"""Stitched replay without a GPU: what is planned, what is patched into what, and what falls back.

Launches are Python functions here (`RecordedComposer`); `test_cuda_driver.py` has the driver's
calls, `gpu/test_stitch_gpu.py` the device.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, build, make_config, rows, verified
from model_helpers import make_context
from torch import nn

import pcgsvc
from pcgsvc.capture import stitch
from pcgsvc.capture.capture import make_engine
from pcgsvc.capture.recorded import RecordedComposed, RecordedComposer, RecordedNode
from pcgsvc.capture.sources import Boundary, Comparison, UnstitchableError
from pcgsvc.config import Replay
from pcgsvc.cuda_driver import DriverError, Launch
from pcgsvc.errors import CaptureError, ConfigError
from pcgsvc.ops.context import use_context

NOTED: list[Any] = []
"""What ran, was planned, or was told to a node, in order."""


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    NOTED.clear()
    yield
    NOTED.clear()


# ---- ops and models ------------------------------------------------------------------------------


def double(grid: tuple[int, int, int], x: torch.Tensor, out: torch.Tensor, total: int) -> None:
    out[: grid[0]] = x[: grid[0]] * 2 + total
    out[grid[0] :].zero_()


def plan(context: pcgsvc.ForwardContext, x: torch.Tensor, out: torch.Tensor) -> list[Launch]:
    NOTED.append("plan")
    total = sum(context.seq_lens_host)
    return [Launch(double, (context.num_tokens, 1, 1), (1, 1, 1), 0, (x, out, total))]


@pcgsvc.splitting_op(
    "stitched::planned", mutates_args=("out",), zeroes_padding=True, plan_launches=plan
)
def planned(x: torch.Tensor, out: torch.Tensor) -> None:
    context = pcgsvc.current_context()
    double((context.num_tokens, 1, 1), x, out, sum(context.seq_lens_host))


@pcgsvc.splitting_op("stitched::python", mutates_args=("out",))
def python(x: torch.Tensor, out: torch.Tensor) -> None:
    NOTED.append("python")
    out.copy_(x * sum(pcgsvc.current_context().seq_lens_host))


class Layers(nn.Module):
    """linear - op, with a residual."""

    def __init__(self, *ops: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ops = ops
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ops)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for op, linear in zip(self.ops, self.linears, strict=True):
            q = linear(x)
            if op == "fresh":
                out = torch.ops.toy.fresh(q)
            else:
                out = torch.empty_like(q)
                getattr(torch.ops.stitched, op)(q, out)
            x = torch.tanh(x + out)
        return x


def entries(runner: pcgsvc.Runner) -> list[Any]:
    return list(runner.table.entries.values())


# ---- built models --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fx", "breakable"])
def test_random_steps_equal_the_pieces_and_python_runs_once(strategy: str) -> None:
    ops = ("planned", "python", "planned", "planned", "python")
    words = ["mode=piecewise", "capture.sizes=[4,8]", "cache.mode=off", "compiler=eager"]
    words += [f"partition.strategy={strategy}", "device=cpu", "dtype=float32"]
    runners = [
        pcgsvc.build_runner(
            Layers(*ops),
            rows(3),
            dynamic_dims={"x": 0},
            config=pcgsvc.load_config([*words, f"capture.replay={how}"]),
        )
        for how in ("pieces", "stitched")
    ]
    pieces, joined = runners
    assert [len(e.calls) for e in entries(pieces)] == [11, 11]
    assert [len(e.calls) for e in entries(joined)] == [1, 1]
    assert [e.num_graphs for e in entries(joined)] == [6, 6]  # what was captured stays the same
    rng = random.Random(0)
    for _ in range(60):
        lens = [rng.randint(1, 2) for _ in range(rng.randint(1, 4))]
        batch, x = pcgsvc.Batch(query_lens=lens), rows(sum(lens), seed=rng.randrange(99))
        wanted = pieces(x, batch=batch)
        NOTED.clear()
        assert torch.equal(joined(x, batch=batch), wanted)
        # Three boundaries are alike but for their addresses: one plan. Python runs for each.
        assert Counter(NOTED) == {"plan": 1, "python": 2}
    assert joined.stats()["in_pieces"] == []
    for runner in runners:
        runner.close()


def test_the_self_check_sees_what_calls_replay() -> None:
    with build(Layers("planned", "planned"), replay=Replay.STITCHED) as runner:
        assert all(row["ok"] for row in verified(runner))
        NOTED.clear()
        verified(runner)
        assert NOTED


def test_the_report_says_how_entries_are_replayed() -> None:
    cases = {
        (Replay.PIECES, "planned"): {"replay": "pieces", "reason": "capture.replay=pieces"},
        (Replay.AUTO, "planned"): {
            "replay": "pieces",
            "reason": "recorded graphs gain nothing by it",
        },
        (Replay.STITCHED, "planned"): {"replay": "stitched", "launches": 1},
        (Replay.STITCHED, "fresh"): {
            "replay": "stitched",
            "launches": 3,
            "reason": "toy::fresh stays outside: it returns tensors",
        },
    }
    for (how, op), wanted in cases.items():
        with build(Layers("planned", op, "planned"), sizes=[4], replay=how) as runner:
            assert runner.report["graphs"]["replay"] == [{"size": 4, **wanted}]


def test_full_graphs_are_not_replayed_in_another_way() -> None:
    with build(Layers("planned"), mode="full", sizes=[4], replay=Replay.STITCHED) as runner:
        (row,) = runner.report["graphs"]["replay"]  # the op is never inside: piecewise
        assert row["replay"] == "stitched"
    with build(nn.Linear(WIDTH, WIDTH).eval(), {"input": rows(3)}, {"input": 0}) as runner:
        assert runner.report["graphs"]["replay"] == []


def test_an_op_that_stays_outside_divides_the_entry_in_two(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Layers("planned", "planned", "fresh", "planned", "python")
    with caplog.at_level(logging.WARNING):
        runner = build(model, sizes=[4], replay=Replay.STITCHED)
    assert "toy::fresh stays outside: it returns tensors" in caplog.text
    with runner, build(model, sizes=[4], replay=Replay.PIECES) as pieces:
        assert [len(e.calls) for e in entries(runner)] == [3]
        for count in (1, 4, 3):
            assert torch.equal(runner(rows(count)), pieces(rows(count)))


def test_under_strict_an_op_that_stays_outside_is_an_error() -> None:
    with pytest.raises(CaptureError, match=r"replay=stitched is not done: toy::fresh stays"):
        build(Layers("planned", "fresh"), sizes=[4], replay=Replay.STITCHED, strict=True)


def test_outputs_and_state_are_the_same_under_poison_and_view() -> None:
    model = Layers("planned", "python")
    runner = build(model, replay=Replay.STITCHED, poison=True, outputs="view")
    with runner, build(model, replay=Replay.PIECES) as pieces:
        for count in (4, 7, 1, 8):
            assert torch.equal(runner(rows(count)), pieces(rows(count)))


def test_a_step_has_one_profiler_range(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["mode=piecewise", "capture.sizes=[4]", "cache.mode=off", "compiler=eager"]
    words += ["debug.profile_ranges=true", "capture.replay=stitched", "device=cpu"]
    config = pcgsvc.load_config([*words, "dtype=float32"])
    model = Layers("planned", "planned")
    with pcgsvc.build_runner(model, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
        with torch.profiler.profile(acc_events=True) as profile:
            runner(rows(4))
        names = [event.name for event in profile.events()]
        assert names.count("stitched") == 1


@pytest.mark.parametrize(
    ("how", "level"), [(Replay.STITCHED, "WARNING"), (Replay.AUTO, "INFO"), (Replay.PIECES, "INFO")]
)
def test_a_missing_driver_is_said_once_and_leaves_the_pieces(
    how: Replay, level: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def missing() -> Any:
        raise DriverError("it is not installed")

    monkeypatch.setattr("pcgsvc.capture.capture.find_driver", missing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    memory: Any = SimpleNamespace(stream=object(), device=torch.device("cuda", 0))
    with caplog.at_level(logging.INFO):
        engine = make_engine(memory, make_config(replay=how))
    said = [(record.levelname, record.message) for record in caplog.records]
    why = "it is not installed"
    words = f"capture.replay: pieces, and copies outside of graphs, since {why}"
    assert said == [(level, words)]
    assert engine.composer == why


# ---- what is patched into what -------------------------------------------------------------------


class NotingNode(RecordedNode):
    """Notes what it is told."""

    def set(self, launch: Launch) -> None:
        NOTED.append(("set", launch.grid, launch.args))
        super().set(launch)

    def change(self, grid: Any, args: Sequence[tuple[int, Any]]) -> None:
        if REFUSED:
            raise DriverError("no such patch")
        NOTED.append(("change", grid, list(args)))
        super().change(grid, args)

    def enable(self, enabled: bool) -> None:
        NOTED.append(("enable", enabled))
        super().enable(enabled)


REFUSED: list[bool] = []


class NotingComposed(RecordedComposed):
    """Of noting nodes; notes its replays."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = [NotingNode(p) if isinstance(p, Launch) else p for p in parts]
        self.nodes = [p for p in self._parts if isinstance(p, NotingNode)]

    def replay(self, *, patched: bool) -> None:
        NOTED.append(("replay", patched))
        super().replay(patched=patched)


class NotingComposer(RecordedComposer):
    """Notes what it joins; refuses to capture what `refuses` says."""

    def __init__(self, comparison: Comparison | None = None) -> None:
        self.is_timed, self._comparison = comparison is not None, comparison
        self.refuses: list[UnstitchableError] = []

    def compose(self, parts: Sequence[Any]) -> RecordedComposed:
        NOTED.append(("compose", [isinstance(part, Launch) for part in parts]))
        return NotingComposed(parts)

    def capture(self, run: Callable[[], Any]) -> Sequence[Launch]:
        if self.refuses:
            raise self.refuses[0]
        return super().capture(run)

    def compare(self, pieces: Any, stitched: Any, anew: Any) -> Any:
        anew()
        return self._comparison


class Steps:
    """Some boundaries between segments, whose launches the test decides."""

    def __init__(self, count: int = 1, **about: Any) -> None:
        self.launches: list[Launch] = [self.launch()]
        self.tensors = [torch.zeros(2) for _ in range(count)]
        self.ran: list[str] = []
        self.about = about

    def launch(self, *args: Any, grid: tuple[int, int, int] = (1, 1, 1), **more: Any) -> Launch:
        function = more.pop("function", self.kernel)
        return Launch(function, grid, (1, 1, 1), 0, args, **more)

    def kernel(self, grid: Any, *args: Any) -> None:
        self.ran.append("kernel")

    def plan(self, context: Any, x: torch.Tensor) -> list[Launch]:
        self.ran.append("plan")
        return self.launches

    def eager(self) -> None:
        self.ran.append("eager")

    def parts(self) -> list[Any]:
        found: list[Any] = [lambda: self.ran.append("segment")]
        for tensor in self.tensors:
            boundary = Boundary(
                name="test::op",
                step=self.eager,
                run=lambda: self.ran.append("python"),
                args=[tensor],
                kwargs={},
                plan=self.plan,
                why_not=None,
            )
            found += [replace(boundary, **self.about), lambda: self.ran.append("segment")]
        return found

    def join(self, composer: NotingComposer, *, auto: bool = False) -> stitch.Joined:
        with use_context(make_context(None, [2, 1])):
            joined = stitch.join([self.eager], self.parts(), composer, auto=auto)
        NOTED.clear()
        self.ran.clear()
        return joined


def step(joined: stitch.Joined) -> list[Any]:
    """Run one step, and return what was noted."""
    with use_context(make_context(None, [2, 1])):
        for one in joined.steps:
            one()
    found = list(NOTED)
    NOTED.clear()
    return found


def test_only_what_changed_is_patched() -> None:
    steps = Steps()
    steps.launches = [steps.launch(1, 2.0, steps.tensors[0])]
    joined = steps.join(NotingComposer())
    assert step(joined) == [("replay", False)]
    steps.launches = [steps.launch(1, 3.0, steps.tensors[0])]
    assert step(joined) == [("change", None, [(1, 3.0)]), ("replay", True)]
    assert step(joined) == [("replay", False)]
    steps.launches = [steps.launch(1, 3.0, steps.tensors[0], grid=(2, 1, 1))]
    assert step(joined) == [("change", (2, 1, 1), []), ("replay", True)]
    other = [steps.launch(1, 3.0, steps.tensors[0], function=steps.eager)]
    steps.launches = [other[0]._replace(function=lambda *args: None)]
    assert [said[0] for said in step(joined)] == ["set", "replay"]
    steps.launches = [steps.launches[0]._replace(shared=8)]
    assert [said[0] for said in step(joined)] == ["set", "replay"]
    steps.launches = [steps.launches[0]._replace(args=(1,))]
    assert [said[0] for said in step(joined)] == ["set", "replay"]


def test_values_that_compare_equal_but_are_other_bytes_are_patched() -> None:
    steps = Steps()
    steps.launches = [steps.launch(0.0, 1, float("nan"))]
    joined = steps.join(NotingComposer())
    steps.launches = [steps.launch(-0.0, True, float("nan"))]
    assert step(joined)[0] == ("change", None, [(0, -0.0), (1, True)])


def test_a_boundary_without_a_kernel_at_some_steps_is_left_out() -> None:
    steps = Steps()
    steps.launches = [steps.launch(1), steps.launch(2)]
    joined = steps.join(NotingComposer())
    both, one = steps.launches, steps.launches[:1]
    for launches, said in [
        (one, [("enable", False), ("replay", True)]),
        (one, [("replay", False)]),
        (both, [("enable", True), ("replay", True)]),
        ([], [("enable", False), ("enable", False), ("replay", True)]),
        ([steps.launch(1, grid=(1, 0, 1))], [("replay", False)]),  # launches nothing
        ([steps.launch(9)], [("change", None, [(0, 9)]), ("enable", True), ("replay", True)]),
    ]:
        steps.launches, steps.ran = launches, []
        assert step(joined) == said
        real = [launch for launch in launches if 0 not in launch.grid]
        assert steps.ran == ["plan", "segment", *["kernel"] * len(real), "segment"]


def test_more_kernels_than_ever_before_are_joined_anew() -> None:
    steps = Steps(2)
    steps.launches = []
    joined = steps.join(NotingComposer())
    steps.launches = [steps.launch(1), steps.launch(2)]
    composed = ("compose", [False, True, True, False, True, True, False])
    assert step(joined) == [composed, ("replay", False)]
    assert step(joined) == [("replay", False)]
    assert joined.fallbacks == {}


def test_boundaries_alike_share_a_plan_and_keep_their_tensors() -> None:
    steps, seen = Steps(3), list[torch.Tensor]()
    steps.plan = lambda context, x: [steps.launch(7, x)]  # type: ignore[method-assign]
    steps.kernel = lambda grid, count, x: seen.append(x)  # type: ignore[method-assign]
    joined = steps.join(NotingComposer())
    step(joined)
    assert [id(x) for x in seen] == [id(x) for x in steps.tensors]
    assert len(joined.stitched[0].sources) == 1


def test_boundaries_whose_plans_hold_addresses_do_not_share_them() -> None:
    steps = Steps(2)
    steps.plan = lambda context, x: [steps.launch(x.data_ptr())]  # type: ignore[method-assign]
    joined = steps.join(NotingComposer())
    assert len(joined.stitched[0].sources) == 2


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
def test_boundaries_of_other_shapes_do_not_share_a_plan(other: torch.Tensor) -> None:
    steps = Steps(2)
    steps.tensors[1] = other
    assert len(steps.join(NotingComposer()).stitched[0].sources) == 2


def test_a_tensor_that_is_no_argument_is_what_it_is_at_each_step() -> None:
    steps, workspace = Steps(), torch.zeros(4)
    steps.launches = [steps.launch(workspace)]
    composer = NotingComposer()
    composer.address = torch.Tensor.data_ptr  # type: ignore[assignment,method-assign]
    joined = steps.join(composer)
    assert step(joined) == [("replay", False)]
    workspace.set_(torch.ones(4))  # type: ignore[call-overload]
    assert step(joined)[0] == ("change", None, [(0, workspace.data_ptr())])


def test_a_fixed_plan_is_asked_for_once() -> None:
    steps = Steps(2)
    steps.launches = [steps.launch(1, fixed=True)]
    joined = steps.join(NotingComposer())
    for _ in range(3):
        steps.ran.clear()
        assert step(joined) == [("replay", False)]
        assert "plan" not in steps.ran


# ---- what falls back -----------------------------------------------------------------------------


def test_what_a_captured_op_launched_at_the_build_is_executed_there() -> None:
    steps = Steps(plan=None)
    with use_context(make_context(None, [2, 1])):
        stitch.join([], steps.parts(), NotingComposer(), auto=False)
    assert steps.ran == ["python"]
    steps, composer = Steps(plan=None), NotingComposer()
    composer.refuses = [UnstitchableError("it copies", lambda: steps.ran.append("once"))]
    with use_context(make_context(None, [2, 1])):
        joined = stitch.join([], steps.parts(), composer, auto=False)
    assert (steps.ran, joined.why) == (["once"], "test::op stays outside: it copies")


def test_an_op_whose_python_ran_in_a_step_that_does_not_fit_is_not_run_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps, composer = Steps(2, plan=None), NotingComposer()
    joined = steps.join(composer)
    run_once = UnstitchableError("it copies", lambda: steps.ran.append("once"))
    composer.refuses = [run_once]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            steps.ran.clear()
            assert step(joined) == []
            # The first op's kernels run once; the second op's Python had not run yet.
            assert steps.ran == ["segment", "once", "segment", "eager", "segment"]
    assert joined.fallbacks == {"test::op: it copies": 2}
    assert caplog.text.count("runs as its pieces, since test::op: it copies") == 1
    composer.refuses = []
    steps.ran.clear()
    step(joined)
    assert steps.ran == ["segment", "python", "segment", "python", "segment"]


def test_an_op_that_cannot_be_captured_at_a_later_step_replays_as_pieces_from_then_on() -> None:
    steps, composer = Steps(plan=None), NotingComposer()
    joined = steps.join(composer)
    composer.refuses = [UnstitchableError("it waits")]
    for counted in (1, 1, 1):
        steps.ran.clear()
        step(joined)
        assert steps.ran == ["segment", "eager", "segment"]
        assert joined.fallbacks == {"test::op: it waits": counted}
        composer.refuses = []


def test_a_plan_that_cannot_tell_once_runs_that_step_as_pieces() -> None:
    steps = Steps()
    joined = steps.join(NotingComposer())
    for unknown in (None, [None]):
        steps.launches = unknown  # type: ignore[assignment]
        assert step(joined) == []
    assert joined.fallbacks == {"test::op: its plan cannot tell its launches": 2}
    steps.launches = [steps.launch()]
    assert step(joined) == [("replay", False)]


def refused_at_its_second_step() -> tuple[Steps, Any]:
    """Return an entry whose patch for another launch was refused, so that nothing was replayed."""
    steps = Steps()
    steps.launches = [steps.launch(1)]
    joined = steps.join(NotingComposer())
    steps.launches = [steps.launch(2)]
    REFUSED.append(True)
    assert step(joined) == []
    REFUSED.clear()
    return steps, joined


def test_a_refused_patch_runs_that_step_as_pieces_and_sets_the_node_anew() -> None:
    _, joined = refused_at_its_second_step()
    assert joined.fallbacks == {"test::op: no such patch": 1}
    said = step(joined)
    assert said == [("set", (1, 1, 1), (2,)), ("enable", True), ("replay", True)]


def test_a_node_that_a_refused_patch_left_unknown_is_set_anew_though_it_is_left_out() -> None:
    steps, joined = refused_at_its_second_step()
    steps.launches = []
    assert step(joined) == [("set", (1, 1, 1), (1,)), ("enable", False), ("replay", True)]
    steps.launches = [steps.launch(2)]
    assert step(joined) == [("change", None, [(0, 2)]), ("enable", True), ("replay", True)]


def test_launches_with_and_without_unnamed_parameters_are_not_told_by_what_differs() -> None:
    steps = Steps()
    steps.launches = [steps.launch(1, 2)]
    joined = steps.join(NotingComposer())
    for args in ((1, ...), (1, 2)):
        steps.launches = [steps.launch(*args)]
        assert step(joined) == [("set", (1, 1, 1), args), ("replay", True)]


def test_an_interrupt_while_joining_anew_leaves_what_was_joined() -> None:
    steps, composer = Steps(), NotingComposer()
    joined = steps.join(composer)
    compose, few = composer.compose, steps.launches

    def interrupted(parts: Any) -> Any:
        raise KeyboardInterrupt

    composer.compose = interrupted  # type: ignore[method-assign]
    steps.launches = many = [steps.launch(1), steps.launch(2)]
    with pytest.raises(KeyboardInterrupt):
        step(joined)
    composer.compose = compose  # type: ignore[method-assign]
    steps.launches = few
    assert step(joined) == [("replay", False)]
    steps.launches = many
    assert [said[0] for said in step(joined)] == ["compose", "replay"]


def test_an_interrupt_while_nodes_are_bound_has_the_next_step_join_them_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    steps = Steps()
    joined = steps.join(NotingComposer())
    few = steps.launches
    with monkeypatch.context() as patched:
        patched.setattr(joined.stitched[0].sources[0], "composed", interrupted)
        steps.launches = [steps.launch(1), steps.launch(2)]
        with pytest.raises(KeyboardInterrupt):
            step(joined)
    NOTED.clear()
    steps.launches, steps.ran = few, []
    assert step(joined) == [("compose", [False, True, False]), ("replay", False)]
    assert step(joined) == [("replay", False)]
    assert steps.ran == ["plan", "segment", "kernel", "segment"] * 2


def test_a_device_that_refuses_to_join_anew_leaves_what_was_joined() -> None:
    steps, composer = Steps(), NotingComposer()
    joined = steps.join(composer)
    compose = composer.compose

    def refuse(parts: Any) -> Any:
        raise DriverError("no memory")

    few, many = steps.launches, [steps.launch(1), steps.launch(2)]
    composer.compose = refuse  # type: ignore[method-assign]
    for launches, said in [(many, []), (few, [("replay", False)]), (many, [])]:
        steps.launches = launches
        assert step(joined) == said
    assert joined.fallbacks == {"test::op: no memory": 2}
    composer.compose = compose  # type: ignore[method-assign]
    assert [said[0] for said in step(joined)] == ["compose", "replay"]


def test_a_device_that_refuses_to_join_leaves_the_pieces() -> None:
    composer = NotingComposer()

    def refuse(parts: Any) -> Any:
        raise DriverError("cuGraphCreate: CUDA_ERROR")

    composer.compose = refuse  # type: ignore[method-assign]
    joined = Steps().join(composer)
    assert joined.steps == []
    assert joined.why == "the device refuses to join them: cuGraphCreate: CUDA_ERROR"


@pytest.mark.parametrize(
    ("stitched", "host", "chosen"),
    [(90.0, 40.0, True), (101.0, 40.0, True), (110.0, 40.0, False), (90.0, 150.0, False)],
)
def test_auto_chooses_by_time(stitched: float, host: float, chosen: bool) -> None:
    compared = Comparison(
        pieces_us=100.0, stitched_us=stitched, pieces_host_us=100.0, stitched_host_us=host
    )
    joined = Steps().join(NotingComposer(compared), auto=True)
    assert joined.comparison is compared
    assert bool(joined.steps) is chosen
    assert joined.missing == (None if chosen else "timed, and not as fast")


@pytest.mark.parametrize(
    ("about", "why"),
    [({"why_not": "it prays"}, "it prays"), ({"plan": None}, "it has no launch plan")],
)
def test_auto_joins_planned_ops_and_all_or_nothing(about: dict[str, Any], why: str) -> None:
    compared = Comparison(
        pieces_us=100.0, stitched_us=1.0, pieces_host_us=100.0, stitched_host_us=1.0
    )
    joined = Steps(**about).join(NotingComposer(compared), auto=True)
    assert (joined.steps, joined.why) == ([], f"test::op stays outside: {why}")


@pytest.mark.parametrize("more", [{}, {"fake": lambda x: x, "zeroes_padding": True}])
def test_an_op_with_a_plan_returns_nothing_and_zeroes_its_padding(more: dict[str, Any]) -> None:
    def writes(x: torch.Tensor, out: torch.Tensor) -> None: ...

    def returns(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return x

    op = returns if "fake" in more else writes
    with pytest.raises(ConfigError, match=r"got plan_launches; such an op returns nothing"):
        pcgsvc.register_splitting_op(
            "stitched::wrong", op, mutates_args=("out",), plan_launches=plan, **more
        )
