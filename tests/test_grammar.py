"""Models of a grammar: each result is that of plain execution, or the model is refused by name."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar import (
    FORMS,
    RARE,
    Drawn,
    Planted,
    Tried,
    is_right,
    model_of,
    reasons_of,
    record,
    try_model,
)
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pcgsvc.compilers import passes
from pcgsvc.compilers.passes import GraphPass

STRATEGIES = {"eager": ("fx", "breakable"), "inductor": ("fx",)}
"""Those that the CPU has, by compiler; `tests/gpu` has the third."""
LONGEST = {"eager": 9, "inductor": 4}
"""Statements of a forward, by compiler: Inductor takes seconds for each of its regions."""
MOST_REFUSED = 0.35
"""The share of models that may be refused; about one in six is, by `RARE` statements mostly."""


@st.composite
def models(draw: Callable[[Any], Any], compiler: str) -> Drawn:
    """Draw a model.

    Hypothesis draws a seed and a length: were each choice its own, most of its examples would be
    variations of each other. It shortens a model that fails.
    """
    rng = random.Random(draw(st.binary(min_size=8, max_size=8)))
    return model_of(rng, draw(st.integers(1, LONGEST[compiler])), STRATEGIES[compiler])


def try_models(count: int, number: int, compiler: str, folder: Path) -> Tried:
    """Try so many models of a seed; fails for the shortest that is not right."""
    tried: Tried = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(models(compiler))
    def run(drawn: Drawn) -> None:
        outcome = try_model(drawn, folder, compiler)
        tried.append((drawn, outcome))
        assert is_right(drawn, outcome), f"{outcome.kind}: {outcome.why}\n{drawn}"

    run()
    return tried


def refused(tried: Tried) -> Counter[str]:
    """Return refusals by reason; fails if there are too many, or if a statement is never right."""
    found = reasons_of(tried)
    assert found.total() <= MOST_REFUSED * len(tried), found
    if len(tried) >= 150:
        right = {what for drawn, outcome in tried if outcome.kind == "equal" for what in drawn.what}
        assert {form.what for form in FORMS} - {*RARE} <= right
    return found


def test_thirty_models_equal_plain_execution_or_are_refused_by_name(tmp_path: Path) -> None:
    refused(try_models(30, 1, "eager", tmp_path))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("compiler", "count"), [("eager", 190), ("inductor", 10)])
def test_two_hundred_models_equal_plain_execution_or_are_refused_by_name(
    tmp_path: Path, compiler: str, count: int
) -> None:
    refused(try_models(count, 2, compiler, tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(100, 120))
def test_two_thousand_models_equal_plain_execution_or_are_refused_by_name(
    tmp_path: Path, number: int
) -> None:
    """A hundred for each seed; writes its rows of docs/results/grammar-cpu.json."""
    begun = time.perf_counter()
    tried = try_models(99, number, "eager", tmp_path) + try_models(1, number, "inductor", tmp_path)
    refused(tried)
    record("grammar-cpu", "scripts/test --soak -k two_thousand", number, tried, begun)
    assert len(tried) == 100


# ---- planted faults ------------------------------------------------------------------------------


def roll_an_operand(graph: torch.fx.Graph) -> None:
    """Roll the second operand of every addition of tensors by one row: a wrong compiler pass."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        other = node.args[1]
        if isinstance(other, torch.fx.Node) and other.meta["val"].dim() == 2:
            with graph.inserting_before(node):
                parts = [(1, 2**62), (0, 1)]
                slices = [graph.call_function(aten.slice.Tensor, (other, 0, *p)) for p in parts]
                rolled = graph.call_function(aten.cat.default, (slices, 0))
            rolled.meta["val"] = other.meta["val"]
            node.args = (node.args[0], rolled)


@pytest.mark.slow
def test_a_pass_that_rolls_an_operand_by_one_row_is_found_and_named_by_piece_and_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(passes.PASSES, "roll", GraphPass(run=roll_an_operand))
    for number in range(1, 10):
        drawn = model_of(random.Random(number), 3, STRATEGIES["inductor"])
        outcome = try_model(drawn, tmp_path, "inductor", ["roll"])
        if not is_right(drawn, outcome):
            break
    assert outcome.kind == "refused"
    assert re.search(r"the compiler gets [12] region\(s\) wrong: piece_0", outcome.why), outcome.why
    assert "aten::add at " in outcome.why, outcome.why


def test_a_splitting_op_that_drops_its_last_row_under_one_strategy_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all that a build does under it, so that the build's own check cannot see it."""
    monkeypatch.setattr(Planted, "drops_last_row_under", "fx")
    body = ("v0 = x + y", "v1 = torch.ops.gr.fresh(v0)")
    own: dict[str, Any] = {"splitting_ops": None, "extra_splitting_ops": [], "mode": "piecewise"}
    drawn = replace(model_of(random.Random(8), 3, ["fx"]), body=body, result="(v1,)", **own)
    outcome = try_model(drawn, tmp_path)
    assert outcome.kind == "wrong"
    assert "piece_01: gr::fresh, call 0 of a splitting op, is wrong" in outcome.why, outcome.why
    for strategy in STRATEGIES["eager"]:
        tried = [model_of(random.Random(number), 4, [strategy]) for number in range(6)]
        right = [is_right(one, try_model(one, tmp_path)) for one in tried]
        assert all(right) == (strategy != "fx")
