"""Models of the grammar on CUDA, where there are all strategies."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from grammar import Drawn, Outcome, is_right, model_of, record, try_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WAYS = [("fx", "eager"), ("breakable", "eager"), ("fx", "inductor"), ("inductor", "inductor")]
"""Strategy and compiler."""


def tried(
    rng: random.Random, statements: int, strategy: str, compiler: str, folder: Path
) -> tuple[Drawn, Outcome]:
    """Draw and try a model; fails if it is not right."""
    drawn = replace(model_of(rng, statements, [strategy]), poison=False)  # not on CUDA
    outcome = try_model(drawn, folder, compiler, device="cuda")
    assert is_right(drawn, outcome), f"{outcome.kind}: {outcome.why}\n{drawn}"
    return drawn, outcome


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(("strategy", "compiler"), WAYS)
def test_a_drawn_model_equals_plain_execution_or_is_refused_by_name(
    tmp_path: Path, strategy: str, compiler: str, number: int
) -> None:
    tried(random.Random(number), 4, strategy, compiler, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(100, 130))
def test_two_thousand_models_equal_plain_execution_or_are_refused_by_name(
    tmp_path: Path, number: int
) -> None:
    """Seventy for each seed; writes its rows of docs/results/grammar-h200.json."""
    begun, found = time.perf_counter(), []
    for at in range(70):
        rng = random.Random(f"{number}:{at}")
        strategy, compiler = rng.choices(WAYS, [10, 8, 1, 1])[0]
        most = 9 if compiler == "eager" else 4
        found.append(tried(rng, rng.randint(1, most), strategy, compiler, tmp_path))
    command = "scripts/gpu -m soak --soak tests/gpu/test_grammar_gpu.py"
    record("grammar-h200", command, number, found, begun)
