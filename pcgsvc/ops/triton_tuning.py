"""How one launch of the Triton attention kernels is cut into programs.

In: the padded row count, static maxima and what the device can hold. Out: a `LaunchPlan`. Knows
nothing of tensors or triton. A plan depends on nothing that a replay could change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_SPLITS = 64
"""Most programs that share one tile's keys; a power of two."""
_SPLIT_KEYS = 128
_STEP_BYTES = 32 << 10
"""Keys and values that one step of a program's key loop reads."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a launch's rows and keys are tiled."""

    block_m: int
    """Rows of a tile, each one query head of one token; a power of two, at least 16."""
    block_n: int
    """Keys per step of a program; a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline over the steps."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Choices that change speed, never results beyond rounding. None: by shape and device."""

    single: Tiling | None = None
    """Tiling of launches in which every row is a request of its own."""
    mixed: Tiling | None = None
    """Tiling of all other launches."""
    num_splits: int | None = None
    """Most programs that share one tile's keys; at least 1, less where the scratch is too small."""
    split_keys: int | None = None
    """Fewest keys that are worth a program of their own; at least 1. None: those of one step in
    single-token decode, else 128."""
    fused_write_rows: int = 128
    """Most rows of a mixed launch that writes the cache itself. Its programs repeat each other's
    writes, up to rows² / 2 of them; the alternative, a launch for the write, costs its latency."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a launch's plan depends on besides its rows."""

    num_kv_heads: int
    group: int
    """Query heads per KV head."""
    head_pad: int
    """Head dim as the kernels see it: the next power of two."""
    itemsize: int
    """Bytes of a number in the cache."""
    slots: int
    """Programs that the device runs at once."""
    shared_bytes: int
    """Shared memory that one program may take."""

    @property
    def scratch_programs(self) -> int:
        """Most programs of a launch that splits keys: four waves of them fill the last one well."""
        return 4 * self.slots

    @property
    def scratch_rows(self) -> int:
        """Most rows, of all programs together, of a launch that splits keys."""
        return self.scratch_programs * max(16, power_of_two(self.group))


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One launch of the attention kernel: grid (KV heads, tiles, splits)."""

    single: bool
    """Whether every row is a request of its own."""
    fused_write: bool
    """Whether the launch writes the cache itself."""
    tiling: Tiling
    tiles: int
    splits: int
    split_keys: int
    """Fewest keys of a split."""


def plan_launch(
    shape: Shape,
    tuning: Tuning,
    *,
    rows: int,
    num_reqs: int,
    max_keys: int,
    single: bool,
    share_in_step: bool,
) -> LaunchPlan:
    """Return the plan of a launch of `rows` padded rows.

    Args:
        shape: model and device.
        tuning: what was asked for by hand.
        rows: padded rows; at least 1.
        num_reqs: most requests (R).
        max_keys: most keys that a row can see.
        single: every row is a request of its own.
        share_in_step: requests may read what others write in the same step.
    """
    if single:
        tiling = tuning.single or _single_tiling(shape, rows)
        tiles, split_keys = rows, tuning.split_keys or tiling.block_n
    else:
        tiling = tuning.mixed or _tiling(shape, block_m=_mixed_block_m(rows))
        # A tile has rows of one request: one partly filled tile for each of at most `rows` of them.
        tiles = rows // (tiling.block_m // shape.group) + min(num_reqs, rows)
        split_keys = tuning.split_keys or _SPLIT_KEYS
    return LaunchPlan(
        single=single,
        # A request of one row whose keys another request writes now would have had to know a token
        # before it was computed: in single-token decode nothing is shared inside a step.
        fused_write=single or (not share_in_step and rows <= tuning.fused_write_rows),
        tiling=tiling,
        tiles=tiles,
        splits=_splits(
            shape,
            tuning,
            tiling,
            tiles * shape.num_kv_heads,
            -(-max_keys // max(split_keys, tiling.block_n)),
        ),
        split_keys=split_keys,
    )


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _mixed_block_m(rows: int) -> int:
    # Few rows are mostly decode, where a tile holds one row and a small tile wastes least; many
    # rows are mostly prefill, which reads the keys once per tile.
    if rows <= 64:
        return 16
    return 64 if rows < 1024 else 128


def _single_tiling(shape: Shape, rows: int) -> Tiling:
    """Return the tiling of single-token decode: small programs, smaller ones for few of them.

    On an H200, Llama-3-8B's heads, against `_tiling`: 0.83 of the time for 1 and 8 requests of 512
    keys and 0.73 for 1 of 4,096; for 32 requests 0.99, where programs of one warp take 1.05.
    """
    tiling = _tiling(shape, block_m=16)
    if shape.itemsize > 2 or tiling.block_m > 16:
        return tiling
    if 2 * rows * shape.num_kv_heads > shape.slots:
        return replace(tiling, num_warps=2)
    return replace(tiling, block_n=max(16, tiling.block_n // 2), num_warps=1)


def _tiling(shape: Shape, *, block_m: int) -> Tiling:
    least = power_of_two(shape.group)
    if shape.itemsize > 2:
        # Exact float32 products are made in registers, by all warps: larger tiles spill.
        block_m = max(16, least)
        return Tiling(
            block_m=block_m, block_n=32 if block_m == 16 else 16, num_warps=8, num_stages=3
        )
    block_m = max(block_m, least)
    key_bytes = 2 * shape.head_pad * shape.itemsize
    return Tiling(
        block_m=block_m,
        block_n=min(128, max(16, _STEP_BYTES // key_bytes)),
        num_warps=4 if block_m <= 64 else 8,
        # The table is read a stage ahead of the keys: 5 stages keep 2 steps of keys in shared
        # memory (seen in Triton 3.6 and 3.7), 3 keep one.
        num_stages=5 if shape.shared_bytes >= 5 * _STEP_BYTES or block_m == 16 else 3,
    )


def _splits(shape: Shape, tuning: Tuning, tiling: Tiling, programs: int, most: int) -> int:
    """Return how many programs, `most` at most, may share a tile's keys: the last wave is full.

    Source: the split heuristic of FlashAttention 2 (fewest splits within 85 % of the best
    occupancy of the waves). How many of them work is decided on the device by the true length.
    """
    limit = min(
        min(tuning.num_splits or MAX_SPLITS, MAX_SPLITS),
        most,
        shape.scratch_programs // programs,
        shape.scratch_rows // (programs * tiling.block_m),
    )
    if limit <= 1:
        return 1
    if tuning.num_splits is not None:
        return limit

    def filled(splits: int) -> float:
        waves = programs * splits / shape.slots
        return waves / -(-programs * splits // shape.slots)

    choices = range(1, limit + 1)
    best = max(map(filled, choices))
    return next(splits for splits in choices if filled(splits) >= 0.85 * best)
