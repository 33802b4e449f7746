"""The Triton kernels of `attention=triton`: paged attention of any batch, and the cache write.

In: device tensors and static numbers of one launch. Out: the output rows and the KV cache. Knows
nothing of contexts or backends; imported only when the backend is chosen, since it needs triton.

Shapes: T = rows with padding, H = query heads, K = KV heads, G = H / K, D = head dim, N = blocks,
S = tokens per block, R = most requests, P = KV splits. M and N of a tile: `BLOCK_M` rows, each one
query head of one token (the G heads that share a KV head lie side by side), by `BLOCK_N` keys.
"""

# Triton functions are compiled, not called: their arguments have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _visit(
    acc,
    top,
    total,
    q,
    start,
    finish,
    kv_len,
    table,
    keys,
    values,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    S: tl.constexpr,
    TOKEN: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys [start, start + BLOCK_N) of one request into the running softmax of a tile."""
    where = start + tl.arange(0, BLOCK_N)
    at = tl.arange(0, D_PAD)
    # Beyond the end: slot 0 of the null block, which exists, so that no address is ever invalid.
    block = (
        tl.load(table + where // S, mask=where < finish, other=0)
        if MASKED
        else tl.load(table + where // S)
    )
    slots = block.to(tl.int64) * S + where % S
    offsets = slots[:, None] * TOKEN + at[None, :]
    if MASKED:
        # Dead slots may hold anything, NaN included, and 0 * NaN is NaN. Dead keys need no mask:
        # their scores are replaced, not multiplied.
        key = tl.load(keys + offsets, mask=(at < D)[None, :], other=0.0)
        value = tl.load(
            values + offsets, mask=(where < finish)[:, None] & (at < D)[None, :], other=0.0
        )
    else:
        key = tl.load(keys + offsets, mask=(at < D)[None, :], other=0.0)
        value = tl.load(values + offsets, mask=(at < D)[None, :], other=0.0)
    if WIDE:
        key, value = key.to(tl.float32), value.to(tl.float32)
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    if SOFTCAP > 0:
        # tanh by exp: right at both ends (exp gives inf or 0), and no library call.
        scores = SOFTCAP - 2 * SOFTCAP / (tl.exp(scores * (2 * SCALE / SOFTCAP)) + 1)
        scores *= LOG2E
    else:
        scores *= SCALE * LOG2E
    if MASKED:
        live = where[None, :] < kv_len[:, None]
        if WINDOW > 0:
            live &= where[None, :] >= kv_len[:, None] - WINDOW
        scores = tl.where(live, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet: -inf - -inf would be NaN.
    safe = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def _write_rows(
    begin,
    end,
    first_row,
    context_len,
    k,
    v,
    keys,
    values,
    slot_mapping,
    k_row,
    v_row,
    TOKEN: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the new rows at positions [begin, end) of one request and one head to the cache."""
    at = tl.arange(0, D_PAD)
    for position in range(begin, end, ROWS):
        where = position + tl.arange(0, ROWS)
        row = (first_row + where - context_len).to(tl.int64)
        slot = tl.load(slot_mapping + row, mask=where < end, other=0).to(tl.int64)
        mask = (where < end)[:, None] & (at < D)[None, :]
        target = slot[:, None] * TOKEN + at[None, :]
        key = tl.load(k + row[:, None] * k_row + at[None, :], mask=mask, other=0.0)
        value = tl.load(v + row[:, None] * v_row + at[None, :], mask=mask, other=0.0)
        tl.store(keys + target, key, mask=mask)
        tl.store(values + target, value, mask=mask)


@triton.jit
def _combine(
    partial,
    stats,
    out,
    first,
    active,
    row,
    end,
    head,
    out_row,
    out_head,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Write the output rows of a tile from the partial results of its splits.

    Always in the order of the splits, so the bits do not depend on which one came last. Several
    splits are loaded at once: one after the other, 32 of them would take longer than the keys.
    `.cg` is past the L1, which may hold lines of an earlier launch.
    """
    CHUNK: tl.constexpr = 4096 // (ROWS * D_PAD) if ROWS * D_PAD < 4096 else 1
    pair = tl.arange(0, ROWS)
    at = tl.arange(0, D_PAD)
    rows = row + pair // G
    live = (rows < end) & (pair < BLOCK_M // G * G)
    every = tl.arange(0, MAX_SPLITS)
    there = (first + every)[:, None] * BLOCK_M + pair[None, :]
    mask = (every < active)[:, None] & live[None, :]
    tops = tl.load(stats + there * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats + there * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp2(tops - top[None, :]), 0)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for start in range(0, active, CHUNK):
        some = start + tl.arange(0, CHUNK)
        here = (first + some)[:, None] * BLOCK_M + pair[None, :]
        some_mask = (some < active)[:, None] & live[None, :]
        some_tops = tl.load(
            stats + here * 2, mask=some_mask, other=float("-inf"), cache_modifier=".cg"
        )
        spots = partial + here[:, :, None] * D_PAD + at[None, None, :]
        part = tl.load(spots, mask=some_mask[:, :, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(part * tl.exp2(some_tops - top[None, :])[:, :, None], 0)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    heads = head * G + pair % G
    target = out + rows.to(tl.int64)[:, None] * out_row + heads[:, None] * out_head + at[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=live[:, None] & (at < D)[None, :])


@triton.jit
def _find_request(query_start_loc, tile, num_reqs, BLOCK_Q: tl.constexpr, SEARCH: tl.constexpr):
    """Return the request of a tile, and its first and its last row + 1.

    Request r starts at tile r + start[r] // BLOCK_Q, which leaves room for the last, partly filled
    tile of every request before it. The tail of `query_start_loc` makes requests without rows.
    Source: the unified attention kernel of vLLM; by one vector load instead of a binary search.
    """
    index = tl.arange(0, SEARCH)
    starts = tl.load(query_start_loc + index, mask=index < num_reqs, other=0)
    begun = (starts // BLOCK_Q + index <= tile) & (index < num_reqs)
    request = tl.sum(begun.to(tl.int32), 0) - 1
    return (
        request,
        tl.load(query_start_loc + request),
        tl.load(query_start_loc + request + 1),
    )


@triton.jit
def _blank(
    out, row, end, head, out_row, out_head, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write zeros to rows [row, end) of one KV head, at most BLOCK_M // G of them."""
    pair = tl.arange(0, BLOCK_M)
    at = tl.arange(0, D_PAD)
    rows = (row + pair // G).to(tl.int64)
    heads = head * G + pair % G
    live = (rows < end) & (pair < BLOCK_M // G * G)
    target = out + rows[:, None] * out_row + heads[:, None] * out_head + at[None, :]
    zero = tl.zeros([BLOCK_M, D_PAD], out.dtype.element_ty)
    tl.store(target, zero, mask=live[:, None] & (at < D)[None, :])


@triton.jit(do_not_specialize=["num_reqs", "num_rows"])
def attend(
    q,
    k,
    v,
    out,
    cache,
    slot_mapping,
    token_to_req,
    kv_lens,
    block_tables,
    query_start_loc,
    partial,
    stats,
    counters,
    value_offset,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    out_row,
    out_head,
    table_row,
    num_reqs,
    num_rows,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    SINGLE: tl.constexpr,
    WRITE: tl.constexpr,
    SPLIT: tl.constexpr,
    SEARCH: tl.constexpr,
    G_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attention of one tile of query rows, one KV head and one split of the keys.

    Grid: (K, tiles, P). `SINGLE`: every row is a request of its own and tile = row. Otherwise a
    tile is up to BLOCK_M // G rows of one request, found on the device; tiles that are not needed
    have nothing to do. How many splits share the keys is decided on the device by the true lengths;
    the last of them to finish combines their results (`counters` is zero before and after).

    `WRITE`: each program first writes the new rows among the keys that it will read. Several
    programs may write one slot, all of them the same bits; a program reads only what it wrote
    itself or what was there before the launch, so no order between programs is needed.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    TOKEN: tl.constexpr = K * D
    head = tl.program_id(0)
    split = tl.program_id(2)
    pair = tl.arange(0, BLOCK_M)
    at = tl.arange(0, D_PAD)
    heads = head * G + pair % G

    if SINGLE:
        tile = tl.program_id(1)
        row = tile
        end = tile + 1
        first_row = tile
        request = tl.load(token_to_req + row)
        kv_end = tl.load(kv_lens + row)
        kv_least = kv_end
        if kv_end == 0:  # padding
            if split == 0:
                _blank(out, row, end, head, out_row, out_head, G, D, D_PAD, BLOCK_M)
            return
    else:
        # The longest rows first: a tile late in a causal sequence has the most to do.
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        request, first_row, last_row = _find_request(
            query_start_loc, tile, num_reqs, BLOCK_Q, SEARCH
        )
        true_rows = tl.load(query_start_loc + num_reqs)
        if (tile * BLOCK_Q + BLOCK_Q > true_rows) & (split == 0):
            padding = tl.maximum(tile * BLOCK_Q, true_rows)
            padding_end = tl.minimum(tile * BLOCK_Q + BLOCK_Q, num_rows)
            _blank(out, padding, padding_end, head, out_row, out_head, G, D, D_PAD, BLOCK_M)
        row = first_row + (tile - request - first_row // BLOCK_Q) * BLOCK_Q
        if row >= last_row:
            return
        end = tl.minimum(row + BLOCK_Q, last_row)
        kv_least = tl.load(kv_lens + row)
        kv_end = tl.load(kv_lens + end - 1)

    # Keys [begin, finish) are this program's; tiles of keys start at multiples of BLOCK_N.
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_least - WINDOW, 0) // BLOCK_N * BLOCK_N
    finish = kv_end
    active = 1
    if SPLIT:
        tiles = tl.cdiv(kv_end - begin, BLOCK_N)
        active = tl.minimum(tl.num_programs(2), tl.cdiv(kv_end - begin, MIN_KEYS))
        each = tl.cdiv(tiles, active)
        active = tl.cdiv(tiles, each)
        if split >= active:
            return
        begin += split * each * BLOCK_N
        finish = tl.minimum(begin + each * BLOCK_N, kv_end)

    keys = cache + head * D
    values = keys + value_offset
    if WRITE:
        context_len = tl.load(kv_lens + first_row) - 1
        _write_rows(
            tl.maximum(begin, context_len),
            finish,
            first_row,
            context_len,
            k + head * k_head,
            v + head * v_head,
            keys,
            values,
            slot_mapping,
            k_row,
            v_row,
            TOKEN,
            D,
            D_PAD,
            1 if SINGLE else 16,
        )
        tl.debug_barrier()  # what one thread wrote, another one reads

    rows = row + pair // G
    live = (rows < end) & (pair < BLOCK_Q * G)
    mask = live[:, None] & (at < D)[None, :]
    rows_64 = rows.to(tl.int64)[:, None]
    query = tl.load(
        q + rows_64 * q_row + heads[:, None] * q_head + at[None, :], mask=mask, other=0.0
    )
    if WIDE:
        query = query.to(tl.float32)
    kv_len = tl.load(kv_lens + rows, mask=live, other=0)
    table = block_tables + request.to(tl.int64) * table_row
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    clear = begin
    if (not SINGLE) and WINDOW == 0 and BLOCK_M > 16:
        # Keys that every row of the tile sees need no mask. Small tiles wait for memory, not for
        # masks: one loop is better, as a second one starts with empty pipeline stages.
        clear = tl.maximum(tl.minimum(finish, kv_least // BLOCK_N * BLOCK_N), begin)
        for start in range(begin, clear, BLOCK_N):
            acc, top, total = _visit(
                acc, top, total, query, start, finish, kv_len, table, keys, values,
                SCALE, SOFTCAP, WINDOW, S, TOKEN, D, D_PAD, BLOCK_N, WIDE, False,
            )  # fmt: skip
    for start in range(clear, finish, BLOCK_N):
        acc, top, total = _visit(
            acc, top, total, query, start, finish, kv_len, table, keys, values,
            SCALE, SOFTCAP, WINDOW, S, TOKEN, D, D_PAD, BLOCK_N, WIDE, True,
        )  # fmt: skip

    if SPLIT:  # noqa: SIM102 - known when compiling, unlike the other one
        if active > 1:
            group = tile * K + head
            first = group.to(tl.int64) * tl.num_programs(2)
            mine = (first + split) * BLOCK_M + pair
            tl.store(partial + mine[:, None] * D_PAD + at[None, :], acc, mask=live[:, None])
            tl.store(stats + mine * 2, top, mask=live)
            tl.store(stats + mine * 2 + 1, total, mask=live)
            tl.debug_barrier()  # all threads' stores come before the one thread's release
            arrived = tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu")
            if arrived < active - 1:
                return
            tl.debug_barrier()
            tl.store(counters + group, 0)
            # A single row's tile has G rows of use; a power of two, as all shapes in Triton.
            _combine(
                partial, stats, out, first, active, row, end, head, out_row, out_head,
                G, D, D_PAD, BLOCK_M, G_PAD if SINGLE else BLOCK_M, MAX_SPLITS,
            )  # fmt: skip
            return
    target = out + rows_64 * out_row + heads[:, None] * out_head + at[None, :]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def write_cache(
    k,
    v,
    cache,
    slot_mapping,
    kv_lens,
    value_offset,
    k_row,
    k_head,
    v_row,
    v_head,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Write one row's keys and values to the cache. Grid: (T,); padding rows write nothing."""
    row = tl.program_id(0)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if tl.load(kv_lens + row) == 0:
        return
    head = tl.arange(0, K_PAD)[:, None]
    at = tl.arange(0, D_PAD)[None, :]
    mask = (head < K) & (at < D)
    row_64 = row.to(tl.int64)
    target = cache + slot * (K * D) + head * D + at
    tl.store(target, tl.load(k + row_64 * k_row + head * k_head + at, mask=mask), mask=mask)
    value = tl.load(v + row_64 * v_row + head * v_head + at, mask=mask)
    tl.store(target + value_offset, value, mask=mask)
