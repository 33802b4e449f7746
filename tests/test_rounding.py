"""A module's own noise in half precision, and what counts as equal because of it."""

from __future__ import annotations

import pytest
import torch

from pcgsvc.check.tolerance import (
    INTEGERS_DIFFER,
    NOISE_LIMIT,
    TOLERANCE,
    error_of,
    redrawn,
    tolerance_of,
)


def deep(dtype: torch.dtype, layers: int = 24) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator).to(dtype)
    weights = [torch.randn(64, 64, generator=generator) / 4 for _ in range(layers)]
    return x, [w.to(dtype) for w in weights]


def run(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    for weight in weights:
        x = torch.nn.functional.rms_norm(x + torch.tanh(x @ weight), (64,))
    return [x]


def test_half_precision_noise_is_about_the_distance_to_float32() -> None:
    x, weights = deep(torch.bfloat16)
    wanted = run(x, weights)
    exact = run(x.float(), [w.float() for w in weights])
    noise = error_of(redrawn(lambda: run(x, weights), x.device), wanted)
    distance = error_of(wanted, exact)
    assert distance / 4 < noise < 4 * distance


def test_float32_is_not_redrawn_and_keeps_its_tolerance() -> None:
    x, weights = deep(torch.float32)
    wanted = run(x, weights)
    assert error_of(redrawn(lambda: run(x, weights), x.device), wanted) == 0
    assert tolerance_of(wanted, 0.5, lambda: run(x, weights)) == TOLERANCE[torch.float32]


def test_of_complex_results_both_parts_are_compared() -> None:
    real, imaginary = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    wanted = torch.complex(real, imaginary)
    assert error_of([torch.complex(real, imaginary + 1)], [wanted]) > 0.3
    assert error_of([wanted.conj().conj()], [wanted]) == 0


def test_large_integers_are_equal_or_not_and_small_ones_may_have_been_rounded() -> None:
    seconds = torch.tensor([1_700_000_000, 1_700_000_007])
    assert error_of([seconds + 1], [seconds]) == INTEGERS_DIFFER > TOLERANCE[torch.bfloat16]
    far = torch.tensor([2**62])
    assert error_of([far + 1], [far]) == INTEGERS_DIFFER
    sound = torch.tensor([32000, -32000], dtype=torch.int16)
    assert 0 < error_of([sound + 1], [sound]) < TOLERANCE[torch.float32]


def test_views_and_writes_keep_their_memory() -> None:
    x = torch.ones(4, 4, dtype=torch.bfloat16)

    def call() -> list[torch.Tensor]:
        x[1:].view(-1).mul_(2)
        return [x]

    assert redrawn(call, x.device)[0] is x
    assert x.sum() == 4 + 2 * 12


def test_noise_widens_the_tolerance_only_where_it_is_needed() -> None:
    x, weights = deep(torch.bfloat16, layers=8)
    wanted = run(x, weights)
    limit = TOLERANCE[torch.bfloat16]

    def never() -> list[torch.Tensor]:
        raise AssertionError("there was no need to measure")

    assert tolerance_of(wanted, limit, never) == limit
    assert limit <= tolerance_of(wanted, 1.0, lambda: run(x, weights)) < 0.2


def test_the_noise_of_a_chaotic_module_does_not_let_another_result_pass() -> None:
    x, weights = deep(torch.bfloat16)
    wanted = run(x, weights)
    stale = error_of(run(x.flip(0), weights), wanted)
    assert tolerance_of(wanted, stale, lambda: run(x, weights)) == NOISE_LIMIT < stale / 2


def test_a_choice_that_only_some_draws_change_is_measured() -> None:
    x = torch.ones(1, dtype=torch.bfloat16)
    calls = iter([x * 0, x * 0, x * 0.2, x * 0])  # how far a row moved, draw by draw
    assert tolerance_of([x], 0.35, lambda: [x + next(calls)]) == pytest.approx(0.4, abs=0.01)
    assert len(list(calls)) == 1  # enough was seen
