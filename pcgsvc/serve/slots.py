"""Continuous batching over a fixed number of slots: what a front of your own drives.

In: prompts, started when the caller likes. Out: new tokens, step by step. A step holds one token of
every continuation that is past its prompt and, in what room is left, the next chunks of prompts. No
serving engine: nothing waits here, nothing is evicted, and who starts when is the caller's choice.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pcgsvc.errors import BatchError, ConfigError, PcgError, UncoveredError
from pcgsvc.events import span
from pcgsvc.forward.batch import Batch
from pcgsvc.forward.sampling import Sampling
from pcgsvc.serve.prepared import PreparedCall
from pcgsvc.serve.sampling import choose
from pcgsvc.serve.steps import StepRunner, checked_ids, largest_step
from pcgsvc.serve.text import TextStream


class Continuation:
    """One prompt and what has become of it. Made by `Slots.prepare`; read, never written."""

    def __init__(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        end_ids: frozenset[int],
        stream: TextStream | None,
    ) -> None:
        self.prompt, self.max_new_tokens, self.sampling = prompt, max_new_tokens, sampling
        self.tokens = list(prompt)
        """Prompt and continuation, without an end token."""
        self.finished: str | None = None
        """Why it is over: `end` (an end token), `stop` (a stop text), `length` or `cancelled`."""
        self.random = random.Random(sampling.seed)
        self._end_ids, self._stream = end_ids, stream
        self._done = 0
        """Tokens whose keys are in the cache."""
        self._slot, self._blocks = -1, list[int]()

    def __repr__(self) -> str:
        """Return its lengths and how it stands; its tokens may be thousands."""
        state = self.finished or ("running" if self._slot >= 0 else "waiting")
        return f"Continuation({len(self.prompt)} + {len(self.new)} tokens, {state})"

    @property
    def new(self) -> list[int]:
        """The continuation's tokens, without an end token."""
        return self.tokens[len(self.prompt) :]

    @property
    def text(self) -> str:
        """The text of it that is settled; empty without a tokenizer."""
        return "" if self._stream is None else self._stream.text

    @property
    def _left(self) -> int:
        return len(self.tokens) - self._done

    def _accept(self, token: int) -> str:
        """Take the next token; return the text that it settles."""
        stream, text = self._stream, ""
        if token in self._end_ids:
            self.finished = "end"
        else:
            self.tokens.append(token)
            text = "" if stream is None else stream.push(token)
            if stream is not None and stream.stopped:
                self.finished = "stop"
            elif len(self.tokens) == len(self.prompt) + self.max_new_tokens:
                self.finished = "length"
        if stream is not None and self.finished is not None:
            text += stream.finish()
        return text


class NewToken(NamedTuple):
    """What a step gave one continuation."""

    continuation: Continuation
    token: int
    """Its next token; an end token is given here, and is not part of the continuation."""
    text: str
    """Text that became settled, in the order of the continuation; often empty, never split within
    a character."""


class Slots:
    """A fixed number of continuations that run at once, and the steps that advance them all.

    One thread at a time may use it, `prepare` aside; other threads may call the runner meanwhile.
    As a context manager, or by `close`, it gives back its KV blocks.

    Args:
        runner: of a language model; stays the caller's.
        max_requests: slots; at most, and by default, what one captured step holds.
        max_step_tokens: most rows of a step, at least `max_requests`: longer prompts are cut into
            chunks, which run beside the other continuations' tokens. None: the largest captured
            size. Less bounds the time of a step; more than the slots lets prompts in sooner.

    Raises:
        ConfigError: the runner is of no language model with attention.
        BatchError: a number is out of range.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        max_requests: int | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        runner.ensure_open()
        bundle, geometry = runner.request.bundle, runner.memory.geometry
        if not bundle.is_language_model or geometry is None or runner.blocks is None:
            raise ConfigError(
                "generate: the model is no language model with attention. Load one "
                "(pcgsvc.load), or call the runner itself."
            )
        self._runner, self._geometry, self._blocks = runner, geometry, runner.blocks
        self._is_async = runner.memory.device.type == "cuda"
        """Whether a call of the runner returns before its work is done."""
        self._tokenizer = bundle.tokenizer
        self._vocab_size = math.inf if bundle.vocab_size is None else bundle.vocab_size
        self.sampling = bundle.sampling or Sampling()
        """What continuations without a sampling of their own have: the checkpoint's, or greedy."""
        largest = largest_step(runner)
        most = min(runner.memory.max_reqs, largest)
        self.max_requests = _between("slots", max_requests, 1, most, most)
        """How many continuations run at once."""
        self.max_step_tokens = _between(
            "max_step_tokens", max_step_tokens, self.max_requests, largest, largest
        )
        """Most rows of one step."""
        self.running: list[Continuation] = []
        """Those that hold a slot, in the order in which they were started; not to be changed."""
        self._free = list(range(self.max_requests - 1, -1, -1))
        self._tables = np.zeros((self.max_requests, geometry.blocks_per_request), np.int64)
        self._decode: dict[int, PreparedCall | None] = {}
        """By row count, the steps of one token each; None: no graph serves them."""

    # -- one continuation --

    def prepare(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        *,
        live_text: bool = True,
    ) -> Continuation:
        """Check a prompt and return its continuation, which holds nothing yet; from any thread.

        Args:
            prompt: text, or token ids; nothing is added but what the tokenizer adds to text.
            max_new_tokens: most tokens of the continuation, at least 1.
            sampling: None: the checkpoint's own, or greedy if it has none.
            live_text: give text with every token; else all of it with the last one.

        Raises:
            BatchError: the prompt is empty, too long or has a token that the model lacks, or
                `max_new_tokens` is no whole number of at least 1.
            ConfigError: text was given or is asked for (`stop`), and there is no tokenizer.
        """
        sampling = self.sampling if sampling is None else sampling
        tokenizer = self._tokenizer
        if not isinstance(sampling, Sampling):
            raise BatchError(f"sampling: got {sampling!r}; a pcgsvc.Sampling is needed.")
        if tokenizer is None and (isinstance(prompt, str) or sampling.stop):
            raise ConfigError(
                "generate: this model has no tokenizer. Load a checkpoint with one (model.path), "
                "or pass token ids (return_ids=True) and no stop texts."
            )
        if isinstance(prompt, str) and tokenizer is not None:
            prompt = tokenizer.encode(prompt)
        ids = self._checked(prompt, max_new_tokens)
        ends, stream = sampling.end_ids, None
        if tokenizer is not None:
            ends = tokenizer.eos_token_ids if ends is None else ends
            stream = TextStream(tokenizer.decode, sampling.stop, live=live_text)
        return Continuation(ids, max_new_tokens, sampling, ends or frozenset(), stream)

    def _checked(self, prompt: Any, max_new_tokens: int) -> list[int]:
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise BatchError(
                f"max_new_tokens: got {max_new_tokens!r}, a whole number is needed, at least 1."
            )
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise BatchError(
                f"prompts: got {prompt!r}, texts are needed, or lists of token ids (of a tensor: "
                "tensor.tolist())."
            )
        if not prompt:
            raise BatchError("prompts: at least one is needed, and none may be empty.")
        ids = checked_ids(prompt, self._vocab_size, "prompts: got")
        length = len(prompt) + max_new_tokens
        if length > self._geometry.max_model_len:
            raise BatchError(
                f"prompts: {len(prompt)} tokens and {max_new_tokens} new ones are {length}; the "
                f"longest sequence is attention.max_model_len={self._geometry.max_model_len}."
            )
        needed, there = self._blocks.blocks_for(length), self._blocks.num_blocks
        if needed > there:
            raise BatchError(
                f"prompts: {length} tokens need {needed} KV blocks, and there are {there}; raise "
                "attention.num_blocks or attention.max_cache_bytes."
            )
        return ids

    def start(self, continuation: Continuation) -> bool:
        """Give a continuation a slot and all KV blocks that it may need; False: not now.

        It has no more than a slot and blocks after it; the next step runs it.
        """
        if continuation.finished is not None or continuation._slot >= 0:
            raise PcgError("start: the continuation is running, or over; prepare another one.")
        length = len(continuation.prompt) + continuation.max_new_tokens
        with self._runner.lock:
            self._runner.ensure_open()
            if not self._free:
                return False
            blocks = self._blocks.allocate(self._blocks.blocks_for(length))
        if blocks is None:
            return False
        continuation._blocks, continuation._slot = blocks, self._free.pop()
        self._tables[continuation._slot, : len(blocks)] = blocks
        self.running.append(continuation)
        return True

    def cancel(self, continuation: Continuation) -> None:
        """End a continuation, wherever it is; its slot and blocks are free at once."""
        if continuation.finished is None:
            continuation.finished = "cancelled"
            self._release(continuation)

    def _release(self, continuation: Continuation) -> None:
        if continuation._slot < 0:
            return
        self.running.remove(continuation)
        self._free.append(continuation._slot)
        with self._runner.lock:
            self._blocks.release(continuation._blocks)
        continuation._slot, continuation._blocks = -1, []

    # -- steps --

    def step(self, meanwhile: Callable[[], object] | None = None) -> list[NewToken]:
        """Run one step of all that is running; empty where nothing is, or only chunks ran.

        A continuation that is over has let go of its slot. What raises leaves everything as it was:
        the same step may be tried again.

        Args:
            meanwhile: called once in a step that runs something, under the runner's lock, when
                other threads delay the device least: on CUDA once the step is launched, before its
                tokens are waited for; on the CPU, where a call ends with its work, before it.

        Raises:
            PcgError: as a call of the runner raises.
        """
        rows = self._next_rows()
        if not rows:
            return []
        at_end = [at for at, (c, count) in enumerate(rows) if count == c._left]
        with (
            span("pcgsvc.step", requests=len(rows), num_tokens=sum(count for _, count in rows)),
            self._runner.lock,  # until the tokens are read: results may alias graph memory
        ):
            ids = self._run(rows, at_end, meanwhile)
        for continuation, count in rows:
            continuation._done += count
        given = [
            NewToken(rows[at][0], token, rows[at][0]._accept(token))
            for at, token in zip(at_end, ids, strict=True)
        ]
        for continuation, _, _ in given:
            if continuation.finished is not None:
                self._release(continuation)
        return given

    def _next_rows(self) -> list[tuple[Continuation, int]]:
        """Return how many tokens of which continuation are next; prompts come last."""
        room, rows = self.max_step_tokens, []
        for continuation in sorted(self.running, key=lambda c: c._left > 1):
            count = min(continuation._left, room)
            room -= count
            if count:
                rows.append((continuation, count))
        return rows

    def _run(
        self,
        rows: Sequence[tuple[Continuation, int]],
        at_end: Sequence[int],
        meanwhile: Callable[[], object] | None,
    ) -> list[int]:
        ids: list[int] = []
        positions: list[int] = []
        lens: list[int] = []
        for continuation, count in rows:
            done = continuation._done
            ids += continuation.tokens[done : done + count]
            positions += range(done, done + count)
            lens.append(done + count)
        width = self._blocks.blocks_for(max(lens))
        batch = Batch(
            query_lens=[count for _, count in rows],
            seq_lens=lens,
            block_tables=self._tables[[c._slot for c, _ in rows], :width],
        )
        ends = None
        if 0 < len(at_end) < len(ids):  # copied first: after the launch, a copy would wait for it
            last_rows = torch.from_numpy(np.cumsum(batch.query_lens)[at_end] - 1)
            ends = last_rows.to(self._runner.memory.device)
        if meanwhile is not None and not self._is_async:
            meanwhile()
        logits = self._logits([torch.tensor(ids), torch.tensor(positions)], batch)
        if meanwhile is not None and self._is_async:
            meanwhile()
        if not at_end:
            return []
        chosen = logits if ends is None else logits[ends]
        return choose(chosen, [rows[at][0] for at in at_end])

    def _logits(self, inputs: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
        """Run a step; one of a token each, which comes again and again, by a prepared call."""
        rows, runner = len(inputs[0]), self._runner
        is_decode = rows == len(batch.query_lens)
        call = self._decode.get(rows) if is_decode else None
        if call is not None:
            call.update(batch)
        elif is_decode and rows not in self._decode:
            with contextlib.suppress(UncoveredError):
                call = runner.prepare(rows, batch)
            self._decode[rows] = call
        if call is None:
            return runner(*[t.to(runner.memory.device) for t in inputs], batch=batch)
        for buffer, values in zip(call.inputs.values(), inputs, strict=True):
            buffer.copy_(values)
        logits: torch.Tensor = call.step()
        return logits

    def run(self, waiting: Iterable[Continuation]) -> Iterator[list[NewToken]]:
        """Run continuations of any number, in order, and yield what each step gave.

        One starts as soon as a slot and its blocks are free. Those that are not over when the
        iterator is closed, or a step raises, are cancelled.

        Raises:
            BatchError: the next one's blocks are held by others, and nothing is running here.
        """
        queue = deque(waiting)
        mine = list(queue)
        try:
            while queue or self.running:
                while queue and self.start(queue[0]):
                    queue.popleft()
                if not self.running:
                    raise BatchError(
                        f"prompts: {self._blocks.num_blocks - self._blocks.num_free} of "
                        f"{self._blocks.num_blocks} KV blocks are held by other users of the "
                        "runner; try again later, or raise attention.num_blocks."
                    )
                yield self.step()
        finally:
            for continuation in mine:
                self.cancel(continuation)

    def close(self) -> None:
        """Cancel what is running; twice is fine."""
        for continuation in list(self.running):
            self.cancel(continuation)

    def __enter__(self) -> Slots:
        """Return self; closed at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()


def _between(name: str, got: int | None, least: int, most: int, default: int) -> int:
    if got is None:
        return default
    if isinstance(got, bool) or not isinstance(got, int) or not least <= got <= most:
        raise BatchError(
            f"{name}: got {got!r}; {least} to {most} are possible (attention.max_num_reqs and the "
            "largest captured size bound it)."
        )
    return got
