"""Which experts a row goes to, and how verification keeps two runs on one choice.

In: router logits. Out: expert numbers. Knows nothing of experts' weights or of processes.

The choice is a step function: two runs whose logits differ in the last bits (another kernel,
another row count) may send a row to different experts, and its result then differs by far more
than rounding (bf16, Inductor against eager, 200 rows of the tiny preset: 0.3 rather than 0.015).
Verification compares arithmetic, so its second run follows the first one's choice
wherever its own logits hold the two for equal; anywhere else it chooses for itself, and a router
that is wrong still shows.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch


class Choices:
    """The choices of one run, call by call."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []
        """Per call: expert numbers [N, K]."""


_RECORDING: contextvars.ContextVar[Choices | None] = contextvars.ContextVar(
    "pcgsvc_choices_recording", default=None
)
_FOLLOWING: contextvars.ContextVar[tuple[Iterator[torch.Tensor], float] | None] = (
    contextvars.ContextVar("pcgsvc_choices_following", default=None)
)


def choose(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the experts [N, K] of each row: those with the largest of its logits [N, X]."""
    own = logits.topk(top_k, dim=-1).indices
    recording, following = _RECORDING.get(), _FOLLOWING.get()
    if recording is not None:
        recording.taken.append(own)
    if following is None:
        return own
    earlier, tolerance = next(following[0]), following[1]
    lost = logits.gather(1, own).sum(-1) - logits.gather(1, earlier).sum(-1)
    near = lost <= tolerance * top_k * logits.abs().amax(-1)
    return torch.where(near[:, None], earlier, own)


@contextlib.contextmanager
def recorded_choices() -> Iterator[Choices]:
    """Note every choice of this thread for a block."""
    choices = Choices()
    token = _RECORDING.set(choices)
    try:
        yield choices
    finally:
        _RECORDING.reset(token)


@contextlib.contextmanager
def following(choices: Choices, tolerance: float) -> Iterator[None]:
    """Make the same calls choose as before for a block, up to near ties.

    `tolerance`: by how much of its largest logit a row's choice may be off.
    """
    token = _FOLLOWING.set((iter(choices.taken), tolerance))
    try:
        yield
    finally:
        _FOLLOWING.reset(token)
