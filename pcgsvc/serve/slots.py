"""Continuous batching over a fixed number of slots: what a front of your own drives.

In: prompts, started when the caller likes. Out: new tokens, step by step. A step holds one token of
every continuation that is past its prompt and, in what room is left, the next chunks of prompts. No
serving engine: nothing waits here, nothing is evicted, and who starts when is the caller's choice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pcgsvc.errors import BatchError, ConfigError, PcgError
from pcgsvc.events import span
from pcgsvc.forward.sampling import Sampling
from pcgsvc.serve.continuation import Continuation, NewToken
from pcgsvc.serve.launches import Launched, Launcher
from pcgsvc.serve.steps import StepRunner, checked_ids, checked_text, largest_step
from pcgsvc.serve.text import TextStream


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
        self._launcher = Launcher(runner, runner.blocks, self._tables, self.max_step_tokens)
        self._launched: deque[Launched] = deque()
        """Steps whose tokens nobody has been given yet."""

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
            BatchError: the prompt is empty, too long, no whole characters or has a token that the
                model lacks, or `max_new_tokens` is no whole number of at least 1.
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
            prompt = tokenizer.encode(checked_text(prompt, "prompts: got"))
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

        It has no more than a slot and blocks after it; the next step that is launched runs it.
        """
        if continuation.finished is not None or continuation.slot >= 0:
            raise PcgError("start: the continuation is running, or over; prepare another one.")
        with self._runner.lock:
            self._runner.ensure_open()
            if not self._free:
                return False
            blocks = self._blocks.allocate(self._blocks.blocks_for(continuation.max_length))
        if blocks is None:
            return False
        continuation.blocks, continuation.slot = blocks, self._free.pop()
        self._tables[continuation.slot, : len(blocks)] = blocks
        self.running.append(continuation)
        return True

    def cancel(self, continuation: Continuation) -> None:
        """End a continuation, wherever it is; its slot and blocks are free at once."""
        if continuation.finished is None:
            continuation.finished = "cancelled"
            self._release(continuation)

    def _release(self, continuation: Continuation) -> None:
        if continuation.slot < 0:
            return
        self.running.remove(continuation)
        self._free.append(continuation.slot)
        with self._runner.lock:
            self._blocks.release(continuation.blocks)
        continuation.slot, continuation.blocks = -1, []

    # -- steps --

    def step(self, meanwhile: Callable[[], object] | None = None) -> list[NewToken]:
        """Run one step of all that is running; empty where nothing is, or only chunks ran.

        A continuation that is over has let go of its slot. What the runner raises leaves everything
        as it was: the same step may be tried again. What a tokenizer raises cancels all.

        On CUDA the step after it is launched, too, before its tokens are waited for; the next call
        waits for that one. So what is started between the two calls runs one step later, and one
        that ends by an end token or a stop text has one more row in the step on its way.

        Args:
            meanwhile: called once in a step that runs something, under the runner's lock, when
                other threads delay the device least: on CUDA after the launches, before tokens are
                waited for; on the CPU, where a call ends with its work, before it. It may start and
                cancel; what it cancels is given nothing more.

        Raises:
            PcgError: as a call of the runner raises.
        """
        launched = self._launched
        if not self.running:
            launched.clear()
            return []
        with span("pcgsvc.step") as tell:
            with self._runner.lock:
                if meanwhile is not None and not self._is_async:
                    meanwhile()
                runs_ahead = self._is_async and not self._launcher.is_on_foreign_stream()
                while len(launched) < (2 if runs_ahead else 1):
                    before = launched[-1] if launched else Launched()
                    new = self._launcher.launch(self.running, before)
                    if new is None:
                        break
                    launched.append(new)
                if meanwhile is not None and self._is_async:
                    meanwhile()
                if not launched:  # all were cancelled meanwhile
                    return []
                ran = launched[0].ran
                tell(requests=len(ran), num_tokens=sum(ran.values()))
                if not runs_ahead:
                    launched[0].wait()
            ids = launched[0].tokens()
        try:
            given = self._accept(launched.popleft(), ids)
        except BaseException:  # who has taken a token, and whose text was lost, is not known
            self.close()
            raise
        for token in given:
            if token.continuation.finished is not None:
                self._release(token.continuation)
        return given

    def _accept(self, step: Launched, ids: Sequence[int]) -> list[NewToken]:
        """Note what a step has run, and give each continuation its token.

        Those that are over by now were run for nothing.
        """
        for continuation, count in step.ran.items():
            continuation.done += count
        return [
            NewToken(continuation, token, continuation.accept(token))
            for continuation, token in zip(step.places, ids, strict=True)
            if continuation.finished is None
        ]

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
        self._launched.clear()
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
