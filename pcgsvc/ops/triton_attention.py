"""`attention=triton`: paged attention by Triton kernels, for NVIDIA GPUs.

In: q, k, v of one layer and the context's device tensors. Out: the output rows and the KV cache.
Knows nothing of models or of a runner's graphs. The kernels are in `triton_kernels`, imported when
a backend is made, so that nothing else needs triton; `triton_tuning` cuts launches into programs.

Support ALWAYS: a launch depends on the padded row count, the layer and static maxima alone, so a
captured call serves every batch of its size. One launch per layer in single-token decode;
otherwise, above `Tuning.fused_write_rows` rows and where requests may share KV inside a step, one
more writes the cache first. The splits of long sequences are combined by the last program of a
tile to finish, not by a second launch. As a boundary between graphs, a call is replayed from a
graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from pcgsvc.cuda_driver import Launch
from pcgsvc.errors import ConfigError
from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.context import ForwardContext
from pcgsvc.ops.launches import launch_of
from pcgsvc.ops.support import Support
from pcgsvc.ops.triton_tuning import (
    MAX_SPLITS,
    LaunchPlan,
    Shape,
    Tuning,
    plan_launch,
    power_of_two,
)

MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Most query heads of one KV head; they share a tile."""
_MAX_READY = 8192
"""Most remembered calls: an eager caller with ever new addresses must not fill the memory."""


class _Launch(NamedTuple):
    """A launch that was made, to be made again."""

    run: Callable[..., None]
    args: tuple[Any, ...]
    plain: Launch | None
    """The same as plain values, the same at every step: it is made of addresses and maxima."""


class _Call(NamedTuple):
    """The arguments of one `AttentionBackend.forward`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    layer: int
    context: ForwardContext


class TritonAttention(AttentionBackend):
    """See the module docstring.

    Requests have at least one row each. Unless `share_in_step`, no request reads a slot that
    another request writes in the same step.
    """

    cudagraph_support = Support.ALWAYS

    @classmethod
    def check(cls, device: torch.device) -> None:
        """See `AttentionBackend.check`."""
        _load_kernels(device)

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        share_in_step: bool = True,
        tuning: Tuning | None = None,
    ) -> None:
        """Check that the kernels serve `spec` on `device`; allocate the cache and the scratch.

        Args:
            spec: heads, scale, windows and softcap.
            num_blocks: blocks of the cache, the null block included.
            block_size: tokens per block.
            device: a CUDA device; the CPU under Triton's interpreter, for tests.
            dtype: of q, k, v, output and cache: float32 (exact), float16 or bfloat16.
            share_in_step: whether a request may read KV that another request writes in the same
                step (prefix caching inside one step); costs one more launch per layer, not in
                single-token decode, where no request can.
            tuning: speed only.

        Raises:
            ConfigError: no triton, no GPU, or heads or a dtype that the kernels lack.
        """
        _check(spec, dtype)
        device = torch.device(device)
        self._kernels, self._interpreted = _load_kernels(device)
        super().__init__(
            spec, num_blocks=num_blocks, block_size=block_size, device=device, dtype=dtype
        )
        self.share_in_step = share_in_step
        self.tuning = tuning or Tuning()
        self._windows = [spec.window(layer) or 0 for layer in range(spec.num_layers)]
        self._dtype = dtype
        self._device_index = self.kv_cache[0].device.index  # None: the CPU
        self._shape = _shape(spec, dtype, self._device_index)
        self._ready: dict[tuple[Any, ...], list[_Launch]] = {}
        # Scratch of the splits, once for all layers and sizes: static addresses, outside all pools.
        rows, float32 = self._shape.scratch_rows, torch.float32
        self._partial = torch.empty(rows, self._shape.head_pad, device=device, dtype=float32)
        self._stats = torch.empty(rows, 2, device=device, dtype=float32)
        self._counters = torch.zeros(self._shape.scratch_programs, device=device, dtype=torch.int32)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> None:
        """See `AttentionBackend.forward`; waits for nothing and allocates nothing."""
        index = self._device_index
        if index is not None and torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.forward(q, k, v, output, layer, context)
        call = _Call(q, k, v, output, layer, context)
        # Triton's own dispatch costs tens of microseconds; over static buffers all calls of an
        # entry but the first find their launches here.
        key = self._key(call)
        ready = self._ready.get(key)
        if ready is None:
            ready = self._first_forward(call)
            if len(self._ready) >= _MAX_READY:
                self._ready.clear()
            if ready:
                self._ready[key] = ready
            return None
        for run, args, _ in ready:
            run(*args)
        return None

    def plan_launches(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> Sequence[Launch] | None:
        """See `AttentionBackend.plan_launches`: prefill, decode and split decode alike."""
        ready = self._ready.get(self._key(_Call(q, k, v, output, layer, context)), [])
        plain = [launch.plain for launch in ready if launch.plain is not None]
        return plain if ready and len(plain) == len(ready) else None

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        layer: int,
        context: ForwardContext,
    ) -> Callable[[], None] | None:
        """See `AttentionBackend.bind`: the launches as a CUDA graph of their own.

        Replaying it takes the host a third of what Triton's launcher takes, and both see the same
        memory: addresses and static maxima are all that a launch is made from.
        """
        ready = self._ready.get(self._key(_Call(q, k, v, output, layer, context)))
        if not ready or self._device_index is None:
            return None
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for run, args, _ in ready:
                run(*args)
        finally:
            graph.capture_end()
        return graph.replay

    def _key(self, call: _Call) -> tuple[Any, ...]:
        """Return all that a launch is made from."""
        q, k, v, output, layer, context = call
        return (
            layer,
            q.shape,
            context.uniform_query_len,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            output.data_ptr(),
            q.stride(),
            k.stride(),
            v.stride(),
            output.stride(),
            self.kv_cache[layer].data_ptr(),
            context.slot_mapping.data_ptr(),
            context.token_to_req.data_ptr(),
            context.kv_lens.data_ptr(),
            context.block_tables.data_ptr(),
            context.block_tables.shape,
            context.query_start_loc.data_ptr(),
            context.query_start_loc.shape,
        )

    def _first_forward(self, call: _Call) -> list[_Launch]:
        """Launch through Triton's dispatch, which compiles; return what repeats the launches."""
        self._check_tensors(call)
        if call.q.shape[0] == 0:
            return []
        plan = self._plan(call)
        launches = [] if plan.fused_write else [self._write(call)]
        launches.append(self._attend(call, plan))
        return [launch for launch in launches if launch is not None]

    def _plan(self, call: _Call) -> LaunchPlan:
        rows, window, context = call.q.shape[0], self._windows[call.layer], call.context
        max_keys = context.block_tables.shape[1] * self.block_size
        return plan_launch(
            self._shape,
            self.tuning,
            rows=rows,
            num_reqs=context.query_start_loc.shape[0] - 1,
            max_keys=min(max_keys, window + rows) if window else max_keys,
            single=context.uniform_query_len == 1,
            share_in_step=self.share_in_step,
        )

    def _write(self, call: _Call) -> _Launch | None:
        _, k, v, _, layer, context = call
        spec, cache = self.spec, self.kv_cache[layer]
        args = (
            k,
            v,
            cache,
            context.slot_mapping,
            context.kv_lens,
            cache.stride(0),
            *k.stride()[:2],
            *v.stride()[:2],
            spec.num_kv_heads,
            power_of_two(spec.num_kv_heads),
            spec.head_dim,
            self._shape.head_pad,
        )
        return _launch(self._kernels.write_cache, (k.shape[0], 1, 1), args)

    def _attend(self, call: _Call, plan: LaunchPlan) -> _Launch | None:
        q, k, v, output, layer, context = call
        spec, shape, cache, tiling = self.spec, self._shape, self.kv_cache[layer], plan.tiling
        num_reqs = context.query_start_loc.shape[0] - 1
        args = (
            q,
            k,
            v,
            output,
            cache,
            context.slot_mapping,
            context.token_to_req,
            context.kv_lens,
            context.block_tables,
            context.query_start_loc,
            self._partial,
            self._stats,
            self._counters,
            cache.stride(0),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *output.stride()[:2],
            context.block_tables.stride(0),
            num_reqs,
            q.shape[0],
            float(spec.scale),
            float(spec.softcap or 0),
            self._windows[layer],
            spec.num_kv_heads,
            shape.group,
            self.block_size,
            spec.head_dim,
            shape.head_pad,
            tiling.block_m,
            tiling.block_n,
            plan.split_keys,
            plan.single,
            plan.fused_write,
            plan.splits > 1,
            power_of_two(num_reqs + 1),
            power_of_two(shape.group),
            MAX_SPLITS,
            # The interpreter (3.6) multiplies the bits of bfloat16 as if they were integers.
            self._interpreted and self._dtype is torch.bfloat16,
        )
        return _launch(
            self._kernels.attend,
            (spec.num_kv_heads, plan.tiles, plan.splits),
            args,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )

    def _check_tensors(self, call: _Call) -> None:
        for name in ("q", "k", "v", "output"):
            tensor = getattr(call, name)
            if tensor.dtype is not self._dtype or tensor.stride(2) != 1:
                raise ConfigError(
                    f"attention=triton: {name} is {tensor.dtype} with strides {tensor.stride()}; "
                    f"{self._dtype}, as the KV cache has, and adjacent features are needed. "
                    "Convert it before pcgsvc::attention, or use attention=paged."
                )


def _launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], **options: int
) -> _Launch | None:
    """Launch; return what launches the same again, or None in the interpreter."""
    compiled = kernel[grid](*args, **options)
    if compiled is None:
        return None
    # Addresses instead of tensors: the launcher then asks neither Python nor the driver for them,
    # and remembered launches keep no memory alive.
    plain = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
    return _Launch(compiled[grid], plain, launch_of(compiled, grid, plain, fixed=True))


def _shape(spec: AttentionSpec, dtype: torch.dtype, device_index: int | None) -> Shape:
    slots, shared_bytes = 32, 256 << 10  # the interpreter: any small device will do
    if device_index is not None:
        properties = torch.cuda.get_device_properties(device_index)
        slots = 2 * properties.multi_processor_count
        shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Shape(
        num_kv_heads=spec.num_kv_heads,
        group=spec.num_heads // spec.num_kv_heads,
        head_pad=max(16, power_of_two(spec.head_dim)),  # tl.dot needs 16
        itemsize=dtype.itemsize,
        slots=slots,
        shared_bytes=shared_bytes,
    )


def _check(spec: AttentionSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError for what the kernels lack."""
    group = spec.num_heads // spec.num_kv_heads
    problems = [
        (
            dtype not in (torch.float32, torch.float16, torch.bfloat16),
            f"dtype {dtype}; float32, float16 or bfloat16 is needed",
        ),
        (
            not 1 <= spec.head_dim <= MAX_HEAD_DIM,
            f"head_dim {spec.head_dim}; 1 to {MAX_HEAD_DIM} is needed",
        ),
        (
            group > MAX_GROUP,
            f"{spec.num_heads} query heads over {spec.num_kv_heads} KV heads; at most "
            f"{MAX_GROUP} query heads per KV head are needed",
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise ConfigError(f"attention=triton: got {message}, or use attention=paged.")


def _load_kernels(device: torch.device) -> tuple[ModuleType, bool]:
    """Return the kernels and whether Triton's interpreter runs them."""
    try:
        import triton

        from pcgsvc.ops import triton_kernels  # not at the top: optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            "attention: got 'triton', but the package triton cannot be imported "
            f"({error}). Install it (pip install triton), or use attention=paged."
        ) from error
    interpreted = not isinstance(triton_kernels.attend, triton.JITFunction)
    if device.type == "cuda" and interpreted:
        raise ConfigError(
            f"attention: got 'triton' with device={str(device)!r} while TRITON_INTERPRET is set; "
            "the interpreter runs on the host and cannot be captured. Unset it, or use device=cpu."
        )
    if device.type != "cuda" and not interpreted:
        raise ConfigError(
            f"attention: got 'triton' with device={str(device)!r}, which is no GPU. Use "
            "attention=paged or device=cuda; for tests, set TRITON_INTERPRET=1 before triton is "
            "imported."
        )
    return triton_kernels, interpreted
