"""Models of the grammar on CUDA, where there are all strategies."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from grammar import is_explained, model_of, try_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WAYS = [("fx", "eager"), ("breakable", "eager"), ("fx", "inductor"), ("inductor", "inductor")]
"""Strategy and compiler."""


def try_one(rng: random.Random, strategy: str, compiler: str, most: int, folder: Path) -> None:
    """Try a model of at most so many statements."""
    statements = rng.randint(min(most, 4), most)
    drawn = replace(model_of(rng, statements, [strategy]), poison=False)  # not on CUDA
    outcome = try_model(drawn, folder, compiler, device="cuda")
    if outcome.kind == "refused":
        assert is_explained(drawn, outcome), f"{outcome.why}\n{drawn}"
    else:
        assert outcome.kind == "equal", f"{outcome.why}\n{drawn}"


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(("strategy", "compiler"), WAYS)
def test_a_drawn_model_equals_plain_execution_or_is_refused_by_name(
    tmp_path: Path, strategy: str, compiler: str, number: int
) -> None:
    try_one(random.Random(number), strategy, compiler, 4, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(100, 130))
def test_two_thousand_models_equal_plain_execution_or_are_refused_by_name(
    tmp_path: Path, number: int
) -> None:
    for at in range(70):
        rng = random.Random(f"{number}:{at}")
        strategy, compiler = rng.choices(WAYS, [10, 8, 1, 1])[0]
        try_one(rng, strategy, compiler, 9 if compiler == "eager" else 4, tmp_path)
