"""Calls from many streams and threads: each on its caller's stream, after the call before it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pcgsvc
from pcgsvc.errors import PcgError

pytestmark = pytest.mark.gpu

WIDTH = 256


class Slow(nn.Module):
    """Enough work that a call on another stream would overlap with the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def build(*overrides: str) -> tuple[pcgsvc.Runner, nn.Module]:
    torch.manual_seed(0)
    module = Slow().cuda().eval().requires_grad_(False)
    words = ["capture.sizes=[8,64]", "compiler=eager", "mode=full", "cache.mode=off", *overrides]
    example = (torch.randn(4, WIDTH, device="cuda"),)
    config = pcgsvc.load_config([*words, "dtype=float32"])
    runner = pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=config)
    return runner, module


@pytest.fixture(scope="module")
def built() -> Iterator[tuple[pcgsvc.Runner, nn.Module]]:
    runner, module = build()
    with runner:
        yield runner, module


def cases(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs of several row counts, each with what the module gives for it."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    inputs = [
        torch.randn(rows, WIDTH, generator=generator, device="cuda")
        for rows in (1, 3, 8, 9, 33, 64, 70)
    ]
    found = [(x, module(x)) for x in inputs]
    torch.cuda.synchronize()
    return found


def test_callers_on_four_streams_and_threads_get_their_own_results(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    given = cases(module)
    wrong: list[float] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
        for _ in range(2500):
            x, wanted = rng.choice(given)
            with torch.cuda.stream(rng.choice(streams)):
                error = (runner(x) - wanted).abs().max()
            if rng.random() < 0.1:
                wrong.append(float(error))
            else:
                pending.append(error)

    pending: list[torch.Tensor] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert max(wrong) < 1e-4
    assert float(torch.stack(pending).max()) < 1e-4


def test_results_belong_to_the_stream_of_their_call(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    (x, wanted), *_ = cases(module)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        result = runner(x)
    two.wait_stream(one)
    with torch.cuda.stream(two):
        doubled = result * 2
    result.record_stream(two)
    del result
    with torch.cuda.stream(one):
        for _ in range(50):
            runner(torch.randn_like(x))
    torch.cuda.synchronize()
    torch.testing.assert_close(doubled, wanted * 2)


def test_an_external_stream_that_is_gone_since_is_waited_for(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    for x, wanted in cases(module) * 3:
        made = torch.cuda.Stream()
        outside = torch.cuda.ExternalStream(made.cuda_stream)
        with torch.cuda.stream(outside):
            first = runner(x)
        second = runner(x)
        torch.cuda.synchronize()
        torch.testing.assert_close(first, wanted)
        torch.testing.assert_close(second, wanted)


def test_a_call_inside_somebody_s_capture_is_refused_by_name(
    built: tuple[pcgsvc.Runner, nn.Module],
) -> None:
    runner, module = built
    (x, wanted), *_ = cases(module)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(PcgError, match="captured into another CUDA graph"), torch.cuda.graph(graph):
        runner(x * 2)
    torch.cuda.synchronize()
    torch.testing.assert_close(runner(x), wanted)


def test_new_weights_are_read_by_calls_on_other_streams() -> None:
    runner, module = build()
    with runner:
        x = torch.randn(5, WIDTH, device="cuda")
        side = torch.cuda.Stream()
        for scale in (0.5, 2.0):
            state = {name: value * scale for name, value in module.state_dict().items()}
            runner.load_state_dict(state)
            with torch.cuda.stream(side):
                got = runner(x)
            torch.cuda.synchronize()
            torch.testing.assert_close(got, module(x))


def test_a_steady_caller_waits_for_no_event(
    built: tuple[pcgsvc.Runner, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, module = built
    (x, _), *_ = cases(module)
    runner(x)

    def refuse(*args: object) -> None:
        raise AssertionError("a stream or an event was waited for")

    monkeypatch.setattr(torch.cuda.Stream, "wait_event", refuse)
    monkeypatch.setattr(torch.cuda.Event, "record", refuse)
    for _ in range(10):
        runner(x)
