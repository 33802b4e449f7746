"""Ops that write what their schema does not declare, and ops that are declared once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from core_helpers import WIDTH, build, plain, rows
from torch import nn

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.errors import CaptureError
from pcgsvc.forward.state import state_kept
from pcgsvc.ops.registry import find_spec


@pytest.fixture(scope="module")
def op_that_lies() -> Iterator[str]:
    """Declare an op of `torch.library` that writes to its second argument and does not say so."""
    library = torch.library.Library("undeclared", "DEF")
    library.define("lie(Tensor x, Tensor kv) -> Tensor")

    def lie(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        kv.add_(x.sum())
        return x * 2

    library.impl("lie", lie, "CPU")
    torch.library.register_fake("undeclared::lie", lambda x, kv: torch.empty_like(x), lib=library)
    yield "undeclared::lie"
    torch_private.undeclare_ops(library)


SEEN = torch.zeros(2)


@pcgsvc.splitting_op("undeclared::counts", fake=lambda x: torch.empty_like(x))
def counts(x: torch.Tensor) -> torch.Tensor:
    """Write to a global of its own."""
    SEEN.add_(1)
    return x * 2


class Model(nn.Module):
    kv: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.undeclared.lie(x * 1.0, self.kv) + 1


@pytest.mark.parametrize("splitting", [True, False])
def test_an_undeclared_write_is_put_back_and_refused_by_op_argument_and_schema(
    splitting: bool, op_that_lies: str
) -> None:
    module = Model().eval()
    names = {"splitting_ops": [op_that_lies]} if splitting else {}
    words = r"undeclared::lie writes to its argument 'kv' \(undeclared::lie\(Tensor x, Tensor kv\)"
    with pytest.raises(CaptureError, match=words):
        build(module, **names)
    assert torch.equal(module.kv, torch.arange(4.0))


def test_what_an_op_s_own_function_reaches_is_as_it_was_after_the_build() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.undeclared.counts(x * 1.0) + 1

    before = SEEN.clone()
    with build(forward) as runner:
        assert torch.equal(SEEN, before)
        runner(rows(3))
        assert torch.equal(SEEN, before + 1)


@pytest.mark.parametrize("declared_first", [True, False])
def test_a_plain_run_puts_back_declared_and_undeclared_writes_to_one_memory(
    declared_first: bool, op_that_lies: str
) -> None:
    module = Model().eval()
    view = module.kv[:2]
    with state_kept(module, torch.device("cpu")):
        for declared in (declared_first, not declared_first):
            if declared:
                view.mul_(3)
            else:
                torch.ops.undeclared.lie(torch.ones(3), module.kv)
        assert not torch.equal(module.kv, torch.arange(4.0))
    assert torch.equal(module.kv, torch.arange(4.0))


def _declare(source: str, **options: object) -> None:
    """Run a cell of a notebook that declares `again::op`."""
    scope: dict[str, object] = {"torch": torch, "__name__": "cell"}
    exec(compile(source, f"/tmp/cell_{abs(hash(source))}.py", "exec", dont_inherit=True), scope)
    kernel = scope["op"]
    pcgsvc.splitting_op("again::op", **options)(kernel)  # type: ignore[arg-type,type-var]


def test_an_op_may_be_declared_again_with_another_signature_fake_and_writes() -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0], 1)

    _declare("def op(x: torch.Tensor) -> torch.Tensor: return x * 2", fake=torch.empty_like)
    with build(lambda x: torch.ops.again.op(x * 1.0) + 1) as runner:
        assert torch.equal(runner(rows(3)), rows(3) * 2 + 1)
        _declare("def op(x: torch.Tensor) -> torch.Tensor: return x[:, :1] * 3", fake=narrow)
        with build(lambda x: torch.ops.again.op(x * 1.0) + 1) as other:
            assert torch.equal(other(rows(3)), rows(3)[:, :1] * 3 + 1)
        source = "def op(x: torch.Tensor, out: torch.Tensor, by: float) -> None: out.copy_(x * by)"
        _declare(source, mutates_args=("out",))
        spec = find_spec("again::op")
        assert spec is not None
        assert "Tensor(a1!) out, float by" in spec.schema

        def forward(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(x.shape[0], WIDTH)
            torch.ops.again.op(x * 1.0, out, 5.0)
            return out + 1

        with build(forward) as third:
            assert torch.equal(third(rows(3)), plain(forward, rows(3)))
        assert torch.equal(runner(rows(3)), rows(3) * 2 + 1)


def test_another_function_under_the_same_name_is_refused() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x

    decorate: Callable[..., object] = pcgsvc.splitting_op("undeclared::counts", fake=other)
    with pytest.raises(pcgsvc.PcgError, match="undeclared::counts: already registered"):
        decorate(other)


def test_a_function_that_is_decorated_twice_is_the_op_once_more() -> None:
    def double(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    declare = pcgsvc.splitting_op("undeclared::twice", mutates_args=("out",))
    called, out = declare(declare(double)), torch.zeros(2)
    called(torch.ones(2), out)
    assert out.tolist() == [2.0, 2.0]
