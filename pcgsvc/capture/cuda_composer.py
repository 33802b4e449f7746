"""`capture.replay` on CUDA: captured graphs and kernels as one executable graph.

In: segments of `CudaEngine`, and launches. Out: an executable whose kernel nodes can be set. Knows
nothing of ops; the calls themselves are in `cuda_driver`.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import distributed

from pcgsvc import torch_private
from pcgsvc.capture import copy_kernel
from pcgsvc.capture.sources import Comparison, Step, UnstitchableError
from pcgsvc.cuda_driver import Composition, Driver, DriverError, Launch, UnpatchableError

logger = logging.getLogger(__name__)

_RUNS, _LONG_US = 3, 2000.0
"""Steps back to back by which two ways to replay are compared; of long ones, one: an entry's build
should not take much longer for it."""


class CudaComposer:
    """Joins segments and kernels of one runner; used under its lock.

    Args:
        driver: makes the calls.
        device: of the runner.
    """

    is_timed = True

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._driver, self._device = driver, device
        self._alone: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def address(self, tensor: torch.Tensor) -> int:
        """See `Composer.address`."""
        return tensor.data_ptr()

    def copy_launch(self, size: int) -> Launch | None:
        """See `Composer.copy_launch`; among several processes graphs stay torch's own."""
        kernel = None if _has_group() else self._copy_kernel
        return None if kernel is None else copy_kernel.launch(kernel, size)

    def compose(self, parts: Sequence[Step | Launch]) -> CudaComposed:
        """See `Composer.compose`; the graphs of segments are copied."""
        handles = [p if isinstance(p, Launch) else self._handle(p) for p in parts]
        return CudaComposed(Composition(self._driver, handles), self._device.index)

    def keep_alone(self, replay: Step) -> None:
        """Have a segment that draws random numbers replayed by torch, which sets their state."""
        self._alone.add(_captured(replay))

    def _handle(self, replay: Step) -> int:
        graph = _captured(replay)
        if graph in self._alone:
            raise DriverError("a segment draws random numbers, whose state torch sets at a replay")
        return int(graph.raw_cuda_graph())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """See `Composer.aside`.

        On a stream and in a memory pool that nothing else uses: what ops allocate and free is used
        again by what they launch later only, in the order of replays.
        """
        with torch.cuda.stream(self._side[0]), torch.cuda.use_mem_pool(self._side[1], self._device):
            yield

    def capture(self, run: Step) -> Sequence[Launch]:
        """See `Composer.capture`.

        A captured stream that torch does not know of also refuses to draw random numbers, whose
        state no replay would set.
        """
        if _has_group():
            # A collective's parameters lie in memory that its library frees with the graph.
            raise UnstitchableError("it has no launch plan, and may call other processes")
        try:
            return self._driver.capture(self._side[0].cuda_stream, run)
        except UnpatchableError as error:
            run_once = partial(self._on_current, error.graph.run)
            raise UnstitchableError(str(error), run_once) from error
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            why = f"it cannot be captured ({type(error).__name__}: {first})"
            raise UnstitchableError(why) from error

    def launch(self, launches: Sequence[Launch]) -> None:
        """See `Composer.launch`."""
        for launch in launches:
            self._on_current(partial(self._driver.launch, launch))

    def compare(self, pieces: Sequence[Step], stitched: Sequence[Step], anew: Step) -> Comparison:
        """See `Composer.compare`."""
        runs = 1 if _time(stitched, _nothing, 1)[0] > _LONG_US else _RUNS
        here, alone = _time(stitched, anew, runs), _time(pieces, _nothing, runs)
        return Comparison(
            pieces_us=alone[0],
            stitched_us=here[0],
            pieces_host_us=alone[1],
            stitched_host_us=here[1],
        )

    @cached_property
    def _copy_kernel(self) -> int | None:
        try:
            return self._driver.compile(copy_kernel.source(), copy_kernel.NAME)
        except DriverError as error:
            logger.info("calls launch their copies by themselves, outside of graphs: %s", error)
            return None

    @cached_property
    def _side(self) -> tuple[torch.cuda.Stream, Any]:
        """The stream that ops are captured on, and the pool that they allocate from."""
        raw = self._driver.create_stream()
        weakref.finalize(self, self._driver.destroy_stream, raw).atexit = False
        return torch.cuda.ExternalStream(raw, self._device), torch.cuda.MemPool()

    def _on_current(self, call: Callable[[int], None]) -> None:
        call(torch_private.current_raw_stream(self._device.index))


class CudaComposed:
    """See `Composed`."""

    def __init__(self, made: Composition, device_index: int) -> None:
        self._made, self._device_index, self.nodes = made, device_index, made.nodes

    def replay(self, *, patched: bool) -> None:
        """See `Composed.replay`; on the current stream."""
        stream = torch_private.current_raw_stream(self._device_index)
        if patched:
            self._made.upload(stream)
        self._made.launch(stream)


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _captured(replay: Any) -> Any:
    """Return the graph that a segment's step replays."""
    return replay.__self__


def _time(steps: Sequence[Step], before: Step, runs: int) -> tuple[float, float]:
    """Return microseconds of a step back to back, and until it is enqueued (the least)."""
    torch.cuda.synchronize()
    hosts = []
    begun = time.perf_counter()
    for _ in range(runs):
        before()
        started = time.perf_counter()
        for step in steps:
            step()
        hosts.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begun) / runs, 1e6 * min(hosts)


def _nothing() -> None:
    return None
