"""Prepared calls on a GPU: buffers written while the last step runs; other streams and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pcgsvc
from pcgsvc.errors import PcgError

pytestmark = pytest.mark.gpu

WIDTH = 1024


class Slow(nn.Module):
    """Enough work that the host is several steps ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh() + y
        return x, x - y


@pytest.fixture(scope="module")
def built() -> Iterator[tuple[pcgsvc.Runner, nn.Module]]:
    torch.manual_seed(0)
    module = Slow().cuda().eval().requires_grad_(False)
    words = ["capture.sizes=[8,64]", "compiler=eager", "mode=full", "cache.mode=off"]
    example = tuple(torch.randn(4, WIDTH, device="cuda") for _ in range(2))
    config = pcgsvc.load_config([*words, "dtype=float32"])
    with pcgsvc.build_runner(module, example, dynamic_dims={"x": 0, "y": 0}, config=config) as made:
        yield made, module


def cases(
    module: nn.Module, count: int, rows: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return inputs, and what the module gives for them."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    given = [
        tuple(torch.randn(rows, WIDTH, generator=generator, device="cuda") for _ in range(2))
        for _ in range(count)
    ]
    return given, [module(x, y) for x, y in given]  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [5, 64])
def test_buffers_written_while_the_last_step_still_runs_are_right(
    built: tuple[pcgsvc.Runner, nn.Module], rows: int
) -> None:
    runner, module = built
    given, wanted = cases(module, 20, rows)
    call = runner.prepare(rows)
    got = []
    torch.cuda.synchronize()
    for x, y in given * 10:
        call.inputs["x"].copy_(x)
        call.inputs["y"].copy_(y)
        got.append([t.clone() for t in call.step()])
    torch.cuda.synchronize()
    for one, other in zip(got, wanted * 10, strict=True):
        torch.testing.assert_close(tuple(one), other)


def test_results_and_inputs_of_ordinary_calls_are_copied_at_once_and_right(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    for rows in (5, 8, 64, 70):
        given, wanted = cases(module, 6, rows)
        got = [runner(x, y) for x, y in given]
        got += [runner(x.cpu(), y) for x, y in given]
        got += [runner(x.t().contiguous().t(), y) for x, y in given]
        for one, other in zip(got, wanted * 3, strict=True):
            torch.testing.assert_close(one, other)


def test_a_step_on_another_stream_than_its_update_is_refused(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    ((x, y),), (wanted,) = cases(module, 1, 8)
    call = runner.prepare(8)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        with pytest.raises(PcgError, match="called on another stream than update"):
            call.step()
        call.update()
        side.wait_stream(torch.cuda.default_stream())  # x and y were made there
        call.inputs["x"].copy_(x)
        call.inputs["y"].copy_(y)
        got = [t.clone() for t in call.step()]
    torch.cuda.synchronize()
    torch.testing.assert_close(tuple(got), wanted)
    with pytest.raises(PcgError, match="called on another stream than update"):
        call.step()


def inside_a_capture(call: Callable[[], Any]) -> PcgError | None:
    """Return what a call raises on a stream that is being captured."""
    x, refused = torch.ones(3, device="cuda"), None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        try:
            call()
        except PcgError as error:
            refused = error
    torch.cuda.synchronize()
    return refused


def test_a_step_inside_somebody_s_capture_is_refused_by_name(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    ((x, y),), (wanted,) = cases(module, 1, 8)
    call = runner.prepare(8)
    for inside in (call.step, call.update):
        refused = inside_a_capture(inside)
        assert "captured into another CUDA graph" in str(refused)
    call.update()
    call.inputs["x"].copy_(x)
    call.inputs["y"].copy_(y)
    torch.testing.assert_close(call.step(), wanted)


def test_steps_and_calls_of_four_threads_are_right_or_refused(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    given, wanted = cases(module, 8, 8)
    errors: list[torch.Tensor] = []
    refused = [0] * 4

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call = runner.prepare(8)
            for at in range(400):
                (x, y), (one, _) = given[(at + seed) % 8], wanted[(at + seed) % 8]
                if at % 3 == seed % 3:
                    errors.append((runner(x, y)[0] - one).abs().max())
                with runner.lock:
                    call.update()
                    call.inputs["x"].copy_(x)
                    call.inputs["y"].copy_(y)
                    errors.append((call.step()[0] - one).abs().max())
                try:  # without the lock: others may have called since
                    call.step()
                except PcgError:
                    refused[seed] += 1
        stream.synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(errors) > 4 * 400
    assert float(torch.stack(errors).max()) < 1e-4


def test_a_full_graph_s_step_asks_torch_for_no_mode_and_no_event(
    built: tuple[pcgsvc.Runner, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, module = built
    ((x, y),), (wanted,) = cases(module, 1, 8)
    call = runner.prepare(8)
    call.inputs["x"].copy_(x)
    call.inputs["y"].copy_(y)

    def refuse(*args: object) -> None:
        raise AssertionError("a stream, an event or a mode was asked for")

    with monkeypatch.context() as patch:
        for name in ("record", "synchronize"):
            patch.setattr(torch.cuda.Event, name, refuse)
        patch.setattr(torch, "is_autocast_enabled", refuse)
        with torch.enable_grad(), torch.autocast("cuda"):
            got = [t.clone() for t in call.step()]
    torch.testing.assert_close(tuple(got), wanted)
