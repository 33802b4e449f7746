"""Numbers of the forward's source are tensors of the program: no graph holds their copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, rows, trace_of
from torch import nn

import pcgsvc

Forward = Callable[[nn.Module, torch.Tensor], Any]


def _add_to_made(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made = torch.tensor([1.0, 2.0], device=x.device)
    made += 1  # a new one at each call
    return x[:, :2] * made


def _write_columns(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = x.clone()
    h[:, [0, -1]] = x[:, [2, 1]]
    h[..., [[1], [2]]] += 1
    return h


def _write_elements(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(module.state, torch.Tensor)
    assert isinstance(module.seen, torch.Tensor)
    module.state[0] = 2
    module.state[1] = 2.75
    module.seen[1, 0] = 7.75  # cut off, as torch does
    module.seen[0, 1] = True
    return x + module.state.sum() + module.seen.sum()


def _write_picked(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h, rows = x.clone(), torch.arange(x.shape[0], device=x.device)
    h[rows, (x[:, 0] > 0).long()] = 3
    h[rows[:1]] = 0.5
    h[:, x[0] > 9] = 7  # filled
    counts = (x * 8).to(torch.uint8)
    counts[:, [0]] = 200
    return h + counts


FORMS: dict[str, tuple[Forward, int]] = {
    "tensor": (lambda _, x: x + torch.tensor([1.0] * WIDTH, device=x.device), 1),
    "tensor of one number": (lambda _, x: x * torch.tensor(3.5), 1),
    "tensor without numbers": (lambda _, x: x + torch.tensor([]).sum(), 1),
    "infinities": (lambda _, x: x.clamp(*torch.tensor([-torch.inf, 0.5])), 1),
    "as_tensor": (lambda _, x: x.double() + torch.as_tensor(1 / 3, dtype=torch.float64), 1),
    "asarray": (lambda _, x: x + torch.asarray([[1], [2]])[0], 1),
    "new_tensor": (lambda _, x: x + x.new_tensor([2])[0], 1),
    "written to": (_add_to_made, 1),
    "list as index": (lambda _, x: x[:, [0, 2]], 1),
    "tuple as index": (lambda _, x: x[..., (1, -1)], 1),
    "list of lists as index": (lambda _, x: x[:, [[0, 1], [2, 2]]].sum(1), 1),
    "the same list twice": (lambda _, x: x[:, [0, 2]] + x.sin()[:, [0, 2]], 1),
    "columns written": (_write_columns, 3),
    "elements written": (_write_elements, 4),
    "picked elements written": (_write_picked, 4),
}
"""Each with the number of tensors that it needs."""


class Numbers(nn.Module):
    def __init__(self, form: Forward) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(3))
        self.register_buffer("seen", torch.zeros(2, 2, dtype=torch.long))
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self, x)


def built(module: nn.Module, config: dict[str, Any]) -> pcgsvc.Runner:
    return pcgsvc.build_runner(module, (rows(3),), dynamic_dims={"x": 0}, config=config)


def literals(runner: pcgsvc.Runner) -> list[str]:
    return [b.name for b in runner.model.program.spec.bindings if b.kind == "literal"]


def test_every_form_gives_at_all_calls_what_the_module_gives() -> None:
    for name, (form, count) in FORMS.items():
        module = Numbers(form).eval()
        alone = copy.deepcopy(module)
        config = {"mode": "full", "capture": {"sizes": [2, 4]}, "cache": {"mode": "off"}}
        with pcgsvc.build_runner(
            module, (rows(3),), dynamic_dims={"x": 0}, config=config
        ) as runner:
            assert len(literals(runner)) == count, name
            for at, n in enumerate((2, 1, 4, 3, 6, 2)):
                x = rows(n, seed=at)
                torch.testing.assert_close(runner(x), alone(x), rtol=0, atol=0, msg=name)
                assert all(map(torch.equal, module.buffers(), alone.buffers())), name
            assert runner.stats()["fallbacks"], "six rows"


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + torch.tensor([1j, 2j, 3j])[0].real,
        lambda x: x[:, 0],
        lambda x: x.masked_fill(x > 0, 2.0),
        lambda x: x.index_fill(1, x[0, :1].long() * 0, 2.0),
    ],
    ids=["complex numbers", "whole number", "argument of an op", "index that is computed"],
)
def test_what_needs_no_tensor_of_its_own_gets_none(
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert {b.kind for b in trace_of(forward, rows(3), {"x": 0}).bindings} <= {"size", "input"}


def test_a_warm_start_makes_the_numbers_again(tmp_path: Path) -> None:
    config = {"mode": "full", "capture": {"sizes": [4]}, "cache": {"dir": str(tmp_path)}}
    starts, names = [], []
    for _ in range(2):
        module = Numbers(_write_columns).eval()
        with pcgsvc.build_runner(
            module, (rows(3),), dynamic_dims={"x": 0}, config=config
        ) as runner:
            starts.append(runner.model.start)
            names.append(literals(runner))
            assert torch.equal(runner(rows(3)), module(rows(3)))
    assert starts == ["cold", "warm"]
    assert (
        names[0] == names[1] == ['[[2, 1], "int64"]', '[[0, -1], "int64"]', '[[[1], [2]], "int64"]']
    )


def test_a_program_whose_numbers_cannot_be_read_names_them() -> None:
    from pcgsvc.trace.literals import literal

    for name in ("[1", '[[1], "none"]', "7", '[["a"], "int64"]'):
        with pytest.raises(pcgsvc.PcgError, match="says no numbers"):
            literal(name, torch.device("cpu"))
