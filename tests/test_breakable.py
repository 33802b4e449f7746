"""`partition.strategy=breakable`: models that are not traced, on recorded graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, make_config, rows, toy

import pcgsvc
from pcgsvc.config import Strategy
from pcgsvc.errors import CaptureError, PcgError, SplitError, TraceError
from pcgsvc.partition.submodules import Calls, chosen, compile_submodules, in_place, watched
from pcgsvc.samples import Samples
from pcgsvc.verify import verify


def build(module: Callable[..., Any], mode: str = "piecewise", **settings: Any) -> pcgsvc.Runner:
    config = make_config(mode, [4, 8], **settings)
    config.partition.strategy = Strategy.BREAKABLE
    return pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config)


@pcgsvc.eager_break
def clip(x: torch.Tensor, out: torch.Tensor) -> None:
    """Branch on data of the true rows, which Dynamo cannot trace."""
    true = x[: pcgsvc.current_context().num_tokens]
    out.copy_(x.clamp(-1, 1) if bool((true.abs() > 1).any()) else x)


class Untraceable(torch.nn.Module):
    """Two regions around a break that no tracer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        out = torch.empty_like(y)
        clip(y, out)
        return self.linear(out) + x


def test_a_model_that_cannot_be_traced_whole_runs_and_is_verified() -> None:
    torch.manual_seed(0)
    module = Untraceable().eval().requires_grad_(False)
    with build(module) as runner:
        partition = runner.report["partition"]
        assert (partition["num_regions"], partition["num_boundaries"]) == (2, 1)
        assert all(e.num_graphs == 2 for e in runner.parts.table.entries.values())
        parts = runner.parts
        checked = verify(
            runner, Samples(parts.workspace, parts.make_inputs, seed=1, query_len=1), seed=2
        )
        assert [row["ok"] for row in checked] == [True, True]
        for scale in (0.01, 10.0, 0.01):
            x = rows(5, seed=3) * scale
            y = module.linear(x)
            torch.testing.assert_close(runner(x), module.linear(y.clamp(-1, 1)) + x)


def test_the_fx_strategy_names_the_line_and_the_way_out() -> None:
    with pytest.raises(TraceError, match=r"test_breakable\.py:\d+(.|\n)*breakable"):
        pcgsvc.build_runner(
            Untraceable().eval(), rows(3), dynamic_dims={"x": 0}, config=make_config()
        )


def test_splitting_ops_are_breaks_and_segments_are_one_more() -> None:
    module = toy(3)
    with build(module) as runner:
        (entry, _) = runner.parts.table.entries.values()
        assert entry.boundaries == ("toy::attend",) * 3
        assert entry.num_graphs == 4
        assert runner.report["compile"]["num_traces"] == 0


class Counts(torch.nn.Module):
    """Counts its calls in a Python attribute."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


def test_a_python_side_effect_is_refused_and_put_back() -> None:
    module = Counts().eval()
    with pytest.raises(CaptureError, match=r"'calls'\] at .*test_breakable\.py:\d+ in forward"):
        build(module)
    assert module.calls == 0


CHANGING = [0]


@pcgsvc.eager_break
def numbered(x: torch.Tensor, out: torch.Tensor, number: int) -> None:
    """Take a Python number."""
    out.copy_(x + number)


def uses_changing_number(x: torch.Tensor) -> torch.Tensor:
    CHANGING[0] += 1
    out = torch.empty_like(x)
    numbered(x + 1, out, CHANGING[0])
    return out * 2


def test_an_argument_of_a_break_that_changes_between_runs_is_refused() -> None:
    with pytest.raises(CaptureError, match="frozen at capture"):
        build(uses_changing_number)


@pcgsvc.eager_break
def returns(x: torch.Tensor) -> torch.Tensor:
    """Return new memory, which no graph would read again."""
    return x * 2


def test_a_break_that_returns_a_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="write into a buffer"):
        build(lambda x: returns(x + 1) + 1)


def test_attention_that_is_no_break_is_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]

    with pytest.raises(SplitError, match="scaled_dot_product_attention"):
        build(forward)


def test_a_device_read_outside_a_break_is_refused() -> None:
    with pytest.raises(CaptureError, match="waits for a device value"):
        build(lambda x: x * float(x.sum().item()))


def test_a_host_read_of_the_context_outside_a_break_is_refused() -> None:
    with pytest.raises(PcgError, match="num_tokens"):
        build(lambda x: x * pcgsvc.current_context().num_tokens)


def test_a_print_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        print("hello")  # noqa: T201 - the subject
        return x * 2

    with build(forward) as runner:
        assert any("prints ('hello')" in w for w in runner.report["warnings"])
    assert "hello" in capsys.readouterr().out


def test_outside_a_capture_an_eager_break_is_an_ordinary_function() -> None:
    x, out = rows(3), torch.empty(3, WIDTH)
    numbered(x, out, 2)
    assert torch.equal(out, x + 2)


# ---- submodules compiled on their own ------------------------------------------------------------


def test_the_largest_submodules_without_a_break_are_chosen_and_compiled() -> None:
    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.up(x)) * 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()
            self.head = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.mlp(x))

    model = Model().eval().requires_grad_(False)
    calls = [Calls(), Calls()]
    for size, seen in zip((4, 3), calls, strict=True):
        with watched(model, seen):
            model(rows(size))
    names = chosen(model, calls[0], None)
    assert names == ["mlp"]  # a single layer of torch's own has nothing to fuse
    made = []

    def compile_piece(piece: Any) -> Any:
        from pcgsvc.compilers.eager import EagerPiece

        made.append(piece)
        return EagerPiece(piece.document)

    forwards, warnings = compile_submodules(model, names, calls[0], calls[1], compile_piece)
    assert (len(made), warnings) == (1, [])
    x = rows(5)
    wanted = model(x)
    with in_place(model, forwards):
        assert "forward" in vars(model.mlp)
        assert torch.equal(model(x), wanted)
    assert "forward" not in vars(model.mlp)
