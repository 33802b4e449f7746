"""The calls of CUDA's driver: their order and what they are given, against a driver in Python."""

from __future__ import annotations

import contextlib
import gc
import random
import struct
import sys
from types import SimpleNamespace
from typing import Any

import cuda
import pytest
import torch
from cuda import bindings
from cuda.bindings import driver as real
from fake_driver import INVALID, FakeBindings, FakeNode, FakeNvrtc
from model_helpers import make_context

from pcgsvc.capture import stitch
from pcgsvc.capture.cuda_composer import CudaComposer
from pcgsvc.capture.recorded import RecordedComposer
from pcgsvc.capture.sources import Boundary, Copying, Source
from pcgsvc.cuda_driver import (
    Composition,
    Driver,
    DriverError,
    Launch,
    UnpatchableError,
    find_driver,
)
from pcgsvc.ops.context import use_context

Ran = list[tuple[Any, ...]]


class Device:
    """A driver, a kernel that notes how it ran, and a captured graph of one such launch."""

    def __init__(self, codes: str = "qif") -> None:
        self.ran: Ran = []
        self.fake = FakeBindings()
        self.driver = Driver(self.fake)
        self.kernel = self.fake.kernel(codes, lambda *args: self.ran.append(args))
        piece = self.fake.kernel("i", lambda grid, at: self.ran.append(("piece", at)))
        kind = real.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        self.pieces = [
            self.fake.new_graph(
                FakeNode(kind, function=piece, grid=(1, 1, 1), values=(struct.pack("i", at),))
            )
            for at in range(3)
        ]

    def launch(self, *args: Any, grid: tuple[int, int, int] = (1, 1, 1)) -> Launch:
        return Launch(self.kernel, grid, (32, 1, 1), 0, args)


def test_pieces_and_kernels_are_one_chain_in_one_executable() -> None:
    device = Device()
    first, last = device.launch(1, 2, 0.5), device.launch(-3, 4, 0.25, grid=(5, 6, 7))
    made = Composition(device.driver, [device.pieces[0], first, device.pieces[1], last])
    adds = ["cuGraphAddChildGraphNode", "cuGraphAddKernelNode"]
    assert device.fake.names() == ["cuGraphCreate", *adds, *adds, "cuGraphInstantiate"]
    made.launch(7)
    assert device.fake.calls == [("cuGraphLaunch", 7)]
    grids = [((1, 1, 1), 1, 2, 0.5), ((5, 6, 7), -3, 4, 0.25)]
    assert device.ran == [("piece", 0), grids[0], ("piece", 1), grids[1]]


def test_words_are_packed_at_once_and_the_rest_stays() -> None:
    device = Device("qqqq")
    made = Composition(device.driver, [device.launch(1, 2, 3, 4)])
    node = made.nodes[0]
    node.change(None, node.pack_words((8, 1 << 63, 7)))
    made.launch(7)
    assert device.ran == [((1, 1, 1), 8, -(1 << 63), 7, 4)]


def test_a_source_is_compiled_for_the_device_at_hand_and_unloaded_with_the_driver() -> None:
    fake, nvrtc = FakeBindings(), FakeNvrtc()
    driver = Driver(fake, nvrtc)
    assert driver.compile("its source", "its_name") == 6
    assert nvrtc.calls[1] == ("nvrtcCompileProgram", b"--gpu-architecture=sm_90")
    assert nvrtc.calls[-1] == ("nvrtcDestroyProgram",)
    loaded = [("cuModuleLoadData", b"code of its source"), ("cuModuleGetFunction", b"its_name")]
    assert fake.calls == loaded
    del driver
    gc.collect()
    assert fake.calls[2:] == [("cuModuleUnload",)]


@pytest.mark.parametrize("why", ["refused", "missing"])
def test_a_source_that_cannot_be_compiled_is_a_driver_error(why: str) -> None:
    nvrtc = FakeNvrtc()
    if why == "refused":
        nvrtc.fails["nvrtcCompileProgram"] = real.CUresult.CUDA_ERROR_INVALID_SOURCE
    else:
        nvrtc.nvrtcCreateProgram = missing  # type: ignore[method-assign]
    said = "nvrtcCompileProgram: .*INVALID_SOURCE" if why == "refused" else "no libnvrtc"
    with pytest.raises(DriverError, match=f"NVRTC, its_name: {said}"):
        Driver(FakeBindings(), nvrtc).compile("its source", "its_name")


def test_without_nvrtc_calls_copy_outside_of_graphs_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nvrtc = FakeNvrtc()
    nvrtc.nvrtcCreateProgram = missing  # type: ignore[method-assign]
    composer = CudaComposer(Driver(FakeBindings(), nvrtc), torch.device("cuda", 0))
    with caplog.at_level("INFO"):
        assert composer.copy_launch(8) is None
        assert composer.copy_launch(8) is None
    assert len(caplog.messages) == 1
    assert "no libnvrtc" in caplog.messages[0]


@pytest.mark.parametrize(("size", "blocks"), [(1, 1), (1 << 13, 1), (1 << 14, 2), (1 << 30, 528)])
def test_the_copying_kernel_starts_with_nothing_to_copy(size: int, blocks: int) -> None:
    fake = FakeBindings()
    composer = CudaComposer(Driver(fake, FakeNvrtc()), torch.device("cuda", 0))
    launch = composer.copy_launch(size)
    assert launch is not None
    assert (launch.function, launch.grid) == (6, (blocks, 1, 1))
    assert set(launch.args) == {0}
    (image,) = [call[1] for call in fake.calls if call[0] == "cuModuleLoadData"]
    assert image.count(b"word size") == len(launch.args) // 3 + 1


def missing(*args: Any) -> Any:
    raise RuntimeError("no libnvrtc.so")


def test_a_node_is_patched_before_the_launch_and_only_then() -> None:
    device = Device()
    made = Composition(device.driver, [device.launch(1, 2, 0.5), device.launch(9, 9, 9.0)])
    device.fake.names()
    made.nodes[0].change((3, 1, 1), made.nodes[0].pack([(1, 8)]))
    made.nodes[1].enable(False)
    made.upload(7)
    made.launch(7)
    assert device.ran == [((3, 1, 1), 1, 8, 0.5)]
    made.nodes[1].enable(True)
    made.nodes[1].change(None, made.nodes[1].pack([(0, 4), (2, 2.5)]))
    made.launch(7)
    assert device.ran[1:] == [((3, 1, 1), 1, 8, 0.5), ((1, 1, 1), 4, 9, 2.5)]
    patch = ["cuGraphExecKernelNodeSetParams", "cuGraphNodeSetEnabled"]
    assert device.fake.names() == [
        *(*patch, "cuGraphUpload", "cuGraphLaunch"),
        *(*reversed(patch), "cuGraphLaunch"),
    ]


def test_a_node_may_become_another_kernel_with_other_parameters() -> None:
    device = Device()
    other = device.fake.kernel("hqqq", lambda *args: device.ran.append(("other", *args)))
    made = Composition(device.driver, [device.launch(1, 2, 0.5)])
    made.nodes[0].set(Launch(other, (2, 1, 1), (64, 1, 1), 1024, (-1, 2, 3, 4)))
    made.launch(7)
    made.nodes[0].set(device.launch(5, 6, 0.75))
    made.launch(7)
    assert device.ran == [("other", (2, 1, 1), -1, 2, 3, 4), ((1, 1, 1), 5, 6, 0.75)]


def test_arguments_are_packed_by_the_sizes_that_the_kernel_has() -> None:
    device = Device("bhiqfdQI")
    tensor = torch.zeros(3)
    given = (-1, -2, -3, tensor, 0.5, 0.25, 2**64 - 1, 2**32 - 1)
    made = Composition(device.driver, [device.launch(*given)])
    made.launch(7)
    wanted = (-1, -2, -3, tensor.data_ptr(), 0.5, 0.25, 2**64 - 1, 2**32 - 1)
    assert device.ran == [((1, 1, 1), *wanted)]
    made.nodes[0].change(None, made.nodes[0].pack([(2, struct.pack("<i", 77))]))
    made.launch(7)
    assert device.ran[1][3] == 77


def test_parameters_behind_an_ellipsis_are_zero() -> None:
    device = Device("qqq")
    made = Composition(device.driver, [device.launch(5, 6, 7)])
    made.nodes[0].set(device.launch(5, ...))
    made.launch(7)
    assert device.ran == [((1, 1, 1), 5, 0, 0)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((1, 2), "2 arguments, its kernel 3 parameters"),
        ((1, 2, 0.5, 4), "4 arguments, its kernel 3 parameters"),
        ((1, 2, 0.5, 4, ...), "4 arguments, its kernel 3 parameters"),
        ((1, 2**40, 0.5), "argument 1 of a launch is 1099511627776"),
        ((1, -(2**40), 0.5), "argument 1 of a launch is -1099511627776"),
        ((1, b"12345678", 0.5), "argument 1 of a launch is b'12345678'"),
        ((1, None, 0.5), "argument 1 of a launch is None"),
    ],
)
def test_a_launch_that_does_not_fit_its_kernel_is_refused(
    args: tuple[Any, ...], message: str
) -> None:
    device = Device()
    with pytest.raises(DriverError, match=message):
        Composition(device.driver, [device.launch(*args)])
    gc.collect()
    assert list(device.fake.graphs) == device.pieces  # nothing is left of it


def test_a_refused_patch_is_an_error_and_changes_nothing() -> None:
    device = Device()
    made = Composition(device.driver, [device.launch(1, 2, 0.5)])
    with pytest.raises(DriverError, match=r"SetParams: CUDA_ERROR_INVALID_VALUE"):
        made.nodes[0].change((0, 1, 1), made.nodes[0].pack([]))
    made.launch(7)
    assert device.ran == [((1, 1, 1), 1, 2, 0.5)]


@pytest.mark.parametrize(
    "name",
    ["cuGraphCreate", "cuGraphAddKernelNode", "cuGraphAddChildGraphNode", "cuGraphInstantiate"],
)
def test_a_call_that_fails_is_named_and_leaves_nothing(name: str) -> None:
    device = Device()
    device.fake.fails[name] = INVALID
    with pytest.raises(DriverError, match=f"{name}: CUDA_ERROR_INVALID_VALUE"):
        Composition(device.driver, [device.pieces[0], device.launch(1, 2, 0.5)])


@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuGraphUpload", "cuGraphNodeSetEnabled"])
def test_a_call_on_an_executable_that_fails_is_named(name: str) -> None:
    device = Device()
    made = Composition(device.driver, [device.launch(1, 2, 0.5)])
    device.fake.fails[name] = INVALID
    with pytest.raises(DriverError, match=f"{name}: CUDA_ERROR_INVALID_VALUE"):
        made.upload(7), made.nodes[0].enable(False), made.launch(7)


def test_a_composition_frees_its_executable_then_its_graph() -> None:
    device = Device()
    made = Composition(device.driver, [device.pieces[0], device.launch(1, 2, 0.5)])
    device.fake.names()
    del made
    gc.collect()
    assert device.fake.names() == ["cuGraphExecDestroy", "cuGraphDestroy"]
    assert not device.fake.executables
    assert list(device.fake.graphs) == device.pieces


def test_a_capture_gives_launches_in_order_and_runs_nothing() -> None:
    device = Device()
    stream = device.driver.create_stream()

    def run() -> None:
        for at in (3, 4):
            fields = Composition(device.driver, [device.launch(at, at, 0.5)]).nodes[0]
            kept.append(fields)
            device.fake.capture_on(stream, "KERNEL", fields=fields.fields)
            device.fake.capture_on(stream, "EMPTY")

    kept: list[Any] = []
    launches = device.driver.capture(stream, run)
    relaxed = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert ("cuStreamBeginCapture", stream, relaxed) in device.fake.calls
    assert device.fake.names()[-2:] == ["cuStreamEndCapture", "cuGraphDestroy"]
    assert device.ran == []
    packed = [tuple(map(bytes, launch.args)) for launch in launches]
    assert packed == [
        (struct.pack("q", at), struct.pack("i", at), struct.pack("f", 0.5)) for at in (3, 4)
    ]
    for launch in launches:
        device.driver.launch(launch, 7)
    assert device.ran == [((1, 1, 1), at, at, 0.5) for at in (3, 4)]
    device.driver.destroy_stream(stream)
    assert device.fake.names() == ["cuLaunchKernel", "cuLaunchKernel", "cuStreamDestroy"]


def test_a_capture_that_launches_nothing_has_no_launches() -> None:
    device = Device()
    assert device.driver.capture(7, lambda: None) == []


@pytest.mark.parametrize("ends", [True, False])
def test_a_function_that_raises_leaves_no_capture(ends: bool) -> None:
    device = Device()
    before = dict(device.fake.graphs)
    if not ends:
        device.fake.fails["cuStreamEndCapture"] = INVALID

    def run() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.driver.capture(7, run)
    assert device.fake.streams[7] is None
    assert device.fake.graphs == before


def test_a_capture_that_the_device_ends_is_an_error() -> None:
    device = Device()
    device.fake.fails["cuStreamEndCapture"] = INVALID
    with pytest.raises(DriverError, match=r"cuStreamEndCapture: CUDA_ERROR"):
        device.driver.capture(7, lambda: None)


@pytest.mark.parametrize(
    ("kind", "about", "message"),
    [
        ("MEMCPY", {}, r"more than launch kernels \(memcpy\)"),
        ("MEMSET", {}, r"more than launch kernels \(memset\)"),
        ("HOST", {}, r"more than launch kernels \(host\)"),
        ("GRAPH", {}, r"more than launch kernels \(graph\)"),
        ("KERNEL", {"cluster": 2}, "in clusters"),
        ("KERNEL", {"cooperative": 1}, "cooperatively"),
    ],
)
def test_nodes_that_parameters_cannot_say_are_refused_and_can_be_run_once(
    kind: str, about: dict[str, Any], message: str
) -> None:
    device = Device()
    with pytest.raises(UnpatchableError, match=message) as caught:
        device.driver.capture(7, lambda: device.fake.capture_on(7, kind, **about))
    device.fake.names()
    caught.value.graph.run(7)
    assert device.fake.names() == ["cuGraphInstantiate", "cuGraphLaunch", "cuGraphExecDestroy"]
    del caught.value.graph
    assert device.fake.names() == ["cuGraphDestroy"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    fake = FakeBindings()
    monkeypatch.setattr(bindings, "driver", fake)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)  # type: ignore[arg-type]
    return fake


def test_the_driver_is_that_of_cuda_bindings(installed: FakeBindings) -> None:
    assert find_driver().bindings is installed


def test_a_driver_that_is_missing_or_too_old_is_said(
    installed: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.version = 12030
    with pytest.raises(DriverError, match=r"CUDA's driver is of version 12030; 12040 is needed"):
        find_driver()
    monkeypatch.setattr(bindings, "__version__", "12.9.4")
    with pytest.raises(DriverError, match=r"cuda-bindings is 12\.9\.4; 13 is needed"):
        find_driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delattr(cuda, "bindings")
    with pytest.raises(DriverError, match=r"cuda-bindings is not installed \(pip install"):
        find_driver()


# ---- a stitched entry over the driver ------------------------------------------------------------


class Composer(RecordedComposer):
    """Joins graphs of a fake device, given as functions that replay them alone."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.segments: dict[Any, int] = {}

    def compose(self, parts: Any) -> Any:
        handles = [p if isinstance(p, Launch) else self.segments[p] for p in parts]
        made = Composition(self._device.driver, handles)

        def replay(*, patched: bool) -> None:
            made.launch(7)

        return SimpleNamespace(nodes=made.nodes, replay=replay)


class Entry:
    """Segments with planned boundaries between them, whose launches are drawn at each step."""

    def __init__(self, rng: random.Random, count: int, *, alike: bool) -> None:
        self.rng, self.alike, self.device = rng, alike, Device()
        self.ran, self.composer = self.device.ran, Composer(self.device)
        self.tensors = [torch.zeros(2) for _ in range(count)]
        self.kernels = [(self.device.kernel, "qif")]
        for codes in ("hqqq", "q", "iiq", ""):
            self.load(codes)
        self.known = 1
        """How many of the kernels the plans use: the others are first met after the build."""
        self.launches: list[list[Launch]] = []
        self.draw()
        self.parts: list[Any] = [self.segment(0)]
        for at, tensor in enumerate(self.tensors):
            self.parts += [self.boundary(at, tensor), self.segment(at + 1)]

    def load(self, codes: str) -> None:
        name = f"kernel {codes}"
        found = self.device.fake.kernel(codes, lambda *args: self.ran.append((name, *args)))
        self.kernels.append((found, codes))

    def segment(self, at: int) -> Any:
        def replay() -> None:
            self.ran.append(("piece", at % 3))

        self.composer.segments[replay] = self.device.pieces[at % 3]
        return replay

    def boundary(self, at: int, tensor: torch.Tensor) -> Boundary:
        def eager() -> None:
            for launch in self.plan(None, tensor):
                if 0 not in launch.grid:
                    self.device.driver.launch(launch, 7)

        name = "op" if self.alike else f"op{at}"
        return Boundary(
            name=name,
            step=eager,
            run=eager,
            args=[tensor],
            kwargs={},
            plan=self.plan,
            why_not=None,
        )

    def plan(self, context: Any, x: torch.Tensor) -> list[Launch]:
        (at,) = [at for at, tensor in enumerate(self.tensors) if tensor is x]
        found = self.launches[0 if self.alike else at]
        return [n._replace(args=tuple(x if a == "x" else a for a in n.args)) for n in found]

    def draw(self) -> None:
        """Have some boundaries launch other kernels, more of them, fewer, or none."""
        self.launches = [
            [self.launch() for _ in range(self.rng.choice([0, 1, 1, 2, 3]))] for _ in self.tensors
        ]

    def launch(self) -> Launch:
        rng = self.rng
        function, codes = rng.choice(self.kernels[: self.known])
        drawn = {"f": [0.0, -0.0, 1.5], "q": [0, 1, 5, "x"]}
        args: list[Any] = [rng.choice(drawn.get(code, [0, 1, 5])) for code in codes]
        if args and rng.random() < 0.1:
            args[-1] = ...
        grid = (rng.choice([0, 1, 1, 2, 3]), 1, 1)
        return Launch(function, grid, (32, 1, 1), rng.choice([0, 0, 64]), tuple(args))


CALLS_OF_A_PATCH = (
    "cuGraphCreate",
    "cuGraphAddKernelNode",
    "cuGraphInstantiate",
    "cuGraphExecKernelNodeSetParams",
    "cuGraphNodeSetEnabled",
)


@pytest.mark.parametrize("alike", [False, True])
def test_random_steps_of_a_stitched_entry_launch_what_its_pieces_launch(alike: bool) -> None:
    """Other kernels and parameter lists than at the build, none at some steps, calls that fail."""
    fallbacks = 0
    for seed in range(200):
        rng = random.Random(seed)
        entry = Entry(rng, rng.randint(1, 3), alike=alike)
        with use_context(make_context(None, [2, 1])):
            joined = stitch.join([], entry.parts, entry.composer, auto=False)
            assert len(joined.steps) == 1
            for _ in range(12):
                entry.known = rng.randint(1, len(entry.kernels))
                if rng.random() < 0.6:
                    entry.draw()
                entry.ran.clear()
                for part in entry.parts:
                    part.step() if isinstance(part, Boundary) else part()
                wanted = repr(entry.ran)
                entry.ran.clear()
                fails = rng.choice(["", "", "", *CALLS_OF_A_PATCH])
                entry.device.fake.fails = {fails: INVALID}
                joined.steps[0]()
                entry.device.fake.fails.clear()
                assert repr(entry.ran) == wanted, seed
        fallbacks += sum(joined.fallbacks.values())
    assert fallbacks > 100


def test_copies_of_a_step_that_was_interrupted_are_set_in_no_executable_that_was_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    entry = Entry(random.Random(0), 2, alike=False)
    with use_context(make_context(None, [2, 1])):
        (stitched,) = stitch.join([], entry.parts, entry.composer, auto=False).stitched
        copies = [("copy", (1, 1, 1), 1, 2, 3)]
        copy = entry.device.fake.kernel("qqq", lambda *args: entry.ran.append(("copy", *args)))
        copying = Copying(Launch(copy, (1, 1, 1), (32, 1, 1), 0, (0, 0, 0)))
        stitched.enclose(copying, None)
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(Source, "composed", interrupted)
                with contextlib.suppress(KeyboardInterrupt):  # nothing of it stays alive
                    stitched._compose()
            copying.set((1, 2, 3))
            entry.ran.clear()
            stitched.run()
            assert entry.ran[:1] == copies
            stitched()
            assert entry.ran.count(copies[0]) == 1
    assert len(entry.device.fake.executables) == 1


def test_a_capture_whose_kernels_cannot_be_read_frees_its_graph() -> None:
    device = Device()

    def run() -> None:
        device.fake.capture_on(7, "KERNEL")  # without parameters

    before = len(device.fake.graphs)
    with pytest.raises(AttributeError):
        device.driver.capture(7, run)
    gc.collect()
    assert len(device.fake.graphs) == before
