"""Sentence vectors: a small batch builder that drives a runner for encoders.

In: texts. Out: one vector each: the mean of the text's hidden rows, scaled to length 1, or what the
checkpoint's `EmbeddingSpec` says instead. Not a serving engine: texts are packed in their order,
nothing is scheduled. Knows nothing of graphs.

Pooling lies outside the graphs, behind the runner's cut: a step has as many result rows as tokens,
and vectors are as many as requests. What is pooled are true rows only, whatever size was replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from pcgsvc.errors import BatchError, ConfigError
from pcgsvc.events import span
from pcgsvc.forward.batch import Batch
from pcgsvc.forward.bundle import EmbeddingSpec
from pcgsvc.serve.steps import StepRunner, checked_ids, checked_text, largest_step


def embed(
    runner: StepRunner, texts: Sequence[str | Sequence[int]], *, truncate: bool = False
) -> torch.Tensor:
    """Return one vector per text.

    Args:
        runner: of an encoder (`model=minilm`, `model=encoder`).
        texts: at least one; an empty text is its special tokens. Each gets the checkpoint's
            default prompt in front, if it has one. Lists of token ids, prompt and special tokens
            included, are taken as they are, and need no tokenizer.
        truncate: cut a text that is too long; otherwise it is an error.

    Returns:
        [texts, E] float32 on the runner's device, each of length 1 unless the checkpoint lists no
        Normalize; the caller's own.

    Raises:
        ConfigError: the model is no encoder, or texts were given and it has no tokenizer.
        BatchError: no text, one that is too long or no whole characters, or a token that the model
            lacks.
    """
    spec, limit = _spec(runner), _limit(runner)
    if isinstance(texts, str):
        raise BatchError("embed: got one text, a list of texts is needed: embed([text]).")
    if not texts:
        raise BatchError("embed: got no text, at least one is needed.")
    most = limit if truncate else None
    ids = [_tokens(spec, at, text, most) for at, text in enumerate(texts)]
    for at, text in enumerate(ids):
        if not 1 <= len(text) <= limit:
            raise BatchError(
                f"embed: text {at} has {len(text)} tokens, 1 to {limit} are possible (the model "
                f"takes {spec.max_length}, attention.max_model_len is "
                f"{runner.request.config.attention.max_model_len}); pass truncate=True to cut "
                "texts."
            )
    chunks = _chunks(ids, largest_step(runner), runner.memory.max_reqs)
    with span("pcgsvc.embed", texts=len(ids)):
        return torch.cat([_step(runner, chunk) for chunk in chunks])


def _tokens(spec: EmbeddingSpec, at: int, text: str | Sequence[int], most: int | None) -> list[int]:
    """Return the token ids of one text, which may be some already; no more than `most`."""
    if isinstance(text, str):
        if spec.encode is None:
            raise ConfigError(
                "embed: this encoder has no tokenizer. Use model=minilm, or pass token ids."
            )
        return spec.encode(checked_text(text, f"embed: text {at} has"), most)
    if isinstance(text, bytes) or not isinstance(text, Sequence):
        raise BatchError(f"embed: got {text!r}; texts are needed, or lists of token ids.")
    return checked_ids(text, spec.vocab_size, f"embed: text {at} has")[:most]


def pool(
    hidden: torch.Tensor, lengths: Sequence[int], pooling: str = "mean", normalize: bool = True
) -> torch.Tensor:
    """Return one vector [E] in fp32 per request: of its rows of hidden [T, E], see `POOLINGS`."""
    counts = torch.tensor(lengths, device=hidden.device)
    if pooling == "mean":
        out = torch.segment_reduce(hidden.float(), "mean", lengths=counts, axis=0, unsafe=True)
    else:
        ends = counts.cumsum(0)
        out = hidden[ends - (counts if pooling == "cls" else 1)].float()
    return functional.normalize(out, dim=-1) if normalize else out


def _spec(runner: StepRunner) -> EmbeddingSpec:
    runner.ensure_open()
    spec = runner.request.bundle.embedding
    if spec is None:
        raise ConfigError(
            "embed: this model gives no sentence vectors; load one that does: model=minilm or "
            "model=encoder."
        )
    return spec


def _limit(runner: StepRunner) -> int:
    stated = runner.request.config.attention.max_model_len
    longest = _spec(runner).max_length
    return longest if stated is None else min(longest, stated)


def _chunks(
    ids: Sequence[Sequence[int]], most: int, max_reqs: int
) -> Iterator[list[Sequence[int]]]:
    """Pack whole texts, in order, into batches of at most `most` rows and `max_reqs` requests.

    A text that is longer than `most` is a batch of its own, which no graph serves.
    """
    chunk: list[Sequence[int]] = []
    for text in ids:
        if chunk and (sum(map(len, chunk)) + len(text) > most or len(chunk) == max_reqs):
            yield chunk
            chunk = []
        chunk.append(text)
    yield chunk


def _step(runner: StepRunner, chunk: Sequence[Sequence[int]]) -> torch.Tensor:
    """Run one batch of whole texts and pool it."""
    spec, lengths = _spec(runner), [len(text) for text in chunk]
    device = runner.memory.device
    ids = torch.tensor([token for text in chunk for token in text], device=device)
    positions = torch.tensor([at for length in lengths for at in range(length)], device=device)
    with runner.lock:  # with outputs=view, nobody may call between the run and the pooling
        hidden = runner(ids, positions, torch.zeros_like(ids), batch=Batch(query_lens=lengths))
        return pool(hidden, lengths, spec.pooling, spec.normalize)
