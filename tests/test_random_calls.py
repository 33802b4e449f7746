"""Random calls, prepared steps, refusals and failures: each result is that of an uncaptured runner.

The caller keeps its lengths and tables, and changes them in place; the other runner gets copies.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import WIDTH, build
from generate_helpers import load

import pcgsvc
from pcgsvc import Batch
from pcgsvc.errors import BatchError, PcgError, UncoveredError
from pcgsvc.forward.batch import check_batch

BLOCKS, LONGEST = 4, 15
"""KV blocks of a request, and the most tokens in them."""


class FailedStepError(Exception):
    """What a step of a replay is made to raise."""


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Other padding means other rounding, no more."""
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


class Caller:
    """Draws what is done next, and compares."""

    def __init__(self, runner: pcgsvc.Runner, plain: pcgsvc.Runner, seed: int) -> None:
        self.rng, self.runner, self.plain = random.Random(seed), runner, plain
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.prepared: Any = None
        self.updated: Any = None
        self.renew()

    def renew(self) -> None:
        """Take other requests, as lists, arrays or tensors, some of them views."""
        rng, count = self.rng, self.rng.randint(1, 5)
        first = self.runner.memory.geometry.first_free_block  # type: ignore[union-attr]
        blocks = rng.sample(range(first, first + 24), BLOCKS * count)
        is_uniform = rng.random() < 0.6
        lens = [1 if is_uniform else rng.randint(1, 3) for _ in range(count)]
        seqs = [n + rng.randint(0, 6) for n in lens]
        tables = [blocks[at::count] for at in range(count)]
        wide = np.zeros((2 * count, 2 * BLOCKS), np.uint16)
        wide[::2, ::2] = tables
        self.lens, self.seqs, self.tables = rng.choice(
            [
                (lens, seqs, tables),
                (np.array(lens, np.uint8), np.array(seqs, np.int32), wide[::2, ::2]),
                (torch.tensor(lens), torch.tensor(seqs), torch.tensor(tables)),
            ]
        )

    def copies(self) -> Any:
        """Return the lengths and tables as they are now."""
        tables = [[int(n) for n in row] for row in self.tables]
        return [int(n) for n in self.lens], [int(n) for n in self.seqs], tables

    def batch(self) -> Batch:
        extras = {"a": 1} if self.rng.random() < 0.1 else {}
        return Batch(
            query_lens=self.lens, seq_lens=self.seqs, block_tables=self.tables, extras=extras
        )

    def inputs(self, lens: list[int], seqs: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = [self.rng.randrange(512) for _ in range(sum(lens))]
        ends = zip(lens, seqs, strict=True)
        positions = [at for n, end in ends for at in range(end - n, end)]
        return torch.tensor(ids), torch.tensor(positions)

    def wanted(self, given: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what the uncaptured runner gives, of copies and with fresh buffers."""
        memory = self.plain.memory
        memory.step = memory.step_buffers(memory.max_tokens, memory.max_reqs)
        lens, seqs, tables = given
        batch = Batch(query_lens=lens, seq_lens=seqs, block_tables=tables)
        checked = check_batch(batch, len(ids), memory.geometry)
        found: torch.Tensor = self.plain(ids, positions, batch=checked)
        return found

    # -- what is done --

    def call(self) -> None:
        given = self.copies()
        ids, positions = self.inputs(*given[:2])
        batch: Any = self.batch()
        if self.rng.random() < 0.2:
            batch = check_batch(batch, len(ids), self.runner.memory.geometry)
        wanted = self.wanted(given, ids, positions)
        if self.rng.random() < 0.2:
            self.fail(ids, positions, batch)
        with self.rng.choice([nullcontext, torch.no_grad, torch.inference_mode])():
            got = self.runner(ids, positions, batch=batch)
        same(got, wanted)
        self.kept.append((got, got.clone()))

    def fail(self, *given: Any) -> None:
        """Have a call fail in the middle, if it takes the entry that is chosen."""
        replays = list(self.runner._calls._replays.values())
        replay = self.rng.choice(replays)
        at, steps = self.rng.randrange(len(replay.steps)), replay.steps

        def raises() -> None:
            raise FailedStepError

        replay.steps = (*steps[:at], raises, *steps[at + 1 :])
        try:
            self.runner(*given[:2], batch=given[2])
        except FailedStepError:
            pass
        finally:
            replay.steps = steps

    def without_tables(self) -> None:
        lens = [self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 4))]
        ids, positions = self.inputs(lens, lens)
        batch = None if len(lens) == 1 else Batch(query_lens=lens)
        got = self.runner(ids, positions, batch=batch)
        same(got, self.wanted((lens, lens, None), ids, positions))

    def move(self) -> None:
        """Move on by a token, or set a length; swap two blocks, or two requests' blocks."""
        rng, kind = self.rng, self.rng.random()
        at, other = rng.randrange(len(self.seqs)), rng.randrange(len(self.seqs))
        if kind < 0.6:
            for request in range(len(self.seqs)):
                self.seqs[request] += 1 if self.seqs[request] < LONGEST else -5
        elif kind < 0.7:
            self.seqs[at] = rng.randint(int(self.lens[at]), LONGEST)
        elif kind < 0.8:
            row, (one, two) = self.tables[at], rng.sample(range(BLOCKS), 2)
            row[one], row[two] = int(row[two]), int(row[one])
        else:
            rows = self.copies()[2]
            for column in range(BLOCKS):
                self.tables[at][column] = rows[other][column]
                self.tables[other][column] = rows[at][column]

    def be_refused(self) -> None:
        lens, seqs, _ = self.copies()
        ids, positions = self.inputs(lens, seqs)
        batch, kind = self.batch(), self.rng.randrange(3)
        if kind == 0:
            batch.seq_lens = [999] * len(seqs)
        elif kind == 1:
            batch.block_tables = [[1] * BLOCKS for _ in seqs]
        else:
            batch.slot_mapping = [0] * len(ids)
        uses: list[Any] = [
            lambda: self.runner(ids, positions, batch=batch),
            lambda: self.runner.prepare(len(ids), batch),
        ]
        if self.prepared is not None:
            uses.append(lambda: self.prepared.update(batch))
        with pytest.raises(BatchError):
            self.rng.choice(uses)()

    def prepare(self) -> None:
        given = self.copies()
        try:
            if self.prepared is None or self.rng.random() < 0.4:
                self.prepared = self.runner.prepare(sum(given[0]), self.batch())
            else:
                self.prepared.update(self.batch())
        except (UncoveredError, BatchError):
            return
        self.updated = given

    def step(self) -> None:
        """Step, right or refused, though the caller has changed its memory since."""
        if self.prepared is None:
            return
        ids, positions = self.inputs(*self.updated[:2])
        self.prepared.inputs["input_ids"].copy_(ids)
        self.prepared.inputs["positions"].copy_(positions)
        if self.runner._calls.prepared is not self.prepared:
            with pytest.raises(PcgError, match="the runner was called since"):
                self.prepared.step()
            return
        if not self.prepared._is_updated:
            with pytest.raises(PcgError, match="moved the rows on"):
                self.prepared.step()
            return
        got = self.prepared.step()
        same(got, self.wanted(self.updated, ids, positions))
        with pytest.raises(PcgError, match="moved the rows on"):
            self.prepared.step()

    def load(self) -> None:
        norm = torch.ones_like(self.runner.model.module.state_dict()["norm.weight"])
        norm *= self.rng.choice([0.5, 1.0, 2.0])
        for runner in (self.runner, self.plain):
            runner.load_state_dict({"norm.weight": norm}, strict=False)


WORDS: dict[str, Any] = {
    "capture.sizes": "[1,2,4,8]",
    "model.num_layers": 1,
    "model.hidden_size": 64,
    "model.num_heads": 4,
    "attention.max_model_len": 32,
}


@pytest.mark.parametrize(
    "words",
    [
        {"mode": "full_and_piecewise", "debug.poison": "true"},
        {"mode": "piecewise", "capture.replay": "stitched"},
    ],
)
def test_whatever_callers_do_results_are_those_of_an_uncaptured_runner(
    words: dict[str, Any],
) -> None:
    with load(**WORDS, **words) as runner, load(**WORDS, mode="none") as plain:
        caller = Caller(runner, plain, seed=1)
        caller.call()
        often = [caller.call, caller.move, caller.move, caller.prepare, caller.step]
        rarely = [caller.renew, caller.without_tables, caller.be_refused, caller.load]
        for _ in range(150):
            caller.rng.choice([*often * 3, *rarely])()
        for got, before in caller.kept:
            assert torch.equal(got, before)
        assert len(runner.stats()["hits"]) >= 3


@pcgsvc.splitting_op("randomcalls::scaled", mutates_args=("out",), support="never")
def scaled(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, pcgsvc.current_context().extras.get("scale", 1), out=out)


def scale(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.randomcalls.scaled(x + 1, out)
    return out


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("way", ["batch", "checked", "prepared"])
def test_extras_that_the_caller_fills_in_later_are_seen(way: str, rows: int) -> None:
    with build(scale, sizes=[4]) as runner:
        batch, x = Batch(query_lens=[rows]), torch.ones(rows, WIDTH)
        extras: Any = batch.extras
        prepared = runner.prepare(rows, batch) if way == "prepared" and rows < 4 else None
        given: Any = check_batch(batch, rows, None) if way == "checked" else batch
        for factor in (1, 3, 5):
            if prepared is None:
                got = runner(x, batch=given)
            else:
                prepared.update(batch)
                prepared.inputs["x"].copy_(x)
                got = prepared.step()
            assert (got == 2 * factor).all()
            extras["scale"] = factor + 2
