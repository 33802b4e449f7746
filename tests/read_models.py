"""Modules that read values of all kinds while they are traced, for the tests of guards."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from core_helpers import WIDTH, attended
from torch import nn


class Kind(enum.Enum):
    PLUS = 1
    MINUS = 2


class Settings:
    """A plain object, as configurations are."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def doubled(self) -> float:
        return self.scale * 2


class Base(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        for number, parameter in enumerate(self.parameters()):
            values = torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
            parameter.data.copy_(values * (number + 1))


class Flexible(Base):
    """Reads all kinds of things."""

    def __init__(
        self,
        *,
        eps: float = 1e-5,
        heads: int = 2,
        act: Any = torch.relu,
        nest: Any = None,
        kind: Kind = Kind.PLUS,
        settings: Settings | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.heads, self.act, self.kind = eps, heads, act, kind
        self.nest = nest or {"a": [1, (2, 3.0)]}
        self.settings = settings or Settings(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.up(x) * self.factor + self.eps)
        x = x.view(-1, self.heads, WIDTH // self.heads).softmax(-1).flatten(1)
        x = attended(x) * self.nest["a"][1][1]
        x = x * self.settings.doubled()
        return x + 1 if self.kind is Kind.PLUS else x - 1


def closure(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * value


def defaulted(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by
