"""What the key holds of Python functions that run while a program is made."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, attended
from torch import nn
from warm_helpers import Starter

import pcgsvc
from pcgsvc.program.forms import NotCanonicalError, identity, reach_digest, replaced_functions
from pcgsvc.program.image import op_identity, unwritable_ops


def _modules(factor: str) -> tuple[Callable[..., torch.Tensor], types.ModuleType]:
    """Return a function that reaches a factor through a helper of another module."""
    other = types.ModuleType("baked_other")
    exec(f"K = {factor}\ndef helper(x): return x * K", vars(other))
    own = types.ModuleType("baked_own")
    vars(own)["baked_other"] = other
    exec("def body(x): return baked_other.helper(x)", vars(own))
    function: Callable[..., torch.Tensor] = vars(own)["body"]
    return function, other


def test_the_digest_of_a_body_holds_its_helpers_and_their_globals() -> None:
    one, same, other = (_modules(factor)[0] for factor in ("2.0", "2.0", "3.0"))
    assert reach_digest(one) == reach_digest(same) != reach_digest(other)
    body, module = _modules("2.0")
    before = reach_digest(body)
    exec("def helper(x): return x + K", vars(module))
    assert reach_digest(body) != before


def test_a_function_whose_result_is_assumed_constant_counts_with_what_it_reads() -> None:
    def mark(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.compiler.assume_constant_result(function)  # type: ignore[no-any-return]

    one, same, other = (mark(_modules(factor)[0]) for factor in ("2.0", "2.0", "3.0"))
    assert identity(one) == identity(same) != identity(other)
    body, module = _modules("2.0")
    vars(module)["K"] = torch.ones(2)
    with pytest.raises(NotCanonicalError, match=r"it reads baked_other\.K"):
        identity(mark(body))


def test_a_body_that_reads_a_tensor_has_no_digest() -> None:
    body, module = _modules("2.0")
    vars(module)["K"] = torch.ones(2)
    with pytest.raises(NotCanonicalError, match=r"it reads baked_other\.K, and a .*Tensor"):
        reach_digest(body)


def test_a_function_of_torch_s_that_was_replaced_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert replaced_functions() == {}
    monkeypatch.setattr(torch.Tensor, "tanh", _modules("2.0")[0])
    (name,), one = zip(*replaced_functions().items(), strict=True)
    assert name == "Tensor.tanh"
    monkeypatch.setattr(torch.Tensor, "tanh", _modules("3.0")[0])
    assert tuple(replaced_functions().values()) != one


def _doubled(x: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    return x * 2


SCALE = torch.full((WIDTH,), 3.0)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attended(torch.sigmoid(self.act(x))) + 1


@pytest.mark.parametrize(
    ("owner", "name", "own", "reason"),
    [
        (torch, "sigmoid", _doubled, r"torch\.replaced\.torch\.sigmoid"),
        (torch, "sigmoid", _scaled, r"torch\.sigmoid is replaced by another: it reads .*SCALE"),
        (nn.functional, "silu", _doubled, r"torch\.replaced\.torch\.nn\.functional\.silu"),
    ],
)
def test_a_program_of_torch_s_own_function_is_not_loaded_for_another(
    start: Starter, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, own: Any, reason: str
) -> None:
    assert not start(Gated()).warm
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, own)
        other = start(Gated())
        assert (other.warm, other.right) == (False, True)
        assert re.search(reason, other.reasons)
    again = start(Gated())
    assert (again.warm, again.right) == (True, True)


def test_an_op_whose_composite_body_only_the_dispatcher_has_is_not_stored() -> None:
    library = torch.library.Library("baked", "DEF")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", _modules("2.0")[0], "CompositeImplicitAutograd")
    (reason,) = unwritable_ops(["baked::op"])
    assert reason.startswith("operator baked::op: the Python function of torch.library.impl")
    assert "baked=" in op_identity("baked::op")


def test_what_the_fake_of_a_splitting_op_reaches_is_in_its_identity() -> None:
    body, module = _modules("2.0")
    pcgsvc.splitting_op("bakedfake::op", fake=body)(_identity)
    before = op_identity("bakedfake::op")
    vars(module)["K"] = 3.0
    assert op_identity("bakedfake::op") != before
    vars(module)["K"] = torch.ones(2)
    assert unwritable_ops(["bakedfake::op"])


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x
