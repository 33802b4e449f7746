"""Launches of Triton kernels as plain values.

In: a kernel and its arguments. Out: a `Launch`, or None for what a launch's values cannot say.
Knows nothing of ops. Source: Triton's launcher (3.6 and 3.7): the arguments of the signature that
are no constants, then the addresses of scratch memory, which are null where a kernel needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcgsvc.cuda_driver import Launch


def triton_launch(
    kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any
) -> Launch | None:
    """Return the launch of `kernel[grid](*args, **options)`, which is not made.

    The kernel is compiled for these arguments if it has not been; Triton's dispatch decides, as at
    a launch. It takes the host tens of microseconds.

    Args:
        kernel: a function of `@triton.jit`.
        grid: blocks.
        args: all arguments of the function in its order, constants included.
        options: Triton's, such as `num_warps`.

    Returns:
        None: the kernel needs scratch memory, a cluster, or a cooperative launch.
    """
    return launch_of(kernel.warmup(*args, grid=grid, **options), grid, args)


def launch_of(
    compiled: Any, grid: tuple[int, int, int], args: Sequence[Any], *, fixed: bool = False
) -> Launch | None:
    """Return the launch of a kernel that Triton has compiled; see `triton_launch`.

    Args:
        compiled: what a launch, or a warm-up, of the kernel returned.
        grid: blocks.
        args: all arguments in the function's order.
        fixed: see `Launch`.
    """
    compiled[grid]  # loads the binary
    about = compiled.metadata
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    if about.num_ctas > 1 or any(getattr(about, name, 0) for name in needs):
        return None
    kinds = compiled.src.signature.values()
    live = [a for a, kind in zip(args, kinds, strict=True) if kind != "constexpr"]
    return Launch(
        function=compiled.function,
        grid=grid,
        block=(32 * about.num_warps, 1, 1),
        shared=about.shared,
        args=(*live, ...),
        fixed=fixed,
    )
