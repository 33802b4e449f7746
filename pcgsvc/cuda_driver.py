"""Every call of CUDA's driver and of NVRTC that pcgsvc makes by itself; needs `cuda-bindings`.

In and out: raw handles (ints, as torch gives them), sources of kernels, and their launches as plain
values. Knows nothing of tensors' owners, ops or entries. `tests/test_cuda_driver.py` has a test per
call.

torch makes graphs that it captured; it does not join them, nor change their nodes. What is joined
here is a copy: torch's graphs keep their own executables.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One kernel launch as plain values: what an op's `plan_launches` gives."""

    function: Any
    """The handle of a loaded kernel (a CUfunction, as an int), which its owner keeps loaded.
    Recorded graphs: a Python function, which is called with `grid` and `args`."""
    grid: tuple[int, int, int]
    """Blocks; a zero among them: nothing is launched."""
    block: tuple[int, int, int]
    """Threads of a block."""
    shared: int
    """Dynamic shared memory of a block, in bytes."""
    args: tuple[Any, ...]
    """One value per parameter of the kernel: a tensor (its address), an int, a float, or the
    parameter's bytes. `...` at the end: the parameters that follow are zero."""
    fixed: bool = False
    """Whether the launch is the same at every step of the entry that it was made for: its plan is
    then not asked for again."""


_LEAST_VERSION = 12040
"""The first driver that tells the parameters of a kernel: 12.4."""


class DriverError(RuntimeError):
    """A call of CUDA's driver failed: the message has the call and CUDA's name of the error."""


class UnpatchableError(RuntimeError):
    """A captured graph has nodes that are no plain kernel launches; the message says which."""

    graph: CapturedGraph
    """What executes them all."""


class Driver:
    """CUDA's driver, each call checked.

    Args:
        bindings: the module `cuda.bindings.driver`; tests pass a fake.
        nvrtc: the module `cuda.bindings.nvrtc`, likewise.
    """

    def __init__(self, bindings: Any, nvrtc: Any = None) -> None:
        self.bindings, self._nvrtc = bindings, nvrtc
        self._layouts: dict[int, tuple[tuple[int, int], ...]] = {}

    def call(self, name: str, *args: Any) -> Any:
        """Make a call and return its result, the first if there are several; None without."""
        status, *results = getattr(self.bindings, name)(*args)
        if status:
            raise DriverError(f"{name}: {status.name}")
        return results[0] if results else None

    def layout(self, function: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, size) in bytes of each parameter of a kernel."""
        found = self._layouts.get(function)
        if found is None:
            listed: list[tuple[int, int]] = []
            while True:
                status, offset, size = self.bindings.cuFuncGetParamInfo(function, len(listed))
                if status:  # the driver has no count: past the last one it refuses
                    break
                listed.append((offset, size))
            found = self._layouts[function] = tuple(listed)
        return found

    def compile(self, source: str, name: str) -> int:
        """Return the handle of a kernel of a CUDA C++ source, loaded as long as the driver is held.

        Raises:
            DriverError: NVRTC is missing or does not compile it.
        """
        module = self.call("cuModuleLoadData", self._compiled(source, name))
        weakref.finalize(self, self.bindings.cuModuleUnload, module).atexit = False
        return int(self.call("cuModuleGetFunction", module, name.encode()))

    def _compiled(self, source: str, name: str) -> bytes:
        """Return the code of a CUDA C++ source for the current device; errors call it by name."""
        kinds, parts = self.bindings.CUdevice_attribute, ("MAJOR", "MINOR")
        wanted = [getattr(kinds, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{p}") for p in parts]
        device = self.call("cuCtxGetDevice")
        major, minor = (self.call("cuDeviceGetAttribute", kind, device) for kind in wanted)
        option = f"--gpu-architecture=sm_{major}{minor}".encode()
        try:
            program = self._nvrtc_call(
                "nvrtcCreateProgram", source.encode(), f"{name}.cu".encode(), 0, [], []
            )
            try:
                self._nvrtc_call("nvrtcCompileProgram", program, 1, [option])
                code = bytes(self._nvrtc_call("nvrtcGetCUBINSize", program))
                self._nvrtc_call("nvrtcGetCUBIN", program, code)
            finally:
                self._nvrtc_call("nvrtcDestroyProgram", program)
        except RuntimeError as error:  # cuda-bindings' own, where the library is missing
            raise DriverError(f"NVRTC, {name}: {error}") from error
        return code

    def _nvrtc_call(self, name: str, *args: Any) -> Any:
        status, *results = getattr(self._nvrtc, name)(*args)
        if status:
            raise DriverError(f"{name}: {status.name}")
        return results[0] if results else None

    def create_stream(self) -> int:
        """Return a new stream that waits for no other; `destroy_stream` frees it."""
        return int(self.call("cuStreamCreate", self.bindings.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """Free a stream of `create_stream`."""
        self.call("cuStreamDestroy", stream)

    def capture(self, stream: int, run: Callable[[], object]) -> list[Launch]:
        """Return the kernels that a function launches on a stream, which are not executed.

        They have their parameters' bytes, and come in the order of their launches. The capture is
        in relaxed mode: what the function does to other streams happens.

        Raises:
            DriverError: what the function did on the stream cannot be captured.
            UnpatchableError: it did more than launch kernels, or launched them in clusters or
                cooperatively, which parameters cannot say; the error holds the graph.
            Exception: whatever the function raises.
        """
        mode = self.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call("cuStreamBeginCapture", stream, mode)
        try:
            run()
        except BaseException:
            status, graph = self.bindings.cuStreamEndCapture(stream)
            if not status:
                self.call("cuGraphDestroy", graph)
            raise
        graph = self.call("cuStreamEndCapture", stream)
        try:
            found = self._launches(graph)
        except UnpatchableError as error:
            error.graph = CapturedGraph(self, graph)
            raise
        except BaseException:
            self.call("cuGraphDestroy", graph)
            raise
        self.call("cuGraphDestroy", graph)
        return found

    def _launches(self, graph: Any) -> list[Launch]:
        kinds = self.bindings.CUgraphNodeType
        count = self.bindings.cuGraphGetNodes(graph, 0)[2]
        nodes = self.call("cuGraphGetNodes", graph, count) if count else []
        found = []
        for node in nodes:
            kind = self.call("cuGraphNodeGetType", node)
            if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
                found.append(self._launch(node))
            elif kind != kinds.CU_GRAPH_NODE_TYPE_EMPTY:
                word = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
                raise UnpatchableError(f"it does more than launch kernels ({word})")
        return found

    def _launch(self, node: Any) -> Launch:
        """Return the launch of a kernel node."""
        ids, ask = self.bindings.CUkernelNodeAttrID, "cuGraphKernelNodeGetAttribute"
        cluster = self.call(ask, node, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
        if max(cluster.x, cluster.y, cluster.z) > 1:
            raise UnpatchableError("it launches a kernel in clusters")
        if self.call(ask, node, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative:
            raise UnpatchableError("it launches a kernel cooperatively")
        params = self.call("cuGraphKernelNodeGetParams", node)
        function = int(params.func) or int(self.call("cuKernelGetFunction", params.kern))
        layout = self.layout(function)
        if layout and not int(params.kernelParams):
            raise UnpatchableError("it launches a kernel with its parameters in one buffer")
        addresses = (ctypes.c_void_p * len(layout)).from_address(int(params.kernelParams))
        return Launch(
            function=function,
            grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
            block=(params.blockDimX, params.blockDimY, params.blockDimZ),
            shared=params.sharedMemBytes,
            args=tuple(
                ctypes.string_at(address, size)
                for address, (_, size) in zip(addresses, layout, strict=True)
            ),
        )

    def launch(self, launch: Launch, stream: int) -> None:
        """Launch a kernel on a stream."""
        params = KernelParams(self, launch)
        handle, address = params.handle, params.address
        size = (*launch.grid, *launch.block, launch.shared)
        self.call("cuLaunchKernel", handle, *size, stream, address, 0)


class CapturedGraph:
    """A graph that was captured by `Driver.capture`, which it owns."""

    def __init__(self, driver: Driver, graph: Any) -> None:
        self._driver, self._graph = driver, graph
        weakref.finalize(self, driver.call, "cuGraphDestroy", graph).atexit = False

    def run(self, stream: int) -> None:
        """Execute it on a stream, once."""
        executable = self._driver.call("cuGraphInstantiate", self._graph, 0)
        try:
            self._driver.call("cuGraphLaunch", executable, stream)
        finally:
            self._driver.call("cuGraphExecDestroy", executable)  # once what is under way is done


Packed = list[tuple[int, int, bytes]]
"""What some parameters of a kernel become: (begin, end, content) in its parameters' memory."""


def _packers(codes: str) -> dict[int, Callable[[Any], bytes]]:
    return {struct.calcsize("<" + code): struct.Struct("<" + code).pack for code in codes}


_INTS, _UNSIGNED, _FLOATS = map(_packers, ("bhiq", "BHIQ", "efd"))


class KernelParams:
    """A kernel's parameters in memory of their own, where the driver reads them.

    Args:
        driver: knows the kernel's layout.
        launch: whose arguments are written.

    Raises:
        DriverError: the kernel has another number of parameters, or one of another size.
    """

    def __init__(self, driver: Driver, launch: Launch) -> None:
        self.function = launch.function
        self.handle = driver.bindings.CUfunction(launch.function)
        self._layout = layout = driver.layout(launch.function)
        self._bytes = sum(layout[-1]) if layout else 0
        self._memory = (ctypes.c_char * max(1, self._bytes))()
        self._view = memoryview(self._memory).cast("B")
        base = ctypes.addressof(self._memory)
        self._addresses = (ctypes.c_void_p * max(1, len(layout)))(*(base + at for at, _ in layout))
        self.address = ctypes.addressof(self._addresses) if layout else 0
        self.fill(launch.args)

    def fill(self, args: tuple[Any, ...]) -> None:
        """Write all arguments; parameters behind an ellipsis are zero."""
        given = args[:-1] if args[-1:] == (...,) else args
        if len(given) > len(self._layout) or (given is args and len(given) < len(self._layout)):
            raise DriverError(
                f"a launch has {len(given)} arguments, its kernel {len(self._layout)} parameters"
            )
        self._view[:] = bytes(len(self._view))
        self.write(self.pack(list(enumerate(given))))

    def write(self, packed: Packed) -> None:
        """Write some arguments."""
        for begin, end, content in packed:
            self._view[begin:end] = content

    def pack(self, args: Sequence[tuple[int, Any]]) -> Packed:
        """Return what some arguments, given as (position, value), become."""
        packed: Packed = []
        for position, value in args:
            at, size = self._layout[position]
            kind = type(value)
            if kind is bytes and len(value) == size:
                packed.append((at, at + size, value))
                continue
            if kind is not int and isinstance(value, torch.Tensor):
                value, kind = value.data_ptr(), int
            packs = _FLOATS if kind is float else _INTS
            if kind is int and value >> (8 * size - 1) > 0:
                packs = _UNSIGNED
            try:
                packed.append((at, at + size, packs[size](value)))
            except (KeyError, struct.error) as error:
                raise DriverError(
                    f"argument {position} of a launch is {value!r}, the kernel's parameter has "
                    f"{size} bytes"
                ) from error
        return packed


class KernelNode:
    """A kernel node of a `Composition`."""

    def __init__(self, driver: Driver, launch: Launch) -> None:
        self._driver = driver
        self._executable: Any = None
        self.node: Any = None
        self.fields = driver.bindings.CUDA_KERNEL_NODE_PARAMS()
        self._params = KernelParams(driver, launch)
        self._describe(launch)

    def added(self, node: Any) -> None:
        """Take the handle of the node in the graph."""
        self.node = node

    def instantiated(self, executable: Any) -> None:
        """Take the executable whose node is patched from now on."""
        self._executable = executable
        self._apply = self._driver.bindings.cuGraphExecKernelNodeSetParams

    def set(self, launch: Launch) -> None:
        """Have the next replay make this launch."""
        if launch.function == self._params.function:
            self._params.fill(launch.args)
        else:
            self._params = KernelParams(self._driver, launch)
        self._describe(launch)
        self._patch()

    def pack(self, args: Sequence[tuple[int, Any]]) -> Packed:
        """Return some arguments as `change` takes them, of any node that launches this kernel."""
        return self._params.pack(args)

    def pack_words(self, words: Sequence[int]) -> Packed:
        """Return the first arguments likewise, which are 64-bit words."""
        content = struct.pack(f"<{len(words)}Q", *words)
        return [(0, len(content), content)]

    def change(self, grid: tuple[int, int, int] | None, packed: Packed) -> None:
        """Have the next replay use another grid (None: the same) and some other arguments."""
        if grid is not None:
            fields = self.fields
            fields.gridDimX, fields.gridDimY, fields.gridDimZ = grid
        self._params.write(packed)
        self._patch()

    def enable(self, enabled: bool) -> None:
        """Have the next replay launch the kernel, or leave it out."""
        self._driver.call("cuGraphNodeSetEnabled", self._executable, self.node, int(enabled))

    def _describe(self, launch: Launch) -> None:
        params, fields = self._params, self.fields
        fields.func, fields.kernelParams = params.handle, params.address
        fields.gridDimX, fields.gridDimY, fields.gridDimZ = launch.grid
        fields.blockDimX, fields.blockDimY, fields.blockDimZ = launch.block
        fields.sharedMemBytes = launch.shared

    def _patch(self) -> None:
        (status,) = self._apply(self._executable, self.node, self.fields)
        if status:
            raise DriverError(f"cuGraphExecKernelNodeSetParams: {status.name}")


class Composition:
    """An executable graph of captured graphs and kernels, one after the other. Owns itself.

    Patches hold from the next launch on: launches that are queued or running are not affected.
    Not safe across threads.

    Args:
        driver: makes it.
        parts: handles of captured graphs, which are copied, and kernels.
    """

    def __init__(self, driver: Driver, parts: Sequence[int | Launch]) -> None:
        self._driver = driver
        graph = driver.call("cuGraphCreate", 0)
        weakref.finalize(self, driver.call, "cuGraphDestroy", graph).atexit = False
        self.nodes: list[KernelNode] = []
        """Of the kernels among the parts, in their order."""
        before: list[Any] = []
        for part in parts:
            if isinstance(part, Launch):
                kernel = KernelNode(driver, part)
                args = (graph, before, len(before), kernel.fields)
                kernel.added(driver.call("cuGraphAddKernelNode", *args))
                self.nodes.append(kernel)
                before = [kernel.node]
            else:
                child = driver.bindings.CUgraph(part)
                args = (graph, before, len(before), child)
                before = [driver.call("cuGraphAddChildGraphNode", *args)]
        self._executable = driver.call("cuGraphInstantiate", graph, 0)
        weakref.finalize(self, driver.call, "cuGraphExecDestroy", self._executable).atexit = False
        for kernel in self.nodes:
            kernel.instantiated(self._executable)

    def upload(self, stream: int) -> None:
        """Bring patches to the device before the launch that needs them."""
        self._driver.call("cuGraphUpload", self._executable, stream)

    def launch(self, stream: int) -> None:
        """Execute it on a stream."""
        (status,) = self._driver.bindings.cuGraphLaunch(self._executable, stream)
        if status:
            raise DriverError(f"cuGraphLaunch: {status.name}")


def find_driver() -> Driver:
    """Return CUDA's driver.

    Raises:
        DriverError: the package `cuda-bindings` is missing, or it or the driver is too old.
    """
    try:
        from cuda import bindings
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise DriverError("cuda-bindings is not installed (pip install 'pcgsvc[cuda]')") from error
    if int(bindings.__version__.split(".")[0]) < 13:
        raise DriverError(f"cuda-bindings is {bindings.__version__}; 13 is needed")
    found = Driver(driver, nvrtc)
    version = found.call("cuDriverGetVersion")
    if version < _LEAST_VERSION:
        raise DriverError(f"CUDA's driver is of version {version}; {_LEAST_VERSION} is needed")
    return found
