"""The Triton kernel of `pcgsvc::gemv`: few rows by a weight that is read once.

In: device tensors and static numbers of one launch. Out: the result. Knows nothing of graphs;
imported only where a product is launched, since it needs triton.

Shapes: M rows, N columns of the result, K features; a program makes BLOCK_N columns of all rows.
"""

# Triton functions are compiled, not called: their arguments have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _add_product(total, w, row, M_PAD: tl.constexpr):
    """Add w [BLOCK_N, BLOCK_K] by row [M_PAD, BLOCK_K]; of one row the features stay unsummed."""
    if M_PAD == 1:
        total += w.to(tl.float32) * row.to(tl.float32)
    else:
        total = tl.dot(w, tl.trans(row), total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x,
    weight,
    norm,
    residual,
    out,
    num_rows,
    columns,
    features,
    x_row,
    eps,
    M_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
):
    """See `pcgsvc::gemv`. Grid: (cdiv(N, BLOCK_N),); BLOCK_K divides K. NORM: one row only."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, M_PAD)
    up = weight + tl.cast(columns, tl.int64) * features
    w_row = tl.minimum(n, columns - 1).to(tl.int64)[:, None] * features
    WIDTH: tl.constexpr = BLOCK_K if M_PAD == 1 else M_PAD
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    total_up = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    squares = tl.zeros([M_PAD, BLOCK_K], tl.float32)
    x_at = x + tl.where(m < num_rows, m, 0)[:, None] * x_row + k[None, :]
    for start in tl.range(0, features, BLOCK_K, num_stages=STAGES):
        w = tl.load(weight + w_row + (start + k)[None, :])
        row = tl.load(x_at + start)
        if NORM:
            row = row.to(tl.float32)
            squares += row * row
            row *= tl.load(norm + start + k).to(tl.float32)[None, :]
        total = _add_product(total, w, row, M_PAD)
        if GATED:
            w_up = tl.load(up + w_row + (start + k)[None, :])
            total_up = _add_product(total_up, w_up, row, M_PAD)
    if M_PAD == 1:
        total = tl.sum(total, 1)[:, None]
        total_up = tl.sum(total_up, 1)[:, None]
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / features + eps)[None, :]
        total *= scale
        total_up *= scale
    # Rounded where the separate ops round as well.
    y = total.to(out.dtype.element_ty)
    if GATED:
        gate = y.to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(y.dtype).to(tl.float32)
        y = (gate * total_up.to(y.dtype).to(tl.float32)).to(y.dtype)
    at = m[None, :] * columns + n[:, None]
    mask = (n < columns)[:, None] & (m < num_rows)[None, :]
    if RESIDUAL:
        added = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        y = (added + y.to(tl.float32)).to(y.dtype)
    tl.store(out + at, y, mask=mask)
