"""Models of the grammar on CUDA, where there are all strategies."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from grammar import is_explained, model_of, try_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    ("strategy", "compiler"),
    [("fx", "eager"), ("fx", "inductor"), ("inductor", "inductor"), ("breakable", "eager")],
)
def test_a_drawn_model_equals_plain_execution_or_is_refused_by_name(
    tmp_path: Path, strategy: str, compiler: str, number: int
) -> None:
    drawn = replace(model_of(random.Random(number), 4, [strategy]), poison=False)  # not on CUDA
    outcome = try_model(drawn, tmp_path, compiler, device="cuda")
    if outcome.kind == "refused":
        assert is_explained(drawn, outcome), f"{outcome.why}\n{drawn}"
    else:
        assert outcome.kind == "equal", f"{outcome.why}\n{drawn}"
