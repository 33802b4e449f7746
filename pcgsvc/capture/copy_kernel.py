"""A kernel that copies several pieces of memory, for graphs.

In: how many bytes at the most. Out: its CUDA C++ source, and launches of it once it is loaded.
Knows nothing of what is copied.
"""

from __future__ import annotations

from pcgsvc.cuda_driver import Launch

MOST = 5
"""Pieces of memory that a launch copies."""

NAME = "pcgsvc_copy"

_THREADS, _BYTES, _BLOCKS = 256, 1 << 13, 528
"""Of a block; what a block copies while there are fewer than `_BLOCKS`, four for each of a large
GPU's multiprocessors."""

_SOURCE = """
typedef unsigned long long word;

static __device__ void copy(char *to, const char *from, word size) {
    word at = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x, done = 0;
    word low = (word)to | (word)from;
    if (low % 16 == 0) {
        uint4 *target = (uint4 *)to;
        const uint4 *source = (const uint4 *)from;
        word i = at, count = size / 16;
        for (; i + 3 * stride < count; i += 4 * stride) {
            uint4 a = source[i], b = source[i + stride];
            uint4 c = source[i + 2 * stride], d = source[i + 3 * stride];
            target[i] = a, target[i + stride] = b;
            target[i + 2 * stride] = c, target[i + 3 * stride] = d;
        }
        for (; i < count; i += stride) target[i] = source[i];
        done = count * 16;
    } else if (low % 4 == 0) {
        for (word i = at; i < size / 4; i += stride) ((unsigned *)to)[i] = ((unsigned *)from)[i];
        done = size / 4 * 4;
    }
    for (word i = done + at; i < size; i += stride) to[i] = from[i];
}

extern "C" __global__ void NAME(PARAMETERS) { CALLS }
"""


def source() -> str:
    """Return the source: one function, (target, source, bytes) as 64-bit words for each piece."""
    names = ", ".join(f"char *to{n}, char *from{n}, word size{n}" for n in range(MOST))
    calls = " ".join(f"copy(to{n}, from{n}, size{n});" for n in range(MOST))
    return _SOURCE.replace("NAME", NAME).replace("PARAMETERS", names).replace("CALLS", calls)


def launch(function: int, size: int) -> Launch:
    """Return a launch that copies nothing yet, and up to so many bytes later.

    Args:
        function: the loaded kernel.
        size: by which its grid is chosen, for good: another grid at a later step takes long.
    """
    blocks = min(max(1, -(-size // _BYTES)), _BLOCKS)
    return Launch(function, (blocks, 1, 1), (_THREADS, 1, 1), 0, (0,) * (3 * MOST))
