"""Copies of calls as nodes of CUDA graphs: whatever changes between calls, results are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pcgsvc
from pcgsvc.ops.launches import triton_launch

pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton")
pytest.importorskip("cuda.bindings.driver")
import triton.language as tl  # noqa: E402 - not without triton

WIDTH = 64


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(x, lens, rows, out, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = row * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.where(row < tl.load(rows), tl.load(x + at) * tl.load(lens + row), 0))


def args(context: pcgsvc.ForwardContext, x: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
    return x, context.kv_lens, context.num_tokens_tensor, out, WIDTH


def plan(context: pcgsvc.ForwardContext, x: torch.Tensor, out: torch.Tensor) -> Any:
    return [triton_launch(scale_kernel, (x.shape[0], 1, 1), *args(context, x, out))]


@pcgsvc.splitting_op(
    "copiestest::scale",
    mutates_args=("out",),
    support="always",
    zeroes_padding=True,
    plan_launches=plan,
)
def scale(x: torch.Tensor, out: torch.Tensor) -> None:
    """Scale each row by its request's length, which the device reads."""
    scale_kernel[(x.shape[0], 1, 1)](*args(pcgsvc.current_context(), x, out))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.lin(x) + ids[:, None]
        out = torch.empty_like(h)
        torch.ops.copiestest.scale(h, out)
        return out.tanh() + out, ids * 3


def build(*words: str) -> pcgsvc.Runner:
    torch.manual_seed(0)
    module = Model().cuda().eval().requires_grad_(False)
    made = ["cache.mode=off", "compiler=eager", "capture.sizes=[4,32]", *words]
    example = {"x": torch.randn(3, WIDTH).cuda(), "ids": torch.arange(3).cuda()}
    config = pcgsvc.load_config([*made, "dtype=float32"])
    return pcgsvc.build_runner(module, example, dynamic_dims={"x": 0, "ids": 0}, config=config)


@pytest.fixture(scope="module", params=["full", "pieces", "stitched"])
def runner(request: Any) -> Iterator[pcgsvc.Runner]:
    words = ["mode=full"]
    if request.param != "full":
        words = ["mode=piecewise", f"capture.replay={request.param}"]
    with build(*words) as built:
        assert all(entry.copies is not None for entry in built.table.entries.values())
        yield built


def case(rng: random.Random, weight: torch.Tensor) -> tuple[Any, Any, pcgsvc.Batch, torch.Tensor]:
    """Return inputs, a batch and the first result, without the runner."""
    rows, length = rng.choice((1, 2, 4, 7, 31, 32)), rng.randrange(1, 200)
    x, ids = torch.randn(rows, WIDTH, device="cuda"), torch.full((rows,), length, device="cuda")
    lens = [length + at for at in range(rows)]
    batch = pcgsvc.Batch(query_lens=[1] * rows, seq_lens=lens)
    h = (x @ weight.t() + length) * torch.tensor(lens, device="cuda")[:, None]
    return x, ids, batch, h.tanh() + h


def test_thousands_of_queued_calls_read_their_own_inputs_and_metadata(
    runner: pcgsvc.Runner,
) -> None:
    rng, weight = random.Random(0), runner.model.module.lin.weight
    cases = [case(rng, weight) for _ in range(60)]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    streams[1].wait_stream(streams[0])
    errors, stream = [], streams[0]
    for at in range(3000):
        x, ids, batch, wanted = rng.choice(cases)
        if at % 100 == 0:
            stream = rng.choice(streams)
        with torch.cuda.stream(stream):
            got, tripled = runner(x.clone(), ids, batch=batch)
            wrong = (got - wanted).abs().max() + (tripled - 3 * ids).abs().max()
            errors.append(wrong / wanted.abs().max())
            del got, tripled  # their memory is somebody else's at once
    torch.cuda.synchronize()
    assert float(torch.stack(errors).max()) < 1e-3
    assert sum(runner.stats()["hits"].values()) >= 3000


@pytest.mark.parametrize("kind", ["turned", "sliced", "of the host", "expanded"])
def test_inputs_of_any_layout_and_place_are_right(runner: pcgsvc.Runner, kind: str) -> None:
    rng, weight = random.Random(1), runner.model.module.lin.weight
    for _ in range(20):
        x, ids, batch, wanted = case(rng, weight)
        if kind == "turned":
            given = x.t().contiguous().t()
        elif kind == "sliced":
            given = torch.cat([x, x])[: len(x)]
        elif kind == "of the host":
            given = x.cpu()
        else:
            given, ids = x, ids[:1].expand(len(x))
        torch.testing.assert_close(runner(given, ids, batch=batch)[0], wanted, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(runner(x, ids, batch=batch)[0], wanted, rtol=1e-3, atol=1e-2)


def test_a_prepared_call_in_between_is_right(runner: pcgsvc.Runner) -> None:
    rng, weight = random.Random(2), runner.model.module.lin.weight
    for _ in range(20):
        x, ids, batch, wanted = case(rng, weight)
        prepared = runner.prepare(len(x), batch)
        other, more, another, expected = case(rng, weight)
        got = runner(other, more, batch=another)[0]
        prepared.update(batch)
        prepared.inputs["x"].copy_(x)
        prepared.inputs["ids"].copy_(ids)
        result = prepared.step()[0].clone()
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("words", [["mode=full"], ["mode=piecewise", "capture.replay=stitched"]])
def test_segments_that_draw_random_numbers_draw_others_at_each_call(words: list[str]) -> None:
    class Noisy(Model):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x + torch.rand_like(x), ids)

    example = {"x": torch.randn(3, WIDTH).cuda(), "ids": torch.arange(3).cuda()}
    made = ["cache.mode=off", "compiler=eager", "capture.sizes=[4]", "capture.self_check=false"]
    config = pcgsvc.load_config([*made, "dtype=float32", *words])
    module = Noisy().cuda().eval().requires_grad_(False)
    dims = {"x": 0, "ids": 0}
    with pcgsvc.build_runner(module, example, dynamic_dims=dims, config=config) as runner:
        found = [runner(**example)[0] for _ in range(3)]
        assert sum(runner.stats()["hits"].values()) == 3
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
