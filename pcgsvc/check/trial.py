"""Runs of the program and of the module on the same rows, without graphs and without padding.

In: a compiled model and its memory. Out: results and state of either. Model state and random
generators are left as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pcgsvc.check.tolerance import near_ties
from pcgsvc.config import Config
from pcgsvc.forward.batch import CheckedBatch
from pcgsvc.forward.request import Request, make_samples
from pcgsvc.forward.samples import Samples
from pcgsvc.forward.workspace import Workspace, preserved
from pcgsvc.ops.context import use_context
from pcgsvc.ops.expert_choice import following, recorded_choices
from pcgsvc.program.model import CompiledModel
from pcgsvc.program.program import Direct, Executor


@dataclass(frozen=True)
class Step:
    """What one run is given."""

    rows: int
    inputs: Mapping[str, torch.Tensor]
    batch: CheckedBatch


@dataclass(frozen=True)
class Trial:
    """Runs program and module on the same steps."""

    model: CompiledModel
    memory: Workspace
    samples: Samples
    config: Config

    @classmethod
    def of(cls, model: CompiledModel, memory: Workspace, request: Request) -> Trial:
        """Return a trial on inputs that neither capture nor verification sees."""
        samples = make_samples(request, memory, seed=request.config.seed + 2)
        return cls(model, memory, samples, request.config)

    def step(self, rows: int) -> Step:
        """Return a fresh step of so many rows."""
        return Step(rows, self.samples.inputs(rows), self.samples.batch(rows, uniform=False))

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the forward writes to."""
        return self.memory.bound(self.model.mutated)

    def program(self, step: Step, executor: Executor | None = None) -> list[torch.Tensor]:
        """Return what the program computes: see `_outcome`."""
        program = self.model.program.for_size(step.rows)
        values = self.memory.values(step.inputs, step.rows)
        return self._outcome(step, lambda: program.run(values, executor or Direct()))

    def plain(self, step: Step) -> list[torch.Tensor]:
        """Return what the module computes: see `_outcome`."""
        return self._outcome(step, lambda: self.model.run_module(step.inputs))

    def both(
        self, step: Step, call: Callable[[], Any] | None = None
    ) -> tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]]:
        """Return what the program computes, and a call that has the module compute it.

        Routers of the module choose as the program's did, where experts are close to each other.

        Args:
            step: what both are given.
            call: returns the forward's result in place of the program, such as a runner's call.
        """
        with recorded_choices() as choices:
            if call is None:
                got = self.program(step)
            else:
                got = self._outcome(step, lambda: self.model.results_of(call()))

        def plain() -> list[torch.Tensor]:
            with following(choices, near_ties(got)):
                return self.plain(step)

        return got, plain

    def _outcome(self, step: Step, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return copies of the results of a run and of the state after it.

        A forward that writes to its state runs twice in a row, since a wrong write may show in the
        next results only.
        """
        made: list[torch.Tensor] = []
        with (
            preserved(self.state),
            same_random_numbers(self.memory.device),
            self.memory.on_stream(),
            use_context(self.memory.unpadded_context(step.batch)),
        ):
            for _ in range(2 if self.state else 1):
                made += [tensor.clone() for tensor in run()]
                made += [tensor.clone() for tensor in self.state.values()]
        return made


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Run a block with torch's generators at one seed, and put them back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield


def generators(device: torch.device) -> list[torch.Tensor]:
    """Return copies of the states of torch's own random generators."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]
