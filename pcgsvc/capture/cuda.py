"""`capture.graphs=cuda`: segments as CUDA graphs in one pool.

In: a segment that runs on the runner's capture stream. Out: `graph.replay` of a graph whose memory
lies in the runner's pool. Knows nothing of programs, dispatch or disks.

`torch.cuda.graph` synchronises and empties the allocator's cache for every graph; a runner captures
hundreds, so `capture_begin` and `capture_end` are driven directly and the rest is done once.
"""

from __future__ import annotations

import bisect
import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.capture.cuda_composer import CudaComposer
from pcgsvc.program.program import CompiledPiece

Step = Callable[[], Any]


class CudaEngine:
    """Captures segments on one stream into one pool. One per runner; used under its lock.

    A pool's memory lives as long as any of its graphs. Entries keep the engine, and it keeps an
    empty graph: a segment that only allocates leaves no other.
    """

    name = "cuda"

    def __init__(
        self,
        stream: torch.cuda.Stream,
        error_mode: str,
        composer: CudaComposer | str = "none is wanted",
    ) -> None:
        self.stream, self.composer = stream, composer
        self.pool = torch.cuda.graph_pool_handle()
        self._pools = [self.pool]
        """All pools that entries of this runner may lie in: one, unless a capture failed."""
        self._error_mode = error_mode
        self._graph: torch.cuda.CUDAGraph | None = None
        self._empty: torch.cuda.CUDAGraph | None = None
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._outside: set[int] = set()
        """Addresses found outside the pool; what `hold` returned for them keeps them there."""

    def begin(self) -> None:
        """See `Engine.begin`."""
        # Before it begins: a begin that fails leaves the random generator to `abort`.
        # Kept beside its executable where it may be joined: torch then instantiates at the replay.
        keep = {} if isinstance(self.composer, str) else {"keep_graph": True}
        graph = self._graph = torch.cuda.CUDAGraph(**keep)
        graph.capture_begin(pool=self.pool, capture_error_mode=self._error_mode)

    def end(self) -> Step | None:
        """See `Engine.end`."""
        graph = self._graph
        assert graph is not None, "no segment is open"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            graph.capture_end()
        self._graph = None
        if any("CUDA Graph is empty" in str(w.message) for w in said):
            self._empty = graph
            return None
        replay: Step = super(torch.cuda.CUDAGraph, graph).replay  # without torch's Python around it
        generator = torch.cuda.default_generators[self.stream.device_index]
        drawn = generator.get_offset()
        replay()
        if generator.get_offset() != drawn and not isinstance(self.composer, str):
            self.composer.keep_alone(replay)
        return replay

    def abort(self) -> None:
        """See `Engine.abort`. The graph is ended so that the pool is released, then dropped."""
        graph, self._graph = self._graph, None
        self._outside.clear()
        if graph is None:
            return
        if not torch_private.abandon_capture(graph, self.stream.device, self.pool):
            self._new_pool()

    def run_piece(self, piece: CompiledPiece, args: list[Any]) -> Sequence[Any]:
        """See `Engine.run_piece`."""
        return piece(*args)

    def session(self) -> contextlib.AbstractContextManager[None]:
        """See `Engine.session`."""
        return contextlib.nullcontext()

    def made(self, tensor: torch.Tensor) -> bool:
        """See `Engine.made`."""
        return self._in_pool(tensor.untyped_storage().data_ptr())

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Engine.hold`: memory of the pool is held weakly, everything else strongly."""
        if tensor.device.type == "cuda" and self._in_pool(tensor.untyped_storage().data_ptr()):
            return torch_private.alias_without_owning(tensor)
        return tensor

    def take_owned(self) -> list[torch.Tensor]:
        """See `Engine.take_owned`."""
        return []

    def discard_pool(self) -> None:
        """See `Engine.discard_pool`; torch refuses a handle whose graphs are all gone."""
        self._new_pool()
        self.give_back()

    def probe(self, cause: Exception) -> None:
        """See `Engine.probe`."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise RuntimeError(f"the GPU is unusable after a failed capture: {error}") from cause

    def pool_bytes(self) -> int:
        """See `Engine.pool_bytes`: what the runner's pools have mapped."""
        return sum(end - start for start, end in torch_private.pool_ranges(self._pools))

    def free_bytes(self) -> int:
        """See `Engine.free_bytes`."""
        return torch.cuda.mem_get_info(self.stream.device)[0]

    def reserved_bytes(self) -> int:
        """See `Engine.reserved_bytes`."""
        return torch.cuda.memory_reserved(self.stream.device)

    def give_back(self) -> None:
        """See `Engine.give_back`."""
        torch.cuda.empty_cache()

    def _new_pool(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self._pools.append(self.pool)
        self._empty = None
        self._starts, self._ends = [], []
        self._outside.clear()

    def _in_pool(self, address: int) -> bool:
        if self._find(address):
            return True
        if address in self._outside:
            return False
        ranges = sorted(torch_private.pool_ranges(self._pools))
        self._starts, self._ends = [r[0] for r in ranges], [r[1] for r in ranges]
        inside = self._find(address)
        if not inside:
            self._outside.add(address)
        return inside

    def _find(self, address: int) -> bool:
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]
