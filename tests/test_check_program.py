"""The compiled program against the module at a cold build, and what a failed check says."""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, build, make_config, rows
from torch import nn

import pcgsvc
from pcgsvc.check import causes
from pcgsvc.check.trial import Trial
from pcgsvc.compilers import passes
from pcgsvc.compilers.passes import GraphPass
from pcgsvc.config import CacheConfig, Compiler, Config, OnMismatch
from pcgsvc.errors import ConfigError, ForwardError, TraceError, VerifyError


@pcgsvc.splitting_op("check::twice", mutates_args=("out",))
def twice(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def attended(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.check.twice(x, out)
    return out


CALLS = [0]


@pcgsvc.splitting_op("check::counting", mutates_args=("out",))
def counting(x: torch.Tensor, out: torch.Tensor) -> None:
    CALLS[0] += 1
    out.copy_(x * CALLS[0])


# ---- the compiler is wrong -----------------------------------------------------------------------


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = attended(self.first(x))
        z = y.relu() + x  # the pass below is about this line
        return self.last(z.sin())


def double_an_operand(graph: torch.fx.Graph) -> None:
    """Double the second operand of every addition of tensors: a wrong compiler pass."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        other = node.args[1]
        if isinstance(other, torch.fx.Node):
            with graph.inserting_before(node):
                doubled = graph.call_function(aten.mul.Tensor, (other, 2))
            doubled.meta["val"] = other.meta["val"]
            node.args = (node.args[0], doubled)


def wrong_config(cache: Path, on_mismatch: str, mode: str = "piecewise") -> Config:
    config = make_config(mode, compiler="inductor")
    config.compiler.passes = ["double"]
    config.compiler.on_mismatch = OnMismatch(on_mismatch)
    config.cache = CacheConfig(dir=str(cache))
    return config


def wrong_build(module: nn.Module, config: Config) -> pcgsvc.Runner:
    return pcgsvc.build_runner(module, rows(3), dynamic_dims={"x": 0}, config=config)


@pytest.fixture
def wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(passes.PASSES, "double", GraphPass(run=double_an_operand))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("raises", [False, True])
def test_an_op_that_returns_its_argument_undeclared_is_named_beside_the_compiler(
    raises: bool,
) -> None:
    """Torch warns of it; where the environment has `CI`, generated code raises."""
    from torch._functorch import config

    setting = "error_on_custom_op_aliasing"
    with torch.library._scoped_library("rp_alias", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CompositeExplicitAutograd")
        torch.library.register_fake("rp_alias::same", torch.empty_like, lib=library)

        def forward(x: torch.Tensor) -> Any:
            h = x * 2
            return torch.ops.rp_alias.same(h).add_(1), h + 1

        words = r"rp_alias::same returns its argument 'x' or a view of it.*have it return a copy"
        known = {setting: raises} if hasattr(config, setting) else {}
        with config.patch(known), pytest.raises(VerifyError, match=words):
            build(forward, rows(3), compiler="inductor", sizes=[4])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "piecewise"])
def test_a_wrong_compiler_is_named_by_piece_op_and_line(
    tmp_path: Path, wrong_pass: None, mode: str
) -> None:
    lines, first = inspect.getsourcelines(Added.forward)
    line = first + next(at for at, text in enumerate(lines) if "the pass below" in text)
    words = rf"piece_02: aten::add at .*test_check_program\.py:{line} in forward.*on_mismatch=eager"
    with pytest.raises(VerifyError, match=words) as caught:
        wrong_build(Added().eval(), wrong_config(tmp_path, "error", mode))
    assert "1 region(s)" in str(caught.value)


@pytest.mark.slow
def test_on_mismatch_eager_runs_the_wrong_piece_uncompiled_cold_and_warm(
    tmp_path: Path, wrong_pass: None, caplog: pytest.LogCaptureFixture
) -> None:
    module, config = Added().eval(), wrong_config(tmp_path, "eager")
    for start, compiled, loaded in (("cold", 2, 0), ("warm", 0, 1)):
        caplog.clear()
        with wrong_build(module, config) as runner:
            found = runner.report["compile"]
            assert (found["start"], found["num_compiled"], found["num_loaded"]) == (
                start,
                compiled,
                loaded,
            )
            (text,) = found["uncompiled"]
            assert text.startswith("piece_02: aten::add at")
            assert runner.report["warnings"][-1] == f"runs uncompiled: {text}"
            assert f"runs uncompiled: {text}" in caplog.text
            for size in (1, 3, 8, 11):
                torch.testing.assert_close(runner(rows(size)), module(rows(size)))
    config.partition.splitting_ops = ["check::twice"]  # another program of the same pieces
    with wrong_build(module, config) as runner:  # of which the wrong one is not in the store
        found = runner.report["compile"]
        assert (found["start"], found["num_compiled"], found["num_loaded"]) == ("cold", 1, 1)


@pytest.mark.slow
def test_strict_refuses_an_uncompiled_piece(tmp_path: Path, wrong_pass: None) -> None:
    config = replace(wrong_config(tmp_path, "eager"), strict=True)
    with pytest.raises(ConfigError, match="runs uncompiled: piece_02"):
        wrong_build(Added().eval(), config)


@pytest.mark.slow
def test_state_that_inductor_writes_wrong_is_found_in_mode_none() -> None:
    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("st", torch.arange(8.0).reshape(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.st.index_put_((torch.arange(4),), self.st * 2)
            self.st.add_(self.st.flip(0))
            return attended(x) @ self.st.T  # the library's: g++ takes seconds for a kernel

    module, example = State().eval(), torch.ones(3, 2)
    plain = copy.deepcopy(module)  # with state of its own
    config = make_config("none", compiler="inductor")
    try:
        runner = pcgsvc.build_runner(module, example, dynamic_dims={"x": 0}, config=config)
    except VerifyError as error:
        assert "piece_00: aten::" in str(error)  # noqa: PT017 - a mended torch is right
    else:
        for _ in range(3):
            assert torch.equal(runner(example), plain(example))


def test_a_program_that_is_wrong_without_graphs_is_the_compiler_s_fault() -> None:
    """As a stored piece may be: a warm start does not compare it region by region."""
    with build(Added().eval()) as runner:
        (last, *_) = [s.piece for s in reversed(runner.model.program.spec.steps) if s.piece]
        right = runner.model.program.pieces[last]

        class Wrong:
            opaque, boundaries = True, None

            def __call__(self, *args: Any) -> Any:
                return [t.roll(1, 0) for t in right(*args)]

            def source(self) -> str:
                return ""

            def num_kernels(self) -> int:
                return 1

        request = runner.request
        config = replace(
            request.config, compiler=replace(request.config.compiler, name=Compiler.INDUCTOR)
        )
        program = runner.model.program.replacing({last: Wrong()})
        model = replace(runner.model, program=program)
        trial = Trial.of(model, runner.memory, replace(request, config=config))
        with torch.no_grad():
            assert causes.of_entry(row(), None, runner.memory, trial).endswith(causes.COMPILER)


def row(**changes: Any) -> dict[str, Any]:
    found = {"mode": "piecewise", "size": 4, "num_tokens": 3, "spoilt_state": []}
    found |= {"max_rel_err": 1.0, "tolerance": 0.0, "max_rel_err_true": 1.0, "tolerance_true": 0.0}
    return {**found, **changes}


# ---- causes --------------------------------------------------------------------------------------


def test_random_numbers_are_called_so() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, training=True)

    with pytest.raises(VerifyError, match=r"random numbers \(aten::dropout\)"):
        build(forward)


def test_attention_over_rows_without_dropout_is_not_called_random() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x[None], x[None], attended(x)[None])[0]

    with pytest.raises(VerifyError, match="the forward mixes rows"):
        build(forward)


def test_a_compiled_program_that_draws_random_numbers_is_built_uncompared_in_mode_none() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return attended(nn.functional.dropout(x, 0.5, training=True))

    with build(forward, mode="none") as runner:  # the ops themselves: the same numbers
        assert runner.report["warnings"] == []


@pytest.mark.slow
def test_inductors_random_numbers_are_named_and_not_compared(tmp_path: Path) -> None:
    """Inductor draws other numbers than the ops themselves, cold and warm."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return attended(nn.functional.dropout(x, 0.5, training=True))

    config = make_config("none", compiler="inductor")
    config.cache = CacheConfig(dir=str(tmp_path))
    for start in ("cold", "warm"):
        with pcgsvc.build_runner(forward, rows(3), dynamic_dims={"x": 0}, config=config) as runner:
            assert runner.report["compile"]["start"] == start
            (warning,) = runner.report["warnings"]
            assert "was not compared with the module: the forward draws random" in warning
            kept = runner(rows(8)) != 0
        assert kept.any()
        assert not kept.all()
    config = make_config("piecewise", compiler="inductor")
    with pytest.raises(VerifyError, match=r"draws random numbers \(aten::dropout\)"):
        pcgsvc.build_runner(forward, rows(3), dynamic_dims={"x": 0}, config=config)


def test_a_count_that_a_splitting_op_keeps_is_called_host_state_that_changes() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.check.counting(x, out)
        return out + 1

    with pytest.raises(VerifyError, match="host state that changes from call to call") as caught:
        build(forward, mode="none")
    assert caught.value.report is not None  # though nothing was captured
    assert caught.value.report["compile"]["start"] == "cold"


def test_a_row_count_that_the_module_refuses_is_named_where_capture_does_not_skip_it() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return attended(x) + torch.zeros(5, WIDTH)[torch.arange(x.shape[0])]

    words = "not compared with the module at 8 rows: the forward raises IndexError"
    with build(forward, mode="none", sizes=[4, 8]) as runner:
        (warning,) = runner.report["warnings"]
        assert words in warning
    with build(forward, sizes=[4, 8]) as runner:
        assert runner.report["warnings"] == []
        assert [skipped["size"] for skipped in runner.report["graphs"]["skipped"]] == [8]


def test_a_forward_that_asks_whether_it_is_traced_is_found_in_every_mode() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return attended(x * (2 if torch.compiler.is_compiling() else 3))

    for mode in ("none", "piecewise"):
        with pytest.raises(VerifyError, match="whether it is being traced"):
            build(forward, mode=mode)
    build(forward, mode="none", self_check=False).close()


@torch.library.custom_op("checkprogram::wipes", mutates_args=())
def wipes(x: torch.Tensor) -> torch.Tensor:
    """Write to its argument, and do not say so."""
    y = x * 2
    x.zero_()
    return y


@wipes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_rows_mixed_behind_a_splitting_op_are_called_so() -> None:
    with pytest.raises(VerifyError, match="the forward mixes rows behind a splitting op"):
        build(lambda x: attended(x + 1).sort(0).values, mode="piecewise", sizes=[4, 8])


def test_an_undeclared_write_to_an_input_is_named_and_not_called_host_state() -> None:
    named = r"checkprogram::wipes writes to its argument 'x'.*checkprogram::wipes\(Tensor x\)"
    for mode in ("none", "piecewise"):
        with pytest.raises(VerifyError, match=named):
            build(lambda x: wipes(x) + x, mode=mode)


# ---- plain execution is not one thing ------------------------------------------------------------


def test_attention_modules_of_torch_take_the_path_that_was_traced() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return self.attention(y, y, y, need_weights=False)[0]

    module, x = Model().eval(), torch.randn(3, 5, 16)
    with build(module, {"x": torch.randn(6, 5, 16)}) as runner, torch.no_grad():
        torch.testing.assert_close(runner(x), module(x))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("mask", [torch.zeros(6, 5, dtype=torch.bool), torch.rand(6, 5) > 0.5])
def test_rows_that_torch_packs_by_a_mask_are_refused_with_the_fix(mask: torch.Tensor) -> None:
    class Model(nn.Module):
        def __init__(self, *, nested: bool) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=mask)

    inputs = {"x": torch.randn(6, 5, 8), "mask": mask}
    dims = dict.fromkeys(inputs, 0)
    with pytest.raises(TraceError, match=r"\['encoder'\].*enable_nested_tensor=False"):
        build(Model(nested=True).eval(), inputs, dims)
    module, x, ends = Model(nested=False).eval(), torch.randn(3, 5, 8), torch.zeros(3, 5) > 0
    ends[:, 3:] = True
    with build(module, inputs, dims) as runner, torch.no_grad():
        torch.testing.assert_close(runner(x, ends), module(x, ends))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_build_under_autocast_is_refused_with_the_fix() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match=r"torch\.autocast\('cpu'\) is on.*into the forward"),
    ):
        build(Added().eval())


def test_a_call_under_autocast_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with build(Added().eval()) as runner:
        with torch.autocast("cpu", torch.bfloat16), caplog.at_level(logging.WARNING):
            runner(rows(3))
            runner(rows(3))
        assert caplog.text.count("called under torch.autocast") == 1


def test_a_write_to_an_inference_tensor_is_refused_by_name_and_reading_one_is_fine() -> None:
    class State(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes = writes
            self.register_buffer("total", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                self.total.add_(1)
            return attended(x) + self.total

    with torch.inference_mode():
        reads, writes = State(False).eval(), State(True).eval()
    with build(reads) as runner:
        torch.testing.assert_close(runner(rows(3)), rows(3) * 2)
    with pytest.raises(ForwardError, match=r"\['total'\] were made under torch\.inference_mode"):
        build(writes)


@pytest.mark.parametrize(
    "name",
    ["torch.nn.attention.sdpa_kernel", "torch.func", "torch.inference_mode"],
)
def test_a_context_manager_around_a_splitting_op_is_refused_by_its_name(name: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if name == "torch.func":
            return attended(torch.func.vmap(torch.sin)(x))
        if name == "torch.inference_mode":
            with torch.inference_mode():
                return attended(x * 2) + 1
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return attended(x * 2) + 1

    with pytest.raises(TraceError, match=rf"^{name} at .*test_check_program\.py:\d+ in forward"):
        build(forward)
