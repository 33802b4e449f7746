"""Every private torch name that pcgsvc touches, one test each: a new torch breaks here first."""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from pcgsvc import torch_private as private


def traced(function: Any, *args: torch.Tensor) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return Dynamo's graph of a function and the guards that it made."""
    graphs: list[torch.fx.GraphModule] = []
    guards: list[Sequence[Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        private.dynamo_trace(function, args, backend, guards.append)
    return graphs[0], list(guards[-1])


def test_every_function_has_a_test_here() -> None:
    text = Path(__file__).read_text()
    names = [
        n
        for n, f in inspect.getmembers(private, inspect.isfunction)
        if f.__module__ == private.__name__ and not n.startswith("_")
    ]
    assert len(names) > 15
    assert [n for n in names if f"private.{n}(" not in text] == []


def test_is_torch_file_goes_by_the_folder_of_the_installed_torch() -> None:
    assert private.is_torch_file(inspect.getfile(torch.nn.Linear))
    assert not private.is_torch_file("/home/me/torch/model.py")
    assert not private.is_torch_file(inspect.getfile(torch).replace("torch", "torchvision"))


# ---- Dynamo --------------------------------------------------------------------------------------


def test_mark_dynamic_gives_a_symbolic_size_and_without_it_the_size_is_fixed() -> None:
    x = torch.zeros(11, 3)
    graph, _ = traced(lambda x: x * 2, x)
    assert not any(n.meta["example_value"].dim() == 0 for n in graph.graph.nodes if not n.args)
    private.mark_dynamic(x, 0)
    graph, _ = traced(lambda x: x * 2, x)
    first = next(n for n in graph.graph.nodes if n.op == "placeholder")
    assert isinstance(first.meta["example_value"], torch.SymInt)


def test_dynamo_trace_gives_one_graph_its_result_and_all_guards() -> None:
    scale = 3

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    calls: list[int] = []
    seen: list[Sequence[Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls.append(len(list(graph.graph.nodes)))
        return graph.forward

    result = private.dynamo_trace(forward, [torch.ones(2)], backend, seen.append)
    assert torch.equal(result, torch.full((2,), 3.0))
    assert len(calls) == 1
    assert any("scale" in g.name and g.value == 3 for g in seen[-1] if g.has_value)


def test_through_torch_tells_dynamo_s_own_global_from_a_user_s() -> None:
    _, guards = traced(lambda x: x * 2 if type(x).__name__ == "Tensor" else x, torch.ones(2))
    own = {g.name for g in guards if private.through_torch(g.name)}
    assert own == {g.name for g in guards if g.name.startswith("G['_") and ".Tensor" in g.name}
    assert own
    assert not private.through_torch("G['_c0'].Tensor")
    assert not private.through_torch("G['__import_torch'].Tensor")


class HasABuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 if hasattr(self, "calls") and not hasattr(x, "mine") else x


def test_guard_value_is_what_was_read_and_not_an_attribute_of_which_only_the_presence_was() -> None:
    module = HasABuffer()
    _, guards = traced(lambda x: module(x), torch.ones(2))
    assert any(private.guard_value(g) is module for g in guards)
    for guard in guards:
        value = private.guard_value(guard)
        if guard.guard_type != "HASATTR":
            assert value is (guard.value if guard.has_value else None)
        elif guard.name.endswith((".calls", ".mine")):  # as torch 2.11 names them
            assert value is None
    late = {"guard_type": "HASATTR", "has_value": True, "value": 1}
    for create, value in ((print, None), (functools.partial(print, attr="mine"), 1)):
        entry = types.SimpleNamespace(orig_guard=types.SimpleNamespace(create_fn=create), **late)
        assert private.guard_value(entry) == value


def test_setting_source_reads_what_the_entry_of_a_config_module_amounts_to() -> None:
    config = torch._dynamo.config
    entry = config._config["verbose"]
    found = private.setting_source("config._config['verbose']", entry)
    with config.patch(verbose=not config.verbose):
        assert eval(str(found)) is config.verbose
    assert eval(str(found)) is config.verbose
    assert private.setting_source("config._config['a.b']", entry) == "config.a.b"
    assert private.setting_source("config._config['verbose']", True) is None
    assert private.setting_source("config._config['verbose'].default", entry) is None


def test_dynamo_s_errors_are_told_from_others() -> None:
    def by_value(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    def by_truth(x: torch.Tensor) -> torch.Tensor:  # torch asserts that this does not happen
        return (x, x * 2)[x.shape[0] > 15]

    x = torch.ones(11, 3)
    private.mark_dynamic(x, 0)
    for forward in (by_value, by_truth):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of several classes
            traced(forward, x)
        assert private.is_dynamo_error(caught.value)
        assert not private.is_op_failure(caught.value)
    assert not private.is_dynamo_error(AssertionError("of our own"))


def test_an_op_failure_is_one_of_sizes_that_do_not_fit() -> None:
    table = torch.ones(8, 3)
    x = torch.ones(11, 3)
    private.mark_dynamic(x, 0)
    with pytest.raises(RuntimeError) as caught:
        traced(lambda x: x + table[: x.shape[0]], x)
    assert private.is_op_failure(caught.value)


def test_tracing_shape_env_is_the_running_trace_s() -> None:
    x = torch.zeros(11, 3)
    private.mark_dynamic(x, 0)
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(private.tracing_shape_env())
        return graph.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x

    private.dynamo_trace(forward, [x], backend, lambda guards: None)
    assert [str(g.expr) for g in found[0].guards if "4" in str(g.expr)] != []


def test_ignored_call_names_what_has_no_effect_on_a_result() -> None:
    assert private.ignored_call(torch._C._set_grad_enabled)
    assert private.ignored_call(torch._C._log_api_usage_once)
    assert private.ignored_call(torch.cuda.get_device_capability)
    assert not private.ignored_call(torch.add)


def test_autocast_kind_tells_enter_from_exit() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return x @ x

    graph, _ = traced(forward, torch.ones(2, 2))
    kinds = [private.autocast_kind(n.target) for n in graph.graph.nodes]
    assert [k for k in kinds if k] == ["enter", "exit"]


def test_transform_name_calls_context_managers_and_transforms_as_users_do() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            x = torch.func.vmap(torch.sin)(x)
        with torch.inference_mode():
            x = x + 1
        torch.set_default_dtype(torch.float32)
        return x

    graph, _ = traced(forward, torch.ones(2, 2))
    names = [private.transform_name(n.target) for n in graph.graph.nodes]
    assert list(dict.fromkeys(n for n in names if n)) == [
        "torch.nn.attention.sdpa_kernel",
        "torch.func",
        "torch.inference_mode",
        "torch.set_default_dtype",
    ]


def test_symbolic_expr_and_python_source_give_an_expression_that_python_reads() -> None:
    x = torch.zeros(11, 3)
    private.mark_dynamic(x, 0)
    graph, _ = traced(lambda x: x.new_zeros((x.shape[0] * 2 + 1) // 2), x)
    last = [n for n in graph.graph.nodes if n.op == "call_method"][-1]
    expression = private.symbolic_expr(last.meta["example_value"].shape[0])
    (symbol,) = expression.free_symbols
    source = private.python_source(expression)
    assert eval(source, {str(symbol): 7, "math": math}) == (7 * 2 + 1) // 2
    root = torch.sym_sqrt(torch.sym_float(torch.sym_max(last.meta["example_value"].shape[0], 25)))
    source = private.python_source(private.symbolic_expr(root))
    assert "torch" not in source
    assert eval(source, {str(symbol): 7, "math": math}) == 5.0


def test_a_settled_size_is_made_with_the_symbol_that_it_is_known_to_equal() -> None:
    x, y = torch.zeros(11, 3), torch.zeros(11, 3)
    private.mark_dynamic(x, 0)
    private.mark_dynamic(y, 0)
    graph, _ = traced(lambda x, y: x + y, x, y)
    sizes = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
    sizes = [size for size in sizes if isinstance(size, torch.SymInt)]
    known = {str(private.symbolic_expr(size)) for size in sizes}
    made = {str(private.settled(size).node._expr) for size in sizes}
    assert made == known
    assert len(known) == 1
    assert private.settled(3) == 3


def test_size_symbol_conditions_and_the_number_that_is_known_follow_torch_s_guards() -> None:
    x = torch.zeros(11, 3)
    private.mark_dynamic(x, 0)
    graph, _ = traced(lambda x: x * 2, x)
    fake = next(n for n in graph.graph.nodes if n.op == "placeholder" and n.users)
    shape = fake.meta["example_value"].shape
    assert private.size_symbol([torch.ones(3), 5]) is None
    found = private.size_symbol([torch.ones(3), fake.meta["example_value"]])
    assert found is not None
    assert private.size_conditions(*found) == {}
    assert shape[0] + 12 <= 32
    (condition,) = private.size_conditions(*found)
    assert [eval(condition, {"s": s}) for s in (20, 21)] == [True, False]
    assert private.size_known(*found) is None
    assert shape[0] == 11
    assert private.size_known(*found) == 11


def test_storage_id_is_shared_by_views_and_works_on_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    for mode in (FakeTensorMode(), torch.no_grad()):
        with mode:
            x, y = torch.ones(4), torch.ones(4)
            assert private.storage_id(x) == private.storage_id(x.view(2, 2)[1])
            assert private.storage_id(x) != private.storage_id(y)


def test_import_compilers_imports_what_was_asked_for() -> None:
    private.import_compilers(inductor=False)
    assert "torch._dynamo" in sys.modules


# ---- ops -----------------------------------------------------------------------------------------


def test_op_schema_of_overload_and_packet_says_what_is_written() -> None:
    schema = private.op_schema(torch.ops.aten.add_.Tensor)
    assert next(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    assert private.op_schema(torch.ops.aten.relu).name == "aten::relu"
    assert private.op_schema(torch.relu) is None


def test_op_name_is_the_same_for_overload_and_packet() -> None:
    assert private.op_name(torch.ops.aten.add.Tensor) == "aten::add"
    assert private.op_name(torch.ops.aten.add) == "aten::add"
    assert private.op_name(torch.add) is None


def test_higher_order_name_is_that_of_operators_with_graphs_of_their_own_alone() -> None:
    assert private.higher_order_name(torch.ops.higher_order.cond) == "cond"
    for other in (torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.add, "add"):
        assert private.higher_order_name(other) is None


def test_op_schemas_are_those_of_every_overload() -> None:
    schemas = private.op_schemas(torch.ops.aten.add)
    assert len(schemas) == len(torch.ops.aten.add.overloads())
    assert any("Scalar" in s for s in schemas)


def test_op_exists_finds_any_overload_and_nothing_else() -> None:
    assert private.op_exists("aten::add")
    assert not private.op_exists("aten::no_such_op")


def test_a_function_whose_result_is_assumed_constant_is_marked() -> None:
    assert private.is_constant_function(torch.compiler.assume_constant_result(lambda: 2.0))
    assert not private.is_constant_function(lambda: 2.0)


def test_op_tags_of_a_packet_are_those_of_its_overloads() -> None:
    assert torch.Tag.inplace_view in private.op_tags(torch.ops.aten.squeeze_.default)
    assert torch.Tag.inplace_view in private.op_tags(torch.ops.aten.squeeze_)
    assert private.op_tags(operator.add) == set()


def test_is_torch_op_knows_packet_and_overload() -> None:
    assert private.is_torch_op(torch.ops.aten.add)
    assert private.is_torch_op(torch.ops.aten.add.Tensor)
    assert not private.is_torch_op(torch.add)


def test_qualified_name_leads_back_to_the_function() -> None:
    assert private.qualified_name(torch.relu) == "torch.relu"
    assert private.qualified_name(operator.add).endswith("operator.add")
    assert private.qualified_name(torch.nn.functional.silu) == "torch.nn.functional.silu"


# ---- Inductor ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifact() -> Any:
    x = torch.zeros(11, 3)
    private.mark_dynamic(x, 0)
    kept: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        fakes = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        kept.append(private.inductor_compile(graph, fakes, {"config_patches": {}}))
        return graph.forward

    with torch.no_grad():
        private.dynamo_trace(lambda x: (x.sin() + 1) * 2, [x], backend, lambda guards: None)
    return kept[0]


@pytest.mark.slow
def test_inductor_compile_serves_other_sizes_than_the_traced_one(artifact: Any) -> None:
    assert private.inductor_compile(  # an artifact of no dynamic input as well
        torch.fx.symbolic_trace(lambda x: (x + 1,)), [torch.ones(2)], {"config_patches": {}}
    )
    x = torch.randn(5, 3)
    torch.testing.assert_close(artifact(5, x)[0], (x.sin() + 1) * 2)


@pytest.mark.slow
def test_inductor_source_is_the_generated_code(artifact: Any) -> None:
    assert "sin" in private.inductor_source(artifact)


@pytest.mark.slow
def test_count_kernels_finds_the_one_fused_kernel(artifact: Any) -> None:
    assert private.count_kernels(private.inductor_source(artifact)) >= 1
    assert private.count_kernels("def call(args):\n    return args\n") == 0


def test_partition_options_are_settings_of_this_torch() -> None:
    import torch._inductor.config as settings

    options = private.partition_options(["toy::attend"])
    assert options["graph_partition"] is True
    assert all(hasattr(settings, name) for name in options)
    assert "toy::attend" in options["custom_should_partition_ops"]


@pytest.mark.slow
def test_inductor_serialize_and_deserialize_give_an_equal_artifact(artifact: Any) -> None:
    data = private.inductor_serialize(artifact)
    assert isinstance(data, bytes)
    again = private.inductor_deserialize(data)
    x = torch.randn(7, 3)
    assert torch.equal(again(7, x)[0], artifact(7, x)[0])


def test_inductor_settings_are_those_that_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as settings

    assert private.inductor_settings() == {}
    monkeypatch.chdir(tmp_path)
    with settings.patch(max_autotune=True, epilogue_fusion=settings.epilogue_fusion):
        assert private.inductor_settings() == {"max_autotune": "True"}
    assert private.inductor_settings() == {}


def test_inductor_settings_import_nothing() -> None:
    code = (
        "import sys; from pcgsvc import torch_private as p; assert p.inductor_settings() == {}; "
        "assert 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inductor_generated_is_the_module_around_which_torch_does_nothing(artifact: Any) -> None:
    found = private.inductor_generated(artifact)
    assert "def call(self, args)" in found.source
    x = torch.randn(7, 3)
    assert torch.equal(found.namespace["call"]([7, x])[0], artifact(7, x)[0])
    assert not any(map(private.is_inductor_kernel, found.namespace.values()))  # C++ here


def test_inductor_generated_refuses_what_torch_does_more_to() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(4, 2)
    graph.output((graph.call_method("view", (x, 8)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    made = private.inductor_compile(module, [torch.ones(4, 2)], {})
    with pytest.raises(private.NotDirectError, match="its results alias its inputs"):
        private.inductor_generated(made)


@pytest.mark.parametrize("count", [0, 2])
def test_static_kernel_wants_a_kernel_that_is_chosen(count: int) -> None:
    kernel = types.SimpleNamespace(fn=torch.mm, launchers=[None] * count)
    with pytest.raises(private.NotDirectError, match=f"has {count} variants, none chosen"):
        private.static_kernel(kernel)


def test_static_kernel_wants_the_static_launcher() -> None:
    launcher = types.SimpleNamespace(config=object())
    result = types.SimpleNamespace(config=launcher.config)
    kernel = types.SimpleNamespace(fn=torch.mm, launchers=[launcher], compile_results=[result])
    with pytest.raises(private.NotDirectError, match="is not launched statically"):
        private.static_kernel(kernel)


@pytest.mark.parametrize("handles", [("function", 32, 0), ("module", "function", 32, 0)])
def test_load_static_kernel_launches_and_unloads(
    handles: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    launcher = types.SimpleNamespace(
        _load_kernel=lambda *args: calls.append(("load", *args)) or handles,
        _launch_kernel=lambda *args: calls.append(("launch", *args)),
        _unload_kernel=lambda *args: calls.append(("unload", *args)),
    )
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", launcher, raising=False)
    launch = private.load_static_kernel(
        Path("k.cubin"), name="k", shared=8, num_warps=4, types="Oi", num_scratch=1, device=1
    )
    launch(3, 1, 1, 7, "x", 5)
    del launch
    assert calls[:2] == [
        ("load", "k.cubin", "k", 8, 1),
        ("launch", "function", 3, 1, 1, 4, 8, "OiO", ("x", 5, None), 7),
    ]
    assert calls[2:] == ([("unload", "module")] if len(handles) == 4 else [])


def test_settle_triton_cache_points_groups_to_where_they_lie(tmp_path: Path) -> None:
    names = ["attend.json", "attend.cubin"]
    group = tmp_path / "KEY" / "__grp__attend.json"
    group.parent.mkdir()
    group.write_text(json.dumps({"child_paths": {n: f"/gone/KEY/{n}" for n in names}}))
    private.settle_triton_cache(tmp_path)
    found = json.loads(group.read_text())["child_paths"]
    assert found == {n: str(group.parent / n) for n in names}


def test_triton_finds_a_kernel_group_in_a_moved_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "old"))
    made = cache.get_cache_manager("ab" * 32)
    made.put_group("k.json", {"k.json": made.put("{}", "k.json", binary=False)})
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    private.settle_triton_cache(tmp_path / "new")
    found = cache.get_cache_manager("ab" * 32).get_group("k.json")
    assert Path(found["k.json"]).is_relative_to(tmp_path / "new")


def test_is_inductor_kernel_tells_nothing_else_for_one() -> None:
    assert not private.is_inductor_kernel(torch.mm)


def test_inductor_defaults_hold_for_the_block_alone() -> None:
    import torch._inductor.config as settings

    before = settings.cpp_cache_precompile_headers
    with private.inductor_defaults():
        assert settings.cpp_cache_precompile_headers is False
        assert settings.fx_graph_remote_cache is False
    assert settings.cpp_cache_precompile_headers == before


def test_inductor_defaults_start_as_many_workers_as_asked_for() -> None:
    import torch._inductor.config as settings

    with private.inductor_defaults():
        assert settings.compile_threads == 1
    with private.inductor_defaults(threads=3):
        assert settings.compile_threads == 3


def test_fake_mode_gives_shapes_and_no_memory() -> None:
    with private.fake_mode():
        x = torch.empty(1 << 40, 3)
        assert (x.t() @ x).shape == (3, 3)
    assert type(x).__name__ == "FakeTensor"


def test_graph_pass_runs_every_function_and_has_the_identity_that_it_is_given() -> None:
    ran: list[int] = []
    one = private.graph_pass([lambda g: ran.append(1), lambda g: ran.append(2)], "digest")
    one(torch.fx.Graph())
    assert (ran, one.uuid()) == ([1, 2], "digest")


def test_functionalized_op_is_that_of_a_call_without_writes() -> None:
    graph = torch.fx.Graph()
    functional = torch.ops.higher_order.auto_functionalized_v2
    call = graph.call_function(functional, (torch.ops.aten.add_.Tensor,))
    assert private.functionalized_op(call) is torch.ops.aten.add_.Tensor
    assert private.functionalized_op(graph.call_function(torch.add)) is None
    assert private.functionalized_op(3) is None


def test_fake_like_and_fake_call_stay_in_the_mode_of_their_value() -> None:
    with private.fake_mode():
        x = torch.empty(3, 4).t()
    y = private.fake_like(x, torch.int8)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), torch.int8)
    z = private.fake_call(torch.ops.aten.sum.dim_IntList, (x, [0]), {})
    assert z.shape == (3,)
    assert z.fake_mode is y.fake_mode is x.fake_mode  # type: ignore[attr-defined]


def test_tuning_options_are_all_known_to_inductor() -> None:
    options = private.tuning_options(max_autotune=True, combo_kernels=True, threads=3)
    assert options == {"max_autotune": True, "combo_kernels": True, "compile_threads": 3}


def test_compile_workers_start_when_woken_and_stop_leaves_none() -> None:
    from torch._inductor import async_compile

    with private.inductor_defaults():
        private.wake_compile_workers()
        assert not async_compile._pool_set
    with private.inductor_defaults(threads=2):
        private.wake_compile_workers()
        assert async_compile._pool_set
        assert async_compile.AsyncCompile._ready_future is not None
        private.stop_compile_workers()
    assert not async_compile._pool_set


def test_probe_cpp_compiler_leaves_a_library_once_in_the_folder_that_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it tries all that a kernel needs is seen in `test_warm_processes`."""
    from torch._inductor.codecache import CppCodeCache

    CppCodeCache.cache_clear()
    with private.inductor_defaults():
        for folder, count in (("first", 1), ("second", 0)):
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
            private.probe_cpp_compiler()
            assert len(list((tmp_path / folder).rglob("c*.main.so"))) == count


def test_forget_loaded_code_empties_inductors_caches() -> None:
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, PyCodeCache

    loaded = types.ModuleType("loaded")
    for cache in (CppCodeCache.cache, CppPythonBindingsCodeCache.cache):
        cache["a hash"] = lambda: loaded
    sys.modules["a hash.kernel"] = loaded
    PyCodeCache.modules.append(loaded)
    private.forget_loaded_code()
    assert not CppCodeCache.cache
    assert not CppPythonBindingsCodeCache.cache
    assert "a hash.kernel" not in sys.modules
    assert not PyCodeCache.modules


def test_triton_version_is_the_installed_one_or_none() -> None:
    from importlib.util import find_spec

    assert (private.triton_version() is None) == (find_spec("triton") is None)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_alias_without_owning_sees_the_memory_and_lets_it_go() -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)[:, 1:]
    alias = private.alias_without_owning(x)
    assert torch.equal(alias, x)
    assert alias.stride() == x.stride()
    before = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() < before


@pytest.mark.gpu
def test_alias_without_owning_reads_as_the_tensor_reads() -> None:
    x = torch.complex(*torch.arange(12.0, device="cuda").view(2, 6))
    for tensor in (x.conj(), x.conj().imag, x.conj()[1:].t()):
        alias = private.alias_without_owning(tensor)
        assert torch.equal(alias, tensor)
        assert alias.data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
def test_pool_ranges_hold_what_a_capture_allocates() -> None:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        y = x * 2
        graph.capture_end()
    ranges = private.pool_ranges([graph.pool()])
    assert any(start <= y.data_ptr() < end for start, end in ranges)
    assert not any(start <= x.data_ptr() < end for start, end in ranges)


@pytest.mark.gpu
def test_abandon_capture_leaves_allocator_and_generator_usable() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    x = torch.ones(4, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with pytest.raises(RuntimeError):
            (x * 2).sum().item()
        private.abandon_capture(graph, device, pool)
        again = torch.cuda.CUDAGraph()
        again.capture_begin(pool=torch.cuda.graph_pool_handle())
        y = x * 3
        again.capture_end()
        again.replay()
        torch.rand(2, device=device)
    torch.cuda.synchronize()
    assert torch.equal(y, x * 3)


CHANGED: list[int] = []


def test_side_effects_names_what_a_trace_changes() -> None:
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(private.side_effects())
        return graph.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        CHANGED.append(1)
        return x * 2

    private.dynamo_trace(forward, [torch.ones(2)], backend, lambda guards: None)
    private.dynamo_trace(lambda x: x * 2, [torch.ones(2)], backend, lambda guards: None)
    assert "CHANGED" in found[0][0]
    assert found[1] == []


class Flag:
    def __init__(self) -> None:
        self.on: bool | int = False


FLAG = Flag()


@pytest.mark.parametrize(("end", "changed"), [(False, False), (True, True), (0, True)])
def test_side_effects_leaves_out_what_is_put_back(end: bool | int, changed: bool) -> None:
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(private.side_effects())
        return graph.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        FLAG.on = True
        y = x * 2 if FLAG.on else x
        FLAG.on = end
        return y

    try:
        private.dynamo_trace(forward, [torch.ones(2)], backend, lambda guards: None)
    finally:
        FLAG.on = False
    assert bool(found[0]) == changed


def test_op_functions_are_the_python_kernels_and_the_fake_of_an_op() -> None:
    @torch.library.custom_op("privatetest::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    functions = [f for f in private.op_functions("privatetest::double") if f is not None]
    assert any(getattr(f, "__wrapped__", f).__code__.co_name == "double" for f in functions)
    assert [f for f in private.op_functions("privatetest::none") if f is not None] == []


def test_a_registered_hook_is_counted() -> None:
    before = private.hooks_registered()
    handle = torch.nn.Linear(1, 1).register_forward_hook(lambda *args: None)
    assert private.hooks_registered() > before
    after = private.hooks_registered()
    handle.remove()
    assert private.hooks_registered() == after


def test_global_hooks_are_those_registered_for_every_module() -> None:
    def hook(module: torch.nn.Module, args: Any) -> None:
        return None

    handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        assert hook in private.global_hooks()
    finally:
        handle.remove()
    assert hook not in private.global_hooks()


def test_pytree_says_which_classes_it_takes_apart() -> None:
    assert private.is_pytree_class(dict)
    assert private.is_pytree_class(tuple)
    assert not private.is_pytree_class(torch.Tensor)
    assert not private.is_pytree_class(type("Mine", (), {}))


# ---- tensors without memory ----------------------------------------------------------------------


def test_fake_tensors_have_shapes_a_device_and_no_memory() -> None:
    block = private.fake_tensors()
    real = torch.ones(2)
    with block:
        made = torch.empty(1 << 40, dtype=torch.float32)
        mixed = made[:2] + real
        assert private.shapes_only()
        with private.real_tensors():
            assert not private.shapes_only()
            inside = torch.ones(2)
    assert not private.shapes_only()
    assert not private.has_memory(made)
    assert not private.has_memory(mixed)
    assert private.has_memory(real)
    assert private.has_memory(inside)
    assert not private.has_memory(torch.empty(2, device="meta"))
    assert made.untyped_storage().nbytes() == 4 << 40
    for tensor in (made, mixed):
        with pytest.raises(RuntimeError, match="data pointer"):
            tensor.data_ptr()
    with block:  # again
        assert (made + 1).shape == made.shape


def test_fake_modules_can_be_converted_where_they_are_swappable() -> None:
    block = private.fake_tensors()
    memo = block.fake_tensor_converter.meta_converter.tensor_memo
    with block, private.swappable(block):
        for module in (torch.nn.Linear(3, 3), torch.nn.RMSNorm(3), torch.nn.Embedding(3, 3)):
            module.to(torch.bfloat16)
            assert module.weight.dtype is torch.bfloat16
    assert block.fake_tensor_converter.meta_converter.tensor_memo is memo


def test_python_bodies_are_what_replaces_an_op_when_it_is_traced() -> None:
    library = torch.library.Library("privatebody", "DEF")
    for name in ("composite", "kernel", "faked"):
        library.define(f"{name}(Tensor x) -> Tensor")
    library.impl("composite", lambda x: x * 2, "CompositeImplicitAutograd")
    library.impl("kernel", lambda x: x * 2, "CPU")
    library.impl("kernel", lambda x: torch.empty_like(x), "Meta")
    torch.library.register_fake("privatebody::faked", torch.empty_like, lib=library)
    (found,) = private.python_bodies("privatebody::composite")
    assert found.startswith("CompositeImplicitAutograd (")
    (found,) = private.python_bodies("privatebody::kernel")
    assert found.startswith("Meta (")
    assert private.python_bodies("privatebody::faked") == []
    assert private.python_bodies("privatebody::none") == []


def test_an_op_that_was_undeclared_can_be_declared_otherwise() -> None:
    for signature in ("op(Tensor x) -> Tensor", "op(Tensor x, int y) -> Tensor"):
        library = torch.library.Library("privateagain", "FRAGMENT")
        library.define(signature)
        assert str(torch.ops.privateagain.op.default._schema) == f"privateagain::{signature}"
        private.undeclare_ops(library)
    assert not private.op_exists("privateagain::op")


# ---- calls ---------------------------------------------------------------------------------------


def test_the_cpp_compiler_is_named_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import cpp_builder

    found = private.cpp_compiler()
    assert found is None or shutil.which(found) is not None
    cpp_builder.cpp_compiler_search.cache_clear()  # torch keeps what it has found
    monkeypatch.setenv("PATH", str(tmp_path))
    assert private.cpp_compiler() is None


def test_set_grad_turns_gradients_off_and_on() -> None:
    private.set_grad(False)
    assert not torch.is_grad_enabled()
    private.set_grad(True)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_tensors_are_copied_at_once(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        shapes = [(3, 4), (5,), (2, 3)]
        values = [torch.arange(30, dtype=dtype)[: math.prod(s)].view(s).to(device) for s in shapes]
        values[2] = values[2].t().contiguous().t()  # laid out otherwise
        targets = [torch.zeros(s, dtype=dtype, device=device) for s in shapes]
        assert private.can_copy_all(targets)
        private.copy_all(targets, (*values[:2], values[2].cpu()))
        for one, other in zip(targets, values, strict=True):
            assert torch.equal(one, other)
        assert not private.can_copy_all(targets[:1])
        assert not private.can_copy_all([*targets, torch.zeros(2, dtype=torch.float16)])
    assert not private.can_copy_all([torch.zeros(2, dtype=torch.float8_e4m3fn)] * 2)


@pytest.mark.gpu
def test_streams_and_devices_are_known_by_number() -> None:
    torch.cuda.init()
    assert private.current_device() == torch.cuda.current_device()
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()
    assert private.current_raw_stream(0) == default.cuda_stream
    with torch.cuda.stream(side):
        assert private.current_raw_stream(0) == side.cuda_stream
    assert not private.is_external_stream(default)
    assert not private.is_external_stream(side)
    assert private.is_external_stream(torch.cuda.ExternalStream(side.cuda_stream))


def test_a_tensor_without_memory_says_that_it_has_no_values() -> None:
    with private.fake_tensors():
        tensor = torch.ones(1)
        with pytest.raises(RuntimeError) as caught:
            tensor.item()
    assert private.is_fake_limit(caught.value)
    assert not private.is_fake_limit(RuntimeError())
    assert not private.is_fake_limit(None)


# ---- process groups ------------------------------------------------------------------------------


def test_process_groups_are_listed_with_their_ranks_and_found_by_name(group: None) -> None:
    (world,) = private.process_groups()
    assert private.process_groups() == {world: [0]}
    assert private.group_named(world.group_name) is world


def test_the_rendezvous_store_has_a_connection_of_its_own(group: None) -> None:
    store = private.rendezvous_store()
    store.set("key", "word")
    assert store.check(["key"])
    assert store.get("key") == b"word"
    assert not private.rendezvous_store().check(["other"])


def test_a_thread_inside_destroy_process_group_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    home: Any = distributed.distributed_c10d
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert private.ending_groups() == []
    seen, real = [], home._unregister_all_process_groups
    monkeypatch.setattr(
        home,
        "_unregister_all_process_groups",
        lambda: (seen.append(private.ending_groups()), real()),
    )
    distributed.destroy_process_group()
    assert seen == [[None]]
    assert private.ending_groups() == []


def test_a_dtensor_is_lowered_to_ops_on_its_local_part(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    assert not private.is_dtensor(torch.zeros(2))
    mesh = init_device_mesh("cpu", (1,))
    assert private.is_mesh(mesh)
    assert not private.is_mesh(1)
    weight = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    assert private.is_dtensor(weight)
    assert private.is_dtensor_spec(weight._spec)
    assert not private.is_dtensor_spec(weight)
    part = private.local_tensor(weight)
    assert part is private.local_tensor(weight)
    assert not private.is_dtensor(part)
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made.extend(private.lowered_dtensors(graph, inputs))
        return lambda *args: (torch.zeros(1),)

    def forward(x: torch.Tensor) -> Any:
        return (weight * 2).redistribute(placements=[Replicate()]).to_local().sum() + x

    with torch.no_grad():
        private.dynamo_trace(forward, [torch.ones(1)], backend, lambda guards: None)
    graph, inputs = made
    assert any(value is part for value in inputs)
    assert not any(map(private.is_dtensor, inputs))
    names = {private.op_name(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert {"aten::mul", "aten::sum"} <= names


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="it runs uncompiled there")
@pytest.mark.filterwarnings("ignore")
def test_an_error_of_torch_compile_under_a_mode_is_known() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with pytest.raises(RuntimeError) as caught, Mode():
        torch.compile(lambda x: x * 2, fullgraph=True)(torch.ones(2))
    assert private.is_compile_error(caught.value)
    assert not private.is_compile_error(RuntimeError("no"))
    assert not private.is_compile_error(None)


def test_without_a_group_there_are_none() -> None:
    assert private.process_groups() == {}
