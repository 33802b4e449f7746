"""Stitched replay on a GPU: bitwise what the pieces give, whatever changes from step to step."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pcgsvc
from pcgsvc.cuda_driver import Composition, Launch
from pcgsvc.ops.launches import triton_launch

pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.driver")
import triton.language as tl  # noqa: E402 - not without triton

WIDTH = 64
SIZES = "capture.sizes=[4,8,32]"


# ---- ops whose launches depend on host values ----------------------------------------------------


@triton.jit(do_not_specialize=["total"])  # type: ignore[untyped-decorator]
def scale(x, out, total, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.load(x + at) * 0.5 + total)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def blank(out, first, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = (first + tl.program_id(0)) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.zeros([WIDTH], tl.float32))


@triton.jit(do_not_specialize=["total"])  # type: ignore[untyped-decorator]
def flat(x, out, total, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < count) * factor + total, at < count)


Call = tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, int]]


def kernels(x: torch.Tensor, out: torch.Tensor) -> list[Call]:
    """Return what `planned` launches: another grid, and other integers, at each step."""
    context = pcgsvc.current_context()
    rows, total = context.num_tokens, sum(context.seq_lens_host)
    warps = {"num_warps": 1 if total % 3 else 2}  # another kernel function at some steps
    padding = (blank, (x.shape[0] - rows, 1, 1), (out, rows, WIDTH), {})
    return [(scale, (rows, 1, 1), (x, out, total, WIDTH), warps), padding]


def plan(context: pcgsvc.ForwardContext, x: torch.Tensor, out: torch.Tensor) -> Sequence[Launch]:
    """Describe them."""
    found = [triton_launch(k, grid, *args, **more) for k, grid, args, more in kernels(x, out)]
    return [launch for launch in found if launch is not None]


@pcgsvc.splitting_op(
    "stitchtest::planned", mutates_args=("out",), zeroes_padding=True, plan_launches=plan
)
def planned(x: torch.Tensor, out: torch.Tensor) -> None:
    """Launch them."""
    for kernel, grid, args, more in kernels(x, out):
        if all(grid):
            kernel[grid](*args, **more)


@pcgsvc.splitting_op("stitchtest::python", mutates_args=("out",))
def python(x: torch.Tensor, out: torch.Tensor) -> None:
    """Depend on the host; allocate; launch nothing at some steps; leave padding to the boundary."""
    RAN.append(1)
    context = pcgsvc.current_context()
    rows, total = context.num_tokens, sum(context.seq_lens_host)
    if total % 5:
        torch.add(x[:rows] * float(total), x[:rows] + 1, out=out[:rows])


RAN: list[int] = []
"""One per run of `python`."""


@pcgsvc.splitting_op("stitchtest::waits", mutates_args=("out",))
def waits(x: torch.Tensor, out: torch.Tensor) -> None:
    """Wait for the device, which no capture allows."""
    out.copy_(x * (2 if bool(x.isfinite().all()) else 3))


@pcgsvc.splitting_op("stitchtest::waits_later", mutates_args=("out",))
def waits_later(x: torch.Tensor, out: torch.Tensor) -> None:
    """Wait for the device where there are three rows."""
    if pcgsvc.current_context().num_tokens == 3:
        torch.cuda.current_stream().synchronize()
    torch.mul(x, 2, out=out)


@pcgsvc.splitting_op("stitchtest::copies_later", mutates_args=("out",))
def copies_later(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy memory, which is no kernel, where there are three rows."""
    RAN.append(1)
    if pcgsvc.current_context().num_tokens == 3:
        out.copy_(x)
    else:
        torch.mul(x, 2, out=out)


@pcgsvc.splitting_op("stitchtest::draws", mutates_args=("out",))
def draws(x: torch.Tensor, out: torch.Tensor) -> None:
    """Draw random numbers, whose state a graph of ours would not move."""
    torch.mul(x, torch.rand_like(x), out=out)


class Layers(nn.Module):
    """linear - op, with a residual."""

    def __init__(self, ops: Sequence[str]) -> None:
        super().__init__()
        self.ops = ops
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for op, linear in zip(self.ops, self.linears, strict=True):
            q = linear(x)
            out = torch.empty_like(q)
            getattr(torch.ops.stitchtest, op)(q, out)
            x = torch.tanh(x + out * 0.01)
        return x


def build(ops: Sequence[str], replay: str, *overrides: str) -> pcgsvc.Runner:
    torch.manual_seed(0)
    module = Layers(ops).cuda().eval().requires_grad_(False)
    words = [f"capture.replay={replay}", SIZES, "mode=piecewise", "dtype=float32", *overrides]
    words += [] if any("compiler=" in word for word in overrides) else ["compiler=eager"]
    config = pcgsvc.load_config([*words, "cache.mode=off", "capture.self_check=false"])
    example = {"x": torch.randn(4, WIDTH, device="cuda")}
    return pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=config)


def stitched(runner: pcgsvc.Runner) -> list[int]:
    """Return, by entry, how many calls replay it."""
    return [len(entry.calls) for entry in runner.table.entries.values()]


def random_batch(rng: random.Random, most: int) -> pcgsvc.Batch:
    rows = rng.randint(1, most)
    lens: list[int] = []
    while sum(lens) < rows:
        lens.append(1 if rng.random() < 0.5 else rng.randint(1, rows - sum(lens)))
    return pcgsvc.Batch(query_lens=lens)


def specialised_kernels(x: torch.Tensor, out: torch.Tensor) -> list[Call]:
    """Return what `specialised` launches: Triton compiles `flat` anew for some counts.

    A build's sizes give counts that 16 does not divide. Odd rows give others, which have a function
    of their own; so has a count of 1, which then is no parameter.
    """
    rows, total = pcgsvc.current_context().num_tokens, sum(pcgsvc.current_context().seq_lens_host)
    count = 1 if rows == 2 else rows * WIDTH - 1 + rows % 2
    zeros: Call = (blank, (x.shape[0], 1, 1), (out, 0, WIDTH), {})
    return [zeros, (flat, (-(-count // 128), 1, 1), (x, out, total, 0.5, count, 128), {})]


def plan_specialised(
    context: pcgsvc.ForwardContext, x: torch.Tensor, out: torch.Tensor
) -> Sequence[Launch | None]:
    """Describe them."""
    calls = specialised_kernels(x, out)
    found = [triton_launch(k, grid, *args, **more) for k, grid, args, more in calls]
    MET.update(launch.function for launch in found if launch is not None)
    return found


@pcgsvc.splitting_op(
    "stitchtest::specialised",
    mutates_args=("out",),
    zeroes_padding=True,
    plan_launches=plan_specialised,
)
def specialised(x: torch.Tensor, out: torch.Tensor) -> None:
    """Launch them."""
    for kernel, grid, args, more in specialised_kernels(x, out):
        kernel[grid](*args, **more)


MET: set[int] = set()
"""The functions in the plans of `specialised`."""


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    yield
    RAN.clear()
    MET.clear()
    gc.collect()
    torch.cuda.synchronize()


# ---- tests ---------------------------------------------------------------------------------------


STRATEGIES = [("fx", "eager"), ("fx", "inductor"), ("inductor", "inductor"), ("breakable", "eager")]


@pytest.mark.parametrize(("strategy", "compiler"), STRATEGIES)
def test_500_random_steps_equal_the_pieces_bit_by_bit(strategy: str, compiler: str) -> None:
    """Lengths, grids, functions, padding, no kernel at some steps; planned ops and Python."""
    ops = ["planned", "python", "planned", "python", "planned"]
    words = [f"partition.strategy={strategy}", f"compiler={compiler}"]
    rng = random.Random(1)
    with build(ops, "pieces", *words) as pieces, build(ops, "stitched", *words) as joined:
        assert stitched(joined) == [1, 1, 1]
        assert all(count > 1 for count in stitched(pieces))
        for _ in range(500):
            batch = random_batch(rng, 32)
            x = torch.randn(sum(batch.query_lens), WIDTH, device="cuda")
            assert torch.equal(pieces(x, batch=batch), joined(x, batch=batch))
        assert not any(e.joined.fallbacks for e in joined.table.entries.values() if e.joined)


def llama(replay: str, *overrides: str) -> pcgsvc.Runner:
    words = ["model=llama", "model.num_layers=3", "attention=triton", "mode=piecewise", SIZES]
    words += ["compiler=eager", "cache.mode=off", "capture.self_check=false", "dtype=bfloat16"]
    return pcgsvc.load_runner([*words, f"capture.replay={replay}", *overrides])


class Requests:
    """Random steps over a KV cache of the caller's: prefill, decode, both, one after the other."""

    def __init__(self, runner: pcgsvc.Runner, seed: int) -> None:
        assert runner.blocks is not None
        self._rng, count = random.Random(seed), runner.blocks.blocks_for(64)
        self._tables = [runner.blocks.allocate(count) for _ in range(8)]
        self._lengths = [0] * len(self._tables)

    def step(self) -> tuple[torch.Tensor, torch.Tensor, pcgsvc.Batch]:
        rng = self._rng
        chosen = rng.sample(range(8), rng.randint(1, 8))
        uniform = rng.random() < 0.5
        lens, seqs, positions = [], [], []
        for at in chosen:
            new = 1 if uniform else rng.randint(1, 4)
            if self._lengths[at] + new > 64:
                self._lengths[at] = 0
            positions += range(self._lengths[at], self._lengths[at] + new)
            self._lengths[at] += new
            lens.append(new)
            seqs.append(self._lengths[at])
        tables = [self._tables[at] for at in chosen]
        ids = torch.tensor([rng.randrange(100) for _ in positions], device="cuda")
        batch = pcgsvc.Batch(query_lens=lens, seq_lens=seqs, block_tables=tables)
        return ids, torch.tensor(positions, device="cuda"), batch


@pytest.mark.parametrize("words", [(), ("mode=full_and_piecewise",)])
def test_attention_of_triton_equals_its_pieces_bit_by_bit(words: tuple[str, ...]) -> None:
    with llama("pieces", *words) as pieces, llama("stitched", *words) as joined:
        assert set(stitched(joined)) == {1}
        requests = Requests(pieces, 2)
        Requests(joined, 2)  # the same blocks are taken
        for _ in range(500):
            ids, positions, batch = requests.step()
            wanted = pieces(ids, positions, batch=batch)
            assert torch.equal(wanted, joined(ids, positions, batch=batch))


def test_a_caller_may_write_its_tables_and_lengths_once_a_call_has_returned() -> None:
    with llama("pieces") as pieces, llama("stitched") as joined:
        requests = Requests(pieces, 5)
        Requests(joined, 5)
        for _ in range(20):
            ids, positions, batch = requests.step()
            wanted = pieces(ids, positions, batch=batch)
            lens, seqs = list(batch.query_lens), list(batch.seq_lens or ())
            tables = [list(table) for table in batch.block_tables]
            torch.cuda._sleep(5_000_000)
            mine = pcgsvc.Batch(query_lens=lens, seq_lens=seqs, block_tables=tables)
            got = joined(ids, positions, batch=mine)
            for values in (lens, seqs, *tables):
                values[:] = [1] * len(values)
            assert torch.equal(wanted, got)


def test_a_prepared_step_is_that_of_its_update_whatever_the_caller_writes_since() -> None:
    with build(["planned", "python"], "stitched") as joined:
        prepared = joined.prepare(3)
        for lens in ([1, 2], [2, 1], [3], [1, 1, 1]):
            mine = list(lens)
            prepared.update(pcgsvc.Batch(query_lens=mine))
            x = torch.randn(3, WIDTH, device="cuda")
            prepared.inputs["x"].copy_(x)
            mine[:] = [1, 1]
            got = prepared.step().clone()
            assert torch.equal(got, joined(x, batch=pcgsvc.Batch(query_lens=lens)))


def test_a_specialisation_first_met_after_the_build_is_patched_in() -> None:
    """Functions that are loaded after the executable was made, one with fewer parameters."""
    ops = ["specialised"] * 3
    with build(ops, "stitched") as joined, build(ops, "pieces") as pieces:
        assert stitched(joined) == [1, 1, 1]
        built = set(MET)
        for rows in (4, 3, 2, 8, 2, 1, 32, 7, 2):
            x = torch.randn(rows, WIDTH, device="cuda")
            got = joined(x)
            assert torch.equal(got, pieces(x)), rows
        assert MET - built
        assert not any(e.joined.fallbacks for e in joined.table.entries.values() if e.joined)


def test_patches_leave_queued_launches_alone() -> None:
    with build(["planned"] * 6, "pieces") as pieces, build(["planned"] * 6, "stitched") as joined:
        rng, given = random.Random(3), []
        for _ in range(50):
            batch = random_batch(rng, 32)
            given.append((torch.randn(sum(batch.query_lens), WIDTH, device="cuda"), batch))
        wanted = [pieces(x, batch=batch) for x, batch in given]
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        got = [joined(x, batch=batch) for x, batch in given]
        assert all(map(torch.equal, wanted, got))


def test_callers_on_two_streams_and_four_threads_get_their_own_results() -> None:
    ops = ["planned", "python"]
    with build(ops, "pieces") as pieces, build(ops, "stitched") as joined:
        wrong: list[int] = []

        def work(seed: int) -> None:
            rng, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
            for turn in range(50):
                batch, stream = random_batch(rng, 8), torch.cuda.Stream()
                if sum(batch.query_lens) == 5:  # `python` would leave what another thread wrote
                    batch = pcgsvc.Batch(query_lens=[6])
                with torch.cuda.stream(stream):
                    rows = sum(batch.query_lens)
                    x = torch.randn(rows, WIDTH, device="cuda", generator=generator)
                    same = torch.equal(joined(x, batch=batch), pieces(x, batch=batch))
                wrong.extend([] if same else [turn])

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_an_op_that_waits_stays_a_step_between_two_graphs() -> None:
    ops = ["planned", "planned", "waits", "planned", "python"]
    with build(ops, "pieces") as pieces, build(ops, "stitched") as joined:
        assert stitched(joined) == [3, 3, 3]
        for entry in joined.table.entries.values():
            assert entry.joined is not None
            assert list(entry.joined.outside) == ["stitchtest::waits"]
        for rows in (1, 4, 7, 32, 30):
            x = torch.randn(rows, WIDTH, device="cuda")
            assert torch.equal(pieces(x), joined(x))


def test_random_numbers_stay_outside() -> None:
    with build(["planned", "draws"], "stitched") as joined:
        (outside,) = {str(e.joined.outside) for e in joined.table.entries.values() if e.joined}
        assert "stitchtest::draws" in outside
        x = torch.randn(4, WIDTH, device="cuda")
        assert not torch.equal(joined(x), joined(x))


@pytest.mark.parametrize("op", ["waits_later", "copies_later"])
def test_a_step_that_does_not_fit_runs_as_its_pieces(op: str) -> None:
    ops = ["python", op, "planned"]
    with build(ops, "pieces") as pieces, build(ops, "stitched") as joined:
        entries = [entry.joined for entry in joined.table.entries.values()]
        for rows in (4, 3, 2, 3, 1, 8):
            x = torch.randn(rows, WIDTH, device="cuda")
            wanted = pieces(x)
            RAN.clear()
            assert torch.equal(wanted, joined(x)), rows
            assert len(RAN) == (2 if op == "copies_later" else 1)  # Python ran once
        counted = sum(sum(e.fallbacks.values()) for e in entries if e is not None)
        assert counted == (2 if op == "copies_later" else 1)


def test_a_strict_build_refuses_what_cannot_be_stitched() -> None:
    with pytest.raises(pcgsvc.PcgError, match=r"stitchtest::waits stays outside: it cannot be"):
        build(["planned", "waits"], "stitched", "strict=true")


def test_building_and_closing_twenty_times_leaves_no_executable_and_no_memory() -> None:
    used: list[int] = []
    for _ in range(20):
        few = ["capture.sizes=[4]", "partition.strategy=breakable"]
        with build(["planned", "python"], "stitched", *few) as runner:
            runner(torch.randn(3, WIDTH, device="cuda"))
        del runner
        gc.collect()
        torch.cuda.synchronize()
        assert not [thing for thing in gc.get_objects() if type(thing) is Composition]
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[2], used


def test_auto_says_how_each_entry_is_replayed_and_why() -> None:
    with build(["planned"] * 8, "auto") as runner:
        for entry in runner.table.entries.values():
            assert entry.joined is not None
            assert entry.joined.comparison is not None
            assert bool(entry.joined.stitched) == entry.joined.comparison.favours_stitched
