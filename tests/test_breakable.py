"""`partition.strategy=breakable`: models that are not traced, on recorded graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, make_config, plain, rows, toy, verified

import pcgsvc
from pcgsvc.compilers.eager import EagerPiece
from pcgsvc.config import Strategy
from pcgsvc.errors import (
    CaptureError,
    PcgError,
    SplitError,
    StaleAddressError,
    TraceError,
    VerifyError,
)
from pcgsvc.forward.results import flatten
from pcgsvc.partition.submodules import Calls, chosen, compile_submodules, in_place, watched


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
        assert all(e.num_graphs == 2 for e in runner.table.entries.values())
        assert [row["ok"] for row in verified(runner)] == [True, True]
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
        (entry, _) = runner.table.entries.values()
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


def test_a_print_in_a_break_is_not_reported_since_replays_repeat_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @pcgsvc.eager_break
    def step(x: torch.Tensor, out: torch.Tensor) -> None:
        print("stepped")  # noqa: T201 - the subject
        out.copy_(x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        out = torch.empty_like(y)
        step(y, out)
        return out + 1

    with build(forward) as runner:
        assert not any("prints" in w for w in runner.report["warnings"])
        capsys.readouterr()
        runner(rows(3))
    assert capsys.readouterr().out == "stepped\n"


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

    class Generated(EagerPiece):
        """A piece whose code reads memory as it was traced to lie."""

        def __call__(self, *args: Any) -> Sequence[Any]:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            assert all(a.is_contiguous() and not a.is_neg() for a in tensors)
            return super().__call__(*args)

    def compile_piece(piece: Any) -> Any:
        made.append(piece)
        return Generated(piece.document)

    forwards, warnings = compile_submodules(model, names, calls[0], calls[1], compile_piece)
    assert (len(made), warnings) == (1, [])
    given = [rows(5), rows(10)[::2], rows(WIDTH, 5).t(), torch._neg_view(rows(5)), rows(1)]
    for x in (*given, rows(1).expand(5, -1)):
        wanted = model(x)
        with in_place(model, forwards):
            assert "forward" in vars(model.mlp)
            torch.testing.assert_close(model(x), wanted)
        assert "forward" not in vars(model.mlp)


def test_a_submodule_runs_itself_where_its_trace_or_its_code_is_not_valid() -> None:
    class Part(torch.nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor, twice: bool) -> torch.Tensor:
            y = x * 3 if x.shape[0] > 16 else x + bias
            return y.relu() * 2 if twice else y

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = torch.arange(WIDTH if x.shape[0] < 9 else 1)
            return self.part(x, bias if x.shape[0] != 6 else bias + 0.5, x.shape[0] != 5)

    class Code(EagerPiece):
        """Wrong where it is not valid."""

        assumes = ("s != 3",)

        def __call__(self, *args: Any) -> Sequence[Any]:
            ran.append(True)
            (x,) = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2]
            return [result * (x.shape[0] != 3) for result in super().__call__(*args)]

    model, calls, ran = Model().eval(), [Calls(), Calls()], list[bool]()
    for size, seen in zip((8, 7), calls, strict=True):
        with watched(model, seen):
            model(rows(size))
    forwards, warnings = compile_submodules(
        model, ["part"], calls[0], calls[1], lambda piece: Code(piece.document or {})
    )
    assert warnings == []
    for size in (2, 3, 5, 6, 8, 9, 17):
        with in_place(model, forwards):
            got = model(rows(size))
        torch.testing.assert_close(got, model(rows(size)))
        assert bool(ran) is (size in (2, 8))
        ran.clear()


# ---- state that is no buffer, inputs, results ----------------------------------------------------


class Holder:
    """A plain object that holds tensors."""

    def __init__(self) -> None:
        self.count = torch.zeros(WIDTH)
        self.last = torch.zeros(1)


@pcgsvc.eager_break
def replace_last(x: torch.Tensor, out: torch.Tensor) -> None:
    """Put another tensor where there was one, at each call."""
    HOLDER.last = x[:1] * 2
    out.copy_(x)


HOLDER = Holder()


class Stateful(torch.nn.Module):
    """State as an attribute, in nested containers, in an object, in a closure and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(WIDTH)
        self.nested = {"a": [torch.zeros(WIDTH)]}
        self.holder = Holder()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.row = torch.zeros(1).expand(WIDTH)
        inside = self.inside = [torch.zeros(WIDTH)]
        self.add = lambda: inside[0].add_(1)

    def state(self) -> list[torch.Tensor]:
        return [
            self.plain,
            self.nested["a"][0],
            self.holder.count,
            self.weight,
            self.inside[0],
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in self.state()[:-1]:
            tensor.add_(1)
        self.add()
        for tensor in self.state():
            x = x + tensor
        return x + self.row


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_state_of_every_kind_is_untouched_by_building_and_kept_by_calls(mode: str) -> None:
    module = Stateful().eval()
    with build(module, mode) as runner:
        assert all(torch.equal(t, torch.zeros(WIDTH)) for t in module.state())
        for calls in (1, 2):
            torch.testing.assert_close(runner(rows(3)), rows(3) + 5 * calls)
            assert all(torch.equal(t, torch.full((WIDTH,), float(calls))) for t in module.state())


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums = [torch.zeros(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums[0].add_(x.sum(0))
        return x * 2


def test_padding_that_reaches_such_state_is_found_out_and_the_state_put_back() -> None:
    module = Sums().eval()
    with pytest.raises(VerifyError, match=r"state \['sums\[0\]'\]"):
        build(module)
    assert torch.equal(module.sums[0], torch.zeros(WIDTH))


def test_a_tensor_that_is_replaced_is_refused_unless_a_break_replaces_it() -> None:
    weights = [torch.ones(WIDTH)]
    with build(lambda x: x * weights[0]) as runner:
        assert torch.equal(runner(rows(3)), rows(3))
        weights[0] = torch.zeros(WIDTH)
        with pytest.raises(StaleAddressError, match=r"^weights\[0\]: its memory"):
            runner(rows(3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        replace_last(x + HOLDER.count, out)
        return out * 2

    with build(forward) as runner:
        for _ in range(2):
            assert torch.equal(runner(rows(3)), rows(3) * 2)


def writes_idempotently(x: torch.Tensor) -> torch.Tensor:
    x[:, :2].clamp_(min=0)
    return x * 2


def writes_by_out(x: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=x)
    return x * 2


def other_keys(x: torch.Tensor) -> Any:
    return {"big" if len(x) > 5 else "small": x * 2}


def sometimes_none(x: torch.Tensor) -> Any:
    return x * 2, x * 3 if len(x) > 5 else None


def text(x: torch.Tensor) -> Any:
    return x * 2, f"{len(x)} rows"


def is_large(x: torch.Tensor) -> Any:
    return x * 2, len(x) > 5


def sometimes_the_input(x: torch.Tensor) -> Any:
    return x if len(x) > 5 else x * 2


def other_rank(x: torch.Tensor) -> Any:
    return x * 2 if len(x) > 5 else (x * 2)[None]


WRONG: list[tuple[Callable[..., Any], str]] = [
    (writes_idempotently, "writes to its input 'x' with aten::clamp_"),
    (writes_by_out, "writes to its input 'x' with aten::add"),
    (other_keys, r"nested as .*'big'.* and .*'small'.*, for 8 and 4 rows"),
    (sometimes_none, "leaf 1 is a torch.float32 tensor of 2 dimensions and None, for 8 and 4"),
    (text, "leaf 1 is '8 rows' and '7 rows', for 8 and 7 rows"),
    (is_large, "leaf 1 is True and False, for 8 and 4 rows"),
    (sometimes_the_input, "leaf 0 is the input 'x' and a torch.float32 tensor"),
    (other_rank, "2 dimensions and a torch.float32 tensor of 3 dimensions"),
]


@pytest.mark.parametrize(("forward", "words"), WRONG)
def test_writes_to_inputs_and_results_of_another_form_are_refused(
    forward: Callable[..., Any], words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        build(forward)


@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_without_a_graph_the_module_s_own_result_is_returned(mode: str) -> None:
    """What it decides in Python is fixed at capture alone; 8, 7 and 4 rows are tried before."""
    kept = torch.zeros(9, WIDTH)

    def forward(x: torch.Tensor) -> Any:
        y = x + 1
        out = torch.empty_like(y)
        clip(y, out)
        return (out, kept, x, "nine") if len(x) == 9 else (out, x * 2, x, "other")

    with build(forward, mode) as runner:
        for count in (8, 9) if mode == "piecewise" else (3, 8, 9):
            x = rows(count)
            out, second, same, word = runner(x)
            (wanted, other, _, due), _ = flatten(plain(forward, x))
            assert torch.equal(out, wanted)
            assert torch.equal(second, other)
            assert (same is x, word) == (True, due)
        assert second.data_ptr() != kept.data_ptr()  # the caller's own
