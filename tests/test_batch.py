"""Batches: every refusal names its field and touches nothing; what fits fills the buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import pcgsvc
from pcgsvc.errors import BatchError
from pcgsvc.forward.batch import (
    Batch,
    CacheGeometry,
    CheckedBatch,
    StepBuffers,
    check_batch,
)
from pcgsvc.ops.context import ForwardContext

CACHE = CacheGeometry(block_size=4, num_blocks=12, scratch_blocks=5, max_model_len=20)
CPU = torch.device("cpu")

REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no request": ({"query_lens": []}, 0, "query_lens: got an empty list"),
    "zero": ({"query_lens": [3, 0]}, 3, "query_lens: got 0"),
    "negative": ({"query_lens": [4, -1]}, 3, "query_lens: got -1"),
    "float": ({"query_lens": [3.0]}, 3, "query_lens: got 3.0"),
    "bool": ({"query_lens": [True, 2]}, 3, "query_lens: got True"),
    "word": ({"query_lens": ["3"]}, 3, "query_lens: got '3'"),
    "None": ({"query_lens": [None, 3]}, 3, "query_lens: got None"),
    "NaN": ({"query_lens": torch.tensor([float("nan")])}, 3, "query_lens: got nan"),
    "no list": ({"query_lens": 3}, 3, "query_lens"),
    "a scalar tensor": ({"query_lens": torch.tensor(3)}, 3, "query_lens"),
    "rows do not agree": ({"query_lens": [2, 2]}, 5, "4 rows in all, but the inputs have 5"),
    "seq_lens short": ({"query_lens": [2, 1], "seq_lens": [2]}, 3, "seq_lens: got"),
    "seq_lens below": ({"query_lens": [2, 1], "seq_lens": [1, 1]}, 3, "seq_lens: got"),
    "seq_lens empty": ({"query_lens": [3], "seq_lens": []}, 3, "seq_lens: got an empty"),
    "seq_lens zero": ({"query_lens": [3], "seq_lens": [0]}, 3, "seq_lens: got 0"),
    "too long": ({"query_lens": [1], "seq_lens": [21]}, 1, "max_model_len=20"),
    "too long alone": ({"query_lens": [21]}, 21, "max_model_len=20"),
    "scratch": ({"query_lens": [1] * 6}, 6, "5 scratch blocks"),
    "slots alone": ({"query_lens": [1], "slot_mapping": [4]}, 1, "without block_tables"),
    "tables flat": ({"query_lens": [1], "block_tables": [6]}, 1, "2 dimension"),
    "tables float": ({"query_lens": [1], "block_tables": [[6.0]]}, 1, "whole numbers"),
    "tables bool": ({"query_lens": [1], "block_tables": [[True]]}, 1, "whole numbers"),
    "tables empty": ({"query_lens": [1], "block_tables": [[]]}, 1, "block_tables"),
    "tables rows": ({"query_lens": [1, 1], "block_tables": [[6]]}, 2, "2 rows of at least 1"),
    "tables narrow": ({"query_lens": [5], "block_tables": [[6]]}, 5, "at least 2"),
    "null block": ({"query_lens": [1], "block_tables": [[0]]}, 1, "got blocks from 0"),
    "negative block": ({"query_lens": [1], "block_tables": [[-1]]}, 1, "got blocks from -1"),
    "no such block": ({"query_lens": [1], "block_tables": [[12]]}, 1, "6 … 11 are the caller"),
    "ragged hole": ({"query_lens": [5, 1], "block_tables": [[6], [7, 8]]}, 6, "block"),
    "lengths of a set": ({"query_lens": {1, 2}}, 3, "a list of lengths is needed"),
    "lengths by name": ({"query_lens": {1: 1, 2: 2}}, 3, "a list of lengths is needed"),
    "lengths sparse": ({"query_lens": torch.ones(3).to_sparse()}, 3, "torch.sparse_coo; a list"),
    "tables sparse": (
        {"query_lens": [1], "block_tables": torch.tensor([[6]]).to_sparse()},
        1,
        "block_tables: got a tensor of torch.int64, torch.sparse_coo; one list",
    ),
    "tables bfloat16": (
        {"query_lens": [1], "block_tables": torch.tensor([[6]]).bfloat16()},
        1,
        "got a tensor of torch.bfloat16",
    ),
    "rows elsewhere": (
        {"query_lens": [1], "block_tables": [torch.zeros(1, device="meta")]},
        1,
        "one list per request is needed",
    ),
    "rows in rows": (
        {"query_lens": [1, 1], "block_tables": [[6, [1]], [7, 8]]},
        2,
        "one list per request is needed",
    ),
    "slots sparse": (
        {"query_lens": [1], "block_tables": [[6]], "slot_mapping": torch.ones(1).to_sparse()},
        1,
        "slot_mapping: got a tensor of torch.float32, torch.sparse_coo; a list is needed",
    ),
    "rows of no list": ({"query_lens": [1, 1], "block_tables": [[6], 7]}, 2, "block_tables"),
    "slots short": (
        {"query_lens": [2], "block_tables": [[6]], "slot_mapping": [24]},
        2,
        "got 1 slots",
    ),
    "slot in null block": (
        {"query_lens": [1], "block_tables": [[6]], "slot_mapping": [3]},
        1,
        "null block",
    ),
    "slot above": (
        {"query_lens": [1], "block_tables": [[6]], "slot_mapping": [48]},
        1,
        "from 24 to 47",
    ),
    "slot negative": (
        {"query_lens": [1], "block_tables": [[6]], "slot_mapping": [-1]},
        1,
        "from -1",
    ),
    "slots 2-d": (
        {"query_lens": [1], "block_tables": [[6]], "slot_mapping": [[24]]},
        1,
        "slot_mapping: got shape",
    ),
}


@pytest.mark.parametrize(
    "name",
    REFUSED,
)
def test_a_batch_that_does_not_fit_is_refused(name: str) -> None:
    fields, num_tokens, words = REFUSED[name]
    with pytest.raises(BatchError, match=".*".join(words.split("…"))) as caught:
        check_batch(Batch(**fields), num_tokens, CACHE)
    assert str(caught.value).startswith("batch")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_tables": [[3, 7], [8, 9]]}, "blocks from 3 to 9; blocks 6 … 11"),
        ({"block_tables": [[6, 7], [7, 8]]}, r"two rows write KV slot 28 \(block 7, offset 0"),
        ({"block_tables": [[6, 6], [7, 8]]}, "two rows write KV slot 24"),
        (
            {"block_tables": [[6, 7], [8, 9]], "slot_mapping": [24] * 2 + list(range(30, 38))},
            "two rows write KV slot 24",
        ),
        (
            {"block_tables": [[6, 7], [8, 9]], "slot_mapping": list(range(22, 32))},
            "those below 6 are the runner's own",
        ),
    ],
    ids=str,
)
def test_a_batch_writes_each_slot_once_and_none_of_the_runner_s(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(BatchError, match=words):
        check_batch(Batch(query_lens=[5, 5], **fields), 10, CACHE)


def test_blocks_may_be_shared_where_they_are_only_read() -> None:
    batch = Batch(query_lens=[1, 1], seq_lens=[5, 6], block_tables=[[6, 7], [6, 8]])
    assert check_batch(batch, 2, CACHE).slot_mapping.tolist() == [28, 33]  # type: ignore[union-attr]


def test_what_lies_in_columns_that_no_request_reaches_is_left_out() -> None:
    tables = [[6, 99, -5], [7, 8, 2**40]]
    checked = check_batch(Batch(query_lens=[1, 5], block_tables=tables), 6, CACHE)
    assert checked.block_tables.tolist() == [[6, 0, 0], [7, 8, 0]]  # type: ignore[union-attr]


def test_a_batch_is_a_batch() -> None:
    with pytest.raises(BatchError, match=r"batch: got dict, a pcgsvc\.Batch is needed"):
        check_batch({"query_lens": [1]}, 1, CACHE)  # type: ignore[arg-type]


def test_no_batch_is_one_new_request() -> None:
    checked = check_batch(None, 3, CACHE)
    assert (checked.query_lens, checked.seq_lens) == ((3,), (3,))
    assert checked.slot_mapping is not None
    assert checked.slot_mapping.tolist() == [4, 5, 6]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_lengths_and_tables_may_be_any_host_sequence(kind: Any) -> None:
    batch = Batch(
        query_lens=kind([2, 1]), seq_lens=kind([5, 1]), block_tables=kind([[6, 7], [8, 0]])
    )
    checked = check_batch(batch, 3, CACHE)
    assert checked.query_lens == (2, 1)
    assert checked.positions.tolist() == [3, 4, 0]
    assert checked.owners.tolist() == [0, 0, 1]
    assert checked.slot_mapping is not None
    assert checked.slot_mapping.tolist() == [6 * 4 + 3, 7 * 4, 8 * 4]


def test_ragged_tables_are_filled_up() -> None:
    checked = check_batch(Batch(query_lens=[5, 1], block_tables=[[6, 7], [8]]), 6, CACHE)
    assert checked.block_tables is not None
    assert checked.block_tables.tolist() == [[6, 7], [8, 0]]


def test_given_slots_win_over_derived_ones() -> None:
    batch = Batch(query_lens=[1], block_tables=[[6]], slot_mapping=[47])
    assert check_batch(batch, 1, CACHE).slot_mapping.tolist() == [47]  # type: ignore[union-attr]


def test_scratch_blocks_of_requests_do_not_overlap() -> None:
    checked = check_batch(Batch(query_lens=[5, 1, 4]), 10, CACHE)
    assert len(set(checked.slot_mapping.tolist())) == 10  # type: ignore[union-attr]
    assert set(checked.block_tables.ravel()) == {0, 1, 2, 3, 4}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1, 1, 1], [3, 1, 9]), ([4], [7]), ([2, 1, 3], [2, 8, 5]), ([1], [1]), ([3, 3], [3, 9])],
)
def test_rows_are_numbered_as_a_loop_would(query_lens: list[int], seq_lens: list[int]) -> None:
    checked = check_batch(Batch(query_lens=query_lens, seq_lens=seq_lens), sum(query_lens), None)
    pairs = [
        (request, position)
        for request, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(s - q, s)
    ]
    assert list(zip(checked.owners.tolist(), checked.positions.tolist(), strict=True)) == pairs


def buffers() -> StepBuffers:
    return StepBuffers(max_tokens=8, max_reqs=3, blocks_per_request=5, device=CPU)


def test_filled_buffers_hold_the_step_and_inert_padding() -> None:
    step = buffers()
    step.fill(check_batch(Batch(query_lens=[1, 1, 6]), 8, CACHE), 8)  # leave stale values
    step.fill(check_batch(Batch(query_lens=[2, 1], seq_lens=[6, 1]), 3, CACHE), 5)
    assert step.num_tokens.tolist() == [3]
    assert step.slot_mapping[:5].tolist() == [8, 9, 12, 0, 0]
    assert step.token_to_req[:5].tolist() == [0, 0, 1, 3, 3]
    assert step.kv_lens[:5].tolist() == [5, 6, 1, 0, 0]
    assert step.query_start_loc.tolist() == [0, 2, 3, 3]
    assert step.seq_lens.tolist() == [6, 1, 0]
    assert step.block_tables[:2, :2].tolist() == [[1, 2], [3, 0]]
    assert step.block_tables[3].tolist() == [0] * 5


@pytest.mark.parametrize(
    "field", ["owners", "seq_lens", "positions", "slot_mapping", "block_tables"]
)
def test_a_fill_that_is_cut_short_is_not_taken_for_done_by_the_next(field: str) -> None:
    one = check_batch(Batch(query_lens=[2, 1], block_tables=[[6, 7], [8]]), 3, CACHE)
    two = check_batch(Batch(query_lens=[1, 3], block_tables=[[8], [9]]), 4, CACHE)
    step, fresh = buffers(), buffers()
    for filled in (step, fresh):
        filled.fill(one, 5)
    bad: Any = {"block_tables": np.full((2, 1), "x"), "positions": np.full(1, "x")}
    with pytest.raises((TypeError, ValueError)):
        step.fill(two._replace(**{field: bad.get(field, ["x"] * 4)}), 8)
    step.fill(one, 5)
    for name in ("num_tokens", "query_start_loc", "seq_lens"):
        assert torch.equal(getattr(step, name), getattr(fresh, name)), name
    for name in ("slot_mapping", "token_to_req", "kv_lens"):
        assert torch.equal(getattr(step, name)[:5], getattr(fresh, name)[:5]), name
    assert step.block_tables[:2, :1].tolist() == [[6], [8]]


def test_tables_that_only_look_alike_as_bytes_are_filled_in() -> None:
    step = buffers()
    step.fill(check_batch(Batch(query_lens=[5], block_tables=[[6, 7]]), 5, CACHE), 5)
    equal = check_batch(Batch(query_lens=[5], block_tables=[[6, 7]]), 5, CACHE)
    step.fill(equal, 5)
    assert step.block_tables[:2, :2].tolist() == [[6, 7], [0, 0]]
    step.fill(check_batch(Batch(query_lens=[1, 1], block_tables=[[6], [7]]), 2, CACHE), 2)
    assert step.block_tables[:2, :1].tolist() == [[6], [7]]


def test_a_context_has_all_that_contexts_have() -> None:
    step, batch = buffers(), check_batch(Batch(query_lens=[2], extras={"a": 1}), 2, CACHE)
    context, other = step.context(batch, 4, None), step.context(batch, 8, None, 1)
    assert all(hasattr(context, name) for name in ForwardContext.__slots__)
    assert (context.padded_tokens, context.num_tokens, context.query_lens) == (4, 2, [2])
    assert (context.extras, context.uniform_query_len) == ({"a": 1}, None)
    no_extras: Any = batch._replace(extras=None)
    assert step.context(no_extras, 4, None).extras == {}
    context.in_segment = True
    assert (other.padded_tokens, other.in_segment, other.uniform_query_len) == (8, False, 1)


def test_a_length_that_the_buffers_cannot_hold_is_refused() -> None:
    with pytest.raises(BatchError, match="got 2147483648; lengths are kept in 32 bits"):
        check_batch(Batch(query_lens=[1, 1], seq_lens=[2**31, 1]), 2, None)
    assert check_batch(Batch(query_lens=[1], seq_lens=[2**31 - 1]), 1, None).seq_lens[0] > 0


def test_a_wide_table_is_cut_to_the_width_that_a_request_can_use() -> None:
    step = buffers()
    wide = [[6, 0, 0, 0, 0, 0, 0, 99]]
    step.fill(check_batch(Batch(query_lens=[1], block_tables=wide), 1, CACHE), 1)
    assert step.block_tables[0].tolist() == [6, 0, 0, 0, 0]


# ---- through a runner ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    with pcgsvc.load_runner(
        [
            "model=llama",
            "model.num_layers=1",
            "compiler=eager",
            "capture.sizes=[4,8]",
            "cache.mode=off",
        ]
    ) as runner:
        yield runner


def state(runner: Any) -> list[torch.Tensor]:
    workspace = runner.memory
    step = workspace.step
    return [
        *workspace.buffers.values(),
        step.num_tokens,
        step.slot_mapping,
        step.token_to_req,
        step.kv_lens,
        step.block_tables,
        *workspace.attention.kv_cache,
    ]


@pytest.mark.parametrize(
    "call",
    [
        {"batch": Batch(query_lens=[])},
        {"batch": Batch(query_lens=[2, 0, 1])},
        {"batch": Batch(query_lens=[2])},
        {"batch": Batch(query_lens=[3], block_tables=[[0]])},
        {"batch": Batch(query_lens=[3], slot_mapping=[1, 2, 3])},
        {"input_ids": torch.zeros(2, dtype=torch.long)},
        {"input_ids": torch.zeros(3)},
        {"input_ids": torch.tensor([1, 2, 3]).to_sparse()},
        {"input_ids": [1, 2, 3]},
        {"input_ids": torch.zeros(3, 1, dtype=torch.long)},
        {"input_ids": torch.zeros(0, dtype=torch.long), "positions": torch.zeros(0).long()},
        {"nonsense": 3},
    ],
    ids=str,
)
def test_a_refused_call_leaves_every_buffer_as_it_was(llama: Any, call: dict[str, Any]) -> None:
    good = {"input_ids": torch.tensor([5, 6, 7]), "positions": torch.arange(3)}
    llama(**good)
    before = [t.clone() for t in state(llama)]
    stats = llama.stats()
    with pytest.raises(BatchError):
        llama(**{**good, **call})
    assert all(torch.equal(a, b) for a, b in zip(before, state(llama), strict=True))
    assert llama.stats() == stats


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_by_name(llama: Any, layout: torch.layout) -> None:
    ids = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2])], layout=layout)
    with pytest.raises(BatchError, match="input_ids: got a nested tensor, a dense one is needed"):
        llama(ids, torch.arange(2))


def test_metadata_is_filled_only_where_the_batch_is_another_one(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, filled = StepBuffers.fill, list[list[int]]()

    def counted(self: StepBuffers, batch: CheckedBatch, padded_tokens: int) -> None:
        filled.append([*batch.seq_lens])
        fill(self, batch, padded_tokens)

    monkeypatch.setattr(StepBuffers, "fill", counted)
    first = llama.memory.geometry.first_free_block
    tables, lens = [[first], [first + 1]], [3, 5]
    inputs = torch.tensor([5, 6]), torch.tensor([2, 4])

    def call() -> int:
        filled.clear()
        llama(*inputs, batch=Batch(query_lens=[1, 1], seq_lens=lens, block_tables=tables))
        blocks, slots = llama.memory.step.block_tables, llama.memory.step.slot_mapping
        assert blocks[:2, 0].tolist() == [row[0] for row in tables]
        expected = [row[0] * 16 + n - 1 for row, n in zip(tables, lens, strict=True)]
        assert slots[:2].tolist() == expected
        return len(filled)

    assert [call(), call()] == [1, 0]
    tables[1][0] = first + 2
    assert [call(), call()] == [1, 0]
    lens[0] += 1
    assert [call(), call()] == [1, 0]
    llama(*inputs)  # one request of two rows in scratch blocks
    assert call() == 1
    llama(torch.zeros(20).long(), torch.arange(20))  # no graph serves so many
    assert call() == 1

    checked = check_batch(
        Batch(query_lens=[1, 1], seq_lens=lens, block_tables=tables), 2, llama.memory.geometry
    )
    for fills in (1, 0):
        filled.clear()
        llama(*inputs, batch=checked)
        assert len(filled) == fills


def test_a_checked_batch_of_another_cache_or_of_lost_tokens_is_refused(llama: Any) -> None:
    inputs, own = (torch.tensor([5, 6]), torch.tensor([2, 4])), llama.memory.geometry
    tables = [[own.first_free_block], [own.first_free_block + 1]]
    lens = Batch(query_lens=[1, 1], seq_lens=[3, 5])
    named = replace(lens, block_tables=tables)
    wanted = llama(*inputs, batch=check_batch(named, 2, replace(own)))  # an equal one will do
    refused = [
        (check_batch(named, 2, replace(own, num_blocks=9999)), "it was checked for CacheGeometry"),
        (check_batch(lens, 2, None), "it was checked for None, the runner has CacheGeometry"),
        (check_batch(lens, 2, own), "no block_tables; without them a request is in scratch"),
    ]
    for checked, words in refused:
        for call in (lambda b: llama(*inputs, batch=b), lambda b: llama.prepare(2, b)):
            with pytest.raises(BatchError, match=words):
                call(checked)
    assert torch.equal(llama(*inputs, batch=named), wanted)


def test_host_values_of_the_context_are_copies() -> None:
    seen: list[Any] = []

    @pcgsvc.splitting_op("batch::taking", mutates_args=("x",))
    def taking(x: torch.Tensor) -> None:
        context = pcgsvc.current_context()
        seen.append((context.query_lens, context.seq_lens_host))
        for lens in seen[-1]:
            lens.append(99)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch.ops.batch.taking(y)
        return y

    config = pcgsvc.load_config(["capture.sizes=[4]", "compiler=eager", "cache.mode=off"])
    with pcgsvc.build_runner(
        forward, (torch.ones(2, 3),), dynamic_dims={"x": 0}, config=config
    ) as runner:
        seen.clear()
        for batch in (None, None, *[Batch(query_lens=[1, 1], seq_lens=[2, 3])] * 2):
            runner(torch.ones(2, 3), batch=batch)
    assert seen == [([2, 99], [2, 99])] * 2 + [([1, 1, 99], [2, 3, 99])] * 2
