"""Generation on the tiny llama: every kind of batch against a loop that recomputes everything."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_helpers import Words, generate_ids, load, logits_of, wanted

import pcgsvc
from pcgsvc.errors import BatchError, ConfigError

PROMPTS = [[5, 17, 200, 3], [9], [100, 101, 102, 103, 104, 105, 106, 107, 108, 11, 12], [42, 43]]
NEW = 6
MODES = ["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]


@pytest.fixture(scope="module", params=[(a, m) for a in ("paged", "varlen") for m in MODES])
def any_runner(request: pytest.FixtureRequest, programs: Path) -> Iterator[pcgsvc.Runner]:
    attention, mode = request.param
    with load(programs, attention=attention, mode=mode) as runner:
        yield runner


@pytest.fixture
def spoken(any_runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch) -> pcgsvc.Runner:
    monkeypatch.setattr(any_runner.request.bundle, "tokenizer", Words())
    return any_runner


def test_a_batch_of_prompts_gives_what_recomputing_each_gives(spoken: pcgsvc.Runner) -> None:
    # 18 prompt tokens against a largest size of 8: the third prompt is prefilled in chunks.
    texts = [" ".join(map(str, p)) for p in PROMPTS]
    spoken.reset_stats()
    assert spoken.generate(texts, NEW, return_ids=True) == wanted(PROMPTS, NEW)
    assert spoken.generate(texts[:1], 2) == [" ".join(map(str, wanted(PROMPTS[:1], 2)[0]))]
    resolved = spoken.report["mode"]
    if resolved["mixed"] != "none":
        assert spoken.stats()["fallbacks"] == []
    hits = {k.split(":")[0] for k in spoken.stats()["hits"]}
    assert hits == {resolved["decode"], resolved["mixed"]} - {"none"}


def test_a_mixed_batch_of_prefill_chunk_and_decode(any_runner: pcgsvc.Runner) -> None:
    runner = any_runner
    first = runner.memory.geometry.first_free_block  # type: ignore[union-attr]
    tables = [list(range(first + 4 * r, first + 4 * r + 4)) for r in range(3)]
    a, b, c = [7, 8, 9, 10, 11], [60, 61, 62, 63, 64, 65], [300, 301]

    def step(parts: list[tuple[int, list[int], int]]) -> torch.Tensor:
        """Run rows of (request, all its ids so far, how many of them are new)."""
        ids = [t for _, all_ids, n in parts for t in all_ids[-n:]]
        positions = [p for _, all_ids, n in parts for p in range(len(all_ids) - n, len(all_ids))]
        batch = pcgsvc.Batch(
            query_lens=[n for *_, n in parts],
            seq_lens=[len(all_ids) for _, all_ids, _ in parts],
            block_tables=[tables[r] for r, *_ in parts],
        )
        result: torch.Tensor = runner(torch.tensor(ids), torch.tensor(positions), batch=batch)
        return result

    got = step([(0, a, 5), (1, b[:2], 2)])  # prefill, and the first chunk of another
    torch.testing.assert_close(got[4], logits_of(a)[-1], rtol=1e-4, atol=1e-4)
    a = [*a, int(got[4].argmax())]
    got = step([(1, b, 4), (0, a, 1), (2, c, 2)])  # a chunk, a decode, a whole new one
    torch.testing.assert_close(got[:4], logits_of(b)[2:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[4], logits_of(a)[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[5:], logits_of(c), rtol=1e-4, atol=1e-4)
    got = step([(2, [*c, 4], 1), (0, [*a, 9], 1), (1, [*b, 1], 1)])  # uniform, another order
    for row, ids in zip(got, ([*c, 4], [*a, 9], [*b, 1]), strict=True):
        torch.testing.assert_close(row, logits_of(ids)[-1], rtol=1e-4, atol=1e-4)


def test_a_call_without_a_batch_is_one_new_request(any_runner: pcgsvc.Runner) -> None:
    for ids in (PROMPTS[2][:7], PROMPTS[0], PROMPTS[2]):  # the last one is uncaptured
        got = any_runner(torch.tensor(ids), torch.arange(len(ids)))
        torch.testing.assert_close(got, logits_of(ids), rtol=1e-4, atol=1e-4)


def test_calls_without_a_batch_do_not_touch_the_caller_s_blocks(any_runner: pcgsvc.Runner) -> None:
    geometry = any_runner.memory.geometry
    attention = any_runner.memory.attention
    assert geometry is not None
    assert attention is not None
    mine = [cache[:, geometry.first_free_block :] for cache in attention.kv_cache]
    before = [cache.clone() for cache in mine]
    any_runner(torch.tensor([1, 2, 3]), torch.arange(3))
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
    assert not any(cache[:, 0].any() for cache in attention.kv_cache)  # the null block


# ---- stops and limits ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(programs: Path) -> Iterator[pcgsvc.Runner]:
    with load(programs, **{"attention.max_model_len": 32}) as runner:
        yield runner


def test_an_end_token_ends_one_continuation_and_is_not_part_of_it(runner: pcgsvc.Runner) -> None:
    full = wanted(PROMPTS[:2], NEW)
    end = full[0][2]
    got = generate_ids(runner, PROMPTS[:2], NEW, end_ids=frozenset({end}))
    for have, want in zip(got, full, strict=True):
        cut = want.index(end) if end in want else NEW
        assert have == want[:cut]


def test_one_new_token_is_a_prefill_alone(runner: pcgsvc.Runner) -> None:
    assert generate_ids(runner, PROMPTS, 1) == wanted(PROMPTS, 1)


def test_the_longest_sequence_can_be_reached_and_not_passed(runner: pcgsvc.Runner) -> None:
    prompt = list(range(1, 27))
    assert generate_ids(runner, [prompt], 6) == wanted([prompt], 6)
    with pytest.raises(BatchError, match="max_model_len=32"):
        generate_ids(runner, [prompt], 7)


@pytest.mark.parametrize(
    ("prompts", "new"), [([], 3), ([[]], 3), ([[1], []], 3), ([[1]], 0), ([[1]], -1)]
)
def test_nothing_to_do_is_refused(runner: pcgsvc.Runner, prompts: Any, new: int) -> None:
    with pytest.raises(BatchError):
        generate_ids(runner, prompts, new)


def test_a_prompt_that_no_blocks_can_hold_is_refused_and_many_small_ones_take_turns(
    programs: Path,
) -> None:
    settings = {"attention.num_blocks": 1 + 16 + 16, "capture.sizes": "[1,2,4]"}
    with load(programs, **settings, **{"attention.max_model_len": 64}) as runner:
        assert runner.blocks is not None
        held = runner.blocks.allocate(runner.blocks.num_blocks - 3)
        assert held is not None
        prompts = [[5], [6, 7], [8], [9]] * 10  # of two blocks each: one at a time fits
        assert generate_ids(runner, prompts, 4) == wanted(prompts, 4)
        with pytest.raises(BatchError, match=r"KV blocks are held by other users.*num_blocks"):
            generate_ids(runner, [[1] * 20], 4)
        runner.blocks.release(held)
        assert generate_ids(runner, [[1] * 20], 4) == wanted([[1] * 20], 4)
        assert runner.blocks.num_free == runner.blocks.num_blocks


def test_more_prompts_than_requests_per_batch_are_served_by_graphs_all_the_same(
    programs: Path,
) -> None:
    prompts = [[5], [6, 7], [8], [9], [10, 11], [12], [13]]
    settings = {"attention.max_num_reqs": 3, "mode": "piecewise", "on_uncovered": "error"}
    with load(programs, **settings) as runner:
        assert generate_ids(runner, prompts, 3) == wanted(prompts, 3)
        assert runner.stats()["fallbacks"] == []


@pytest.mark.parametrize("reqs", [1, 2])
def test_a_small_limit_of_requests_skips_no_size(programs: Path, reqs: int) -> None:
    with load(programs, **{"attention.max_num_reqs": reqs, "mode": "piecewise"}) as runner:
        assert runner.report["graphs"]["skipped"] == []


def test_a_model_without_a_tokenizer_or_without_attention_says_so(runner: pcgsvc.Runner) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        runner.generate(["hello"])
    with (
        pcgsvc.load_runner(
            ["model=two_regions", "compiler=eager", "capture.sizes=[4]", "cache.mode=off"]
        ) as other,
        pytest.raises(ConfigError, match="no language model"),
    ):
        generate_ids(other, [[1]], 1)


def test_generating_twice_gives_the_same(runner: pcgsvc.Runner) -> None:
    first = generate_ids(runner, PROMPTS[:3], 4)
    runner(torch.tensor([1, 2, 3]), torch.arange(3))
    assert generate_ids(runner, PROMPTS[:3], 4) == first


def test_uniform_batches_of_two_tokens_use_full_graphs(programs: Path) -> None:
    """Speculative decoding: capture.uniform_query_len=2."""
    with load(programs, **{"capture.uniform_query_len": 2}) as runner:
        assert runner.plan(4, [2, 2]).mode.value == "full"
        assert runner.plan(4, [1, 3]).mode.value == "piecewise"
        first = runner.memory.geometry.first_free_block  # type: ignore[union-attr]
        a, b = [7, 8, 9, 10], [60, 61]
        tables = [[first, first + 1], [first + 2, first + 3]]
        runner(
            torch.tensor(a[:2] + b),
            torch.tensor([0, 1, 0, 1]),
            batch=pcgsvc.Batch(query_lens=[2, 2], block_tables=tables),
        )
        got = runner(
            torch.tensor(a[2:]),
            torch.tensor([2, 3]),
            batch=pcgsvc.Batch(query_lens=[2], seq_lens=[4], block_tables=tables[:1]),
        )
        torch.testing.assert_close(got, logits_of(a)[2:], rtol=1e-4, atol=1e-4)
        assert set(runner.stats()["hits"]) == {"full:2", "full:4"}


def test_threads_that_generate_wait_for_each_other(any_runner: pcgsvc.Runner) -> None:
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda p: generate_ids(any_runner, [p], NEW), PROMPTS[:3] * 2))
    assert [g for (g,) in got] == wanted(PROMPTS[:3], NEW) * 2


@pytest.mark.parametrize(
    ("prompts", "new", "words"),
    [
        ("1 2", 3, r"got one text.*generate\(\[text\]\)"),
        ([5], 3, "got 5, texts are needed"),
        ([b"1 2"], 3, "got b'1 2', texts are needed"),
        (b"1 2", 3, "got bytes; a list of texts"),
        (None, 3, "got NoneType; a list of texts"),
        (torch.tensor([[1, 2]]), 3, r"got Tensor; .*tensor\.tolist"),
        (["1 2"], 2.5, "max_new_tokens: got 2.5, a whole number"),
    ],
    ids=str,
)
def test_what_is_no_list_of_texts_is_refused(
    spoken: pcgsvc.Runner, prompts: Any, new: Any, words: str
) -> None:
    with pytest.raises(BatchError, match=words):
        spoken.generate(prompts, new)


def test_a_sampling_of_another_kind_is_refused(any_runner: pcgsvc.Runner) -> None:
    with pytest.raises(BatchError, match=r"sampling: got \{'top_k': 1\}; a pcgsvc.Sampling"):
        any_runner.generate([[5]], sampling={"top_k": 1}, return_ids=True)  # type: ignore[arg-type]
