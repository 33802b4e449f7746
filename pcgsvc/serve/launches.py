"""Steps of many continuations, launched before the tokens of the step before are known.

In: continuations that hold slots. Out: steps on their way, and their tokens. Who runs, and what
becomes of the tokens, is the caller's.

A token is on the device when the next step reads it, so that a device which works while the host
goes on need not wait for the host in between.

Shapes: R = continuations that are given a token, T = rows of a step, V = vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pcgsvc import torch_private
from pcgsvc.errors import UncoveredError
from pcgsvc.forward.batch import Batch
from pcgsvc.serve.blocks import BlockAllocator
from pcgsvc.serve.continuation import Continuation
from pcgsvc.serve.prepared import PreparedCall
from pcgsvc.serve.sampling import choose, queued
from pcgsvc.serve.steps import StepRunner


class Launched:
    """A step on its way; without arguments, of nothing.

    Args:
        ran: how many tokens of which continuation it runs, in the order of its rows.
        given: those that run the last of their tokens, and so are given one.
        tokens_R: the tokens, on the device that chooses them; None: of nobody.
    """

    def __init__(
        self,
        ran: dict[Continuation, int] | None = None,
        given: Sequence[Continuation] = (),
        tokens_R: torch.Tensor | None = None,
    ) -> None:
        self.ran, self.tokens_R = ran or {}, tokens_R
        self.places = {continuation: at for at, continuation in enumerate(given)}
        """Who is given a token, and where it is among them."""
        self._host, self._copied = tokens_R, None
        """The tokens on the host, once that event is done; None: at once."""
        if tokens_R is not None and tokens_R.is_cuda:
            self._host = torch.empty(tokens_R.shape, dtype=tokens_R.dtype, pin_memory=True)
            self._host.copy_(tokens_R, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tokens_R.device))

    def join(self) -> None:
        """Have what is queued from now on, on whatever stream, follow it."""
        if self._copied is not None and self.tokens_R is not None:
            torch.cuda.current_stream(self.tokens_R.device).wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the tokens are on the host."""
        if self._copied is not None:
            self._copied.synchronize()

    def tokens(self) -> list[int]:
        """Return the tokens, which are waited for."""
        self.wait()
        found: list[int] = [] if self._host is None else self._host.tolist()
        return found


class Launcher:
    """Launches the steps of one runner's slots; used under the runner's lock.

    Args:
        runner: of a language model.
        blocks: of its KV cache.
        tables: by slot, the KV blocks of the continuation that holds it.
        max_step_tokens: most rows of a step.
    """

    def __init__(
        self,
        runner: StepRunner,
        blocks: BlockAllocator,
        tables: npt.NDArray[np.int64],
        max_step_tokens: int,
    ) -> None:
        self._runner, self._blocks, self._tables = runner, blocks, tables
        self._max_step_tokens, self._device = max_step_tokens, runner.memory.device
        self._decode: dict[int, PreparedCall | None] = {}
        """By row count, the steps of one token each; None: no graph serves them."""

    def is_on_foreign_stream(self) -> bool:
        """Whether the current stream is not torch's.

        Others' calls then wait for the last call on it, not for what was queued behind that one: a
        token must be there before another thread may call the runner.
        """
        if self._device.type != "cuda":
            return False
        return torch_private.is_external_stream(torch.cuda.current_stream(self._device))

    def launch(self, running: Sequence[Continuation], before: Launched) -> Launched | None:
        """Launch the next step of what is running; None: the one before must come in first.

        Args:
            running: continuations that hold slots.
            before: the step on its way. A continuation that its token may end is run all the same;
                one that it ends for its length is not.
        """
        ran, given = self._next_rows(running, before)
        if not ran or any(c in before.places and c.sampling.repetition_penalty != 1 for c in given):
            return None  # which tokens are penalised, the host alone knows
        counts = np.array(list(ran.values()))
        ends = counts.cumsum()
        starts = [c.done + before.ran.get(c, 0) for c in ran]
        lens = counts + starts
        width = self._blocks.blocks_for(int(lens.max()))
        tables = self._tables[[c.slot for c in ran], :width]
        batch = Batch(query_lens=counts.tolist(), seq_lens=lens.tolist(), block_tables=tables)
        positions_T = np.arange(ends[-1]) + np.repeat(lens - ends, counts)
        logits_TV = self._run(batch, self._ids(ran, starts, before), torch.from_numpy(positions_T))
        if not given:
            return Launched(ran)
        if len(given) < len(logits_TV):
            last = dict(zip(ran, (ends - 1).tolist(), strict=True))
            logits_TV = logits_TV[queued([last[c] for c in given], self._device)]
        return Launched(ran, given, choose(logits_TV, given))

    def _next_rows(
        self, running: Sequence[Continuation], before: Launched
    ) -> tuple[dict[Continuation, int], list[Continuation]]:
        """Return how many tokens of which continuation are next, and who is given one.

        One of each that is past its prompt, and then chunks of prompts as there is room.
        """
        lefts = [
            (c, len(c.tokens) + (c in before.places) - c.done - before.ran.get(c, 0))
            for c in running
            if c not in before.places or len(c.tokens) + 1 < c.max_length
        ]
        ran: dict[Continuation, int] = {}
        given, room = list[Continuation](), self._max_step_tokens
        for continuation, left in sorted(lefts, key=lambda one: one[1] > 1):
            count = min(left, room)
            room -= count
            if count:
                ran[continuation] = count
                given += [continuation] if count == left else []
        return ran, given

    def _ids(
        self, ran: dict[Continuation, int], starts: Sequence[int], before: Launched
    ) -> torch.Tensor:
        """Return the tokens that a step runs [T], those that are on their way among them."""
        ids: list[int] = []
        to, of = list[int](), list[int]()
        for (continuation, count), start in zip(ran.items(), starts, strict=True):
            if continuation in before.places:
                to.append(len(ids))
                of.append(before.places[continuation])
                ids.append(0)
            else:
                ids += continuation.tokens[start : start + count]
        if before.tokens_R is None or not to:
            return queued(ids, self._device)
        before.join()
        if to == of == list(range(len(before.tokens_R))) and len(ids) == len(to):
            return before.tokens_R
        ids_T, to_R, of_R = (queued(numbers, self._device) for numbers in (ids, to, of))
        return ids_T.index_copy_(0, to_R, before.tokens_R[of_R])

    def _run(self, batch: Batch, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Run a step; one of a token each, which comes again and again, by a prepared call."""
        call, num_tokens = None, len(ids_T)
        if num_tokens == len(batch.query_lens):
            call = self._decode.get(num_tokens)
            if call is not None:
                call.update(batch)
            elif num_tokens not in self._decode:
                with contextlib.suppress(UncoveredError):
                    call = self._runner.prepare(num_tokens, batch)
                self._decode[num_tokens] = call
        if call is None:
            positions_T = positions_T.to(self._device, non_blocking=True)
            return self._runner(ids_T, positions_T, batch=batch)
        for buffer, values in zip(call.inputs.values(), (ids_T, positions_T), strict=True):
            buffer.copy_(values, non_blocking=True)
        logits_TV: torch.Tensor = call.step()
        return logits_TV
