"""Every private torch name that pcgsvc uses, one function each, so that a new torch breaks here.

In and out: tensors, functions and graphs; no types of pcgsvc's. Ordered by the rooms that ask.
`tests/test_torch_private.py` has a test per name, `docs/versions.md` the torch versions tried.

Functions import the compiler (`torch._dynamo`, `torch._inductor`) themselves: importing it takes
seconds, which a warm start does not have.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

# ---- any room ------------------------------------------------------------------------------------


def is_torch_file(path: str) -> bool:
    """Whether a source file is part of the installed torch, for finding the user's line."""
    return path.startswith(_TORCH_FOLDER)


_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def storage_id(tensor: torch.Tensor) -> int:
    """Return an identity of the tensor's storage, for fake tensors as well."""
    return int(tensor.untyped_storage()._cdata)


def is_torch_op(target: Any) -> bool:
    """Whether `target` is a torch.ops callable."""
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def op_name(op: Any) -> str | None:
    """Return `ns::op` of a torch.ops callable without its overload, else None."""
    if isinstance(op, torch._ops.OpOverload):
        return str(op._schema.name)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    return None


def qualified_name(function: Callable[..., Any]) -> str:
    """Return the dotted name by which FX would print `function`."""
    return str(torch.fx.node._get_qualified_name(function))


class RecordingMode(TorchDispatchMode):
    """A dispatch mode whose handler torch does not wrap for Dynamo to skip.

    That wrapper imports Dynamo at the first op, which takes seconds; these modes are never traced.
    What a forward compiles itself runs uncompiled in the block: torch would not compile it under a
    mode, and would remember for good that it did not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stances: list[Any] = []

    def __enter__(self) -> Self:
        """Enter the block."""
        known = "torch._dynamo" in sys.modules  # else nothing has been compiled
        stance = torch.compiler.set_stance("force_eager") if known else contextlib.nullcontext()
        stance.__enter__()
        self._stances.append(stance)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        """Leave it."""
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*exc)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which tensors have memory, also inside `fake_tensors`."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def shapes_only() -> bool:
    """Whether a fake tensor mode is active, in which tensors have no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def import_compilers(*, inductor: bool) -> None:
    """Import Dynamo, and Inductor if asked for, so that the time it takes can be measured."""
    importlib.import_module("torch._dynamo")
    if inductor:
        importlib.import_module("torch._inductor.compile_fx")


# ---- forward, ops --------------------------------------------------------------------------------


def is_pytree_class(cls: type) -> bool:
    """Whether torch's pytree flattens instances of a class: built in, or registered."""
    from torch.utils import _pytree

    return cls in _pytree.SUPPORTED_NODES


def functionalized_op(node: Any) -> Any:
    """Return the in-place op that a node of a functional graph calls, else None."""
    if getattr(node, "target", None) is not torch.ops.higher_order.auto_functionalized_v2:
        return None
    return node.args[0]


def fake_like(value: Any, dtype: torch.dtype) -> Any:
    """Return a fake tensor of the same shape and strides, in the same fake mode."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


def fake_call(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op on fake values, the first of which is a tensor, in its fake mode."""
    with args[0].fake_mode:
        return target(*args, **kwargs)


# ---- trace ---------------------------------------------------------------------------------------


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Mark `dim` of `tensor` as symbolic for Dynamo."""
    import torch._dynamo

    torch._dynamo.mark_dynamic(tensor, dim)


def dynamo_trace(
    function: Callable[..., Any],
    args: Sequence[torch.Tensor],
    backend: Callable[..., Any],
    guard_sink: Callable[[Sequence[Any]], None],
) -> Any:
    """Call `function` under `torch.compile(fullgraph=True, dynamic=False)` and return its result.

    `guard_sink` receives Dynamo's guards with their values (the hook is called several times; the
    last call has all of them). Dynamo's caches keep only an entry for `function`'s code object.
    """
    import torch._dynamo
    import torch._inductor.config as inductor_config  # Dynamo imports it too

    def keep_none(guards: Sequence[Any]) -> list[bool]:
        guard_sink(guards)
        return [False] * len(guards)

    compiled = torch.compile(
        function,
        fullgraph=True,
        dynamic=False,
        backend=backend,
        options={"guard_filter_fn": keep_none},
    )
    # Pinned: new in 2.14, where it would change the node order between versions.
    pins = {"canonicalize_output_graph_node_order": False}
    known = {k: v for k, v in pins.items() if hasattr(torch._dynamo.config, k)}
    # Freezing, which an environment variable can set, would make weights constants of the graph.
    with torch._dynamo.config.patch(known), inductor_config.patch(freezing=False):
        return compiled(*args)


def is_dynamo_error(error: Exception) -> bool:
    """Return whether an exception says that Dynamo cannot trace.

    Its own errors, and others that it did not expect: it adds the user's lines to those.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    own = isinstance(error, (TorchDynamoException, ConstraintViolationError))
    return own or "\n\nfrom user code:" in str(error)


def is_op_failure(error: BaseException | None) -> bool:
    """Return whether Dynamo stopped at an op that refused its fake arguments, as a size misfit."""
    from torch._dynamo.exc import TorchRuntimeError

    return isinstance(error, TorchRuntimeError)


def is_fake_limit(error: BaseException | None) -> bool:
    """Return whether an error says that a tensor without memory has no values to read."""
    return type(error).__module__ == "torch._subclasses.fake_tensor"


def is_compile_error(error: BaseException | None) -> bool:
    """Return whether an error is that of `torch.compile`, called under a dispatch mode.

    `torch.cond` and `flex_attention` call it, and import Dynamo for that.
    """
    kind, text = type(error).__module__, str(error)
    return kind == "torch._dynamo.exc" or text.startswith("torch.compile with fullgraph=True")


def side_effects() -> list[str]:
    """Return the sources whose Python state the running trace changes (inside a backend hook).

    Attributes that end with their old value, such as a flag set for a block, are not counted.
    """
    from torch._dynamo.source import TempLocalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    if not hasattr(effects, "_get_modified_vars"):
        return []  # results stored outside the forward's are still noticed by their sentinels
    changed = [v for v in effects._get_modified_vars() if not _put_back(effects, v)]
    sources = [getattr(v, "source", None) for v in changed]
    # Objects that the forward made itself have a temporary source.
    return [str(s.name) for s in sources if s is not None and not isinstance(s, TempLocalSource)]


def _put_back(effects: Any, variable: Any) -> bool:
    """Whether a trace changed only attributes of an object, and they have their old values."""
    from torch._dynamo.variables import ConstantVariable, UserDefinedObjectVariable

    stored = effects.store_attr_mutations.get(variable)
    if not stored or not isinstance(variable, UserDefinedObjectVariable):
        return False
    held = variable.value  # still unchanged: Dynamo applies changes after tracing
    inside = getattr(variable, "is_base_vt_modified", None)
    if inside is not None and inside(effects):
        return False
    for name, value in stored.items():
        then = getattr(held, "__dict__", {}).get(name, stored)  # missing: `stored`, no constant
        if not isinstance(then, _CONSTANTS) or not isinstance(value, ConstantVariable):
            return False
        now = value.as_python_constant()
        if type(now) is not type(then) or now != then:
            return False
    return True


_CONSTANTS = (bool, int, float, str, bytes, type(None))


def tracing_shape_env() -> Any:
    """Return the ShapeEnv of the running trace (inside a backend hook)."""
    from torch._guards import TracingContext

    fake_mode = TracingContext.get().fake_mode
    return None if fake_mode is None else fake_mode.shape_env


def ignored_call(target: Any) -> bool:
    """Whether a graph node logs API usage, sets the grad mode, or queries the device.

    A runner fixes the grad mode, and Dynamo has put the answer to the query into the graph.
    """
    return target in (
        torch._C._log_api_usage_once,
        torch._C._set_grad_enabled,
        torch.cuda.get_device_capability,
    )


def symbolic_expr(value: Any) -> Any:
    """Return the sympy expression behind a SymInt."""
    return value.node.expr


def settled(value: Any) -> Any:
    """Return a value, a SymInt with the expression that it has by all equalities met since.

    Inductor takes the one that it was made with, of whose symbols it may know nothing any more.
    """
    if not isinstance(value, torch.SymInt):
        return value
    node = value.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)


def python_source(expression: Any) -> str:
    """Return Python source of a sympy expression or relation; of modules, it names `math` alone.

    torch writes functions that take its symbols as well.
    """
    from torch.utils._sympy.printers import PythonPrinter

    text = re.sub(r"\btorch\.sym_(float|max|min)\b", r"\1", PythonPrinter().doprint(expression))
    return re.sub(r"\btorch\._sym_(\w+)", r"math.\1", text)


def size_symbol(values: Iterable[Any]) -> tuple[Any, Any] | None:
    """Return the symbol in the shapes of fake values, behind what knows it; None: there is none."""
    for value in values:
        for size in [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
                return size.node.shape_env, next(iter(size.node.expr.free_symbols))
    return None


def size_known(shape_env: Any, symbol: Any) -> int | None:
    """Return the number that a symbol is taken for by now, or None."""
    value = shape_env.replace(symbol)
    return int(value) if value.is_number else None


def size_conditions(shape_env: Any, symbol: Any) -> dict[str, str]:
    """Return what was assumed of one symbol so far: Python source over `s`, and the user's line.

    Not an equality that is built in by now, nor a limit that no memory reaches.
    """
    found: dict[str, str] = {}
    for guard in shape_env.guards:
        expression = shape_env.replace(guard.expr)
        if expression.free_symbols != {symbol}:
            continue
        text = re.sub(rf"\b{symbol}\b", "s", python_source(expression))
        if str(sys.maxsize) not in text:
            found.setdefault(text, str(guard.sloc.maybe_user_loc or ""))
    return found


def op_schema(op: Any) -> Any:
    """Return the schema of an OpOverload, or of a packet's only or default overload, else None."""
    if isinstance(op, torch._ops.OpOverload):
        return op._schema
    if isinstance(op, torch._ops.OpOverloadPacket):
        overloads = op.overloads()
        name = "default" if "default" in overloads or not overloads else overloads[0]
        return getattr(op, name)._schema
    return None


def higher_order_name(op: Any) -> str | None:
    """Return the name of an operator that runs graphs of its own (`cond`, …), else None."""
    return str(op._name) if isinstance(op, torch._ops.HigherOrderOperator) else None


# ---- program, partition --------------------------------------------------------------------------


def through_torch(source: str) -> bool:
    """Whether a guard's source reads torch through a global that Dynamo itself has set.

    Dynamo builds `type(tensor)` from it. Its name holds an address, another one in every process.
    """
    return f"G['_{id(torch)}_c" in source


def guard_value(entry: Any) -> Any:
    """Return what one of Dynamo's guards read; None where it read nothing that could be compared.

    On torch 2.11 a guard on whether an attribute is there has the attribute itself, not its owner,
    and of a buffer's own attributes Dynamo's mark is one, in the process that traced.
    """
    keywords = getattr(entry.orig_guard.create_fn, "keywords", {})
    if not entry.has_value or (entry.guard_type == "HASATTR" and "attr" not in keywords):
        return None
    return entry.value


def setting_source(source: str, value: Any) -> str | None:
    """Return where a setting of torch is read, if a guard's value is its entry in a config module.

    Dynamo of 2.15 enters the module and guards how the entry comes to its value, of which more than
    one way leads to the same: Inductor sets, in passing, what was the default.
    """
    named = re.fullmatch(r"(.+)\._config\['([\w.]+)'\]", source)
    is_entry = isinstance(value, torch.utils._config_module._ConfigEntry)
    return f"{named[1]}.{named[2]}" if named and is_entry else None


def op_schemas(packet: Any) -> list[str]:
    """Return the schemas of all overloads of a packet."""
    return [str(getattr(packet, name)._schema) for name in packet.overloads()]


def op_functions(name: str) -> list[Any]:
    """Return the Python functions behind an op made with `torch.library.custom_op`.

    Kernels registered by `torch.library.impl` are not included: only the dispatcher has them.
    """
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    made = OPDEFS.get(name)
    kernels = [] if made is None else [made._init_fn, *made._backend_fns.values()]
    fake = singleton.find(name).fake_impl.kernel
    return [*kernels, None if fake is None else fake.func]


def python_bodies(name: str) -> list[str]:
    """Return where Python functions are registered that torch runs in place of an op, when tracing.

    That is what `torch.library.impl` was given for `CompositeImplicitAutograd` (the op is what this
    body calls), or for `Meta` without `register_fake`. Only the dispatcher has the functions.
    """
    from torch._library.simple_registry import singleton

    if not torch._C._dispatch_has_kernel(name):
        return []
    keys = ["CompositeImplicitAutograd"]
    keys += ["Meta"] if singleton.find(name).fake_impl.kernel is None else []
    found = re.findall(
        r"^(\w+)(?:\[alias\])?: registered at (.*) :: \(none\) \[ boxed \]$",
        torch._C._dispatch_dump(name),
        re.MULTILINE,
    )
    return [f"{key} ({place})" for key, place in found if key in keys]


def undeclare_ops(library: torch.library.Library) -> None:
    """Take back what a library declared, so that it can be declared otherwise."""
    library._destroy()


def is_constant_function(function: Any) -> bool:
    """Whether `torch.compiler.assume_constant_result` marks it: only its result is traced."""
    return getattr(function, "_dynamo_marked_constant", False) is True


def op_tags(op: Any) -> set[torch.Tag]:
    """Return the tags of a torch.ops callable (all overloads of a packet)."""
    if isinstance(op, torch._ops.OpOverload):
        return set(op.tags)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return {tag for name in op.overloads() for tag in getattr(op, name).tags}
    return set()


def hooks_registered() -> int:
    """Return a number that grows whenever a hook of a module or tensor is registered."""
    return torch.utils.hooks.RemovableHandle.next_id


def global_hooks() -> list[Any]:
    """Return the hooks that run in every module; Dynamo traces them into the graph."""
    home = torch.nn.modules.module
    return [*home._global_forward_pre_hooks.values(), *home._global_forward_hooks.values()]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, the object itself; another tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, whose module is not imported for that."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(value, home.DTensor)


def is_dtensor_spec(value: Any) -> bool:
    """Whether a value says how a DTensor lies on its mesh."""
    home = sys.modules.get("torch.distributed.tensor._dtensor_spec")
    return home is not None and isinstance(value, home.DTensorSpec)


def is_mesh(value: Any) -> bool:
    """Whether a value is a device mesh, with which a forward makes DTensors itself."""
    home = sys.modules.get("torch.distributed.device_mesh")
    return home is not None and isinstance(value, home.DeviceMesh)


def lowered_dtensors(
    graph: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return a graph of Dynamo's over DTensors as one of aten ops over the parts of this process.

    Call it in Dynamo's backend. What is not a tensor or a size is no input of it any more.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [n.meta["example_value"] for n in graph.graph.find_nodes(op="placeholder")]
    kept = [at for at, e in enumerate(examples) if isinstance(e, (torch.Tensor, torch.SymInt))]

    def flat(*parts: Any) -> Any:
        given = list(inputs)
        for at, part in zip(kept, parts, strict=True):
            whole = inputs[at]
            if is_dtensor(whole):
                part = type(whole)(part, whole._spec, requires_grad=False)
            given[at] = part
        return torch.fx.Interpreter(graph).run(*given)

    fakes = [local_tensor(examples[at]) for at in kept]
    # DTensor makes tensors of its own, which are fake only inside of the mode.
    mode = next(value.fake_mode for value in fakes if hasattr(value, "fake_mode"))
    with torch.fx.traceback.preserve_node_meta(), mode:
        lowered = make_fx(flat)(*fakes)
    _fill_by_mask(lowered)
    for node in lowered.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    return lowered, [local_tensor(inputs[at]) for at in kept]


def _fill_by_mask(graph: torch.fx.GraphModule) -> None:
    """Have numbers that DTensor writes where a mask is, as an embedding's rows do, filled in.

    torch does so itself when it runs `x[mask] = 0`; what is traced are a tensor of the number, and
    an op whose work depends on the mask.
    """
    aten = torch.ops.aten
    for lifted in graph.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        held = getattr(graph, str(lifted.args[0].target))
        number = getattr(held, "constant", held)
        for user in list(lifted.users) if number is not None and not number.dim() else ():
            if user.target is aten.index_put_.default and len(user.args[1]) == 1:
                written, (mask,), _ = user.args
                for _ in range(written.meta["val"].dim() - mask.meta["val"].dim()):
                    with graph.graph.inserting_before(user):
                        wider = graph.graph.call_function(aten.unsqueeze.default, (mask, -1))
                    wider.meta = {**mask.meta, "val": mask.meta["val"].unsqueeze(-1)}
                    mask = wider
                user.target = aten.masked_fill_.Scalar
                user.args = (written, mask, number.item())
        for node in (lifted, lifted.args[0]):
            if not node.users:
                graph.graph.erase_node(node)


def process_groups() -> dict[Any, list[int]]:
    """Return the process groups that this process is in, oldest first, with their global ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return {}
    world: Any = distributed.distributed_c10d._world
    return {group: list(ranks) for group, ranks in world.pg_group_ranks.items()}


def rendezvous_store() -> Any:
    """Return a connection of its own to the store by which the default process group was made."""
    home: Any = distributed.distributed_c10d
    return home._get_default_store().clone()


def ending_groups() -> list[Any]:
    """Return what threads inside `destroy_process_group` were given; None: all groups."""
    code = distributed.destroy_process_group.__code__
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return [f.f_locals["group"] for stack in stacks for f, _ in stack if f.f_code is code]


def group_named(name: str) -> Any:
    """Return the process group that functional collectives call by a name."""
    home: Any = distributed.distributed_c10d
    return home._resolve_process_group(name)


def autocast_kind(target: Any) -> str | None:
    """Return `enter` or `exit` for the nodes of an autocast block, else None."""
    if target is torch.amp.autocast_mode._enter_autocast:
        return "enter"
    if target is torch.amp.autocast_mode._exit_autocast:
        return "exit"
    return None


def transform_name(target: Any) -> str | None:
    """Return what users call a node that sets up a context manager or transform, or None.

    Autocast has nodes of its own kind (`autocast_kind`); switches of grad mode are harmless.
    """
    home, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    if home == "torch.nn.attention":
        return "torch.nn.attention.sdpa_kernel"
    if home.startswith(("torch._functorch", "torch._C._functorch")):
        return "torch.func"
    if name in ("_enter_inference_mode", "_exit_inference_mode"):
        return "torch.inference_mode"
    return "torch.set_default_dtype" if target is torch.set_default_dtype else None


# ---- compilers -----------------------------------------------------------------------------------


def inductor_compile(
    module: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    """Compile a graph into an artifact that can be called and serialised."""
    import torch._inductor

    return torch._inductor.standalone_compile(
        module, list(inputs), dynamic_shapes="from_graph", aot=True, options=options
    )


def probe_cpp_compiler() -> None:
    """Have Inductor try what its C++ compiler and the CPU can do, in the folder set for it.

    It does so before its first C++ library of a process: this one includes no header of torch's,
    which take a kernel's compile two seconds. Nothing is compiled the second time.
    """
    from torch._inductor.codecache import CppCodeCache

    CppCodeCache.load('extern "C" int pcgsvc_probe() { return 1; }\n', device_type="cpu")


def partition_options(names: Sequence[str]) -> dict[str, Any]:
    """Return the Inductor options that split its graph at custom ops, given as `ns::op`."""
    import torch._inductor.config as inductor_config

    spelled = [s for n in names for s in (n, f"{n}.default", n.replace("::", "."))]
    wanted = {"graph_partition": True, "custom_should_partition_ops": spelled}
    return {name: v for name, v in wanted.items() if hasattr(inductor_config, name)}


def tuning_options(*, max_autotune: bool, combo_kernels: bool, threads: int) -> dict[str, Any]:
    """Return Inductor's options for autotuning, combo kernels and its number of processes."""
    import torch._inductor.config as inductor_config

    wanted = {
        "max_autotune": max_autotune,
        "combo_kernels": combo_kernels,
        "compile_threads": threads,
    }
    return {name: v for name, v in wanted.items() if hasattr(inductor_config, name)}


def graph_pass(
    functions: Sequence[Callable[[torch.fx.Graph], list[str] | None]], identity: str
) -> Any:
    """Return functions as one custom pass of Inductor's; its cache keys contain `identity`.

    What the functions return is put into the pass's `problems`.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __init__(self) -> None:
            self.problems: list[str] = []

        def __call__(self, graph: torch.fx.Graph) -> None:
            for function in functions:
                self.problems += function(graph) or []

        def uuid(self) -> str:
            return identity

    return Pass()


def fake_mode() -> Any:
    """Return a context manager in which tensors have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def wake_compile_workers() -> None:
    """Have Inductor's worker processes start now, if it may have any.

    Else the first kernel to be compiled starts them, and is compiled without, as are those after it
    until they are ready.
    """
    from torch._inductor.async_compile import AsyncCompile

    if hasattr(AsyncCompile, "use_process_pool"):
        AsyncCompile.use_process_pool()


def stop_compile_workers() -> None:
    """End Inductor's worker processes; the next parallel compile starts new ones."""
    from torch._inductor import async_compile

    if hasattr(async_compile, "shutdown_compile_workers"):  # else torch ends them at exit
        async_compile.shutdown_compile_workers()


def forget_loaded_code() -> None:
    """Forget the code that Inductor has loaded in this process; what holds some of it keeps it.

    It is found by the hash of its source, so a wrong library would be taken again.
    """
    if "torch._inductor.codecache" in sys.modules:
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels
        from torch._inductor.utils import clear_caches

        modules = [f"{key}.{Kernels.entry_function}" for key in Kernels.cache]
        clear_caches()
        for name in modules:  # torch 2.11 looks there first, and leaves them there
            sys.modules.pop(name, None)


def count_kernels(source: str) -> int:
    """Return how many kernel launches and library calls generated source contains."""
    return len(re.findall(r"\.run\(|extern_kernels\.\w+\(|cpp_fused\w*\(|kernel_cpp_\d+\(", source))


def inductor_source(artifact: Any) -> str:
    """Return the source that Inductor generated for an artifact of `inductor_compile`."""
    function = artifact.inner_fn.compiled_fn
    source = getattr(function, "source_code", None)  # torch 2.11 has it on the inner result only
    return str(source or function.serialize().compiled_fw.result.source_code)


def inductor_serialize(artifact: Any) -> bytes:
    """Return an artifact of `inductor_compile` as bytes, which contain a pickle."""
    return bytes(artifact.serialize())


def inductor_deserialize(data: bytes) -> Any:
    """Load an artifact. `data` must be trusted: it is a pickle, and torch checks no version."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    return AOTCompiledArtifact.deserialize(data)


class NotDirectError(Exception):
    """An artifact of Inductor's cannot be run without Inductor; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The generated code of an artifact that torch calls without wrappers."""

    source: str
    namespace: dict[str, Any]
    """Globals of the module loaded from the source."""
    aligned: list[int]
    """Positions of the arguments that the code assumes to be aligned."""


def inductor_generated(artifact: Any) -> Generated:
    """Return the generated code of an artifact of `inductor_compile` or `inductor_deserialize`.

    Raises:
        NotDirectError: torch runs more than that code.
    """
    from torch._inductor.codecache import PyCodeCache

    entry = artifact.inner_fn.compiled_fn.serialize()
    if not hasattr(entry, "compiled_fw"):
        raise NotDirectError(f"torch keeps it as a {type(entry).__name__}")
    code, meta = entry.compiled_fw.result, entry.runtime_metadata
    wrapped = {
        "it has a backward pass": entry.compiled_bw is not None,
        "it takes tensor subclasses": entry.maybe_subclass_meta is not None,
        "torch changes its arguments": any(
            getattr(w, "needs_post_compile", True) for w in entry.dispatch_wrappers
        ),
        "torch writes inputs after it": meta.num_mutated_inp_runtime_indices > 0,
        "its results alias its inputs": meta.num_outputs_aliased > 0,
        "its results share memory": meta.num_intermediate_bases > 0,
        "it has effect tokens": bool(meta.tokens),
        "it draws random numbers": bool(
            meta.is_rng_op_functionalized or meta.num_graphsafe_rng_states
        ),
        "it changes the grad mode": meta.grad_enabled_mutation is not None,
        "it holds constants": bool(
            code.constants or code.frozen_param_names or code.torchbind_constants
        ),
        "it writes an input that must be aligned": bool(
            set(code.inputs_to_check) & set(code.mutated_input_idxs)
        ),
    }
    reasons = [reason for reason, holds in wrapped.items() if holds]
    if reasons:
        raise NotDirectError("; ".join(reasons))
    for module in reversed(PyCodeCache.modules):
        if Path(str(module.__file__)).read_text() == code.source_code:
            return Generated(
                source=code.source_code,
                namespace=vars(module),
                aligned=sorted(code.inputs_to_check),
            )
    raise NotDirectError("its module is not loaded")


def is_inductor_kernel(value: Any) -> bool:
    """Whether a global of a generated module is a Triton kernel."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return isinstance(value, CachingAutotuner)


def static_kernel(kernel: Any) -> dict[str, Any]:
    """Return what is needed to launch one of Inductor's Triton kernels, in JSON types.

    Raises:
        NotDirectError: torch's static launcher does not launch it, or it has not been tuned yet.
    """
    from torch._inductor.runtime.triton_heuristics import GridExpr

    name = kernel.fn.__name__
    if len(kernel.launchers) != 1:
        raise NotDirectError(f"kernel {name} has {len(kernel.launchers)} variants, none chosen")
    (launcher,) = kernel.launchers
    made = [r for r in kernel.compile_results if r.config is launcher.config]
    if len(made) != 1 or not getattr(launcher, "_is_static", False):
        raise NotDirectError(f"kernel {name} is not launched statically")
    static = made[0].kernel
    grid = GridExpr.from_meta(made[0].inductor_meta, made[0].config)
    _, params, left_out = made[0]._get_arg_lists(static.arg_names, static.declared_constexprs)
    return {
        "name": static.name,
        "cache_hash": launcher.cache_hash,
        "shared": static.shared,
        "num_warps": static.num_warps,
        "types": static.arg_tys,
        "num_scratch": int(static.has_global_scratch) + int(static.has_profile_scratch),
        "params": list(params),
        "args": [
            arg
            for at, arg in enumerate(static.arg_names)
            if at not in static.full_constexprs and arg not in left_out
        ],
        "prefix": list(grid.prefix),
        "grid": [str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)],
    }


def load_static_kernel(
    path: Path, *, name: str, shared: int, num_warps: int, types: str, num_scratch: int, device: int
) -> Callable[..., None]:
    """Load a kernel's binary and return `launch(x, y, z, stream, *args)`.

    The binary is unloaded with the function; torch 2.11 keeps it until the process ends.
    """
    launcher: Any = torch._C._StaticCudaLauncher
    module: Any
    *module, function, _, _ = launcher._load_kernel(str(path), name, shared, device)
    types, scratch = types + "O" * num_scratch, (None,) * num_scratch

    def launch(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        launcher._launch_kernel(
            function, x, y, z, num_warps, shared, types, (*args, *scratch), stream
        )

    if module:
        weakref.finalize(launch, launcher._unload_kernel, module[0]).atexit = False
    return launch


def inductor_settings() -> dict[str, Any]:
    """Return Inductor's settings that this process has changed, by name.

    Does not import Inductor: before that nothing is changed. Settings from the environment are not
    included. (`config.get_hash()` changes with the working directory on torch 2.13 and 2.14.)
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        return {}
    portable = config.save_config_portable()
    changed = config._get_dict(skip_default=True)
    return {
        name: repr(value)
        for name, value in sorted(changed.items())
        if name in portable and value != config._config[name].default
    }


@contextlib.contextmanager
def inductor_defaults(threads: int = 1) -> Iterator[None]:
    """Set the Inductor settings under which artifacts are compiled and loaded, for a block.

    Importing the compiler, or loading an artifact, starts `threads` worker processes; none for 1.
    Precompiled C++ headers are off: one doubles the time of the first compile, and loading an
    artifact compiles it as well. So are torch's process-wide caches, since pcgsvc has its own.
    """
    import torch._inductor.config as inductor_config

    wanted = {
        "cpp_cache_precompile_headers": False,
        "force_disable_caches": False,
        "fx_graph_cache": True,
        "fx_graph_remote_cache": False,
        "compile_threads": threads,
    }
    known = {name: value for name, value in wanted.items() if hasattr(inductor_config, name)}
    with inductor_config.patch(known):
        yield


def triton_version() -> str | None:
    """Return the version of triton, without importing it; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


# ---- cache, capture ------------------------------------------------------------------------------


def settle_triton_cache(folder: Path) -> None:
    """Make a Triton cache usable after its files were copied from another folder.

    A kernel's group file names the others by absolute path; if one is missing, Triton silently
    compiles again.
    """
    for group in folder.glob("*/__grp__*.json"):
        tree = json.loads(group.read_text())
        tree["child_paths"] = {name: str(group.parent / name) for name in tree["child_paths"]}
        group.write_text(json.dumps(tree))


def current_raw_stream(device: int) -> int:
    """Return the handle of a device's current stream; `torch.cuda.current_stream` takes 4 µs."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def current_device() -> int:
    """Return the current CUDA device, without the check that CUDA has started."""
    return int(torch._C._cuda_getDevice())


def is_external_stream(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is not torch's own: the lowest bit of c10's stream ids tells."""
    return stream.stream_id != 0 and stream.stream_id % 2 == 0


set_grad: Callable[[bool], None] = torch._C._set_grad_enabled
"""Turns gradients on or off for this thread; no interrupt comes before it, as in a function of
Python's."""


def copy_all(targets: list[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy tensors in one kernel, where `can_copy_all` and they lie alike on one device."""
    torch._foreach_copy_(targets, list(values), non_blocking=True)


def can_copy_all(targets: Sequence[torch.Tensor]) -> bool:
    """Whether one kernel may write several tensors: it knows these dtypes, one at a time."""
    dtypes = {t.dtype for t in targets}
    return len(targets) > 1 and len(dtypes) == 1 and dtypes <= _COPIED_AT_ONCE


_COPIED_AT_ONCE = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
)


def alias_without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CUDA tensor over the same memory that does not keep the memory alive.

    The caller must ensure that the memory stays mapped and keeps its content.
    """
    storage = tensor.untyped_storage()
    view = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    metadata = {
        "dtype": tensor.dtype,
        "size": tensor.size(),
        "stride": tensor.stride(),
        "storage_offset": tensor.storage_offset(),
        "data_ptr": storage.data_ptr(),
        "device": tensor.device,
        "nbytes": storage.nbytes(),
    }
    alias = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, view)
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture CUDA invalidated. The pinned-memory allocator keeps a callback into each
that cannot be removed, so they must not be freed while the process lives."""


def abandon_capture(
    graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]
) -> bool:
    """End a failed capture, and return whether its pool can still be used.

    When CUDA has invalidated a capture, torch's `capture_end` raises before it notifies the device
    allocator, the pinned-memory allocator (later captures into the pool fail with "already
    recording") and the random generator (later random numbers fail with "offset increment outside
    graph capture"), and it does not release the pool. Source: torch issue 190308; seen on torch
    2.11. The pinned-memory allocator cannot be reset, so the pool is not used again.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph may be empty; it is discarded
            graph.capture_end()
    except RuntimeError:
        _ABANDONED.append(graph)
    else:
        graph.reset()
        return True
    with contextlib.suppress(RuntimeError):  # a later torch may have cleaned up itself
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    fresh = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    fresh.set_offset(generator.get_offset())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
    return False


def pool_ranges(pools: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (first address, end) of every memory segment of CUDA graph pools."""
    wanted = {tuple(pool) for pool in pools}
    return [
        (s["address"], s["address"] + s["total_size"])
        for s in torch.cuda.memory_snapshot()
        if tuple(s["segment_pool_id"]) in wanted
    ]


# ---- jobs ----------------------------------------------------------------------------------------


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would call, or None if it finds none that runs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler:
        return None


def op_exists(name: str) -> bool:
    """Whether `ns::op` is registered, with any overload."""
    return bool(torch._C._jit_get_schemas_for_operator(name))


def fake_tensors() -> Any:
    """Return a reusable context manager in which new tensors have shapes and no memory.

    Real tensors used inside become fake ones. Unlike in `fake_mode`, all sizes are numbers. Asking
    for an address raises: a kernel launched by hand would otherwise get a null pointer.
    """
    import torch._functorch.config as functorch_config
    from torch._subclasses.fake_tensor import FakeTensorMode

    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def swappable(mode: Any) -> Iterator[None]:
    """Let `Module.to` convert fake parameters, for a block inside that of `fake_tensors`.

    `Module.to` swaps parameters for new ones, which torch refuses for tensors with weak references.
    The fake mode's memo has weak references; for the block it gets one with strong references.
    """
    converter = mode.fake_tensor_converter.meta_converter
    before, converter.tensor_memo = converter.tensor_memo, {}
    try:
        yield
    finally:
        converter.tensor_memo = before


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: it is neither fake nor on the meta device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
