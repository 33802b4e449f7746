"""Slots: continuous batching against each continuation alone; who holds which blocks when."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from generate_helpers import Words, load, wanted

import pcgsvc
from pcgsvc import Sampling, Slots
from pcgsvc.errors import BatchError, ConfigError, PcgError
from pcgsvc.serve import launches
from pcgsvc.serve.calls import Calls


@pytest.fixture(scope="module")
def runner() -> Iterator[pcgsvc.Runner]:
    settings = {"model.num_layers": 2, "attention.max_num_reqs": 8, "attention.max_model_len": 64}
    with load(**settings, **{"capture.sizes": "[1,2,4,8,16]"}) as runner:
        yield runner


@pytest.fixture(autouse=True)
def nothing_is_left_behind(runner: pcgsvc.Runner) -> Iterator[None]:
    yield
    assert runner.blocks is not None
    assert runner.blocks.num_free == runner.blocks.num_blocks


@pytest.fixture(params=[False, True], ids=["waited", "early"])
def is_async(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have slots launch steps as on CUDA, before the tokens of the one before are read; or not."""
    real = Slots.__init__

    def made(self: Slots, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self._is_async = request.param

    monkeypatch.setattr(Slots, "__init__", made)
    found: bool = request.param
    return found


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(512) for _ in range(draw.randint(1, 30))] for _ in range(count)]


@pytest.mark.usefixtures("is_async")
def test_forty_prompts_through_eight_slots_each_equal_the_one_made_alone(
    runner: pcgsvc.Runner,
) -> None:
    draw = random.Random(1)
    prompts = prompts_of(40)
    counts = [draw.randint(1, 9) for _ in prompts]
    with Slots(runner, max_requests=8) as slots:
        made = [slots.prepare(p, n) for p, n in zip(prompts, counts, strict=True)]
        most, given = 0, []
        for tokens in slots.run(made):
            most = max(most, len(slots.running))
            given += tokens
    for prompt, count, one in zip(prompts, counts, made, strict=True):
        assert one.new == wanted([prompt], count)[0]
        assert [t.token for t in given if t.continuation is one] == one.new
        assert one.finished == "length"
    assert most > 4


@pytest.mark.parametrize("most", [8, 11, 16])
def test_a_step_has_one_token_of_each_that_is_past_its_prompt_and_chunks_in_what_is_left(
    runner: pcgsvc.Runner, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[list[int], list[int]]] = []
    find = Calls.find

    def watched(self: Any, batch: Any, num_tokens: int) -> Any:
        steps.append((list(batch.query_lens), list(batch.seq_lens)))
        return find(self, batch, num_tokens)

    monkeypatch.setattr(Calls, "find", watched)
    prompts = prompts_of(20, seed=2)
    with Slots(runner, max_requests=5, max_step_tokens=most) as slots:
        made = [slots.prepare(p, 4) for p in prompts]
        for _ in slots.run(made):
            pass
    assert all(sum(lens) <= most and len(lens) <= 5 for lens, _ in steps)
    # Every prompt token runs once, and every new one but the last.
    assert sum(sum(lens) for lens, _ in steps) == sum(len(p) + 3 for p in prompts)
    assert any(len(set(lens)) > 1 for lens, _ in steps)
    assert [c.new for c in made] == wanted(prompts, 4)


@pytest.mark.usefixtures("is_async")
def test_a_drawn_continuation_does_not_depend_on_what_shares_its_steps(
    runner: pcgsvc.Runner,
) -> None:
    prompts = prompts_of(12, seed=3)
    samplings = [
        Sampling(temperature=0.5 + at / 8, top_k=at * 7, top_p=1 - at / 24, seed=at)
        if at % 3
        else Sampling(repetition_penalty=1 + at / 10)
        for at in range(12)
    ]

    def made(indices: list[int]) -> list[list[int]]:
        with Slots(runner) as slots:
            slots._is_async = slots._is_async and len(indices) > 1
            found = [slots.prepare(prompts[at], 8, samplings[at]) for at in indices]
            for _ in slots.run(found):
                pass
            return [c.new for c in found]

    together = made(list(range(12)))
    assert together == [made([at])[0] for at in range(12)]
    assert together != wanted(prompts, 8)


@pytest.mark.usefixtures("is_async")
def test_two_threads_with_slots_of_their_own_share_one_runner(runner: pcgsvc.Runner) -> None:
    def made(seed: int) -> list[list[int]]:
        with Slots(runner, max_requests=3) as slots:
            found = [slots.prepare(p, 5) for p in prompts_of(8, seed)]
            for _ in slots.run(found):
                pass
            return [c.new for c in found]

    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(made, [5, 6, 7]))
    assert got == [wanted(prompts_of(8, seed), 5) for seed in (5, 6, 7)]


@pytest.mark.usefixtures("is_async")
def test_a_cancelled_one_frees_its_slot_and_blocks_and_changes_no_other(
    runner: pcgsvc.Runner,
) -> None:
    assert runner.blocks is not None
    with Slots(runner, max_requests=2) as slots:
        a, b, c = (slots.prepare(p, 6) for p in ([5, 6], [7] * 20, [8, 9, 10]))
        assert slots.start(a)
        assert slots.start(b)
        assert not slots.start(c)
        slots.step()
        free = runner.blocks.num_free
        slots.cancel(b)
        slots.cancel(b)
        assert runner.blocks.num_free == free + runner.blocks.blocks_for(26)
        assert slots.start(c)
        while slots.running:
            slots.step()
        assert (a.finished, b.finished, c.finished) == ("length", "cancelled", "length")
        assert [a.new, c.new] == wanted([[5, 6], [8, 9, 10]], 6)
        with pytest.raises(PcgError, match="running, or over"):
            slots.start(b)
    assert slots.step() == []


@pytest.mark.usefixtures("is_async")
def test_a_step_that_raises_can_be_tried_again(
    runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("lost")

    with Slots(runner) as slots:
        one = slots.prepare([5, 6, 7], 3)
        slots.start(one)
        with monkeypatch.context() as patch:
            patch.setattr(Calls, "_execute", fail)
            with pytest.raises(RuntimeError, match="lost"):
                slots.step()
        while slots.running:
            slots.step()
    assert one.new == wanted([[5, 6, 7]], 3)[0]


def test_meanwhile_is_called_once_a_step_where_the_device_has_work_next_or_already(
    runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    order: list[str | int] = []
    monkeypatch.setattr(runner._calls.counts, "listeners", [lambda _: order.append("call")])
    with Slots(runner, max_requests=1, max_step_tokens=4) as slots:
        one = slots.prepare(list(range(1, 7)), 3)
        slots.start(one)
        given = [slots.step(lambda: order.append(len(one.new))) for _ in range(4)]
        assert slots.step(lambda: order.append("nothing runs")) == []
    assert [len(tokens) for tokens in given] == [0, 1, 1, 1]
    assert one.new == wanted([list(range(1, 7))], 3)[0]
    if is_async:  # two chunks; then one step while the one before is waited for; none at the end
        assert order == ["call", "call", 0, "call", 0, "call", 1, 2]
    else:
        assert order == [0, "call", 0, "call", 1, "call", 2, "call"]


@pytest.mark.usefixtures("is_async")
def test_a_step_whose_continuations_are_all_cancelled_meanwhile_gives_nothing(
    runner: pcgsvc.Runner,
) -> None:
    with Slots(runner) as slots:
        for prompt in ([5, 6, 7], [8]):
            slots.start(slots.prepare(prompt, 3))
        assert slots.step(slots.close) == []
        assert slots.running == []
        one = slots.prepare([5, 6, 7], 3)
        slots.start(one)
        while slots.running:
            slots.step()
    assert one.new == wanted([[5, 6, 7]], 3)[0]


@pytest.mark.usefixtures("is_async")
def test_meanwhile_that_raises_leaves_the_step_to_be_tried_again(runner: pcgsvc.Runner) -> None:
    with Slots(runner) as slots:
        one = slots.prepare([5, 6, 7], 3)
        slots.start(one)
        while slots.running:
            with pytest.raises(ZeroDivisionError):
                slots.step(lambda: 1 / 0)
            slots.step()
    assert one.new == wanted([[5, 6, 7]], 3)[0]


def test_a_step_that_was_launched_early_is_right_whatever_comes_between(
    runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts, cancels, ends, calls of others over its buffers, steps that fail and run anew."""
    draw, prompts, real, failed = random.Random(3), prompts_of(24, seed=4), launches.choose, []

    def choose(*arguments: Any) -> torch.Tensor:
        if draw.random() < 0.2:
            failed.append(arguments)
            raise RuntimeError("lost")
        return real(*arguments)

    monkeypatch.setattr(launches, "choose", choose)
    with Slots(runner, max_requests=6, max_step_tokens=9) as slots:
        monkeypatch.setattr(slots, "_is_async", True)
        ends = [Sampling(end_ids=frozenset(wanted([p], 4)[0][-1:])) for p in prompts]
        kinds = [ends[at] if at % 2 else Sampling() for at in range(len(prompts))]
        made = [
            slots.prepare(p, draw.randint(2, 12), s) for p, s in zip(prompts, kinds, strict=True)
        ]
        waiting = made.copy()
        while waiting or slots.running:
            if waiting and draw.random() < 0.3:
                slots.start(waiting[0])
                if waiting[0] in slots.running:
                    del waiting[0]
            if slots.running and draw.random() < 0.05:
                slots.cancel(draw.choice(slots.running))
            if draw.random() < 0.3:  # with the buffers of a step on its way
                rows = draw.randint(1, 8)
                runner(torch.zeros(rows, dtype=torch.int64), torch.arange(rows))
            with contextlib.suppress(RuntimeError):
                slots.step()
    assert failed
    assert {one.finished for one in made} == {"length", "cancelled", "end"}
    for one in made:
        whole = wanted([one.prompt], 12)[0]
        assert one.new == whole[: len(one.new)]
        if one.finished == "end":
            assert whole[len(one.new)] in one.sampling.end_ids


@pytest.mark.parametrize("is_async", [False, True])
def test_meanwhile_may_cancel_what_is_running_and_start_what_waits(
    runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    prompts = [[5, 17, 200], [9], [42, 43], [7]]
    with Slots(runner, max_requests=3) as slots:
        monkeypatch.setattr(slots, "_is_async", is_async)
        stays, leaves, last, late = (
            slots.prepare(prompt, count)
            for prompt, count in zip(prompts, (6, 6, 3, 5), strict=True)
        )
        for one in (stays, leaves, last):
            slots.start(one)
        steps, given = 0, list[pcgsvc.Continuation]()

        def meanwhile() -> None:
            nonlocal steps
            steps += 1
            if steps == 3:  # the third token of `last` would be its end
                slots.cancel(leaves)
                slots.cancel(last)
                assert slots.start(late)

        while slots.running:
            given += [token.continuation for token in slots.step(meanwhile)]
    for one in (leaves, last):
        assert (one.finished, len(one.new), given.count(one)) == ("cancelled", 2, 2)
    assert [stays.new, late.new] == [wanted([[5, 17, 200]], 6)[0], wanted([[7]], 5)[0]]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tokenizer_that_raises_ends_what_is_running(
    runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.setattr(runner.request.bundle, "tokenizer", Words())
    with Slots(runner) as slots:
        monkeypatch.setattr(slots, "_is_async", is_async)
        one, two = (slots.prepare([token], 4) for token in (5, 9))
        for continuation in (one, two):
            slots.start(continuation)
        slots.step()
        monkeypatch.setattr(one._stream, "push", lambda token: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            slots.step()
        assert (one.finished, two.finished, slots.step()) == ("cancelled", "cancelled", [])
        again = slots.prepare([9], 4)
        list(slots.run([again]))
        assert again.new == wanted([[9]], 4)[0]


def test_an_iterator_that_is_dropped_gives_everything_back(runner: pcgsvc.Runner) -> None:
    steps = runner.stream([5, 6, 7], 10)
    assert [next(steps).token for _ in range(3)] == wanted([[5, 6, 7]], 10)[0][:3]
    assert runner.generate([[5, 6, 7]], 4, return_ids=True) == wanted([[5, 6, 7]], 4)
    del steps


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ([], 1, "none may be empty"),
        ([1, 512], 1, "got token 512.*from 0 to 511"),
        ([-1], 1, "got token -1"),
        ([1.5], 1, "got token 1.5"),
        ([True], 1, "got token True"),
        ([1] * 60, 5, "60 tokens and 5 new ones are 65.*max_model_len=64"),
        ([1], 0, "max_new_tokens: got 0"),
        ([1], True, "max_new_tokens: got True"),
        (7, 1, "got 7, texts are needed, or lists of token ids"),
    ],
    ids=str,
)
def test_what_cannot_be_continued_is_refused_before_anything_runs(
    runner: pcgsvc.Runner, prompt: Any, count: Any, words: str
) -> None:
    with Slots(runner) as slots, pytest.raises(BatchError, match=words):
        slots.prepare(prompt, count)
    with pytest.raises(BatchError, match=words):
        runner.stream(prompt, count)


def test_text_and_stop_texts_need_a_tokenizer(runner: pcgsvc.Runner) -> None:
    for prompt, sampling in (("hello", None), ([1], Sampling(stop=("x",)))):
        with Slots(runner) as slots, pytest.raises(ConfigError, match="no tokenizer"):
            slots.prepare(prompt, 1, sampling)


@pytest.mark.parametrize(
    "settings",
    [{"max_requests": 0}, {"max_requests": 9}, {"max_step_tokens": 7}, {"max_step_tokens": 17}],
)
def test_slots_that_no_step_holds_are_refused(
    runner: pcgsvc.Runner, settings: dict[str, int]
) -> None:
    with pytest.raises(BatchError, match=r"are possible"):
        Slots(runner, **settings)


def test_blocks_go_to_one_owner_and_come_back_once(runner: pcgsvc.Runner) -> None:
    blocks = runner.blocks
    assert blocks is not None
    a, b = blocks.allocate(3), blocks.allocate(2)
    assert a is not None
    assert b is not None
    assert not set(a) & set(b)
    assert min(a + b) >= runner.report["kv_cache"]["scratch_blocks"] + 1
    assert blocks.allocate(blocks.num_free + 1) is None
    blocks.release(a)
    for wrong in (a, [b[0], b[0]]):
        with pytest.raises(PcgError, match="not held"):
            blocks.release(wrong)
    blocks.release(b)


# ---- text ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("is_async")
def test_stop_texts_and_end_tokens_end_the_text_before_them(
    runner: pcgsvc.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.request.bundle, "tokenizer", Words())
    full = wanted([[5, 17]], 8)[0]
    whole = " ".join(map(str, full))
    assert runner.generate(["5 17"], 8) == [whole]
    stop = str(full[4])
    cut = whole[: whole.index(stop)]
    assert runner.generate(["5 17"], 8, sampling=Sampling(stop=[stop, "no"])) == [cut]  # type: ignore[arg-type]
    given = list(runner.stream("5 17", 8, sampling=Sampling(stop=(stop,))))
    assert "".join(token.text for token in given) == cut
    assert given[-1].continuation.finished == "stop"
    with pytest.raises(BatchError, match=r"got '\\ud800' at 2, which is half of a surrogate pair"):
        runner.generate(["5 \ud800"], 8)
    ends = Sampling(end_ids=frozenset({full[3]}))
    at = full.index(full[3])
    assert runner.generate(["5 17"], 8, sampling=ends, return_ids=True) == [full[:at]]


def test_closed_runners_give_no_slots() -> None:
    other = load()
    slots = Slots(other)
    one = slots.prepare([1], 1)
    other.close()
    with pytest.raises(PcgError, match="closed"):
        slots.start(one)
    with pytest.raises(PcgError, match="closed"):
        Slots(other)


def test_rows_that_are_chosen_are_those_at_their_end(runner: pcgsvc.Runner) -> None:
    """A chunk that ends within its prompt gives no token."""
    with Slots(runner, max_requests=1, max_step_tokens=4) as slots:
        one = slots.prepare(list(range(1, 10)), 2)
        slots.start(one)
        assert [len(slots.step()) for _ in range(4)] == [0, 0, 1, 1]
    assert one.new == wanted([list(range(1, 10))], 2)[0]
    assert torch.is_grad_enabled()
