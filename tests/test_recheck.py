"""Difference checks: they accept, give and refuse what `check_batch` does, batch after batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcgsvc.errors import BatchError
from pcgsvc.forward import recheck
from pcgsvc.forward.batch import (
    Batch,
    CacheGeometry,
    CheckedBatch,
    StepBuffers,
    check_batch,
    refuse_lost_context,
)
from pcgsvc.forward.recheck import BatchChecker

CACHE = CacheGeometry(block_size=4, num_blocks=40, scratch_blocks=7, max_model_len=24)
CPU = torch.device("cpu")
REQS, WIDTH = 4, 8  # tables are wider than the longest request

EVIL: list[Any] = [0, -1, 1.0, True, np.int64(3), float("nan"), None, "2", 99, 25]
"""Lengths and blocks that are refused, or are equal to such as are not."""


def outcome(check: Any, *args: Any) -> Any:
    """Return what a check gives, as plain values, or what it raises."""
    try:
        batch: CheckedBatch = check(*args)
    except BatchError as error:
        return str(error)
    arrays = (batch.owners, batch.positions, batch.block_tables, batch.slot_mapping)
    found = [None if array is None else array.tolist() for array in arrays]
    return [batch.query_lens, batch.seq_lens, batch.num_tokens, *found, dict(batch.extras)]


def full(batch: Batch, num_tokens: int, cache: CacheGeometry | None) -> CheckedBatch:
    checked = check_batch(batch, num_tokens, cache)
    refuse_lost_context(checked)
    return checked


class Caller:
    """Keeps lengths and tables, and changes them in place between two calls."""

    def __init__(self, rng: random.Random, *, arrays: bool) -> None:
        self._rng, self._arrays = rng, arrays
        self._renew()

    def _renew(self) -> None:
        rng, first = self._rng, CACHE.first_free_block
        self.query: Any = [rng.randint(1, 3) for _ in range(rng.randint(1, REQS))]
        self.seq: Any = [q + rng.randint(0, 20) for q in self.query]
        rows = range(len(self.query))
        self.tables: Any = [
            list(range(first + at * WIDTH, first + (at + 1) * WIDTH)) for at in rows
        ]
        self.extras: Any = {}
        if self._arrays:
            self.query, self.seq = np.array(self.query), np.array(self.seq)
            self.tables = np.array(self.tables)

    def change(self) -> None:
        """Do to what was passed what a caller may do, or must not."""
        rng = self._rng
        at, kind = rng.randrange(len(self.seq)), rng.randrange(11)
        row = self.tables[at]
        if kind == 0:
            self._renew()
        elif kind < 4:  # all move on, or one does, or back
            steps = [1] * len(self.seq) if kind < 3 else [0] * len(self.seq)
            steps[at] += rng.randint(-3, 9) if kind == 3 else 0
            for request, step in enumerate(steps):
                if isinstance(self.seq[request], int | np.integer):
                    self.seq[request] += step
        elif kind == 4 and len(row):
            row[rng.randrange(len(row))] = rng.randint(5, 41)
        elif kind == 5 and len(row):  # shared with another request, or with itself
            row[rng.randrange(len(row))] = rng.choice(list(rng.choice(self.tables)) or [8])
        elif kind == 10:  # all of another's, so that both may write one slot
            other = rng.randrange(len(self.seq))
            row[:], self.seq[at] = self.tables[other], self.seq[other]
        elif kind == 6:
            row[rng.randrange(WIDTH) :] = 0 if self._arrays else [0] * rng.randint(0, WIDTH)
        elif kind == 7:
            self.query[at] = rng.randint(1, 3)
        elif kind == 8 and not self._arrays:
            changed = rng.choice([self.query, self.seq, row])
            changed[-1:] = [rng.choice(EVIL)]
        elif kind == 9:
            self.extras = rng.choice([{}, {"a": 1}, self.extras])

    def batch(self) -> Batch:
        """Return a batch over that memory, or over part of it."""
        batch, kind = Batch(query_lens=self.query, extras=self.extras), self._rng.randrange(10)
        if kind > 0:
            batch.seq_lens = self.seq
        if kind > 1:
            batch.block_tables = self.tables
        if kind == 2:
            rows = sum(q for q in self.query if isinstance(q, int | np.integer))
            batch.slot_mapping = [self._rng.randint(30, 99) for _ in range(max(rows, 1))]
        if kind == 3 and self._arrays:
            batch.block_tables = torch.from_numpy(self.tables)
            batch.seq_lens = torch.from_numpy(self.seq)
        return batch


def num_tokens(batch: Batch, odd: bool) -> int:
    try:
        return min(int(sum(batch.query_lens)), 15) + odd
    except (TypeError, ValueError):
        return 3


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("cache", [CACHE, None])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_chain_of_batches_is_checked_as_each_would_be_alone(
    arrays: bool, cache: CacheGeometry | None, seed: int
) -> None:
    rng = random.Random(seed)
    checker, caller = BatchChecker(cache), Caller(rng, arrays=arrays)
    kept: list[tuple[Any, CheckedBatch]] = []
    used = StepBuffers(
        max_tokens=16, max_reqs=REQS, blocks_per_request=CACHE.blocks_per_request, device=CPU
    )
    for _ in range(rng.randint(2, 8)):
        batch = caller.batch()
        rows, before = num_tokens(batch, rng.random() < 0.1), repr(batch)
        wanted = outcome(full, batch, rows, cache)
        assert outcome(checker.check, batch, rows) == wanted
        assert repr(batch) == before
        if isinstance(wanted, list):
            checked = checker.check(batch, rows)
            kept.append((wanted, checked))
            _compare_buffers(used, checked, rng.choice([rows, 13, 16]))
        for wanted, checked in kept:  # what was given out before is as it was
            assert outcome(lambda checked=checked: checked)[:-1] == wanted[:-1]
        caller.change()


def _compare_buffers(
    used: StepBuffers, batch: CheckedBatch, size: int, block_size: int = CACHE.block_size
) -> None:
    """Buffers that held other steps before have what fresh ones have, wherever it counts."""
    new = StepBuffers(
        max_tokens=used.max_tokens,
        max_reqs=used.max_reqs,
        blocks_per_request=used.block_tables.shape[1],
        device=CPU,
    )
    for step in (used, new):
        step.fill(batch, size)
    for name in ("num_tokens", "query_start_loc", "seq_lens"):
        assert torch.equal(getattr(used, name), getattr(new, name)), name
    names = ["token_to_req", "kv_lens"]
    if batch.slot_mapping is not None:
        names.append("slot_mapping")
        for at, length in enumerate(batch.seq_lens):
            blocks = -(-length // block_size)
            assert torch.equal(used.block_tables[at, :blocks], new.block_tables[at, :blocks])
    for name in names:
        assert torch.equal(getattr(used, name)[:size], getattr(new, name)[:size]), name


def one_of(form: int, values: list[Any]) -> Any:
    """Return lengths as one of the things that callers have."""
    if form == 0 or not all(type(v) is int for v in values):
        return values
    array = np.array(values, (np.int64, np.int32, np.int16)[form % 3])
    return torch.from_numpy(array) if form > 3 else array


@pytest.mark.parametrize("block_size", [1, 4])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_decode_is_checked_as_each_of_its_steps_would_be_alone(
    block_size: int, seed: int
) -> None:
    """Over the ends of blocks, up to what may follow no more, with odd steps between."""
    rng = random.Random(seed)
    cache = CacheGeometry(
        block_size=block_size, num_blocks=900, scratch_blocks=7, max_model_len=rng.randint(20, 30)
    )
    count, width = rng.choice([1, 2, 3, 20]), cache.blocks_per_request
    blocks = rng.sample(range(cache.first_free_block, cache.num_blocks), count * width)
    tables = [blocks[at * width : (at + 1) * width] for at in range(count)]
    if rng.random() < 0.3:  # one's last blocks are missing, or another's
        start = rng.randrange(width)
        rng.choice(tables)[start:] = rng.choice([[0] * width, blocks[:width]])[start:]
    query: list[Any] = [1] * count
    lens: list[Any] = [rng.randint(1, 12) for _ in range(count)]
    passed: Any = [row.copy() for row in tables]
    if rng.random() < 0.5:  # blocks come as they are needed
        passed = [row[: -(-n // block_size)] for row, n in zip(tables, lens, strict=True)]
        passed[-1] += [0] * (width - len(passed[-1]))
    if rng.random() < 0.5:
        passed = np.array([row + [0] * (width - len(row)) for row in passed])
    checker, forms = BatchChecker(cache), [rng.randrange(6), rng.randrange(6)]
    used = StepBuffers(max_tokens=24, max_reqs=20, blocks_per_request=width, device=CPU)
    for _ in range(25):
        moved = 1 if rng.random() < 0.8 else rng.randint(-5, 3)
        lens[:] = [max(n + moved, 1) for n in lens]
        for row, blocks_of, n in zip(passed, tables, lens, strict=True):
            needed = min(-(-n // block_size), width)
            if len(row) < needed:
                row.extend(blocks_of[len(row) : needed])
            elif rng.random() < 0.5:
                row[:needed] = blocks_of[:needed]
        changed = rng.choice([query, lens, lens, passed[0]])
        before, is_odd = changed.copy(), rng.random() < 0.15
        if is_odd and rng.random() < 0.2 and isinstance(changed, list):
            changed.pop()
        elif is_odd:
            at = rng.randrange(len(changed))
            odd = [changed[at] + 1, changed[at] - 1, 0, blocks[-1]]
            is_list = isinstance(changed, list)
            changed[at] = rng.choice([*odd, *EVIL, [8], float(changed[at])] if is_list else odd)
        batch = Batch(
            query_lens=one_of(forms[0], query),
            seq_lens=one_of(forms[1], lens),
            block_tables=passed,
            slot_mapping=[60] * count if rng.random() < 0.02 else None,
        )
        wanted = outcome(full, batch, count, cache)
        assert outcome(checker.check, batch, count) == wanted
        if isinstance(wanted, list):
            _compare_buffers(used, checker.check(batch, count), rng.choice([count, 24]), block_size)
        changed[:] = before


@pytest.mark.parametrize(
    "tables",
    [
        [[[8]], [9]],
        [5, [[8]]],
        [[[8]], [[9]]],
        [[8, 0], [9]],
        [[8], []],
        [[], []],
        [[True], [9]],
        [[8.0], [9]],
        [[8], (9,)],
        ((8,), (9,)),
        [[8], [2**31]],
        [[8], [-(2**70)]],
        np.array([[8], [9]], np.float32),
        np.array([[8], [9]], object),
        np.array([[8], [9]], ">i4"),
    ],
)
def test_tables_that_look_like_the_ones_before_are_checked_as_they_are(tables: Any) -> None:
    checker = BatchChecker(CACHE)
    for lens, passed in (([1, 2], [[8], [9]]), ([2, 3], [[8], [9]]), ([3, 4], tables)):
        batch = Batch(query_lens=[1, 1], seq_lens=lens, block_tables=passed)
        assert outcome(checker.check, batch, 2) == outcome(full, batch, 2, CACHE)


@pytest.mark.parametrize("as_array", [False, True])
def test_a_block_that_is_taken_back_at_the_next_step_is_missed(as_array: bool) -> None:
    checker, tables = BatchChecker(CACHE), [[8, 0], [9, 10]]
    for length, block in ((3, 0), (4, 0), (5, 11), (6, 0), (6, 11), (7, 11)):
        tables[0][1] = block
        passed = np.array(tables) if as_array else tables
        batch = Batch(query_lens=[1, 1], seq_lens=[length, length], block_tables=passed)
        wanted = outcome(full, batch, 2, CACHE)
        assert outcome(checker.check, batch, 2) == wanted
        assert isinstance(wanted, str) == (length == 6 and block == 0)


def test_a_step_after_one_in_scratch_blocks_may_not_name_these() -> None:
    checker = BatchChecker(CACHE)
    checker.check(Batch(query_lens=[1, 1]), 2)
    batch = Batch(query_lens=[1, 1], seq_lens=[2, 2], block_tables=[[1], [2]])
    with pytest.raises(BatchError, match="got blocks from 1 to 2"):
        checker.check(batch, 2)


def test_a_step_of_a_decode_is_known_by_the_bytes_of_its_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `marshal` writes is what `_Decode` counts on, where a byte is carried as well."""
    cache = CacheGeometry(block_size=64, num_blocks=9000, scratch_blocks=1, max_model_len=70000)
    table = range(cache.first_free_block, cache.first_free_block + cache.blocks_per_request)
    tables = [[n + 2000 * request for n in table] for request in range(3)]
    checker = BatchChecker(cache)
    for start in (250, 65530):
        for step in range(20):
            with monkeypatch.context() as patch:
                if step > 0:
                    patch.setattr(recheck, "_seq_lens", None)
                    patch.setattr(recheck, "check_batch", None)
                lens = [start + step, 300 + step, start + step]
                checked = checker.check(
                    Batch(query_lens=[1] * 3, seq_lens=lens, block_tables=tables), 3
                )
            assert checked.seq_lens == tuple(lens)


def test_a_batch_that_is_passed_again_is_the_same_object_until_something_differs() -> None:
    checker, tables = BatchChecker(CACHE), [[8, 9], [10, 11]]
    lens = [3, 6]

    def check() -> CheckedBatch:
        return checker.check(Batch(query_lens=[1, 1], seq_lens=lens, block_tables=tables), 2)

    first = check()
    assert check() is first
    tables[1][1] = 12
    second = check()
    assert second is not first
    assert check() is second
    lens[0] = 4
    assert check().slot_mapping.tolist() == [35, 49]  # type: ignore[union-attr]
    assert first.slot_mapping.tolist() == [34, 45]  # type: ignore[union-attr]


def test_a_refused_batch_leaves_the_one_before_it_as_what_is_compared_with() -> None:
    checker, tables = BatchChecker(CACHE), np.array([[8, 9], [10, 11]])

    def check(lens: list[int]) -> CheckedBatch:
        return checker.check(Batch(query_lens=[1, 1], seq_lens=lens, block_tables=tables), 2)

    check([3, 6])
    tables[1, 0], tables[0, 0] = 8, 10  # the requests' first blocks are swapped
    with pytest.raises(BatchError, match="max_model_len"):
        check([3, 25])
    tables[1, 1] = 50
    with pytest.raises(BatchError, match="blocks from 8 to 50"):
        check([3, 6])
    tables[1, 1] = 11
    assert check([3, 6]).slot_mapping.tolist() == [42, 45]  # type: ignore[union-attr]


def test_what_a_checked_batch_holds_cannot_be_written_to() -> None:
    slots = np.array([40, 41])
    checked = check_batch(Batch(query_lens=[2], block_tables=[[10]], slot_mapping=slots), 2, CACHE)
    for array in (checked.owners, checked.positions, checked.block_tables, checked.slot_mapping):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    slots[0] = 44
    assert checked.slot_mapping.tolist() == [40, 41]  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [1, 2])
def test_an_interrupted_check_leaves_nothing_half_done(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    def batch(length: int, *tables: list[int]) -> Batch:
        return Batch(
            query_lens=[rows] * 2, seq_lens=[length, length + 1], block_tables=list(tables)
        )

    for other in ([30, 31, 32], [10, 11, 12]):
        checker, table = BatchChecker(CACHE), [20, 21, 22]
        for length in (5, 6):
            checker.check(batch(length, [10, 11, 12], table), 2 * rows)
        with monkeypatch.context() as patched:
            patched.setattr(recheck, "CheckedBatch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checker.check(batch(7, other, table), 2 * rows)
        for length in (6, 7, 8):
            call = batch(length, other, table), 2 * rows
            assert outcome(checker.check, *call) == outcome(full, *call, CACHE)
