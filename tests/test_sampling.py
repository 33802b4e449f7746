"""Sampling against transformers' own processors; draws and ranges; text as it comes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcgsvc import Sampling
from pcgsvc.errors import BatchError
from pcgsvc.serve.sampling import choose, probabilities
from pcgsvc.serve.text import TextStream

transformers = pytest.importorskip("transformers")


@dataclass
class Row:
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(0))


def theirs(logits_V: torch.Tensor, row: Row) -> torch.Tensor:
    """Return the scores that transformers draws from."""
    s, processors = row.sampling, transformers.LogitsProcessorList()
    if s.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if not s.is_greedy:
        processors.append(transformers.TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        processors.append(transformers.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(s.top_p))
    scores: torch.Tensor = processors(torch.tensor([row.tokens]), logits_V[None].clone())[0]
    return scores


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3, top_k=5),
    Sampling(temperature=2.0, top_p=0.7),
    Sampling(temperature=0.8, top_k=40, top_p=0.95),
    Sampling(temperature=1.3, top_k=1000, top_p=0.01),
    Sampling(temperature=100.0, top_k=1),
]


def test_probabilities_equal_transformers_for_rows_of_any_settings_together() -> None:
    logits = torch.randn(len(SAMPLINGS), 300, generator=torch.Generator().manual_seed(1)) * 4
    logits[1, :20] = logits[1].max()  # ties at the edge of top-k all stay
    ordered, ids = probabilities(logits, SAMPLINGS)
    got = torch.zeros_like(ordered).scatter(-1, ids, ordered)
    for at, sampling in enumerate(SAMPLINGS):
        want = theirs(logits[at], Row(sampling, [0])).softmax(-1)
        assert torch.equal(got[at] > 0, want > 0)
        torch.testing.assert_close(got[at], want)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_counts_in_greedy_choice_as_in_transformers(penalty: float) -> None:
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(2))
    rows = [Row(Sampling(repetition_penalty=penalty), [at, 3, 3, 29]) for at in range(8)]
    before = logits.clone()
    want = [int(theirs(logits[at], row).argmax()) for at, row in enumerate(rows)]
    assert choose(logits, rows).tolist() == want
    assert want != logits.argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_draws_come_as_often_as_their_probabilities_say() -> None:
    row = Row(Sampling(temperature=0.7, top_k=6, top_p=0.9, seed=0))
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    want = theirs(logits[0], row).softmax(-1)
    count = 4000
    drawn = choose(logits.expand(count, -1), [row] * count)
    share = drawn.bincount(minlength=12) / count
    assert (share > 0).sum() > 2
    assert (share[want == 0] == 0).all()
    assert (share - want).abs().max() < 4 * (0.25 / count) ** 0.5


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_that_may_be_drawn(uniform: float) -> None:
    class Fixed(random.Random):
        def random(self) -> float:
            return uniform

    logits = torch.arange(50.0)[None]
    row = Row(Sampling(temperature=1.0, top_k=3), [], Fixed())
    assert choose(logits, [row]).tolist() == [47 if uniform == 0 else 49]


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_row_without_probabilities_gets_its_highest_logit_and_changes_no_other(
    odd: float, cut: dict[str, Any]
) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(4))
    alone = int(choose(logits[1:], [Row(Sampling(temperature=1.0, seed=5, **cut))]))
    logits[0, 6] = odd
    rows = [Row(Sampling(temperature=1.0, seed=5, **cut)) for _ in range(2)]
    assert choose(logits, rows).tolist() == [6, alone]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (-1, 0.001, 101, float("nan"), float("inf"), "1", True)],
        *[("top_p", v) for v in (0, -0.1, 1.1, float("nan"), None)],
        *[("top_k", v) for v in (-1, 1.5, True)],
        *[("repetition_penalty", v) for v in (0, -1, 1000, float("nan"))],
        *[("seed", v) for v in (-1, 0.5, "x")],
        *[("stop", v) for v in ("x", [""], [1], 5)],
        *[("end_ids", v) for v in (5, ["x"], [True])],
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BatchError, match=f"^{name}: got "):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_p", 2, "a number above 0 and at most 1 is needed."),
        ("top_k", -1, "a whole number from 0 to 2147483648 is needed."),
        ("temperature", -1, "0, or a number from 0.01 to 100 is needed."),
        ("stop", "x", "a list of texts is needed."),
    ],
)
def test_a_refused_value_is_answered_with_what_there_is(name: str, value: Any, words: str) -> None:
    with pytest.raises(BatchError, match=f"got {value!r}; {words}$"):
        Sampling(**{name: value})


# ---- text ----------------------------------------------------------------------------------------


def decode(ids: list[int]) -> str:
    """Read ids as bytes of UTF-8."""
    return bytes(ids).decode(errors="replace")


def until_stopped(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first stop text that is complete, and whether there is one."""
    for end in range(1, len(text) + 1):
        begins = [at for stop in stops if (at := text.find(stop, 0, end)) >= 0]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(
    st.text(st.sampled_from("abé🙂"), max_size=30),
    st.lists(st.text(st.sampled_from("abé🙂"), min_size=1, max_size=4), max_size=3),
)
def test_what_was_given_never_changes_and_ends_before_the_first_stop_text(
    text: str, stops: list[str]
) -> None:
    stream, given_text = TextStream(decode, stops), ""
    for token in text.encode():
        given_text += stream.push(token)
        assert text.startswith(given_text)
        assert given_text == stream.text
        if stream.stopped:
            break
    given_text += stream.finish()
    assert given_text == stream.text
    assert (given_text, stream.stopped) == until_stopped(text, stops)


def test_text_that_no_stop_text_can_hold_back_is_given_at_once() -> None:
    stream = TextStream(decode, ["xyz"])
    assert [stream.push(token) for token in b"abxyqx"] == ["a", "b", "", "", "xyq", ""]
    assert stream.finish() == "x"


def test_bytes_that_are_no_text_come_out_as_the_tokenizer_reads_them() -> None:
    stream = TextStream(decode)
    got = "".join(stream.push(token) for token in [65, 0xF0, 0x9F]) + stream.finish()
    assert got == decode([65, 0xF0, 0x9F])


def test_text_that_nobody_watches_is_decoded_once() -> None:
    calls = []
    stream = TextStream(lambda ids: calls.append(1) or decode(ids), live=False)
    assert [stream.push(token) for token in b"abc"] == ["", "", ""]
    assert stream.finish() == stream.text == "abc"
    assert len(calls) == 1
