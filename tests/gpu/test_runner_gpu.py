"""The device effect: what recorded graphs cannot show. Run with `-m gpu --require-gpu`."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from core_helpers import verified

import pcgsvc
from pcgsvc.config import Mode

pytestmark = pytest.mark.gpu

SIZES = "capture.sizes=[1,4,8,32]"
DEVICE = "cuda"


@pcgsvc.splitting_op("gputest::attend", mutates_args=("out",))
def attend(q: torch.Tensor, out: torch.Tensor) -> None:
    """Write twice the input; wait for it and refuse what no kernel has computed."""
    rows = pcgsvc.current_context().num_tokens
    assert bool(q[:rows].isfinite().all()), "the op saw memory that nothing has computed"
    out[:rows].copy_(q[:rows] * 2)


@pcgsvc.splitting_op("gputest::fresh", fake=lambda q: torch.empty_like(q))
def fresh(q: torch.Tensor) -> torch.Tensor:
    """Give new memory at every call."""
    return q * 3


@pcgsvc.splitting_op("gputest::side_stream", mutates_args=("out",))
def side_stream(q: torch.Tensor, out: torch.Tensor) -> None:
    """Work on a stream of its own, joined before it returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000)
        out.copy_(q + 1)
    torch.cuda.current_stream().wait_stream(stream)


class Blocks(torch.nn.Module):
    """norm - linear - op - linear, with a residual; three times."""

    def __init__(self, op: str, width: int = 64) -> None:
        super().__init__()
        self.op = op
        self.first = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.second = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            q = first(torch.nn.functional.layer_norm(x, x.shape[-1:]))
            if self.op == "fresh":
                out = torch.ops.gputest.fresh(q)
            else:
                out = torch.empty_like(q)
                getattr(torch.ops.gputest, self.op)(q, out)
            x = x + second(out)
        return x


def blocks_runner(op: str = "attend", *overrides: str) -> tuple[torch.nn.Module, pcgsvc.Runner]:
    torch.manual_seed(0)
    module = Blocks(op).to(DEVICE).eval().requires_grad_(False)
    config = pcgsvc.load_config([SIZES, "mode=piecewise", "dtype=float32", *overrides])
    example = {"x": torch.randn(4, 64, device=DEVICE)}
    return module, pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=config)


def plain(op: str, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x
    for first, second in zip(module.first, module.second, strict=True):  # type: ignore[arg-type]
        q = first(torch.nn.functional.layer_norm(y, y.shape[-1:]))
        q = {"attend": q * 2, "fresh": q * 3, "side_stream": q + 1}[op]
        y = y + second(q)
    return y


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize(
    "mode", ["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_entry_equals_plain_execution(compiler: str, mode: str, dtype: str) -> None:
    overrides = [f"compiler={compiler}", f"mode={mode}", f"dtype={dtype}", SIZES]
    with pcgsvc.load_runner(["model=llama", *overrides]) as runner:
        rows = verified(runner)
        expected = {"none": 0, "full_and_piecewise": 8}.get(mode, 4)
        assert len(rows) == expected
        assert all(row["ok"] for row in rows), [r for r in rows if not r["ok"]]
        graphs = runner.report["graphs"]
        assert graphs["backend"] == ("off" if mode == "none" else "cuda")
        per_mode = {"piecewise": 20, "full": 4}
        assert all(graphs["by_mode"][m] == per_mode[m] for m in graphs["by_mode"])


@pytest.mark.parametrize("op", ["attend", "fresh", "side_stream"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_boundaries_see_only_what_has_been_computed(op: str, compiler: str) -> None:
    module, runner = blocks_runner(op, f"compiler={compiler}")
    with runner:
        for rows in (1, 3, 8, 5, 32, 8, 2, 7):
            x = torch.randn(rows, 64, device=DEVICE)
            junk = torch.full((1 << 20,), float("nan"), device=DEVICE)
            torch.testing.assert_close(runner(x), plain(op, module, x), atol=2e-5, rtol=2e-5)
            del junk
        assert sum(runner.stats()["hits"].values()) == 8


def test_the_example_of_the_technique() -> None:
    overrides = ["model=two_regions", "mode=piecewise", "capture.sizes=[8]", "dtype=float32"]
    with pcgsvc.load_runner(overrides) as runner:
        for lens in ([3, 2], [4, 4], [1, 5]):
            x = torch.randn(sum(lens), 32, device=DEVICE)
            got = runner(x, batch=pcgsvc.Batch(query_lens=lens))
            h = torch.tanh(x / 2)
            wanted = torch.cat(
                [
                    torch.nn.functional.scaled_dot_product_attention(
                        part[None], part[None], part[None], is_causal=True
                    )[0]
                    for part in h.split(lens)
                ]
            )
            torch.testing.assert_close(got, wanted + wanted.sigmoid(), atol=1e-5, rtol=1e-5)


def test_callers_on_two_streams_and_eight_threads_get_their_own_results() -> None:
    module, runner = blocks_runner()
    wrong: list[str] = []

    def call(seed: int) -> None:
        stream = torch.cuda.Stream()
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        with torch.cuda.stream(stream), torch.no_grad():
            for turn in range(20):
                x = torch.randn(1 + (seed + turn) % 8, 64, device=DEVICE, generator=generator)
                got = runner(x)
                if not torch.allclose(got, plain("attend", module, x), atol=2e-5, rtol=2e-5):
                    wrong.append(f"thread {seed} turn {turn}")

    with runner:
        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


class FailsAtEight(torch.nn.Module):
    """A model whose piece cannot be captured at one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.gputest.attend(x + 1, out)
        return torch.ops.gputest.inner(out)


@pcgsvc.splitting_op("gputest::inner", support="always", fake=lambda q: torch.empty_like(q))
def inner(q: torch.Tensor) -> torch.Tensor:
    """Wait for the device, which no capture allows, but for eight rows only."""
    if q.shape[0] == 8 and torch.cuda.is_current_stream_capturing():
        return q * float(q.sum().item())
    return q * 2


def test_a_size_that_cannot_be_captured_leaves_the_others_working() -> None:
    module = FailsAtEight().eval()
    config = pcgsvc.load_config(
        [SIZES, "mode=piecewise", "compiler=eager", "partition.splitting_ops=[gputest::attend]"]
    )
    example = {"x": torch.randn(4, 64, device=DEVICE)}
    enabled = gc.isenabled()
    with pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=config) as runner:
        assert gc.isenabled() == enabled
        assert [s["size"] for s in runner.report["graphs"]["skipped"]] == [8]
        assert runner.report["graphs"]["sizes"] == [1, 4, 32]
        for rows in (8, 1, 4, 32, 7):
            x = torch.randn(rows, 64, device=DEVICE)
            torch.testing.assert_close(runner(x), (x + 1) * 4)
        assert runner.plan(8).descriptor.num_tokens == 32


def test_building_and_closing_twenty_times_keeps_memory_flat() -> None:
    used = []
    for _ in range(20):
        _, runner = blocks_runner("attend", "compiler=eager")
        runner(torch.randn(5, 64, device=DEVICE))
        runner.close()
        runner.close()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    assert used[-1] <= used[2], used


def test_closing_one_runner_leaves_another_working() -> None:
    module_a, a = blocks_runner("attend", "compiler=eager")
    module_b, b = blocks_runner("fresh", "compiler=eager")
    x = torch.randn(6, 64, device=DEVICE)
    torch.testing.assert_close(a(x), plain("attend", module_a, x), atol=2e-5, rtol=2e-5)
    a.close()
    torch.cuda.empty_cache()
    torch.testing.assert_close(b(x), plain("fresh", module_b, x), atol=2e-5, rtol=2e-5)
    b.close()


def test_sizes_share_one_pool() -> None:
    _, several = blocks_runner("attend", "compiler=eager", "capture.sizes=[512,256,128,64]")
    _, largest = blocks_runner("attend", "compiler=eager", "capture.sizes=[512]")
    with several, largest:
        ratio = several.report["graphs"]["pool_bytes"] / largest.report["graphs"]["pool_bytes"]
    assert ratio < 1.2


def test_memory_budget_keeps_what_fits() -> None:
    overrides = ["model=llama", "compiler=eager", "capture.memory_budget=4MiB", "mode=piecewise"]
    with pcgsvc.load_runner([*overrides, "capture.sizes=[1,8,2048]"]) as runner:
        skipped = runner.report["graphs"]["skipped"]
        assert skipped
        assert "memory_budget" in skipped[0]["reason"]
        assert runner(torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE)).shape == (
            5,
            512,
        )


def test_kept_results_survive_the_next_call() -> None:
    module, runner = blocks_runner()
    with runner:
        a, b = torch.randn(5, 64, device=DEVICE), torch.randn(8, 64, device=DEVICE)
        first = runner(a)
        runner(b)
        torch.testing.assert_close(first, plain("attend", module, a), atol=2e-5, rtol=2e-5)


def test_replaced_weights_are_refused_and_weights_written_in_place_count() -> None:
    module, runner = blocks_runner("attend", "compiler=eager")
    with runner:
        x = torch.randn(4, 64, device=DEVICE)
        runner(x)
        module.first[0].weight.copy_(torch.randn(64, 64))  # type: ignore[union-attr]
        torch.testing.assert_close(runner(x), plain("attend", module, x), atol=2e-4, rtol=2e-4)
        module.first[0].weight.data = torch.randn(64, 64, device=DEVICE)  # type: ignore[union-attr]
        calls = [lambda: runner(x) for _ in range(4)]
        with pytest.raises(pcgsvc.PcgError, match=r"first\.0\.weight"):
            _ = [call() for call in calls]


def test_meanwhile_is_called_between_a_step_s_launch_and_its_tokens() -> None:
    order: list[str] = []
    with pcgsvc.load_runner(["model=llama", "compiler=eager", SIZES]) as runner:
        whole = runner.generate([[5, 6, 7]], 3, return_ids=True)
        runner.time_calls(lambda _: order.append("launched"))
        with pcgsvc.Slots(runner, max_requests=1) as slots:
            one = slots.prepare([5, 6, 7], 3)
            slots.start(one)
            while slots.running:
                slots.step(lambda: order.append("meanwhile"))
    assert [one.new] == whole
    assert order == ["launched", "launched", "meanwhile", "launched", "meanwhile", "meanwhile"]


@pytest.mark.parametrize(
    ("attention", "is_foreign"),
    [("triton", False), ("triton", True), ("paged", False), ("varlen", False)],
)
def test_steps_that_were_launched_early_equal_continuations_made_alone(
    attention: str, is_foreign: bool
) -> None:
    """Starts, cancels, and calls of another stream over the buffers of a step on its way."""
    draw, other = random.Random(5), torch.cuda.Stream()
    mine = torch.cuda.Stream()
    stream = torch.cuda.ExternalStream(mine.cuda_stream) if is_foreign else mine
    words = ["model=llama", "compiler=eager", f"attention={attention}", SIZES, "dtype=float32"]
    with pcgsvc.load_runner([*words, "attention.max_num_reqs=8"]) as runner:
        prompts = [[draw.randrange(512) for _ in range(draw.randint(1, 40))] for _ in range(24)]
        drawn = pcgsvc.Sampling(temperature=0.7, top_k=20, repetition_penalty=1.2, seed=3)
        kinds = [drawn if at % 3 == 0 else pcgsvc.Sampling() for at in range(len(prompts))]
        alone = [
            runner.generate([p], 12, sampling=kind, slots=1, return_ids=True)[0]
            for p, kind in zip(prompts, kinds, strict=True)
        ]
        with pcgsvc.Slots(runner, max_requests=8, max_step_tokens=20) as slots:
            pairs = zip(prompts, kinds, strict=True)
            made = [slots.prepare(p, 12, kind) for p, kind in pairs]
            waiting = made.copy()
            while waiting or slots.running:
                if waiting and draw.random() < 0.4 and slots.start(waiting[0]):
                    del waiting[0]
                if slots.running and draw.random() < 0.03:
                    slots.cancel(draw.choice(slots.running))
                if draw.random() < 0.3:
                    with torch.cuda.stream(other):
                        rows = torch.arange(draw.randint(1, 30), device=DEVICE)
                        runner(rows * 0, rows)
                with torch.cuda.stream(stream):
                    slots.step()
    assert sum(one.finished == "length" for one in made) > 12
    assert [one.new for one in made] == [
        ids[: len(one.new)] for one, ids in zip(made, alone, strict=True)
    ]


def test_varlen_attention_is_never_captured_whole() -> None:
    with pcgsvc.load_runner(["model=llama", "attention=varlen", "mode=full", SIZES]) as runner:
        assert runner.report["mode"]["resolved"] == "piecewise"
        modes = {key[0] for key in runner.table.entries}
        assert modes == {Mode.PIECEWISE}
