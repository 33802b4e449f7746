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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from pcgsvc.errors import BatchError, ConfigError, PcgError, UncoveredError
from pcgsvc.events import span
from pcgsvc.forward.batch import Batch, CheckedBatch, check_batch
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

    def _left_after(self, count: int) -> int:
        """Return how many tokens are left to run after `count` more, and what they then give."""
        left = len(self.tokens) - self._done
        return left - count if count < left else 1

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


class _Plan(NamedTuple):
    """A step, as far as it is known before the tokens of the step before it are."""

    rows: list[tuple[Continuation, int]]
    """How many tokens of which continuation; prompts come last."""
    at_end: list[int]
    """Of `rows`, those that run the last of their tokens, and so are given one."""
    batch: Batch | CheckedBatch
    positions: torch.Tensor
    ends: torch.Tensor | None
    """Where in the result the rows of `at_end` are; None: they are all of it, or there are none."""
    call: PreparedCall | None
    """What runs it; it has the batch and the positions, unless others called the runner since."""


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
        self._next: _Plan | None = None
        """The next step, if who runs stays the same."""

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
        self._next = None
        return True

    def cancel(self, continuation: Continuation) -> None:
        """End a continuation, wherever it is; its slot and blocks are free at once."""
        if continuation.finished is None:
            continuation.finished = "cancelled"
            self._release(continuation)

    def _release(self, continuation: Continuation) -> None:
        if continuation._slot < 0:
            return
        self._next = None
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
                other threads delay the device least: on CUDA once the step is launched and the next
                one is planned, before tokens are waited for; on the CPU, where a call ends with its
                work, before it.

        Raises:
            PcgError: as a call of the runner raises.
        """
        if not self.running:
            return []
        plan, self._next = self._next, None
        with self._runner.lock:  # until the tokens are read: results may alias graph memory
            if plan is None:
                plan = self._planned({})
            num_tokens = sum(count for _, count in plan.rows)
            with span("pcgsvc.step", requests=len(plan.rows), num_tokens=num_tokens):
                ids, following = self._run(plan, meanwhile)
        for continuation, count in plan.rows:
            continuation._done += count
        given = [
            NewToken(plan.rows[at][0], token, plan.rows[at][0]._accept(token))
            for at, token in zip(plan.at_end, ids, strict=True)
        ]
        self._next = following
        for continuation, _, _ in given:
            if continuation.finished is not None:
                self._release(continuation)
        return given

    def _run(
        self, plan: _Plan, meanwhile: Callable[[], object] | None
    ) -> tuple[list[int], _Plan | None]:
        """Return the tokens of `at_end`, and the step that follows if none of them ends anything.

        Where the device works meanwhile, that one is planned before the tokens are waited for.
        """
        rows, following = plan.rows, None
        ids = torch.tensor([t for c, n in rows for t in c.tokens[c._done : c._done + n]])
        if not self._is_async and meanwhile is not None:
            meanwhile()
        logits = self._logits(plan, ids)
        chosen = [rows[at][0] for at in plan.at_end]
        if self._is_async:
            if all(c.max_new_tokens > len(c.tokens) + 1 - len(c.prompt) for c in chosen):
                following = self._planned(dict(rows))
            if meanwhile is not None:
                meanwhile()
        if not chosen:
            return [], following
        return choose(logits if plan.ends is None else logits[plan.ends], chosen), following

    def _planned(self, ran: Mapping[Continuation, int]) -> _Plan:
        """Return the step after one that ran so many tokens of each, and prepare its call."""
        rows: list[tuple[Continuation, int]] = []
        at_end, room = list[int](), self.max_step_tokens
        lefts = [(c, c._left_after(ran[c]) if c in ran else c._left_after(0)) for c in self.running]
        for continuation, left in sorted(lefts, key=lambda one: one[1] > 1):
            count = min(left, room)
            room -= count
            if count:
                at_end += [len(rows)] if count == left else []
                rows.append((continuation, count))
        counts = np.array([count for _, count in rows])
        ends = counts.cumsum()
        lens = counts + [c._done + ran.get(c, 0) for c, _ in rows]
        width = self._blocks.blocks_for(int(lens.max()))
        batch = Batch(
            query_lens=counts.tolist(),
            seq_lens=lens.tolist(),
            block_tables=self._tables[[c._slot for c, _ in rows], :width],
        )
        num_tokens = int(ends[-1])
        positions = torch.from_numpy(np.arange(num_tokens) + np.repeat(lens - ends, counts))
        call = self._decode_call(num_tokens, batch) if num_tokens == len(rows) else None
        if call is not None:
            _write(call, "positions", positions)
            return _Plan(rows, at_end, batch, positions, None, call)
        device, at = self._runner.memory.device, None
        checked = check_batch(batch, num_tokens, self._geometry)
        if 0 < len(at_end) < num_tokens:
            at = torch.from_numpy(ends[at_end] - 1).to(device, non_blocking=True)
        positions = positions.to(device, non_blocking=True)
        return _Plan(rows, at_end, checked, positions, at, None)

    def _decode_call(self, num_tokens: int, batch: Batch) -> PreparedCall | None:
        """Return the call of steps of one token each, which come again and again, updated."""
        call = self._decode.get(num_tokens)
        if call is not None:
            call.update(batch)
        elif num_tokens not in self._decode:
            with contextlib.suppress(UncoveredError):
                call = self._runner.prepare(num_tokens, batch)
            self._decode[num_tokens] = call
        return call

    def _logits(self, plan: _Plan, ids: torch.Tensor) -> torch.Tensor:
        call = plan.call
        if call is None:
            on_device = ids.to(self._runner.memory.device, non_blocking=True)
            return self._runner(on_device, plan.positions, batch=plan.batch)
        if not call.is_updated:
            call.update(plan.batch)
            _write(call, "positions", plan.positions)
        _write(call, "ids", ids)
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


def _write(call: PreparedCall, name: Literal["ids", "positions"], values: torch.Tensor) -> None:
    """Write token ids or positions, the two inputs of a language model, for the next step."""
    ids, positions = call.inputs.values()
    (ids if name == "ids" else positions).copy_(values, non_blocking=True)


def _between(name: str, got: int | None, least: int, most: int, default: int) -> int:
    if got is None:
        return default
    if isinstance(got, bool) or not isinstance(got, int) or not least <= got <= most:
        raise BatchError(
            f"{name}: got {got!r}; {least} to {most} are possible (attention.max_num_reqs and the "
            "largest captured size bound it)."
        )
    return got
