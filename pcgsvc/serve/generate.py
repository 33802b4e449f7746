"""Generation: a small batch builder that drives a runner for language models.

In: prompts. Out: continuations, greedy. Every kind of batch runs for real: prefill of several
requests of different lengths in one flat batch (in chunks where it is longer than the largest
capture size), then uniform decode. Not a serving engine: all prompts start together and nothing is
scheduled. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pcgsvc.errors import BatchError, ConfigError
from pcgsvc.forward.batch import Batch, CacheGeometry
from pcgsvc.serve.steps import StepRunner, largest_step


@dataclass(kw_only=True)
class Request:
    """One prompt and what has become of it."""

    prompt: list[int]
    blocks: list[int]
    """KV blocks, enough for the prompt and all new tokens."""
    done: int = 0
    """Tokens whose keys are in the cache."""
    new: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and continuation."""
        return [*self.prompt, *self.new]


def generate(
    runner: StepRunner,
    prompts: Sequence[str],
    max_new_tokens: int = 16,
    *,
    return_ids: bool = False,
) -> Any:
    """Continue prompts greedily.

    Args:
        runner: of a language model with a tokenizer. Other threads' calls wait until all is
            generated. The KV blocks from `first_free_block` on are used: a caller that keeps
            sequences of its own in them must not generate in between.
        prompts: texts; nothing is added to them but what the tokenizer adds.
        max_new_tokens: most tokens per prompt, at least 1.
        return_ids: return token ids instead of text.

    Returns:
        Per prompt the continuation only, special tokens left out; stops at an end token.

    Raises:
        ConfigError: the model has no tokenizer or is no language model.
        BatchError: no prompt, an empty one, or more KV blocks needed than there are.
    """
    runner.ensure_open()
    tokenizer = runner.request.bundle.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "generate: this model has no tokenizer. Use model=smollm2, or generate_ids(...)."
        )
    if isinstance(prompts, str):
        raise BatchError("prompts: got one text, a list of texts is needed: generate([text]).")
    for text in prompts:
        if not isinstance(text, str):
            raise BatchError(f"prompts: got {text!r}, texts are needed; or generate_ids(...).")
    ids = [tokenizer.encode(text) for text in prompts]
    out = generate_ids(runner, ids, max_new_tokens, end_ids=tokenizer.eos_token_ids)
    return out if return_ids else [tokenizer.decode(o) for o in out]


def generate_ids(
    runner: StepRunner,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end_ids: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """Continue token ids greedily; an end token ends a continuation and is not part of it."""
    runner.ensure_open()
    geometry = runner.memory.geometry
    if not runner.request.bundle.is_language_model or geometry is None:
        raise ConfigError("generate: the model is no language model with attention.")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise BatchError(
            f"max_new_tokens: got {max_new_tokens!r}, a whole number is needed, at least 1."
        )
    requests = _requests(prompts, max_new_tokens, geometry)
    with runner.lock:  # the blocks are ours from the first step to the last
        _run(runner, requests, max_new_tokens, end_ids)
    return [[t for t in r.new if t not in end_ids] for r in requests]


def _run(
    runner: StepRunner, requests: list[Request], max_new_tokens: int, end_ids: frozenset[int]
) -> None:
    max_reqs = runner.memory.max_reqs
    for chunk in _chunks(requests, largest_step(runner), max_reqs):
        _step(runner, chunk)
    running = requests
    while running:
        running = [r for r in running if len(r.new) < max_new_tokens and r.new[-1] not in end_ids]
        for first in range(0, len(running), max_reqs):
            _step(runner, [(r, 1) for r in running[first : first + max_reqs]])


def _requests(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, geometry: CacheGeometry
) -> list[Request]:
    if not prompts or not all(len(p) for p in prompts):
        raise BatchError("prompts: at least one is needed, and none may be empty.")
    first, requests = geometry.first_free_block, []
    for ids in prompts:
        length = len(ids) + max_new_tokens
        if length > geometry.max_model_len:
            raise BatchError(
                f"prompts: {len(ids)} tokens and {max_new_tokens} new ones are {length}; the "
                f"longest sequence is attention.max_model_len={geometry.max_model_len}."
            )
        count = -(-length // geometry.block_size)
        requests.append(Request(prompt=list(ids), blocks=list(range(first, first + count))))
        first += count
    if first > geometry.num_blocks:
        raise BatchError(
            f"prompts: {first - geometry.first_free_block} KV blocks are needed, "
            f"{geometry.num_blocks - geometry.first_free_block} are free; raise "
            "attention.num_blocks or attention.max_cache_bytes."
        )
    return requests


def _chunks(
    requests: Sequence[Request], most: int, max_reqs: int
) -> Iterator[list[tuple[Request, int]]]:
    """Cut the prompts, in order, into flat batches of at most `most` rows, `max_reqs` requests."""
    chunk: list[tuple[Request, int]] = []
    room = most
    for request in requests:
        left = len(request.prompt)
        while left:
            take = min(left, room)
            chunk.append((request, take))
            left -= take
            room -= take
            if not room or len(chunk) == max_reqs:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def _step(runner: StepRunner, rows: Sequence[tuple[Request, int]]) -> None:
    """Run the next `count` tokens of each request; whoever is at its end gets a new token."""
    device = runner.memory.device
    ids: list[int] = []
    positions: list[int] = []
    for request, count in rows:
        ids += request.tokens[request.done : request.done + count]
        positions += range(request.done, request.done + count)
        request.done += count
    width = max(len(r.blocks) for r, _ in rows)
    batch = Batch(
        query_lens=[count for _, count in rows],
        seq_lens=[r.done for r, _ in rows],
        block_tables=[[*r.blocks, *([0] * (width - len(r.blocks)))] for r, _ in rows],
    )
    logits = runner(
        torch.tensor(ids, device=device), torch.tensor(positions, device=device), batch=batch
    )
    ends = torch.tensor([count for _, count in rows]).cumsum(0) - 1
    tops = logits[ends.to(device)].argmax(-1).tolist()
    for (request, _), token in zip(rows, tops, strict=True):
        if request.done == len(request.tokens):
            request.new.append(token)
