"""CUDA's driver in Python: graphs, nodes and kernels, with the types of `cuda-bindings`.

A kernel is a Python function over its parameters' bytes. Every call is noted; a launch runs the
kernels in the order of the graph's dependencies, with the parameters that they have then.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE


class Kernel(NamedTuple):
    """What a handle stands for."""

    layout: tuple[tuple[int, int], ...]
    """(offset, size) per parameter."""
    run: Callable[..., Any]
    """Called with the grid and the bytes of each parameter."""


class FakeNode:
    """A node of a graph, or of an executable."""

    def __init__(self, kind: Any, **about: Any) -> None:
        self.kind, self.enabled = kind, True
        self.cluster, self.cooperative = 1, 0
        self.__dict__.update(about)


class FakeBindings:
    """Stands in for `cuda.bindings.driver`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.version = 13000
        self.kernels: dict[int, Kernel] = {}
        self.graphs: dict[int, list[FakeNode]] = {}
        self.executables: dict[int, tuple[list[FakeNode], list[FakeNode]]] = {}
        self.streams: dict[int, list[FakeNode] | None] = {7: None}
        self.fails: dict[str, Any] = {}
        """Status by call that fails."""
        self._handles = itertools.count(1000)

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)  # types and enumerations

    def names(self) -> list[str]:
        """Return the calls so far by name, and forget them."""
        found = [call[0] for call in self.calls]
        self.calls.clear()
        return found

    def kernel(self, codes: str, run: Callable[..., Any]) -> int:
        """Load a kernel whose parameters have such struct codes; return its handle."""
        layout, at = [], 0
        for code in codes:
            size = struct.calcsize(code)
            at = -(-at // size) * size
            layout.append((at, size))
            at += size

        def unpacked(grid: Any, *values: bytes) -> None:
            run(grid, *(struct.unpack(c, v)[0] for c, v in zip(codes, values, strict=True)))

        handle = next(self._handles)
        self.kernels[handle] = Kernel(tuple(layout), unpacked)
        return handle

    def capture_on(self, stream: int, kind: str, **about: Any) -> None:
        """Have a stream that is being captured meet an operation."""
        nodes = self.streams[stream]
        assert nodes is not None, "the stream is not being captured"
        nodes.append(FakeNode(getattr(real.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}"), **about))

    def new_graph(self, *nodes: FakeNode) -> int:
        """Return a graph that was captured by somebody else."""
        handle = next(self._handles)
        self.graphs[handle] = list(nodes)
        return handle

    # -- calls --

    def _note(self, name: str, *args: Any) -> Any:
        self.calls.append((name, *args))
        return self.fails.get(name, OK)

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return OK, self.version

    def cuFuncGetParamInfo(self, function: Any, at: int) -> Any:  # noqa: N802
        layout = self.kernels[int(function)].layout
        return (OK, *layout[at]) if at < len(layout) else (INVALID, 0, 0)

    def cuStreamCreate(self, flags: Any) -> Any:  # noqa: N802
        status, handle = self._note("cuStreamCreate", flags), next(self._handles)
        self.streams[handle] = None
        return status, real.CUstream(handle)

    def cuStreamDestroy(self, stream: Any) -> Any:  # noqa: N802
        del self.streams[int(stream)]
        return (self._note("cuStreamDestroy", int(stream)),)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> Any:  # noqa: N802
        self.streams[int(stream)] = []
        return (self._note("cuStreamBeginCapture", int(stream), mode),)

    def cuStreamEndCapture(self, stream: Any) -> Any:  # noqa: N802
        nodes, self.streams[int(stream)] = self.streams[int(stream)], None
        status = self._note("cuStreamEndCapture", int(stream))
        return status, None if status else real.CUgraph(self.new_graph(*(nodes or [])))

    def cuGraphGetNodes(self, graph: Any, count: int = 0) -> Any:  # noqa: N802
        nodes = self.graphs[int(graph)]
        return OK, list(range(len(nodes)))[:count] and list(nodes[:count]), len(nodes)

    def cuGraphNodeGetType(self, node: Any) -> Any:  # noqa: N802
        return OK, node.kind

    def cuGraphKernelNodeGetAttribute(self, node: Any, which: Any) -> Any:  # noqa: N802
        dims = SimpleNamespace(x=node.cluster, y=1, z=1)
        return OK, SimpleNamespace(clusterDim=dims, cooperative=node.cooperative)

    def cuGraphKernelNodeGetParams(self, node: Any) -> Any:  # noqa: N802
        return OK, node.fields

    def cuKernelGetFunction(self, kernel: Any) -> Any:  # noqa: N802
        return OK, real.CUfunction(int(kernel))

    def cuGraphCreate(self, flags: int) -> Any:  # noqa: N802
        return self._note("cuGraphCreate"), real.CUgraph(self.new_graph())

    def cuGraphDestroy(self, graph: Any) -> Any:  # noqa: N802
        del self.graphs[int(graph)]
        return (self._note("cuGraphDestroy"),)

    def _add(self, name: str, graph: Any, before: Any, count: int, node: FakeNode) -> Any:
        nodes = self.graphs[int(graph)]
        assert list(before) == nodes[-1:], "each node depends on the one before"
        assert count == len(before)
        status = self._note(name)
        nodes.append(node)
        return status, node

    def cuGraphAddKernelNode(self, graph: Any, before: Any, count: int, fields: Any) -> Any:  # noqa: N802
        node = FakeNode(real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, **self._read(fields))
        return self._add("cuGraphAddKernelNode", graph, before, count, node)

    def cuGraphAddChildGraphNode(self, graph: Any, before: Any, count: int, child: Any) -> Any:  # noqa: N802
        kind = real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
        node = FakeNode(kind, children=list(self.graphs[int(child)]))
        return self._add("cuGraphAddChildGraphNode", graph, before, count, node)

    def cuCtxGetDevice(self) -> Any:  # noqa: N802
        return OK, real.CUdevice(0)

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Any:  # noqa: N802
        return OK, 9 if attribute.name.endswith("MAJOR") else 0

    def cuModuleLoadData(self, image: bytes) -> Any:  # noqa: N802
        return self._note("cuModuleLoadData", image), real.CUmodule(5)

    def cuModuleUnload(self, module: Any) -> Any:  # noqa: N802
        return (self._note("cuModuleUnload"),)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:  # noqa: N802
        return self._note("cuModuleGetFunction", name), real.CUfunction(6)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:  # noqa: N802
        status, handle = self._note("cuGraphInstantiate"), next(self._handles)
        nodes = self.graphs[int(graph)]
        copies = [FakeNode(**{**vars(node)}) for node in nodes]
        self.executables[handle] = (list(nodes), copies)
        return status, real.CUgraphExec(handle)

    def cuGraphExecDestroy(self, executable: Any) -> Any:  # noqa: N802
        del self.executables[int(executable)]
        return (self._note("cuGraphExecDestroy"),)

    def _copy(self, executable: Any, node: Any) -> FakeNode:
        nodes, copies = self.executables[int(executable)]
        return copies[nodes.index(node)]

    def cuGraphExecKernelNodeSetParams(self, executable: Any, node: Any, fields: Any) -> Any:  # noqa: N802
        about = self._read(fields)
        if 0 in about["grid"]:
            return (INVALID,)
        status = self._note("cuGraphExecKernelNodeSetParams", about["grid"], about["values"])
        if not status:
            self._copy(executable, node).__dict__.update(about)
        return (status,)

    def cuGraphNodeSetEnabled(self, executable: Any, node: Any, enabled: int) -> Any:  # noqa: N802
        self._copy(executable, node).enabled = bool(enabled)
        return (self._note("cuGraphNodeSetEnabled", enabled),)

    def cuGraphUpload(self, executable: Any, stream: Any) -> Any:  # noqa: N802
        return (self._note("cuGraphUpload", int(stream)),)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> Any:  # noqa: N802
        status = self._note("cuGraphLaunch", int(stream))
        for node in self.executables[int(executable)][1]:
            self._run(node)
        return (status,)

    def cuLaunchKernel(self, function: Any, *args: Any) -> Any:  # noqa: N802
        grid, block, shared, stream, address = args[:3], args[3:6], *args[6:9]
        values = self._values(int(function), address)
        status = self._note("cuLaunchKernel", grid, block, shared, int(stream))
        self.kernels[int(function)].run(grid, *values)
        return (status,)

    # -- inside --

    def _run(self, node: FakeNode) -> None:
        for child in getattr(node, "children", ()):
            self._run(child)
        if node.enabled and hasattr(node, "function"):
            self.kernels[node.function].run(node.grid, *node.values)

    def _values(self, function: int, address: int) -> tuple[bytes, ...]:
        layout = self.kernels[function].layout
        addresses = (ctypes.c_void_p * len(layout)).from_address(address) if layout else []
        return tuple(
            ctypes.string_at(at, size) for at, (_, size) in zip(addresses, layout, strict=True)
        )

    def _read(self, fields: Any) -> dict[str, Any]:
        function = int(fields.func)
        return {
            "function": function,
            "grid": (fields.gridDimX, fields.gridDimY, fields.gridDimZ),
            "block": (fields.blockDimX, fields.blockDimY, fields.blockDimZ),
            "shared": fields.sharedMemBytes,
            "values": self._values(function, int(fields.kernelParams)),
            "fields": fields,
        }


class FakeNvrtc:
    """Stands in for `cuda.bindings.nvrtc`; its code is what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Any] = {}
        self._code = b""

    def _note(self, name: str, *args: Any) -> Any:
        self.calls.append((name, *args))
        return self.fails.get(name, OK)

    def nvrtcCreateProgram(self, source: bytes, *args: Any) -> Any:  # noqa: N802
        self._code = b"code of " + source
        return self._note("nvrtcCreateProgram"), 3

    def nvrtcCompileProgram(self, program: int, count: int, options: list[bytes]) -> Any:  # noqa: N802
        return (self._note("nvrtcCompileProgram", *options),)

    def nvrtcGetCUBINSize(self, program: int) -> Any:  # noqa: N802
        return OK, len(self._code)

    def nvrtcGetCUBIN(self, program: int, code: bytes) -> Any:  # noqa: N802
        ctypes.memmove(code, self._code, len(code))  # as the library writes to it
        return (self._note("nvrtcGetCUBIN"),)

    def nvrtcDestroyProgram(self, program: int) -> Any:  # noqa: N802
        return (self._note("nvrtcDestroyProgram"),)
