"""How `pcgsvc::gemv` is launched, and which plan of a few is the fastest on this GPU.

In: shapes. Out: a launch; a plan, or why there is none. Knows nothing of graphs. Plans are timed on
weights that no cache holds, as in a step: several times the L2 of them, one after the other.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pcgsvc import torch_private

logger = logging.getLogger(__name__)

_MAX_ERROR = 1e-2
"""Largest relative error against float32. Rounding to bfloat16 gives 2e-3, after SwiGLU 4e-3."""
_CHECKED = 4096
"""Rows of a weight whose results are compared."""


class Plan(NamedTuple):
    """How a product is cut into programs."""

    block_n: int
    """Columns of a program."""
    block_k: int
    """Features per step of its loop; they divide all features."""
    stages: int
    """Steps whose weights are under way at once."""
    num_warps: int


class Choice(NamedTuple):
    """What came of timing a product's plans."""

    plan: Plan | None
    problem: str | None = None
    """Why there is none, unless torch's product is just faster."""


# By rows and whether gated: the best of 221 plans for some product of Llama-3-8B on an H200.
_PLANS = {
    (True, False): [Plan(8, 256, 5, 2), Plan(16, 256, 5, 4), Plan(4, 1024, 5, 8)],
    (True, True): [Plan(4, 1024, 3, 2), Plan(16, 128, 3, 2)],
    (False, False): [
        Plan(32, 128, 6, 2),
        Plan(16, 512, 4, 2),
        Plan(32, 128, 3, 2),
        Plan(32, 256, 3, 2),
    ],
    (False, True): [Plan(128, 128, 3, 4), Plan(16, 128, 3, 2)],
}


def padded_rows(rows: int) -> int:
    """Return the rows of a launch: one is multiplied by itself, more of them by tensor cores."""
    return 1 if rows == 1 else 8 if rows <= 8 else 16


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    eps: float = 0.0,
    plan: Sequence[int] = (),
    kernel: Any = None,
) -> torch.Tensor:
    """Compute `pcgsvc::gemv` on the GPU; `kernel`: compiled apart from the one that steps use."""
    from pcgsvc.ops import triton_gemv  # not at the top: optional, and slow to import

    rows, features = x.shape
    out = x.new_empty(rows, weight.shape[0] // (2 if gated else 1))
    block_n, block_k, stages, num_warps = plan
    (kernel or triton_gemv.product)[(-(-out.shape[1] // block_n),)](
        x,
        weight,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        rows,
        out.shape[1],
        features,
        x.stride(0),
        eps,
        M_PAD=padded_rows(rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        num_warps=num_warps,
    )
    return out


@functools.cache
def choose_plan(
    rows: int, weight_rows: int, features: int, gated: bool, device: torch.device
) -> Choice:
    """Time the plans for a product, and torch's own product, on cold weights.

    Args:
        rows: as `padded_rows` gives them.
        weight_rows: of the weight [N, K].
        features: K.
        gated: as in `pcgsvc::gemv`; torch's time is that of the product alone.
        device: a GPU.

    Returns:
        The fastest plan. None if torch is faster, or the first plan that fits gives wrong results.
    """
    shape = f"{rows} rows by [{weight_rows}, {features}]"
    plans = [p for p in _PLANS[rows == 1, gated] if features % p.block_k == 0]
    try:
        with torch_private.real_tensors(), torch.cuda.device(device):
            times = _timed(rows, weight_rows, features, gated, plans)
    except torch.OutOfMemoryError:
        return Choice(None, f"products of {shape}: no memory to time them in")
    except ArithmeticError as error:
        return Choice(None, f"products of {shape}: {error}")
    own = times.pop(None)
    best = min(times, key=times.__getitem__, default=None)
    logger.info("gemv: %s: torch %.1f µs; %s", shape, own, times)
    return Choice(best if best is not None and times[best] < own else None)


def _timed(
    rows: int, weight_rows: int, features: int, gated: bool, plans: Sequence[Plan]
) -> dict[Plan | None, float]:
    """Return the µs of each plan, and of torch's product under None."""
    import triton

    generator = torch.Generator("cuda").manual_seed(0)
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    copies = -(-4 * cache // (2 * weight_rows * features))
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    weights = torch.empty(copies, weight_rows, features, **where).normal_(generator=generator)
    x = torch.randn(rows, features, generator=generator, **where) / features**0.5
    times: dict[Plan | None, float] = {
        None: _time([functools.partial(torch.mm, x, w.t()) for w in weights])
    }
    kernel = _trial_kernel()
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        for plan in plans:
            one = functools.partial(launch, x, gated=gated, plan=plan, kernel=kernel)
            _compare(one(weights[0, :_CHECKED]), x, weights[0, :_CHECKED], gated)
            times[plan] = _time([functools.partial(one, w) for w in weights])
    return times


@functools.cache
def _trial_kernel() -> Any:
    """Return the kernel apart from the one in steps, which is compiled, and stored, by a step."""
    import triton

    from pcgsvc.ops import triton_gemv

    return triton.jit(triton_gemv.product.fn, do_not_specialize=["num_rows"])


def _compare(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> None:
    wanted = functional.linear(x.float(), weight.float())
    if gated:
        gate, up = wanted.chunk(2, -1)
        wanted = functional.silu(gate) * up
    error = float((got.float() - wanted).norm() / wanted.norm())
    if not error <= _MAX_ERROR:
        raise ArithmeticError(f"off by {error:.2g} from float32 (at most {_MAX_ERROR})")


def _time(launches: Sequence[Callable[[], Any]]) -> float:
    """Return the µs of one of these launches, replayed as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for one in launches:
                one()
        finally:
            graph.capture_end()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / len(launches))
    return float(min(times))
