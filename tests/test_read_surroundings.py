"""Globals, class attributes, the environment and arguments decide which stored program fits."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended, rows
from read_models import Base, Flexible, Settings
from torch import nn
from warm_helpers import Start, Starter

# ---- globals, class attributes, the environment --------------------------------------------------

SCALE: Any = 2.0
ACT: Callable[[torch.Tensor], torch.Tensor] = torch.relu
TABLE = {"a": [1.0, 2.0]}


class ReadsGlobals(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(ACT(x) * SCALE) + TABLE["a"][1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("SCALE", 3.0), ("ACT", torch.tanh), ("TABLE", {"a": [1.0, 3.0]}), ("SCALE", True)],
    ids=["constant", "function", "element", "bool for a number"],
)
def test_a_changed_global_is_a_miss_that_names_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    if value is True:
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 1)
    assert not start(ReadsGlobals()).warm
    assert start(ReadsGlobals()).warm
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], name, value)
        changed = start(ReadsGlobals())
        assert not changed.warm
        assert changed.right
        assert f"{__name__}'].{name}" in changed.reasons
    assert start(ReadsGlobals()).warm


def test_a_changed_class_attribute_is_a_miss(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start(Flexible()).warm
    monkeypatch.setattr(Base, "factor", 3.0)
    changed = start(Flexible())
    assert not changed.warm
    assert changed.right
    assert "factor" in changed.reasons


def test_a_changed_method_is_a_miss_though_no_guard_is_on_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start(Flexible()).warm
    monkeypatch.setattr(Settings, "doubled", lambda self: self.scale * 3)
    changed = start(Flexible())
    assert changed.right
    assert not changed.warm
    assert "settings" in changed.reasons


class ReadsEnvironment(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * float(os.environ.get("PCGSVC_TEST_SCALE", "2")))


@pytest.mark.parametrize("first", ["3", None])
def test_an_environment_variable_that_the_forward_reads_counts(
    start: Starter, monkeypatch: pytest.MonkeyPatch, first: str | None
) -> None:
    if first is not None:
        monkeypatch.setenv("PCGSVC_TEST_SCALE", first)
    assert not start(ReadsEnvironment()).warm
    assert start(ReadsEnvironment()).warm
    monkeypatch.setenv("PCGSVC_TEST_SCALE", "5")
    changed = start(ReadsEnvironment())
    assert changed.right
    assert not changed.warm
    assert start(ReadsEnvironment()).warm


def test_a_forward_that_reads_the_environment_minds_a_new_variable_but_not_a_missing_one(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Dynamo does not say which variables it looked for and did not find.
    monkeypatch.setenv("PCGSVC_TEST_OTHER", "5")
    assert not start(ReadsEnvironment()).warm
    monkeypatch.delenv("PCGSVC_TEST_OTHER")
    assert start(ReadsEnvironment()).warm
    monkeypatch.setenv("PCGSVC_TEST_NEW", "5")
    changed = start(ReadsEnvironment())
    assert not changed.warm
    assert "PCGSVC_TEST_NEW are set now" in changed.reasons


def test_the_environment_does_not_count_for_a_forward_that_reads_none_of_it(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not start(Flexible()).warm
    monkeypatch.setenv("PCGSVC_TEST_SCALE", "5")
    assert start(Flexible()).warm


class ReadsASetting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * 2 if torch._dynamo.config.verbose else x * 3)


def test_a_setting_of_torch_counts_by_its_value_however_it_came_to_it(start: Starter) -> None:
    assert not start(ReadsASetting()).warm
    with torch._dynamo.config.patch(verbose=True):
        changed = start(ReadsASetting())
        assert changed.right
        assert not changed.warm
        assert "config.verbose: stored ['bool', False], now ['bool', True]" in changed.reasons
    # Left as set by hand to what the default is.
    assert start(ReadsASetting()).warm


class CallsGetenv(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * float(os.getenv("PCGSVC_TEST_SCALE", "2")))


class Hashes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(x * (hash("abc") % 10))


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (CallsGetenv, r"os.getenv is called, .* use os.environ.get"),
        pytest.param(
            Hashes,
            r"the forward calls hash\(\)",
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.11."), reason="its Dynamo cannot trace hash()"
            ),
        ),
    ],
)
def test_what_only_this_process_can_tell_is_not_stored_and_the_reason_is_reported(
    start: Starter, cls: type[nn.Module], reason: str
) -> None:
    for _ in range(2):
        made = start(cls())
        assert made.right
        assert not made.warm
        assert re.search(rf"cannot be stored: .*{reason}", made.reasons)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_replaced_method_of_a_class_of_torchs_is_a_miss(
    start: Starter, monkeypatch: pytest.MonkeyPatch, wraps: bool
) -> None:
    assert not start(Flexible(act=nn.Hardtanh())).warm
    assert start(Flexible(act=nn.Hardtanh())).warm
    for by in (2.0, 3.0):

        def forward(self: nn.Module, x: torch.Tensor, by: float = by) -> torch.Tensor:
            return x * by

        with monkeypatch.context() as patch:
            put = functools.wraps(nn.Hardtanh.forward)(forward) if wraps else forward
            patch.setattr(nn.Hardtanh, "forward", put)
            changed = start(Flexible(act=nn.Hardtanh()))
            assert changed.right
            assert not changed.warm
            assert start(Flexible(act=nn.Hardtanh())).warm
    assert start(Flexible(act=nn.Hardtanh())).warm


def test_a_forward_that_computes_nothing_starts_warm(start: Starter) -> None:
    made = [start(nn.Identity(), example={"input": rows(2)}, dims={"input": 0}) for _ in range(2)]
    assert [each.right for each in made] == [True, True]
    assert [each.report["compile"]["start"] for each in made] == ["cold", "warm"]


def test_a_forward_that_asks_for_the_type_of_a_tensor_starts_warm(start: Starter) -> None:
    # Dynamo reads torch.Tensor through a global whose name holds an address of the process.
    def forward(x: torch.Tensor) -> torch.Tensor:
        return attended(x * 2) if type(x).__name__ == "Tensor" else x

    assert not start(forward).warm
    assert start(forward).warm


# ---- arguments -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def forward(
        self, x: torch.Tensor, by: Any = 1.0, y: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x * (by if isinstance(by, float) else by(2.0))
        return attended(x if y is None else x + y)


def double(value: float) -> float:
    return value * 2


def triple(value: float) -> float:
    return value * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"by": 2.0}, {"by": 3.0}),
        ({"by": double}, {"by": triple}),
        ({"by": functools.partial(pow, 2)}, {"by": functools.partial(pow, 3)}),
        ({"by": 2.0}, {"by": 2.0, "y": torch.ones(2, WIDTH)}),
        ({"y": torch.ones(WIDTH)}, {"y": torch.ones(WIDTH, dtype=torch.float64)}),
        ({"y": torch.ones(WIDTH)}, {"y": torch.ones(1, WIDTH)}),
    ],
    ids=["constant", "function", "partial", "optional tensor", "dtype", "rank"],
)
def test_other_arguments_share_no_program(
    start: Starter, one: dict[str, Any], other: dict[str, Any]
) -> None:
    def begin(extra: dict[str, Any]) -> Start:
        moving = {"x": 0} | ({"y": 0} if "y" in extra and len(extra["y"]) == 2 else {})
        return start(Scaled(), example={"x": rows(2), **extra}, dims=moving)

    assert not begin(one).warm
    second = begin(other)
    assert not second.warm
    assert second.right
    assert begin(one).warm
    assert begin(other).warm
